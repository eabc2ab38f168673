"""Read a topic's files while another process owns them: ranges of records as numpy columns.

For readers on the same host (Spark executors, offline tools) that get the end offset from the
broker, or that read a directory that no broker has open. The reader writes nothing and needs no
lock. Meanwhile the owner may roll (`data.log` is renamed), delete or compact segments. If a file is
gone, or an index does not match its data, the reader lists the directory again. A contradiction
that remains is `Damaged`. During a swap of segments (a file `swap-...` exists), names and contents
may not match, so the reader waits for its end.

The formats are in `penstock.log.layout`.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import Damaged, InvalidOffset, NotFound, Unavailable
from penstock.io.fs import DISK, Bytes
from penstock.log.aiq.encode import frame_payloads
from penstock.log.aiq.scan import record_at
from penstock.log.aiq.segment import AiqSegment
from penstock.log.batches.format import BATCHES as BATCHES_FORMAT
from penstock.log.batches.index import SparseIndex
from penstock.log.batches.segment import BatchSegment
from penstock.log.batches.walk import whole_batches
from penstock.log.layout import (
    BATCH_SIZE,
    BATCHES,
    DAMAGE,
    DATA,
    HEADER_SIZE,
    INCARNATION,
    INDEX,
    INDEX_SIZE,
    INDEX_TYPE,
    KINDS,
    LIMITS,
    METADATA,
    SWAP_PREFIX,
    TIER,
    has_batches,
    parse_metadata,
    parse_sealed,
)
from penstock.log.limits import TopicLimits
from penstock.log.segment import Batch, Segment
from penstock.protocol.kafka_batch import KafkaRecord
from penstock.protocol.record_batch import Record

T = TypeVar("T")

MAX_ATTEMPTS = 16  # listings of the directory before a contradiction counts as damage
# The longest wait for a swap. It takes a few renames and fsyncs, unless its broker was killed.
SWAP_SECONDS = 10.0
SIDECAR_RETRY_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.3)  # before the sidecar counts as lost
MAX_ROWS = 1 << 15
MAX_BYTES = 16 << 20


class Slice(NamedTuple):
    """Consecutive records: record i is `raw[starts[i]:starts[i + 1]]`, its header included."""

    raw: memoryview
    starts: npt.NDArray[np.int64]  # one more than the records
    offsets: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]  # append times, microseconds since 1970
    # With keys and headers, if the format has them and `keyed` was given.
    records: Sequence[KafkaRecord | Record] | None = None


class OpenBatchSegment(BatchSegment):
    """A segment of record batches whose files were opened together. The index of an active segment
    ends at the last checkpoint; the batches after it are walked."""

    __slots__ = ("_modified", "timed")

    def __init__(self, directory: Path, base: int | None) -> None:
        super().__init__(DISK, directory, base or 0, sealed=base is not None)
        self.timed = True
        self.adopt(DATA, DISK.open(self.path(DATA), write=False))
        status = os.fstat(self.file(DATA).fileno())
        if self.path(DATA).stat().st_ino != status.st_ino:
            raise FileNotFoundError(self.path(DATA))  # rolled or swapped meanwhile
        self._modified = status.st_mtime_ns // 1000
        index = SparseIndex.parse(self.path(INDEX).read_bytes())
        if index is None or (base is not None and index.size != status.st_size):
            index = SparseIndex(base if base is not None else self._first_offset())
        if index.size > status.st_size:
            raise FileNotFoundError(self.path(DATA))  # the index belongs to the previous segment
        limit = None if base is None else 1 << 62
        file = self.file(DATA)
        for batch in whole_batches(file, index.size, status.st_size, index.end, limit=limit):
            index.add(batch.stored())
        self.take_index(index)

    def _first_offset(self) -> int:
        return max(0, BATCHES_FORMAT.first_offset(self.file(DATA)))

    def modified(self) -> int:
        return self._modified


class OpenSegment(AiqSegment):
    """A segment whose files were opened together. They match each other, even if they were renamed
    since."""

    __slots__ = ("_modified", "timed")

    def __init__(self, directory: Path, base: int | None) -> None:
        super().__init__(DISK, directory, base or 0, sealed=base is not None)
        for kind in (DATA, INDEX, BATCHES):
            try:
                self.adopt(kind, DISK.open(self.path(kind), write=False))
            except FileNotFoundError:
                if kind != BATCHES:
                    raise
        status = os.fstat(self.file(DATA).fileno())
        if self.path(DATA).stat().st_ino != status.st_ino:
            # rolled or swapped while we opened the other files: they do not match
            raise FileNotFoundError(self.path(DATA))
        self.timed = self.open_files == len(KINDS)  # it has a sidecar
        self.batches_size = self.file(BATCHES).size if self.timed else 0
        self._modified = status.st_mtime_ns // 1000
        last = self.batch_rows(max(0, self.batches_size // BATCH_SIZE - 1))
        self.newest = int(last["time"][0]) if len(last) else self._modified
        self.rows = self.file(INDEX).size // INDEX_SIZE
        if self.rows:
            self.end = self.offset_of(self.rows - 1) + 1
            if not self.sealed:
                self.base = self.offset_of(0)
        self.data_size = status.st_size if self.sealed else self._end_of_last(status.st_size)

    def _end_of_last(self, size: int) -> int:
        """Return the end position of the last record in the active segment's index."""
        position = self.position_of(self.rows - 1) if self.rows else size
        _, end = record_at(self.file(DATA), position, size)
        return min(size, end) if end >= 0 else size

    def modified(self) -> int:
        return self._modified


