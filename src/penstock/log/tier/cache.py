"""A cache of blocks of the tier's files, with a limit in bytes and least-recently-used eviction.

A file in the tier is read in whole blocks, each checked against its checksum. A read in a thread
waits for missing blocks. A read on the event loop fails with `NotCached` instead, and is repeated
in a thread (`Topic.read_or_wait`). Sequential reads are detected and read ahead, the further the
longer they last.

The blocks are on the local disk, or in memory for a short-lived reader. The cache is emptied when
it is opened, so no file on disk must be trusted, and nothing is synced.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Protocol

from penstock.errors import NotFound, StorageFailed, StorageFull, Unavailable
from penstock.io.fs import Fs
from penstock.io.tasks import P, T, in_pool
from penstock.log.tier.manifest import StoredObject
from penstock.metrics import Metrics
from penstock.object_store import ObjectStore

log = logging.getLogger("penstock.topics.tier")

READERS = 8  # concurrent reads that wait for the store
LOADERS = 12  # concurrent transfers of blocks
MAX_BLOCKS_AHEAD = 8
STREAMS_REMEMBERED = 256


Key = tuple[str, int]  # object, number of the block


class Blocks(Protocol):
    """A store of blocks. Several threads use it, but only one at a time for each key."""

    def clear(self) -> None: ...

    def put(self, key: Key, data: bytes) -> None: ...

    def get(self, key: Key, start: int, stop: int) -> bytes | None:
        """Return a part of a block; None if the block is missing."""

    def remove(self, key: Key) -> None: ...


class BlocksInMemory:
    def __init__(self) -> None:
        self._blocks: dict[Key, bytes] = {}

    def clear(self) -> None:
        self._blocks.clear()

    def put(self, key: Key, data: bytes) -> None:
        self._blocks[key] = data

    def get(self, key: Key, start: int, stop: int) -> bytes | None:
        block = self._blocks.get(key)
        return None if block is None else block[start:stop]

    def remove(self, key: Key) -> None:
        self._blocks.pop(key, None)


class BlocksOnDisk:
    """Blocks in a file each. The files have no meaning after the process ends."""

    def __init__(self, directory: Path, fs: Fs) -> None:
        self._directory = directory
        self._fs = fs

    def _path(self, key: Key) -> Path:
        return self._directory / f"{key[0].replace('/', '-')}-{key[1]}"

    def clear(self) -> None:
        """Remove all files one by one. The directory cannot be removed as a whole while an earlier
        read-ahead still writes to it.
        """
        self._fs.make_dir(self._directory)
        for name in self._fs.list_dir(self._directory):
            self._fs.remove(self._directory / name)

    def put(self, key: Key, data: bytes) -> None:
        self._fs.replace(self._path(key), data, sync=False)

    def get(self, key: Key, start: int, stop: int) -> bytes | None:
        try:
            with closing(self._fs.open(self._path(key), write=False)) as file:
                return file.read_at(start, stop - start)
        except FileNotFoundError:
            return None

    def remove(self, key: Key) -> None:
        self._fs.remove(self._path(key))


class NotCached(Unavailable):
    """The data is in the tier and not in the cache, and the event loop must not wait for it."""

    def __init__(self) -> None:
        super().__init__("this part of the topic is being read from the tier")


class BlockCache:
    def __init__(self, store: ObjectStore, blocks: Blocks, limit: int, metrics: Metrics) -> None:
        self.store = store
        self._blocks = blocks
        self._limit = limit  # bytes
        self._readers = ThreadPoolExecutor(READERS, "tier-read")
        self._loaders = ThreadPoolExecutor(LOADERS, "tier-load")
        self._lock = threading.Lock()  # guards the next four attributes
        self._sizes: OrderedDict[Key, int] = OrderedDict()  # of cached blocks, by last use
        self._total = 0
        self._loading: dict[Key, Future[bytes]] = {}
        # The next block of each sequential reader, and how many blocks are read ahead for it.
        self._streams: OrderedDict[Key, int] = OrderedDict()
        counter = metrics.counter
        self._hits = counter(
            "penstock_topic_tier_cache_hits_total", "Blocks of the tier read from the local cache"
        )
        self._misses = counter(
            "penstock_topic_tier_cache_misses_total",
            "Blocks that a reader had to wait for because the local cache did not have them",
        )
        self._read_bytes = counter(
            "penstock_topic_tier_read_bytes_total", "Bytes read from the tier"
        )
        metrics.gauge(
            "penstock_topic_tier_cache_bytes",
            "Bytes in the local cache of the tier",
            read=lambda: self._total,
        )

    def open(self) -> None:
        """Empty the cache. Blocks the caller."""
        self._blocks.clear()

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._loaders.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `read` in a thread, which may wait for the store."""
        return await in_pool(self._readers, read, *args, **kwargs)

    def read(self, stored: StoredObject, position: int, length: int) -> bytes:
        """Return up to `length` bytes from `position`; fewer only at the end of the file."""
        end = min(position + length, stored.file.size)
        if position >= end:
            return b""
        size = stored.block_bytes
        numbers = range(position // size, (end - 1) // size + 1)
        spans = {
            number: (max(0, position - number * size), min(size, end - number * size))
            for number in numbers
        }
        parts = {number: self._cached(stored, number, *spans[number]) for number in numbers}
        missing = [number for number, part in parts.items() if part is None]
        if missing and _on_event_loop():
            raise NotCached
        self._hits.add(len(parts) - len(missing))
        self._misses.add(len(missing))
        coming = {number: self._load(stored, number) for number in missing}
        self._read_ahead(stored, numbers)
        for number, future in coming.items():
            start, stop = spans[number]
            parts[number] = _result(future)[start:stop]
        return b"".join(part for part in parts.values() if part is not None)

    def warm(self, stored: StoredObject) -> None:
        """Load the first blocks of a file that a sequential reader is about to begin."""
        with self._lock:
            if (stored.name, 0) in self._streams or (stored.name, 0) in self._sizes:
                return
            self._streams[stored.name, 0] = MAX_BLOCKS_AHEAD // 2
        for number in range(min(stored.count, MAX_BLOCKS_AHEAD // 2)):
            self._load(stored, number)

    def _cached(self, stored: StoredObject, number: int, start: int, stop: int) -> bytes | None:
        key = (stored.name, number)
        with self._lock:
            if key not in self._sizes:
                return None
            self._sizes.move_to_end(key)
        return self._blocks.get(key, start, stop)

    def _load(self, stored: StoredObject, number: int) -> "Future[bytes]":
        key = (stored.name, number)
        with self._lock:
            future = self._loading.get(key)
            if future is None:
                future = self._loading[key] = self._loaders.submit(self._fetch, stored, number)
        return future

    def _fetch(self, stored: StoredObject, number: int) -> bytes:
        key = (stored.name, number)
        try:
            data = stored.read_block(self.store, number)
            self._read_bytes.add(len(data))
            self._put(key, data)
            return data
        finally:
            with self._lock:
                self._loading.pop(key, None)

    def _put(self, key: Key, data: bytes) -> None:
        try:
            self._blocks.put(key, data)
        except (StorageFull, StorageFailed) as error:
            log.warning("a block of the tier is not cached: %s", error)
            return
        gone = []
        with self._lock:
            self._total += len(data) - self._sizes.pop(key, 0)
            self._sizes[key] = len(data)
            while self._total > self._limit and len(self._sizes) > 1:
                oldest, size = self._sizes.popitem(last=False)
                self._total -= size
                gone.append(oldest)
        for other in gone:
            self._blocks.remove(other)

    def _read_ahead(self, stored: StoredObject, numbers: range) -> None:
        """Read ahead for a read that begins where one ended, or within its last block."""
        following = numbers[-1] + 1
        with self._lock:
            before = self._streams.pop((stored.name, numbers[0]), None)
            within = self._streams.pop((stored.name, numbers[0] + 1), None)
            if before is None and within is None:
                ahead = len(numbers) - 1
            elif before is None and len(numbers) == 1:
                ahead = within or 0
            else:
                ahead = min(2 * (before or within or 1), MAX_BLOCKS_AHEAD)
            self._streams[stored.name, following] = ahead
            if len(self._streams) > STREAMS_REMEMBERED:
                self._streams.popitem(last=False)
            wanted = [
                number
                for number in range(following, min(following + ahead, stored.count))
                if (stored.name, number) not in self._sizes
            ]
        for number in wanted:
            self._load(stored, number)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _result(future: "Future[bytes]") -> bytes:
    try:
        return future.result()
    except NotFound as error:
        missing = FileNotFoundError(str(error))
        missing.filename = str(error)
        raise missing from error
    except StorageFailed as error:
        raise Unavailable(f"the tier does not answer: {error}") from error
