"""Opening a topic: finish or undo what was interrupted, believe the checkpoint, scan the rest.

The data files are the truth. Everything else is checked against them cheaply and rebuilt when it disagrees:

- A sealed segment was synced before it got its name; its last index row must point at the record that ends the file.
  If not, the segment is scanned and its index written anew. It ends before the next segment begins: what a segment
  that broke may hold beyond that was never answered.
- The active segment is believed up to its checkpoint and scanned from there. A record that is not whole at the end is
  a torn write, and so is a batch whose sidecar row promises more than there is: both are cut off, into a quarantine
  file. A record that makes no sense before others that do is a hole: kept, reported, and refused to readers.
- A sidecar row that is damaged tells nothing; one that speaks of data that is not there is dropped.

Each finding is logged, counted, and noted in `damage.json` when something was lost. Nothing here keeps a topic from
opening; a disk that does not even let itself be read makes it fail for this topic alone.
"""

import contextlib
import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from penstock.errors import StorageFailed, StorageFull
from penstock.ids import uuid7
from penstock.storage.fs import File, Fs
from penstock.topics.context import Context
from penstock.topics.layout import (
    ARCHIVED,
    BATCH_SIZE,
    BATCHES,
    CHECKPOINT,
    CLEAN,
    COMPACT,
    COMPACTED,
    DAMAGE,
    DATA,
    DELETE,
    HEADER_SIZE,
    INCARNATION,
    INDEX,
    INDEX_SIZE,
    INDEX_TYPE,
    KINDS,
    METADATA,
    POLICY,
    RECORD_HEADER,
    RELAXED,
    Checkpoint,
    pack_checked,
    pack_metadata,
    parse_batches,
    parse_checked,
    parse_metadata,
    parse_sealed,
    sealed_name,
)
from penstock.topics.log import Recovered
from penstock.topics.producers import Producers
from penstock.topics.scan import CHAIN, Hole, agreeing, drop_untiled, is_record, scan
from penstock.topics.segment import Segment

log = logging.getLogger("penstock.topics")


def create_files(fs: Fs, directory: Path, state: int, *, sync: bool) -> None:
    """An empty topic. Its incarnation makes it another one than any that had this name before."""
    fs.make_dir(directory)
    incarnation = uuid7()
    for kind in KINDS:
        fs.open(directory / kind, create=True).close()
    fs.replace(directory / METADATA, pack_metadata(0), sync=False)
    fs.replace(directory / INCARNATION, pack_checked(incarnation.hex), sync=sync)
    fs.replace(directory / CHECKPOINT, Checkpoint(incarnation.bytes, 0, 0, 0, 0, 0, 0, state).pack(), sync=sync)
    if sync:
        fs.sync_dir(directory)
        fs.sync_dir(directory.parent)


def recover(context: Context, directory: Path) -> Recovered:
    return _Recovery(context, directory).run()


class _Tail(NamedTuple):
    start: int  # position in the sidecar
    rows: np.ndarray
    good: np.ndarray


