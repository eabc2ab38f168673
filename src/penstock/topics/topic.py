"""Append to a topic, read its visible records and wait for more.

Its parts are the segments and their durability (`SegmentStore`), the commits that write to them
(`Appender`), and the readers that wait for records (`Subscriptions`). The parts call
the topic only through `on_commit` and `on_broken`.
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
from penstock.log.batches.encode import encode_read
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
from penstock.log.reader import ReadsSegments
from penstock.log.recovery import RecoveredTopic
from penstock.log.segment import Batch, FetchedBatches, Raw, Segment
from penstock.log.segment_store import SegmentStore
from penstock.log.tier.cache import NotCached
from penstock.protocol.names import split_label
from penstock.topics.subscriptions import Subscriptions

__all__ = ["Appended", "Batch", "FetchedBatches", "Producer", "Promise", "Raw", "Topic"]

log = logging.getLogger("penstock.topics")

T = TypeVar("T")

MAX_BUILT_RECORDS = 10_000  # encoded as record batches per read


class UnfinishedSwap(NamedTuple):
    """A swap whose marker may be on disk. It must be finished or undone before the next one."""

    marker: str
    fresh: Segment | None  # the compacted segment, if it is in effect; None: the old ones are


def condemned(
    sealed: Sequence[Segment], total: int, *, age: float, size: int, now: int
) -> Iterator[Segment]:
    """Yield the oldest segments, while they are older than `age` seconds, or the remaining `total`
    bytes exceed `size`. 0: unlimited.
    """
    for segment in sealed:
        aged = age and segment.newest < now - age * 1e6
        if not (aged or (size and total > size)):
            return
        yield segment
        total -= segment.size


class Topic(AppendsThrough, ReadsSegments):
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
        self.tier = recovered.tier  # its manifest in the tier; replaced, never changed
        # Code that writes to the directory, other than commits, holds one of these locks and checks
        # `ending`: after a deletion, the directory may belong to another topic.
        self.maintenance = asyncio.Lock()  # retention, compaction and the tier take turns
        self._replacing = asyncio.Lock()  # held to replace a small file, without `maintenance`
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
        self._apply_limits(recovered.limits)

    # Contents

    @property
    def damage(self) -> list[dict[str, Any]]:
        """Return the damaged places that could not be repaired."""
        return self.damage_report.places

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Return the segments in order of offsets, the active one last."""
        return self._segments.all

    @property
    def first_offset(self) -> int:
        return self._segments.first

    @property
    def next_offset(self) -> int:
        return self._segments.active.end

    @property
    def records(self) -> int:
        """Return the number of records. It is approximate if offsets have gaps and a part of the
        oldest segment is deleted.
        """
        deleted = max(0, self.first_offset - self.segments[0].base)
        return max(0, sum(segment.rows for segment in self.segments) - deleted)

    def first_from(self, offset: int) -> int:
        """Return `offset` if a segment contains it, else the start of the next segment with
        records, or `next_offset` if there is none.
        """
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
        """Return the number of bytes on this disk."""
        return sum(segment.size for segment in self.segments if segment.local)

    @property
    def local_offset(self) -> int:
        """Return the offset from which on all records are on this disk."""
        *_, first = takewhile(lambda segment: segment.local, reversed(self.segments))
        return first.base

    @property
    def producers(self) -> int:
        """Return the number of remembered idempotent producers."""
        return len(self._segments.producers.entries)

    def producer_entries(self) -> list[tuple[bytes, ProducerEntry]]:
        """Return the remembered producers by key."""
        return list(self._segments.producers.entries.items())

    @property
    def broken(self) -> str | None:
        """Return why appends are refused until the topic is repaired; None if they are not."""
        return self._segments.active.broken

    # Reading: records that are in the tier only raise `NotCached` on the event loop; use
    # `read_or_wait` there

    def batches(self, offset: int, max_bytes: int) -> FetchedBatches:
        """Return whole record batches from `offset` on, at least one. Those of aiq's layout are
        encoded here. Raises InvalidOffset for an offset outside the log.
        """
        if self.format.keyed:
            raw = self.raw(offset, max_bytes, strict=True)
            return FetchedBatches(raw.read(), raw.first_offset, raw.next_offset, raw.count)
        batch = self.read(offset, MAX_BUILT_RECORDS, max_bytes, strict=True)
        data = encode_read(batch, self.timestamps(batch.offsets)) if batch.count else b""
        return FetchedBatches(data, batch.first_offset, batch.next_offset, batch.count)

    def read_or_wait(self, read: Callable[[], T]) -> T | Awaitable[T]:
        """Return the result of `read`, or an awaitable for it if some records are in the tier."""
        try:
            return read()
        except NotCached:
            assert self._context.cache is not None
            return self._context.cache.in_thread(read)

    async def read_through(self, read: Callable[[], T]) -> T:
        """Return the result of `read`; wait for the tier if necessary."""
        result = self.read_or_wait(read)
        return await result if isinstance(result, Awaitable) else result

    def age_at(self, offset: int) -> float | None:
        """Return the age in seconds of the record at `offset`, or of the next one; 0 if there is
        none, None if its time cannot be read. For a record in the tier, it is a lower bound.
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
        """Call `callback` after each commit that becomes visible, and when the topic is deleted.
        Return a function that ends the subscription.
        """
        return self.subscriptions.add(callback)

    async def wait_for(self, offset: int, timeout: float | None = None) -> bool:
        """Wait until `offset` can be read. Return False after the timeout."""
        if self.appends.deleted:
            raise self.appends.gone()
        return self.next_offset > offset or await self.subscriptions.wait_for(offset, timeout)

    # Maintenance

    async def seal(self) -> None:
        """Seal the active segment and start an empty one, unless the active one is empty."""
        await self.appends.between_commits(roll=True)

    async def rest(self) -> None:
        """Wait until no segment is being repaired and the checkpoint describes the active one.

        The checkpoint then has the producers of all sealed segments, so their sidecars are not
        needed for that.
        """
        await self.appends.between_commits(roll=False)

    async def drop(self, segments: Sequence[Segment]) -> None:
        """Forget the oldest segments and remove their files."""
        await self._segments.drop(segments)

    async def replace_local(self, segment: Segment, tiered: Segment) -> None:
        """Read the segment from the tier from now on, and remove its files."""
        await self._segments.replace_local(segment, tiered)

    def attach(self, tiered: Sequence[Segment]) -> None:
        """Add segments that are in the tier only and were unknown when the topic was opened."""
        self._segments.attach(tiered)

    def replace(self, old: Sequence[Segment], fresh: Segment) -> None:
        """Replace segments by a compacted one."""
        self._segments.replace(old, fresh)
        if self.tier is not None:
            tier = copy(self.tier)
            tier.supersede([segment.base for segment in old])
            self.tier = tier

    async def expect(self, offset: int, who: str) -> None:
        """Report missing records below `offset` as lost, and do not assign their offsets again.
        `who` has proof that they existed. Called before anything is appended.
        """
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
            log.error("topic %s: offsets from %d on may be reused: %s", self.name, end, error)

    async def mark_archived(self, offset: int) -> None:
        """Record that records below this offset are archived. Retention keeps the others."""
        if self.archived_offset is not None and offset < self.archived_offset:
            raise Conflict(f"topic {self.name!r} is archived up to {self.archived_offset} already")
        await self._replace_file(ARCHIVED, pack_checked(str(offset)))
        self.archived_offset = offset

    async def set_policy(self, policy: str) -> None:
        """Set the policy: `delete` (retention deletes segments) or `compact` (it does not)."""
        if policy not in (DELETE, COMPACT):
            raise InvalidRequest(f"a topic's policy is {DELETE!r} or {COMPACT!r}, not {policy!r}")
        await self._replace_file(POLICY, pack_checked(policy))
        self.policy = policy

    async def set_limits(self, limits: TopicLimits) -> None:
        """Set the topic's own limits, which override the settings."""
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
        """Return whether maintenance must end: the topic is deleted, or the broker stops."""
        return self.appends.closed

    async def close_if_idle(self, seconds: float) -> None:
        """Close the files if nothing was appended for so long and they are not in use."""
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
        """Make everything durable, write a checkpoint, and close the files."""
        self.appends.close()
        await self._drain()
        try:
            await self._segments.stop()
        except StorageError as error:
            log.error("topic %s: stopped without a checkpoint: %s", self.name, error)
        self._segments.close()

    async def mark_deleted(self) -> None:
        """Refuse new calls and wake waiting callers."""
        self.appends.close(deleted=True)
        self._segments.abandon()
        await self._drain()
        self.subscriptions.end(self.appends.gone())
        self._unreadable = str(self.appends.gone())
        self._segments.close()

    async def _drain(self) -> None:
        async with self.maintenance, self._replacing:
            await self.appends.drain()
