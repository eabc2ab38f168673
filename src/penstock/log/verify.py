"""Verify a topic: read all its files and check them against each other.

It needs only the files, so it runs on the directory of a stopped broker as well as beside a running
one. In the latter case pass `until`: the active segment is then checked only up to that offset.
Each finding names a file and a position:

- records: headers, lengths and offsets are consistent; each batch matches its CRC32C
- index rows: each points at the record of its offset; none is missing or superfluous
- sidecar rows: each matches its own CRC32C; they are consecutive and within the data
- metadata, checkpoint, incarnation, archived, policy, limits: intact and consistent with the rest
- damage.json: offsets recorded as lost, even if the files were repaired since

An interrupted swap or roll of segments is verified as it will be after the topic is opened. A
commit that a kill interrupted is reported: the files do not show whether it was acknowledged and
then lost its end.

Records without a sidecar row (written by another server, or with a damaged row) have no checksum.
They are counted as `unchecked`; only their framing is verified.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.errors import Unavailable
from penstock.io.fs import DISK, File, Fs
from penstock.log.aiq.checksums import failing, runs
from penstock.log.aiq.format import AIQ
from penstock.log.aiq.scan import agreeing, record_at
from penstock.log.batches.format import BATCHES as BATCHES_FORMAT
from penstock.log.batches.index import SparseIndex
from penstock.log.batches.walk import Located, next_whole, whole_batches
from penstock.log.damage import read_places
from penstock.log.format import SegmentFormat
from penstock.log.layout import (
    ARCHIVED,
    BATCH_SIZE,
    BATCH_TYPE,
    BATCHES,
    CHECKPOINT,
    CLEAN,
    COMPACTED,
    DAMAGE,
    DATA,
    HEADER_SIZE,
    INCARNATION,
    INDEX,
    INDEX_SIZE,
    INDEX_TYPE,
    LIMITS,
    METADATA,
    POLICY,
    RECORD_HEADER,
    SWAP_PREFIX,
    Checkpoint,
    has_batches,
    label_of,
    parse_batches,
    parse_checked,
    parse_metadata,
    parse_sealed,
    sealed_name,
)
from penstock.log.recovery.interrupted import unfinished_roll
from penstock.log.topic_directory import MAX_OFFSET

INDEX_ROWS_PER_STEP = 1 << 20
CHUNK_BYTES = 16 << 20
MAX_ATTEMPTS = 5  # beside a broker that deletes or swaps segments meanwhile


@dataclass(slots=True)
class Finding:
    file: str
    position: int
    what: str


@dataclass(slots=True)
class VerifyReport:
    topic: str
    records: int = 0
    bytes: int = 0
    unchecked: int = 0  # records that no checksum covers
    findings: list[Finding] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.findings

    def add(self, file: str, position: int, what: str) -> None:
        self.findings.append(Finding(file, position, what))


def verify(
    directory: Path,
    *,
    fs: Fs = DISK,
    until: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Verify the topic in this directory. `progress` gets the bytes read and the total bytes."""
    kind = _BatchVerifier if has_batches(directory) else _Verifier
    if until is None:
        return kind(directory, fs, until, progress).run()
    for _ in range(MAX_ATTEMPTS):
        shape = _shape(fs, directory)
        with contextlib.suppress(FileNotFoundError):
            report = kind(directory, fs, until, progress).run()
            if report.sound or _shape(fs, directory) == shape:
                return report
    raise Unavailable(f"the segments of {directory.name} change faster than they can be checked")


def _shape(fs: Fs, directory: Path) -> list[tuple[str, int, float]]:
    """Return names, sizes and times, which change when a sealed file is replaced."""
    files = []
    for name in fs.list_dir(directory):
        if parse_sealed(name.removesuffix(".swap")) is not None or name.startswith(SWAP_PREFIX):
            with contextlib.suppress(FileNotFoundError):
                path = directory / name
                files.append((name, fs.size(path), fs.modified(path)))
    return files