class _Recovery:
    def __init__(self, context: Context, directory: Path) -> None:
        self.fs = context.fs
        self.context = context
        self.directory = directory
        self.found: list[dict[str, Any]] = []  # what is lost, for damage.json and the admin API
        self.changed = False  # whether damage.json must be written
        self.names: set[str] = set()

    def run(self) -> Recovered:
        self.names = set(self.fs.list_dir(self.directory))
        self._read_damage()
        self._finish_interrupted()
        checkpoint = self._read_checkpoint()
        incarnation = self._read_incarnation(checkpoint)
        bases = sorted(base for kind, base in self._sealed_files() if kind == DATA)
        proven = self._proven_base(bases, checkpoint)
        limits: list[int | None] = [*bases[1:], proven]
        segments = [self._open_sealed(base, limit) for base, limit in zip(bases, limits, strict=False)]
        active, scanned = self._open_active(segments, checkpoint, proven)
        segments.append(active)
        self._note_gaps(segments)
        producers = self._producers(segments, checkpoint)
        same = checkpoint is not None and checkpoint.base == active.base and not scanned
        if self.changed:
            self._write_damage()
        for segment in segments:
            segment.forget_files()
        return Recovered(
            incarnation=incarnation,
            segments=tuple(segments),
            next_offset=active.end,
            producers=producers,
            checkpointed=checkpoint.data_size if checkpoint is not None and same else -1,
            state=checkpoint.state if checkpoint is not None else CLEAN,
            archived=self._read_archived(),
            policy=self._read_policy(),
            damage=self.found,
        )

    # Reporting

    def report(self, outcome: str, text: str, **lost: Any) -> None:
        log.warning("topic %s: %s: %s", self.directory.name, outcome, text)
        self.context.instruments.damage.add(1, outcome)
        if lost:
            self.found.append({"outcome": outcome, "what": text, **lost})
            self.changed = True

    def _read_damage(self) -> None:
        if DAMAGE in self.names:
            try:
                found = json.loads(self.fs.read(self.directory / DAMAGE))
                self.found = [place for place in found if isinstance(place, dict)]
            except (ValueError, TypeError):
                self.report("repaired", f"{DAMAGE} could not be read and is started anew")
                self.changed = True

    def _write_damage(self) -> None:
        data = json.dumps(self.found, indent=1).encode() + b"\n"
        self.fs.replace(self.directory / DAMAGE, data)

    def holes_of(self, base: int) -> tuple[tuple[int, int], ...]:
        return tuple(
            (int(place["start"]), int(place["end"]))
            for place in self.found
            if place.get("base") == base and "start" in place and "end" in place
        )

    # Interrupted work

    def _sealed_files(self) -> list[tuple[str, int]]:
        return [found for found in map(parse_sealed, sorted(self.names)) if found is not None]

    def _finish_interrupted(self) -> None:
        for name in sorted(self.names):
            if name.startswith("swap-"):
                finish_swap(self.fs, self.directory, name)
        self.names = set(self.fs.list_dir(self.directory))
        for name in sorted(self.names):
            if name.endswith((".new", ".swap")):
                self.fs.remove(self.directory / name)
                self.names.discard(name)
        with_data = {base for kind, base in self._sealed_files() if kind == DATA}
        for kind, base in self._sealed_files():
            if base in with_data:
                continue
            if kind not in self.names:  # a roll renames the data last: it had not come to it
                self.fs.rename(self.directory / sealed_name(kind, base), self.directory / kind)
                self.names.add(kind)
            else:
                self.report("lost", f"{sealed_name(DATA, base)} is missing", file=sealed_name(DATA, base))
                self.fs.rename(
                    self.directory / sealed_name(kind, base), self.directory / f"orphan-{sealed_name(kind, base)}"
                )
            self.names.discard(sealed_name(kind, base))

    def _read_checkpoint(self) -> Checkpoint | None:
        if CHECKPOINT not in self.names:
            if INCARNATION in self.names:
                self.report("repaired", f"{CHECKPOINT} is missing, the active segment is scanned whole")
            return None
        checkpoint = Checkpoint.parse(self.fs.read(self.directory / CHECKPOINT))
        if checkpoint is None:
            self.report("repaired", f"{CHECKPOINT} is damaged, the active segment is scanned whole")
        return checkpoint

    def _read_incarnation(self, checkpoint: Checkpoint | None) -> str:
        text = None
        if INCARNATION in self.names:
            text = parse_checked(self.fs.read(self.directory / INCARNATION))
            if text is None or len(text) != 32:
                self.report("repaired", f"{INCARNATION} is damaged")
                text = None
        elif checkpoint is not None:
            self.report("repaired", f"{INCARNATION} is missing")
        if text is None:
            text = checkpoint.incarnation.hex() if checkpoint is not None else uuid7().hex
            self.fs.replace(self.directory / INCARNATION, pack_checked(text), sync=self.context.durable)
        return text

    def _read_archived(self) -> int | None:
        if ARCHIVED not in self.names:
            return None
        text = parse_checked(self.fs.read(self.directory / ARCHIVED))
        if text is None or not text.isdigit():
            self.report("repaired", f"{ARCHIVED} is damaged: nothing is deleted before it is archived again")
            return 0
        return int(text)

    def _read_policy(self) -> str:
        if POLICY not in self.names:
            return DELETE
        text = parse_checked(self.fs.read(self.directory / POLICY))
        if text not in (DELETE, COMPACT):
            self.report(
                "repaired", f"{POLICY} is damaged: taken for {COMPACT!r}, under which retention deletes nothing"
            )
            return COMPACT
        return text

    # Sealed segments

    def _open_sealed(self, base: int, following: int | None) -> Segment:
        segment = Segment(self.fs, self.directory, base, sealed=True)
        for kind in (INDEX, BATCHES):
            if sealed_name(kind, base) not in self.names:
                self.report("repaired" if kind == INDEX else "lost", f"{sealed_name(kind, base)} is missing")
                self.fs.open(segment.path(kind), create=True).close()
        data = segment.file(DATA)
        segment.data_size = data.size
        segment.holes = self.holes_of(base)
        rows = segment.file(INDEX).size // INDEX_SIZE
        segment.rows = rows
        if segment.file(INDEX).size % INDEX_SIZE or not self._ends_well(segment, data, following):
            self._rebuild(segment, data, following)
        elif rows:
            segment.end = int(segment.index_rows(rows - 1, rows)["offset"][0]) + 1
        self._trust_batches(segment)
        return segment

    def _ends_well(self, segment: Segment, data: File, following: int | None) -> bool:
        if not segment.rows:
            return data.size == 0
        for row in (0, segment.rows - 1):
            offset, position = (int(value) for value in segment.index_rows(row, row + 1)[0])
            header = data.read_at(position, HEADER_SIZE)
            if len(header) < HEADER_SIZE or ((row == 0) != (position == 0) and segment.rows > 1):
                return False
            found, length = RECORD_HEADER.unpack(header)
            if found != offset or offset < segment.base or (following is not None and offset >= following):
                return False
        return bool(position + HEADER_SIZE + length == data.size)

    def _rebuild(self, segment: Segment, data: File, following: int | None) -> None:
        limit = following if following is not None else 1 << 63
        index = self._all_index_rows(segment)
        batches = self._intact_batches(segment)
        found = scan(data, data.size, 0, segment.base, index=index, anchors=_anchors(batches), limit=limit)
        found = drop_untiled(found, batches)
        self._note_holes(segment, found.holes)
        if found.end < data.size:
            lost = data.size - found.end
            self.report(
                "lost" if following is None or found.next_offset < following else "quarantined",
                f"{segment.path(DATA).name}: {lost} bytes from {found.end} on are no records of this segment",
            )
            self._quarantine(segment, found.end, data.size)
            writable = self.fs.open(segment.path(DATA))
            writable.truncate(found.end)
            writable.close()
        segment.data_size, segment.rows = found.end, len(found.rows)
        segment.end = int(found.rows["offset"][-1]) + 1 if len(found.rows) else segment.base
        if not np.array_equal(found.rows, index):
            self.fs.replace(segment.path(INDEX), found.rows.tobytes())
            self.report("repaired", f"{segment.path(INDEX).name} was built anew, {segment.rows} records")
        segment.forget_files()

    def _all_index_rows(self, segment: Segment) -> np.ndarray:
        file = segment.file(INDEX)
        return np.frombuffer(file.read_at(0, file.size // INDEX_SIZE * INDEX_SIZE), INDEX_TYPE)

    def _intact_batches(self, segment: Segment) -> np.ndarray:
        file = segment.file(BATCHES)
        rows, good = parse_batches(file.read_at(0, file.size))
        intact: np.ndarray = rows[good]
        return intact

    def _modified(self, segment: Segment) -> int:
        """The time of records whose time is unknown."""
        return int(self.fs.modified(segment.path(DATA)) * 1e6) if segment.rows else 0

    def _trust_batches(self, segment: Segment) -> None:
        """Sealed sidecars are believed as they are: `verify` reads them whole, lookups only what they need."""
        file = segment.file(BATCHES)
        whole = file.size // BATCH_SIZE * BATCH_SIZE
        if whole != file.size:
            self.report("lost", f"{segment.path(BATCHES).name} ends in the middle of a row")
        segment.batches_size = whole
        segment.newest = self._modified(segment)
        if whole:
            segment.compacted = bool(int(segment.batch_rows(0, 1)["flags"][0]) & COMPACTED)
            rows, good = parse_batches(file.read_at(whole - BATCH_SIZE, BATCH_SIZE))
            if bool(good[0]) and int(rows["end"][0]) == segment.data_size:
                segment.newest = int(rows["time"][0])
            else:
                self.report("lost", f"{segment.path(BATCHES).name}: its last row does not match the segment")

    def _note_holes(self, segment: Segment, holes: list[Hole]) -> None:
        name = segment.path(DATA).name
        known = set(self.holes_of(segment.base))
        for hole in holes:
            if (hole.start, hole.end) in known:
                continue
            self.report(
                "lost",
                f"{name}: offsets {hole.lost_from} to {hole.lost_to - 1}, bytes {hole.start} to {hole.end} are damaged",
                file=name,
                base=segment.base,
                start=hole.start,
                end=hole.end,
                lost_from=hole.lost_from,
                lost_to=hole.lost_to,
            )
        segment.holes = tuple((hole.start, hole.end) for hole in holes)

    def _quarantine(self, segment: Segment, start: int, end: int) -> None:
        data = segment.file(DATA).read_at(start, end - start)
        path = self.directory / f"quarantine-{segment.base:020d}-{start}.bin"
        self.fs.replace(path, data)
        self.context.instruments.quarantined.add(len(data))
        self.report(
            "quarantined", f"{len(data)} bytes cut off {segment.path(DATA).name} at {start}, kept in {path.name}"
        )

    def _note_gaps(self, segments: list[Segment]) -> None:
        known = {(place.get("lost_from"), place.get("lost_to")) for place in self.found}
        for one, other in pairwise(segments):
            if one.end < other.base and (one.end, other.base) not in known and not one.compacted:
                name = one.path(DATA).name
                self.report(
                    "lost",
                    f"{name} ends at offset {one.end}, the next segment begins at {other.base}",
                    file=name,
                    lost_from=one.end,
                    lost_to=other.base,
                )

    # The active segment

    def _proven_base(self, sealed: list[int], checkpoint: Checkpoint | None) -> int | None:
        """The first offset of data.log as something with a checksum tells it: its checkpoint or its sidecar.

        Only this bounds the segment before it: the header of a torn first record must not cost that one its records.
        """
        floor = sealed[-1] + 1 if sealed else 0
        if checkpoint is not None and checkpoint.base >= floor:
            return checkpoint.base
        if BATCHES in self.names:
            with contextlib.closing(self.fs.open(self.directory / BATCHES, write=False)) as file:
                rows, good = parse_batches(file.read_at(0, BATCH_SIZE))
                if len(rows) and bool(good[0]) and int(rows["start"][0]) == 0 and int(rows["first"][0]) >= floor:
                    return int(rows["first"][0])
        return None

    def _open_active(
        self, sealed: list[Segment], checkpoint: Checkpoint | None, proven: int | None
    ) -> tuple[Segment, bool]:
        """The active segment, and whether anything had to be scanned, cut or rebuilt."""
        ours = checkpoint is not None
        for kind in KINDS:
            if kind not in self.names:
                if ours and checkpoint is not None and not self._just_rolled(sealed, checkpoint):
                    self.report("lost" if kind == DATA else "repaired", f"{kind} is missing")
                self.fs.open(self.directory / kind, create=True).close()
        segment = Segment(self.fs, self.directory, 0, sealed=False)
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
            self.report(
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
            self._scan_active(segment, data, index, start, rows, cut)
        untouched &= self._match_batches(segment, data, batches, tail)
        if not untouched:
            self._settle_active(segment, data, index, batches)
        segment.holes = self.holes_of(segment.base) if untouched else segment.holes
        self._check_metadata(segment, checkpoint)
        return segment, not untouched

    def _check_hints(self, here: Checkpoint, index: File, batches: File) -> None:
        """What the checkpoint says was durable of index and sidecar must be there."""
        if index.size < here.index_size:
            self.report("repaired", f"{INDEX} has {index.size} bytes, {here.index_size} were durable; it is built anew")
        if batches.size < here.batches_size:
            self.report("lost", f"{BATCHES} has {batches.size} bytes, {here.batches_size} were durable")
        elif here.batches_size:
            _, good = parse_batches(batches.read_at(here.batches_size - BATCH_SIZE, BATCH_SIZE))
            if not bool(good[0]):
                self.report("lost", f"{BATCHES}: the row at {here.batches_size - BATCH_SIZE} is damaged")

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
        metadata = self._read_metadata()
        return metadata if metadata is not None and metadata < 1 << 62 else floor

    def _read_metadata(self) -> int | None:
        return parse_metadata(self.fs.read(self.directory / METADATA)) if METADATA in self.names else None

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

    def _scan_active(self, segment: Segment, data: File, index: File, start: int, rows: int, cut: int) -> None:
        offset = segment.base
        if rows:
            tail = index.read_at((rows - 1) * INDEX_SIZE, INDEX_SIZE)
            offset = int(np.frombuffer(tail, INDEX_TYPE)["offset"][0]) + 1
        told = index.read_at(rows * INDEX_SIZE, (index.size // INDEX_SIZE - rows) * INDEX_SIZE)
        told_rows = np.frombuffer(told, INDEX_TYPE)
        batches = self._intact_batches(segment)
        found = scan(data, cut, start, offset, index=told_rows, anchors=_anchors(batches))
        found = drop_untiled(found, batches[batches["start"] >= start])
        if found.holes:
            self._note_holes(segment, found.holes)
        if not np.array_equal(found.rows, told_rows) or index.size % INDEX_SIZE:
            if len(found.rows) < len(told_rows) or not np.array_equal(found.rows[: len(told_rows)], told_rows):
                self.report("repaired", f"{INDEX} did not match {DATA}, rows from {rows} on were built anew")
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
            self.report("lost", f"{BATCHES}: {bad} rows are damaged, their records have no checksum and no time")
        beyond = np.flatnonzero(tail.good & (tail.rows["end"] > segment.data_size))
        keep = int(beyond[0]) if len(beyond) else len(tail.rows)
        size = tail.start + keep * BATCH_SIZE
        unchanged = size == batches.size and segment.data_size == data.size
        if size != batches.size:
            batches.truncate(size)
        segment.batches_size = size
        segment.newest = self._modified(segment)
        if size:
            last, fine = parse_batches(batches.read_at(size - BATCH_SIZE, BATCH_SIZE))
            if bool(fine[0]):
                segment.newest = int(last["time"][0])
        return unchanged

    def _settle_active(self, segment: Segment, data: File, index: File, batches: File) -> None:
        """Cut the files to what was found, and make that durable: from here on it counts as synced."""
        if data.size > segment.data_size:
            name = f"quarantine-{segment.base:020d}-{segment.data_size}.bin"
            if not self.fs.exists(self.directory / name):
                self._quarantine(segment, segment.data_size, data.size)
            data.truncate(segment.data_size)
        if index.size > segment.rows * INDEX_SIZE:
            index.truncate(segment.rows * INDEX_SIZE)
        if not self.context.durable:
            return
        try:
            for file in (batches, index, data):
                file.sync()
            self.fs.sync_dir(self.directory)
        except (StorageFull, StorageFailed) as error:
            log.error("topic %s: what was recovered could not be synced: %s", self.directory.name, error)

    def _check_metadata(self, segment: Segment, checkpoint: Checkpoint | None) -> None:
        told = self._read_metadata()
        if told != segment.end:
            if told is None or (checkpoint is not None and checkpoint.state == CLEAN):
                self.report("repaired", f"{METADATA} said {told}, the next offset is {segment.end}")
            self.fs.replace(self.directory / METADATA, pack_metadata(segment.end), sync=False)

    # Producers

    def _producers(self, segments: list[Segment], checkpoint: Checkpoint | None) -> Producers:
        producers = Producers(
            checkpoint.producers if checkpoint is not None else {}, self.context.settings.producer_expiry
        )
        for segment in segments:
            start = 0
            if checkpoint is not None:
                if segment.base < checkpoint.base:
                    continue
                if segment.base == checkpoint.base:
                    start = min(checkpoint.batches_size, segment.batches_size)
            file = segment.file(BATCHES)
            rows, good = parse_batches(file.read_at(start, segment.batches_size - start))
            producers.replay(rows[good])
        producers.forget_before(self.context.now())
        return producers


def _anchors(batches: np.ndarray) -> np.ndarray:
    """Where the sidecar says that batches begin."""
    anchors = np.empty(len(batches), INDEX_TYPE)
    anchors["offset"], anchors["position"] = batches["first"], batches["start"]
    return anchors


def finish_swap(fs: Fs, directory: Path, marker: str) -> None:
    """Put a compacted segment in place of those it was made from; see `penstock.topics.compaction`.

    May be called again after it failed: what was done is not repeated.
    """
    told = parse_checked(fs.read(directory / marker)) if fs.exists(directory / marker) else None
    if told is not None:
        base, *merged = (int(part) for part in told.split(","))
        for kind in KINDS:
            swap = directory / f"{sealed_name(kind, base)}.swap"
            if fs.exists(swap):
                fs.rename(swap, directory / sealed_name(kind, base))
        for other in merged:
            for kind in KINDS:
                fs.remove(directory / sealed_name(kind, other))
        fs.sync_dir(directory)
    fs.remove(directory / marker)
    fs.sync_dir(directory)
