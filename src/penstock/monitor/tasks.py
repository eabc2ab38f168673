"""Work that goes on in the broker after whoever asked for it has left: requeue or purge all dead
letters that match.

A task works in the small steps of `DeadLetters`, with a pause between them, so that it takes no
more than its share. It concerns the letters that were there when it began: one that is put back
and fails again is not its business. While PostgreSQL is away it waits, and then goes on.

Tasks live in the process that owns the data directory. If that dies, the letters that were not
reached are still dead letters, and asking again does the rest.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Literal

import msgspec

from penstock.errors import NotFound, PenstockError, Unavailable
from penstock.protocol.ids import uuid7
from penstock.queues.dead import COUNTED, Which
from penstock.queues.engine import Queues

log = logging.getLogger("penstock.monitor")

STEP_GAP_SECONDS = 0.01
KEPT_TASKS = 100  # that have ended
MAX_RUNNING = 20

Kind = Literal["requeue", "purge"]


class Task(msgspec.Struct, rename="camel"):
    """A task as it stands."""

    id: str
    kind: Kind
    what: str  # the dead letters it is about, in words
    who: str
    total: int  # when it began
    exact: bool  # False: there were at least `total`
    started_at: float  # milliseconds since 1970
    done: int = 0
    state: Literal["running", "finished", "failed", "cancelled"] = "running"
    error: str | None = None
    ended_at: float | None = None


class Tasks:
    def __init__(self, queues: Queues, ended: Callable[[Task], Awaitable[None]]) -> None:
        """`ended` is called with each task that has come to an end."""
        self._queues = queues
        self._ended = ended
        self._tasks: dict[str, Task] = {}  # in the order they began
        self._running: dict[str, asyncio.Task[None]] = {}

    def all(self) -> list[Task]:
        """The newest first."""
        return list(reversed(self._tasks.values()))

    def get(self, number: str) -> Task:
        try:
            return self._tasks[number]
        except KeyError:
            raise NotFound(f"there is no task {number[:60]!r}") from None

    async def start(self, kind: Kind, which: Which, what: str, who: str) -> Task:
        if len(self._running) >= MAX_RUNNING:
            raise Unavailable(f"{MAX_RUNNING} tasks are running: wait for one, or cancel it")
        (row,) = await self._queues.database.browse("SELECT clock_timestamp() AS now")
        now = row["now"]
        mine = replace(which, until=min(which.until, now) if which.until else now)
        total = await self._queues.dead.count(mine)
        task = Task(str(uuid7()), kind, what, who, total, total < COUNTED, time.time() * 1000)
        self._tasks[task.id] = task
        for old in [one.id for one in self._tasks.values() if one.state != "running"][:-KEPT_TASKS]:
            del self._tasks[old]
        self._running[task.id] = asyncio.create_task(self._run(task, mine))
        return task

    def cancel(self, number: str) -> Task:
        """Stop after the step that is under way; what was done stays done."""
        task = self.get(number)
        if task.state == "running":
            task.state = "cancelled"
        return task

    async def stop(self) -> None:
        for running in self._running.values():
            running.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, task: Task, which: Which) -> None:
        try:
            while not await self._work(task, which):
                await self._queues.database.recovered()
            if task.state == "running":
                task.state = "finished"
        except PenstockError as error:
            task.state, task.error = "failed", str(error)
        except Exception as error:  # a bug: the task says so, and nobody waits for it for ever
            log.exception("task %s failed", task.id)
            task.state, task.error = "failed", f"internal error: {type(error).__name__}"
        finally:
            task.ended_at = time.time() * 1000
            del self._running[task.id]
        await self._ended(task)

    async def _work(self, task: Task, which: Which) -> bool:
        """Go through the letters; False when the database went away meanwhile."""
        dead = self._queues.dead
        steps: AsyncIterator[int] = (
            dead.requeue_steps(which) if task.kind == "requeue" else dead.purge_steps(which)
        )
        try:
            async for count in steps:
                task.done += count
                if task.state != "running":
                    return True
                await asyncio.sleep(STEP_GAP_SECONDS)
        except Unavailable:
            return False
        return True
