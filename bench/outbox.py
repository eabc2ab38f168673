"""What a push inside the application's own transaction costs, and how soon a consumer has it.

- `outbox.push` beside an INSERT of the application, against the same INSERT beside a plain INSERT
  into a table used as an outbox (which somebody has to poll and send). One commit each.
- How long after the commit a waiting pop of a broker has the message.
- Pushes over HTTP into the partition that a long application transaction pushes to, against the
  same without such a transaction: it keeps nobody waiting, because its pushes take their places (and
  the locks for them) at its commit.

    make bench B=outbox
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import asyncpg
import msgspec

from bench.harness import Contest, Figure, percentile
from bench.queues import PAYLOAD, Ground, _get
from penstock import outbox

CONNECTIONS = 4
SECONDS = 2.0
WAKES = 300
TABLES = """CREATE TABLE IF NOT EXISTS orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, text text);
            CREATE TABLE IF NOT EXISTS own_outbox (
              id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, queue text, partition text, payload jsonb)"""
ORDER = "INSERT INTO orders (text) VALUES ('an order')"
OWN = "INSERT INTO own_outbox (queue, partition, payload) VALUES ($1, $2, $3)"


def contests() -> Iterator[Contest]:
    with ExitStack() as stack:
        bench = Applications(Ground(stack))
        run = bench.ground.runner.run
        for connections in (1, CONNECTIONS):
            yield Contest(
                name=f"outbox: push in a transaction, {connections} connections",
                unit="transactions/s",
                ours=partial(bench.round, connections, penstock=True),
                theirs=partial(bench.round, connections, penstock=False),
                against="INSERT into a table of the application",
            )
        yield Contest(
            name="outbox: push over HTTP into the partition of a long transaction",
            unit="messages/s",
            ours=lambda: run(bench.beside(long=True)),
            theirs=lambda: run(bench.beside(long=False)),
            against="without the transaction",
            at_least=0.9,
        )


def figures() -> Iterator[Figure]:
    with ExitStack() as stack:
        bench = Applications(Ground(stack))
        waits = bench.ground.runner.run(bench.wakes())
        worst = percentile(waits, 0.99)
        yield Figure(
            name="outbox: from the commit to the waiting consumer, p99",
            value=worst,
            unit="ms",
            target="≤ 50 ms",
            met=worst <= 50,
            note=f"p50 {percentile(waits, 0.5):.1f} ms, worst {max(waits):.1f}, of {WAKES}",
        )


class Applications:
    """Connections of an application to the broker's database."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        ground.runner.run(self._prepare())

    async def _prepare(self) -> None:
        (connection,) = await self._connect(1)
        await connection.execute(TABLES)
        await connection.close()

    async def _connect(self, count: int) -> list[asyncpg.Connection]:
        return [await asyncpg.connect(self.ground.broker_url) for _ in range(count)]

    def round(self, count: int, *, penstock: bool) -> float:
        return self.ground.runner.run(self.transactions(count, penstock=penstock))

    async def transactions(self, count: int, *, penstock: bool) -> float:
        queue, done = self.ground.fresh(), 0
        await self.ground.fill(queue, count, count, 1)
        connections = await self._connect(count)
        payload = PAYLOAD.decode()
        parsed = msgspec.json.decode(PAYLOAD)
        ends = time.perf_counter() + SECONDS

        async def work(connection: asyncpg.Connection, partition: str) -> None:
            nonlocal done
            while time.perf_counter() < ends:
                async with connection.transaction():
                    await connection.execute(ORDER)
                    if penstock:
                        await outbox.push(connection, queue, parsed, partition=partition)
                    else:
                        await connection.execute(OWN, queue, partition, payload)
                done += 1

        began = time.perf_counter()
        await asyncio.gather(*(work(c, f"p{n}") for n, c in enumerate(connections)))
        took = time.perf_counter() - began
        for connection in connections:
            await connection.close()
        return done / took

    async def beside(self, *, long: bool) -> float:
        queue = self.ground.fresh()
        await self.ground.fill(queue, 1, 1)
        (connection,) = await self._connect(1)
        transaction = connection.transaction()
        if long:
            await transaction.start()
            await outbox.push(connection, queue, 1, partition="p0")
        (caller,) = await self.ground.callers(1)
        began, done = time.perf_counter(), 0
        while time.perf_counter() < began + SECONDS:
            await self.ground.push(caller, queue, 0, 1, f"b{done}")
            done += 1
        took = time.perf_counter() - began
        if long:
            await transaction.commit()
        caller.transport.close()
        await connection.close()
        return done / took

    async def wakes(self) -> list[float]:
        """Milliseconds, one per round: a consumer waits, a transaction pushes and commits."""
        queue = self.ground.fresh()
        await self.ground.fill(queue, 1, 1)
        (caller,) = await self.ground.callers(1)
        (connection,) = await self._connect(1)
        pop = f"/api/v1/pop/queue/{queue}?batch=1&autoAck=true&wait=true&timeout=60000"
        await caller.ask(_get(pop))
        waits = []
        for turn in range(WAKES):
            answered = caller.ask(_get(pop))
            await asyncio.sleep(0.02)  # it waits by then
            async with connection.transaction():
                await outbox.push(connection, queue, turn, partition="p0")
            committed = time.perf_counter()
            status, body = await answered
            waits.append(1000 * (time.perf_counter() - committed))
            if status != 200:
                raise RuntimeError(f"pop answered {status}: {body[:200]!r}")
        caller.transport.close()
        await connection.close()
        return waits
