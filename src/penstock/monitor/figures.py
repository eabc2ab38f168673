"""Compute the figures of the Console: queues, what became of all accepted records, the growth of
topics, the disk and PostgreSQL.
"""

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from penstock.contract.queues import QueueGroup
from penstock.contract.routes import RouteStatus
from penstock.database import Database
from penstock.database.health import COMMIT
from penstock.monitor.inspection import sql
from penstock.queues.admin.figures import QueueFigures
from penstock.topics.store import TopicStore
from penstock.topics.topic import Topic

KEPT_RATES = 60  # of a topic
MIN_RATE_SECONDS = 0.5  # between two samples of topics
DISK_SECONDS = 300.0  # between two samples of the disk that are kept
KEPT_DISK_SAMPLES = 288  # a day
MIN_WATCHED_SECONDS = 3600.0  # before the growth of the disk is known
FIGURES = sql("database_figures")

Usage = Callable[[Path], tuple[int, int, int]]  # total, used and free bytes, as of shutil


class WatchedQueue(msgspec.Struct):
    figures: QueueFigures
    groups: list[QueueGroup]
    unread: float | None  # how long the oldest message waits, while no group reads the queue
    pushed_rate: float | None = None

    @property
    def completed_rate(self) -> float | None:
        rates = (group.rate or 0.0 for group in self.groups)
        return None if self.pushed_rate is None else sum(rates, 0.0)

    delivered_rate = completed_rate

    @property
    def oldest(self) -> float | None:
        waits = [group.lag_seconds for group in self.groups if group.lag_seconds is not None]
        return max(waits, default=self.unread)


def ledger(queues: Iterable[WatchedQueue], routes: Iterable[RouteStatus]) -> list[dict[str, Any]]:
    """Return a row for the queues and one for the routes.

    Queues: accepted = completed + dead letters + dropped + waiting + skipped. `skipped` is computed
    from the other figures. So the sum is a proof only if `skipped` is 0; else `agrees` is None.
    Routes: accepted = delivered + dead letters + dropped + waiting.
    """
    pairs = [(queue, group) for queue in queues for group in queue.groups]
    rows = []
    if pairs:
        groups = [group for _, group in pairs]
        row: dict[str, Any] = {
            "part": "queues",
            "accepted": sum(queue.figures.pushed for queue, _ in pairs),
            "completed": sum(group.completed for group in groups),
            "deadLetters": sum(group.dead_letters for group in groups),
            "dropped": sum(group.dropped for group in groups),
            "waiting": sum(group.waiting for group in groups),
            "skipped": sum(group.skipped for group in groups),
        }
        rows.append(row | {"agrees": None if any(group.skipped for group in groups) else True})
    books = [route.queue.accounting for route in routes if route.queue]
    if books:
        row = {
            "part": "routes",
            "accepted": sum(book.accepted for book in books),
            "delivered": sum(book.delivered for book in books),
            "deadLetters": sum(book.dead_lettered for book in books),
            "dropped": sum(sum(book.dropped.values()) for book in books),
            "waiting": sum(book.queued for book in books),
        }
        parts = ("delivered", "deadLetters", "dropped", "waiting")
        rows.append(row | {"agrees": row["accepted"] == sum(row[part] for part in parts)})
    return rows


def topic_books(topics: Iterable[Topic]) -> dict[str, Any] | None:
    """Return a row for all topics: accepted = kept + removed by retention + compacted away; None
    if there are no topics.

    Every offset belongs to one record. Retention has removed those below the first offset, and only
    compacted segments may lack records. Any other missing record makes the sum too small.
    """
    accepted = kept = removed = compacted = 0
    books = list(topics)
    for topic in books:
        # Offsets that an adoption left out were never given to a record.
        skipped = sum(place.get("skipped", 0) for place in topic.damage)
        accepted += topic.next_offset - skipped
        removed += topic.first_offset
        bases = [*(segment.base for segment in topic.segments), topic.next_offset]
        for segment, (base, following) in zip(topic.segments, pairwise(bases), strict=True):
            kept += segment.rows
            if segment.compacted:
                compacted += following - base - segment.rows
    if not books:
        return None
    return {
        "part": "topics",
        "accepted": accepted,
        "kept": kept,
        "removed": removed,
        "compacted": compacted,
        "agrees": accepted == kept + removed + compacted,
    }


