"""Find the records in a data file whose index cannot be trusted.

Index rows are compared with the record headers in bulk (numpy, a few nanoseconds per record). From
the first mismatch on, records are walked one by one. Where the walk fails, reading resumes at the
next record that the sidecar, the index, or finally a search through the bytes finds. The bytes in
between are a hole.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from penstock.io.fs import File
from penstock.log.damage import Hole
from penstock.log.layout import (
    BATCHES,
    HEADER_SIZE,
    HEADER_TYPE,
    INDEX_TYPE,
    RECORD_HEADER,
    parse_batches,
)
from penstock.log.segment import Segment

CHUNK_BYTES = 4 << 20
ROWS_PER_STEP = 1 << 16
MAX_SEARCH_BYTES = 16 << 20  # searched for the next record if sidecar and index have none
CHAIN_RECORDS = 3  # a position is accepted if so many records follow one another there

_IN_HEADER = np.arange(HEADER_SIZE)


class Scan(NamedTuple):
    rows: np.ndarray  # index rows of the records
    end: int  # byte position after the last whole record
    next_offset: int
    holes: list[Hole]


class ReadableRecords(Protocol):
    def read_at(self, position: int, length: int) -> bytes | memoryview: ...


def record_at(data: ReadableRecords, position: int, size: int) -> tuple[int, int]:
    """Return the offset and the end of the record at this position. Both are -1 if no header fits
    there in data of this size.
    """
    header = data.read_at(position, HEADER_SIZE) if 0 <= position <= size - HEADER_SIZE else b""
    if len(header) < HEADER_SIZE:
        return -1, -1
    offset, length = RECORD_HEADER.unpack(header)
    return offset, position + HEADER_SIZE + length


def agreeing(data: ReadableRecords, rows: np.ndarray, size: int, start: int) -> int:
    """Return how many leading index rows describe `data` from `start` on without a gap."""
    positions = rows["position"].astype(np.int64)
    good, at = 0, start
    while good < len(rows):
        count = min(ROWS_PER_STEP, len(rows) - good)
        part = positions[good : good + count]
        if int(part[0]) != at or at >= size:
            return good
        inside = (part[1:] > part[:-1]) & (part[1:] <= size - HEADER_SIZE)
        count = count if bool(inside.all()) else int(np.argmin(inside)) + 1
        part = part[:count]
        count = min(count, max(1, int(np.searchsorted(part, at + 8 * CHUNK_BYTES))))
        part = part[:count]
        if at + HEADER_SIZE > size:
            return good
        buffer = np.frombuffer(data.read_at(at, int(part[-1]) + HEADER_SIZE - at), np.uint8)
        if len(buffer) < int(part[-1]) + HEADER_SIZE - at:
            return good
        headers = buffer[(part - at)[:, None] + _IN_HEADER].view(HEADER_TYPE).reshape(-1)
        ends = part + HEADER_SIZE + headers["length"].astype(np.int64)
        fine = headers["offset"] == rows["offset"][good : good + count]
        fine[:-1] &= ends[:-1] == part[1:]
        fine[-1] &= bool(ends[-1] <= size)
        if not bool(fine.all()):
            return good + int(np.argmin(fine))
        good += count
        at = int(ends[-1])
    return good


def walk(
    data: File, at: int, size: int, offset: int, limit: int | None
) -> tuple[list[tuple[int, int]], int, int]:
    """Walk records one by one from `at`. Return their index rows, their end, and the next offset.

    Offsets are consecutive. With `limit` (a sealed segment), there may be gaps, and all offsets are
    below it.
    """
    rows: list[tuple[int, int]] = []
    unpack = RECORD_HEADER.unpack_from
    while at + HEADER_SIZE <= size:
        buffer = data.read_at(at, min(CHUNK_BYTES, size - at))
        inside, last = 0, len(buffer) - HEADER_SIZE
        while inside <= last:
            current, length = unpack(buffer, inside)
            end = at + inside + HEADER_SIZE + length
            follows = current == offset if limit is None else offset <= current < limit
            if end > size or not follows:
                return rows, at + inside, offset
            rows.append((current, at + inside))
            offset = current + 1
            inside += HEADER_SIZE + length
        if inside == 0:
            break
        at += inside
    return rows, at, offset


def scan(
    data: File,
    size: int,
    start: int,
    offset: int,
    *,
    index: np.ndarray,
    anchors: np.ndarray,
    limit: int | None = None,
) -> Scan:
    """Find all records of `data[start:size]`, the first of which should have `offset`.

    `index` has the index rows of this part, and `anchors` pairs (first offset, start) from the
    sidecar. Both may be wrong.
    """
    pieces: list[np.ndarray] = []
    holes: list[Hole] = []
    at = start
    ordered = index if bool((index["position"][1:] > index["position"][:-1]).all()) else index[:0]
    while True:
        rest = ordered[np.searchsorted(ordered["position"], np.uint64(at)) :]
        count = agreeing(data, rest, size, at)
        rows = rest[:count]
        if count and not _follows(rows["offset"], offset, limit):
            count, rows = 0, rest[:0]
        if count:
            pieces.append(rows)
            _, at = record_at(data, int(rows["position"][-1]), size)
            offset = int(rows["offset"][-1]) + 1
        walked, at, offset = walk(data, at, size, offset, limit)
        if walked:
            pieces.append(np.array(walked, dtype=np.uint64).view(INDEX_TYPE).reshape(-1))
        if at >= size:
            break
        resumed = next(_candidates(data, at, size, offset, index, anchors, limit), None)
        if resumed is None:
            break
        holes.append(Hole(at, resumed[0], offset, resumed[1]))
        at, offset = resumed
    records = np.concatenate(pieces) if pieces else np.empty(0, INDEX_TYPE)
    return Scan(records, at, offset, holes)


def drop_untiled(scanned: Scan, batches: np.ndarray) -> Scan:
    """Drop records that contradict the sidecar: each batch must consist of exactly its records.
    (Zeros look like records.)
    """
    rows, end, offset, holes = scanned
    for batch in batches[batches["start"] < scanned.end]:
        low, high = np.searchsorted(rows["position"], [batch["start"], batch["end"]])
        inside = rows[low:high]
        whole = len(inside) == int(batch["count"]) and inside[0]["offset"] == batch["first"]
        if not len(inside) or whole:
            continue
        start, stop, first = int(batch["start"]), int(batch["end"]), int(batch["first"])
        rows = np.concatenate([rows[:low], rows[high:]])
        holes = [hole for hole in holes if hole.end <= start or hole.start >= stop]
        if high < len(rows) + len(inside):
            holes.append(Hole(start, stop, first, first + int(batch["count"])))
        else:
            end, offset = start, first
    return Scan(rows, end, offset, sorted(holes))


def _follows(offsets: np.ndarray, offset: int, limit: int | None) -> bool:
    if limit is None:
        return bool((offsets == np.arange(offset, offset + len(offsets), dtype=np.uint64)).all())
    return (
        int(offsets[0]) >= offset
        and int(offsets[-1]) < limit
        and bool((offsets[1:] > offsets[:-1]).all())
    )


def _candidates(
    data: File,
    at: int,
    size: int,
    offset: int,
    index: np.ndarray,
    anchors: np.ndarray,
    limit: int | None,
) -> Iterator[tuple[int, int]]:
    """Yield places after `at` where records continue, nearest first: (position, offset)."""
    hints = np.concatenate([index, anchors]) if len(anchors) else index
    hints = hints[
        (hints["position"] > at)
        & (hints["position"] <= size - HEADER_SIZE)
        & (hints["offset"] > offset - 1)
    ]
    for row in np.sort(hints, order="position")[: 1 << 16]:
        position, first = int(row["position"]), int(row["offset"])
        if is_record(data, position, size, first, limit):
            yield position, first
            return
    buffer = data.read_at(at + 1, min(MAX_SEARCH_BYTES, size - at - 1))
    highest = limit if limit is not None else offset + (size - at) // HEADER_SIZE + 1
    for shift in _offsets_in(buffer, offset, highest):
        position = at + 1 + shift
        first = int.from_bytes(buffer[shift : shift + 8], "little")
        if is_record(data, position, size, first, limit, CHAIN_RECORDS):
            yield position, first
            return


def _offsets_in(buffer: bytes, low: int, high: int) -> list[int]:
    """Return where in `buffer` an unaligned u64 in [low, high) begins."""
    positions = []
    for shift in range(min(8, max(0, len(buffer) - 7))):
        values = np.frombuffer(buffer, "<u8", (len(buffer) - shift) // 8, shift)
        hits = np.flatnonzero((values >= np.uint64(low)) & (values < np.uint64(high)))
        positions.extend((hits * 8 + shift).tolist())
    return sorted(positions)


def is_record(
    data: File, position: int, size: int, offset: int, limit: int | None, chain: int = 1
) -> bool:
    """Return whether `chain` records follow from here, or fewer that end exactly with the file."""
    for _ in range(chain):
        current, position = record_at(data, position, size)
        follows = current == offset if limit is None else offset <= current < limit
        if position > size or not follows:
            return False
        offset = current + 1
        if position == size:
            return True
    return True


def intact_batches(segment: Segment) -> np.ndarray:
    """Return the rows of a segment's sidecar that match their checksums."""
    file = segment.file(BATCHES)
    rows, good = parse_batches(file.read_at(0, file.size))
    intact: np.ndarray = rows[good]
    return intact


def anchors_of(batches: np.ndarray) -> np.ndarray:
    """Return where batches begin according to the sidecar."""
    anchors = np.empty(len(batches), INDEX_TYPE)
    anchors["offset"], anchors["position"] = batches["first"], batches["start"]
    return anchors