def slices(segment: Segment, start: int, end: int, *, keyed: bool = False) -> Iterator[Slice]:
    """Yield the records of a segment from `start` up to, not including, `end`: at most MAX_ROWS and
    about MAX_BYTES at a time. The headers match the index, or the data was walked.
    """
    at = max(start, segment.base)
    while at < min(end, segment.end):
        batch = segment.read(at, min(end - at, MAX_ROWS), MAX_BYTES)
        keep = int(np.searchsorted(batch.offsets, end))
        if not keep:
            return
        times = segment.times(batch.offsets[:keep])
        yield slice_of(batch, times, keyed=keyed)
        at = batch.next_offset


def slice_of(batch: Batch, times: npt.NDArray[np.int64], *, keyed: bool) -> Slice:
    """Return the first records of a batch, as many as there are `times` (microseconds)."""
    keep = len(times)
    raw: Bytes = batch.buffer
    starts = batch.starts[:keep]
    if batch.keyed:
        raw, starts = _framed(batch, keep)
    starts = np.append(starts - HEADER_SIZE, starts[-1] + batch.length(keep - 1))
    records = batch.records() if keyed else None
    kept = None if records is None else records[:keep]
    return Slice(memoryview(raw), starts, batch.offsets[:keep], times, kept)


def _framed(batch: Batch, keep: int) -> tuple[Bytes, np.ndarray]:
    """Frame the values of record batches as in aiq's layout: a header before each."""
    values = batch.payloads()[:keep]
    data, index, _ = frame_payloads(values, 0, 0)
    rows = np.frombuffer(index, INDEX_TYPE)
    return data, rows["position"].astype(np.int64) + HEADER_SIZE


def _back_off(attempt: int) -> None:
    """Wait before the next attempt, longer each time, so that a busy broker can finish."""
    time.sleep(min(0.05, 0.0005 * 2**attempt))