class TopicRates:
    """How fast topics grow, from samples of their next offsets."""

    def __init__(self, topics: TopicStore) -> None:
        self._topics = topics
        self._at: float | None = None  # time of the last sample
        self._offsets: dict[str, int] = {}  # next offsets in the last sample
        self._rates: dict[str, deque[float]] = {}  # records per second, the newest last

    def sample(self) -> None:
        """Sample the next offset of every topic."""
        at = time.monotonic()
        if self._at is not None and at - self._at < MIN_RATE_SECONDS:
            return
        offsets = {
            name: topic.next_offset
            for name in self._topics.names()
            if (topic := self._topics.get(name)) is not None
        }
        if self._at is not None:
            seconds = at - self._at
            for name, offset in offsets.items():
                before = self._offsets.get(name, offset)
                rates = self._rates.setdefault(name, deque(maxlen=KEPT_RATES))
                rates.append(max(0, offset - before) / seconds)
        for name in self._rates.keys() - offsets.keys():
            del self._rates[name]
        self._at, self._offsets = at, offsets

    def rate(self, topic: str) -> float | None:
        """Return records per second; None after a single sample."""
        rates = self._rates.get(topic)
        return rates[-1] if rates else None

    def recent(self, topic: str) -> list[float]:
        return list(self._rates.get(topic, ()))


class DiskSpace(msgspec.Struct, rename="camel"):
    free: int  # bytes
    total: int
    full_in_seconds: float | None  # None: it does not fill up, or it is not known yet


class DiskWatch:
    """How much of the disk is free, and when it will be full at the rate of the last hours, so that
    a short burst is not an alarm.
    """

    def __init__(
        self,
        directory: Path,
        *,
        usage: Usage = shutil.disk_usage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._usage, self._clock = usage, clock
        self._samples: deque[tuple[float, int]] = deque(
            maxlen=KEPT_DISK_SAMPLES
        )  # when, free bytes

    def sample(self) -> DiskSpace | None:
        """Sample the disk; None if that fails."""
        try:
            total, _, free = self._usage(self._directory)
        except OSError:
            return None
        now = self._clock()
        if not self._samples or now - self._samples[-1][0] >= DISK_SECONDS:
            self._samples.append((now, free))
        since, before = self._samples[0]
        watched, used = now - since, before - free
        known = watched >= MIN_WATCHED_SECONDS and used > 0
        return DiskSpace(free, total, free / (used / watched) if known else None)


class Holder(msgspec.Struct):
    """The owner and the age of the oldest open transaction."""

    seconds: float
    who: str


class DatabaseCard(msgspec.Struct, rename="camel"):
    up: bool
    commit_seconds: float | None = None
    oldest_transaction: Holder | None = None
    dead_rows: int | None = None
    wal_per_second: float | None = None
    messages_per_commit: float | None = None  # pushed and completed; None without any
    connections: int | None = None
    max_connections: int | None = None


DOWN = DatabaseCard(up=False)


class DatabaseWatch:
    """The time of a commit, the oldest transaction and its owner, dead rows, WAL, messages per
    commit, and connections of PostgreSQL.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._before: tuple[float, int, int, int] | None = None  # when, WAL, commits, messages

    async def sample(self, messages: int) -> DatabaseCard:
        """Sample the database. `messages` counts those pushed and completed, ever."""
        (row,) = await self._database.browse(FIGURES)
        began = time.perf_counter()
        await self._database.fetch(COMMIT)
        card = DatabaseCard(
            up=True,
            commit_seconds=time.perf_counter() - began,
            dead_rows=row["dead_rows"],
            connections=row["connections"],
            max_connections=row["max_connections"],
        )
        if row["oldest_seconds"] is not None:
            who = f"{row['oldest_who']}, pid {row['oldest_pid']}"
            card.oldest_transaction = Holder(row["oldest_seconds"], who)
        now = (time.monotonic(), row["wal"], row["commits"], messages)
        if self._before is not None:
            seconds, wal, commits, moved = (
                new - old for new, old in zip(now, self._before, strict=True)
            )
            card.wal_per_second = wal / seconds
            if commits > 0 and moved > 0:
                card.messages_per_commit = moved / commits
        self._before = now
        return card
