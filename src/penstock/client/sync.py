"""`penstock.SyncClient`: the client for code that is not async, on the loop of a portal.

A method here is the async one under `blocking`, `iterating` or `wrapping`, with its signature and
its docstring.
"""

import signal
from collections.abc import Iterator
from typing import Any, Self

import msgspec

from penstock.client.admin import AdminClient, Routes, Schedules
from penstock.client.buffer import PushBuffer, Refusal, check_sent
from penstock.client.client import Client, limits_from_env, sigterm_is_free
from penstock.client.consumer import Consumer
from penstock.client.former_names import FormerMethods
from penstock.client.items import Item
from penstock.client.messages import Popped, Received, client_of
from penstock.client.portal import (
    ClosingFacade,
    Facade,
    blocking,
    blocking_as,
    forwarding,
    iterating,
    opened,
    taking,
    wrapping,
)
from penstock.client.producer import Delivery, Producer
from penstock.client.reader import Reader
from penstock.client.topic import Topic, TopicGroup
from penstock.client.transactions import Transaction, TransactionStep
from penstock.errors import PenstockError
from penstock.protocol.record_batch import Batch, Record


class SyncMessage(Received):
    """A message received through `SyncClient`. Answer it with one of its methods."""

    def ack(self) -> None:
        """Acknowledge the message. Raises `AckRefused` if the lease was lost; the message is then
        delivered again.
        """
        client_of(self).ack(self)

    def retry(self, reason: str | None = None, *, delay: float = 0.0) -> None:
        """Have the message delivered again after `delay` seconds, without counting an attempt."""
        client_of(self).ack(self, "retry", error=reason, delay=delay)

    def dead_letter(self, reason: str) -> None:
        """Move the message to the dead letters."""
        client_of(self).ack(self, "dlq", error=reason)

    def extend(self, seconds: int = 60) -> bool:
        """Lease the message for `seconds` from now. Returns False if the lease is lost."""
        return bool(client_of(self).extend(self, seconds))


class SyncPushBuffer(ClosingFacade[PushBuffer]):
    """`PushBuffer` without async. `push` waits only while the buffer is full. Leaving a `with`
    block sends the remaining messages, and raises if they cannot be sent.
    """

    push = blocking(PushBuffer.push)
    flush = blocking(PushBuffer.flush)
    close = blocking(PushBuffer.close)
    __exit__ = blocking(PushBuffer.__aexit__)

    def __len__(self) -> int:
        return len(self._async)

    @property
    def refused(self) -> list[Refusal]:
        """Same as `PushBuffer.refused`."""
        return self._async.refused


class SyncTransaction(Facade[Transaction]):
    """`Transaction` without async. Leaving the `with` block commits; an exception in it discards
    the transaction.
    """

    commit = blocking(Transaction.commit)
    __exit__ = blocking(Transaction.__aexit__)

    def __enter__(self) -> Transaction:
        return self._async

    @property
    def results(self) -> list[TransactionStep]:
        """The result of each step, after the commit."""
        return self._async.results


class SyncSchedules(Facade[Schedules]):
    """`Schedules` without async."""

    list = blocking(Schedules.list)
    get = blocking(Schedules.get)
    create = blocking(Schedules.create)
    pause = blocking(Schedules.pause)
    resume = blocking(Schedules.resume)
    run = blocking(Schedules.run)
    delete = blocking(Schedules.delete)


class SyncRoutes(Facade[Routes]):
    """`Routes` without async."""

    list = blocking(Routes.list)
    get = blocking(Routes.get)
    create = blocking(Routes.create)
    push = blocking(Routes.push)
    pause = blocking(Routes.pause)
    resume = blocking(Routes.resume)
    drain = blocking(Routes.drain)
    purge = blocking(Routes.purge)
    replay = blocking(Routes.replay)
    delete = blocking(Routes.delete)


class SyncProducer(ClosingFacade[Producer]):
    """`Producer` without async. `send` waits only while the buffer is full.

    with client.topic("orders").producer() as producer:
        producer.send_many(lines)
    """

    send = blocking(Producer.send)
    send_many = blocking(Producer.send_many)  # one crossing between the threads for all of them
    flush = blocking(Producer.flush)
    close = blocking(Producer.close)

    def offset(self, delivery: Delivery) -> int:
        """Wait until the record is stored and return its offset. Raises the error if it failed."""
        return self._portal.call(_result, delivery)

    @property
    def failure(self) -> PenstockError | None:
        """The first failure that neither `flush` nor `close` has raised yet."""
        return self._async.failure

    @property
    def stored(self) -> tuple[int, int | None, int | None]:
        """The number of stored records, and the offsets of the first and the last one."""
        return self._async.records, self._async.first_offset, self._async.last_offset

    def abort(self) -> None:
        """Stop at once. Records without an answer fail; the broker may have stored them."""
        self._portal.make(self._async.abort)


