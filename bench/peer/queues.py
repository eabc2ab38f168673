"""Messages through a queue: ours over HTTP, and the queues that live in PostgreSQL by their own SQL.

All on one PostgreSQL with fsync and synchronous_commit on, each with a database of its own, as many
connections on both sides, the same payload. Theirs are called through asyncpg with prepared
statements, without the libraries around them, which would only cost more. Ours has partitions,
groups, leases and deduplication, and is asked over HTTP: a hop that theirs do not have.
"""

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any, Protocol

import asyncpg

from bench.peer.packages import Package
from bench.peer.rounds import Round, cpu_of
from bench.queues import PARTITIONS, PAYLOAD, Ground

SECONDS = 1.0
TEXT = PAYLOAD.decode()
LEASE_SECONDS = 60

Work = Callable[[], Awaitable[int]]  # does one turn; how many messages


class SqlQueue(Protocol):
    """A queue by SQL: each call is what its library would send."""

    async def prepare(self, connection: Any) -> None: ...

    async def push(self, connection: Any, batch: int) -> int: ...

    async def take(self, connection: Any, batch: int) -> int:
        """Take up to so many and finish them; how many."""


class Pgmq:
    def __init__(self, package: Package) -> None:
        self.package = package

    async def prepare(self, connection: Any) -> None:
        await connection.execute("DROP SCHEMA IF EXISTS pgmq CASCADE")
        await connection.execute("CREATE SCHEMA pgmq; " + self.package.sql["schema"])
        await connection.execute("SELECT pgmq.create('bench')")

    async def push(self, connection: Any, batch: int) -> int:
        if batch == 1:
            await connection.fetch("SELECT pgmq.send('bench', $1::jsonb)", TEXT)
        else:
            await connection.fetch("SELECT pgmq.send_batch('bench', $1::jsonb[])", [TEXT] * batch)
        return batch

    async def take(self, connection: Any, batch: int) -> int:
        read = "SELECT msg_id, message FROM pgmq.read('bench', $1, $2)"
        rows = await connection.fetch(read, LEASE_SECONDS, batch)
        if len(rows) == 1:
            await connection.fetch("SELECT pgmq.delete('bench', $1::bigint)", rows[0][0])
        elif rows:
            delete = "SELECT pgmq.delete('bench', $1::bigint[])"
            await connection.fetch(delete, [row[0] for row in rows])
        return len(rows)


class Procrastinate:
    PUSH = """SELECT procrastinate_defer_jobs_v1(ARRAY(
        SELECT ROW('bench', 'task', 0, NULL, NULL, payload, NULL)::procrastinate_job_to_defer_v1
          FROM unnest($1::jsonb[]) payload))"""

    def __init__(self, package: Package) -> None:
        self.package = package
        self._worker = 0

    async def prepare(self, connection: Any) -> None:
        await connection.execute("DROP SCHEMA IF EXISTS public CASCADE; CREATE SCHEMA public")
        await connection.execute(self.package.sql["schema"])
        worker = "INSERT INTO procrastinate_workers DEFAULT VALUES RETURNING id"
        self._worker = await connection.fetchval(worker)

    async def push(self, connection: Any, batch: int) -> int:
        await connection.fetch(self.PUSH, [TEXT] * batch)
        return batch

    async def take(self, connection: Any, batch: int) -> int:
        """It fetches job by job, whatever the batch."""
        taken = 0
        fetch = "SELECT id, args FROM procrastinate_fetch_job_v2(ARRAY['bench'], $1)"
        finish = "SELECT procrastinate_finish_job_v1($1, 'succeeded', true)"
        while taken < batch:
            row = await connection.fetchrow(fetch, self._worker)
            if row is None or row[0] is None:
                break
            await connection.fetch(finish, row[0])
            taken += 1
        return taken


