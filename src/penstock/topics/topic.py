"""Append to a topic, read its visible records and wait for more.

Its parts are the segments and their durability (`SegmentStore`), the commits that write to them
(`Appender`), the reads (`LogReader`) and the readers that wait for records (`Subscriptions`). Parts
call the topic only through two callables, `on_commit` and `on_broken`.
"""

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from copy import copy
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from penstock.errors import Conflict, Damaged, InvalidRequest, StorageError
from penstock.log.append_queue import AppendsThrough
from penstock.log.appender import Appender
from penstock.log.batches.outgoing import encode_read
from penstock.log.commit import Appended, Promise
from penstock.log.context import Context
from penstock.log.layout import (
    ARCHIVED,
    COMPACT,
    DATA,
    DELETE,
    LIMITS,
    POLICY,
    ProducerEntry,
    pack_checked,
)
from penstock.log.limits import TopicLimits
from penstock.log.producers import Producer
from penstock.log.reader import LogReader
from penstock.log.recovery import RecoveredTopic
from penstock.log.segment import Batch, FetchedBatches, Raw, Segment
from penstock.log.segment_store import SegmentStore
from penstock.log.tier.cache import NotCached
from penstock.protocol.names import split_label
from penstock.topics.subscriptions import Subscriptions

__all__ = ["Appended", "Batch", "Producer", "Promise", "Raw", "Topic"]

log = logging.getLogger("penstock.topics")

T = TypeVar("T")

MAX_BUILT_RECORDS = 10_000  # of record batches that are built while someone waits


class UnfinishedSwap(NamedTuple):
    """A swap whose marker may be on disk: to be finished or undone before the next one."""

    marker: str
    fresh: Segment | None  # the compacted segment, once it counts; None: the old ones do


def condemned(
    sealed: Sequence[Segment], total: int, *, age: float, size: int, now: int
) -> Iterator[Segment]:
    """The oldest of these segments that are older than `age` seconds, or too much when the topic
    has `total` bytes and may have `size`; 0: unlimited.
    """
    for segment in sealed:
        aged = age and segment.newest < now - age * 1e6
        if not (aged or (size and total > size)):
            return
        yield segment
        total -= segment.size


