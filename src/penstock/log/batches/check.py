"""Check a sealed segment of record batches, for the scrub."""

import contextlib
from collections.abc import Iterator

from penstock.errors import StorageFailed
from penstock.io.fs import File
from penstock.log.batches.index import SparseIndex
from penstock.log.batches.segment import BatchSegment
from penstock.log.batches.walk import Located, next_whole, whole_batches
from penstock.log.damage import Hole
from penstock.log.layout import DATA, INDEX
from penstock.log.segment import Fault

STEP_BYTES = 1 << 20


class BatchCheck:
    """Check every batch against its checksum, then the index against the batches."""

    def __init__(self, segment: BatchSegment) -> None:
        self.segment = segment
        self.faults: list[Fault] = []
        self.unchecked = 0
        self._index = SparseIndex(segment.base)

    def steps(self) -> Iterator[int]:
        """Yield how many bytes were read, after each step."""
        data, size = self.segment.file(DATA), self.segment.data_size
        while (at := self._index.size) < size:
            data.forget(at, min(STEP_BYTES, size - at))
            for batch in self._batches(data, at, size, self._index.end):
                self._index.add(batch.stored())
                if batch.end - at >= STEP_BYTES:
                    break
            else:
                if self._index.size < size:
                    self._pass_damage(data, self._index.size, size)
            data.forget(at, self._index.size - at)
            yield self._index.size - at
        yield self._check_index()

    def _batches(self, data: File, at: int, size: int, offset: int) -> Iterator[Located]:
        """Yield whole batches until there is damage, or bytes that cannot be read."""
        with contextlib.suppress(StorageFailed):
            yield from whole_batches(data, at, size, offset, limit=self.segment.end)

    def _pass_damage(self, data: File, at: int, size: int) -> None:
        """Read the bytes at `at` again, from the disk. If they are still damaged, report a hole."""
        data.forget(at, size - at)
        again = self._batches(data, at, min(size, at + STEP_BYTES), self._index.end)
        if next(again, None) is not None:
            return
        following = self._find_next(data, at, size)
        end, offset = size, self.segment.end
        if following is not None:
            end, offset = following.position, following.head.base_offset
        if not any(begin < end and at < stop for begin, stop in self.segment.holes):
            lost = self._index.end
            what = f"offsets {lost} to {offset - 1}, bytes {at} to {end} fail their CRC32C"
            hole = Hole(at, end, lost, offset)._asdict()
            name = self.segment.path(DATA).name
            self.faults.append(Fault(name, at, what, {"base": self.segment.base, **hole}))
        self._index.skip(end, offset)

    def _find_next(self, data: File, at: int, size: int) -> Located | None:
        """Return the next intact batch. If bytes cannot be read, try the positions in the index."""
        try:
            return next_whole(data, at, size, self._index.end, self.segment.end)
        except StorageFailed:
            rows = self.segment.index.rows
            for row in rows[rows["position"] > at]:
                position, offset = int(row["position"]), int(row["offset"])
                intact = next(self._batches(data, position, size, offset), None)
                if intact is not None:
                    return intact
            return None

    def _check_index(self) -> int:
        """Compare the index file with the data. Skip that if there are holes, which lack rows."""
        segment, size = self.segment, self.segment.sizes()[INDEX]
        stored = SparseIndex.parse(segment.file(INDEX).read_at(0, size))
        segment.file(INDEX).forget(0, size)
        sound = stored is not None and stored.size == segment.data_size
        if sound and stored is not None and not (segment.holes or self.faults):
            stored.compacted = self._index.compacted
            sound = stored.pack() == self._index.pack()
        if not sound:
            what = f"does not match {segment.path(DATA).name}: it is walked instead"
            self.faults.append(Fault(segment.path(INDEX).name, 0, what, {}))
        return size
