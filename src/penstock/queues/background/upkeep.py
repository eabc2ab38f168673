"""Run the periodic jobs of queues: counters, retention, eviction, ttl, purge of deleted queues.

One job, `heal`, repairs a fault that should never occur: an idle cursor that misses messages of its
group.

Every job works in steps of at most a few thousand rows, each with a commit. It finds its work
through an index (messages in commit order, cursors with work), and does not scan all partitions.
A job runs under an advisory lock; other brokers skip it while the lock is taken.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import asyncpg

from penstock.config.schema import QueuesSettings as Settings
from penstock.database import Database
from penstock.errors import Unavailable
from penstock.io.tasks import cancelled, supervised
from penstock.metrics import Metrics
from penstock.queues.admin.groups import forgotten
from penstock.queues.admin.sinks import forget_idle_sinks

log = logging.getLogger("penstock.queues")

ROLLUP_SECONDS = 5.0
HEAL_SECONDS = 5.0
CURSORS_PER_STEP = 1000
HEAL_STEPS = 5  # per run, so a million cursors take about a quarter of an hour
TIDY_SECONDS = 3600.0
HISTORY_DAYS = 7
DELIVERY_DAYS = 7
MIN_MESSAGES_PER_STEP, MESSAGES_PER_STEP = 200, 5000
TIDIED_PER_STEP = 1000  # partitions
EVICTED_PER_STEP = 500  # partitions
MAX_EVICTED = 100_000  # partitions in one run; the rest in the next
# target duration of a retention step; pushes to its partitions wait that long
STEP_SECONDS = 0.2
STEP_GAP_SECONDS = 0.01  # pause between steps, so that a long job leaves room for others

NOTED = """INSERT INTO removals AS r (minute, queue_id, reason, messages, steps)
           VALUES (date_trunc('minute', clock_timestamp()), $1, $2, $3, 1)
           ON CONFLICT (minute, queue_id, reason)
           DO UPDATE SET messages = r.messages + excluded.messages, steps = r.steps + 1"""

TIDY = "SELECT queue_tidy(clock_timestamp() - make_interval(days => $1), $2)"
FORGET_DELIVERIES = """WITH gone AS (
  DELETE FROM deliveries WHERE ctid = ANY (ARRAY(
    SELECT d.ctid FROM deliveries d WHERE d.ended_at < now() - make_interval(days => $1) LIMIT $2))
  RETURNING 1) SELECT count(*) FROM gone"""


class QueueUpkeep:
    def __init__(self, database: Database, settings: Settings, metrics: Metrics) -> None:
        self._database, self._settings = database, settings
        self._tasks: list[asyncio.Task[None]] = []
        self._removed = metrics.counter(
            "penstock_queue_removed_total",
            "Messages deleted by background cleanup, by reason",
            "reason",
        )
        for reason in ("retention", "completed", "ttl", "eviction"):
            self._removed.add(0, reason)  # exists before the first removal, for alerts
        self._healed = metrics.counter(
            "penstock_queue_cursors_healed_total",
            "Cursors of consumer groups that would have missed stored messages and were repaired",
            "queue",
        )
        self._step = MESSAGES_PER_STEP
        self._walked = (0, 0)  # partition and group of the last cursor that `heal` checked
        # (queue, reason) -> the transaction from which to continue
        self._positions: dict[tuple[int, str], str] = {}

    async def start(self) -> None:
        settings = self._settings
        jobs: list[tuple[Callable[[], Awaitable[Any]], float]] = [
            (self.roll_up, ROLLUP_SECONDS),
            (self.retain, settings.retention_interval),
            (self.evict, settings.eviction_interval),
            (self.purge, ROLLUP_SECONDS),
            (self.heal, HEAL_SECONDS),
            (self.tidy, TIDY_SECONDS),
        ]
        self._tasks = [
            supervised(
                f"queue {job.__name__}", partial(self._every, job, interval), self._database.metrics
            )
            for job, interval in jobs
        ]

    async def stop(self) -> None:
        await cancelled(*self._tasks)

    async def roll_up(self) -> None:
        await self._database.fetch("SELECT queue_rollup()")

    async def purge(self) -> int:
        """Delete the remaining rows of deleted queues and groups."""
        total = 0
        for row in await self._database.fetch(
            "SELECT group_id FROM dropped_groups ORDER BY group_id"
        ):
            async for removed in forgotten(self._database, row["group_id"]):
                total += removed
                await asyncio.sleep(STEP_GAP_SECONDS)
        while True:
            ((purged,),) = await self._database.fetch("SELECT queue_purge($1)", MESSAGES_PER_STEP)
            if not purged:
                return total
            total += purged
            await asyncio.sleep(STEP_GAP_SECONDS)

    async def heal(self) -> int:
        """Make idle cursors due that miss messages of their group. Each is a fault and is logged.

        A run checks some thousands of cursors in key order. The next run continues after them.
        """
        total = 0
        for _ in range(HEAL_STEPS):
            (row,) = await self._database.fetch(
                "SELECT * FROM queue_heal($1, $2, $3)", *self._walked, CURSORS_PER_STEP
            )
            columns = row["healed_queues"], row["healed_groups"], row["healed_partitions"]
            healed: dict[tuple[str, str], list[str]] = {}
            for queue, group, partition in zip(*columns, strict=True):
                healed.setdefault((queue, group), []).append(partition)
            for (queue, group), partitions in healed.items():
                log.warning(
                    "group '%s' of queue '%s' did not see waiting messages in %d partitions "
                    "(the first: '%s'): its cursor was at rest beside them. They are delivered "
                    "now; please report this fault",
                    *(group, queue, len(partitions), partitions[0]),
                )
                self._healed.add(len(partitions), queue)
                total += len(partitions)
            if row["last_partition"] is None:
                self._walked = (0, 0)
                break
            self._walked = row["last_partition"], row["last_group"]
            await asyncio.sleep(STEP_GAP_SECONDS)
        return total

    async def retain(self) -> int:
        """Apply `retentionSeconds` and, to consumed messages, `completedRetentionSeconds`."""
        rows = await self._database.fetch(
            """SELECT id, retention_seconds, completed_retention_seconds FROM queues
                WHERE deleted_at IS NULL AND retention_enabled
                  AND (retention_seconds > 0 OR completed_retention_seconds > 0) ORDER BY id"""
        )
        total = 0
        for queue, seconds, completed_seconds in rows:
            if seconds:
                total += await self._trim(queue, seconds, "retention")
            if completed_seconds:
                total += await self._trim(queue, completed_seconds, "completed")
        for table in ("history", "removals"):
            await self._database.fetch(
                f"DELETE FROM {table} WHERE minute < now() - make_interval(days => $1)",
                HISTORY_DAYS,
            )
        return total

    async def evict(self) -> int:
        """Delete messages that waited too long (`maxWaitTimeSeconds`) or are too old (`ttl`)."""
        rows = await self._database.fetch(
            """SELECT q.id, q.ttl, q.max_wait_time_seconds AS wait,
                      EXISTS (SELECT 1 FROM groups g WHERE g.queue_id = q.id) AS used
                 FROM queues q
                WHERE q.deleted_at IS NULL AND (q.ttl > 0 OR q.max_wait_time_seconds > 0)
                ORDER BY q.id"""
        )
        total = 0
        for row in rows:
            if row["ttl"]:
                total += await self._trim(row["id"], row["ttl"], "ttl")
            if row["wait"] and not row["used"]:
                total += await self._trim(row["id"], row["wait"], "eviction")
            if row["wait"] and row["used"]:
                total += await self._evict(row["id"], row["wait"])
        return total

    async def _evict(self, queue: int, seconds: int) -> int:
        """Find the overdue partitions once, then delete their messages in steps."""
        ((before,),) = await self._database.fetch(
            "SELECT clock_timestamp() - make_interval(secs => $1)", float(seconds)
        )
        rows = await self._database.fetch(
            "SELECT queue_overdue($1, $2, $3)", queue, before, MAX_EVICTED
        )
        numbers = sorted(row[0] for row in rows)
        total = 0
        for begin in range(0, len(numbers), EVICTED_PER_STEP):
            row = await self._locked(
                queue,
                "SELECT queue_evict($1, $2, $3) AS deleted",
                numbers[begin : begin + EVICTED_PER_STEP],
                before,
                reason="eviction",
            )
            if row is None:
                break
            total += row["deleted"]
            await asyncio.sleep(STEP_GAP_SECONDS)
        return total

    async def tidy(self) -> None:
        """Delete partitions that were empty for `partition_cleanup_days`, idle sinks, old
        deliveries, and SQL functions of releases that are not in use.
        """
        await self._database.drop_unused_functions()
        await forget_idle_sinks(self._database, self._settings.sink_expiry)
        for sql, days, rows in (
            (FORGET_DELIVERIES, DELIVERY_DAYS, MESSAGES_PER_STEP),
            (TIDY, self._settings.partition_cleanup_days, TIDIED_PER_STEP),
        ):
            done = 1
            while done:
                ((done,),) = await self._database.fetch(sql, days, rows)
                await asyncio.sleep(STEP_GAP_SECONDS)

    async def _trim(self, queue: int, seconds: int, reason: str) -> int:
        total = 0
        key = (queue, reason)
        if random.random() < 0.05:
            # sometimes start again: a transaction may have been committed late
            self._positions.pop(key, None)
        while True:
            began = time.monotonic()
            row = await self._locked(
                queue,
                """SELECT deleted, reached::text, more
                     FROM queue_trim($1, clock_timestamp() - make_interval(secs => $2), $3,
                                     $4::text::xid8, $5)""",
                float(seconds),
                reason == "completed",
                self._positions.get(key, "0"),
                self._step,
                reason=reason,
            )
            if row is None:
                return total
            step = int(self._step * STEP_SECONDS / (time.monotonic() - began + 0.001))
            self._step = min(max(step, MIN_MESSAGES_PER_STEP), MESSAGES_PER_STEP)
            total += int(row["deleted"])
            if not row["more"]:
                self._positions.pop(key, None)
                return total
            self._positions[key] = row["reached"]
            await asyncio.sleep(STEP_GAP_SECONDS)

    async def _locked(self, queue: int, sql: str, *args: Any, reason: str) -> Any:
        """Run one step of a job on a queue. Returns None if another broker holds the lock."""
        async with self._database.connection() as connection, connection.transaction():
            if not await connection.fetchval(
                "SELECT pg_try_advisory_xact_lock(1885695603, $1)", queue
            ):
                return None
            row = await connection.fetchrow(sql, queue, *args)
            if row["deleted"]:
                await connection.execute(NOTED, queue, reason, row["deleted"])
        self._removed.add(row["deleted"], reason)
        return row

    async def _every(self, job: Callable[[], Awaitable[Any]], interval: float) -> None:
        while True:
            await asyncio.sleep(interval * random.uniform(0.9, 1.1))
            try:
                await job()
            except Unavailable:
                continue
            except asyncpg.PostgresError as error:
                log.warning(
                    "%s failed and is tried again in %.0f s: %s", job.__name__, interval, error
                )
