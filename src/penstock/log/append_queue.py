"""Check appends and queue them for the next commit.

Subclasses implement `commit`, which writes the queued appends.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from penstock.errors import InvalidRequest, NotFound, PenstockError, TooLarge, Unavailable
from penstock.io.fs import Bytes
from penstock.log.commit import Appended, Entry, Promise
from penstock.log.format import Arrays, Content, InvalidRecord, ReadyBatch, Records, SegmentFormat
from penstock.log.layout import HEADER_SIZE
from penstock.log.producers import AnyProducer, KafkaProducer, Producer
from penstock.protocol.kafka_batch import (
    CONTROL,
    TRANSACTIONAL,
    BatchHead,
    NewRecord,
    decode_batch,
)

MAX_PENDING_BYTES = 256 << 20  # appends are refused if more is queued
MAX_TIMESTAMP = 253_402_300_799_999  # milliseconds: the end of the year 9999


class AppendQueue(ABC):
    def __init__(self, name: str, form: SegmentFormat, max_record: int) -> None:
        self._name = name
        self._format = form
        self.max_record = max_record  # bytes of a payload
        self._pending: list[Entry] = []
        self.pending_bytes = 0  # of the appends in `_pending`
        self._scheduled = False  # `commit` will run at the end of this tick
        self.closed = False  # further appends are refused
        self.deleted = False  # queued appends are refused too
        self.moving = False  # closed because the topic becomes a shared one

    # Queueing: the caller then calls `commit` or `schedule`

    def enqueue(
        self, payloads: Sequence[Bytes], promise: Promise, producer: Producer | None = None
    ) -> None:
        lengths = list(map(len, payloads))
        content = payloads if type(payloads) is list else list(payloads)
        self._enqueue(
            content, len(lengths), sum(lengths), max(lengths, default=0), promise, producer
        )

    def enqueue_arrays(
        self,
        lengths: np.ndarray,
        payloads: memoryview,
        promise: Promise,
        producer: Producer | None = None,
    ) -> None:
        """Queue payloads that lie one after another in `payloads`."""
        wide = lengths.astype(np.int64)
        if int(wide.min(initial=0)) < 0 or int(wide.sum()) != len(payloads):
            raise InvalidRequest(
                f"the lengths add up to {int(wide.sum())}, the payloads have {len(payloads)} bytes"
            )
        size, largest = len(payloads), int(wide.max(initial=0))
        self._enqueue(Arrays(wide, payloads), len(wide), size, largest, promise, producer)

    def enqueue_table(self, table: np.ndarray, promise: Promise) -> None:
        """Queue payloads of equal length: each item of `table` is one."""
        self._enqueue(table, len(table), table.itemsize * len(table), table.itemsize, promise, None)

    def enqueue_records(
        self,
        records: Sequence[NewRecord],
        promise: Promise,
        producer: AnyProducer | None = None,
    ) -> None:
        """Queue records with keys, headers and timestamps."""
        _check_times([one.timestamp for one in records if one.timestamp is not None])
        sizes = [_size_of(record) for record in records]
        plain = [one.value for one in records if not (one.key is not None or one.headers)]
        values = [value for value in plain if value is not None]
        content: Content = Records(records)
        if len(values) == len(records) and not (
            self._format.keyed and any(one.timestamp is not None for one in records)
        ):
            content = values
        elif not self._format.keyed:
            raise InvalidRecord(
                f"topic {self._name!r} has the format {self._format.name!r}: its records have no "
                "keys, no headers and no null values"
            )
        self._enqueue(content, len(sizes), sum(sizes), max(sizes, default=0), promise, producer)

    def enqueue_batch(self, head: BatchHead, data: memoryview, promise: Promise) -> None:
        """Queue a record batch that a Kafka client built."""
        if head.attributes & (CONTROL | TRANSACTIONAL):
            raise InvalidRequest("transactions are not supported")
        _check_times((head.base_timestamp, head.max_timestamp))
        producer = None
        if head.producer_id >= 0:
            producer = KafkaProducer(
                head.producer_id, head.producer_epoch, head.base_sequence, head.records
            )
        if self._format.keyed:
            batch, size = ReadyBatch(head, data), len(data)
            self._enqueue(batch, head.records, size, size, promise, producer)
            return
        records = [
            NewRecord(one.value, one.key, one.headers, one.timestamp) for one in decode_batch(data)
        ]
        self.enqueue_records(records, promise, producer)

    def _enqueue(
        self,
        content: Content,
        count: int,
        size: int,  # of all payloads
        largest: int,  # bytes of the largest
        promise: Promise,
        producer: AnyProducer | None,
    ) -> None:
        if not count:
            raise InvalidRequest("a batch has at least one record")
        most = self.max_record
        if largest > most:
            raise TooLarge(f"a record has at most {most} bytes, this one has {largest}")
        if self.deleted:
            raise self.gone()
        if self.closed:
            why = (
                f"topic {self._name!r} is being moved" if self.moving else "the broker is stopping"
            )
            raise Unavailable(why)
        if producer is not None and len(producer.id) != 16:
            raise InvalidRequest(f"a producer id has 16 bytes, this one has {len(producer.id)}")
        size += HEADER_SIZE * count
        if self.pending_bytes and self.pending_bytes + size > MAX_PENDING_BYTES:
            raise Unavailable(
                f"topic {self._name!r} has {self.pending_bytes} bytes waiting for the disk"
            )
        self._pending.append(Entry(content, count, size, producer, promise))
        self.pending_bytes += size

    def gone(self) -> PenstockError:
        if self.moving:  # clients retry and reach the shared topic
            return Unavailable(f"topic {self._name!r} is a shared topic now")
        return NotFound(f"topic {self._name!r} was deleted")

    # Committing

    def schedule(self) -> None:
        """Commit all queued appends at the end of this tick."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.commit)

    @abstractmethod
    def commit(self) -> None:
        """Start writing the queued appends, unless a commit is under way."""