class TopicFiles:
    """The records of one topic's directory."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise NotFound(f"topic directory {directory} does not exist")
        self.directory = directory

    @property
    def incarnation(self) -> str:
        """Return 32 hexadecimal digits; zeros for a directory of aiq, which has no incarnation."""
        try:
            return (self.directory / INCARNATION).read_text().split(" ")[0]
        except FileNotFoundError:
            return "0" * 32

    @property
    def tiered(self) -> bool:
        """Check whether some segments may be in the tier only."""
        return (self.directory / TIER).exists()

    def bounds(self) -> tuple[int, int]:
        """Return the first offset and the next offset."""
        return self._retrying(self._bounds)

    def _bounds(self) -> tuple[int, int]:
        bounds: list[tuple[int, int]] = []
        for segment in self._segments(self._bases()):
            if segment.rows:
                bounds.append((segment.base, segment.end))
            elif not segment.sealed:
                end = segment.end if has_batches(self.directory) else self._metadata()
                bounds.append((end, end))
        if not bounds:
            return 0, 0
        first, end = min(f for f, _ in bounds), max(n for _, n in bounds)
        return max(first, min(self._deleted(), end)), end

    def _deleted(self) -> int:
        """Return the offset before which an operator deleted the records; 0 if none."""
        try:
            limits = TopicLimits.parse((self.directory / LIMITS).read_bytes())
        except FileNotFoundError:
            return 0
        return limits.start if limits is not None else 0

    def _retrying(self, read: Callable[[], T]) -> T:
        """Call `read`. Repeat it if a file was renamed or deleted since it was listed."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                return read()
            except FileNotFoundError:
                _back_off(attempt)
        raise Damaged(f"{self.directory}: the segments change faster than they can be listed")

    def bytes(self) -> int:
        """Return the size of the data with headers."""
        return sum(
            (self.directory / name).stat().st_size
            for name in os.listdir(self.directory)
            if name == DATA or _sealed_base(name) is not None
        )

    def offset_at(self, microseconds: int) -> int:
        """Return the first offset appended at or after this time, or the next offset."""

        def search() -> int | None:
            segments = self._segments(self._bases())
            offsets = (segment.offset_at(microseconds) for segment in segments)
            return next((at for at in offsets if at is not None), None)

        offset = self._retrying(search)
        first, end = self.bounds()
        return end if offset is None else max(offset, first)

    def read(self, start: int, end: int, *, keyed: bool = False) -> Iterator[Slice]:
        """Yield the records in [start, end), with `keyed` also their keys and headers. Offsets that
        compaction removed are skipped.

        Raises `InvalidOffset` if retention has deleted the segment of `start`, and `Damaged` at
        lost records.
        """
        if start < (first := self._deleted()):
            raise InvalidOffset(f"offset {start} was deleted; the first one left is {first}")
        for lost_from, lost_to in self._lost():
            if start < lost_to and lost_from < end:
                yield from self._read(start, lost_from, keyed)
                raise Damaged(
                    f"{self.directory}: offsets {lost_from} to {lost_to - 1} are lost", lost_to
                )
        yield from self._read(start, end, keyed)

    def _lost(self) -> list[tuple[int, int]]:
        """Return the ranges [from, to) that the broker recorded as lost, in order."""
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
                f"{self.directory / DAMAGE} cannot be read: {error}; start a broker to repair it"
            ) from None

    def _read(self, start: int, end: int, keyed: bool) -> Iterator[Slice]:
        attempts = 0
        while start < end:
            try:
                bases = self._bases()
                for segment in self._segments(bases, self._from(bases, start)):
                    for piece in slices(segment, start, end, keyed=keyed):
                        yield piece
                        attempts = 0
                        start = int(piece.offsets[-1]) + 1
                return
            except (FileNotFoundError, Damaged) as error:  # perhaps the broker swapped files
                attempts += 1
                if attempts >= MAX_ATTEMPTS:
                    raise Damaged(f"{self.directory}: {error}") from None
                _back_off(attempts)

    def _segments(
        self, listed: list[int | None], bases: list[int | None] | None = None
    ) -> Iterator[OpenSegment | OpenBatchSegment]:
        """Open the segments in `listed`, or only those in `bases`. Raises FileNotFoundError if the
        topic was rolled since: the active segment is then another one.
        """
        for base in listed if bases is None else bases:
            segment = self._open(base)
            if base is None and self._bases() != listed:
                raise FileNotFoundError(segment.path(DATA))
            yield segment

    def _open(self, base: int | None) -> OpenSegment | OpenBatchSegment:
        opened = OpenBatchSegment if has_batches(self.directory) else OpenSegment
        segment = opened(self.directory, base)
        for pause in SIDECAR_RETRY_SECONDS if (self.directory / INCARNATION).exists() else ():
            if segment.timed:
                break
            # A sidecar is renamed or removed before the other files, so a missing one may only mean
            # that the broker is about to rename or remove them.
            time.sleep(pause)
            segment = opened(self.directory, base)
        if base is not None and _swap_marker(os.listdir(self.directory)) is not None:
            # the swap may include this segment, whose files may then not match
            raise FileNotFoundError(segment.path(DATA))
        return segment

    def _names_without_swap(self) -> list[str]:
        """Return the names of the files, after waiting for the end of a swap."""
        deadline, pause = time.monotonic() + SWAP_SECONDS, 0.001
        while True:
            names = os.listdir(self.directory)
            swap = _swap_marker(names)
            if swap is None:
                return names
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{self.directory / swap}: an unfinished swap of segments; "
                    "start a broker to finish it"
                )
            time.sleep(pause)
            pause = min(0.1, 2 * pause)

    def _bases(self) -> list[int | None]:
        """Return the bases of the sealed segments in order, then None for the active one."""
        names = self._names_without_swap()
        sealed = sorted(base for name in names if (base := _sealed_base(name)) is not None)
        return [*sealed, *([None] if DATA in names else [])]

    def _from(self, bases: list[int | None], start: int) -> list[int | None]:
        """Return the bases of the segments from the one that may contain `start`."""
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
    """Return the base of a sealed segment whose data file has this name."""
    sealed = parse_sealed(name)
    return sealed[1] if sealed is not None and sealed[0] == DATA else None


def _swap_marker(names: list[str]) -> str | None:
    return next((name for name in names if name.startswith(SWAP_PREFIX)), None)
