"""Create the components of one broker process, and start and stop them in order.

One process, the owner, locks the data directory and owns everything with a single writer: topic
logs, routes and the embedded database. With `workers: N`, it has N - 1 more processes beside it.
They serve the queue API from PostgreSQL and forward every other request to the owner (see
`penstock.wire.listeners`).

Without topics (`topics.enabled: false`) and with an external database, nothing in the data
directory needs that lock: buffer files and routes have locks of their own.

The start order is lock, database and schema, recovery; the listeners follow (see
`penstock.server`). A stop reverses it. If a component fails to start, those before it are stopped
again.
"""

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from penstock import __version__
from penstock.buffer import Buffer
from penstock.config import Config
from penstock.database import Database
from penstock.errors import Conflict
from penstock.export.manager import Exports
from penstock.io.fs import DISK
from penstock.io.lock import DirectoryLock
from penstock.metrics import Metrics, add_process
from penstock.pipeline_registry import Pipelines
from penstock.queues.background.presence import Presence
from penstock.queues.engine import Queues
from penstock.queues.schema import SCHEMA
from penstock.topics.groups import Groups
from penstock.topics.moves import TopicMoves
from penstock.topics.store import TopicStore
from penstock.topics.write_claims import JOURNAL as SINKS

log = logging.getLogger("penstock.broker")


RESTORING = "restoring"  # in the private directory during `penstock restore`


class Part(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Logs:
    """The components that only the owner has: topics, groups on them, and reports of pipelines."""

    def __init__(
        self, config: Config, pool: ThreadPoolExecutor, metrics: Metrics, database: Database
    ) -> None:
        self.topics = TopicStore(config.data_directory, config.topics, pool=pool, metrics=metrics)
        self.shared = self.topics.share(database)
        self.groups = Groups(
            config.private_directory / "groups", self.topics, pool=pool, metrics=metrics
        )
        self.moves = TopicMoves(
            config.private_directory / "moves", self.topics, self.groups, database
        )
        self.pipelines = Pipelines(config.private_directory, metrics)
        self.tier = self.topics.tier
        if self.tier is not None:
            self.tier.groups = self.groups.offsets
            self.tier.sinks = config.private_directory / "groups" / SINKS

    def parts(self) -> list["Part"]:
        parts: list[Part] = [self.topics, self.groups, self.moves, self.pipelines]
        return parts if self.tier is None else [*parts, self.tier]


class Broker:
    """The components of one process, from `start` to `stop`."""

    def __init__(
        self,
        config: Config,
        *,
        owner: bool = True,
        worker: int = 0,
        origins: dict[str, str] | None = None,
    ) -> None:
        """Create the components. `origins` has the source of each configured value."""
        self.config = config
        self.origins = origins or {}
        self.owner = owner
        self.starting = False  # some listeners or workers are not ready yet
        self.draining = False  # about to stop: the broker reports that it is not ready
        self.metrics = Metrics(config.metrics.max_series)
        self._began = time.monotonic()
        self.pool = ThreadPoolExecutor(
            config.thread_pool_size or os.cpu_count() or 1, thread_name_prefix="penstock"
        )
        self.database = Database(config.database, config.private_directory, self.metrics, SCHEMA)
        self.logs = (
            Logs(config, self.pool, self.metrics, self.database)
            if owner and config.topics.enabled
            else None
        )
        self.queues = Queues(self.database, config.queues, self.metrics)
        self.presence = Presence(
            self.database,
            self.queues.waiting,
            self.queues.consumers,
            self.metrics,
            config.server_name,
            worker,
        )
        self.buffer = Buffer(
            self.queues,
            self.database,
            config.buffer,
            config.buffers_directory,
            DISK,
            self.pool,
            self.metrics,
        )
        self.exports: Exports | None = None
        if owner:
            self.exports = Exports(
                config,
                pool=self.pool,
                metrics=self.metrics,
                topics=self.logs.topics if self.logs else None,
                queues=self.queues,
                buffer=self.buffer,
            )
        self._running = AsyncExitStack()
        add_process(self.metrics)
        self.metrics.gauge(
            "penstock_uptime_seconds",
            "Time since the broker started",
            read=lambda: self.uptime,
            merge="max",
        )
        self.metrics.gauge(
            "penstock_info",
            "Version of the broker, in the label; always 1",
            "version",
            read=lambda: {(__version__,): 1},
            merge="max",
        )

    @property
    def uptime(self) -> float:
        return time.monotonic() - self._began

    async def start(self, check: Callable[[], None] = lambda: None) -> None:
        """Start every component; call `check` once the lock is held and nothing has started."""
        async with AsyncExitStack() as starting:
            if self.owner:
                _check_restored(self.config.private_directory)
                _close_to_others(self.config.private_directory)
            if self.logs or (self.owner and self.database.embedded):
                starting.enter_context(
                    DirectoryLock(self.config.private_directory, "data directory")
                )
            check()
            starting.callback(self.pool.shutdown)
            # Start the database and topics concurrently; they are independent.
            side_by_side = [_start([self.database], starting)]
            if self.logs:
                side_by_side.append(_start(self.logs.parts(), starting))
            for failure in await asyncio.gather(*side_by_side, return_exceptions=True):
                if failure is not None:
                    raise failure
            parts: list[Part] = [self.logs.shared] if self.logs else []
            parts += [self.queues, self.presence, self.buffer]
            await _start(parts if self.exports is None else [*parts, self.exports], starting)
            self._running = starting.pop_all()

    async def stop(self) -> None:
        await self._running.aclose()


async def _start(parts: Sequence[Part], starting: AsyncExitStack) -> None:
    """Start components one after the other; register each to be stopped in reverse order."""
    for part in parts:
        await part.start()
        starting.push_async_callback(part.stop)


def _check_restored(private: Path) -> None:
    if (private / RESTORING).exists():
        raise Conflict(
            f"a restore into {private.parent} was interrupted: remove that directory and restore "
            "again"
        )


def _close_to_others(directory: Path) -> None:
    """Deny other users access: the directory contains payloads.

    The operator decides what its group may do.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & stat.S_IRWXO and directory.stat().st_uid == os.geteuid():
        directory.chmod(mode & ~stat.S_IRWXO)
