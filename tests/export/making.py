"""Queues and routes in a test."""

import asyncio
import heapq
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from penstock.config import Config
from penstock.export.context import Clock
from penstock.export.manager import Exports
from penstock.export.payload import decompress
from penstock.export.sendqueue import SendQueue
from penstock.export.sendqueue.blocks import Block
from penstock.export.sendqueue.chunks import ChunkOptions
from penstock.export.sendqueue.fastqueue import FastQueue
from penstock.io.fs import DISK, Fs
from penstock.metrics import Metrics

POOL = ThreadPoolExecutor(2)


def status_of(one: Any) -> Any:
    """Of a route or a queue, as the API shows it."""
    return to_builtins(one.status())


class FakeClock(Clock):
    """Time that moves only when the test says so."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now, self.offset = 1000.0, now
        self.sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0
        super().__init__()

    def wall(self) -> float:
        return self.offset + self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self.sleepers, (self.now + seconds, self._count, future))
        await future

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        asyncio.ensure_future(self.sleep(seconds)).add_done_callback(lambda _: call())

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass, waking sleepers in order and letting what they start run."""
        for _ in range(5):
            await asyncio.sleep(0)
        until = self.now + seconds
        while self.sleepers and self.sleepers[0][0] <= until:
            when, _, future = heapq.heappop(self.sleepers)
            if future.done():
                continue
            self.now = max(self.now, when)
            future.set_result(None)
            for _ in range(5):
                await asyncio.sleep(0)
        self.now = until
        for _ in range(5):
            await asyncio.sleep(0)


def block(number: int, records: int = 1, size: int = 100) -> Block:
    return Block(b"%08d" % number * (size // 8), records)


def number_of(block: Block) -> int:
    return int(decompress(block.body, block.compression)[:8])


async def opened(
    directory: Path | None, *, fs: Fs = DISK, clock: Clock | None = None, **options: Any
) -> FastQueue:
    queue = FastQueue(fs, directory, ChunkOptions(**options), POOL, clock)
    await queue.open()
    return queue


async def taken(queue: Any, most: int = sys.maxsize) -> list[int]:
    """Take and ack everything, or so many; the numbers in the order they came."""
    collected: list[int] = []
    while len(collected) < most and (each := await queue.take()) is not None:
        collected.append(number_of(each))
        queue.ack(each)
    return collected


def balanced(queue: FastQueue) -> bool:
    """The books, against what can be counted: every record is somewhere exactly once."""
    state = queue.books
    return (
        state.accepted == state.delivered + state.dead + sum(state.dropped) + state.queued
        and state.queued >= 0
    )


@asynccontextmanager
async def exports(
    directory: Path, routes: dict[str, Any], *, clock: Clock | None = None, **more: Any
) -> AsyncIterator[Exports]:
    """Running routes; queue settings of a route under `queue`."""
    made = Exports(
        Config(
            data_directory=directory,
            routes=routes,
            shutdown_timeout=more.pop("shutdown_timeout", 2.0),
        ),
        pool=POOL,
        metrics=more.pop("metrics", None) or Metrics(),
        clock=clock,
        **more,
    )
    await made.start()
    assert not made.failed, made.failed
    try:
        yield made
    finally:
        await made.stop()


def http_route(
    url: str,
    *,
    batch: dict[str, Any] | None = None,
    target: dict[str, Any] | None = None,
    **queue: Any,
) -> dict[str, Any]:
    return {
        "destination": {"type": "http", "url": url, "timeout": "5s", **(target or {})},
        "batch": batch or {"records": 10},
        "queue": {
            "workers": 1,
            "retry_interval": "10ms",
            "max_retry_delay": "50ms",
            "meta_sync_interval": "20ms",
        }
        | queue,
    }


async def kill_queue(queue: SendQueue) -> None:
    """As `kill`, of a send queue alone. Nothing public stops a queue without writing, so both read
    private parts.
    """
    queue._ticker.cancel()
    await queue._fast._writer.wait_until_idle()
    meeting = threading.Barrier(2)
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(loop.run_in_executor(POOL, meeting.wait) for _ in range(2)))
    queue._fast.abandon()


async def kill(exports_: Exports) -> None:
    """What kill -9 leaves: nothing is written any more, the locks go. (What the pool is doing is
    done first.)
    """
    for route in exports_._routes.values():
        tasks = [*route.workers._tasks.values(), *route.workers._helpers, route._reader]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await kill_queue(route.queue)
    exports_._routes.clear()
