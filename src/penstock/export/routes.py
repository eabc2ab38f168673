"""A route: create its source, send queue, workers and destination, and run them.

Its directory contains the queue, the dead letters and the state (`routestate`).
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.contract.routes import BreakerStatus, RouteSource, RouteStatus, WorkersStatus
from penstock.errors import Conflict, StorageError, Unavailable
from penstock.export.context import RouteContext
from penstock.export.deadletters import DeadRecord, DeadRecords
from penstock.export.delivery import BatchDelivery
from penstock.export.health import CLOSED, HALF_OPEN, OPEN, Breaker, Pause, RouteBackoff
from penstock.export.kafka_source import KafkaSource
from penstock.export.routestate import RouteState
from penstock.export.sendqueue import Block, PushedBlocks, SendQueue
from penstock.export.sources import QueueSource, SourceReader, TopicSource, make_blocks
from penstock.export.spec import RouteSpec, make_destination
from penstock.export.telemetry import Gauges, RouteMetrics
from penstock.export.workers import SendWorkers
from penstock.io.tasks import cancelled, supervised

log = logging.getLogger("penstock.export")
SOURCES: dict[str, type[SourceReader]] = {
    "topic": TopicSource,
    "queue": QueueSource,
    "kafka": KafkaSource,
}
PURGE_TIMEOUT_SECONDS = 5.0  # for a batch in flight to end before a purge is answered


class ExportRoute:
    def __init__(
        self,
        spec: RouteSpec,
        directory: Path,
        context: RouteContext,
        metrics: RouteMetrics,
        definition: dict[str, Any] | None = None,
    ) -> None:
        self.name = spec.name
        self.spec = spec
        self.directory = directory
        self._context = context
        settings, clock = spec.queue, context.clock
        self.destination = make_destination(spec, context)
        self.queue = SendQueue(
            spec.name,
            settings,
            directory,
            context,
            metrics,
            source=spec.source.kind,
        )
        self.dead_letters = DeadRecords(context.fs, None if self.queue.in_memory else directory)
        self.breaker = Breaker(spec.name, settings.circuit_breaker, clock, metrics.add)
        self._pause = Pause(
            clock,
            first=settings.circuit_breaker.reset_timeout or 30.0,
            longest=settings.max_retry_delay,
            on_resume=self._resumed,
        )
        self._state = RouteState(spec.name, directory, context, self._pause, definition)
        self.backoff = RouteBackoff(settings, clock)
        self.delivery = BatchDelivery(
            self.queue,
            self.destination,
            self.dead_letters,
            self._state,
            context,
            metrics,
        )
        self.workers = SendWorkers(
            self.queue,
            self.delivery,
            self._pause,
            self.breaker,
            self.backoff,
            context,
            on_denied=self._denied,
        )
        self._source: SourceReader | None = None
        if source := SOURCES.get(spec.source.kind):
            encoding = self.destination.encoding
            self._source = source(spec, context, self.queue, encoding, self._state)
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None  # of the source's lag
        self._stopping = False
        self._replaying = asyncio.Lock()

    async def start(self) -> None:
        await self.queue.start()
        try:
            await self._state.start(new_life=self.queue.in_memory)
            await self._context.in_pool(self.dead_letters.open)
        except BaseException:
            await self.queue.stop()
            raise
        self.workers.start()
        if self._source is not None:
            self._watcher = supervised(
                f"lag of route {self.name}", self._source.watch, self._context.metrics
            )
        if not self.draining:
            self._read()

    def _read(self) -> None:
        if self._source is not None and self._reader is None:
            self._reader = supervised(
                f"source of route {self.name}", self._source.run, self._context.metrics
            )

    async def _stop_reading(self) -> None:
        await cancelled(self._reader)
        self._reader = None

    async def stop(self, deadline: float | None = None) -> None:
        """Stop by `deadline` (monotonic). Undelivered records are on disk afterwards."""
        self._stopping = True
        await cancelled(self._watcher)
        await self._stop_reading()
        await self.workers.stop(self._context.clock.monotonic() if deadline is None else deadline)
        await self.destination.stop()
        await self._state.stop()
        await self._context.in_pool(self.dead_letters.close)
        try:
            await self.queue.stop()
        except StorageError as error:
            log.error("route %s: %s", self.name, error)

    # Operations

    async def push(self, records: list[bytes]) -> PushedBlocks:
        self._refuse_when_closed()
        return await self.queue.push(await self._make_blocks(records))

    async def _make_blocks(self, records: list[bytes]) -> list[Block]:
        encoding = self.destination.encoding
        return await self._context.in_pool(make_blocks, records, encoding, self.spec.batch)

    def _refuse_when_closed(self) -> None:
        if self.draining or self._stopping:
            doing = "stopping" if self._stopping else "draining"
            raise Unavailable(f"route {self.name} is {doing} and accepts no new records")

    @property
    def paused(self) -> str | None:
        """Return why the route is paused; None while it is not."""
        return self._pause.reason

    @property
    def draining(self) -> bool:
        """Return whether an operator asked the route to accept no new records."""
        return self._state.draining

    async def pause(self, reason: str = "by hand") -> None:
        self._pause.begin(reason, denied=False)
        log.warning("route %s is paused: %s", self.name, reason)
        await self._state.save_or_retry()

    def _denied(self, reason: str) -> None:
        if self.paused is None:
            reason = f"{self.destination.describe()}: {reason}"
            self._pause.begin(reason, denied=True)
            log.warning("route %s is paused and probes its destination: %s", self.name, reason)
            self._state.save_soon()

    def _resumed(self) -> None:
        log.warning("route %s resumes: the destination no longer denies it", self.name)
        self._state.save_soon()

    async def resume(self) -> None:
        """Send at once. This also ends a drain and a backoff."""
        self._state.draining = False
        self.backoff.reset()
        self._pause.end()
        self._read()
        await self._state.save_or_retry()

    async def drain(self) -> None:
        """Accept no new records and deliver those in the queue, until `resume`."""
        self._state.draining = True
        await self._stop_reading()
        self.backoff.reset()
        self._pause.end()
        await self._state.save_or_retry()

    async def save(self) -> None:
        """Write the state and the definition to disk."""
        await self._state.save()

    async def letters(self, offset: int, limit: int) -> Sequence[DeadRecord | None]:
        return await self._context.in_pool(self.dead_letters.page, offset, limit)

    async def purge(self) -> int:
        """Drop everything in the queue; return the number of records."""
        return await self.queue.purge(self.workers.waiting(), PURGE_TIMEOUT_SECONDS)

    async def replay(self) -> int:
        """Push the dead letters as new records; return their number."""
        self._refuse_when_closed()
        async with self._replaying:
            letters = await self._context.in_pool(self.dead_letters.begin_replay)
            for block in await self._make_blocks([letter.record for letter in letters]):
                pushed = await self.queue.push([block])
                if pushed.dropped:
                    raise Conflict(
                        f"the send queue of route {self.name} is full; the dead letters are kept"
                    )
            await self._context.in_pool(self.dead_letters.end_replay)
            return len(letters)

    # Status

    @property
    def state(self) -> str:
        if self.paused:
            return "paused"
        if self.draining:
            return "draining" if self.queue.count else "drained"
        return "running"

    async def refresh(self) -> None:
        """Query the lag of the source, so that `status` shows it."""
        if self._source is not None:
            await self._source.refresh()

    def _seconds_to_next_try(self) -> float:
        """Return the rest of the backoff, or the time until the breaker admits a probe."""
        return max(self.backoff.remaining, self.breaker.remaining)

    def status(self) -> RouteStatus:
        given = self.spec.source
        source = RouteSource(
            topic=given.topic or None,
            queue=given.queue or None,
            kafka=given.kafka.topic or None,
            group=given.group or None,
            partition=given.partition,
        )
        wait = None  # for the next probe of a route that was denied
        if (probe_at := self._pause.next_probe) is not None:
            wait = round(max(0.0, probe_at - self._context.clock.monotonic()), 3)
        return RouteStatus(
            name=self.name,
            state=self.state,
            last_error=self.delivery.last_error,
            paused=self.paused,
            tries_again_seconds=wait,
            source=source if given.kind else self.spec.target.takes or "push",
            lag=self._source.lag() if self._source is not None else None,
            source_error=self._source.problem if self._source is not None else None,
            source_damage=self._source.damage if self._source is not None else None,
            destination=self.destination.describe(),
            queue=self.queue.status(),
            breaker=BreakerStatus(self.breaker.state, self.breaker.failures),
            backoff_seconds=round(self._seconds_to_next_try(), 3),
            workers=WorkersStatus(
                total=self.workers.total,
                active=self.workers.active,
                target=self.workers.target,
                inflight=self.delivery.inflight,
                latency_seconds=round(self.delivery.latency, 6),
            ),
            dead_letters=self.dead_letters.count,
            failing_since=self.delivery.failing_since,
        )

    def gauges(self) -> Gauges:
        workers = self.workers
        lag = self._source.lag() if self._source is not None else 0
        return {
            **self.queue.gauges(),
            **({} if lag is None else {"route_source_lag": lag}),
            "queue_workers_active": workers.active,
            "queue_workers_total": workers.total,
            "queue_preparers_active": workers.preparing,
            "queue_senders_active": workers.active if workers.preparers else 0,
            "queue_sends_inflight": self.delivery.inflight,
            "queue_export_latency_ewma_seconds": self.delivery.latency,
            "queue_backoff_seconds": self._seconds_to_next_try(),
            "route_paused": float(self.paused is not None),
            "dead_letters": self.dead_letters.count,
            "circuit_breaker_state": {
                state: float(state == self.breaker.state) for state in (CLOSED, OPEN, HALF_OPEN)
            },
        }
