"""The record batches of shared logs that a broker has in memory.

A chunk has the batches of one row of the database, or of one object. It covers the offsets from
`start` on: between `start` and `base` there are none (compaction, a failover). A cache has at most
so many bytes and drops the least recently used chunk first. The chunks of a deleted log are dropped
because nobody uses them.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import NamedTuple


class Chunk(NamedTuple):
    start: int  # the offset after the chunk before
    base: int
    end: int  # the offset after its last
    data: bytes


class ChunkCache:
    """Chunks of many logs by offset."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # bytes
        self.size = 0
        # By log and start, the least recently used first.
        self._chunks: OrderedDict[tuple[int, int], Chunk] = OrderedDict()
        self._starts: dict[int, list[int]] = {}  # of the chunks of each log, ascending

    def get(self, log_id: int, offset: int) -> Chunk | None:
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

    def put(self, log_id: int, chunk: Chunk) -> None:
        starts = self._starts.setdefault(log_id, [])
        first, stop = bisect_left(starts, chunk.start), bisect_left(starts, chunk.end)
        for start in starts[first:stop]:
            self.size -= len(self._chunks.pop((log_id, start)).data)  # the mover merged it
        starts[first:stop] = [chunk.start]
        self._chunks[log_id, chunk.start] = chunk
        self.size += len(chunk.data)
        while self.size > self._limit and len(self._chunks) > 1:
            (oldest, start), gone = self._chunks.popitem(last=False)
            self.size -= len(gone.data)
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
