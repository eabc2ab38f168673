"""Walk the batches of a data file header by header, and find the next one after damage."""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple, Protocol

import numpy as np

from penstock.log.segment import StoredBatch
from penstock.protocol.kafka_batch import HEAD_SIZE, MAGIC, MIN_LENGTH, BatchHead, Bytes, is_whole

CHUNK_BYTES = 1 << 20
MAX_SEARCH_BYTES = 64 << 20  # searched for the next batch after damage
_SHAPE = Struct(">qi4xb6xi")  # base offset, length, magic, last offset delta


class Readable(Protocol):
    def read_at(self, position: int, length: int) -> bytes: ...


class Located(NamedTuple):
    """A batch and its position."""

    position: int
    head: BatchHead
    data: bytes | memoryview  # the whole batch

    @property
    def end(self) -> int:
        return self.position + self.head.size

    def stored(self) -> StoredBatch:
        head = self.head
        time = max(0, head.max_timestamp) * 1000
        return StoredBatch(head.base_offset, head.next_offset, head.records, head.size, time)


def shape_at(data: Bytes, at: int) -> tuple[int, int, int] | None:
    """Return the base offset, the end offset and the size of the batch at this position; None if
    the bytes are not a header.
    """
    if len(data) - at < HEAD_SIZE:
        return None
    offset, length, magic, last = _SHAPE.unpack_from(data, at)
    if magic != MAGIC or length < MIN_LENGTH or offset < 0 or last < 0:
        return None
    return offset, offset + last + 1, length + 12


def whole_batches(
    file: Readable, start: int, size: int, offset: int, *, limit: int | None = None
) -> Iterator[Located]:
    """Yield adjacent intact batches from `start` on. Their offsets are consecutive; with `limit`,
    there may be gaps, and all offsets are below it.
    """
    at, wanted = start, CHUNK_BYTES
    while at < size:
        buffer = memoryview(file.read_at(at, min(wanted, size - at)))
        inside, before, wanted = 0, wanted, CHUNK_BYTES
        while (shape := shape_at(buffer, inside)) is not None:
            if not _follows(shape, offset, limit):
                return
            end = inside + shape[2]
            if end > len(buffer):
                wanted = max(wanted, shape[2])
                break
            if not is_whole(buffer, inside):
                return
            yield Located(at + inside, BatchHead.parse(buffer, inside), buffer[inside:end])
            offset, inside = shape[1], end
        at += inside
        if not inside and wanted <= before:
            return  # not a batch, or the file ends within it


def _follows(shape: tuple[int, int, int], offset: int, limit: int | None) -> bool:
    return shape[0] == offset if limit is None else offset <= shape[0] and shape[1] <= limit


def next_whole(
    file: Readable, start: int, size: int, offset: int, limit: int | None
) -> Located | None:
    """Return the first intact batch after damage at `start`. Try the end given by the damaged
    header first, then search the bytes. The batch's base offset is at least `offset`.
    """
    shape = shape_at(file.read_at(start, min(HEAD_SIZE, size - start)), 0)
    highest = limit if limit is not None else offset + (size - start)
    if shape is not None and start + shape[2] < size:
        for intact in whole_batches(file, start + shape[2], size, offset, limit=highest):
            return intact
    buffer = file.read_at(start + 1, min(MAX_SEARCH_BYTES, size - start - 1))
    for inside in _candidates(buffer, offset, highest):
        if is_whole(buffer, inside):
            head = BatchHead.parse(buffer, inside)
            return Located(start + 1 + inside, head, buffer[inside : inside + head.size])
    return None


def _candidates(buffer: bytes, low: int, high: int) -> list[int]:
    """Return where in `buffer` a batch with a base offset in [low, high) may begin."""
    marks = np.frombuffer(buffer, np.uint8)[16:] == MAGIC
    positions = np.flatnonzero(marks)
    positions = positions[positions <= len(buffer) - HEAD_SIZE]
    if not len(positions):
        return []
    offsets = np.ndarray(len(buffer) - 7, ">i8", buffer, 0, (1,))[positions]
    plausible: list[int] = positions[(offsets >= low) & (offsets < high)].tolist()
    return plausible
