"""The objects that all routes of a process share. Destinations are created with them."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.buffer import Buffer
from penstock.io.fs import Fs
from penstock.metrics import Metrics
from penstock.queues.engine import Queues
from penstock.topics.store import TopicStore

T = TypeVar("T")

NO_TOPICS = (
    "this broker serves queues only (topics.enabled: false);"
    " a route from or to a topic runs on the broker that has the topics"
)


class Clock:
    """The clock of export: one object, so that tests can simulate an hour's outage in a second.

    Delays are measured on the monotonic clock. Enqueue times must survive a restart, so they are
    wall time: it is read once at the start and continued by the monotonic clock (`steady`). A wall
    clock that jumps later changes no age.
    """

    def __init__(self) -> None:
        self._wall_at_zero = self.wall() - self.monotonic()

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def steady(self) -> float:
        """Return wall time that never jumps: that of the start, plus the time since then."""
        return self._wall_at_zero + self.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, call)

    async def wait(self, event: asyncio.Event, timeout: float | None) -> bool:
        """Return whether the event was set within `timeout` seconds; None waits without a limit."""
        if event.is_set() or timeout is None:
            await event.wait()
            return True
        sleep = asyncio.ensure_future(self.sleep(timeout))
        wait = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((sleep, wait), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            wait.cancel()
        return event.is_set()


@dataclass(slots=True, kw_only=True)
class RouteContext:
    fs: Fs
    pool: Executor
    clock: Clock
    limit: asyncio.Semaphore  # sends in flight, of all routes
    metrics: Metrics
    topics: TopicStore | None = None
    queues: Queues | None = None
    buffer: Buffer | None = None  # in front of the queues: a route pushes through it

    async def in_pool(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.pool, call, *arguments)
