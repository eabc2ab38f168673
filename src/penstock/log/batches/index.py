"""The sparse index of a segment of record batches: a hint, which can be rebuilt from the data.

It has a row for the first batch, and for each batch that begins `INTERVAL_BYTES` or more after the
batch of the previous row; then a trailer. Integers are little-endian. The file is replaced when the
topic is checkpointed and when the segment is sealed.

    row       0  base offset of a batch u64
              8  its position in the data file u64
             16  newest time of all batches before it, microseconds u64
             24  records before it u64
    trailer   0  magic "PENSIDX1"
              8  base of the segment u64
             16  bytes of data that the index describes u64
             24  offset after the last record in them u64
             32  records in them u64
             40  newest time in them, microseconds u64
             48  1 = compaction removed records u32
             52  CRC32C of all bytes before u32
"""

from struct import Struct

import numpy as np
from crc32c import crc32c

from penstock.log.segment import Mark, StoredBatch

INTERVAL_BYTES = 16 << 10
ROW = np.dtype([("offset", "<u8"), ("position", "<u8"), ("time", "<u8"), ("records", "<u8")])
_TRAILER = Struct("<8sQQQQQI")
_CHECK = Struct("<I")
TRAILER_SIZE = _TRAILER.size + _CHECK.size
_MAGIC = b"PENSIDX1"
_NO_ROWS = np.empty(0, ROW)


class SparseIndex:
    """The index of a segment, which grows with it."""

    __slots__ = (
        "_array",
        "_next",
        "_rows",
        "base",
        "compacted",
        "end",
        "newest",
        "records",
        "size",
    )

    def __init__(self, base: int, rows: np.ndarray = _NO_ROWS) -> None:
        self.base = base
        self.size = 0  # bytes of data
        self.end = base  # offset after the last record
        self.records = 0
        self.newest = 0  # microseconds
        self.compacted = False
        self._rows: list[tuple[int, int, int, int]] = []  # not in `_array` yet
        self._array = rows
        # A batch at this position or a later one gets a row.
        self._next = int(rows["position"][-1]) + INTERVAL_BYTES if len(rows) else 0

    def add(self, batch: StoredBatch) -> None:
        """Add the next batch."""
        if self.size >= self._next:
            self._rows.append((batch.first, self.size, self.newest, self.records))
            self._next = self.size + INTERVAL_BYTES
        self.size += batch.size
        self.end = batch.end
        self.records += batch.records
        self.newest = max(self.newest, batch.time)

    def skip(self, position: int, offset: int) -> None:
        """Skip a hole."""
        self.size, self.end = position, offset

    @property
    def row_count(self) -> int:
        return len(self._array) + len(self._rows)

    @property
    def rows(self) -> np.ndarray:
        if self._rows:
            self._array = np.concatenate([self._array, np.array(self._rows, ROW)])
            self._rows = []
        return self._array

    def row_before(self, column: str, value: int, side: str = "right") -> tuple[int, int, int, int]:
        """Return the last row whose column is at most `value` (`left`: below it). If there is none,
        return the first row, or the start of the segment if the index is empty.
        """
        rows = self.rows
        if not len(rows):
            return self.base, 0, 0, 0
        at = int(np.searchsorted(rows[column], np.uint64(value), side))  # type: ignore[call-overload]
        offset, position, time, records = rows[max(0, at - 1)].tolist()
        return offset, position, time, records

    def until(self, mark: Mark) -> "SparseIndex":
        """Return the index as it was when the segment ended at `mark`."""
        rows = self.rows
        kept = rows[: int(np.searchsorted(rows["position"], np.uint64(mark.data_size)))]
        index = SparseIndex(self.base, kept)
        index.size, index.end, index.records = mark.data_size, mark.end, mark.rows
        index.newest, index.compacted = mark.newest, self.compacted
        return index

    def pack(self) -> bytes:
        body = self.rows.tobytes() + _TRAILER.pack(
            _MAGIC, self.base, self.size, self.end, self.records, self.newest, self.compacted
        )
        return body + _CHECK.pack(crc32c(body))

    @classmethod
    def parse(cls, data: bytes) -> "SparseIndex | None":
        """Decode the file. Return None if it is damaged."""
        at = len(data) - TRAILER_SIZE
        if at < 0 or at % ROW.itemsize or crc32c(data[:-4]) != _CHECK.unpack(data[-4:])[0]:
            return None
        magic, *numbers, compacted = _TRAILER.unpack_from(data, at)
        if magic != _MAGIC:
            return None
        index = cls(numbers[0], np.frombuffer(data, ROW, at // ROW.itemsize))
        _, index.size, index.end, index.records, index.newest = numbers
        index.compacted = bool(compacted)
        return index