class SyncReader(ClosingFacade[Reader]):
    """`Reader` without async. Iterate over it for records, or over `batches()`."""

    complete = blocking(Reader.complete)
    close = blocking(Reader.close)

    @property
    def position(self) -> int | None:
        """The offset after the last record handed out; None before the first one."""
        return self._async.position

    def __iter__(self) -> Iterator[Record]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[Batch]:
        """Same as `Reader.batches`."""
        return self._portal.iterate(self._async.batches())


class SyncTopicGroup(Facade[TopicGroup]):
    """`TopicGroup` without async."""

    take = iterating(TopicGroup.take, Batch)
    commit = blocking(TopicGroup.commit)
    committed = blocking(TopicGroup.committed)


class SyncTopic(Facade[Topic]):
    """`Topic` without async: the same methods, called without `await`."""

    create = blocking(Topic.create)
    delete = blocking(Topic.delete)
    info = blocking(Topic.info)
    next_offset = blocking(Topic.next_offset)
    offset_at = blocking(Topic.offset_at)
    produce = blocking(Topic.produce)
    consume = blocking(Topic.consume)
    tail = iterating(Topic.tail, Record)
    read = iterating(Topic.read, Record)
    group = wrapping(SyncTopicGroup, Topic.group)
    producer = wrapping(SyncProducer, Topic.producer)
    reader = wrapping(SyncReader, Topic.reader)


class SyncAdminClient(Facade[AdminClient]):
    """`AdminClient` without async."""

    queues = blocking(AdminClient.queues)
    describe = blocking(AdminClient.describe)
    partitions = blocking(AdminClient.partitions)
    delete_queue = blocking(AdminClient.delete_queue)
    clear = blocking(AdminClient.clear)
    move_topic = blocking(AdminClient.move_topic)
    groups = blocking(AdminClient.groups)
    group = blocking(AdminClient.group)
    consumers = blocking(AdminClient.consumers)
    seek = blocking(AdminClient.seek)
    delete_group = blocking(AdminClient.delete_group)
    dead_letters = blocking(AdminClient.dead_letters)
    requeue = blocking(AdminClient.requeue)
    purge = blocking(AdminClient.purge)
    scheduled = blocking(AdminClient.scheduled)


class SyncClient(ClosingFacade[Client], FormerMethods):
    """`Client` without async: the same methods, called without `await`. It may be used from any
    thread.

    with SyncClient("http://broker:6632") as client:
        client.push("orders", {"id": 1})
        for message in client.take("orders"):
            message.ack()
    """

    @taking(Client.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        def make() -> Client:
            client: Client = Client(*args, **kwargs)
            client._decode_popped = msgspec.json.Decoder(Popped[SyncMessage]).decode
            client._answers_to = self
            return client

        self._closed = False
        super().__init__(*opened(make))
        self.admin = SyncAdminClient(self._portal, self._async.admin)
        self.schedules = SyncSchedules(self._portal, self._async.schedules)
        self.routes = SyncRoutes(self._portal, self._async.routes)

    @classmethod
    def from_env(cls) -> Self:
        """Same as `Client.from_env`."""
        return cls(**limits_from_env())

    push = blocking(Client.push)
    push_many = blocking(Client.push_many)
    pop = blocking_as(Client.pop, list[SyncMessage])
    take = iterating(Client.take, SyncMessage)
    ack = blocking(Client.ack)
    extend = blocking(Client.extend)
    trace = blocking(Client.trace)
    transaction = wrapping(SyncTransaction, Client.transaction)
    buffer = wrapping(SyncPushBuffer, Client.buffer)
    consumer = forwarding(Client.consumer)
    around = forwarding(Client.around)
    lifespan = forwarding(Client.lifespan)
    topic = wrapping(SyncTopic, Client.topic)
    topics = blocking(Client.topics)
    status = blocking(Client.status)
    configure = blocking(Client.configure)
    cancel = blocking(Client.cancel)

    def run(self, *, handle_signals: bool = True, drain_seconds: float | None = None) -> None:
        """Same as `Client.run`."""
        ours = handle_signals and sigterm_is_free()
        if ours:
            signal.signal(signal.SIGTERM, lambda *_: self._portal.soon(self._async.stop))
        try:
            self._portal.call(self._async.run, drain_seconds=drain_seconds)
        finally:
            if ours:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def stop(self) -> None:
        """Stop `run`, from another thread or from a consumer."""
        self._portal.make(self._async.stop)

    def close(self, timeout: float = 10.0) -> list[Item]:
        """Same as `Client.close`. Returns the messages that could not be sent in time."""
        if self._closed:
            return []
        self._closed = True
        unsent = self._portal.call(self._async.close, timeout)
        self._portal.close()
        return unsent

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        unsent = self.close()
        if kind is None:
            check_sent(unsent, "client")


def consumers_of(client: Client | SyncClient) -> list[Consumer[..., Any]]:
    """Return the consumers that `run` starts."""
    return (client if isinstance(client, Client) else client._async)._consumers


async def _result(delivery: Delivery) -> int:
    return await delivery
