"""Topics for plain code: the async objects of `penstock.client.topic`, behind a portal."""

from collections.abc import Iterator
from typing import Any

from penstock.client.portal import (
    ClosingFacade,
    Facade,
    blocking,
    iterating,
    opened,
    taking,
    wrapping,
)
from penstock.client.producer import Delivery, Producer
from penstock.client.reader import Reader
from penstock.client.topic import Topic, TopicGroup
from penstock.client.topics import TopicClient
from penstock.errors import PenstockError
from penstock.protocol.record_batch import Batch, Record


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


class SyncTopicClient(ClosingFacade[TopicClient]):
    """`TopicClient` without async. Deprecated: use `SyncClient(...).topic(name)`. It
    remains for one more release.
    """

    @taking(TopicClient.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*opened(lambda: TopicClient(*args, **kwargs)))

    create = blocking(TopicClient.create)
    delete = blocking(TopicClient.delete)
    names = blocking(TopicClient.names)
    info = blocking(TopicClient.info)
    next_offset = blocking(TopicClient.next_offset)
    offset_at = blocking(TopicClient.offset_at)
    produce = blocking(TopicClient.produce)
    consume = blocking(TopicClient.consume)
    commit = blocking(TopicClient.commit)
    committed = blocking(TopicClient.committed)
    producer = wrapping(SyncProducer, TopicClient.producer)
    reader = wrapping(SyncReader, TopicClient.reader)

    def close(self) -> None:
        """Same as `TopicClient.close`. It also ends the background thread."""
        self._portal.call(self._async.close)
        self._portal.close()


async def _result(delivery: Delivery) -> int:
    return await delivery