def _check_times(times: Sequence[int]) -> None:
    for time in times:
        if abs(time) > MAX_TIMESTAMP:
            raise InvalidRecord(
                f"the timestamp {time} is out of range: it is milliseconds, up to the year 9999"
            )


def _size_of(record: NewRecord) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.value or b"") + len(record.key or b"") + headers


class AppendsThrough:
    """A log that appends through its queue."""

    appends: AppendQueue

    def _append(self, enqueue: Callable[[Promise], None]) -> "asyncio.Future[Appended]":
        future: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        enqueue(future)
        self.appends.schedule()
        return future

    def append(
        self, payloads: Sequence[Bytes], producer: Producer | None = None
    ) -> "asyncio.Future[Appended]":
        """Append the payloads as one batch, all or none."""
        return self._append(lambda promise: self.appends.enqueue(payloads, promise, producer))

    def append_arrays(
        self, lengths: np.ndarray, payloads: memoryview, producer: Producer | None = None
    ) -> "asyncio.Future[Appended]":
        """Append payloads that lie one after another in `payloads`."""
        return self._append(
            lambda promise: self.appends.enqueue_arrays(lengths, payloads, promise, producer)
        )

    def append_records(
        self, records: Sequence[NewRecord], producer: Producer | None = None
    ) -> "asyncio.Future[Appended]":
        """Append records with keys, headers and timestamps, all or none. Raises `InvalidRecord` if
        the topic's format cannot store them.
        """
        return self._append(
            lambda promise: self.appends.enqueue_records(records, promise, producer)
        )

    def append_batch(self, head: BatchHead, data: memoryview) -> "asyncio.Future[Appended]":
        """Append a record batch from a Kafka client (`kafka_batch.split_batches`), unchanged if the
        format allows. Checks the producer's sequence.
        """
        return self._append(lambda promise: self.appends.enqueue_batch(head, data, promise))
