"""A buffer in a test: over an engine in memory for its own logic, or over a real PostgreSQL for the
promises.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from penstock.buffer import Buffer
from penstock.config.schema import BufferSettings as Settings
from penstock.config.schema import DatabaseSettings as DatabaseSettings
from penstock.config.schema import QueuesSettings as QueueSettings
from penstock.database import Database
from penstock.database.embedded import EmbeddedPostgres
from penstock.errors import InvalidRequest, PenstockError, Unavailable
from penstock.io.fs import DISK, Fs
from penstock.metrics import Metrics
from penstock.queues.engine import Queues
from penstock.queues.push import name_items
from penstock.queues.schema import SCHEMA
from penstock.queues.types import Item, ItemOutcome, PopRequest, Status
from tests.support import guard
from tests.support.wait import DATABASE_TIMEOUT, eventually


class Store:
    """A database in memory with the two things the buffer relies on: it is up or down, and it
    de-duplicates.
    """

    def __init__(self, healthy: bool = True) -> None:
        self.healthy = healthy
        self.stored: dict[tuple[str, str], list[Item]] = {}
        self._ids: set[tuple[str, str, str]] = set()
        self.calls: list[int] = []
        self.settings: dict[str, str] = {}
        self.poison: Callable[[Item], bool] = lambda item: False
        self.full: Callable[[Item], bool] = lambda item: False
        self.before: Callable[[list[Item]], Awaitable[None]] | None = None  # runs inside a push
        self.closed: list[bool] = []  # what pops were switched to
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

    async def push(self, items: list[Item]) -> list[ItemOutcome]:
        name_items(items, ())
        return await self.append(items)

    @property
    def catalog(self) -> Any:
        return SimpleNamespace(partitions=())

    async def append(self, items: list[Item]) -> list[ItemOutcome]:
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

    def pause_pops(self, paused: bool) -> None:
        self.closed.append(paused)

    async def load_and_check_keys(self, items: list[Item]) -> None:
        pass

    def check_keys(self, items: list[Item]) -> None:
        pass

    def at_rest(self, item: Item) -> Item:
        return item

    def decrypted(self, items: list[Item]) -> list[Item]:
        return items

    def _store(self, item: Item) -> ItemOutcome:
        assert item.transaction_id
        key = (item.queue, item.partition, item.transaction_id)
        known = (
            key in self._ids and not item.fresh
        )  # the engine does not look for an id that was just made
        status: Status = "full" if self.full(item) else "duplicate" if known else "queued"
        if status == "queued":
            self._ids.add(key)
            self.stored.setdefault(key[:2], []).append(item)
        return ItemOutcome(
            0, status, "id", item.transaction_id, "partition", item.trace_id, item.queue
        )

    def payloads(self, queue: str = "q", partition: str = "Default") -> list[bytes]:
        return [item.payload for item in self.stored.get((queue, partition), [])]


@asynccontextmanager
async def buffering(
    directory: Path,
    store: Any,
    *,
    fs: Fs = DISK,
    engine: Any = None,
    metrics: Metrics | None = None,
    **settings: Any,
) -> AsyncIterator[Buffer]:
    """A started buffer, stopped at the end."""
    settings = {"free_space_reserve": 0, "flush_interval": 0.01, **settings}
    with ThreadPoolExecutor(2) as pool:
        buffer = Buffer(
            engine or store, store, Settings(**settings), directory, fs, pool, metrics or Metrics()
        )
        await buffer.start()
        try:
            yield buffer
        finally:
            await buffer.stop()


@asynccontextmanager
async def over_store(
    directory: Path, *, healthy: bool = True, **settings: Any
) -> AsyncIterator[tuple[Store, Buffer]]:
    """A database in memory, and a started buffer over it."""
    store = Store(healthy)
    async with buffering(directory, store, **settings) as buffer:
        yield store, buffer


async def replayed(buffer: Buffer, database: Database | None = None) -> None:
    """Wait until the database has everything, and new pushes go straight to it."""
    await eventually(
        lambda: (
            (database is None or database.healthy)
            and buffer.status.pending == 0
            and not buffer.backlog.held_partitions
        )
    )


def items(*payloads: object, queue: str = "q", partition: str = "Default") -> list[Item]:
    return [Item(queue, str(payload).encode(), partition) for payload in payloads]


def names(directory: Path) -> list[str]:
    """The buffer files in the directory, without locks and the like."""
    return (
        sorted(path.name for path in directory.iterdir() if ".buf" in path.name)
        if directory.exists()
        else []
    )


async def kill(buffer: Buffer) -> None:
    """What kill -9 does to a buffer in our own process: its work ends where it is, the kernel drops
    its locks. Nothing public stops a buffer without writing, so this reads its private parts.
    """
    for batch in buffer.qos0.batches:
        for timer in (batch.timer, batch.unsynced):
            if timer:
                timer.cancel()
    tasks = [
        buffer._worker,
        buffer._scan,
        buffer.journal._writing,
        buffer.qos0._task,
        buffer.maintenance._reading,
    ]
    running = [task for task in tasks if task]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    await asyncio.get_running_loop().run_in_executor(None, buffer._storage.pool.shutdown)
    for lock in buffer._ownership._locks.values():
        lock.release(remove=False)


async def killable(directory: Path, store: Any, fs: Fs, **settings: Any) -> Buffer:
    """A started buffer that the test ends by `kill`."""
    settings = {"free_space_reserve": 0, "flush_interval": 0.005, **settings}
    buffer = Buffer(
        store, store, Settings(**settings), directory, fs, ThreadPoolExecutor(2), Metrics()
    )
    await buffer.start()
    return buffer


@asynccontextmanager
async def real(
    url: str,
    directory: Path,
    *,
    acquire_timeout: float = DATABASE_TIMEOUT,
    key: str = "",
    **settings: Any,
) -> AsyncIterator[tuple[Buffer, Queues]]:
    """A started buffer over the real engine on a real PostgreSQL, and that engine."""
    settings = {"free_space_reserve": 0, **settings}
    metrics = Metrics()
    with ThreadPoolExecutor(2) as pool:
        database = Database(
            DatabaseSettings(url=url, acquire_timeout=acquire_timeout), directory, metrics, SCHEMA
        )
        queues = Queues(database, QueueSettings(encryption_key=key), metrics)
        buffer = Buffer(
            queues, database, Settings(**settings), directory / "buffers", DISK, pool, metrics
        )
        async with AsyncExitStack() as running:
            for part in (database, queues, buffer):
                await part.start()
                running.push_async_callback(part.stop)
            yield buffer, queues


async def delivered(queues: Any, queue: str, group: str = "checker") -> dict[str, list[bytes]]:
    """What a new group gets from the queue's beginning, by partition, in the order of delivery."""
    collected: dict[str, list[bytes]] = {}
    while True:
        popped = await queues.pop(
            PopRequest(
                queue=queue,
                group=group,
                batch=5000,
                partitions=100,
                auto_ack=True,
                subscription_mode="all",
            )
        )
        if not popped.messages:
            return collected
        for message in popped.messages:
            collected.setdefault(message.partition, []).append(message.payload)


