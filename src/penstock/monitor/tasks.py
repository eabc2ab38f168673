"""Work that continues in a broker after its client has disconnected: requeue or purge all dead
letters that match.

A task works in the small steps of `DeadLetterStore`, with a pause between them, so that it takes no
more than its share. It works on the letters that existed when it began, not on one that is requeued
and fails again. While PostgreSQL is down, it waits.

A task is a row in PostgreSQL: its filter, its progress, the process that works on it and the time
of the last step. All brokers of a database show it, and each can cancel it: the working process
sees that at its next step. If a process dies, another one claims the row and applies the same
filter again; it no longer matches the letters that are done. A broker looks for such tasks when it
starts and when tasks are listed, and continues to look while other brokers have running tasks.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, get_args
from uuid import UUID

import asyncpg
import msgspec

from penstock.contract.dead_letters import BackgroundTask, TaskKind, TaskList, TaskState
from penstock.database.rows import struct_of
from penstock.errors import NotFound, PenstockError, Unavailable
from penstock.io.tasks import supervised
from penstock.protocol.ids import uuid7
from penstock.protocol.times import epoch_millis
from penstock.queues.admin.dead_letters import COUNTED, Which
from penstock.queues.engine import Queues

log = logging.getLogger("penstock.monitor")

STEP_GAP_SECONDS = 0.01
ABANDONED_SECONDS = 15.0  # without a step: the process that worked on it has died
KEPT_TASKS = 100
MAX_RUNNING = 20

COLUMNS = "id, kind, what, which, who, total, exact, done, state, error, started_at, ended_at"
INSERT = f"""
INSERT INTO tasks (id, kind, what, which, who, total, exact, broker)
SELECT $1, $2, $3, $4::text::jsonb, $5, $6, $7, $8
 WHERE (SELECT count(*) FROM tasks WHERE state = 'running') < $9 RETURNING {COLUMNS}"""
TRIM = """
DELETE FROM tasks WHERE state <> 'running'
   AND id NOT IN (SELECT id FROM tasks ORDER BY started_at DESC LIMIT $1)"""
ALL = f"SELECT {COLUMNS} FROM tasks ORDER BY started_at DESC, id DESC LIMIT $1"
ONE = f"SELECT {COLUMNS} FROM tasks WHERE id = $1"
ADVANCE = f"""
UPDATE tasks SET done = done + $3, seen_at = clock_timestamp()
 WHERE id = $1 AND broker = $2 RETURNING {COLUMNS}"""
END = f"""
UPDATE tasks SET state = CASE state WHEN 'running' THEN $3 ELSE state END, error = $4,
       ended_at = clock_timestamp()
 WHERE id = $1 AND broker = $2 RETURNING {COLUMNS}"""
CANCEL = f"""
UPDATE tasks SET state = 'cancelled', ended_at = clock_timestamp()
 WHERE id = $1 AND state = 'running' RETURNING {COLUMNS}"""
CLAIM = f"""
UPDATE tasks SET broker = $1, seen_at = clock_timestamp()
 WHERE id IN (SELECT id FROM tasks
               WHERE state = 'running' AND NOT (broker = $1 AND id = ANY ($3))
                 AND seen_at < clock_timestamp() - make_interval(secs => $2)
                 FOR UPDATE SKIP LOCKED)
