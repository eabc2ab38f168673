"""Reading what is visible of a log, across its segments.

Reading takes no lock and shares no position; the list of segments is replaced, never changed in
place, so a reader keeps what it started with while segments are rolled, deleted or compacted, and
looks again when a file went away.
"""

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.errors import Damaged, InvalidOffset, NotFound
from penstock.log.damage import DamageReport
from penstock.log.segment import Batch, Raw, Segment, empty_batch
from penstock.log.segment_store import SegmentStore

T = TypeVar("T")
R = TypeVar("R", Batch, Raw)


class LogReader:
    def __init__(self, segments: SegmentStore, damage: DamageReport) -> None:
        self._segments = segments
        self._damage = damage
        self._closed = ""  # why nothing is read any more, if so

    def close(self, reason: str) -> None:
        """Refuse to read: the log is deleted, and its paths may be another one's by now."""
        self._closed = reason

    def read(
        self,
        offset: int,
        max_records: int = 1000,
        max_bytes: int = 1 << 20,
        *,
        strict: bool = False,
    ) -> Batch:
        """Visible records from `offset` on, of one segment; at least one when there is one."""
        batch = self._retrying(
            lambda segments: self._first_of(
                segments, offset, strict, lambda one, at: one.read(at, max_records, max_bytes)
            )
        )
        return empty_batch(max(offset, self._segments.active.end)) if batch is None else batch

    def raw(self, offset: int, max_bytes: int, *, strict: bool = False) -> Raw:
        """Return where the visible bytes of the log from `offset` on lie, and in which file."""
        raw = self._retrying(
            lambda segments: self._first_of(
                segments, offset, strict, lambda one, at: one.raw(at, max_bytes)
            )
        )
        end = max(offset, self._segments.active.end)
        return raw or Raw(end, 0, end, None, 0, 0)

    def timestamps(self, offsets: np.ndarray) -> np.ndarray:
        """Return the append times of these records, microseconds since 1970."""
        return self._retrying(lambda segments: _times(segments, offsets))

    def records_from(self, offset: int) -> int:
        """Return how many records lie at and after `offset`; compaction may leave gaps."""
        at = max(offset, self._segments.start)
        return self._retrying(lambda segments: sum(one.records_from(at) for one in segments))

    def offset_at(self, microseconds: int) -> int:
        def search(segments: tuple[Segment, ...]) -> int:
            offsets = (segment.offset_at(microseconds) for segment in segments)
            return next((at for at in offsets if at is not None), self._segments.active.end)

        return max(self._retrying(search), self._segments.first)

    def lost_at(self, offset: int) -> dict[str, Any] | None:
        """Return the damage that cost the record of this offset, if there was any."""
        places = (
            place
            for place in self._damage.places
            if place.get("lost_from", -1) <= offset < place.get("lost_to", -1)
        )
        return next(places, None)

    def _first_of(
        self,
        segments: tuple[Segment, ...],
        offset: int,
        strict: bool,
        read: Callable[[Segment, int], R],
    ) -> R | None:
        """What `read` returns for the segment that holds `offset` (or what follows it) and the
        offset to start at there; None when there is nothing from there on.
        """
        first, end = self._segments.first, self._segments.active.end
        if strict and not first <= offset <= end:
            raise InvalidOffset(f"offset {offset} lies outside {first} to {end}")
        if offset < first:
            place = self.lost_at(offset)
            # unless retention deleted more since: that is passed over
            if place is not None and place["lost_to"] == first:
                raise _lost(place, first)
        at = max(offset, first)
        if at >= end:
            return None
        holder = max(0, bisect_right(segments, at, key=lambda segment: segment.base) - 1)
        for number, segment in enumerate(segments[holder:], holder + 1):
            if at < segment.base and (place := self.lost_at(at)) is not None:
                raise _lost(place, segment.base)
            records = read(segment, max(at, segment.base))
            if records.count:
                if not segment.local:
                    segment.lead_to(segments[number], records.next_offset)
                return records
        return None

    def _retrying(self, look: Callable[[tuple[Segment, ...]], T]) -> T:
        """Call `look` with the segments; again when they were replaced while it looked."""
        while True:
            if self._closed:
                raise NotFound(self._closed)
            segments = self._segments.all
            try:
                return look(segments)
            except (Damaged, FileNotFoundError) as error:
                if segments is not self._segments.all:
                    continue  # retention or compaction took the file away
                if isinstance(error, Damaged):
                    raise
                raise Damaged(f"{Path(str(error.filename)).name} is missing") from error


def _lost(place: dict[str, Any], resume: int) -> Damaged:
    return Damaged(
        f"{place['file']}: offsets {place['lost_from']} to {place['lost_to'] - 1} are lost", resume
    )


def _times(segments: tuple[Segment, ...], offsets: np.ndarray) -> np.ndarray:
    bases = np.array([segment.base for segment in segments], np.int64)
    holders = np.maximum(np.searchsorted(bases, offsets, "right") - 1, 0)
    times = np.empty(len(offsets), np.int64)
    for i in np.unique(holders):
        mask = holders == i
        times[mask] = segments[int(i)].times(offsets[mask])
    return times
