"""What everything that serves topics talks to: the log of one partition.

    append, append_records, append_batch                write, answered when it is durable
    read, batches, timestamps, records_from             read
    read_or_wait, read_through                          the same at once, or when the tier answers
    first_offset, next_offset, offset_at                bounds, and the offset of a time
    subscribe, wait_for                                 watch

A call that reads returns at once when what it needs is on this disk or in the cache, and raises
`NotCached` otherwise: `read_or_wait` and `read_through` then wait for it in a thread.

`Topic` is a log with segments on this disk. Nothing here names segments, files or formats, so that
a log without them can take its place. What needs segments (retention, tier, scrub, compaction,
details for people) asks for a `Topic`.
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
    incarnation: str  # another one when the topic was deleted and created again

    # Appending: all or none; `StorageError`, `Conflict` (`OutOfOrder`, `ProducerFenced`),
    # `InvalidRecord` and `TooLarge` say why not

    def append(
        self, payloads: Sequence[Bytes], producer: Producer | None = None
    ) -> "asyncio.Future[Appended]": ...

    def append_records(
        self, records: Sequence[NewRecord], producer: Producer | None = None
    ) -> "asyncio.Future[Appended]": ...

    def append_batch(self, head: BatchHead, data: memoryview) -> "asyncio.Future[Appended]": ...

    # Reading: `InvalidOffset` outside the log when `strict`, `Damaged` with where to go on

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
        """Kafka's record batches, whole and at least one."""

    def timestamps(self, offsets: np.ndarray) -> np.ndarray: ...

    def offset_at(self, timestamp: float) -> int:
        """The first offset of this time or later, seconds since 1970; or `next_offset`."""

    def records_from(self, offset: int) -> int: ...

    def read_or_wait(self, read: Callable[[], T]) -> T | Awaitable[T]: ...

    async def read_through(self, read: Callable[[], T]) -> T: ...

    # Watching

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]: ...

    async def wait_for(self, offset: int, timeout: float | None = None) -> bool:
        """Until `offset` can be read (True), or the time is over (False); `NotFound` when the topic
        is deleted."""

    @property
    def deleted(self) -> bool: ...
