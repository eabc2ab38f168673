"""Split a FETCH answer into columns with numpy and Arrow, without a Python loop over records.

The raw log is `count` times `[offset u64 LE][length u32 LE][payload]`, so the start of a record
follows from the lengths of all records before it. FETCH therefore also sends the lengths as an
array (4 bytes per record, from the server's index). Their running sum is where records end, and
Arrow removes the 12 header bytes of each in C++. Offsets are counted from the first one if the
header of the last record confirms the result; if not, each is read from its header.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, pairwise
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    import numpy as np
except ImportError:  # a client without the server: records one by one, no columns
    np = None  # type: ignore[assignment]

from penstock.errors import Damaged
from penstock.protocol.kafka_batch import BatchHead, KafkaRecord, decode_batch

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

RECORD_HEADER = Struct("<QI")  # offset, payload length: as in data.log
HEADER_SIZE = RECORD_HEADER.size
_NO_END = (1 << 31) - 1  # binary_slice without an explicit stop overflows for some row counts


class _Pair(NamedTuple):
    offset: int
    payload: bytes


class Record(_Pair):
    """A record: a pair of offset and payload, with its other fields as attributes."""

    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp: int | None = None  # milliseconds since 1970; None: the topic's format has none
    partition: int = 0
    tombstone: bool = False  # it has no value; its payload is empty

    @classmethod
    def decoded(cls, record: KafkaRecord, partition: int) -> "Record":
        """Return a record of a record batch."""
        made = cls(record.offset, record.value or b"")
        made.key, made.headers = record.key, record.headers
        made.timestamp, made.partition = record.timestamp, partition
        made.tombstone = record.value is None
        return made


def walk(raw: memoryview | bytes) -> "npt.NDArray[np.uint32]":
    """Return the payload lengths of a raw log, with one step of Python per record."""
    lengths, at, end = [], 0, len(raw)
    unpack = RECORD_HEADER.unpack_from
    while at + HEADER_SIZE <= end:
        length = unpack(raw, at)[1]
        lengths.append(length)
        at += HEADER_SIZE + length
    if at != end:
        raise Damaged(f"a raw log of {end} bytes ends inside a record that begins before byte {at}")
    plain: Any = array("I", lengths)
    return plain if np is None else np.array(lengths, np.uint32)


def payload_array(raw: memoryview, starts: "npt.NDArray[np.int64]") -> "pa.Array":
    """Return the payloads as an Arrow `binary` array. `starts` has the start of each record, then
    the end of the last one.
    """
    import pyarrow as pa  # optional: only clients that want columns need it
    import pyarrow.compute as pc

    buffers = [None, pa.py_buffer(starts.astype(np.int32)), pa.py_buffer(raw)]
    records = pa.Array.from_buffers(pa.binary(), len(starts) - 1, buffers)
    return pc.binary_slice(records, HEADER_SIZE, _NO_END)


class Batch:
    """Records of one topic, in order. Payloads are not split or copied until you ask for them."""

    __slots__ = (
        "_offsets",
        "_records",
        "_starts",
        "count",
        "first_offset",
        "lengths",
        "next_offset",
        "raw",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        first_offset: int,
        raw: memoryview | bytes,
        lengths: "npt.NDArray[np.uint32] | None" = None,
    ) -> None:
        self.topic = topic
        self.first_offset = first_offset
        self.raw = memoryview(raw)
        self.lengths = walk(raw) if lengths is None else lengths
        self.count = count = len(self.lengths)
        self._starts = starts = _starts(self.lengths)
        self._offsets: npt.NDArray[np.int64] | None = None
        self._records: list[Record] | None = None  # with keys, where the format has them
        self.next_offset = first_offset
        if starts[-1] != len(raw):
            raise Damaged(
                f"topic {topic!r}: {len(raw)} bytes of raw log, "
                f"but the records in it have {int(starts[-1])}"
            )
        if count:
            last = RECORD_HEADER.unpack_from(raw, int(starts[-2]))[0]
            self.next_offset = last + 1
            if last != first_offset + count - 1:
                self._offsets = self._read_offsets()

    def _read_offsets(self) -> "npt.NDArray[np.int64]":
        """Read offsets with gaps (of a compacted topic) from the headers of the records."""
        offsets: Any
        if np is None:
            unpack = RECORD_HEADER.unpack_from
            offsets = array("q", (unpack(self.raw, start)[0] for start in self._starts[:-1]))
            grow = all(before < after for before, after in pairwise(offsets))
        else:
            places = self._starts[:-1, None] + np.arange(8)
            offsets = np.frombuffer(self.raw, np.uint8)[places].view("<i8").reshape(-1)
            grow = bool((np.diff(offsets) > 0).all())
        if offsets[0] != self.first_offset or not grow:
            raise Damaged(
                f"topic {self.topic!r}: "
                f"the records fetched from offset {self.first_offset} are not in order"
            )
        made: npt.NDArray[np.int64] = offsets
        return made

    def __len__(self) -> int:
        return self.count

    def offsets(self) -> "npt.NDArray[np.int64]":
        """Return the offsets of the records, in order. Without numpy it is an `array.array`."""
        if self._offsets is not None:
            return self._offsets
        if np is None:
            plain: Any = array("q", range(self.first_offset, self.next_offset))
            return plain
        return np.arange(self.first_offset, self.next_offset, dtype=np.int64)

    def payload_array(self) -> "pa.Array":
        """Return the payloads as an Arrow `binary` array."""
        return payload_array(self.raw, self._starts)

    def to_arrow(self) -> "pa.RecordBatch":
        """Return an Arrow record batch with the columns `offset` (int64) and `payload` (binary)."""
        import pyarrow as pa

        # From buffers: `pa.array` of a numpy array would import pandas, which takes a second.
        offsets = pa.Array.from_buffers(
            pa.int64(), self.count, [None, pa.py_buffer(self.offsets())]
        )
        return pa.RecordBatch.from_arrays(
            [offsets, self.payload_array()], names=["offset", "payload"]
        )

    def payloads(self) -> list[bytes]:
        """Return the payloads, in order."""
        raw = self.raw
        starts = self._starts.tolist()
        return [bytes(raw[start + HEADER_SIZE : end]) for start, end in pairwise(starts)]

    def __iter__(self) -> Iterator[Record]:
        if self._records is not None:
            return iter(self._records)
        return map(Record, self.offsets().tolist(), self.payloads())

    def until(self, offset: int) -> "Batch":
        """Return the batch without the records from `offset` on."""
        if offset >= self.next_offset:
            return self
        keep = bisect_left(self.offsets(), offset)
        kept = Batch(
            self.topic, self.first_offset, self.raw[: int(self._starts[keep])], self.lengths[:keep]
        )
        kept._records = None if self._records is None else self._records[:keep]
        return kept

    @classmethod
    def decoded(
        cls, topic: str, partition: int, batches: memoryview, start: int, following: int
    ) -> "Batch":
        """Return the records from offset `start` on of Kafka's record batches, up to a batch that
        cannot be decoded. `following` is where the next read continues.
        """
        records, at = list[Record](), 0
        while at < len(batches):
            head = BatchHead.parse(batches, at)
            try:
                decoded = decode_batch(batches, at)
            except Damaged:
                if not records:
                    raise
                following = head.base_offset
                break
            records += (Record.decoded(one, partition) for one in decoded if one.offset >= start)
            at += head.size
        raw = b"".join(
            part
            for offset, payload in records
            for part in (RECORD_HEADER.pack(offset, len(payload)), payload)
        )
        batch = cls(topic, records[0].offset if records else following, raw)
        batch._records, batch.next_offset = records, following
        return batch


def _starts(lengths: Any) -> "npt.NDArray[np.int64]":
    """Return where each record begins. The last entry is the end."""
    if np is None:
        sizes = (length + HEADER_SIZE for length in lengths)
        plain: Any = array("q", accumulate(sizes, initial=0))
        return plain
    starts = np.empty(len(lengths) + 1, np.int64)
    starts[0] = 0
    np.cumsum(lengths.astype(np.int64) + HEADER_SIZE, out=starts[1:])
    return starts
