"""Open the active segment: trust the checkpoint, scan the rest, cut an unfinished commit."""

import contextlib

import numpy as np

from penstock.log.active_recovery import EndClaim, OpeningSegment
from penstock.log.aiq.checksums import checksum
from penstock.log.aiq.scan import (
    CHAIN_RECORDS,
    Scan,
    anchors_of,
    drop_untiled,
    intact_batches,
    is_record,
    record_at,
    scan,
    walk,
)
from penstock.log.aiq.segment import AiqSegment
from penstock.log.damage import Hole
from penstock.log.format import SegmentFormat
from penstock.log.layout import (
    BATCH_SIZE,
    BATCHES,
    CLEAN,
    DATA,
    HEADER_SIZE,
    INDEX,
    INDEX_ROW,
    INDEX_SIZE,
    INDEX_TYPE,
    METADATA,
    RELAXED,
    Checkpoint,
    pack_metadata,
    parse_batches,
)
from penstock.log.segment import Segment
from penstock.log.topic_directory import MAX_OFFSET, TopicDirectory

UNREAD, MATCHED, FAILED = 0, 1, 2  # results of checking a batch


def proven_base(
    directory: TopicDirectory, sealed: list[int], checkpoint: Checkpoint | None
) -> int | None:
    """Return the first offset of data.log according to its checkpoint or sidecar, or None.

    Both have a checksum. The header of the first record does not: if it is torn, it must not cut
    the records of the previous segment.
    """
    floor = sealed[-1] + 1 if sealed else 0
    if checkpoint is not None and checkpoint.base >= floor:
        return checkpoint.base
    if BATCHES in directory.names:
        with contextlib.closing(directory.fs.open(directory.path / BATCHES, write=False)) as file:
            rows, good = parse_batches(file.read_at(0, BATCH_SIZE))
        if len(rows) and bool(good[0]) and int(rows["start"][0]) == 0:
            first = int(rows["first"][0])
            return first if first >= floor else None
    return None


