"""Read the visible part of a log, across its segments.

Reading takes no lock and shares no position. The list of segments is replaced, never changed in
place, so a reader keeps its list while segments are rolled, deleted or compacted. If a file is
gone, it reads again with the new list.
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.errors import Damaged, InvalidOffset, NotFound
from penstock.log.damage import DamageReport
from penstock.log.segment import Batch, Raw, Segment, empty_batch
from penstock.log.segment_store import SegmentStore

T = TypeVar("T")
R = TypeVar("R", Batch, Raw)


class ReadsSegments:
    """A log that reads its segments."""

    _segments: SegmentStore
    damage_report: DamageReport
    # Why reading is refused: the log is deleted, and its paths may belong to another log now.
    _unreadable = ""

    def read(
        self,
        offset: int,
        max_records: int = 1000,
        max_bytes: int = 1 << 20,
        *,
        strict: bool = False,
    ) -> Batch:
        """Return visible records of one segment from `offset` on; at least one, if there is one.

        With `strict`, raises InvalidOffset for an offset outside the log.
        """
        batch = self._retrying(
            self._first_of, offset, strict, lambda one, at: one.read(at, max_records, max_bytes)
        )
        return empty_batch(max(offset, self._segments.active.end)) if batch is None else batch

    def raw(self, offset: int, max_bytes: int, *, strict: bool = False) -> Raw:
        """Return the file and the position of the visible bytes from `offset` on."""
        raw = self._retrying(self._first_of, offset, strict, lambda one, at: one.raw(at, max_bytes))
        end = max(offset, self._segments.active.end)
        return raw or Raw(end, 0, end, None, 0, 0)

    def timestamps(self, offsets: np.ndarray) -> np.ndarray:
        """Return the append times of these records, microseconds since 1970."""
        return self._retrying(_times, offsets)

    def records_from(self, offset: int) -> int:
        """Return the number of records from `offset` on. Compaction may have left gaps."""
        at = max(offset, self._segments.start)
        count: int = self._retrying(lambda segments: sum(one.records_from(at) for one in segments))
        return count

    def offset_at(self, timestamp: float) -> int:
        """Return the first offset appended at or after `timestamp` (seconds since 1970), or
        `next_offset` if there is none.
        """
        microseconds = round(timestamp * 1e6)

        def search(segments: tuple[Segment, ...]) -> int:
            offsets = (segment.offset_at(microseconds) for segment in segments)
            return next((at for at in offsets if at is not None), self._segments.active.end)

        return max(self._retrying(search), self._segments.first)

    def lost_at(self, offset: int) -> dict[str, Any] | None:
        """Return the damage by which the record of this offset was lost, if it was."""
        places = (
            place
            for place in self.damage_report.places
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
        """Call `read` with the first segment that has records from `offset` on, and the offset to
        start at. Return its result, or None if there are no such records.
        """
        first, end = self._segments.first, self._segments.active.end
        if strict and not first <= offset <= end:
            raise InvalidOffset(f"offset {offset} is outside {first} to {end}")
        if offset < first:
            place = self.lost_at(offset)
            # ignore the loss if retention has deleted more since
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

    def _retrying(self, read: Callable[..., T], *args: Any) -> T:
        """Call `read` with the segments. Repeat it if they were replaced in the meantime."""
        while True:
            if self._unreadable:
                raise NotFound(self._unreadable)
            segments = self._segments.all
            try:
                return read(segments, *args)
            except (Damaged, FileNotFoundError) as error:
                if segments is not self._segments.all:
                    continue  # retention or compaction removed the file
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
    starts = np.flatnonzero(np.diff(holders, prepend=-1)).tolist()  # where a segment begins
    for start, stop in pairwise([*starts, len(offsets)]):
        times[start:stop] = segments[int(holders[start])].times(offsets[start:stop])
    return times
