"""Reading a topic's files beside the process that owns them: ranges of records as numpy columns.

For readers on the same host (Spark executors, offline tools) who know from the broker how far they
may read, or who read a directory no broker has open. Nothing is written and nothing is locked. The
owner may meanwhile roll (`data.log` is renamed), delete or compact segments: a file that is gone,
or an index that does not fit its data, makes the reader list the directory again, and what then is
still contradictory is `Damaged`. While a swap of segments is being made (there is a file
`swap-...`) names and contents may not belong together, so the reader waits for its end.

The formats are in `penstock.log.layout`.
"""

import json
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import Damaged, InvalidOffset, NotFound, Unavailable
from penstock.log.layout import (
    BATCH_TYPE,
    BATCHES,
    COMPACTED,
    DAMAGE,
    DATA,
    HEADER_SIZE,
    INCARNATION,
    INDEX,
    INDEX_TYPE,
    METADATA,
    SWAP_PREFIX,
    TIER,
    parse_metadata,
    parse_sealed,
    sealed_name,
)

MAX_ATTEMPTS = 16  # listings of the directory before a contradiction counts as damage
# The longest wait for a swap: a few renames and fsyncs, unless its broker was killed.
SWAP_SECONDS = 10.0
SIDECAR_RETRY_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.3)  # before it counts as lost
MAX_ROWS = 1 << 15
MAX_BYTES = 16 << 20


class Slice(NamedTuple):
    """Consecutive records: record i is `raw[starts[i]:starts[i + 1]]`, its header included."""

    raw: memoryview
    starts: npt.NDArray[np.int64]  # one more than there are records
    offsets: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]  # append times, microseconds since 1970