class _Verifier:
    form: SegmentFormat = AIQ

    def __init__(
        self,
        directory: Path,
        fs: Fs,
        until: int | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.fs = fs
        self.directory = directory
        self.until = until
        self.progress = progress
        self.report = VerifyReport(label_of(directory))
        self._add = self.report.add
        self.total = 0
        self.open_state = False  # the broker did not stop cleanly, or runs
        self.renamed: dict[str, str] = {}  # names after the topic is opened, and the present ones
        self._names = self._list()  # the names after the topic is opened

    def run(self) -> VerifyReport:
        names = self._names
        files: list[tuple[str, int | None]] = []
        for base in sorted({file[1] for file in map(parse_sealed, names) if file is not None}):
            name = sealed_name(DATA, base)
            if name in names:
                files.append((name, base))
            else:
                self._add(name, 0, "is missing")
        files += [(DATA, None)] if DATA in names else []
        self.total = sum(self.fs.size(self._path(name)) for name, _ in files)
        checkpoint = self._checkpoint()
        self.open_state = checkpoint is not None and checkpoint.state != CLEAN
        ours = checkpoint is not None or INCARNATION in names
        if DATA not in names and f"{DATA}.new" not in names:  # no roll was about to create it
            self._add(DATA, 0, "is missing")
        end: int | None = None
        compacted = False
        for name, start in files:
            begin, last, gaps = self._segment(name, start, ours)
            if (
                end is not None
                and begin is not None
                and begin != end
                and not (compacted and begin > end)
            ):
                self._add(name, 0, f"begins at offset {begin}, the previous segment ends at {end}")
            compacted = gaps
            end = last if last is not None else end
        self._small_files(checkpoint, end)
        self._noted()
        return self.report

    def _list(self) -> set[str]:
        names = set(self.fs.list_dir(self.directory))
        for marker in sorted(name for name in names if name.startswith(SWAP_PREFIX)):
            bases = parse_checked(self.fs.read(self.directory / marker))
            if bases is None:
                self._add(marker, 0, "does not match its checksum")
                continue
            base, *others = (int(part) for part in bases.split(","))
            for kind in self.form.kinds:
                name = sealed_name(kind, base)
                if f"{name}.swap" in names:
                    self.renamed[name] = f"{name}.swap"
                    names.add(name)
                names.difference_update(sealed_name(kind, other) for other in others)
        unrolled = unfinished_roll(self.form, self.fs, self.directory, names)
        self.renamed.update(unrolled)
        return (names | unrolled.keys()) - set(unrolled.values())

    def _path(self, name: str) -> Path:
        return self.directory / self.renamed.get(name, name)

    # A segment

    def _segment(
        self, name: str, base: int | None, ours: bool
    ) -> tuple[int | None, int | None, bool]:
        """Check a segment. Return its first offset, its end, and whether it was compacted."""
        index_name = INDEX if base is None else sealed_name(INDEX, base)
        batches_name = BATCHES if base is None else sealed_name(BATCHES, base)
        if index_name not in self._names:
            self._add(index_name, 0, "is missing")
        if batches_name not in self._names and (ours or base is not None):
            self._add(batches_name, 0, "is missing")
        with contextlib.closing(self.fs.open(self._path(name), write=False)) as data:
            batches = self._read_batches(batches_name)
            compacted = bool(len(batches)) and bool(int(batches["flags"][0]) & COMPACTED)
            first, end, size = self._records(name, data, base, compacted)
            if index_name in self._names:
                self._index(index_name, name, data, size, first)
            self._batches(name, batches_name, data, size, batches)
        # compaction may have removed its first records, so its name has the first offset
        return base if first is None or (compacted and base is not None) else first, end, compacted

    def _records(
        self, name: str, data: File, base: int | None, gaps: bool
    ) -> tuple[int | None, int | None, int]:
        """Walk the framing. The returned size does not include records from `until` on."""
        size, at, first, expected, count = data.size, 0, None, base, 0
        until = self.until if base is None else None
        unpack = RECORD_HEADER.unpack_from
        while at < size:
            buffer = data.read_at(at, min(CHUNK_BYTES, size - at))
            inside = 0
            while inside + HEADER_SIZE <= len(buffer):
                offset, length = unpack(buffer, inside)
                here = at + inside
                if until is not None and expected is not None and expected >= until:
                    self._count(count, here)
                    return first, expected, here
                wrong = expected is not None and (offset < expected if gaps else offset != expected)
                if wrong or here + HEADER_SIZE + length > size:
                    self._add(
                        name, here, f"the record here is damaged (offset {offset}, length {length})"
                    )
                    self._count(count, here)
                    return first, expected, here
                first = offset if first is None else first
                expected = offset + 1
                count += 1
                inside += HEADER_SIZE + length
            if inside == 0:
                self._add(name, at, f"{size - at} bytes at the end are not a whole record")
                size = at
                break
            at += inside
            if self.progress is not None:
                self.progress(self.report.bytes + min(at, size), self.total)
        self._count(count, size)
        return first, expected, size

    def _count(self, records: int, size: int) -> None:
        self.report.records += records
        self.report.bytes += size

    def _index(self, name: str, data_name: str, data: File, size: int, first: int | None) -> None:
        with contextlib.closing(self.fs.open(self._path(name), write=False)) as file:
            at, row = 0, 0
            while True:
                count = min(INDEX_ROWS_PER_STEP, max(0, file.size // INDEX_SIZE - row))
                rows = np.frombuffer(file.read_at(row * INDEX_SIZE, count * INDEX_SIZE), INDEX_TYPE)
                if self.until is not None and name == INDEX:
                    rows = rows[: int(np.searchsorted(rows["offset"], np.uint64(self.until)))]
                good = agreeing(data, rows, size, at)
                if good < len(rows):
                    self._add(
                        name, (row + good) * INDEX_SIZE, f"this row does not match {data_name}"
                    )
                    return
                if not len(rows):
                    break
                _, at = record_at(data, int(rows["position"][-1]), size)
                row += len(rows)
            if at < size:
                self._add(
                    name, row * INDEX_SIZE, f"rows are missing: {data_name} continues at byte {at}"
                )
            if file.size % INDEX_SIZE and self.until is None:
                self._add(name, file.size // INDEX_SIZE * INDEX_SIZE, "ends in the middle of a row")
            if row == 0 and first is not None:
                self._add(name, 0, "is empty")

    def _read_batches(self, name: str) -> np.ndarray:
        if name not in self._names:
            return np.empty(0, BATCH_TYPE)
        data = self.fs.read(self._path(name))
        rows, good = parse_batches(data)
        for i in np.flatnonzero(~good):
            self._add(name, int(i) * BATCH_SIZE, "this row does not match its checksum")
        if len(data) % BATCH_SIZE and self.until is None:
            self._add(name, len(rows) * BATCH_SIZE, "ends in the middle of a row")
        intact: np.ndarray = rows[good]
        return intact

    def _batches(
        self, name: str, batches_name: str, data: File, size: int, rows: np.ndarray
    ) -> None:
        beyond = np.flatnonzero(rows["end"] > size)
        if len(beyond):
            i = int(beyond[0])
            if self.until is None or name != DATA:
                what = f"covers bytes {rows['start'][i]} to {rows['end'][i]}, {name} has {size}"
                self._add(batches_name, i * BATCH_SIZE, what)
            rows = rows[:i]
        ends = np.concatenate([np.zeros(1, np.uint64), rows["end"]])
        for gap in np.flatnonzero(rows["start"] != ends[:-1]):
            self.report.unchecked += self._between(data, int(ends[gap]), int(rows["start"][gap]))
        for run in runs(rows, CHUNK_BYTES):
            for i in failing(data, run):
                start, end, first = (int(run[column][i]) for column in ("start", "end", "first"))
                what = f"bytes {start} to {end} (offsets from {first}) fail their CRC32C"
                self._add(name, start, what)
        at = int(ends[-1])
        if at < size and not len(beyond):
            self.report.unchecked += self._between(data, at, size)
            # after a clean stop another server may have written them
            if name != DATA or self.open_state:
                what = f"rows are missing: {name} continues at byte {at}"
                self._add(batches_name, len(rows) * BATCH_SIZE, what)

    def _between(self, data: File, start: int, end: int) -> int:
        """Count the records in a part of the data that no sidecar row covers."""
        count = 0
        while 0 <= start <= end - HEADER_SIZE:
            _, start = record_at(data, start, end)
            count += 1
        return count

    # The small files

    def _noted(self) -> None:
        """Report records that were lost earlier; repaired files no longer show that."""
        if DAMAGE not in self._names:
            return
        try:
            places = read_places(self.fs.read(self.directory / DAMAGE))
        except ValueError:
            self._add(DAMAGE, 0, "cannot be read")
            return
        for place in places:
            if "lost_from" in place:
                file, start = place.get("file", DATA), place["lost_from"]
                end = place.get("lost_to", 0)
                self._add(file, 0, f"offsets {start} to {end - 1} are lost according to {DAMAGE}")

    def _checkpoint(self) -> Checkpoint | None:
        if CHECKPOINT not in self._names:
            if INCARNATION in self._names:
                self._add(CHECKPOINT, 0, "is missing")
            return None
        checkpoint = Checkpoint.parse(self.fs.read(self.directory / CHECKPOINT))
        if checkpoint is None:
            self._add(CHECKPOINT, 0, "does not match its checksum")
        return checkpoint

    def _small_files(self, checkpoint: Checkpoint | None, end: int | None) -> None:
        for name in (INCARNATION, ARCHIVED, POLICY, LIMITS):
            if name in self._names and parse_checked(self.fs.read(self.directory / name)) is None:
                self._add(name, 0, "does not match its checksum")
        if INCARNATION not in self._names and checkpoint is not None:
            self._add(INCARNATION, 0, "is missing")
        noted = checkpoint.next_offset if checkpoint is not None else end or 0
        next_offset = noted if end is None else end
        if noted > next_offset and self.until is None:
            self._add(DATA, 0, f"ends before offset {noted}, up to which it was durable")
        self._companions(checkpoint, noted, next_offset)

    def _companions(self, checkpoint: Checkpoint | None, noted: int, next_offset: int) -> None:
        """Check sidecar and metadata of the active segment."""
        if checkpoint is not None and BATCHES in self._names and self.until is None:
            size, durable = self.fs.size(self._path(BATCHES)), checkpoint.batches_size
            if size < durable and sealed_name(DATA, checkpoint.base) not in self._names:
                self._add(BATCHES, size, f"has {size} bytes, {durable} were durable")
        if METADATA not in self._names:
            self._add(METADATA, 0, "is missing")
            return
        metadata = parse_metadata(self.fs.read(self.directory / METADATA))
        if metadata is None:
            self._add(METADATA, 0, "does not have 8 bytes")
        elif not min(noted, next_offset) <= metadata <= next_offset:
            what = f"has {metadata} as the next offset, the records have {next_offset}"
            self._add(METADATA, 0, what)


class _BatchVerifier(_Verifier):
    """The verification of record batches."""

    form = BATCHES_FORMAT

    def _segment(self, name: str, base: int | None, _: bool) -> tuple[int | None, int | None, bool]:
        with contextlib.closing(self.fs.open(self._path(name), write=False)) as data:
            index = SparseIndex(self._first_offset(data) if base is None else base)
            for batch in self._batches_of(name, data, index, None if base is None else MAX_OFFSET):
                index.compacted |= (
                    batch.head.base_offset != index.end
                    or batch.head.records != batch.head.last_offset_delta + 1
                )
                if batch.head.leader_epoch not in (0, 1):
                    self._add(name, batch.position + 12, "the leader epoch here is not 0 or 1")
                index.add(batch.stored())
                if self.progress is not None:
                    self.progress(self.report.bytes + index.size, self.total)
        self._count(index.records, index.size)
        self._check_index(INDEX if base is None else sealed_name(INDEX, base), name, index)
        begin = index.base if index.records or base is not None else None
        return begin, index.end if index.records else base, index.compacted

    def _first_offset(self, data: File) -> int:
        return max(0, self.form.first_offset(data))

    def _batches_of(
        self, name: str, data: File, index: SparseIndex, limit: int | None
    ) -> Iterator[Located]:
        """Yield intact batches. Report anything else, and continue after it."""
        size = data.size
        while True:
            for batch in whole_batches(data, index.size, size, index.end, limit=limit):
                if self.until is not None and limit is None and index.end >= self.until:
                    return
                yield batch
            at = index.size
            if at >= size or (self.until is not None and limit is None and index.end >= self.until):
                return
            following = next_whole(data, at, size, index.end, limit)
            end = size if following is None else following.position
            self._add(name, at, f"bytes {at} to {end} (offsets from {index.end}) fail their CRC32C")
            if following is None:
                return
            index.skip(end, following.head.base_offset)

    def _check_index(self, name: str, data_name: str, actual: SparseIndex) -> None:
        """Compare an index with its data. Only a sealed one describes all of it."""
        if name not in self._names:
            self._add(name, 0, "is missing")
            return
        content = self.fs.read(self._path(name))
        if name == INDEX and not content and not actual.records:
            return
        stored = SparseIndex.parse(content)
        if stored is None:
            self._add(name, 0, "does not match its checksum")
            return
        if self.until is not None and name == INDEX:
            return  # it may describe more than was visible
        if any(finding.file == data_name for finding in self.report.findings):
            return  # the data is wrong, not the index
        if name == INDEX:
            rows = actual.rows[: stored.row_count]
            same = np.array_equal(stored.rows, rows) and stored.size <= actual.size
            same &= not actual.size or (stored.base == actual.base and stored.end <= actual.end)
        else:
            actual.compacted |= stored.compacted  # the data does not show what was removed
            same = stored.pack() == actual.pack()
        if not same:
            self._add(name, 0, f"does not match {data_name}")
            self._add(data_name, 0, f"does not match {name}")

    def _companions(self, *_: object) -> None:
        """Check nothing: the index is checked with its segment."""
