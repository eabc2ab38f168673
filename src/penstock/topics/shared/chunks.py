"""What a broker keeps of shared logs in memory: record batches, and where others are stored.

A chunk is what one row of the database stands for, a place is such a row without its batches. Both
cover the offsets from `start` on: between `start` and `base` there are none (compaction, a
failover). A cache has at most so many bytes; what was not used for longest goes first. A log that
was deleted goes by itself, by not being used.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from penstock.protocol.kafka_batch import HEAD_SIZE, BatchHead


class Chunk(NamedTuple):
    start: int  # the offset after the chunk before
    base: int
    end: int  # the offset after its last
    data: bytes

    @property
    def memory(self) -> int:
        return len(self.data)

    def heads(self) -> Iterator[tuple[int, BatchHead]]:
        """Return the position and the head of each of its batches."""
        return batches_in(self.data)


class Place(NamedTuple):
    """A range of an object: where a chunk is stored."""

    start: int
    base: int
    end: int
    object: str
    position: int
    size: int

    @property
    def memory(self) -> int:
        """Return about how many bytes the tuple and its entries in the cache take."""
        return 600


Kept = TypeVar("Kept", Chunk, Place)


def batches_in(data: bytes) -> Iterator[tuple[int, BatchHead]]:
    """Yield the position and the head of each batch."""
    at = 0
    while at + HEAD_SIZE <= len(data):
        head = BatchHead.parse(data, at)
        yield at, head
        at += head.size


class OffsetCache(Generic[Kept]):
    """Chunks, or places, of many logs by offset."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # bytes
        self.size = 0
        self._chunks: OrderedDict[tuple[int, int], Kept] = OrderedDict()  # by log and start, by use
        self._starts: dict[int, list[int]] = {}  # of the chunks of each log, ascending

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, log_id: int, offset: int) -> Kept | None:
        """Return the chunk that covers this offset."""
        starts = self._starts.get(log_id)
        place = bisect_right(starts, offset) if starts else 0
        if not starts or not place:
            return None
        key = (log_id, starts[place - 1])
        chunk = self._chunks[key]
        if offset >= chunk.end:
            return None
        self._chunks.move_to_end(key)
        return chunk

    def put(self, log_id: int, chunk: Kept) -> None:
        starts = self._starts.setdefault(log_id, [])
        first, stop = bisect_left(starts, chunk.start), bisect_left(starts, chunk.end)
        for start in starts[first:stop]:
            self.size -= self._chunks.pop((log_id, start)).memory  # the mover merged it
        starts[first:stop] = [chunk.start]
        self._chunks[log_id, chunk.start] = chunk
        self.size += chunk.memory
        while self.size > self._limit and len(self._chunks) > 1:
            (oldest, start), gone = self._chunks.popitem(last=False)
            self.size -= gone.memory
            self._forget(oldest, start)

    def _forget(self, log_id: int, start: int) -> None:
        starts = self._starts[log_id]
        del starts[bisect_right(starts, start) - 1]
        if not starts:
            del self._starts[log_id]

    def clear(self) -> None:
        self._chunks.clear()
        self._starts.clear()
        self.size = 0
