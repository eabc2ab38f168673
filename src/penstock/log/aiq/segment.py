"""A segment of aiq's layout: locate records and read them.

Offsets in a segment may have gaps (compaction). So `row = offset - base` is used only if there are
none; otherwise the index is searched. Every record that `read` returns was compared with its own
header. If index and data disagree, the data is walked from the last place where they agree: a
damaged index only costs time. A damaged record raises `Damaged` with the file, the place and the
offset where reading can continue.

A gap in the *positions* is damage that recovery or the scrub reported; its bytes are never
returned. A gap in the *offsets* alone is compaction.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from penstock.errors import Damaged
from penstock.io.fs import Fs
from penstock.log.aiq.scan import record_at
from penstock.log.layout import (
    BATCH_SIZE,
    BATCH_TYPE,
    BATCHES,
    COMPACTED,
    DATA,
    HEADER_SIZE,
    INDEX,
    INDEX_SIZE,
    INDEX_TYPE,
    KINDS,
)
from penstock.log.segment import Batch, Raw, Segment, Write, empty_batch

WINDOW_ROWS = 512  # of the index, read at once at the end of a search
MAX_ROWS = 1 << 16  # of the index, per read
MIN_GUESSED_ROWS = 64  # fewer rows are read without guessing how many are needed


class _Mismatch(Exception):
    """Index and data disagree."""


_NONE = np.empty(0, np.int64)


class AiqSegment(Segment):
    kinds = KINDS

    __slots__ = ("batches_size",)

    def __init__(self, fs: Fs, directory: Path, base: int, *, sealed: bool) -> None:
        super().__init__(fs, directory, base, sealed=sealed)
        self.batches_size = 0  # of the sidecar

    def sizes(self) -> dict[str, int]:
        return {
            DATA: self.data_size,
            INDEX: self.rows * INDEX_SIZE,
            BATCHES: self.batches_size,
        }

    def take_sizes(self, sizes: Mapping[str, int]) -> None:
        self.data_size, self.batches_size = sizes[DATA], sizes[BATCHES]

    def extend(self, write: Write) -> None:
        self.data_size += write.size
        self.rows += write.count
        self.batches_size += BATCH_SIZE * len(write.parts[BATCHES])
        self.newest = write.time
        self.end = write.first + write.count

    def oldest(self) -> int:
        first = self.batch_rows(0, 1)
        return int(first["time"][0]) if len(first) else self.newest

    # Searching

    def index_rows(self, start: int, stop: int) -> np.ndarray:
        data = self.file(INDEX).read_at(start * INDEX_SIZE, (stop - start) * INDEX_SIZE)
        rows = np.frombuffer(data, INDEX_TYPE, len(data) // INDEX_SIZE)
        if len(rows) < stop - start:
            raise Damaged(
                f"{self.path(INDEX).name} ends at row {start + len(rows)} of {self.rows}", self.end
            )
        return rows

    def row_of(self, offset: int) -> int:
        """Return the first row whose offset is at least `offset`; `rows` if there is none."""
        if self.dense:
            return min(max(0, offset - self.base), self.rows)
        return self._search("offset", offset)

    def _search(self, column: str, value: int) -> int:
        low, high = 0, self.rows  # the answer lies in [low, high]
        while high - low > WINDOW_ROWS:
            middle = (low + high) // 2
            if int(self.index_rows(middle, middle + 1)[column][0]) < value:
                low = middle + 1
            else:
                high = middle
        window = self.index_rows(low, high)[column]
        return low + int(np.searchsorted(window, np.uint64(value)))

    def records_from(self, offset: int) -> int:
        if not self.base < offset < self.end:
            return self.rows if offset <= self.base else 0
        return self.rows - self.row_of(offset)

    def offset_of(self, row: int) -> int:
        """Return the offset of this row's record; for the row after the last, the end."""
        return int(self.index_rows(row, row + 1)["offset"][0]) if row < self.rows else self.end

    def position_of(self, row: int) -> int:
        """Return where this row's record begins. The row after the last is the end of the data."""
        return (
            int(self.index_rows(row, row + 1)["position"][0]) if row < self.rows else self.data_size
        )

    def row_at(self, position: int) -> int:
        """Return the first row whose record begins at or after this position."""
        return self._search("position", position)

    # Reading

    def read(self, offset: int, max_records: int, max_bytes: int) -> Batch:
        """Read records. If there is one at or after `offset`, return at least one of any size."""
        row = self.row_of(offset)
        if row >= self.rows:
            return empty_batch(self.end)
        try:
            rows, positions, end = self._span(row, offset, max_bytes, min(max_records, MAX_ROWS))
            start = int(positions[0])
            buffer = self.file(DATA).read_at(start, end - start)
            starts = positions - start
            good, lengths = self._check(buffer, rows["offset"], starts, end - start)
            if good == 0:
                raise _Mismatch
            starts = starts[:good] + HEADER_SIZE
            ends = starts + lengths[:good]
            offsets = rows["offset"][:good].astype(np.int64)
        except _Mismatch:
            walked, end = self._walk(row, offset, max_records, max_bytes)
            start = walked[0][1]
            buffer = self.file(DATA).read_at(start, end - start)
            offsets, positions = np.array(walked, np.int64).T
            starts = positions - start + HEADER_SIZE
            ends = np.append(starts[1:] - HEADER_SIZE, end - start)
        return Batch(buffer, offsets, starts, ends, int(offsets[-1]) + 1)

    def _check(
        self, buffer: bytes, offsets: np.ndarray, starts: np.ndarray, size: int
    ) -> tuple[int, np.ndarray]:
        """Return how many leading records agree with their headers and neighbours, and their
        lengths. 0 if the positions are impossible.
        """
        steps = starts[1:] - starts[:-1]
        step = int(steps[0]) if len(steps) else size
        if (
            step >= HEADER_SIZE
            and size == len(starts) * step == len(buffer)
            and (steps == step).all()
        ):
            # records of one length: their headers are columns with a stride
            lengths = np.ndarray(len(starts), "<u4", buffer, 8, (step,))
            stored = np.ndarray(len(starts), "<u8", buffer, 0, (step,))
            if (stored == offsets).all() and (lengths == step - HEADER_SIZE).all():
                return len(starts), lengths
        if (
            len(buffer) < size
            or bool((steps < HEADER_SIZE).any())
            or size < starts[-1] + HEADER_SIZE
        ):
            return 0, _NONE
        # views with a stride of one byte: entry p is the integer that begins at byte p (or p + 8)
        stored = np.ndarray(len(buffer) - 7, "<u8", buffer, 0, (1,))[starts]
        lengths = np.ndarray(len(buffer) - 11, "<u4", buffer, 8, (1,))[starts].astype(np.int64)
        ends = starts + HEADER_SIZE + lengths
        fine = stored == offsets
        # the record before a hole is good; the next read returns the one after it
        fine[1:] &= ends[:-1] == starts[1:]
        fine[-1] &= bool(ends[-1] <= size)
        good = len(fine) if bool(fine.all()) else int(np.argmin(fine))
        if 0 < good < len(fine) and int(ends[good - 1]) > int(starts[good]):
            good -= 1  # its own length runs into the next record
        return good, lengths

    def raw(self, offset: int, max_bytes: int) -> Raw:
        row = self.row_of(offset)
        if row >= self.rows:
            return Raw(self.end, 0, self.end, None, 0, 0)
        try:
            rows, positions, end = self._span(row, offset, max_bytes, None)
            start, offsets = int(positions[0]), rows["offset"]
            first, last = int(offsets[0]), int(offsets[-1])
            if self._offset_at(start) != first or self._offset_at(int(positions[-1])) != last:
                raise _Mismatch
        except _Mismatch:
            walked, end = self._walk(row, offset, MAX_ROWS, max_bytes)
            rows, (first, start), (last, _) = np.array(walked, INDEX_TYPE), walked[0], walked[-1]
        return Raw(first, len(rows), last + 1, self.file(DATA), start, end - start, rows)

    def _span(
        self, row: int, offset: int, max_bytes: int, max_records: int | None
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the index rows of a read from `row` on, the positions of their records, and the
        end of the last one.

        The number of rows is estimated from the average size of a record, so one read of the index
        is nearly always sufficient.
        """
        remaining = self.rows - row
        most = remaining if max_records is None else min(remaining, max(1, max_records))
        count = most
        if most > MIN_GUESSED_ROWS:
            count = min(most, max_bytes * self.rows // max(self.data_size, 1) * 5 // 4 + 16)
        while True:
            rows = self.index_rows(row, min(row + count + 1, self.rows))
            positions = rows["position"].astype(np.int64)
            if count == remaining:
                positions = np.append(positions, self.data_size)
            start = int(positions[0])
            if count == most or positions[-1] - start > max_bytes:
                break
            count = min(most, 2 * count)
        if int(rows["offset"][0]) != offset:
            self._explain_gap(rows, offset)
        end = int(positions[count])
        if end - start > max_bytes:
            count = max(1, int(np.searchsorted(positions, start + max_bytes, "right")) - 1)
            end = int(positions[count])
        if self.holes:
            count, end = self._before_hole(positions, count, offset)
        if not 0 <= start < end <= self.data_size:
            raise _Mismatch
        return rows[:count], positions[:count], end

    def _explain_gap(self, rows: np.ndarray, offset: int) -> None:
        """Raise if a missing offset was lost to damage. If compaction removed it, return."""
        if self.dense:
            raise _Mismatch
        following, position = int(rows["offset"][0]), int(rows["position"][0])
        for start, end in self.holes:
            if end == position:
                name = self.path(DATA).name
                text = f"{name}: offsets {offset} to {following - 1} are lost, "
                raise Damaged(f"{text}bytes {start} to {end} are damaged", following)

    def _before_hole(self, positions: np.ndarray, count: int, offset: int) -> tuple[int, int]:
        """Return how many of these records come before the next hole, and where they end."""
        start, end = int(positions[0]), int(positions[count])
        for begin, stop in self.holes:
            if begin <= start < stop:
                raise self._in_hole(begin, stop, offset)
            if start < begin < end:
                count, end = int(np.searchsorted(positions[: count + 1], begin)), begin
        return count, end

    def _in_hole(self, begin: int, stop: int, offset: int) -> Damaged:
        # resume after `offset`, so that a reader makes progress even if the index is wrong
        resume = max(self.offset_of(self.row_at(stop)), offset + 1)
        text = f"{self.path(DATA).name}: bytes {begin} to {stop} are damaged, "
        return Damaged(f"{text}records continue at offset {resume}", resume)

    def _offset_at(self, position: int) -> int:
        """Return the offset in the record header at this position; -1 if none fits there."""
        return record_at(self.file(DATA), position, self.data_size)[0]

    def _agrees(self, row: int) -> bool:
        offset, position = self.index_rows(row, row + 1)[0]
        return self._offset_at(int(position)) == int(offset)

    def _walk(
        self, row: int, offset: int, max_records: int, max_bytes: int
    ) -> tuple[list[tuple[int, int]], int]:
        """Walk headers; return (offset, position) of records from `offset` on, and their end."""
        if self.on_mismatch is not None:
            self.on_mismatch(self)
        at = expected = 0
        for before in range(row - 1, max(-1, row - 1 - WINDOW_ROWS), -1):
            if self._agrees(before):
                at = self.position_of(before)
                break
        else:
            row = WINDOW_ROWS
        rows: list[tuple[int, int]] = []
        size = 0
        for _ in range(row + WINDOW_ROWS + max_records):
            current, end = record_at(self.file(DATA), at, self.data_size)
            if end > self.data_size or not expected <= current < self.end:
                break
            if current >= offset:
                hole = next(
                    ((begin, stop) for begin, stop in self.holes if begin <= at < stop), None
                )
                if hole is not None:
                    if rows:
                        return rows, at
                    raise self._in_hole(*hole, offset)
                size += end - at
                if rows and (size > max_bytes or len(rows) == max_records):
                    return rows, at
                rows.append((current, at))
            at, expected = end, current + 1
        if rows:
            return rows, at
        following = range(row + 1, min(self.rows, row + 8 * WINDOW_ROWS))
        raise Damaged(
            f"{self.path(DATA).name}: the record at byte {at} (offset {offset}) is damaged",
            self.offset_of(next(filter(self._agrees, following), self.rows)),
        )

    # Times, from the sidecar

    def batch_rows(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        count = self.batches_size // BATCH_SIZE
        stop = count if stop is None else min(stop, count)
        if start >= stop:
            return np.empty(0, BATCH_TYPE)
        data = self.file(BATCHES).read_at(start * BATCH_SIZE, (stop - start) * BATCH_SIZE)
        return np.frombuffer(data, BATCH_TYPE, len(data) // BATCH_SIZE)

    def _batch_search(self, column: str, value: int) -> int:
        """Return the first sidecar row whose column is above `value`."""
        low, high = 0, self.batches_size // BATCH_SIZE
        while low < high:
            middle = (low + high) // 2
            rows = self.batch_rows(middle, middle + 1)
            if not len(rows) or int(rows[column][0]) > value:
                high = middle
            else:
                low = middle + 1
        return low

    def times(self, offsets: np.ndarray) -> np.ndarray:
        """Return append times in microseconds. Without a sidecar row, it is that of the file."""
        rows = np.empty(0, BATCH_TYPE)
        if len(offsets) and self.batches_size:
            start = max(0, self._batch_search("first", int(offsets[0])) - 1)
            rows = self.batch_rows(start, self._batch_search("first", int(offsets[-1])))
        first = rows["first"].astype(np.int64)
        ends = np.where(rows["flags"] & COMPACTED, np.iinfo(np.int64).max, first + rows["count"])
        # Batch i has the records begins[i] to stops[i]; those between two batches belong to none.
        begins = np.append(np.searchsorted(offsets, first), len(offsets))
        stops = np.clip(np.searchsorted(offsets, ends), begins[:-1], begins[1:])
        runs = np.empty(2 * len(rows) + 1, np.int64)
        runs[0], runs[1::2], runs[2::2] = begins[0], stops - begins[:-1], begins[1:] - stops
        times = np.zeros(len(runs), np.int64)
        times[1::2] = rows["time"]
        if runs[0::2].any():
            times[0::2] = self.modified()
        return np.repeat(times, runs)

    def offset_at(self, microseconds: int) -> int | None:
        """Return the first offset appended at or after this time, if this segment has one."""
        if self.newest < microseconds or not self.rows:
            return None
        if not self.batches_size:
            return self.base
        row = self._batch_search("time", microseconds - 1)
        rows = self.batch_rows(row, row + 1)
        return int(rows["first"][0]) if len(rows) else None