class _Segment:
    """One segment's files, opened together."""

    def __init__(self, directory: Path, base: int | None) -> None:
        data, index, batches = (
            directory / (kind if base is None else sealed_name(kind, base))
            for kind in (DATA, INDEX, BATCHES)
        )
        self.path = data
        self.timed = True  # whether it has a sidecar
        self.data = os.open(data, os.O_RDONLY | os.O_CLOEXEC)  # -1 once closed
        try:
            status = os.fstat(self.data)
            self.modified = status.st_mtime_ns // 1000
            self.index = self._map(index, INDEX_TYPE)
            self.batches = self._map(batches, BATCH_TYPE, optional=True)
            if data.stat().st_ino != status.st_ino:
                # rolled or swapped while we opened the rest: they do not belong together
                raise FileNotFoundError(data)
        except BaseException:
            self.close()
            raise

    def _map(self, path: Path, row: np.dtype, *, optional: bool = False) -> np.ndarray:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if optional:
                self.timed = False
                return np.empty(0, row)
            raise
        try:  # size and contents of one file, whatever its name means by now
            count = os.fstat(fd).st_size // row.itemsize
            if not count:
                return np.empty(0, row)
            return np.frombuffer(
                mmap.mmap(fd, count * row.itemsize, access=mmap.ACCESS_READ), row, count
            )
        finally:
            os.close(fd)

    def close(self) -> None:
        if self.data >= 0:
            os.close(self.data)
            self.data = -1

    @property
    def first_offset(self) -> int | None:
        return int(self.index["offset"][0]) if len(self.index) else None

    @property
    def next_offset(self) -> int | None:
        return int(self.index["offset"][-1]) + 1 if len(self.index) else None

    def row_of(self, offset: int) -> int:
        return int(np.searchsorted(self.index["offset"], np.uint64(offset)))

    def read(self, row: int, stop: int) -> Slice:
        """At least one and at most MAX_ROWS records from `row` on, cut at about MAX_BYTES."""
        stop = min(stop, row + MAX_ROWS)
        starts = self.index["position"][row : stop + 1].astype(np.int64)
        offsets = self.index["offset"][row:stop].astype(np.int64)
        if len(starts) == stop - row:
            starts = np.append(starts, self._end_of(int(starts[-1])))
        if starts[-1] - starts[0] > MAX_BYTES:
            keep = max(1, int(np.searchsorted(starts, starts[0] + MAX_BYTES, "right")) - 1)
            starts, offsets = starts[: keep + 1], offsets[:keep]
        begin, size = int(starts[0]), int(starts[-1] - starts[0])
        raw = os.pread(self.data, size, begin) if size > 0 else b""
        starts -= begin
        self._check(raw, starts, offsets, begin)
        return Slice(memoryview(raw), starts, offsets, self.times(offsets))

    def _end_of(self, position: int) -> int:
        header = os.pread(self.data, HEADER_SIZE, position)
        if len(header) < HEADER_SIZE:
            raise _Contradiction(
                f"{self.path.name} ends before byte {position}, where its index has a record"
            )
        return position + HEADER_SIZE + int.from_bytes(header[8:], "little")

    def _check(
        self, raw: bytes, starts: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], begin: int
    ) -> None:
        """Every header must agree with the index: that tells a stale index from a good one."""
        sizes = np.diff(starts)
        if len(raw) != int(starts[-1]) or int(sizes.min()) < HEADER_SIZE:
            raise _Contradiction(
                f"{self.path.name}: the index does not fit the data at byte {begin}"
            )
        places = starts[:-1]
        # Views of one byte's stride: entry p is the integer that begins at byte p, or 8 bytes after
        # it.
        good = np.ndarray(len(raw) - 7, "<u8", raw, strides=(1,))[places] == offsets.view(np.uint64)
        sizes -= HEADER_SIZE
        good &= np.ndarray(len(raw) - HEADER_SIZE + 1, "<u4", raw, 8, strides=(1,))[places] == sizes
        if not good.all():
            i = int(np.argmin(good))
            raise _Contradiction(
                f"{self.path.name}: the record at byte {begin + int(places[i])} "
                f"(offset {int(offsets[i])}) is damaged"
            )

    def times(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Append times; the file's modification time where the sidecar does not tell."""
        low = max(
            0, int(np.searchsorted(self.batches["first"], np.uint64(offsets[0]), "right")) - 1
        )
        high = int(np.searchsorted(self.batches["first"], np.uint64(offsets[-1]), "right"))
        if low >= high:
            return np.full(len(offsets), self.modified, np.int64)
        rows = np.array(self.batches[low:high])
        first = rows["first"].astype(np.int64)
        ends = np.where(rows["flags"] & COMPACTED, np.iinfo(np.int64).max, first + rows["count"])
        # Records of batch i are those at begins[i] to stops[i]; what lies between two batches is of
        # neither.
        begins = np.append(np.searchsorted(offsets, first), len(offsets))
        stops = np.clip(np.searchsorted(offsets, ends), begins[:-1], begins[1:])
        runs = np.empty(2 * len(rows) + 1, np.int64)
        runs[0], runs[1::2], runs[2::2] = begins[0], stops - begins[:-1], begins[1:] - stops
        times = np.full(len(runs), self.modified, np.int64)
        times[1::2] = rows["time"]
        return np.repeat(times, runs)


class _Contradiction(Exception):
    """Index and data disagree: files were swapped under us, or are damaged."""


def _back_off(attempt: int) -> None:
    """Before looking again: ever longer, so that a busy broker gets to an end."""
    time.sleep(min(0.05, 0.0005 * 2**attempt))


class TopicFiles:
    """The records of one topic's directory."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise NotFound(f"there is no topic directory {directory}")
        self.directory = directory

    @property
    def incarnation(self) -> str:
        """32 hexadecimal digits; zeros for a directory of the original server, which has none."""
        try:
            return (self.directory / INCARNATION).read_text().split(" ")[0]
        except FileNotFoundError:
            return "0" * 32

    @property
    def tiered(self) -> bool:
        """Whether some of its segments may lie in a tier only."""
        return (self.directory / TIER).exists()

    def bounds(self) -> tuple[int, int]:
        """The first offset and the one after the last."""
        for attempt in range(MAX_ATTEMPTS):
            bounds: list[tuple[int, int]] = []
            try:
                for base in self._bases():
                    segment = self._open(base)
                    segment.close()
                    if segment.first_offset is not None and segment.next_offset is not None:
                        # Its name, not its first record, says where a sealed one begins: compaction
                        # removes records.
                        bounds.append(
                            (segment.first_offset if base is None else base, segment.next_offset)
                        )
                    elif base is None:
                        following = self._metadata()
                        bounds.append((following, following))
            except FileNotFoundError:
                _back_off(attempt)
                continue  # renamed or deleted since it was listed
            return (min(f for f, _ in bounds), max(n for _, n in bounds)) if bounds else (0, 0)
        raise Damaged(f"{self.directory}: the segments change faster than they can be listed")

    def bytes(self) -> int:
        """The data's size, headers included."""
        return sum(
            (self.directory / name).stat().st_size
            for name in os.listdir(self.directory)
            if name == DATA or _sealed_base(name) is not None
        )

    def offset_at(self, microseconds: int) -> int:
        """The first offset appended at or after this time; the next offset if there is none."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                offset = self._offset_at(microseconds)
            except FileNotFoundError:
                _back_off(attempt)
                continue  # renamed or deleted since it was listed
            return self.bounds()[1] if offset is None else offset
        raise Damaged(f"{self.directory}: the segments change faster than they can be listed")

    def _offset_at(self, microseconds: int) -> int | None:
        for base in self._bases():
            segment = self._open(base)
            segment.close()
            if not len(segment.index):
                continue
            if not len(segment.batches):
                if segment.modified >= microseconds:
                    return int(segment.index["offset"][0])
                continue
            row = int(np.searchsorted(segment.batches["time"], np.uint64(max(0, microseconds))))
            if row < len(segment.batches):
                return int(segment.batches["first"][row])
        return None

    def read(self, start: int, end: int) -> Iterator[Slice]:
        """The records from `start` up to, not including, `end`. Offsets that compaction removed are
        simply not there.

        `InvalidOffset` when retention has deleted the segment that held `start`, `Damaged` at
        records that were lost.
        """
        for lost_from, lost_to in self._lost():
            if start < lost_to and lost_from < end:
                yield from self._read(start, lost_from)
                raise Damaged(
                    f"{self.directory}: offsets {lost_from} to {lost_to - 1} are lost", lost_to
                )
        yield from self._read(start, end)

    def _lost(self) -> list[tuple[int, int]]:
        """Offsets that the broker noted as lost, from and up to, in order."""
        try:
            places = json.loads((self.directory / DAMAGE).read_bytes())
            return sorted(
                (int(place["lost_from"]), int(place["lost_to"]))
                for place in places
                if "lost_to" in place
            )
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, LookupError) as error:
            raise Damaged(
                f"{self.directory / DAMAGE} cannot be read: {error}; a broker's start mends it"
            ) from None

    def _read(self, start: int, end: int) -> Iterator[Slice]:
        attempts = 0
        while start < end:
            try:
                bases = self._bases()
                for base in self._from(bases, start):
                    segment = self._open(base)
                    try:
                        if base is None and self._bases() != bases:
                            # rolled since we listed: what was active is sealed and still to be read
                            break
                        row, stop = segment.row_of(start), segment.row_of(end)
                        while row < stop:
                            piece = segment.read(row, stop)
                            yield piece
                            attempts = 0
                            start = int(piece.offsets[-1]) + 1
                            row += len(piece.offsets)
                    finally:
                        segment.close()
                else:
                    return
            except (FileNotFoundError, _Contradiction) as error:
                attempts += 1
                if attempts >= MAX_ATTEMPTS:
                    raise Damaged(f"{self.directory}: {error}") from None
                _back_off(attempts)

    def _open(self, base: int | None) -> _Segment:
        segment = _Segment(self.directory, base)
        for pause in SIDECAR_RETRY_SECONDS if (self.directory / INCARNATION).exists() else ():
            if segment.timed:
                break
            # A sidecar is the first to be renamed or removed: not to see it is no reason to guess
            # the times.
            segment.close()
            time.sleep(pause)
            segment = _Segment(self.directory, base)
        if base is not None and _swap_marker(os.listdir(self.directory)) is not None:
            segment.close()  # perhaps this one: its files may be of before and after
            raise FileNotFoundError(segment.path)
        return segment

    def _names_without_swap(self) -> list[str]:
        """The files there are while no swap is being made."""
        deadline, pause = time.monotonic() + SWAP_SECONDS, 0.001
        while True:
            names = os.listdir(self.directory)
            swap = _swap_marker(names)
            if swap is None:
                return names
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{self.directory / swap}: an unfinished swap of segments; "
                    "a broker's start ends it"
                )
            time.sleep(pause)
            pause = min(0.1, 2 * pause)

    def _bases(self) -> list[int | None]:
        """The bases of the sealed segments in order, then None for the active one."""
        names = self._names_without_swap()
        sealed = sorted(base for name in names if (base := _sealed_base(name)) is not None)
        return [*sealed, *([None] if DATA in names else [])]

    def _from(self, bases: list[int | None], start: int) -> list[int | None]:
        """The segments that may hold `start` and what follows it."""
        before = [i for i, base in enumerate(bases) if base is not None and base <= start]
        if before:
            return bases[before[-1] :]
        first = self.bounds()[0] if bases[:1] == [None] else bases[0] if bases else 0
        if first is not None and first > start:
            raise InvalidOffset(f"offset {start} has aged out; the first one left is {first}")
        return bases

    def _metadata(self) -> int:
        try:
            return parse_metadata((self.directory / METADATA).read_bytes()) or 0
        except FileNotFoundError:
            return 0


def _sealed_base(name: str) -> int | None:
    """The base of a sealed segment whose data file has this name."""
    sealed = parse_sealed(name)
    return sealed[1] if sealed is not None and sealed[0] == DATA else None


def _swap_marker(names: list[str]) -> str | None:
    return next((name for name in names if name.startswith(SWAP_PREFIX)), None)