class ActiveAiqSegment(OpeningSegment):
    def __init__(
        self,
        form: SegmentFormat,
        directory: TopicDirectory,
        sealed: list[Segment],
        checkpoint: Checkpoint | None,
        proven: int | None,
    ) -> None:
        self._segment = AiqSegment(directory.fs, directory.path, 0, sealed=False)
        super().__init__(form, directory, sealed, checkpoint, proven, self._segment)
        self._index, self._batches = (self._segment.file(kind) for kind in (INDEX, BATCHES))
        # Sidecar rows that the checkpoint does not cover: where they begin, and which are intact.
        self._tail_start = 0
        if self._here and not self._shorter and self._here.batches_size <= self._batches.size:
            self._tail_start = self._here.batches_size
        self._tail, self._good = parse_batches(
            self._batches.read_at(self._tail_start, self._batches.size - self._tail_start)
        )

    @property
    def segment(self) -> AiqSegment:
        return self._segment

    def open(self) -> bool:
        segment, data, index, batches = self._segment, self._data, self._index, self._batches
        start, rows = self._trusted()
        self._check_hints()
        outcomes = self._check_tail(start)
        cut = self._torn_at(outcomes)
        newest = self._newest_commit()
        claims = [EndClaim(self._end_in_sidecar(newest), BATCHES)]
        fresh: np.ndarray | None = None  # index rows to write, from row `rows` on
        untouched = start == data.size and rows * INDEX_SIZE == index.size
        if untouched:
            segment.rows, segment.data_size = rows, start
            if rows:
                segment.end = segment.offset_of(rows - 1) + 1
        else:
            index_end, fresh = self._scan(start, rows, cut, self._tail[outcomes == FAILED])
            claims.append(EndClaim(min(index_end, newest), INDEX))
            if segment.data_size == cut < data.size:
                beyond = walk(data, cut, data.size, segment.end, None)[2]
                claims.append(
                    EndClaim(min(beyond, newest), "the part of it that no checksum covers")
                )
        if self._checkpoint is None:  # METADATA is as recent but has no checksum
            claims.append(EndClaim(self._directory.read_metadata() or 0, METADATA))
        whole = data.size == segment.data_size
        self.report_lost(claims, f" (it has {data.size} bytes)" if whole else "")
        size = self._sidecar_size(newest)
        if self._state != CLEAN:
            self._check_cover(size)
        self._directory.damage.write()
        untouched &= size == batches.size and segment.data_size == data.size
        self._trim_sidecar(size)
        if fresh is not None:
            index.truncate(rows * INDEX_SIZE)
            index.append([fresh.tobytes()])
        if not untouched:
            self._cut_and_sync()
        segment.holes = self._directory.damage.holes_of(segment.base)
        return not untouched

    def skip_lost(self) -> list[Segment]:
        segments = super().skip_lost()
        self._check_metadata(segments[-1].end)
        return segments

    # Lost records

    def _newest_commit(self) -> int:
        """Return the first offset of the newest commit in the sidecar; it may be unanswered."""
        rows = self._tail[self._good]
        if self._state == CLEAN or not len(rows):
            return MAX_OFFSET
        return int(rows["first"][rows["time"] == rows["time"].max()].min())

    def _end_in_sidecar(self, newest: int) -> int:
        rows = self._tail[self._good & (self._tail["first"] < newest)]
        return int((rows["first"] + rows["count"]).max()) if len(rows) else 0

    def _check_hints(self) -> None:
        """Check that index and sidecar have all bytes that the checkpoint calls durable."""
        here, index, batches = self._here, self._index, self._batches
        if here is None:
            return
        report = self._directory.report
        if index.size < here.index_size:
            text = f"{INDEX} has {index.size} bytes, {here.index_size} were durable; it is rebuilt"
            report("repaired", text)
        if batches.size < here.batches_size:
            report("lost", f"{BATCHES} has {batches.size} bytes, {here.batches_size} were durable")
        elif here.batches_size:
            last = here.batches_size - BATCH_SIZE
            _, good = parse_batches(batches.read_at(last, BATCH_SIZE))
            if not bool(good[0]):
                report("lost", f"{BATCHES}: the row at {last} is damaged")

    def likely_base(self) -> int:
        """Return the first offset of data.log if no checksum proves it: that of the first record if
        it is plausible, or, if the file is empty, that of the first index row.
        """
        data, index, floor = self._data, self._segment.file(INDEX), self._floor
        if data.size >= HEADER_SIZE:
            offset, _ = record_at(data, 0, data.size)
            if floor <= offset < MAX_OFFSET and is_record(
                data, 0, data.size, offset, None, CHAIN_RECORDS
            ):
                return offset
        elif index.size >= INDEX_SIZE:
            offset, position = INDEX_ROW.unpack(index.read_at(0, INDEX_SIZE))
            if floor <= offset < MAX_OFFSET and position == 0:
                return int(offset)
        return floor

    def _trusted(self) -> tuple[int, int]:
        """Return how far to trust the checkpoint: bytes of data, rows of the index."""
        segment, here, data, index = self._segment, self._here, self._data, self._index
        if (
            here is None
            or here.data_size > data.size
            or here.index_size > index.size
            or here.index_size % INDEX_SIZE
        ):
            return 0, 0
        rows = here.index_size // INDEX_SIZE
        if not rows:
            return 0, 0
        first, last = (segment.index_rows(row, row + 1)[0].item() for row in (0, rows - 1))
        ends_here = record_at(data, last[1], here.data_size) == (last[0], here.data_size)
        return (here.data_size, rows) if ends_here and first == (segment.base, 0) else (0, 0)

    def _scan(
        self, start: int, rows: int, cut: int, failed: np.ndarray
    ) -> tuple[int, np.ndarray | None]:
        """Scan the records. Return the end according to the index, and the index rows to write
        from `rows` on, if any.
        """
        segment, index = self._segment, self._index
        offset = segment.base
        if rows:
            before = index.read_at((rows - 1) * INDEX_SIZE, INDEX_SIZE)
            offset = int(INDEX_ROW.unpack(before)[0]) + 1
        tail = index.read_at(rows * INDEX_SIZE, (index.size // INDEX_SIZE - rows) * INDEX_SIZE)
        old_rows = np.frombuffer(tail, INDEX_TYPE)
        batches = intact_batches(segment)
        scanned = scan(self._data, cut, start, offset, index=old_rows, anchors=anchors_of(batches))
        scanned = drop_untiled(scanned, batches[batches["start"] >= start])
        self._directory.damage.note_holes(
            segment, sorted([*scanned.holes, *_failed_holes(failed, scanned)])
        )
        segment.rows = rows + len(scanned.rows)
        segment.data_size, segment.end = scanned.end, scanned.next_offset
        index_end = offset + _consecutive(old_rows, offset)
        if np.array_equal(scanned.rows, old_rows) and index.size % INDEX_SIZE == 0:
            return index_end, None
        if not np.array_equal(scanned.rows[: len(old_rows)], old_rows):
            self._directory.report(
                "repaired", f"{INDEX} did not match {DATA}; rows from {rows} on were rebuilt"
            )
        return index_end, scanned.rows

    def _check_tail(self, start: int) -> np.ndarray:
        """Check the data of each sidecar row against its checksum, from `start` on."""
        data, outcomes = self._data, np.full(len(self._tail), UNREAD)
        for i in np.flatnonzero(self._good & (self._tail["start"] >= start)):
            begin, end, wanted = (int(self._tail[column][i]) for column in ("start", "end", "crc"))
            fine = end <= data.size and checksum(data, begin, end) == wanted
            if not fine and end <= data.size:
                # the page cache may have a flipped bit: read the disk
                data.forget(begin, end - begin)
                fine = checksum(data, begin, end) == wanted
            outcomes[i] = MATCHED if fine else FAILED
        return outcomes

    def _torn_at(self, outcomes: np.ndarray) -> int:
        """Return where an unfinished commit begins, or the end of the file.

        With strict durability, only the last commit can be unfinished: a bad batch before a good
        later commit is damage. With relaxed durability, nothing after the last fsync is certain:
        data is kept as far as good batches cover it.
        """
        if self._state == CLEAN:
            return self._data.size
        start = 0 if self._here is None else self._here.data_size
        covered, bad, newest_good = start, [], -1
        for row, outcome in zip(self._tail, outcomes, strict=True):
            begin, end = int(row["start"]), int(row["end"])
            if outcome == UNREAD or begin < start:
                continue
            if outcome == MATCHED:
                newest_good = int(row["time"])
                covered = end if begin == covered else covered
            else:
                bad.append((begin, int(row["time"])))
        if self._state == RELAXED:
            return covered
        return min((begin for begin, time in bad if time >= newest_good), default=self._data.size)

    def _sidecar_size(self, newest: int) -> int:
        """Return the size at which the sidecar ends with the data."""
        rows, good, report = self._tail, self._good, self._directory.report
        if not bool(good.all()):
            bad = int((~good).sum())
            text = f"{bad} rows are damaged; their records have no checksum and no time"
            report("lost", f"{BATCHES}: {text}")
        beyond = np.flatnonzero(good & (rows["end"] > self._segment.data_size))
        if len(beyond) and newest < MAX_OFFSET:
            end = self._end_in_sidecar(MAX_OFFSET)
            self.report_unfinished(f"offsets {newest} to {end - 1}")
        return self._tail_start + (int(beyond[0]) if len(beyond) else len(rows)) * BATCH_SIZE

    def _check_cover(self, size: int) -> None:
        """Report data without a sidecar row. While the log is written, all data has one."""
        last, good = parse_batches(
            self._batches.read_at(max(0, size - BATCH_SIZE), BATCH_SIZE if size else 0)
        )
        end = int(last["end"][0]) if len(last) and bool(good[0]) else 0
        if end < self._segment.data_size and (not len(good) or bool(good[0])):
            text = (
                f"{BATCHES}: rows are missing; records from byte {end} of {DATA} on have no "
                "checksum and no time"
            )
            self._directory.report("lost", text)

    def _trim_sidecar(self, size: int) -> None:
        segment, batches = self._segment, self._batches
        if size != batches.size:
            batches.truncate(size)
        segment.batches_size = size
        segment.newest = segment.modified() if segment.rows else 0
        if size:
            last, fine = parse_batches(batches.read_at(size - BATCH_SIZE, BATCH_SIZE))
            if bool(fine[0]):
                segment.newest = int(last["time"][0])

    def _cut_and_sync(self) -> None:
        self.cut()
        if self._index.size > self._segment.rows * INDEX_SIZE:
            self._index.truncate(self._segment.rows * INDEX_SIZE)
        self.sync(BATCHES, INDEX, DATA)

    def _check_metadata(self, end: int) -> None:
        directory, checkpoint = self._directory, self._checkpoint
        noted = directory.read_metadata()
        if noted != end:
            if noted is None or (checkpoint is not None and checkpoint.state == CLEAN):
                directory.report("repaired", f"{METADATA} had {noted}, the next offset is {end}")
            directory.fs.replace(directory.path / METADATA, pack_metadata(end), sync=False)


def _consecutive(rows: np.ndarray, offset: int) -> int:
    """Return how many leading index rows have consecutive offsets from `offset` on."""
    follows = rows["offset"] == np.arange(offset, offset + len(rows), dtype=np.uint64)
    return len(rows) if bool(follows.all()) else int(np.argmin(follows))


def _failed_holes(failed: np.ndarray, scanned: Scan) -> list[Hole]:
    """Return batches that fail their checksum although their records are consecutive."""
    starts = {hole.start for hole in scanned.holes}
    return [
        Hole(
            int(row["start"]), int(row["end"]), int(row["first"]), int(row["first"] + row["count"])
        )
        for row in failed
        if row["end"] <= scanned.end and int(row["start"]) not in starts
    ]
