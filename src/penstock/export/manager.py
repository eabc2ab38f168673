"""Run all routes of a process: those of the configuration, and those created over the API.

A route created over the API is stored in its directory (`route.json`), and runs again after a
restart. A route of the configuration cannot be deleted over the API: it would come back. If a route
cannot start (the disk cannot be written, another process holds its lock), it is reported, and its
start is repeated. The broker and other routes run meanwhile.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from penstock.buffer import Buffer
from penstock.config import Config
from penstock.contract.routes import RouteInspection, RouteStatus
from penstock.errors import (
    ConfigError,
    Conflict,
    InvalidRequest,
    NotFound,
    PenstockError,
    StorageError,
    StorageFailed,
    Unavailable,
)
from penstock.export.context import Clock, RouteContext
from penstock.export.inspection import examine, first_records, waiting_records
from penstock.export.routes import ExportRoute
from penstock.export.routestate import read_state
from penstock.export.sendqueue import STREAM_END
from penstock.export.spec import RouteSpec, check_signals, parse_remote, parse_routes
from penstock.export.telemetry import ExportMetrics
from penstock.io.fs import DISK, Fs
from penstock.io.lock import DirectoryLock
from penstock.io.tasks import cancelled, supervised
from penstock.metrics import Metrics
from penstock.queues.engine import Queues
from penstock.topics.store import TopicStore

log = logging.getLogger("penstock.export")
T = TypeVar("T")
SENDS_PER_CORE = 8
# A route that was created over the API, or the error of reading it; None: it is configured.
Definition = dict[str, Any] | Exception | None
START_RETRY_SECONDS = 10.0  # until routes that could not start are tried again


class Exports:
    def __init__(
        self,
        config: Config,
        *,
        pool: Executor,
        metrics: Metrics,
        topics: TopicStore | None = None,
        queues: Queues | None = None,
        buffer: Buffer | None = None,
        fs: Fs = DISK,
        clock: Clock | None = None,
    ) -> None:
        self._settings = config.exporter.queue
        self.directory = config.routes_directory
        self._certificates = (
            config.exporter.certificates or config.private_directory / "certificates"
        )
        self._shutdown = config.shutdown_timeout
        limit = self._settings.global_send_limit or SENDS_PER_CORE * (os.cpu_count() or 1)
        self._context = RouteContext(
            fs=fs,
            pool=pool,
            clock=clock or Clock(),
            limit=asyncio.Semaphore(limit),
            metrics=metrics,
            topics=topics,
            queues=queues,
            buffer=buffer,
        )
        self._routes: dict[str, ExportRoute] = {}
        self.failed: dict[str, str] = {}  # routes that could not start, with the reason
        self._metrics = ExportMetrics(
            metrics, lambda: {name: route.gauges() for name, route in self._routes.items()}
        )
        self._configured = parse_routes(config)
        self._changing = asyncio.Lock()
        self._inspecting = asyncio.Lock()
        self._retrier: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if not self._settings.enabled:
            log.warning("exporter.queue.enabled is false: no route runs")
            return
        for name, definition in (await self._definitions()).items():
            await self._start(name, definition)
        self._retrier = supervised(
            "routes that could not start", self._retry_failed, self._context.metrics
        )

    async def stop(self) -> None:
        """Stop all routes at once, within one deadline."""
        await cancelled(self._retrier)
        deadline = self._context.clock.monotonic() + self._shutdown
        await asyncio.gather(*(route.stop(deadline) for route in self._routes.values()))
        self._routes.clear()

    async def _definitions(self) -> dict[str, Definition]:
        """Return all routes by name; None stands for those of the configuration."""
        return {**dict.fromkeys(self._configured), **await self._context.in_pool(self._stored)}

    def _make(
        self, name: str, definition: dict[str, Any] | None, *, stored: bool = True
    ) -> ExportRoute:
        if definition is None:
            spec: RouteSpec = self._configured[name]
        else:
            spec = parse_remote(name, definition, self._settings, self._certificates, stored=stored)
        check_signals(spec, {**self._configured, **{r.name: r.spec for r in self._routes.values()}})
        metrics = self._metrics.of(name)
        return ExportRoute(spec, self.directory / name, self._context, metrics, definition)

    async def _start(self, name: str, definition: Definition) -> None:
        try:
            if isinstance(definition, Exception):
                raise definition
            route = self._make(name, definition)
            await route.start()
        except (PenstockError, OSError) as error:
            if self.failed.get(name) != str(error):
                log.error("route %s cannot start, trying again: %s", name, error)
            self.failed[name] = str(error)
            return
        self.failed.pop(name, None)
        self._routes[name] = route
        log.info(
            "route %s runs, to %s, with %d batches queued",
            name,
            route.destination.describe(),
            route.queue.count,
        )

    async def _retry_failed(self) -> None:
        while True:
            await self._context.clock.sleep(START_RETRY_SECONDS)
            async with self._changing:
                for name, definition in (await self._definitions()).items() if self.failed else ():
                    if name in self.failed:
                        await self._start(name, definition)

    def _stored(self) -> dict[str, Definition]:
        """Return the definitions of routes that were created over the API, or why one cannot be
        read.
        """
        names = set(self._context.fs.list_dir(self.directory)).difference(self._configured)
        found: dict[str, Definition] = {}
        for name in sorted(names):
            try:
                found[name] = read_state(self._context, self.directory / name).definition
            except (StorageError, OSError) as error:
                found[name] = error
        return {name: definition for name, definition in found.items() if definition}

    # Operations

    def names(self) -> list[str]:
        return sorted({*self._routes, *self.failed})

    def get(self, name: str) -> ExportRoute:
        route = self._routes.get(name)
        if route is not None:
            return route
        if name in self.failed:
            raise Conflict(f"route {name} could not start: {self.failed[name]}")
        raise NotFound(f"no route named {name}")

    def taking(self, signal: str) -> ExportRoute:
        """Return the route that accepts a signal at the standard address. A route that could not
        start may be the one, so exporters are then asked to retry.
        """
        for route in self._routes.values():
            if signal in route.spec.source.signals:
                return route
        if self.failed:
            name, why = next(iter(self.failed.items()))
            raise Unavailable(
                f"no running route takes {signal}; route {name}: {why}", START_RETRY_SECONDS
            )
        raise NotFound(f"no route takes {signal}: give one a source that names it")

    async def refresh(self) -> None:
        """Query the lag of the sources, so that `status` shows it."""
        await asyncio.gather(*(route.refresh() for route in self._routes.values()))

    def status(self) -> list[RouteStatus]:
        running = [self._routes[name].status() for name in sorted(self._routes)]
        return running + [
            RouteStatus(name=name, state="failed", last_error=why)
            for name, why in sorted(self.failed.items())
        ]

    async def inspect(self, name: str) -> RouteInspection:
        """Read and check every block of a route's files, also if the route could not start."""
        return await self._inspect(name, examine)

    async def waiting_records(
        self, name: str, limit: int, size: int
    ) -> list[tuple[int, int, bytes]]:
        """Return (sequence, index, record) of waiting records, oldest first, about `size` bytes."""
        return await self._inspect(
            name, lambda *queue: first_records(waiting_records(*queue), limit, size)
        )

    async def _inspect(self, name: str, read: Callable[[Path, Fs, int], T]) -> T:
        """Run `read` in its own thread: it may take minutes, and the pool is for sending."""
        end = STREAM_END
        if name not in self.failed:
            queue = self.get(name).queue
            if queue.in_memory:
                raise Conflict(f"route {name} keeps its queue in memory: it has no files")
            end = await queue.write_out()
        async with self._inspecting:
            return await asyncio.to_thread(read, self.directory / name, self._context.fs, end)

    async def create(self, name: str, definition: dict[str, Any]) -> ExportRoute:
        async with self._changing:
            if name in self._routes or name in self._configured or name in self.failed:
                raise Conflict(f"there is a route {name} already")
            if not self._settings.enabled:
                raise Conflict("exporter.queue.enabled is false: no route runs")
            try:
                route = self._make(name, definition, stored=False)
                await route.start()
            except ConfigError as error:
                raise InvalidRequest(str(error)) from error
            except OSError as error:
                raise StorageFailed(f"route {name} cannot be made: {error}") from error
            try:
                await route.save()  # otherwise it would be missing after a restart
            except PenstockError:
                await route.stop()
                raise
            self._routes[name] = route
            return route

    async def delete(self, name: str, *, force: bool = False) -> None:
        """Stop the route and remove its directory; with `force`, even if it still has records."""
        async with self._changing:
            if name in self._configured:
                raise Conflict(f"route {name} is part of the configuration: remove it there")
            if name in self.failed and force:
                # The lock ensures that no other process runs it.
                with DirectoryLock(self.directory / name, "send queue"):
                    await self._context.in_pool(self._context.fs.remove_tree, self.directory / name)
                del self.failed[name]
                return
            route = self.get(name)
            if not force:
                _refuse_loss(route)
            del self._routes[name]
            await route.stop()
            await self._context.in_pool(self._context.fs.remove_tree, self.directory / name)
            self._context.metrics.forget("route", name)


def _refuse_loss(route: ExportRoute) -> None:
    leased, dead = route.queue.leased, route.dead_letters.count
    if records := route.queue.books.queued:
        sending = f", {leased} batches of them are being sent" if leased else ""
        text = f"route {route.name} still has {records} records{sending}"
        raise Conflict(f"{text}: drain or purge it, or delete with force")
    if dead:
        raise Conflict(
            f"route {route.name} still has {dead} dead letters: replay them, or delete with force"
        )
