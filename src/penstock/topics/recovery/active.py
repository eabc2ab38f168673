"""Opening the active segment: believed up to its checkpoint, scanned from there, cut at a commit that did not end."""

import contextlib
import logging
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from penstock.errors import StorageFailed, StorageFull
from penstock.storage.fs import File
from penstock.topics.layout import (
    BATCH_SIZE,
    BATCHES,
    CLEAN,
    DATA,
    HEADER_SIZE,
    INDEX,
    INDEX_SIZE,
    INDEX_TYPE,
    KINDS,
    METADATA,
    RECORD_HEADER,
    RELAXED,
    Checkpoint,
    pack_metadata,
    parse_batches,
)
from penstock.topics.recovery.place import Place, anchors_of
from penstock.topics.scan import CHAIN, agreeing, drop_untiled, is_record, scan
from penstock.topics.segment import Segment

log = logging.getLogger("penstock.topics")


class _Tail(NamedTuple):
    start: int  # position in the sidecar
    rows: np.ndarray
    good: np.ndarray


class ActiveSegment:
    def __init__(self, place: Place) -> None:
        self.place = place

    def proven_base(self, sealed: list[int], checkpoint: Checkpoint | None) -> int | None:
        """The first offset of data.log as something with a checksum tells it: its checkpoint or its sidecar.

        Only this bounds the segment before it: the header of a torn first record must not cost that one its records.
        """
        floor = sealed[-1] + 1 if sealed else 0
        if checkpoint is not None and checkpoint.base >= floor:
            return checkpoint.base
        if BATCHES in self.place.names:
            with contextlib.closing(self.place.fs.open(self.place.directory / BATCHES, write=False)) as file:
                rows, good = parse_batches(file.read_at(0, BATCH_SIZE))
                if len(rows) and bool(good[0]) and int(rows["start"][0]) == 0 and int(rows["first"][0]) >= floor:
                    return int(rows["first"][0])
        return None

    def open(self, sealed: list[Segment], checkpoint: Checkpoint | None, proven: int | None) -> tuple[Segment, bool]:
        """The active segment, and whether anything had to be scanned, cut or rebuilt."""
        ours = checkpoint is not None
        for kind in KINDS:
            if kind not in self.place.names:
                if ours and checkpoint is not None and not self._just_rolled(sealed, checkpoint):
                    self.place.report("lost" if kind == DATA else "repaired", f"{kind} is missing")
                self.place.fs.open(self.place.directory / kind, create=True).close()
        segment = Segment(self.place.fs, self.place.directory, 0, sealed=False)
        data, index, batches = (segment.file(kind) for kind in (DATA, INDEX, BATCHES))
        floor = sealed[-1].end if sealed else 0
        segment.base = proven if proven is not None else self._likely_base(data, floor, bool(sealed), checkpoint)
        segment.end = segment.base
        here = checkpoint if checkpoint is not None and checkpoint.base == segment.base else None
        start, rows = self._trusted(segment, here, data, index)
        if here is not None:
            self._check_hints(here, index, batches)
        shorter = here is not None and here.data_size > data.size
        if here is not None and shorter:
            self.place.report(
                "lost",
                f"{DATA} has {data.size} bytes, {here.data_size} were durable",
                file=DATA,
                lost_bytes=here.data_size - data.size,
            )
        tail = self._tail_rows(batches, None if shorter else here)
        state = CLEAN if checkpoint is None or shorter else checkpoint.state
        cut = self._torn_at(data, tail, 0 if here is None else here.data_size, state)
        untouched = start == data.size and rows * INDEX_SIZE == index.size
        if untouched:
            segment.rows, segment.data_size = rows, start
            segment.end = self._end_at(segment, here)
        else:
            self._scan(segment, data, index, start, rows, cut)
        untouched &= self._match_batches(segment, data, batches, tail)
        if not untouched:
            self._settle(segment, data, index, batches)
        segment.holes = self.place.damage.holes_of(segment.base)
        self._check_metadata(segment, checkpoint)
        return segment, not untouched

    def _check_hints(self, here: Checkpoint, index: File, batches: File) -> None:
        """What the checkpoint says was durable of index and sidecar must be there."""
        if index.size < here.index_size:
            self.place.report(
                "repaired", f"{INDEX} has {index.size} bytes, {here.index_size} were durable; it is built anew"
            )
        if batches.size < here.batches_size:
            self.place.report("lost", f"{BATCHES} has {batches.size} bytes, {here.batches_size} were durable")
        elif here.batches_size:
            _, good = parse_batches(batches.read_at(here.batches_size - BATCH_SIZE, BATCH_SIZE))
            if not bool(good[0]):
                self.place.report("lost", f"{BATCHES}: the row at {here.batches_size - BATCH_SIZE} is damaged")

    def _just_rolled(self, sealed: list[Segment], checkpoint: Checkpoint) -> bool:
        return bool(sealed) and sealed[-1].base == checkpoint.base

    def _likely_base(self, data: File, floor: int, rolled: bool, checkpoint: Checkpoint | None) -> int:
        """The first offset of data.log when nothing with a checksum tells: its first record, if that makes sense."""
        if data.size >= HEADER_SIZE:
            offset = int(RECORD_HEADER.unpack(data.read_at(0, HEADER_SIZE))[0])
            if floor <= offset < 1 << 62 and is_record(data, 0, data.size, offset, None, CHAIN):
                return offset
            return floor
        if rolled:
            return max(floor, checkpoint.next_offset if checkpoint is not None else 0)
        metadata = self.place.read_metadata()
        return metadata if metadata is not None and metadata < 1 << 62 else floor

    def _trusted(self, segment: Segment, here: Checkpoint | None, data: File, index: File) -> tuple[int, int]:
        """How far the checkpoint can be believed: bytes of data, rows of index."""
        if here is None or here.data_size > data.size or here.index_size > index.size or here.index_size % INDEX_SIZE:
            return 0, 0
        rows = here.index_size // INDEX_SIZE
        if not rows:
            return 0, 0
        segment.rows = rows
        last = segment.index_rows(rows - 1, rows)
        first = segment.index_rows(0, 1)
        segment.rows = 0
        good = agreeing(data, last, here.data_size, int(last["position"][0])) == 1
        good &= int(first["offset"][0]) == segment.base and int(first["position"][0]) == 0
        if good:
            _, length = RECORD_HEADER.unpack(data.read_at(int(last["position"][0]), HEADER_SIZE))
            good = int(last["position"][0]) + HEADER_SIZE + length == here.data_size
        return (here.data_size, rows) if good else (0, 0)

    def _end_at(self, segment: Segment, here: Checkpoint | None) -> int:
        if segment.rows:
            return int(segment.index_rows(segment.rows - 1, segment.rows)["offset"][0]) + 1
        return max(segment.base, here.next_offset if here is not None else 0)

    def _scan(self, segment: Segment, data: File, index: File, start: int, rows: int, cut: int) -> None:
        offset = segment.base
        if rows:
            tail = index.read_at((rows - 1) * INDEX_SIZE, INDEX_SIZE)
            offset = int(np.frombuffer(tail, INDEX_TYPE)["offset"][0]) + 1
        told = index.read_at(rows * INDEX_SIZE, (index.size // INDEX_SIZE - rows) * INDEX_SIZE)
        told_rows = np.frombuffer(told, INDEX_TYPE)
        batches = self.place.intact_batches(segment)
        found = scan(data, cut, start, offset, index=told_rows, anchors=anchors_of(batches))
        found = drop_untiled(found, batches[batches["start"] >= start])
        if found.holes:
            self.place.damage.note_holes(segment, found.holes)
        if not np.array_equal(found.rows, told_rows) or index.size % INDEX_SIZE:
            if len(found.rows) < len(told_rows) or not np.array_equal(found.rows[: len(told_rows)], told_rows):
                self.place.report("repaired", f"{INDEX} did not match {DATA}, rows from {rows} on were built anew")
            index.truncate(rows * INDEX_SIZE)
            index.append([found.rows.tobytes()])
        segment.rows = rows + len(found.rows)
        segment.data_size, segment.end = found.end, found.next_offset

    def _tail_rows(self, batches: File, here: Checkpoint | None) -> "_Tail":
        """The sidecar rows that the checkpoint does not cover, and which of them are intact."""
        start = here.batches_size if here is not None and here.batches_size <= batches.size else 0
        rows, good = parse_batches(batches.read_at(start, batches.size - start))
        return _Tail(start, rows, good)

    def _torn_at(self, data: File, tail: "_Tail", start: int, state: int) -> int:
        """Where the data of a commit that was never finished begins; the end of the file when there is none.

        Written strictly, only the last commit can be unfinished: a bad batch before a good later commit was whole
        once, and is damage. Written relaxed, nothing after the last fsync is certain: what no good batch covers goes.
        """
        if state == CLEAN:
            return data.size
        covered, bad, newest_good = start, [], -1
        for row in tail.rows[tail.good]:
            begin, end = int(row["start"]), int(row["end"])
            if begin < start:
                continue
            if end <= data.size and crc32c(data.read_at(begin, end - begin)) == int(row["crc"]):
                newest_good = int(row["time"])
                covered = end if begin == covered else covered
            else:
                bad.append((begin, int(row["time"])))
        if state == RELAXED:
            return covered
        return min((begin for begin, time in bad if time >= newest_good), default=data.size)

    def _match_batches(self, segment: Segment, data: File, batches: File, tail: "_Tail") -> bool:
        """Make the sidecar end where the data does. Whether nothing had to change."""
        if not bool(tail.good.all()):
            bad = int((~tail.good).sum())
            self.place.report("lost", f"{BATCHES}: {bad} rows are damaged, their records have no checksum and no time")
        beyond = np.flatnonzero(tail.good & (tail.rows["end"] > segment.data_size))
        keep = int(beyond[0]) if len(beyond) else len(tail.rows)
        size = tail.start + keep * BATCH_SIZE
        unchanged = size == batches.size and segment.data_size == data.size
        if size != batches.size:
            batches.truncate(size)
        segment.batches_size = size
        segment.newest = self.place.modified(segment)
        if size:
            last, fine = parse_batches(batches.read_at(size - BATCH_SIZE, BATCH_SIZE))
            if bool(fine[0]):
                segment.newest = int(last["time"][0])
        return unchanged

    def _settle(self, segment: Segment, data: File, index: File, batches: File) -> None:
        """Cut the files to what was found, and make that durable: from here on it counts as synced."""
        if data.size > segment.data_size:
            name = f"quarantine-{segment.base:020d}-{segment.data_size}.bin"
            if not self.place.fs.exists(self.place.directory / name):
                self.place.quarantine(segment, segment.data_size, data.size)
            data.truncate(segment.data_size)
        if index.size > segment.rows * INDEX_SIZE:
            index.truncate(segment.rows * INDEX_SIZE)
        if not self.place.context.durable:
            return
        try:
            for file in (batches, index, data):
                file.sync()
            self.place.fs.sync_dir(self.place.directory)
        except (StorageFull, StorageFailed) as error:
            log.error("topic %s: what was recovered could not be synced: %s", self.place.directory.name, error)

    def _check_metadata(self, segment: Segment, checkpoint: Checkpoint | None) -> None:
        told = self.place.read_metadata()
        if told != segment.end:
            if told is None or (checkpoint is not None and checkpoint.state == CLEAN):
                self.place.report("repaired", f"{METADATA} said {told}, the next offset is {segment.end}")
            self.place.fs.replace(self.place.directory / METADATA, pack_metadata(segment.end), sync=False)
