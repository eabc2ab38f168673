"""The state of queues, groups, topics and the database as metrics.

A scrape reads it, at most every `CACHE_SECONDS`: the counters of all queues in one statement
(`queues.admin.figures`), never by counting messages. Only the owner of the data directory reports
it, so that it is not added up over workers. While the database does not answer, its figures are
missing: unknown is not 0.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from penstock.broker import Broker
from penstock.errors import PenstockError
from penstock.metrics import Counter, Gauge, Labels, folded
from penstock.monitor.inspection import sql
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.admin.figures import GroupFigures, QueueFigures
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore

log = logging.getLogger("penstock.monitor")

CACHE_SECONDS = 2.0
MAX_SECONDS = 4.0  # longest wait for the database: the other metrics must arrive in time
DATABASE = sql("database_figures")

QUEUE_GAUGES: dict[str, tuple[str, Callable[[QueueFigures], float]]] = {
    "waiting": (
        "Messages that the slowest consumer group has not finished, including leased ones",
        lambda q: q.waiting,
    ),
    "depth": ("Former name of penstock_queue_waiting, for one more release", lambda q: q.waiting),
    "stored": ("Messages stored now, finished or not", lambda q: q.stored),
    "scheduled": ("Delayed messages that are not due yet", lambda q: q.scheduled),
    "leased": ("Messages leased and not yet acknowledged", lambda q: q.leased),
    "dead_letters": ("Dead letters in the queue now", lambda q: q.dead_letters),
}
GROUP_GAUGES: dict[str, tuple[str, Callable[[GroupFigures], float]]] = {
    "waiting": (
        "Messages that the group has not finished, including leased ones",
        lambda g: g.waiting,
    ),
    "lag": (
        "Former name of penstock_queue_group_waiting, for one more release",
        lambda g: g.waiting,
    ),
    "leased": ("Messages leased to the group and not yet acknowledged", lambda g: g.leased),
    "dead_letters": ("Dead letters of the group now", lambda g: g.dead_letters),
    "skipped": (
        "Messages skipped by a late start or a seek of the group, minus those delivered again",
        lambda g: g.skipped,
    ),
}
GROUP_COUNTERS: dict[str, tuple[str, Callable[[GroupFigures], float]]] = {
    "completed": ("Messages completed by the group", lambda g: g.completed),
    "failed": (
        "Failed delivery attempts of the group, including expired leases",
        lambda g: g.failed,
    ),
    "dropped": (
        "Messages dropped for the group: it will never complete them, and no dead letter is kept",
        lambda g: g.dropped,
    ),
}
DATABASE_GAUGES = {
    "connections": "Client connections of the PostgreSQL server",
    "max_connections": "Client connections that the PostgreSQL server allows",
    "dead_rows": "Dead rows in Penstock's tables that vacuum has not removed yet",
    "oldest_transaction_seconds": "Age of the oldest open transaction; 0 = none",
    "answer_seconds": "Response time of the last status query",
}


class StateMetrics:
    """Registers the instruments, and fills them on demand."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._max_waits = broker.config.metrics.max_series
        self._filled_at = -CACHE_SECONDS
        self._filling: asyncio.Task[None] | None = None
        metrics = broker.metrics
        queue, group = "penstock_queue_", "penstock_queue_group_"
        self._queues = metrics.gauge("penstock_queues", "Number of queues")
        self._of_queue = {
            name: metrics.gauge(queue + name, text, "queue")
            for name, (text, _) in QUEUE_GAUGES.items()
        }
        self._of_group: dict[str, Gauge | Counter] = {
            name: metrics.gauge(group + name, text, "queue", "group")
            for name, (text, _) in GROUP_GAUGES.items()
        }
        self._of_group |= {
            name: metrics.counter(f"{group}{name}_total", text, "queue", "group")
            for name, (text, _) in GROUP_COUNTERS.items()
        }
        self._members = metrics.gauge(
            group + "members", "Consumers connected to the group", "queue", "group"
        )
        self._ages = metrics.gauge(
            queue + "oldest_age_seconds",
            "Time that the oldest message has waited for the slowest group, or for any group",
            "queue",
            merge="max",
        )
        self._lag_seconds = metrics.gauge(
            group + "lag_seconds",
            "Time that the oldest message not finished by the group has waited",
            "queue",
            "group",
            merge="max",
        )
        self._in_flight = metrics.gauge(
            "penstock_consumer_in_flight_seconds",
            "Time that the oldest call of a consumer's function has been running",
            "queue",
            "group",
            merge="max",
        )
        self._of_database = {
            name: metrics.gauge(f"penstock_database_{name}", text)
            for name, text in DATABASE_GAUGES.items()
        }
        self._wal = metrics.counter(
            "penstock_database_wal_bytes_total", "Bytes of WAL written by PostgreSQL"
        )
        if broker.logs:
            self._add_topics(broker.logs.topics, broker.logs.groups)

    def _add_topics(self, topics: TopicStore, groups: Groups) -> None:
        """Add gauges that read memory, and so need no filling."""
        metrics = self._broker.metrics
        metrics.gauge(
            "penstock_topic_stored_records",
            "Records stored in the topic",
            "topic",
            read=lambda: {(topic.name,): topic.records for topic in topics},
        )
        metrics.gauge(
            "penstock_topic_size_bytes",
            "Bytes stored in the topic",
            "topic",
            read=lambda: {(topic.name,): topic.size_bytes for topic in topics},
        )
        metrics.gauge(
            "penstock_topic_oldest_age_seconds",
            "Age of the oldest stored record",
            "topic",
            merge="max",
            read=lambda: _ages(
                topics, [((one.name,), one.name, one.first_offset) for one in topics]
            ),
        )
        metrics.gauge(
            "penstock_topic_group_lag_seconds",
            "Age of the oldest record that the group has not committed",
            "group",
            "topic",
            merge="max",
            read=lambda: _ages(
                topics,
                [((at.group, at.topic), at.topic, at.committed) for at in groups.positions()],
            ),
        )
        metrics.gauge(
            "penstock_topic_group_leases",
            "Ranges of records leased to members of the group",
            "group",
            "topic",
            read=lambda: {(at.group, at.topic): len(at.leases) for at in groups.positions()},
        )

    async def fill(self) -> None:
        """Read the state, unless it was read just now. Figures that do not arrive in time are
        missing from this scrape.
        """
        if self._filling is None or self._filling.done():
            if time.monotonic() - self._filled_at < CACHE_SECONDS:
                return
            self._filling = asyncio.create_task(self._fill())
        _, late = await asyncio.wait({self._filling}, timeout=MAX_SECONDS)
        if late:
            self._clear()

    async def _fill(self) -> None:
        try:
            await self._fill_queues()
            await self._fill_consumers()
            await self._fill_database()
        except PenstockError as error:
            self._clear()
            log.debug("no figures of queues in this scrape: %s", error)
        except Exception:  # a bug here must not hide the other metrics
            self._clear()
            log.exception("the figures of queues could not be read")
        self._filled_at = time.monotonic()

    def _clear(self) -> None:
        for one in (
            *(self._queues, self._members, self._ages, self._lag_seconds, self._wal),
            self._in_flight,
            *self._of_queue.values(),
            *self._of_group.values(),
            *self._of_database.values(),
        ):
            one.replace({})

    async def _fill_queues(self) -> None:
        metrics = self._broker.metrics
        counted = metrics.counted("queue")  # before the read: a new queue is not among them
        queues = await self._broker.queues.figures.queues()
        metrics.forget("queue", *counted.difference(queue.name for queue in queues))
        queues.sort(key=lambda queue: queue.id)  # beyond `max_series`, the oldest ones are shown
        members = await self._broker.queues.consumers.members()
        waits, unread = await self._broker.queues.figures.waits(queues, self._max_waits)
        # In a thread, because there may be many queues.
        values = await asyncio.to_thread(self._values, queues, members, waits, unread)
        self._queues.set(len(queues))
        for one, shown in values:
            one.replace(shown)

    def _values(
        self,
        queues: list[QueueFigures],
        members: dict[tuple[str, str], int],
        waits: dict[int, float | None],
        unread: dict[int, float],
    ) -> list[tuple[Gauge | Counter, dict[Labels, float]]]:
        """Return the values of each instrument, at most as many as a scrape may have."""
        values: dict[Gauge | Counter, dict[Labels, float]] = {}
        for name, (_, queue_value) in QUEUE_GAUGES.items():
            values[self._of_queue[name]] = {(one.name,): queue_value(one) for one in queues}
        pairs = [((queue.name, _shown(one.name)), one) for queue in queues for one in queue.groups]
        for name, (_, group_value) in {**GROUP_GAUGES, **GROUP_COUNTERS}.items():
            values[self._of_group[name]] = {labels: group_value(one) for labels, one in pairs}
        values[self._members] = {
            labels: members.get((labels[0], one.name), 0) for labels, one in pairs
        }
        lags: dict[Labels, float] = {}
        ages: dict[Labels, float] = {
            (queue.name,): unread[queue.id] for queue in queues if queue.id in unread
        }
        for labels, one in pairs:
            seconds = waits.get(one.id) if one.waiting else 0.0
            if seconds is not None:
                lags[labels] = seconds
                ages[labels[:1]] = max(ages.get(labels[:1], 0.0), seconds)
        values |= {self._lag_seconds: lags, self._ages: ages}
        most = self._broker.metrics.max_series
        return [(one, folded(one, all_of_it, most)) for one, all_of_it in values.items()]

    async def _fill_consumers(self) -> None:
        longest: dict[Labels, float] = {}
        for one in await self._broker.presence.consumers():
            labels = one.queue, _shown(one.group)
            longest[labels] = max(longest.get(labels, 0.0), one.in_flight_seconds)
        most = self._broker.metrics.max_series
        self._in_flight.replace(folded(self._in_flight, longest, most))

    async def _fill_database(self) -> None:
        began = time.perf_counter()
        (row,) = await self._broker.database.browse(DATABASE)
        figures = {
            **row,
            "oldest_transaction_seconds": row["oldest_seconds"],
            "answer_seconds": time.perf_counter() - began,
        }
        for name, gauge in self._of_database.items():
            gauge.set(figures[name] or 0)
        self._wal.replace({(): row["wal"]})


def _shown(group: str) -> str:
    return "" if group == QUEUE_MODE else group


def _ages(topics: TopicStore, places: list[tuple[Labels, str, int]]) -> dict[Labels, float]:
    """Return the ages of these offsets; those whose index cannot be read are missing."""
    ages = {
        labels: topic.age_at(offset)
        for labels, name, offset in places
        if (topic := topics.get(name)) is not None
    }
    return {labels: age for labels, age in ages.items() if age is not None}