class Producers:
    """Closed-loop producers, one partition each, that number their events and remember what they
    were told.
    """

    def __init__(
        self, push: Callable[..., Awaitable[Any]], count: int = 6, queue: str = "orders"
    ) -> None:
        self._push, self.queue = push, queue
        self.accepted: list[list[int]] = [[] for _ in range(count)]
        self.latencies: list[tuple[float, float]] = []  # when it was answered, how long it took
        self.statuses: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self._stop = False
        self._tasks = [asyncio.create_task(self._produce(number)) for number in range(count)]

    async def _produce(self, number: int) -> None:
        sequence = 0
        while not self._stop:
            began = time.monotonic()
            try:
                [result] = await self._push([Item(self.queue, b"%d" % sequence, f"p{number}")])
            except PenstockError as error:
                self.errors.append(error)
            else:
                self.accepted[number].append(sequence)
                self.statuses[result.status] += 1
            self.latencies.append((time.monotonic(), time.monotonic() - began))
            sequence += 1

    @property
    def total(self) -> int:
        return sum(map(len, self.accepted))

    async def more(self, events: int, timeout: float = 60.0) -> None:
        """Wait until so many more were accepted."""
        target = self.total + events
        await eventually(lambda: self.total >= target, timeout)

    async def finish(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    def worst(self, start: float, end: float, share: float = 0.99) -> float:
        """The latency that `share` of the pushes answered between the two moments did not exceed."""
        latencies = sorted(took for at, took in self.latencies if start < at - took and at < end)
        assert len(latencies) > 100, f"only {len(latencies)} pushes in that time"
        return latencies[int(share * len(latencies))]

    def check(self, got: dict[str, list[bytes]]) -> None:
        """Everything accepted was delivered, once, in order, and nothing else."""
        for number, accepted in enumerate(self.accepted):
            assert [int(payload) for payload in got.get(f"p{number}", [])] == accepted, (
                f"partition p{number}"
            )


def freeze(server: EmbeddedPostgres) -> list[int]:
    """Stop every process of the server without closing anything (SIGSTOP)."""
    frozen: list[int] = []
    while True:  # until a look finds no process that still runs
        fresh = [one.pid for one in _processes_of(server) if one.pid not in frozen]
        if not fresh:
            return frozen
        _signal(fresh, signal.SIGSTOP)
        frozen += fresh


def thaw(pids: list[int]) -> None:
    _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to processes of which some may have ended. The postmaster, which comes first,
    reaps the children that ended while it was stopped.
    """
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def crash(server: EmbeddedPostgres) -> None:
    """kill -9 of the whole server."""
    processes = _processes_of(server)
    guard.kill_each(processes)
    psutil.wait_procs(processes[:1], timeout=10)


def _processes_of(server: EmbeddedPostgres) -> list[psutil.Process]:
    pid = server.pid()
    assert pid is not None, "the server does not run"  # psutil takes None for this process
    postmaster = psutil.Process(pid)
    return [postmaster, *postmaster.children(recursive=True)]
