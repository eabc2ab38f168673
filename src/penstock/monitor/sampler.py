"""Sample the broker once a second while it has viewers.

One task serves all viewers. Every second it adds up the counters of all queues in one small
statement, on the connections for browsing (`Database.browse`). It also reads the figures of every
queue: every second if there are few, and every few seconds if there are thousands, so that this
takes at most `QUEUES_SHARE` of the time. Every `SLOW_SECONDS` it reads what costs more (the oldest
waiting message, consumers, latencies, the database's own figures). Everything else comes from
memory. The last 15 minutes are kept. Before the first viewer came, nothing was sampled: the history
per minute in PostgreSQL fills that gap.

An unknown figure is None, never 0.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from heapq import nlargest
from pathlib import Path
from typing import Any

import msgspec

from penstock.broker import Broker
from penstock.contract.consumers import ConsumerHealth
from penstock.contract.noun import of
from penstock.contract.queues import QueueGroup
from penstock.contract.routes import RouteStatus
from penstock.errors import PenstockError
from penstock.io.tasks import slices, supervised
from penstock.monitor.figures import (
    DOWN,
    DatabaseCard,
    DatabaseWatch,
    DiskWatch,
    WatchedQueue,
    ledger,
    topic_books,
)
from penstock.monitor.inspection import push_to_ack
from penstock.monitor.problems import Problems
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.admin.figures import GroupFigures, QueueFigures

log = logging.getLogger("penstock.monitor")

SAMPLE_SECONDS = 1.0
SLOW_SECONDS = 5.0
QUEUES_SHARE = 0.004  # of the time, for reading the figures of every queue
FIRST_SECONDS = 0.003  # assumed duration of the first reading
MAX_QUEUES_SECONDS = 10.0  # at most, between two readings
MIN_SAMPLE_SECONDS = 0.3  # between two samples; an earlier call gets the last one
KEPT_SAMPLES = 900  # 15 minutes
QUEUES_PER_SLICE = 250  # processed before other tasks run: some milliseconds
SPARK_SAMPLES = 60  # of a queue's line in a list
WORST_GROUPS = 5

TOTALS = """
SELECT sum(pushed)::bigint AS pushed, sum(done - dead - dropped)::bigint AS completed
  FROM (SELECT pushed, done, dead, dropped FROM tallies
        UNION ALL SELECT pushed, done, dead, dropped FROM tally_log) t"""
MINUTES = """
SELECT extract(epoch FROM minute)::bigint AS minute,
       sum(pushed)::bigint AS pushed, sum(done - dead - dropped)::bigint AS completed
  FROM (SELECT minute, pushed, done, dead, dropped FROM history
         WHERE minute > now() - interval '20 minutes'
        UNION ALL
        SELECT date_trunc('minute', at), pushed, done, dead, dropped FROM tally_log
         WHERE at > now() - interval '20 minutes') m
 GROUP BY 1 ORDER BY 1"""
DEATHS = """
SELECT q.name, sum(d.dead)::bigint AS dead
  FROM (SELECT queue_id, dead FROM history
         WHERE minute > now() - interval '15 minutes' AND dead > 0
        UNION ALL SELECT queue_id, dead FROM tally_log WHERE dead > 0) d
  JOIN queues q ON q.id = d.queue_id AND q.deleted_at IS NULL GROUP BY 1"""
SETTINGS = """
SELECT (SELECT count(*) FROM schedules) AS schedules,
       (SELECT count(*) FROM queues
         WHERE deleted_at IS NULL AND NOT (retention_enabled
           AND (retention_seconds > 0 OR completed_retention_seconds > 0))) AS unlimited"""


class WatchedProcess(msgspec.Struct, rename="camel"):
    """A broker process on this database."""

    id: str
    host: str
    worker: int
    server: str
    version: str | None
    cpu: float  # cores in use
    memory: int
    waiting_pops: int
    started_at: float
    last_seen: float
    self: bool


class Sampler:
    """The broker's state as of the last second, and its last 15 minutes."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._viewers: set[Callable[[bytes], None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._sampling = asyncio.Lock()  # two samples at once would make rates over no time
        self.queues: dict[str, WatchedQueue] = {}
        self.queues_at = 0.0  # when they were read
        self._queues_due = 0.0
        self._queues_seconds = FIRST_SECONDS  # the duration of a reading
        self._totals: tuple[float, int, int] | None = None  # when, pushed, completed
        self._samples: deque[tuple[float, dict[str, float | None]]] = deque(maxlen=KEPT_SAMPLES)
        self._lines: dict[str, deque[int]] = {}  # queue -> its waiting messages, for sparklines
        # two readings of the queues, each with its time: the last one, and the one before it, from
        # which rates are computed
        self._last: tuple[float, dict[str, WatchedQueue]] | None = None
        self._before: tuple[float, dict[str, WatchedQueue]] | None = None
        self._deaths: dict[str, int] = {}  # queue -> dead letters of the last 15 minutes
        self._schedules: int | None = None
        self._unlimited: int | None = None  # queues without retention
        self._ages: dict[int, float] = {}  # queue without groups -> age of its oldest message
        self._waits: dict[int, float | None] = {}  # group -> wait of its oldest message
        self._slow_at = 0.0
        self._database_watch = DatabaseWatch(broker.database)
        self._database: DatabaseCard | None = None
        self._consumers: dict[tuple[str, str], int] | None = None  # by queue and group
        self._processes: list[WatchedProcess] = []
        self._latency: dict[str, float | None] | None = None
        self._disk = DiskWatch(Path(broker.config.data_directory))
        self._sent: dict[str, Any] = {}  # what viewers have
        self._problems = Problems(broker)
        self._topics: tuple[float, dict[str, Any] | None] = (0.0, None)  # when, their books
        self._now: dict[str, Any] = {}

    # Viewers

    def watch(self, viewer: Callable[[bytes], None]) -> Callable[[], None]:
        """Call `viewer(event)` about once a second. Return a function that stops this."""
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = supervised("console sampler", self._run, self._broker.metrics)
        return lambda: self._viewers.discard(viewer)

    async def snapshot(self) -> bytes:
        """Return the first event of a viewer: everything, with its history."""
        if not self._now or time.time() - self._now["at"] / 1000 > 2 * SAMPLE_SECONDS:
            await self._fill()
            await self._sample()
        return self.whole()

    def whole(self) -> bytes:
        names = sorted({name for _, sample in self._samples for name in sample})
        history = {
            "times": [at * 1000 for at, _ in self._samples],
            "series": {name: [s.get(name) for _, s in self._samples] for name in names},
        }
        return _event(
            {key: value for key, value in self._now.items() if key != "sample"}
            | {"history": history, "last": self._now.get("sample")}
        )

    async def fresh(self, *, recent: bool = False) -> None:
        """Read the queues now, for a single caller. With `recent`, the figures of the last sample
        are enough while there are viewers.
        """
        watched = self._task is not None and not self._task.done()
        if watched and recent:
            return
        async with self._sampling:
            self._queues_due = 0.0
            if not watched:
                await self._sample_now()
                return
            with suppress(PenstockError):  # the database is down, and the page says so
                await self._read_queues(time.time())

    def line_of(self, queue: str) -> list[int]:
        return list(self._lines.get(queue, ()))

    async def _run(self) -> None:
        while self._viewers:
            began = time.monotonic()
            event = _event(self._changes(await self._sample()))
            for viewer in list(self._viewers):
                viewer(event)
            await asyncio.sleep(max(0.1, SAMPLE_SECONDS - (time.monotonic() - began)))

    def _changes(self, now: dict[str, Any]) -> dict[str, Any]:
        """Return what viewers do not have yet; the sample always."""
        before, self._sent = self._sent, now
        return {
            name: value
            for name, value in now.items()
            if name in ("at", "sample") or name not in before or before[name] != value
        }

    # Sampling

    async def _fill(self) -> None:
        """Fill minutes without samples with the rates per minute that PostgreSQL has."""
        try:
            rows = await self._broker.database.browse(MINUTES)
        except PenstockError:
            return
        now = time.time()
        oldest = now - KEPT_SAMPLES * SAMPLE_SECONDS
        samples = [sample for sample in self._samples if sample[0] >= oldest]
        sampled = {int(at) // 60 for at, _ in samples}
        counted = {row["minute"] // 60: row for row in rows}
        begun = min(counted, default=0)  # unknown before that, not zero
        minutes = range(max(begun, int(oldest) // 60 + 1), int(now) // 60) if counted else ()
        samples += [
            (60.0 * minute + 30, _per_second(counted.get(minute)))
            for minute in minutes
            if minute not in sampled
        ]
        self._samples = deque(sorted(samples, key=lambda one: one[0]), maxlen=KEPT_SAMPLES)

    async def _sample(self) -> dict[str, Any]:
        async with self._sampling:
            if not self._now or time.time() - self._now["at"] / 1000 > MIN_SAMPLE_SECONDS:
                await self._sample_now()
            return self._now

    async def _sample_now(self) -> None:
        at = time.time()
        broker = self._broker
        sample: dict[str, float | None] = {}
        consumers: list[ConsumerHealth] = []
        try:
            consumers = await broker.presence.consumers()
            (totals,) = await broker.database.browse(TOTALS)
            if at >= self._queues_due:
                await self._read_queues(at)
        except PenstockError:
            self._before = self._last = self._totals = None
            self._queues_due = 0.0
        else:
            sample = self._rates(at, totals["pushed"] or 0, totals["completed"] or 0)
        if not sample or sample["pushed"] is not None:  # the first sample has no rates: not a gap
            self._samples.append((at, sample))
        disk = self._disk.sample()
        routes = broker.exports.status() if broker.exports else []
        self._now = {
            "at": at * 1000,
            "sample": sample,
            "problems": self._problems.find(at, self.queues, self._deaths, disk, routes, consumers),
            "counts": self._counts(len(routes) if broker.exports else None),
            "oldest": max(
                (q.oldest for q in self.queues.values() if q.oldest is not None), default=None
            ),
            "ledger": self._ledger(at, routes),
            "groups": self._worst(),
            "latency": self._latency,
            "database": self._database if broker.database.healthy else DOWN,
            "disk": disk,
            "buffers": _buffers(broker),
            "brokers": self._processes,
        }

    async def _read_queues(self, at: float) -> None:
        began = time.perf_counter()
        figures = await self._broker.queues.figures.queues()
        seconds = time.perf_counter() - began
        if abs(at - self._slow_at) > SLOW_SECONDS:
            await self._read_slowly(at, figures)
        await self._use(at, figures)
        # One slow answer of a busy database does not change the estimate at once.
        self._queues_seconds = min(seconds, 2 * self._queues_seconds)
        pause = self._queues_seconds / QUEUES_SHARE
        self._queues_due = at + min(max(pause, SAMPLE_SECONDS / 2), MAX_QUEUES_SECONDS)

    def _rates(self, at: float, pushed: int, completed: int) -> dict[str, float | None]:
        """Return messages per second of all queues since the last sample."""
        before, self._totals = self._totals, (at, pushed, completed)
        waiting = sum(queue.figures.waiting for queue in self.queues.values())
        if before is None or at <= before[0]:
            return {"pushed": None, "completed": None, "waiting": waiting}
        seconds = at - before[0]
        return {
            "pushed": max(0, pushed - before[1]) / seconds,  # a queue may have been deleted
            "completed": max(0, completed - before[2]) / seconds,
            "waiting": waiting,
        }

    async def _use(self, at: float, figures: list[QueueFigures]) -> None:
        """Use new figures, with rates since the reading before. If the last reading was a moment
        ago, rates are computed from the same one as its rates. Other tasks run in between, because
        there may be many queues.
        """
        queues: dict[str, WatchedQueue] = {}
        new = self._last is None or not 0 < at - self._last[0] < MIN_SAMPLE_SECONDS
        if new:
            self._before, self._last = self._last, (at, queues)
        since, before = self._before or (at, {})
        async for some in slices(figures, QUEUES_PER_SLICE):
            for figure in some:
                name = figure.name
                queue = queues[name] = self._queue(figure)
                if new:
                    line = self._lines.setdefault(name, deque(maxlen=SPARK_SAMPLES))
                    line.append(figure.waiting)
                if since < at:
                    _set_rates(queue, before.get(name, queue), at - since)
        for name in self._lines.keys() - queues.keys():
            del self._lines[name]
        self.queues_at, self.queues = at, queues

    def _queue(self, queue: QueueFigures) -> WatchedQueue:
        groups = [self._group(queue.name, group) for group in queue.groups]
        unread = self._ages.get(queue.id) if queue.stored else 0.0
        return WatchedQueue(queue, groups, None if groups else unread)

    def _group(self, queue: str, group: GroupFigures) -> QueueGroup:
        return of(
            QueueGroup,
            group,
            name="" if group.name == QUEUE_MODE else group.name,
            lag_seconds=self._waits.get(group.id) if group.waiting else 0.0,
            consumers=None
            if self._consumers is None
            else self._consumers.get((queue, group.name), 0),
            rate=None,
        )

    async def _read_slowly(self, at: float, figures: list[QueueFigures]) -> None:
        self._slow_at = at
        self._waits, self._ages = await self._broker.queues.figures.waits(figures)
        moved = sum(queue.pushed for queue in figures)
        moved += sum(group.completed for queue in figures for group in queue.groups)
        self._database = await self._database_watch.sample(moved)
        self._consumers = await self._broker.queues.consumers.members()
        browse = self._broker.database.browse
        self._deaths = {row["name"]: row["dead"] for row in await browse(DEATHS)}
        ((self._schedules, self._unlimited),) = await browse(SETTINGS)
        latencies = await push_to_ack(self._broker.queues)
        self._latency = None
        if latencies.total:
            self._latency = {f"p{one}": latencies.percentile(one) for one in (50, 99)}
        mine = self._broker.presence.member
        self._processes = [
            of(
                WatchedProcess,
                member,
                member.figures,
                host=member.hostname,
                version=member.figures.version or None,
                memory=member.figures.memory_bytes,
                started_at=member.started_at.timestamp() * 1000,
                last_seen=member.last_seen.timestamp() * 1000,
                self=member.id == mine,
            )
            for member in await self._broker.presence.members()
        ]

    # Figures derived from samples

    def _counts(self, routes: int | None) -> dict[str, int | None]:
        broker = self._broker
        return {
            "queues": len(self.queues),
            "queuesWithoutRetention": self._unlimited,
            "topics": len(broker.logs.topics.names()) if broker.logs else None,
            "deadLetters": sum(queue.figures.dead_letters for queue in self.queues.values()),
            "routes": routes,
            "pipelines": len(broker.logs.pipelines.all()) if broker.logs else None,
            "schedules": self._schedules,
        }

    def _ledger(self, at: float, routes: list[RouteStatus]) -> list[dict[str, Any]]:
        if self._broker.logs and at - self._topics[0] > SLOW_SECONDS:  # there may be thousands
            self._topics = at, topic_books(self._broker.logs.topics)
        topics = self._topics[1]
        return ledger(self.queues.values(), routes) + ([topics] if topics else [])

    def _worst(self) -> list[dict[str, Any]]:
        pairs = ((queue, group) for queue in self.queues.values() for group in queue.groups)
        worst = nlargest(WORST_GROUPS, pairs, key=lambda pair: pair[1].waiting)
        return [
            {
                "queue": queue.figures.name,
                "group": group.name,
                "waiting": group.waiting,
                "lagSeconds": group.lag_seconds,
            }
            for queue, group in worst
        ]


def _per_second(minute: Any) -> dict[str, float | None]:
    """Return the rates of a minute; a minute without a row had nothing to count."""
    if minute is None:
        return {"pushed": 0.0, "completed": 0.0}
    return {"pushed": minute["pushed"] / 60, "completed": minute["completed"] / 60}


def _set_rates(queue: WatchedQueue, before: WatchedQueue, seconds: float) -> None:
    """Set messages per second since `before`; a queue that was recreated counts from 0."""
    queue.pushed_rate = max(0, queue.figures.pushed - before.figures.pushed) / seconds
    done = {group.name: group.completed for group in before.groups}
    for group in queue.groups:
        group.rate = max(0, group.completed - done.get(group.name, group.completed)) / seconds


def _buffers(broker: Broker) -> dict[str, Any]:
    buffer = broker.buffer
    kinds = [buffer.status.kind("failover"), buffer.status.kind("qos0")]
    mode = "direct" if buffer.healthy else "failover"
    return {
        "pending": sum(kind.pending for kind in kinds),
        "oldest": max((kind.oldest_age for kind in kinds if kind.files), default=None),
        "failed": buffer.failed.events,
        "mode": "maintenance" if buffer.maintenance.modes.push else mode,
    }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
