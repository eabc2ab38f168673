"""A topic as everyone else sees it: append to it, read what is visible, wait for more.

Reading takes no lock and shares no position; the list of segments is replaced, never changed in
place, so a reader keeps what it started with while segments are rolled, deleted or compacted, and
looks again when a file went away. How appends are committed is in `penstock.log.log`.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import (
    Conflict,
    Damaged,
    InvalidOffset,
    InvalidRequest,
    NotFound,
    StorageFailed,
    StorageFull,
)
from penstock.log.commit import Appended
from penstock.log.context import Context
from penstock.log.durable import Recovered
from penstock.log.layout import ARCHIVED, COMPACT, DATA, DELETE, POLICY, pack_checked
from penstock.log.log import Log
from penstock.log.producers import Producer
from penstock.log.segment import Batch, Raw, Segment, empty_batch

__all__ = ["Appended", "Batch", "Producer", "Raw", "Topic"]

log = logging.getLogger("penstock.topics")


class Topic(Log):
    def __init__(self, name: str, directory: Path, context: Context, found: Recovered) -> None:
        super().__init__(name, directory, context, found)
        self.archived_offset = found.archived
        self.policy = found.policy
        self.findings = found.damage
        self.incarnation_lost = (
            found.incarnation_lost
        )  # it has a new one, though its records are the same
        self._subscribers: dict[int, Callable[[], None]] = {}
        self._subscriptions = 0
        self._waiters: dict[asyncio.Future[None], int] = {}

    # What it holds

    @property
    def damage(self) -> list[dict[str, Any]]:
        """What was found damaged and could not be repaired."""
        return self.findings.places

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._segments

    @property
    def first_offset(self) -> int:
        return self._segments[0].base

    @property
    def records(self) -> int:
        return sum(segment.rows for segment in self._segments)

    def records_from(self, offset: int) -> int:
        """How many records there are at and after `offset`; compaction makes that fewer than
        offsets.
        """
        return int(
            self._looking(lambda segments: sum(_rows_from(segment, offset) for segment in segments))
        )

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    @property
    def backlog_bytes(self) -> int:
        return self._pending_bytes

    @property
    def unsynced_bytes(self) -> int:
        """Answered under `interval`, and not yet covered by an fsync."""
        return self._unsynced_bytes + sum(write.size for write in self._sync_pending)

    @property
    def broken(self) -> str | None:
        """Why appends fail at the moment, if they do."""
        return self._writer.broken

    def details(self) -> dict[str, Any]:
        return {
            "topic": self.name,
            "incarnation": self.incarnation,
            "first_offset": self.first_offset,
            "next_offset": self.next_offset,
            "records": self.records,
            "bytes": self.size_bytes,
            "producers": len(self._producers.entries),
            "archived_offset": self.archived_offset,
            "policy": self.policy,
            "broken": self.broken,
            "damage": self.damage,
            "segments": [
                {
                    "base": segment.base,
                    "end": segment.end,
                    "records": segment.rows,
                    "bytes": segment.size,
                    "newest": segment.newest / 1e6,
                    "sealed": segment.sealed,
                    "compacted": segment.compacted,
                }
                for segment in self._segments
            ],
        }

    # Reading

    def read(
        self,
        offset: int,
        max_records: int = 1000,
        max_bytes: int = 1 << 20,
        *,
        strict: bool = False,
    ) -> Batch:
        """Visible records from `offset` on, of one segment; at least one when there is one."""
        return self._reading(
            lambda segment, at: segment.read(at, max_records, max_bytes), offset, strict
        ) or empty_batch(max(offset, self.next_offset))

    def raw(
        self, offset: int, max_bytes: int, max_records: int | None = None, *, strict: bool = False
    ) -> Raw:
        """The same as bytes of the log: where they lie in which file."""
        found = self._reading(
            lambda segment, at: segment.raw(at, max_bytes, max_records), offset, strict
        )
        end = max(offset, self.next_offset)
        return found or Raw(end, 0, end, None, 0, 0)

    def _reading(self, read: Callable[[Segment, int], Any], offset: int, strict: bool) -> Any:
        """Call `read` on the segment that holds `offset` (or what follows it), with the offset to
        start at.
        """

        def look(segments: tuple[Segment, ...]) -> Any:
            if strict and not segments[0].base <= offset <= self.next_offset:
                raise InvalidOffset(
                    f"offset {offset} lies outside {segments[0].base} to {self.next_offset}"
                )
            if offset < segments[0].base:
                self._refuse_lost_beginning(segments[0], offset)
            return self._read_from(segments, read, max(offset, segments[0].base))

        return self._looking(look)

    def _looking(self, look: Callable[[tuple[Segment, ...]], Any]) -> Any:
        """Call `look` with the segments; again when they were replaced while it looked."""
        while True:
            segments = self._segments
            try:
                return look(segments)
            except (Damaged, FileNotFoundError) as error:
                if segments is not self._segments:
                    continue  # retention or compaction took the file away: look again
                if isinstance(error, Damaged):
                    raise
                raise Damaged(f"{Path(str(error.filename)).name} is missing") from error

    def _read_from(
        self, segments: tuple[Segment, ...], read: Callable[[Segment, int], Any], at: int
    ) -> Any:
        if at >= self.next_offset:
            return None
        low, high = 0, len(segments) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if segments[middle].base <= at:
                low = middle
            else:
                high = middle - 1
        for segment in segments[low:]:
            if at < segment.base:
                self._refuse_gap(segment, at)
            found = read(segment, max(at, segment.base))
            if found.count:
                return found
        return None

    def _refuse_lost_beginning(self, first: Segment, at: int) -> None:
        """What retention deleted is passed over; what was lost is not, when nothing was deleted
        since.
        """
        place = self.lost_at(at)
        if place is not None and place["lost_to"] == first.base:
            raise _lost(place, first.base)

    def _refuse_gap(self, following: Segment, at: int) -> None:
        place = self.lost_at(at)
        if place is not None:
            raise _lost(place, following.base)

    def lost_at(self, offset: int) -> dict[str, Any] | None:
        """The damage that cost the record of this offset, if one did."""
        places = (
            place
            for place in self.damage
            if place.get("lost_from", -1) <= offset < place.get("lost_to", -1)
        )
        return next(places, None)

    def times(self, batch: Batch) -> np.ndarray:
        """Append time of each record, microseconds since 1970."""
        return self.timestamps(batch.offsets)

    def timestamps(self, offsets: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._looking(lambda segments: _times(segments, offsets))
        return found

    def offset_at(self, timestamp: float) -> int:
        """The first offset appended at or after `timestamp` (seconds since 1970); `next_offset`
        when there is none.
        """
        microseconds = round(timestamp * 1e6)

        def look(segments: tuple[Segment, ...]) -> int:
            found = (segment.offset_at(microseconds) for segment in segments)
            return next((offset for offset in found if offset is not None), self.next_offset)

        return int(self._looking(look))

    # Waiting for more

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once after each commit that became visible, and when the topic is
        deleted.
        """
        self._subscriptions += 1
        key = self._subscriptions
        self._subscribers[key] = callback
        return lambda: self._subscribers.pop(key, None) and None

    async def wait_for(self, offset: int, timeout: float | None = None) -> bool:
        """Until `offset` can be read (True), or the time is over (False)."""
        if self.deleted:
            raise NotFound(f"topic {self.name!r} was deleted")
        if self.next_offset > offset:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[future] = offset
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiters.pop(future, None)
        return True

    def _notify(self) -> None:
        if self._waiters:
            for future in [f for f, offset in self._waiters.items() if offset < self.next_offset]:
                del self._waiters[future]
                if not future.done():
                    future.set_result(None)
        if self._subscribers:
            for callback in tuple(self._subscribers.values()):
                callback()

    # What others know

    async def expect(self, offset: int, who: str) -> None:
        """Records below `offset` were there, as `who` knows. Those that are not are lost, and their
        offsets are not given again. Called before anything is appended."""
        if offset <= self.next_offset:
            return
        end = self.next_offset
        text = f"offsets {end} to {offset - 1} are not in {DATA}, {who} had them"
        self.findings.report_lost(text, DATA, end, offset)
        try:
            await self._context.run(self.findings.write)
            await self.seal()
            await self._skip_to(offset)
        except (StorageFull, StorageFailed) as error:
            log.error("topic %s: offsets from %d on may be given again: %s", self.name, end, error)

    # Ending

    async def stop(self) -> None:
        """Make everything durable, note how far, and let go of the files."""
        self._stopping = True
        async with self.maintenance:
            await self.drain()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            if self._writer.broken:
                await self._repair()
            await self.checkpoint()
        except (StorageFull, StorageFailed) as error:
            log.error("topic %s: stopped without a checkpoint: %s", self.name, error)
        self.close_files()

    async def mark_archived(self, offset: int) -> None:
        """Retention keeps what lies at or after this offset (it waits to be archived)."""
        if self.archived_offset is not None and offset < self.archived_offset:
            raise Conflict(f"topic {self.name!r} is archived up to {self.archived_offset} already")
        path = self.directory / ARCHIVED
        await self._context.run(self._context.fs.replace, path, pack_checked(str(offset)))
        self.archived_offset = offset

    async def set_policy(self, policy: str) -> None:
        """`delete`: retention deletes old segments; `compact`: it does not, and compaction may swap
        them.
        """
        if policy not in (DELETE, COMPACT):
            raise InvalidRequest(f"a topic's policy is {DELETE!r} or {COMPACT!r}, not {policy!r}")
        await self._context.run(
            self._context.fs.replace, self.directory / POLICY, pack_checked(policy)
        )
        self.policy = policy

    async def mark_deleted(self) -> None:
        """Refuse whatever comes, wake whoever waits."""
        self.deleted = True
        async with self.maintenance:
            await self.drain()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unsynced = []
        for future in list(self._waiters):
            if not future.done():
                future.set_exception(NotFound(f"topic {self.name!r} was deleted"))
        for callback in list(self._subscribers.values()):
            callback()
        self._subscribers.clear()
        self.close_files()


def _lost(place: dict[str, Any], resume: int) -> Damaged:
    return Damaged(
        f"{place['file']}: offsets {place['lost_from']} to {place['lost_to'] - 1} are lost", resume
    )


def _times(segments: tuple[Segment, ...], offsets: np.ndarray) -> np.ndarray:
    bases = np.array([segment.base for segment in segments], np.int64)
    which = np.maximum(np.searchsorted(bases, offsets, "right") - 1, 0)
    found = np.empty(len(offsets), np.int64)
    for i in np.unique(which):
        mask = which == i
        found[mask] = segments[int(i)].times(offsets[mask])
    return found


def _rows_from(segment: Segment, offset: int) -> int:
    return segment.rows if offset <= segment.base else segment.rows - segment.row_of(offset)
