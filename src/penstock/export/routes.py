"""A route: source, send queue, workers and destination of one name, put together and kept running.

Its directory holds the queue, the dead letters, and `route.json`: whether it is paused, by whom and
why, whether it drains, the incarnations of the topic it reads, the life of its queue (a number made
with the queue, part of the keys of batches), the number under which it takes leases on a queue, and
its definition when it was made over the API rather than by the configuration.
"""

import asyncio
import json
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import Conflict, StorageFailed, StorageFull, Unavailable
from penstock.export.backoff import Backoff
from penstock.export.breaker import Breaker
from penstock.export.context import RouteContext
from penstock.export.deadletters import DeadLetter, DeadLetters
from penstock.export.delivery import Delivery
from penstock.export.destinations import Destination
from penstock.export.gate import Gate
from penstock.export.sendqueue import Pushed, SendQueue
from penstock.export.sources import QueueSource, Source, TopicSource, make_blocks
from penstock.export.spec import RouteSpec, make_destination
from penstock.export.telemetry import BREAKER_STATES, RouteMetrics
from penstock.export.workers import Workers

log = logging.getLogger("penstock.export")
STATE = "route.json"
PURGE_TIMEOUT = 5.0  # seconds that a batch in flight has to end before a purge is answered
SAVE_AGAIN = 5.0  # seconds until state that could not be saved is tried again


