"""`penstock.SyncClient`: the queue client for code that is not async, on the portal's event loop."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from penstock.client.buffer import Item, PushBuffer
from penstock.client.client import Client
from penstock.client.consumer import Consumer, Handler
from penstock.client.messages import Acked, Address, Message, Pushed
from penstock.client.queues import Transaction
from penstock.client.sync import Facade, Portal
from penstock.errors import Unavailable


class SyncPushBuffer(Facade):
    """A `PushBuffer` for plain code; `push` waits only while the buffer is full."""

    def __init__(self, portal: Portal, buffer: PushBuffer) -> None:
        self._portal, self._buffer = portal, buffer

    def __len__(self) -> int:
        return len(self._buffer)

    @property
    def refused(self) -> list[Any]:
        return self._buffer.refused

    def push(self, address: str | Address, payload: Any, **options: Any) -> str:
        return self._portal.call(self._buffer.push, address, payload, **options)

    def flush(self, timeout: float | None = None) -> None:
        self._portal.call(self._buffer.flush, timeout)

    def close(self, timeout: float | None = None) -> list[Item]:
        """As `PushBuffer.close`: what could not be sent in time. Leaving a `with` block raises
        instead.
        """
        return self._portal.call(self._buffer.close, timeout)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._portal.call(self._buffer.__aexit__, kind, error, trace)


class SyncClient(Facade):
    """`penstock.Client` for plain code: the same methods, without await."""

    def __init__(self, urls: str | Sequence[str] | None = None, **options: Any) -> None:
        self._portal = Portal()
        self._closed = False
        try:
            self._client = self._portal.make(lambda: Client(urls, **options))
        except BaseException:
            self._portal.close()
            raise

    def close(self, timeout: float = 10.0) -> list[Item]:
        """As `Client.close`: what the buffers could not send within `timeout` seconds."""
        if self._closed:
            return []
        self._closed = True
        left = self._portal.call(self._client.close, timeout)
        self._portal.close()
        return left

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        left = self.close()
        if left and kind is None:
            raise Unavailable(
                f"{len(left)} messages could not be sent before the client was closed"
            )

    def push(self, address: str | Address, payload: Any, **options: Any) -> Pushed:
        return self._portal.call(self._client.push, address, payload, **options)

    def push_many(
        self, address: str | Address, payloads: Iterable[Any], **options: Any
    ) -> list[Pushed]:
        return self._portal.call(self._client.push_many, address, payloads, **options)

    def push_items(self, items: Sequence[dict[str, Any]], **options: Any) -> list[Pushed]:
        return self._portal.call(self._client.push_items, items, **options)

    def pop(self, address: str | Address | None = None, **options: Any) -> list[Message]:
        return self._portal.call(self._client.pop, address, **options)

    def take(self, address: str | Address, **options: Any) -> Iterator[Message]:
        return self._portal.iterate(self._client.take(address, **options))

    def ack(
        self, message: Message | Sequence[Message], status: bool | str = True, **options: Any
    ) -> list[Acked]:
        return self._portal.call(self._client.ack, message, status, **options)

    def ack_each(
        self, answers: Sequence[tuple[Message, dict[str, Any]]], **options: Any
    ) -> list[Acked]:
        return self._portal.call(self._client.ack_each, answers, **options)

    def give_back(self, messages: Sequence[Message]) -> None:
        self._portal.call(self._client.give_back, messages)

    def extend(self, message: Message, seconds: int = 60) -> bool:
        return self._portal.call(self._client.extend, message, seconds)

    def trace(self, message: Message, data: Any, **options: Any) -> str:
        return self._portal.call(self._client.trace, message, data, **options)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """`with client.transaction() as tx`: leaving the block commits, an exception in it
        discards.
        """
        transaction = self._client.transaction()
        yield transaction
        self._portal.call(transaction.commit)

    def consumer(self, address: str | Address, **options: Any) -> Callable[[Handler], Consumer]:
        """As `Client.consumer`: the function below runs in threads of its own, `concurrency` of
        them at a time.
        """
        return self._client.consumer(address, **options)

    def run(self) -> None:
        """Run all consumers until `stop` is called, by another thread or by a handler."""
        self._portal.call(self._client.run)

    def stop(self) -> None:
        async def stop() -> None:
            self._client.stop()

        self._portal.call(stop)

    def buffer(self, **options: Any) -> SyncPushBuffer:
        return SyncPushBuffer(
            self._portal, self._portal.make(lambda: self._client.buffer(**options))
        )

    def configure(self, queue: str, **options: Any) -> dict[str, Any]:
        return self._portal.call(self._client.configure, queue, **options)

    def queues(self) -> list[dict[str, Any]]:
        return self._portal.call(self._client.queues)

    def describe(self, queue: str) -> dict[str, Any]:
        return self._portal.call(self._client.describe, queue)

    def delete_queue(self, queue: str) -> bool:
        return self._portal.call(self._client.delete_queue, queue)

    def clear(self, queue: str, partition: str | None = None) -> dict[str, Any]:
        return self._portal.call(self._client.clear, queue, partition)

    def group(self, group: str) -> dict[str, Any]:
        return self._portal.call(self._client.group, group)

    def delete_group(self, group: str, queue: str | None = None) -> dict[str, Any]:
        return self._portal.call(self._client.delete_group, group, queue)

    def purge(self, queue: str | None = None, **filters: Any) -> dict[str, Any]:
        return self._portal.call(self._client.purge, queue, **filters)

    def groups(self) -> list[dict[str, Any]]:
        return self._portal.call(self._client.groups)

    def seek(self, queue: str, group: str, to: Any, *, dry_run: bool = False) -> dict[str, Any]:
        return self._portal.call(self._client.seek, queue, group, to, dry_run=dry_run)

    def dead_letters(self, queue: str | None = None, **filters: Any) -> dict[str, Any]:
        return self._portal.call(self._client.dead_letters, queue, **filters)

    def requeue(self, queue: str | None = None, **filters: Any) -> dict[str, Any]:
        return self._portal.call(self._client.requeue, queue, **filters)
