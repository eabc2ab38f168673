"""The interface of a topic's log: one partition, local or shared.

    append, append_records, append_batch                write; the result comes when it is durable
    read, batches, timestamps, records_from             read
    read_or_wait, read_through                          read, and wait for the tier if necessary
    first_offset, next_offset, offset_at                bounds, and the offset of a time
    subscribe, wait_for                                 watch

A call that reads returns at once if its data is on this disk or in the cache. Otherwise it raises
`NotCached`, and `read_or_wait` and `read_through` wait for the data in a thread.

`Topic` is a log with segments on this disk. This interface is independent of segments, files and
formats, so that shared logs implement it too. Code that needs segments (retention, tier, scrub,
compaction, details for people) requires a `Topic`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from penstock.io.fs import Bytes
from penstock.log.commit import Appended
from penstock.log.producers import Producer
from penstock.log.segment import Batch, FetchedBatches
from penstock.protocol.kafka_batch import BatchHead, NewRecord

T = TypeVar("T")


class TopicLog(Protocol):
    name: str  # the topic's name, and `/number` for all partitions but 0
    topic: str
    partition: int
    incarnation: str  # changes when a topic is deleted and created again

    # Appending, all or none. Raises `StorageError`, `Conflict` (`OutOfOrder`, `ProducerFenced`),
    # `InvalidRecord` or `TooLarge`

    def append(
        self, payloads: Sequence[Bytes], producer: Producer | None = None
    ) -> "asyncio.Future[Appended]": ...

    def append_records(
        self, records: Sequence[NewRecord], producer: Producer | None = None
    ) -> "asyncio.Future[Appended]": ...

    def append_batch(self, head: BatchHead, data: memoryview) -> "asyncio.Future[Appended]": ...

    # Reading. With `strict`, raises `InvalidOffset` outside the log; `Damaged` has `resume`

    @property
    def first_offset(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    def read(
        self,
        offset: int,
        max_records: int = 1000,
        max_bytes: int = 1 << 20,
        *,
        strict: bool = False,
    ) -> Batch: ...

    def batches(self, offset: int, max_bytes: int) -> FetchedBatches:
        """Return whole record batches of Kafka, at least one."""

    def timestamps(self, offsets: np.ndarray) -> np.ndarray: ...

    def offset_at(self, timestamp: float) -> int:
        """Return the first offset at or after this time (seconds since 1970), or `next_offset`."""

    def records_from(self, offset: int) -> int: ...

    def read_or_wait(self, read: Callable[[], T]) -> T | Awaitable[T]: ...

    async def read_through(self, read: Callable[[], T]) -> T: ...

    # Watching

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]: ...

    async def wait_for(self, offset: int, timeout: float | None = None) -> bool:
        """Wait until `offset` can be read. Return False after the timeout. Raises NotFound if the
        topic is deleted.
        """

    @property
    def deleted(self) -> bool: ...