class Pgqueuer:
    def __init__(self, package: Package) -> None:
        self.package = package
        self._manager = uuid.uuid4()

    async def prepare(self, connection: Any) -> None:
        await connection.execute("DROP SCHEMA IF EXISTS public CASCADE; CREATE SCHEMA public")
        await connection.execute(self.package.sql["schema"])

    async def push(self, connection: Any, batch: int) -> int:
        columns = (
            [0] * batch,
            ["bench"] * batch,
            [PAYLOAD] * batch,
            [timedelta()] * batch,
            [None] * batch,
            ["null"] * batch,
        )
        await connection.fetch(self.package.sql["enqueue"], *columns)
        return batch

    async def take(self, connection: Any, batch: int) -> int:
        dequeue, heartbeat = self.package.sql["dequeue"], timedelta(seconds=LEASE_SECONDS)
        rows = await connection.fetch(dequeue, batch, ["bench"], self._manager, heartbeat)
        if rows:
            ids = [row["id"] for row in rows]
            statuses = ["successful"] * len(ids)
            await connection.execute(self.package.sql["finish"], ids, statuses, [None] * len(ids))
        return len(rows)


class Queues:
    """Rounds on one PostgreSQL; what is to be taken in a round is pushed before it, unmeasured."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._urls: dict[str, str] = {}
        self._turns = itertools.count()

    def run(self, work: Coroutine[Any, Any, Round]) -> Round:
        return self._ground.runner.run(work)

    # Ours

    async def push(self, connections: int, batch: int) -> Round:
        ground, queue = self._ground, self._ground.fresh()
        await ground.fill(queue, PARTITIONS, PARTITIONS, 1)
        callers = await ground.callers(connections)

        def worker(place: int) -> Work:
            async def work() -> int:
                tag = f"{place}-{next(self._turns)}"
                await ground.push(callers[place], queue, place % PARTITIONS, batch, tag)
                return batch

            return work

        try:
            return await self._measure([worker(place) for place in range(connections)])
        finally:
            for caller in callers:
                caller.transport.close()

    async def take(self, connections: int, batch: int, stock: int) -> Round:
        ground, queue = self._ground, self._ground.fresh()
        await ground.fill(queue, stock, PARTITIONS)
        callers = await ground.callers(connections)

        def worker(place: int) -> Work:
            return lambda: ground.take(callers[place], queue, batch)

        try:
            return await self._measure([worker(place) for place in range(connections)])
        finally:
            for caller in callers:
                caller.transport.close()

    # Theirs

    async def sql_push(self, queue: SqlQueue, connections: int, batch: int) -> Round:
        opened = await self._connect(queue, connections)
        try:
            return await self._measure([_turn(queue.push, each, batch) for each in opened])
        finally:
            await asyncio.gather(*(each.close() for each in opened))

    async def sql_take(self, queue: SqlQueue, connections: int, batch: int, stock: int) -> Round:
        opened = await self._connect(queue, connections)
        for _ in range(0, stock, 1000):
            await queue.push(opened[0], 1000)
        await opened[0].execute("ANALYZE")
        try:
            return await self._measure([_turn(queue.take, each, batch) for each in opened])
        finally:
            await asyncio.gather(*(each.close() for each in opened))

    async def _connect(self, queue: SqlQueue, count: int) -> list[Any]:
        name = type(queue).__name__.lower()
        if name not in self._urls:
            connection = await asyncpg.connect(self._ground.postgres.url)
            await connection.execute(f"CREATE DATABASE {name}")
            await connection.close()
            self._urls[name] = self._ground.postgres.url.replace("/postgres?", f"/{name}?")
        connections = [await asyncpg.connect(self._urls[name]) for _ in range(count)]
        await queue.prepare(connections[0])
        return connections

    async def _measure(self, workers: list[Work], seconds: float = SECONDS) -> Round:
        done = 0
        cpu = self._cpu()
        began = time.perf_counter()

        async def work(worker: Work) -> None:
            nonlocal done
            empty = 0
            while time.perf_counter() < began + seconds and empty < 3:
                count = await worker()
                done += count
                empty = 0 if count else empty + 1

        await asyncio.gather(*map(work, workers))
        return Round(done, time.perf_counter() - began, self._cpu() - cpu)

    def _cpu(self) -> float:
        broker, postgres = self._ground.broker.process, self._ground.postgres.pid()
        assert broker is not None
        assert postgres is not None
        return cpu_of(broker.pid, postgres)


def _turn(call: Callable[[Any, int], Awaitable[int]], connection: Any, batch: int) -> Work:
    return lambda: call(connection, batch)