class Route:
    def __init__(
        self,
        spec: RouteSpec,
        directory: Path,
        context: RouteContext,
        metrics: RouteMetrics,
        *,
        definition: Mapping[str, Any] | None = None,
        destination: Destination | None = None,
    ) -> None:
        self.name, self.spec, self.directory = spec.name, spec, directory
        self.definition = definition  # kept in route.json when it came over the API
        self.draining = False  # on somebody's order: takes nothing new
        self._unsaved = False  # route.json is behind
        self._stopping = False
        self._context, self._metrics = context, metrics
        settings = spec.queue
        self.destination = destination or make_destination(spec, context)
        self.queue = SendQueue(
            spec.name,
            settings,
            context.fs,
            directory,
            context.pool,
            metrics,
            context.clock,
            source="topic" if spec.source.topic else "queue" if spec.source.queue else None,
        )
        self.dead_letters = DeadLetters(
            context.fs, None if settings.type == "memory" else directory
        )
        self.breaker = Breaker(
            spec.name,
            settings.circuit_breaker,
            context.clock,
            lambda: metrics.add("circuit_breaker_open_total"),
            lambda: metrics.add("circuit_breaker_rejected_total"),
        )
        self.gate = Gate(
            context.clock,
            first=settings.circuit_breaker.reset_timeout or 30.0,
            longest=settings.max_retry_delay,
        )
        self.gate.on_open = self._went_on
        self.backoff = Backoff(
            enabled=settings.backoff.enabled,
            base=settings.retry_interval,
            multiplier=settings.backoff.multiplier,
            longest=settings.max_retry_delay,
            random=random.random,
            clock=context.clock,
        )
        self.delivery = Delivery(
            spec.name,
            self.queue,
            self.destination,
            self.dead_letters,
            self.backoff,
            settings,
            context.limit,
            context.pool,
            context.clock,
            metrics,
            self._denied,
        )
        self.workers = Workers(
            settings,
            self.queue,
            self.delivery,
            self.gate,
            self.breaker,
            self.backoff,
            context.clock,
        )
        self._source: Source | None = None
        self._reader: asyncio.Task[None] | None = None
        self._incarnations: list[str] = []
        self._life = 0
        self._holder = (
            0  # marks our leases on a queue, so that the next process finds those of this one
        )
        self._watcher: asyncio.Task[None] | None = None
        self._saving = asyncio.Lock()
        self._replaying = asyncio.Lock()
        self._later: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.queue.start()
        try:
            self._take_up(await self._in_pool(self._load))
            await self._in_pool(self.dead_letters.open)
            await self.destination.start()
            made = not self._life or not self._holder
            self._life = self._life or random.getrandbits(32)
            self._holder = self._holder or random.getrandbits(48)
            if made:
                await self._remember()
            if self.spec.queue.type == "memory":  # it numbers its batches from 1 at every start
                self._life = random.getrandbits(32)
            self._source = self._make_source()
        except BaseException:
            self.gate.stop()
            await self.queue.stop()
            raise
        self.delivery.life = self._life
        self.workers.start()
        if self._source is not None:
            self._watcher = asyncio.create_task(self._source.watch())
        if not self.draining:
            self._read()

    def _make_source(self) -> Source | None:
        source, context = self.spec.source, self._context
        if source.topic:
            if context.topics is None:
                raise Unavailable(f"route {self.name}: this process has no topics")
            return TopicSource(
                self.name,
                context.topics,
                source.topic,
                source.start,
                self.spec.batch,
                self.destination.encoding,
                self.queue,
                context.pool,
                context.clock,
                self,
            )
        if source.queue:
            if context.queues is None:
                raise Unavailable(f"route {self.name}: this process has no queues")
            return QueueSource(
                self.name,
                context.queues,
                source.queue,
                source.group or self.name,
                self._holder,
                self.spec.batch,
                self.destination.encoding,
                self.queue,
                context.pool,
                context.clock,
            )
        return None

    def _read(self) -> None:
        if self._source is not None and (self._reader is None or self._reader.done()):
            self._reader = asyncio.create_task(self._source.run(), name=f"route {self.name} source")
            self._reader.add_done_callback(self._reader_ended)

    def _reader_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("route %s: reading the source ended unexpectedly", self.name, exc_info=error)
            self._context.clock.call_later(5.0, self._read_again)

    def _read_again(self) -> None:
        if not (self.draining or self._stopping):
            self._read()

    async def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    async def stop(self, deadline: float | None = None) -> None:
        """Stop by `deadline` (monotonic). What is not delivered is on disk afterwards."""
        self._stopping = True
        self.gate.stop()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._stop_reading()
        await self.workers.stop(self._context.clock.monotonic() if deadline is None else deadline)
        await self.destination.stop()
        await asyncio.gather(*self._later)
        if self._unsaved:
            await self._remember()
        await self._in_pool(self.dead_letters.close)
        try:
            await self.queue.stop()
        except (StorageFull, StorageFailed) as error:
            log.error("route %s: %s", self.name, error)

    # What people do with it

    async def push(self, records: list[bytes]) -> Pushed:
        self._refuse_when_closed()
        blocks = await self._in_pool(
            make_blocks, records, self.destination.encoding, self.spec.batch
        )
        return await self.queue.push(blocks)

    def _refuse_when_closed(self) -> None:
        if self.draining or self._stopping:
            doing = "stopping" if self._stopping else "draining"
            raise Unavailable(f"route {self.name} is {doing} and takes nothing new")

    @property
    def paused(self) -> str | None:
        """Why, while it is."""
        return self.gate.reason

    async def pause(self, reason: str = "by hand") -> None:
        self.gate.close(reason, refused=False)
        log.warning("route %s is paused: %s", self.name, reason)
        await self._remember()

    def _denied(self, reason: str) -> None:
        if self.paused is None:
            reason = f"{self.destination.describe()} {reason}"
            self.gate.close(reason, refused=True)
            log.warning("route %s is paused, and tries again now and then: %s", self.name, reason)
            self._remember_soon()

    def _went_on(self) -> None:
        log.warning("route %s goes on: the destination refuses no more", self.name)
        self._remember_soon()

    async def resume(self) -> None:
        """Go on, at once: also ends a drain, and a backoff."""
        self.draining = False
        self.backoff.reset()
        self.gate.open()
        self._read()
        await self._remember()

    async def drain(self) -> None:
        """Take nothing new and deliver what there is; `resume` ends it."""
        self.draining = True
        await self._stop_reading()
        self.backoff.reset()
        self.gate.open()
        await self._remember()

    async def letters(self) -> list[DeadLetter]:
        letters: list[DeadLetter] = await self._in_pool(self.dead_letters.letters)
        return letters

    async def letters_page(self, offset: int, limit: int) -> Sequence[DeadLetter | None]:
        page: Sequence[DeadLetter | None] = await self._in_pool(
            self.dead_letters.page, offset, limit
        )
        return page

    async def purge(self) -> int:
        """Drop what is queued, what waits for its next attempt too; how many records."""
        return await self.queue.purge(self.workers.waiting(), PURGE_TIMEOUT)

    async def replay(self) -> int:
        """Push the dead letters again, as new records; how many."""
        self._refuse_when_closed()
        async with self._replaying:
            letters: list[DeadLetter] = await self._in_pool(self.dead_letters.begin_replay)
            records = [letter.record for letter in letters]
            blocks = await self._in_pool(
                make_blocks, records, self.destination.encoding, self.spec.batch
            )
            for block in blocks:
                pushed = await self.queue.push([block])
                if pushed.dropped:
                    raise Conflict(
                        f"the send queue of route {self.name} is full; the dead letters stay where they are"
                    )
            await self._in_pool(self.dead_letters.end_replay)
            return len(letters)

    # What it remembers

    async def generation_of(self, incarnation: str) -> int:
        if incarnation not in self._incarnations:
            self._incarnations.append(incarnation)
            try:
                await self.save()
            except (StorageFull, StorageFailed):
                self._incarnations.remove(incarnation)
                raise
        return self._incarnations.index(incarnation)

    def _load(self) -> dict[str, Any]:
        path = self.directory / STATE
        if not self._context.fs.exists(path):
            return {}
        try:
            found = json.loads(self._context.fs.read(path))
            if isinstance(found, dict):
                return found
            error: Exception = ValueError("not an object")
        except ValueError as wrong:
            error = wrong
        log.error("route %s: %s is damaged and ignored: %s", self.name, path, error)
        return {}

    def _take_up(self, found: dict[str, Any]) -> None:
        """Go on as it was saved; what is not as we wrote it counts as not there."""
        self.draining = found.get("draining") is True
        if isinstance(paused := found.get("paused"), str):
            self.gate.close(paused, refused=found.get("refused") is True)
        if isinstance(incarnations := found.get("incarnations"), list):
            self._incarnations = [each for each in incarnations if isinstance(each, str)]
        if isinstance(life := found.get("life"), int):
            self._life = life & 0xFFFFFFFF
        if isinstance(holder := found.get("holder"), int):
            self._holder = holder

    async def save(self) -> None:
        """Have the state on disk. One at a time: the last one saved is the last one that was."""
        async with self._saving:
            state = {
                "paused": self.paused,
                "refused": self.gate.refused,
                "draining": self.draining,
                "incarnations": self._incarnations,
                "life": self._life,
                "holder": self._holder,
                "definition": self.definition,
            }
            data = json.dumps(state, indent=2).encode()
            self._unsaved = True
            await self._in_pool(self._context.fs.make_dir, self.directory)
            await self._in_pool(self._context.fs.replace, self.directory / STATE, data)
            self._unsaved = False

    async def _remember(self) -> None:
        """Save, and go on trying while the disk refuses: what was asked for holds meanwhile."""
        try:
            await self.save()
        except (StorageFull, StorageFailed) as error:
            log.error("route %s: its state cannot be saved, trying again: %s", self.name, error)
            if not self._stopping:
                self._context.clock.call_later(SAVE_AGAIN, self._remember_soon)

    def _remember_soon(self) -> None:
        if self._stopping:
            return
        task = asyncio.create_task(self._remember())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    # What it shows

    @property
    def state(self) -> str:
        if self.paused:
            return "paused"
        if self.draining:
            return "draining" if self.queue.fast.count else "drained"
        return "running"

    async def refresh(self) -> None:
        """Look at what takes a question, so that `status` shows it."""
        if self._source is not None:
            await self._source.refresh()

    def status(self) -> dict[str, Any]:
        source = self.spec.source
        shown = (
            {"topic": source.topic}
            if source.topic
            else {"queue": source.queue, "group": source.group or self.name}
        )
        return {
            "name": self.name,
            "state": self.state,
            "paused": self.paused,
            "triesAgainSeconds": self._tries_again(),
            "source": shown if source.topic or source.queue else "push",
            "lag": self._source.lag() if self._source is not None else None,
            "sourceError": self._source.problem if self._source is not None else None,
            "sourceDamage": self._source.damage if self._source is not None else None,
            "destination": self.destination.describe(),
            "queue": self.queue.status(),
            "breaker": {"state": self.breaker.state, "failures": self.breaker.failures},
            "backoffSeconds": round(self.backoff.remaining, 3),
            "workers": {
                "total": self.workers.total,
                "active": self.workers.active,
                "target": self.workers.target,
                "inflight": self.delivery.inflight,
                "latencySeconds": round(self.delivery.latency, 6),
            },
            "deadLetters": self.dead_letters.count,
            "lastError": self.delivery.last_error,
        }

    def _tries_again(self) -> float | None:
        """Until a route that the destination refused knocks again."""
        at = self.gate.next_knock
        return None if at is None else round(max(0.0, at - self._context.clock.monotonic()), 3)

    def gauges(self) -> Mapping[str, float | Mapping[str, float]]:
        workers = self.workers
        lag = self._source.lag() if self._source is not None else 0
        return {
            **self.queue.gauges(),
            **({} if lag is None else {"route_source_lag": lag}),
            "queue_workers_active": workers.active,
            "queue_workers_total": workers.total,
            "queue_preparers_active": workers.preparing,
            "queue_senders_active": workers.active if workers.split else 0,
            "queue_sends_inflight": self.delivery.inflight,
            "queue_export_latency_ewma_seconds": self.delivery.latency,
            "queue_backoff_seconds": self.backoff.remaining,
            "route_paused": float(self.paused is not None),
            "dead_letters": self.dead_letters.count,
            "circuit_breaker_state": {
                state: float(state == self.breaker.state) for state in BREAKER_STATES
            },
        }

    async def _in_pool(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            self._context.pool, call, *arguments
        )
