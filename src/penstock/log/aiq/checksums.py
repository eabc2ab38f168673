"""Compare data with the checksums of its sidecar, piece by piece, for `verify`, compaction and the
scrub.

A sidecar is read in windows of rows, so that one with millions of rows needs little memory. The
batches of a window are read in runs: several small batches together, or a large one alone, in
parts.
"""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from crc32c import crc32c

from penstock.errors import Damaged, StorageFailed
from penstock.io.fs import File
from penstock.log.aiq.scan import agreeing
from penstock.log.aiq.segment import AiqSegment
from penstock.log.damage import Hole
from penstock.log.layout import BATCH_SIZE, BATCHES, DATA, INDEX, INDEX_SIZE, parse_batches
from penstock.log.segment import Fault

log = logging.getLogger("penstock.topics")

ROWS_PER_WINDOW = 1 << 14
PART_BYTES = 1 << 20  # of a large batch, read at once
INDEX_ROWS_PER_STEP = 1 << 15  # for data without sidecar rows


def sidecar(file: File, size: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield windows of rows: the number of the first row, the rows, and which are intact."""
    count = size // BATCH_SIZE
    for at in range(0, count, ROWS_PER_WINDOW):
        rows, good = parse_batches(
            file.read_at(at * BATCH_SIZE, min(ROWS_PER_WINDOW, count - at) * BATCH_SIZE)
        )
        yield at, rows, good


def runs(rows: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Yield runs of adjacent batches of up to `most` bytes together. A larger batch comes alone."""
    starts, ends = rows["start"].tolist(), rows["end"].tolist()
    at = 0
    while at < len(starts):
        stop = at + 1
        while stop < len(starts) and ends[stop] - starts[at] <= most:
            stop += 1
        yield rows[at:stop]
        at = stop


def failing(data: File, run: np.ndarray) -> list[int]:
    """Return which batches of a run do not match their checksum."""
    starts, ends, sums = (run[column].tolist() for column in ("start", "end", "crc"))
    if len(starts) == 1:
        return [] if checksum(data, starts[0], ends[0]) == sums[0] else [0]
    return mismatched(memoryview(data.read_at(starts[0], ends[-1] - starts[0])), run)


def mismatched(buffer: memoryview, run: np.ndarray) -> list[int]:
    """Return which batches of a run, read before, do not match their checksum."""
    starts, ends, sums = (run[column].tolist() for column in ("start", "end", "crc"))
    begin = starts[0]
    return [
        i
        for i, (start, end, wanted) in enumerate(zip(starts, ends, sums, strict=True))
        if crc32c(buffer[start - begin : end - begin]) != wanted or end - begin > len(buffer)
    ]


def checksum(data: File, start: int, end: int) -> int | None:
    """Return the CRC32C of these bytes; None if some of them are missing."""
    value = 0
    while start < end:
        part = data.read_at(start, min(PART_BYTES, end - start))
        if not part:
            return None
        value = crc32c(part, value)
        start += len(part)
    return value


class AiqCheck:
    """Check one sealed segment, in steps that block."""

    def __init__(self, segment: AiqSegment) -> None:
        self.segment = segment
        self.faults: list[Fault] = []
        self.unchecked = 0
        self._row = 0  # the index rows before it are checked
        self._index_sound = True

    def steps(self) -> Iterator[int]:
        """Yield how many bytes were read, after each step."""
        segment, at = self.segment, 0
        data, batches = segment.file(DATA), segment.file(BATCHES)
        for number, rows, good in sidecar(batches, segment.batches_size):
            good &= self._note_rows(number, rows, good)
            yield len(rows) * BATCH_SIZE
            for run in runs(rows[good], PART_BYTES):
                start = int(run["start"][0])
                if start > at:
                    yield from self._bare(data, at, start)
                yield from self._check(data, run)
                at = int(run["end"][-1])
            batches.forget(number * BATCH_SIZE, len(rows) * BATCH_SIZE)
        if at < segment.data_size:
            yield from self._bare(data, at, segment.data_size)
        segment.file(INDEX).forget(0, segment.rows * INDEX_SIZE)

    def _note_rows(self, number: int, rows: np.ndarray, good: np.ndarray) -> np.ndarray:
        """Report rows that are invalid. Return which rows describe existing data."""
        name = self.segment.path(BATCHES).name
        inside = (rows["end"] <= self.segment.data_size) & (rows["start"] < rows["end"])
        for wrong, what in (
            (~good, "a row does not match its checksum: its records have none"),
            (good & ~inside, "a row describes data that does not exist"),
        ):
            positions = (number + np.flatnonzero(wrong)) * BATCH_SIZE
            self.faults += [Fault(name, position, what, {}) for position in positions.tolist()]
        return inside

    def _check(self, data: File, run: np.ndarray) -> Iterator[int]:
        start, end = int(run["start"][0]), int(run["end"][-1])
        data.forget(start, end - start)
        try:
            if end - start > PART_BYTES:
                wrong = failing(data, run)
                source: File | _Window = data
            else:
                source = _Window(start, data.read_at(start, end - start))
                wrong = mismatched(source.view, run)
        except StorageFailed:  # check each batch alone, to learn which one cannot be read
            source, wrong = data, list(range(len(run)))
        lost = [i for i in wrong if not self._is_fine_on_disk(data, run[i])]
        if lost:
            self._add_holes(run, lost)
            self._row = self._row_after(end)
        else:
            self._check_index(source, start, end)
        data.forget(start, end - start)
        yield end - start

    def _is_fine_on_disk(self, data: File, row: Any) -> bool:
        """Read the batch again, from the disk. Return whether it matches its checksum."""
        start, end = int(row["start"]), int(row["end"])
        data.forget(start, end - start)
        try:
            fine = checksum(data, start, end) == int(row["crc"])
        except StorageFailed:
            return False
        if fine:
            name = self.segment.path(DATA).name
            log.warning(
                "%s: bytes %d to %d failed their CRC32C but matched it when read again",
                name,
                start,
                end,
            )
        return fine

    def _add_holes(self, run: np.ndarray, lost: list[int]) -> None:
        segment, name = self.segment, self.segment.path(DATA).name
        for i in lost:
            start, end, first, count = (
                int(run[column][i]) for column in ("start", "end", "first", "count")
            )
            if self._in_hole(start, end):
                continue
            after = segment.offset_of(self._row_after(end))
            what = (
                f"offsets {first} to {after - 1} ({count} records), "
                f"bytes {start} to {end} fail their CRC32C"
            )
            hole = Hole(start, end, first, after)
            self.faults.append(Fault(name, start, what, {"base": segment.base, **hole._asdict()}))

    def _row_after(self, end: int) -> int:
        try:
            return self.segment.row_at(end)
        except (Damaged, StorageFailed):  # the index is damaged as well
            return self.segment.rows

    def _in_hole(self, start: int, end: int) -> bool:
        """Return whether a known hole overlaps these bytes."""
        return any(begin < end and start < stop for begin, stop in self.segment.holes)

    def _bare(self, data: File, start: int, end: int) -> Iterator[int]:
        """Check records that no checksum covers: compare the index with their headers."""
        self.unchecked += end - start
        while start < end:
            row = min(self._row + INDEX_ROWS_PER_STEP, self._row_after(end))
            stop = self.segment.position_of(row) if row > self._row else end
            self._check_index(data, start, stop)
            data.forget(start, stop - start)
            yield stop - start
            start = stop if stop > start else end

    def _check_index(self, source: "File | _Window", start: int, end: int) -> None:
        """Compare records with their index rows. The first record begins at `start`."""
        segment, first = self.segment, self._row
        if not self._index_sound:
            return
        try:
            stop = segment.row_at(end)
            rows = segment.index_rows(first, stop)
            good = agreeing(source, rows, end, start)
        except (Damaged, StorageFailed):
            good, stop = 0, first
        if good < stop - first or stop == first:
            self._row = stop
            if self._in_hole(start, end):
                return
            self._index_sound = False  # report one fault only: it may cause the later ones
            what = f"a row does not match {segment.path(DATA).name}: records are located without it"
            self.faults.append(
                Fault(segment.path(INDEX).name, (first + good) * INDEX_SIZE, what, {})
            )
        self._row = stop


class _Window:
    """A part of a file, in memory."""

    def __init__(self, start: int, data: bytes) -> None:
        self.start, self.view = start, memoryview(data)

    def read_at(self, position: int, length: int) -> memoryview:
        return self.view[position - self.start : position - self.start + length]
