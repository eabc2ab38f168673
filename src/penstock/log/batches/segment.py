"""A segment of record batches: find the batch of an offset, and read its records.

The sparse index and the headers after its row locate a batch. For sequential readers and readers at
the end, the end of the batch before is remembered. A batch's checksum is checked before the batch
is decoded. Batches returned as bytes (`raw`) are checked by the reader that decodes them.

Compaction leaves gaps in the offsets, between batches and within them. A gap in the *positions* is
damage: `Damaged`, with the offset where reading can continue.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.errors import Damaged
from penstock.io.fs import Fs
from penstock.log.batches.decode import Columns, Decoder, records_of
from penstock.log.batches.index import ROW, TRAILER_SIZE, SparseIndex
from penstock.log.batches.walk import next_whole, shape_at
from penstock.log.layout import DATA, HEADER_SIZE, INDEX
from penstock.log.segment import Batch, Raw, Segment, Write, empty_batch
from penstock.protocol.kafka_batch import HEAD_SIZE, BatchHead, is_whole

KINDS = (INDEX, DATA)
WINDOW_BYTES = 64 << 10  # per read while headers are walked
PLACES_REMEMBERED = 64


class _Batch(NamedTuple):
    """The position and the offsets of a batch, from its header."""

    position: int
    first: int
    end: int  # the offset after its last one
    size: int
    records_before: int  # in the segment

    @property
    def stop(self) -> int:
        return self.position + self.size


class BatchSegment(Segment):
    kinds = KINDS

    __slots__ = ("_index", "_index_size", "_places")

    def __init__(self, fs: Fs, directory: Path, base: int, *, sealed: bool) -> None:
        super().__init__(fs, directory, base, sealed=sealed)
        self._index = None if sealed else SparseIndex(base)
        self._index_size = 0  # of the index file of a sealed segment
        # Where recent reads ended: offset -> (position, records before it).
        self._places: OrderedDict[int, tuple[int, int]] = OrderedDict()

    # Numbers

    @property
    def index(self) -> SparseIndex:
        if self._index is None:
            data = self.file(INDEX).read_at(0, self._index_size)
            index = SparseIndex.parse(data)
            if index is None or index.size != self.data_size:
                if self.on_mismatch is not None:
                    self.on_mismatch(self)
                index = SparseIndex(self.base)
                index.size, index.end, index.records = self.data_size, self.end, self.rows
            self._index = index
        return self._index

    def forget_files(self) -> None:
        super().forget_files()
        if self.sealed:
            self._index = None

    def sizes(self) -> dict[str, int]:
        size = self._index_size
        if not self.sealed and self._index is not None:
            size = self._index.row_count * ROW.itemsize + TRAILER_SIZE
        return {DATA: self.data_size, INDEX: size}

    def take_sizes(self, sizes: Mapping[str, int]) -> None:
        self.data_size, self._index_size = sizes[DATA], sizes[INDEX]

    def take_index(self, index: SparseIndex) -> None:
        """Set the index, and the fields that follow from it."""
        self._index, self._index_size = index, index.row_count * ROW.itemsize + TRAILER_SIZE
        self.base = index.base
        self.end, self.rows, self.newest = index.end, index.records, index.newest
        self.data_size, self.compacted = index.size, index.compacted

    def begin_at(self, offset: int) -> None:
        self.take_index(SparseIndex(offset))

    def extend(self, write: Write) -> None:
        index = self.index
        for batch in write.batches:
            index.add(batch)
        self.end, self.rows, self.newest = index.end, index.records, index.newest
        self.data_size = index.size

    def _remember(self, offset: int, position: int, records: int) -> None:
        self._places[offset] = (position, records)
        if len(self._places) > PLACES_REMEMBERED:
            self._places.popitem(last=False)

    def oldest(self) -> int:
        head = BatchHead.parse(self.file(DATA).read_at(0, HEAD_SIZE))
        return head.base_timestamp * 1000

    # Finding

    def _heads(self, position: int, records: int) -> Iterator[_Batch]:
        """Yield the batches from a position on; `records` precede it in the segment. Damaged bytes
        are skipped, so a batch may begin after the end of the one before.
        """
        file, expected = self.file(DATA), self.base
        buffer, start = b"", position
        while position < self.data_size:
            hole = next((stop for begin, stop in self.holes if begin <= position < stop), None)
            if hole is not None:
                position = start = hole
                buffer = b""
                continue
            shape = shape_at(buffer, position - start)
            if shape is None:
                start = position
                buffer = file.read_at(start, min(WINDOW_BYTES, self.data_size - start))
                shape = shape_at(buffer, 0)
            stop = self.data_size if shape is None else position + shape[2]
            if shape is None or stop > self.data_size or not expected <= shape[0] < self.end:
                following = next_whole(file, position, self.data_size, expected, self.end)
                if following is None:
                    return
                position, buffer, start = following.position, b"", following.position
                continue
            first, end, size = shape
            yield _Batch(position, first, end, size, records)
            at = position - start
            records += int.from_bytes(buffer[at + 57 : at + HEAD_SIZE], "big")
            position, expected = stop, end

    def _find(self, offset: int) -> Iterator[_Batch]:
        """Yield the batch that contains `offset`, or the first after it, and the following ones up
        to damage.
        """
        place = self._places.get(offset)
        if place is None:
            _, position, _, records = self.index.row_before("offset", offset)
        else:
            position, records = place
        started, before = False, position  # the end of the previous batch
        for batch in self._heads(position, records):
            if started and batch.position != before:
                return
            if batch.end > offset:
                if not started and batch.position != before and batch.first > offset:
                    raise self._damaged(before, batch.position, batch.first)
                started = True
                yield batch
            before = batch.stop
        if not started and offset < self.end:
            raise self._damaged(before, self.data_size, self.end)

    def _damaged(self, begin: int, stop: int, resume: int) -> Damaged:
        return Damaged(
            f"{self.path(DATA).name}: bytes {begin} to {stop} are damaged, records continue at "
            f"offset {resume}",
            resume,
        )

    # Reading

    def read(self, offset: int, max_records: int, max_bytes: int) -> Batch:
        """Read records. `Damaged` if the first batch is damaged; a later one ends the read."""
        batches: list[_Batch] = []
        at = offset
        while True:
            batches = self._span(at, max_records, max_bytes)
            if not batches:
                return empty_batch(self.end)
            columns, following = self._decode(batches, max_bytes)
            count = len(columns.offsets)
            skip = int(np.searchsorted(columns.offsets, offset))
            if skip < count:
                break
            at = following  # compaction removed all their records from `offset` on
        sizes = np.cumsum(HEADER_SIZE + np.maximum(columns.value_lengths[skip:], 0))
        fitting = max(1, int(np.searchsorted(sizes, max_bytes, "right")))
        part = slice(skip, min(count, skip + max_records, skip + fitting))
        return batch_of(columns, part, following)

    def _span(self, offset: int, max_records: int, max_bytes: int) -> list[_Batch]:
        """Return adjacent batches from the one that contains `offset`, up to either limit."""
        batches: list[_Batch] = []
        size = 0
        for batch in self._find(offset):
            if batches and (size + batch.size > max_bytes or batch.first - offset >= max_records):
                break
            batches.append(batch)
            size += batch.size
        return batches

    def _decode(self, batches: Sequence[_Batch], max_bytes: int) -> tuple[Columns, int]:
        """Return the records of adjacent batches, and the offset after the last one. Stop before a
        damaged batch, and when the decompressed records exceed `max_bytes`.
        """
        start, following = batches[0].position, batches[0].end
        data = self.file(DATA).read_at(start, batches[-1].stop - start)
        decoder = Decoder()
        for batch in batches:
            at = batch.position - start
            head = BatchHead.parse(data, at)
            try:
                if not is_whole(data, at):
                    raise Damaged(
                        f"{self.path(DATA).name}: the batch at byte {batch.position} (offsets "
                        f"{batch.first} to {batch.end - 1}) does not match its checksum",
                        batch.end,
                    )
                decoder.add(data, head, at)
            except Damaged:
                if batch is not batches[0]:
                    break
                raise
            following = batch.end
            self._remember(batch.end, batch.stop, batch.records_before + head.records)
            if decoder.size > max_bytes:
                break
        return decoder.columns(), following

    def raw(self, offset: int, max_bytes: int) -> Raw:
        """Return whole batches, at least one. The first may begin before `offset`."""
        batches = self._find(offset)
        first = next(batches, None)
        if first is None:
            return Raw(self.end, 0, self.end, None, 0, 0)
        stop, end, records = self._stop(first, max_bytes, batches)
        self._remember(end, stop, records)
        count = records - first.records_before
        length = stop - first.position
        return Raw(first.first, count, end, self.file(DATA), first.position, length)

    def _stop(
        self, first: _Batch, max_bytes: int, following: Iterator[_Batch]
    ) -> tuple[int, int, int]:
        """Return the end of the batches from `first` on that fit into `max_bytes`: position, offset
        and the records before it. Each row of the index is the start of a batch.
        """
        limit = first.position + max_bytes
        hole = next((begin for begin, _ in self.holes if begin >= first.stop), self.data_size)
        if limit >= self.data_size and hole == self.data_size:
            return self.data_size, self.end, self.rows
        _, position, _, _ = row = self.index.row_before("position", min(limit, hole))
        if first.stop <= position <= hole and not any(stop == position for _, stop in self.holes):
            return position, row[0], row[3]
        before = first
        for batch in following:
            if batch.stop > limit:
                return before.stop, before.end, batch.records_before
            before = batch
        last = BatchHead.parse(self.file(DATA).read_at(before.position, HEAD_SIZE))
        return before.stop, before.end, before.records_before + last.records

    # Records and times

    def records_from(self, offset: int) -> int:
        if offset <= self.base:
            return self.rows
        if self.dense:
            return max(0, self.end - offset)
        batch = next(self._find(offset), None)
        if batch is None:
            return 0
        inside = 0
        if batch.first < offset:
            inside = int((self._decode([batch], 0)[0].offsets < offset).sum())
        return self.rows - batch.records_before - inside

    def times(self, offsets: np.ndarray) -> np.ndarray:
        times = np.empty(len(offsets), np.int64)
        at = 0
        while at < len(offsets):
            batch = next(self._find(int(offsets[at])), None)
            if batch is None:
                times[at:] = self.newest
                break
            columns, _ = self._decode([batch], 0)
            stop = max(at + 1, int(np.searchsorted(offsets, batch.end)))
            rows = np.searchsorted(columns.offsets, offsets[at:stop])
            known = np.append(columns.times * 1000, self.newest)
            times[at:stop] = known[rows]
            at = stop
        return times

    def offset_at(self, microseconds: int) -> int | None:
        if self.newest < microseconds or not self.rows:
            return None
        _, position, _, records = self.index.row_before("time", max(0, microseconds), "left")
        file = self.file(DATA)
        for batch in self._heads(position, records):
            head = BatchHead.parse(file.read_at(batch.position, HEAD_SIZE))
            if head.max_timestamp * 1000 < microseconds:
                continue
            columns, _ = self._decode([batch], 0)
            later = np.flatnonzero(columns.times * 1000 >= microseconds)
            if len(later):
                return int(columns.offsets[later[0]])
        return None


def batch_of(columns: Columns, part: slice, following: int) -> Batch:
    if part.stop < len(columns.offsets):
        following = int(columns.offsets[part.stop - 1]) + 1
    starts = columns.value_starts[part]
    ends = starts + np.maximum(columns.value_lengths[part], 0)
    offsets = columns.offsets[part]
    return Batch(columns.data, offsets, starts, ends, following, partial(records_of, columns, part))
