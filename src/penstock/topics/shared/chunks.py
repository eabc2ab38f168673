"""The record batches of shared logs: cached in memory, and in object storage.

Rows of the database name the objects. Their names contain their offsets, so that brokers can read
them while the database is down:

    shared/INCARNATION/PARTITION/LAST-BASE-ID[.compact]

LAST and BASE are offsets of 20 digits. Objects never change. An object that was replaced, or that a
killed mover left behind, has the same records, and also those that compaction has removed since.
"""

import re
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from penstock.errors import Unavailable
from penstock.io.tasks import in_pool
from penstock.object_store import ObjectStore
from penstock.protocol.ids import uuid7
from penstock.protocol.kafka_batch import assigned, checked

T = TypeVar("T")
Row = Any  # asyncpg.Record, whose columns are read by name

READERS = 8  # concurrent reads from object storage
CANDIDATES = 50  # objects with an offset or behind it that are listed
COMPACTED = ".compact"  # how the names of compacted objects end
_OFFSETS = re.compile(r"(\d{20})-(\d{20})-")


class Chunk(NamedTuple):
    """The batches of one row of the database, or of one object.

    Between `start` and `base` there are no records (compaction, a failover).
    """

    start: int  # the offset after the chunk before
    base: int
    end: int  # the offset after its last
    data: bytes


class ChunkCache:
    """Chunks of many logs by offset: at most `limit` bytes, and the least recently used go first.

    The chunks of a deleted log go because nobody uses them.
    """

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


def new_name(directory: str, base: int, end: int, *, compacted: bool = False) -> str:
    return f"{directory}{end - 1:020}-{base:020}-{uuid7().hex}{COMPACTED if compacted else ''}"


class SharedObjects:
    """The object store, if there is one. Its calls block and run in threads."""

    def __init__(self, store: ObjectStore | None) -> None:
        self.store = store
        self._threads = ThreadPoolExecutor(READERS, "shared-read")

    async def run(self, call: Callable[..., T], *args: object) -> T:
        return await in_pool(self._threads, call, *args)

    async def read(self, name: str, position: int, size: int) -> bytes:
        if self.store is None:
            raise Unavailable(f"{name} is in object storage, and this broker has no topics.tier")
        return await self.run(self.store.read_range, name, position, size)

    async def write(self, name: str, parts: Sequence[bytes]) -> None:
        def write(store: ObjectStore) -> None:
            store.write(name, parts)
            store.sync([name])

        assert self.store is not None
        await self.run(write, self.store)

    async def find(self, directory: str, offset: int) -> Chunk | None:
        """Return the object of a log that has this offset, or the first one behind it."""
        if self.store is None:
            return None
        after = f"{directory}{offset:020}"
        listed = await self.run(self.store.list_first, directory, after, CANDIDATES)
        candidates = []
        for name, size, _ in listed:
            if match := _OFFSETS.match(name.removeprefix(directory)):
                last, base = map(int, match.groups())
                candidates.append((max(base, offset), base, last + 1, name, size))
        if not candidates:
            return None
        _, base, end, name, size = min(candidates)
        data = checked(await self.read(name, 0, size), base, end)
        return Chunk(min(offset, base), base, end, data)

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


async def read_row(row: Row, read: Callable[[str, int, int], Awaitable[bytes]]) -> bytes:
    """Return the batches that a row has, or that it refers to in an object. Raises `Damaged`."""
    base, end = row["base_offset"], row["last_offset"] + 1
    if row["object"] is None:
        return checked(assigned(row["data"], base, row["timeline"]), base, end)
    return checked(await read(row["object"], row["position"], row["size"]), base, end)
