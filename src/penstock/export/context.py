"""The objects that all routes of a process share. Destinations are created with them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.buffer import Buffer
from penstock.export.clock import Clock
from penstock.io.fs import Fs
from penstock.metrics import Metrics
from penstock.queues.engine import Queues
from penstock.topics.store import TopicStore

T = TypeVar("T")

NO_TOPICS = (
    "this broker serves queues only (topics.enabled: false);"
    " a route from or to a topic runs on the broker that has the topics"
)


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