RETURNING {COLUMNS}"""
OTHERS = (
    "SELECT count(*) FROM tasks WHERE state = 'running' AND NOT (broker = $1 AND id = ANY ($2))"
)
RELEASE = "UPDATE tasks SET seen_at = '-infinity' WHERE broker = $1 AND state = 'running'"


class Tasks:
    def __init__(
        self, queues: Queues, broker: str, ended: Callable[[BackgroundTask], Awaitable[None]]
    ) -> None:
        """`broker` is the name of this process. `ended` gets each task that it has ended."""
        self._queues = queues
        self._database = queues.database
        self._broker = broker
        self._ended = ended
        self._running: dict[UUID, asyncio.Task[None]] = {}  # those this process works on
        self._claiming: asyncio.Task[None] | None = None  # ends when no other broker has a task

    async def all(self) -> TaskList:
        tasks = [_task(row) for row in await self._database.browse(ALL, KEPT_TASKS)]
        if any(one.state == "running" and UUID(one.id) not in self._running for one in tasks):
            self.claim_abandoned()
        return TaskList(tasks)

    async def get(self, number: str) -> BackgroundTask:
        rows = await self._database.browse(ONE, _uuid(number))
        if not rows:
            raise _missing(number)
        return _task(rows[0])

    async def start(self, kind: TaskKind, which: Which, what: str, who: str) -> BackgroundTask:
        (row,) = await self._database.browse("SELECT clock_timestamp() AS now")
        now = row["now"]
        mine = replace(which, until=min(which.until, now) if which.until else now)
        total = await self._queues.dead.count(mine)
        rows = await self._database.fetch(
            INSERT,
            uuid7(),
            kind,
            what,
            msgspec.json.encode(mine).decode(),
            who,
            total,
            total < COUNTED,
            self._broker,
            MAX_RUNNING,
        )
        if not rows:
            raise Unavailable(f"{MAX_RUNNING} tasks are running: wait for one, or cancel it")
        await self._database.fetch(TRIM, KEPT_TASKS)
        self._work_on(rows[0])
        return _task(rows[0])

    async def cancel(self, number: str) -> BackgroundTask:
        """Stop after the current step. Completed steps are kept."""
        rows = await self._database.fetch(CANCEL, _uuid(number))
        return _task(rows[0]) if rows else await self.get(number)

    def claim_abandoned(self) -> None:
        """Take over tasks of dead processes, now and regularly."""
        if self._claiming is None or self._claiming.done():
            self._claiming = supervised("abandoned tasks", self._claim, self._database.metrics)

    async def stop(self) -> None:
        """Leave unfinished tasks to other processes."""
        under_way = [*self._running.values(), *([self._claiming] if self._claiming else [])]
        for one in under_way:
            one.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        if under_way and self._database.healthy:
            try:
                await self._database.fetch(RELEASE, self._broker)
            except (PenstockError, asyncpg.PostgresError) as error:
                log.warning("tasks resume in %.0f s: %s", ABANDONED_SECONDS, error)

    async def _claim(self) -> None:
        while True:
            try:
                mine = list(self._running)
                for row in await self._database.fetch(CLAIM, self._broker, ABANDONED_SECONDS, mine):
                    progress = row["id"], row["done"], row["total"]
                    log.info("task %s resumes here, at %d of %d", *progress)
                    self._work_on(row)
                (others,) = await self._database.fetch(OTHERS, self._broker, list(self._running))
                if not others[0]:
                    return
                await asyncio.sleep(ABANDONED_SECONDS)
            except Unavailable:
                await self._database.recovered()

    def _work_on(self, row: Any) -> None:
        self._running[row["id"]] = asyncio.create_task(self._run(row))

    async def _run(self, row: Any) -> None:
        number, error = row["id"], None
        try:
            try:
                while not await self._work(row):
                    await self._database.recovered()
            except PenstockError as failure:
                error = str(failure)
            except Exception as failure:  # a bug: the task ends and says so
                log.exception("task %s failed", number)
                error = f"internal error: {type(failure).__name__}"
            state = "failed" if error else "finished"
            for ended in await self._write(END, number, self._broker, state, error):
                await self._ended(_task(ended))
        finally:
            del self._running[number]

    async def _work(self, row: Any) -> bool:
        """Go through the letters; return False if the database went down."""
        which = msgspec.json.decode(row["which"], type=Which)
        dead = self._queues.dead
        steps: AsyncIterator[int] = (
            dead.requeue_steps(which) if row["kind"] == "requeue" else dead.purge_steps(which)
        )
        try:
            async for count in steps:
                rows = await self._write(ADVANCE, row["id"], self._broker, count)
                if not rows or rows[0]["state"] != "running":
                    return True  # cancelled, or another process claimed it
                await asyncio.sleep(STEP_GAP_SECONDS)
        except Unavailable:
            return False
        return True

    async def _write(self, sql: str, *args: Any) -> list[Any]:
        """Record the progress. Waits while the database is down."""
        while True:
            try:
                return await self._database.fetch(sql, *args)
            except Unavailable:
                await self._database.recovered()


def _task(row: Any) -> BackgroundTask:
    return struct_of(
        BackgroundTask,
        row,
        id=str(row["id"]),
        started_at=epoch_millis(row["started_at"]),
        state=row["state"] if row["state"] in get_args(TaskState) else "failed",
        ended_at=epoch_millis(row["ended_at"]) if row["ended_at"] else None,
    )


def _uuid(number: str) -> UUID:
    try:
        return UUID(number)
    except ValueError:
        raise _missing(number) from None


def _missing(number: str) -> NotFound:
    return NotFound(f"task {number[:60]!r} does not exist")
