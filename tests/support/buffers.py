"""A buffer in a test: over an engine in memory for its own logic, or over a real PostgreSQL for the promises."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.buffer import Buffer
from penstock.config.schema import Buffer as Settings
from penstock.errors import InvalidRequest, Unavailable
from penstock.metrics import Metrics
from penstock.queues.types import Item, Pushed
from penstock.storage.fs import DISK, Fs


class Store:
    """A database in memory with the two things the buffer relies on: it is up or down, and it de-duplicates."""

    def __init__(self, healthy: bool = True) -> None:
        self.healthy = healthy
        self.stored: dict[tuple[str, str], list[Item]] = {}
        self._ids: set[tuple[str, str, str]] = set()
        self.calls: list[int] = []
        self.settings: dict[str, str] = {}
        self.poison: Callable[[Item], bool] = lambda item: False
        self.full: Callable[[Item], bool] = lambda item: False
        self.before: Callable[[list[Item]], Awaitable[None]] | None = None  # runs inside a push
        self.lost_answers = 0  # so many pushes are stored and then answered "unavailable"
        self._callbacks: list[Callable[[bool], None]] = []
        self._listeners: list[Callable[[str | None], None]] = []

    def on_change(self, callback: Callable[[bool], None]) -> None:
        self._callbacks.append(callback)

    async def listen(self, channel: str, callback: Callable[[str | None], None]) -> None:
        self._listeners.append(callback)
        if self.healthy:
            callback(None)

    async def fetch(self, sql: str, *args: Any) -> list[tuple[str]]:
        if not self.healthy:
            raise Unavailable("the database is down")
        if "INSERT" in sql:
            self.settings[args[0]] = args[1]
            for listener in self._listeners:
                listener(args[0])
            return []
        return [(self.settings[args[0]],)] if args[0] in self.settings else []

    def go(self, healthy: bool) -> None:
        if healthy != self.healthy:
            self.healthy = healthy
            for callback in list(self._callbacks):
                callback(healthy)

    async def push(self, items: list[Item]) -> list[Pushed]:
        await asyncio.sleep(0)
        if self.before:
            await self.before(items)
        if not self.healthy:
            raise Unavailable("the database is down")
        if any(map(self.poison, items)):
            raise InvalidRequest("the database refused the data of this request")
        self.calls.append(len(items))
        results = [self._store(item) for item in items]
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unavailable("a database connection was lost", retry_after=0.1)
        return results

    def _store(self, item: Item) -> Pushed:
        assert item.transaction_id
        key = (item.queue, item.partition, item.transaction_id)
        status = "full" if self.full(item) else "duplicate" if key in self._ids else "queued"
        if status == "queued":
            self._ids.add(key)
            self.stored.setdefault(key[:2], []).append(item)
        return Pushed(status, item.queue, item.partition, item.transaction_id, "id", "partition")

    def payloads(self, queue: str = "q", partition: str = "Default") -> list[bytes]:
        return [item.payload for item in self.stored.get((queue, partition), [])]


@asynccontextmanager
async def buffering(
    directory: Path, store: Any, *, fs: Fs = DISK, engine: Any = None, metrics: Metrics | None = None, **settings: Any
) -> AsyncIterator[Buffer]:
    """A started buffer, stopped at the end."""
    settings = {"free_space_reserve": 0, "flush_ms": 10, **settings}
    with ThreadPoolExecutor(2) as pool:
        buffer = Buffer(engine or store, store, Settings(**settings), directory, fs, pool, metrics or Metrics())
        await buffer.start()
        try:
            yield buffer
        finally:
            await buffer.stop()


def items(*payloads: object, queue: str = "q", partition: str = "Default") -> list[Item]:
    return [Item(queue, str(payload).encode(), partition) for payload in payloads]


def names(directory: Path) -> list[str]:
    """The buffer files in the directory, without locks and the like."""
    return sorted(path.name for path in directory.iterdir() if ".buf" in path.name) if directory.exists() else []


async def kill(buffer: Buffer) -> None:
    """What kill -9 does to a buffer in our own process: its work ends where it is, the kernel drops its locks."""
    tasks = [buffer._worker, buffer._scan, buffer.journal._writing, buffer.qos0._task, buffer.maintenance._reading]
    running = [task for task in tasks if task]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    await asyncio.get_running_loop().run_in_executor(None, buffer._pool.shutdown)
    for batch in buffer.qos0.batches:
        for timer in (batch.timer, batch.unsynced):
            if timer:
                timer.cancel()
    for ownership in buffer._estate._owned.values():
        ownership.release(remove=False)


async def killable(directory: Path, store: Any, fs: Fs, **settings: Any) -> Buffer:
    """A started buffer that the test ends by `kill`."""
    settings = {"free_space_reserve": 0, "flush_ms": 5, **settings}
    buffer = Buffer(store, store, Settings(**settings), directory, fs, ThreadPoolExecutor(2), Metrics())
    await buffer.start()
    return buffer
