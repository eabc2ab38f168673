"""Figures for people and dashboards, from counters, leases and the per-minute history."""

from collections.abc import Callable
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, Literal

import msgspec

from penstock.contract.queues import QueueCounts
from penstock.database import struct_of
from penstock.errors import NotFound
from penstock.io.tasks import slices
from penstock.queues.admin.figures import Figures, QueueFigures
from penstock.queues.catalog import info_of
from penstock.queues.context import QueueContext
from penstock.queues.schema import query
from penstock.queues.types import QueueInfo

QUEUES = query("queues")
COUNT = """SELECT count(*) FROM queues
            WHERE deleted_at IS NULL AND ($1::text IS NULL OR name = $1)
              AND ($2::text IS NULL OR namespace = $2) AND ($3::text IS NULL OR task = $3)"""
TASKS = "SELECT count(DISTINCT nullif(task, '')) FROM queues WHERE deleted_at IS NULL"
LABELLED = """
SELECT id FROM queues WHERE deleted_at IS NULL AND label IN (
  SELECT DISTINCT label COLLATE "C" FROM queues WHERE deleted_at IS NULL AND label COLLATE "C" > $1
   ORDER BY 1 LIMIT $2)"""
ROWS_PER_SLICE = 250  # a few milliseconds of work

PARTITIONS = query("queue_partitions")
RATES = query("rates")
HISTORY = query("history")
REMOVALS = query("removals")
LEASES = query("leases")
DATABASE = query("postgres_database")
OLDEST = query("postgres_oldest")
TABLES = query("postgres_tables")


class QueueFilter(msgspec.Struct, frozen=True):
    """Select queues by these fields; None: any value."""

    namespace: str | None = None
    task: str | None = None
    queue: str | None = None
    before: int | None = None  # only lower ids: the cursor of a page


class QueueStatus(msgspec.Struct):
    """A queue as configured, and its counts."""

    info: QueueInfo
    partitions: int
    counts: QueueCounts
    figures: QueueFigures


class QueueStatusPage(msgspec.Struct):
    queues: list[QueueStatus]
    next: int | None  # `QueueFilter.before` of the next page; None: this is the last


class QueueTotals(msgspec.Struct):
    """Sums over queues."""

    name: str  # the namespace or task of the queues; "" for other sums
    queues: int
    partitions: int
    counts: QueueCounts


class PartitionStatus(msgspec.Struct):
    id: str
    name: str
    created_at: datetime
    counts: QueueCounts
    batches: int
    last_activity: datetime
    oldest_message: datetime | None
    newest_message: datetime | None


class Overview(msgspec.Struct):
    """Sums over all queues."""

    queues: int
    partitions: int
    namespaces: int
    tasks: int
    messages: QueueCounts
    pushed_per_second: float
    completed_per_second: float


class HistoryPoint(msgspec.Struct):
    """What happened in one time bucket."""

    bucket: datetime
    pushed: int
    completed: int
    failed: int
    dead: int  # messages that became dead letters


class Removal(msgspec.Struct):
    """Messages that upkeep deleted from a queue (None: deleted since) in one time bucket."""

    bucket: datetime
    reason: str
    queue: str | None
    namespace: str | None
    task: str | None
    messages: int
    steps: int


class Leases(msgspec.Struct):
    """A summary of the live leases."""

    active: int
    partitions: int
    taken: int  # messages
    acked: int  # of the taken messages


class DatabaseSize(msgspec.Struct):
    version: str
    size: int
    sessions: int
    commits: int
    rollbacks: int
    deadlocks: int


class OldestTransaction(msgspec.Struct, rename="camel"):
    """The session with the oldest snapshot, which blocks vacuum."""

    pid: int
    application: str
    state: str | None
    xmin_age: int
    transaction_seconds: float | None


class TableSize(msgspec.Struct, rename="camel"):
    table: str
    live: int
    dead: int
    last_autovacuum: datetime | None
    bytes: int


class PostgresStatus(msgspec.Struct):
    """Size and sessions of the database, what blocks vacuum, and dead rows of our tables."""

    database: DatabaseSize
    oldest_transaction: OldestTransaction | None
    tables: list[TableSize]


