"""Open segments of record batches. The index is trusted as far as it matches; the rest is walked.

A sealed segment was synced before it got its name. If its index is intact and describes a file of
that size, nothing else is read. The active segment is trusted up to the end of its index. From
there on, every batch is checked against its checksum. A batch that is not intact has one of three
causes:

- The last commit was being written: no intact batch follows, or only batches of the same commit
  (leader epoch 1). It was not acknowledged, and is moved to a quarantine file.
- Damage: a later commit is intact. The bytes are a hole: kept, reported, and refused to readers.
- The broker did not wait for fsyncs (state RELAXED), and the power failed, so any part may be
  missing. Intact batches were acknowledged and are kept; the bytes between them are holes.
"""

from typing import NamedTuple

from penstock.io.fs import File
from penstock.log.active_recovery import EndClaim, OpeningSegment
from penstock.log.batches.index import SparseIndex
from penstock.log.batches.segment import BatchSegment
from penstock.log.batches.walk import next_whole, shape_at, whole_batches
from penstock.log.damage import Hole
from penstock.log.format import SegmentFormat
from penstock.log.layout import (
    CLEAN,
    DATA,
    INDEX,
    STRICT,
    Checkpoint,
    sealed_name,
)
from penstock.log.segment import Segment
from penstock.log.topic_directory import MAX_OFFSET, TopicDirectory
from penstock.protocol.kafka_batch import HEAD_SIZE


class Found(NamedTuple):
    """The batches and holes of a data file, up to the end of the index."""

    described: SparseIndex
    holes: list[Hole]
    torn: bool  # an unfinished commit follows


def find_batches(
    data: File, size: int, index: SparseIndex, *, limit: int | None, certain: int, state: int
) -> Found:
    """Add the batches that follow the described part to `index`. With `limit` (a sealed segment),
    there may be gaps in the offsets, and all are below it. Data before `certain` was durable; data
    after it was written under the durability `state`.
    """
    holes: list[Hole] = []
    while True:
        for batch in whole_batches(data, index.size, size, index.end, limit=limit):
            dense = batch.head.base_offset == index.end and (
                batch.head.records == batch.head.last_offset_delta + 1
            )
            index.compacted = index.compacted or not dense
            index.add(batch.stored())
        at = index.size
        if at >= size:
            return Found(index, holes, torn=False)
        behind = at >= certain and state != CLEAN
        following = next_whole(data, at, size, index.end, limit)
        while behind and state == STRICT and following and following.head.leader_epoch:
            # it belongs to the same commit: search for a later one
            following = next_whole(data, following.position, size, index.end, limit)
        if following is None:
            return Found(index, holes, torn=behind)
        holes.append(Hole(at, following.position, index.end, following.head.base_offset))
        index.skip(following.position, following.head.base_offset)


def open_sealed_batches(
    directory: TopicDirectory, base: int, following: int | None
) -> BatchSegment:
    segment = BatchSegment(directory.fs, directory.path, base, sealed=True)
    name = sealed_name(INDEX, base)
    data = segment.file(DATA)
    index = _parsed(directory, name)
    segment.holes = directory.damage.holes_of(base)
    fits = (
        index is not None
        and index.base == base
        and index.size == data.size
        and (following is None or index.end <= following)
        and _points_at_batches(index, data)
    )
    if index is None or not fits:
        what = "is missing" if name not in directory.names else "does not match its data"
        directory.report("repaired", f"{name} {what} and is rebuilt")
        index = _rebuild(directory, segment, data, following)
    segment.take_index(index)
    return segment


def _points_at_batches(index: SparseIndex, data: File) -> bool:
    """Return whether batches begin where the first and the last row point."""
    for row in index.rows[[0, -1]] if index.row_count else ():
        shape = shape_at(data.read_at(int(row["position"]), HEAD_SIZE), 0)
        if shape is None or shape[0] != int(row["offset"]):
            return False
    return bool(index.row_count) or not index.size


def _parsed(directory: TopicDirectory, name: str) -> SparseIndex | None:
    content = directory.read(name)
    return SparseIndex.parse(content) if content is not None else None


def _rebuild(
    directory: TopicDirectory, segment: BatchSegment, data: File, following: int | None
) -> SparseIndex:
    limit = following if following is not None else MAX_OFFSET
    fresh = SparseIndex(segment.base)
    index, holes, _ = find_batches(data, data.size, fresh, limit=limit, certain=0, state=CLEAN)
    directory.damage.note_holes(segment, holes)
    directory.cut_sealed(segment, index.size, lost=following is None or index.end < following)
    directory.fs.replace(segment.path(INDEX), index.pack())
    return index


def proven_batch_base(
    directory: TopicDirectory, sealed: list[int], checkpoint: Checkpoint | None
) -> int | None:
    """Return the first offset of the active segment from its checkpoint or its index."""
    floor = sealed[-1] + 1 if sealed else 0
    index = _parsed(directory, INDEX)
    claimed = [checkpoint.base] if checkpoint is not None else []
    claimed += [index.base] if index is not None else []
    return next((base for base in claimed if base >= floor), None)


class ActiveBatchSegment(OpeningSegment):
    def __init__(
        self,
        form: SegmentFormat,
        directory: TopicDirectory,
        sealed: list[Segment],
        checkpoint: Checkpoint | None,
        proven: int | None,
    ) -> None:
        self._segment = BatchSegment(directory.fs, directory.path, 0, sealed=False)
        self._index = _parsed(directory, INDEX)
        super().__init__(form, directory, sealed, checkpoint, proven, self._segment)

    @property
    def segment(self) -> BatchSegment:
        return self._segment

    def likely_base(self) -> int:
        """Return the base offset of the first batch, if it is whole."""
        batches = whole_batches(self._data, 0, self._data.size, self._floor, limit=MAX_OFFSET)
        first = next(batches, None)
        return first.head.base_offset if first is not None else self._floor

    def open(self) -> bool:
        segment, data, directory = self._segment, self._data, self._directory
        certain = self._here.data_size if self._here is not None else 0
        index, claimed = self._believed(certain), self._index.end if self._index is not None else 0
        untouched = index.size == data.size == certain
        torn = False
        if index.size < data.size:
            index, holes, torn = find_batches(
                data, data.size, index, limit=None, certain=certain, state=self._state
            )
            index.compacted = False
            segment.take_index(index)
            directory.damage.note_holes(segment, holes)
        segment.take_index(index)
        self.report_lost([EndClaim(claimed, INDEX)])
        if torn:
            self.report_unfinished(f"from offset {segment.end} on")
        directory.damage.write()
        self.cut()
        if not untouched:
            self.sync(DATA)
        segment.holes = directory.damage.holes_of(segment.base)
        return not untouched

    def _believed(self, certain: int) -> SparseIndex:
        """Return the index if it describes the data; otherwise an empty one."""
        index, segment = self._index, self._segment
        fits = (
            index is not None
            and index.base == segment.base
            and index.size <= self._data.size
            and (self._here is None or index.size <= certain)
            and _points_at_batches(index, self._data)
        )
        if index is not None and fits:
            return index
        if self._here is not None and certain:
            self._directory.report("repaired", f"{INDEX} does not match {DATA}, which is walked")
        return SparseIndex(segment.base)