class Topic(AppendsThrough):
    appends: Appender

    def __init__(
        self, name: str, directory: Path, context: Context, recovered: RecoveredTopic
    ) -> None:
        self.name = name  # its label: the topic's name, and `/number` for all but partition 0
        self.topic, self.partition = split_label(name)
        self.directory = directory
        self.format = recovered.format  # of its segments
        self.incarnation = recovered.incarnation
        self.incarnation_lost = recovered.incarnation_lost  # a new one, for the same records
        self.archived_offset = recovered.archived
        self.policy = recovered.policy
        self.limits = recovered.limits
        self.damage_report = recovered.damage
        self.tier = recovered.tier  # what of it lies in the tier; replaced, never changed
        # Whoever writes into the directory beside the commits holds one of these and checks
        # `ending`: once the topic is deleted, the directory may be another topic's.
        self.maintenance = asyncio.Lock()  # retention, compaction and the tier take turns
        self._replacing = asyncio.Lock()  # of a small file, which need not wait for those
        self.unfinished_swap: UnfinishedSwap | None = None  # guarded by `maintenance`
        self._context = context
        self.subscriptions = Subscriptions()
        self._segments = SegmentStore(
            name, directory, context, recovered, on_broken=lambda: self.appends.rescue()
        )
        # Public for callers that queue many appends and then have them committed (TCP), or that ask
        # whether the topic was deleted.
        self.appends = Appender(
            name,
            context,
            self._segments,
            on_commit=self.subscriptions.notify,
        )
        self._reader = LogReader(self._segments, recovered.damage)
        self._apply_limits(recovered.limits)

    # What it holds

    @property
    def damage(self) -> list[dict[str, Any]]:
        """Return the damaged places that could not be repaired."""
        return self.damage_report.places

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In order of offsets, the active one last."""
        return self._segments.all

    @property
    def first_offset(self) -> int:
        return self._segments.first

    @property
    def next_offset(self) -> int:
        return self._segments.active.end

    @property
    def records(self) -> int:
        """About, while a part of the oldest segment is deleted and offsets have gaps."""
        deleted = max(0, self.first_offset - self.segments[0].base)
        return max(0, sum(segment.rows for segment in self.segments) - deleted)

    def first_from(self, offset: int) -> int:
        """Where the segment begins that has the next records, or `offset` if it lies in one;
        `next_offset` when no record follows. Offsets between segments belong to nobody."""
        segments, offset = self.segments, max(offset, self.first_offset)
        holder = max(0, bisect_right(segments, offset, key=lambda segment: segment.base) - 1)
        for segment in islice(segments, holder, None):
            if segment.rows and segment.end > offset:
                return max(offset, segment.base)
        return self.next_offset

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def local_bytes(self) -> int:
        """How much of it is on this disk."""
        return sum(segment.size for segment in self.segments if segment.local)

    @property
    def local_offset(self) -> int:
        """The first offset that is on this disk, with all that follow."""
        *_, first = takewhile(lambda segment: segment.local, reversed(self.segments))
        return first.base

    @property
    def producers(self) -> int:
        """How many are known by their sequence numbers."""
        return len(self._segments.producers.entries)

    def producer_entries(self) -> list[tuple[bytes, ProducerEntry]]:
        """Return what is remembered of producers, by key."""
        return list(self._segments.producers.entries.items())

    @property
    def broken(self) -> str | None:
        """Why appends are refused until the topic is repaired; None: they are not."""
        return self._segments.active.broken

    # Reading: what lies in the tier only is `NotCached` to a caller on the event loop, who then
    # waits for it with `read_or_wait`

    def read(
        self,
        offset: int,
        max_records: int = 1000,
        max_bytes: int = 1 << 20,
        *,
        strict: bool = False,
    ) -> Batch:
        """Visible records from `offset` on, of one segment; at least one when there is one.

        With `strict` an offset outside the log is `InvalidOffset`.
        """
        return self._reader.read(offset, max_records, max_bytes, strict=strict)

    def raw(self, offset: int, max_bytes: int, *, strict: bool = False) -> Raw:
        """The same as bytes of the log: where they lie in which file."""
        return self._reader.raw(offset, max_bytes, strict=strict)

    def batches(self, offset: int, max_bytes: int) -> FetchedBatches:
        """The same as Kafka's record batches, whole and at least one: as they lie in the file, or
        built from aiq's layout. `InvalidOffset` outside the log.
        """
        if self.format.keyed:
            raw = self.raw(offset, max_bytes, strict=True)
            return FetchedBatches(raw.read(), raw.next_offset)
        batch = self.read(offset, MAX_BUILT_RECORDS, max_bytes, strict=True)
        if not batch.count:
            return FetchedBatches(b"", batch.next_offset)
        return FetchedBatches(encode_read(batch, self.timestamps(batch.offsets)), batch.next_offset)

    def timestamps(self, offsets: np.ndarray) -> np.ndarray:
        """The times of these records, microseconds since 1970."""
        return self._reader.timestamps(offsets)

    def records_from(self, offset: int) -> int:
        """How many records lie at and after `offset`; after compaction fewer than offsets."""
        return self._reader.records_from(offset)

    def lost_at(self, offset: int) -> dict[str, Any] | None:
        """The damage that cost the record of this offset, if one did."""
        return self._reader.lost_at(offset)

    def read_or_wait(self, read: Callable[[], T]) -> T | Awaitable[T]:
        """What `read`, which reads, returns; a coroutine of it when some of it
        has to come from the tier.
        """
        try:
            return read()
        except NotCached:
            assert self._context.cache is not None
            return self._context.cache.in_thread(read)

    async def read_through(self, read: Callable[[], T]) -> T:
        """The same for a task that waits."""
        result = self.read_or_wait(read)
        return await result if isinstance(result, Awaitable) else result

    def offset_at(self, timestamp: float) -> int:
        """The first offset appended at or after `timestamp` (seconds since 1970); `next_offset`
        when there is none.
        """
        return self._reader.offset_at(round(timestamp * 1e6))

    def age_at(self, offset: int) -> float | None:
        """Seconds since the record at `offset`, or the first after it, was appended; 0 when there
        is none, None when its time cannot be read. What lies in the tier is at least that old.
        """
        if offset >= self.next_offset:
            return 0.0
        try:
            (at,) = self.timestamps(np.array([max(offset, self.first_offset)]))
        except NotCached:
            at = next(one.newest for one in self.segments if one.end > offset)
        except Damaged:
            return None
        return max(0.0, time.time() - int(at) / 1e6)

    # Waiting for more

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each commit that became visible, and when the topic is deleted;
        until what is returned is called.
        """
        return self.subscriptions.add(callback)

    async def wait_for(self, offset: int, timeout: float | None = None) -> bool:
        """Until `offset` can be read (True), or the time is over (False)."""
        if self.appends.deleted:
            raise self.appends.gone()
        return self.next_offset > offset or await self.subscriptions.wait_for(offset, timeout)

    # Maintenance

    async def seal(self) -> None:
        """Seal the active segment and start an empty one; nothing happens when it is empty."""
        await self.appends.between_commits(roll=True)

    async def rest(self) -> None:
        """Until no segment is being repaired and the checkpoint on disk speaks of the active one.

        From then on the checkpoint has the producers of all sealed segments, whose sidecars are no
        longer asked.
        """
        await self.appends.between_commits(roll=False)

    async def drop(self, segments: Sequence[Segment]) -> None:
        """Forget the oldest segments and remove their files."""
        await self._segments.drop(segments)

    async def replace_local(self, segment: Segment, tiered: Segment) -> None:
        """From here on it is read from the tier, and its files go."""
        await self._segments.replace_local(segment, tiered)

    def attach(self, tiered: Sequence[Segment]) -> None:
        """Segments that lie in the tier only, which was not known when the topic was opened."""
        self._segments.attach(tiered)

    def replace(self, old: Sequence[Segment], fresh: Segment) -> None:
        """A compacted segment takes the place of these."""
        self._segments.replace(old, fresh)
        if self.tier is not None:
            tier = copy(self.tier)
            tier.supersede([segment.base for segment in old])
            self.tier = tier

    async def expect(self, offset: int, who: str) -> None:
        """Records below `offset` were there, as `who` knows. Those that are not are lost, and their
        offsets are not given again. Called before anything is appended."""
        end = self.next_offset
        if offset <= end:
            return
        text = f"offsets {end} to {offset - 1} are not in {DATA}, {who} had them"
        self.damage_report.report_lost(text, DATA, end, offset)
        try:
            await self._context.run(self.damage_report.write)
            await self.seal()
            await self._segments.skip_to(offset)
        except StorageError as error:
            log.error("topic %s: offsets from %d on may be given again: %s", self.name, end, error)

    async def mark_archived(self, offset: int) -> None:
        """Retention keeps what lies at or after this offset (it waits to be archived)."""
        if self.archived_offset is not None and offset < self.archived_offset:
            raise Conflict(f"topic {self.name!r} is archived up to {self.archived_offset} already")
        await self._replace_file(ARCHIVED, pack_checked(str(offset)))
        self.archived_offset = offset

    async def set_policy(self, policy: str) -> None:
        """`delete`: retention deletes segments; `compact`: only compaction swaps them."""
        if policy not in (DELETE, COMPACT):
            raise InvalidRequest(f"a topic's policy is {DELETE!r} or {COMPACT!r}, not {policy!r}")
        await self._replace_file(POLICY, pack_checked(policy))
        self.policy = policy

    async def set_limits(self, limits: TopicLimits) -> None:
        """Have its own retention, largest record and first offset, instead of the settings'."""
        await self._replace_file(LIMITS, limits.pack())
        self._apply_limits(limits)

    def _apply_limits(self, limits: TopicLimits) -> None:
        self.limits = limits
        self._segments.start = limits.start
        broker = self._context.settings.max_record
        self.appends.max_record = broker if limits.max_record is None else limits.max_record

    async def _replace_file(self, name: str, content: bytes) -> None:
        async with self._replacing:
            if self.appends.deleted:
                raise self.appends.gone()
            await self._context.run(self._context.fs.replace, self.directory / name, content)

    # Ending

    @property
    def deleted(self) -> bool:
        return self.appends.deleted

    @property
    def ending(self) -> bool:
        """Deleted, or the broker stops: maintenance gives up."""
        return self.appends.closed

    async def close_if_idle(self, seconds: float) -> None:
        """Let go of the files when nothing was appended for this long and nobody needs them."""
        if self.maintenance.locked():
            return
        async with self.maintenance:
            files = self._segments.active.open_files
            if self._idle and files and self.appends.idle_for(seconds):
                await self._segments.checkpoint()
                if self._idle:
                    self._segments.close()

    @property
    def _idle(self) -> bool:
        busy = self._segments.busy or self.appends.busy or self.ending
        return not (busy or self.unfinished_swap)

    async def stop(self) -> None:
        """Make everything durable, note how far, and let go of the files."""
        self.appends.close()
        await self._drain()
        try:
            await self._segments.stop()
        except StorageError as error:
            log.error("topic %s: stopped without a checkpoint: %s", self.name, error)
        self._segments.close()

    async def mark_deleted(self) -> None:
        """Refuse new calls and wake those that wait."""
        self.appends.close(deleted=True)
        self._segments.abandon()
        await self._drain()
        self.subscriptions.end(self.appends.gone())
        self._reader.close(str(self.appends.gone()))
        self._segments.close()

    async def _drain(self) -> None:
        async with self.maintenance, self._replacing:
            await self.appends.drain()
