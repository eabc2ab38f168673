"""Chunks of shared logs in memory: record batches that lie one after another, with their offsets.

A chunk is what one row of the database stands for. It covers the offsets from `start` on: between
`start` and `base` there are none (compaction, a failover). A cache has at most so many bytes; what
was not used for longest goes first. A log that was deleted goes by itself, by not being used.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from penstock.protocol.kafka_batch import HEAD_SIZE, BatchHead


class Chunk(NamedTuple):
    start: int  # the offset after the chunk before
    base: int
    end: int  # the offset after its last
    data: bytes

    def heads(self) -> Iterator[tuple[int, BatchHead]]:
        """Return the position and the head of each of its batches."""
        return batches_in(self.data)


def batches_in(data: bytes) -> Iterator[tuple[int, BatchHead]]:
    """Yield the position and the head of each batch."""
    at = 0
    while at + HEAD_SIZE <= len(data):
        head = BatchHead.parse(data, at)
        yield at, head
        at += head.size


class ChunkCache:
    def __init__(self, limit: int) -> None:
        self._limit = limit  # bytes
        self.size = 0
        self._chunks: OrderedDict[tuple[int, int], Chunk] = (
            OrderedDict()
        )  # by log and start, by use
        self._starts: dict[int, list[int]] = {}  # of the chunks of each log, ascending

    def get(self, log_id: int, offset: int) -> Chunk | None:
        """The chunk that covers this offset."""
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
        for start in starts[bisect_left(starts, chunk.start) : bisect_left(starts, chunk.end)]:
            self.size -= len(self._chunks.pop((log_id, start)).data)  # the mover merged it
            starts.remove(start)
        insort(starts, chunk.start)
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
