"""`penstock.SyncClient`: the queue client for code that is not async, on the portal's loop."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from penstock.client.buffer import Item, PushBuffer
from penstock.client.client import Client
from penstock.client.consumer import Consumer, Handler
from penstock.client.messages import Address, Message
from penstock.client.queues import Transaction
from penstock.client.sync import Facade, Portal, blocking
from penstock.errors import Unavailable


class SyncPushBuffer(Facade[PushBuffer]):
    """A `PushBuffer` for plain code; `push` waits only while the buffer is full. Leaving a `with`
    block sends the rest, and raises when it cannot be sent.
    """

    def __init__(self, portal: Portal, buffer: PushBuffer) -> None:
        self._portal = portal
        self._async = buffer

    push = blocking(PushBuffer.push)
    flush = blocking(PushBuffer.flush)
    close = blocking(PushBuffer.close)
    __exit__ = blocking(PushBuffer.__aexit__)

    def __len__(self) -> int:
        return len(self._async)

    @property
    def refused(self) -> list[Any]:
        """As `PushBuffer.refused`."""
        return self._async.refused


class SyncClient(Facade[Client]):
    """`penstock.Client` for plain code: the same methods, without await.

    with SyncClient("http://broker:6632") as client:
        client.push("orders", {"id": 1})
        for message in client.take("orders"):
            client.ack(message)
    """

    def __init__(self, urls: str | Sequence[str] | None = None, **options: Any) -> None:
        """The options are those of `penstock.Client`."""
        self._portal = Portal()
        self._closed = False
        try:
            self._async = self._portal.make(lambda: Client(urls, **options))
        except BaseException:
            self._portal.close()
            raise

    push = blocking(Client.push)
    push_many = blocking(Client.push_many)
    push_items = blocking(Client.push_items)
    pop = blocking(Client.pop)
    ack = blocking(Client.ack)
    ack_each = blocking(Client.ack_each)
    give_back = blocking(Client.give_back)
    extend = blocking(Client.extend)
    trace = blocking(Client.trace)
    run = blocking(Client.run)
    configure = blocking(Client.configure)
    queues = blocking(Client.queues)
    describe = blocking(Client.describe)
    delete_queue = blocking(Client.delete_queue)
    clear = blocking(Client.clear)
    group = blocking(Client.group)
    groups = blocking(Client.groups)
    delete_group = blocking(Client.delete_group)
    seek = blocking(Client.seek)
    dead_letters = blocking(Client.dead_letters)
    requeue = blocking(Client.requeue)
    purge = blocking(Client.purge)

    def close(self, timeout: float = 10.0) -> list[Item]:
        """As `Client.close`: what the buffers could not send within `timeout` seconds."""
        if self._closed:
            return []
        self._closed = True
        unsent = self._portal.call(self._async.close, timeout)
        self._portal.close()
        return unsent

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        unsent = self.close()
        if unsent and kind is None:
            raise Unavailable(
                f"{len(unsent)} messages could not be sent before the client was closed"
            )

    def take(self, address: str | Address, **options: Any) -> Iterator[Message]:
        """As `Client.take`."""
        return self._portal.iterate(self._async.take(address, **options))

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """`with client.transaction() as tx`: leaving the block commits, an exception in it
        discards.
        """
        transaction = self._async.transaction()
        yield transaction
        self._portal.call(transaction.commit)

    def consumer(self, address: str | Address, **options: Any) -> Callable[[Handler], Consumer]:
        """As `Client.consumer`: the function below runs in threads of its own, `concurrency` of
        them at a time.
        """
        return self._async.consumer(address, **options)

    def stop(self) -> None:
        """End `run`; from another thread or from a handler."""
        self._portal.make(self._async.stop)

    def buffer(self, **options: Any) -> SyncPushBuffer:
        """As `Client.buffer`."""
        return SyncPushBuffer(
            self._portal, self._portal.make(lambda: self._async.buffer(**options))
        )