class QueueStatusReader:
    def __init__(self, context: QueueContext, figures: Figures) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._figures = figures

    async def page(self, wanted: QueueFilter, limit: int, offset: int = 0) -> QueueStatusPage:
        """Return queues with their counts, newest first. A large page yields to the event loop."""
        rows = await self._database.browse(
            QUEUES, wanted.queue, wanted.namespace, wanted.task, wanted.before, limit, offset
        )
        ids = [row["id"] for row in rows]
        partitions = await self._catalog.partition_counts(ids)
        figures = {one.id: one for one in await self._figures.queues(ids)}
        queues = [
            QueueStatus(info_of(row), partitions.get(row["id"], 0), _counts(one), one)
            async for some in slices(rows, ROWS_PER_SLICE)
            for row in some
            if (one := figures.get(row["id"])) is not None  # None: deleted meanwhile
        ]
        return QueueStatusPage(queues, ids[-1] if ids and len(ids) == limit else None)

    async def count(self, wanted: QueueFilter) -> int:
        rows = await self._database.browse(COUNT, wanted.queue, wanted.namespace, wanted.task)
        return int(rows[0][0])

    async def queue(self, queue: str) -> QueueStatus:
        page = await self.page(QueueFilter(queue=queue), 1)
        if not page.queues:
            raise NotFound(f"Queue not found: {queue}")
        return page.queues[0]

    async def totals(
        self, wanted: QueueFilter, by: Callable[[QueueFigures], str]
    ) -> list[QueueTotals]:
        """Return sums over the wanted queues, grouped by the result of `by`."""
        figures = [
            one
            for one in await self._figures.queues()
            if wanted.queue in (None, one.name)
            and wanted.namespace in (None, one.namespace)
            and wanted.task in (None, one.task)
        ]
        return await self._sums(figures, by)

    async def labels(
        self, label: Literal["namespace", "task"], limit: int, after: str
    ) -> list[QueueTotals]:
        """Return sums by namespace or by task: a page by name. `after` is the name that ends the
        page before.
        """
        rows = await self._database.browse(LABELLED.replace("label", label), after, limit)
        return await self._sums(
            await self._figures.queues([row["id"] for row in rows]), attrgetter(label)
        )

    async def _sums(
        self, figures: list[QueueFigures], by: Callable[[QueueFigures], str]
    ) -> list[QueueTotals]:
        partitions = await self._catalog.partition_counts([one.id for one in figures])
        named: dict[str, list[QueueFigures]] = {}
        for one in figures:
            named.setdefault(by(one), []).append(one)
        sums = []
        async for names in slices(sorted(named.items()), ROWS_PER_SLICE):
            for name, queues in names:
                counts = [
                    _counts(one) async for some in slices(queues, ROWS_PER_SLICE) for one in some
                ]
                known = sum(partitions.get(one.id, 0) for one in queues)
                sums.append(QueueTotals(name, len(queues), known, total(counts)))
        return sums

    async def partitions(
        self, status: QueueStatus, limit: int = 1000, offset: int = 0, group: str | None = None
    ) -> list[PartitionStatus]:
        """Return partitions of a queue with their counts for `group`. The counts of all partitions
        add up to those of the queue.
        """
        leading = status.figures.seen_by(group)
        rows = await self._database.browse(
            PARTITIONS, status.info.id, leading.id if leading else None, limit, offset
        )
        return [self._partition(row) for row in rows]

    def _partition(self, row: Any) -> PartitionStatus:
        times = filter(None, (row["newest_message"], row["consumed_at"]))
        counts = QueueCounts(
            stored=row["stored"],
            waiting=max(row["leased"], row["stored"] - row["settled"]),
            leased=row["leased"],
            completed=row["completed"],
            failed=None,
            dead_letters=row["dead_letters"],
            dropped=None,
            scheduled=None,
        )
        return struct_of(
            PartitionStatus,
            row,
            id=self._catalog.partition_uuid(row["id"]),
            counts=counts,
            last_activity=max(times, default=row["created_at"]),
        )

    async def overview(self) -> Overview:
        namespaces = await self.totals(QueueFilter(), lambda queue: queue.namespace)
        tasks = (await self._database.browse(TASKS))[0][0]
        rates = (await self._database.browse(RATES))[0]
        return Overview(
            queues=sum(one.queues for one in namespaces),
            partitions=sum(one.partitions for one in namespaces),
            namespaces=sum(bool(one.name) for one in namespaces),
            tasks=tasks,
            messages=total([one.counts for one in namespaces]),
            pushed_per_second=rates["pushed"],
            completed_per_second=rates["completed"],
        )

    async def history(
        self,
        since: datetime,
        until: datetime,
        bucket: timedelta,
        queue: str | None = None,
        namespace: str | None = None,
        task: str | None = None,
    ) -> list[HistoryPoint]:
        rows = await self._database.browse(
            HISTORY, since, until, bucket.total_seconds(), queue, namespace, task
        )
        return [HistoryPoint(*row.values()) for row in rows]

    async def removals(
        self, since: datetime, until: datetime, bucket: timedelta, queue: str | None = None
    ) -> list[Removal]:
        rows = await self._database.browse(REMOVALS, since, until, bucket.total_seconds(), queue)
        return [Removal(*row.values()) for row in rows]

    async def leases(self) -> Leases:
        return Leases(*(await self._database.browse(LEASES))[0].values())

    async def postgres(self) -> PostgresStatus:
        database = await self._database.browse(DATABASE)
        oldest = await self._database.browse(OLDEST)
        tables = await self._database.browse(TABLES)
        return PostgresStatus(
            DatabaseSize(*database[0].values()),
            OldestTransaction(*oldest[0].values()) if oldest else None,
            [TableSize(*row.values()) for row in tables],
        )

    async def refresh(self) -> int | None:
        """Fold the log of the counters. Return the rows folded; None if another broker does it."""
        folded: int | None = (await self._database.read("SELECT queue_rollup()"))[0][0]
        return folded


def _counts(queue: QueueFigures) -> QueueCounts:
    leading = queue.leading
    leased = leading.leased if leading else 0
    return QueueCounts(
        stored=queue.stored,
        waiting=max(leased, leading.waiting if leading else queue.stored),
        leased=leased,
        completed=leading.completed if leading else 0,
        failed=queue.failed,
        dead_letters=queue.dead_letters,
        dropped=queue.dropped,
        scheduled=queue.scheduled,
    )


def total(counts: list[QueueCounts]) -> QueueCounts:
    """Return the sum of the counts of several queues."""
    names = QueueCounts.__struct_fields__
    return QueueCounts(*(sum(getattr(one, name) or 0 for one in counts) for name in names))
