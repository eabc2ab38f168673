"""The queue engine against a plain queue table, on one embedded PostgreSQL with durable settings.

The plain queue is what people write first: `INSERT` per message, `SELECT ... FOR UPDATE SKIP LOCKED
LIMIT 1` and `DELETE` to take one, through an asyncpg pool of the same size. A request of 100 is 100
of these statements, in one transaction for pushes. For honesty the same table is also measured with
its statements batched by hand (`executemany`, `LIMIT 100`), without a target: it keeps no order,
groups, leases, retries, dedupe or dead letters.

PENSTOCK_BENCH_HISTORY sets how many consumed messages the history figure piles up (default
1,000,000).
"""

import asyncio
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import uvloop

from bench.harness import Contest, Figure, percentile
from penstock.config import schema
from penstock.database import Database
from penstock.database.embedded import EmbeddedPostgres
from penstock.metrics import Metrics
from penstock.queues import Ack, Item, PopRequest, Queues
from penstock.queues.schema import SCHEMA
from tests.support import guard

PAYLOAD = b'{"order":12345,"customer":"c-1","amount":99.5,"note":"' + b"x" * 60 + b'"}'
SECONDS = 2.0
TO_TAKE = 150_000  # messages there are in a round of taking
HISTORY = int(os.environ.get("PENSTOCK_BENCH_HISTORY", "1000000"))
PLAIN = """CREATE TABLE IF NOT EXISTS plain (id bigserial PRIMARY KEY, queue text, payload bytea,
                                            created_at timestamptz NOT NULL DEFAULT now())"""


class Stage:
    """One server, one engine and one plain pool, on one event loop."""

    def __init__(self, server: EmbeddedPostgres, runner: asyncio.Runner) -> None:
        self.server, self.runner = server, runner
        self.numbers = itertools.count()

    async def start(self) -> None:
        metrics = Metrics()
        self.database = Database(
            schema.DatabaseSettings(url=self.server.url), Path("/nonexistent"), metrics, SCHEMA
        )
        await self.database.start()
        self.queues = Queues(self.database, schema.QueuesSettings(), metrics)
        await self.queues.start()
        self.pool = await asyncpg.create_pool(self.server.url, min_size=8, max_size=8)
        await self.pool.execute(PLAIN)

    async def stop(self) -> None:
        await self.queues.stop()
        await self.database.stop()
        await self.pool.close()

    def rate(self, workers: int, step: Callable[[int], Awaitable[int]]) -> Callable[[], float]:
        """A round: that many workers repeat a step for a while, or until nothing is left; messages
        per second.
        """

        async def round_() -> float:
            begin = last = time.perf_counter()
            done = 0

            async def work(number: int) -> None:
                nonlocal done, last
                empty = 0
                while time.perf_counter() < begin + SECONDS and empty < 3:
                    count = await step(number)  # apart from the sum, which others add to meanwhile
                    if count:
                        done, last, empty = done + count, time.perf_counter(), 0
                    else:
                        empty += 1

            await asyncio.gather(*(work(number) for number in range(workers)))
            return done / (last - begin)

        return lambda: self.runner.run(round_())

    def items(self, queue: str, count: int, partition: str) -> list[Item]:
        return [Item(queue, PAYLOAD, partition, f"t-{next(self.numbers)}") for _ in range(count)]

    def push(self, count: int) -> Callable[[int], Awaitable[int]]:
        async def step(number: int) -> int:
            return len(await self.queues.push(self.items("pushed", count, f"p{number % 10}")))

        return step

    def plain_push(self, count: int) -> Callable[[int], Awaitable[int]]:
        async def step(_: int) -> int:
            if count == 1:
                await self.pool.execute(
                    "INSERT INTO plain (queue, payload) VALUES ($1, $2)", "q", PAYLOAD
                )
                return 1
            async with self.pool.acquire() as connection, connection.transaction():
                insert = await connection.prepare(
                    "INSERT INTO plain (queue, payload) VALUES ($1, $2)"
                )
                for _ in range(count):
                    await insert.fetch("q", PAYLOAD)
            return count

        return step

    async def batched_push(self, _: int) -> int:
        await self.pool.executemany(
            "INSERT INTO plain (queue, payload) VALUES ($1, $2)", [("q", PAYLOAD)] * 100
        )
        return 100

    def fill(self, queue: str, count: int, partitions: int = 16) -> None:
        async def push() -> None:
            for _ in range(0, count, 2000):
                await self.queues.push(
                    [
                        Item(queue, PAYLOAD, f"p{n % partitions}", f"t-{next(self.numbers)}")
                        for n in range(2000)
                    ]
                )

        self.runner.run(push())

    def fill_plain(self, count: int) -> None:
        self.runner.run(
            self.pool.execute(
                "INSERT INTO plain (queue, payload) SELECT 'q', $1 FROM generate_series(1, $2::int)",
                PAYLOAD,
                count,
            )
        )

    def pop_and_ack(
        self, queue: str, batch: int, wait: bool = True
    ) -> Callable[[int], Awaitable[int]]:
        async def step(_: int) -> int:
            popped = await self.queues.pop(
                PopRequest(queue=queue, batch=batch, wait=wait, timeout=1)
            )
            acks = [Ack(m.transaction_id, m.partition_id, m.lease_id) for m in popped.messages]
            return len(await self.queues.ack(acks))

        return step

    def taking(self, batch: int) -> Callable[[], float]:
        """A round of pop and ack on a queue filled for it."""

        def round_() -> float:
            queue = f"full {next(self.numbers)}"
            self.fill(queue, TO_TAKE)
            return self.rate(8, self.pop_and_ack(queue, batch, wait=False))()

        return round_

    def plain_taking(self, batch: int) -> Callable[[], float]:
        def round_() -> float:
            self.runner.run(self.pool.execute("TRUNCATE plain"))
            self.fill_plain(TO_TAKE)
            return self.rate(8, self.plain_take(batch))()

        return round_

    def plain_take(self, count: int) -> Callable[[int], Awaitable[int]]:
        async def step(_: int) -> int:
            async with self.pool.acquire() as connection, connection.transaction():
                rows = await connection.fetch(
                    "SELECT id, payload FROM plain ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED",
                    count,
                )
                await connection.execute(
                    "DELETE FROM plain WHERE id = ANY ($1)", [row["id"] for row in rows]
                )
            return len(rows)

        return step


@contextmanager
def stage() -> Iterator[Stage]:
    directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    server = EmbeddedPostgres(directory)
    server.start()
    guard.watch_postgres(server.directory)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            made = Stage(server, runner)
            runner.run(made.start())
            yield made
            runner.run(made.stop())
    finally:
        server.stop("immediate")
        shutil.rmtree(directory, ignore_errors=True)


def contests() -> Iterator[Contest]:
    with stage() as s:
        rate = "messages/s"
        plain = "plain table, a statement per message"
        batched = "plain table, batched by hand"
        yield Contest(
            "push, 1 per call, 64 callers",
            rate,
            s.rate(64, s.push(1)),
            s.rate(64, s.plain_push(1)),
            plain,
            4,
        )
        yield Contest(
            "push, 100 per call, 16 callers",
            rate,
            s.rate(16, s.push(100)),
            s.rate(16, s.plain_push(100)),
            plain,
            2,
        )
        yield Contest(
            "push, 100 per call, 16 callers",
            rate,
            s.rate(16, s.push(100)),
            s.rate(16, s.batched_push),
            batched,
        )
        yield Contest(
            "push, 1000 per call, 4 callers",
            rate,
            s.rate(4, s.push(1000)),
            s.rate(4, s.batched_push),
            batched,
        )
        yield Contest(
            "pop + ack, batches of 100", rate, s.taking(100), s.plain_taking(1), plain, 4, rounds=3
        )
        yield Contest(
            "pop + ack, batches of 100", rate, s.taking(100), s.plain_taking(100), batched, rounds=3
        )

        async def through(number: int) -> int:
            await s.queues.push(s.items("through", 100, f"p{number}"))
            return await s.pop_and_ack("through", 100)(number)

        async def plain_through(number: int) -> int:
            await s.plain_push(100)(number)
            for _ in range(100):
                await s.plain_take(1)(number)
            return 100

        yield Contest(
            "end to end, 100", rate, s.rate(8, through), s.rate(8, plain_through), plain, 3
        )


def figures() -> Iterator[Figure]:
    with stage() as s:
        yield s.runner.run(_latency(s))
        yield s.runner.run(_partitions(s))
        yield s.runner.run(_history(s))
        yield s.runner.run(_held_back(s))


async def _latency(s: Stage) -> Figure:
    """From the answer of the push to the waiting consumer having the message."""
    waits = []
    await s.queues.push(s.items("latency", 1, "p"))
    await s.pop_and_ack("latency", 1)(0)
    for _ in range(300):
        waiting = asyncio.ensure_future(
            s.queues.pop(PopRequest(queue="latency", wait=True, timeout=10))
        )
        await asyncio.sleep(0.005)
        await s.queues.push(s.items("latency", 1, "p"))
        began = time.perf_counter()
        popped = await waiting
        waits.append((time.perf_counter() - began) * 1000)
        await s.queues.ack(
            [Ack(m.transaction_id, m.partition_id, m.lease_id) for m in popped.messages]
        )
    middle, slow = percentile(waits, 0.5), percentile(waits, 0.99)
    return Figure(
        "wake-up of a waiting pop, p50",
        middle,
        "ms",
        "p50 < 5, p99 < 20",
        middle < 5 and slow < 20,
        note=f"p99 {slow:.1f} ms",
    )


async def _cost(s: Stage, queue: str, pops: int = 60) -> float:
    """Median milliseconds of a pop of 10."""
    costs = []
    for _ in range(pops):
        began = time.perf_counter()
        popped = await s.queues.pop(PopRequest(queue=queue, batch=10))
        costs.append((time.perf_counter() - began) * 1000)
        await s.queues.ack(
            [Ack(m.transaction_id, m.partition_id, m.lease_id) for m in popped.messages]
        )
    return statistics.median(costs)


async def _partitions(s: Stage) -> Figure:
    for queue, partitions in (("few", 10), ("many", 10_000)):
        for start in range(0, partitions, 1000):
            names = [f"p{n}" for n in range(start, min(start + 1000, partitions))]
            await s.queues.push([Item(queue, PAYLOAD, name) for name in names])
        while (
            await s.queues.pop(PopRequest(queue=queue, batch=2000, partitions=2000, auto_ack=True))
        ).messages:
            pass
        for _ in range(8):
            await s.queues.push(
                [
                    Item(queue, PAYLOAD, f"p{n * partitions // 10}")
                    for n in range(10)
                    for _ in range(100)
                ]
            )
    rounds = [(await _cost(s, "few"), await _cost(s, "many")) for _ in range(7)]
    ratio = statistics.median(many / few for few, many in rounds)
    few, many = (statistics.median(column) for column in zip(*rounds, strict=True))
    return Figure(
        "a pop with 10,000 partitions against 10",
        ratio,
        "x",
        "≤ 1.5",
        ratio <= 1.5,
        note=f"{few:.2f} and {many:.2f} ms",
    )


async def _history(s: Stage) -> Figure:
    for queue, consumed in (("short", 10_000), ("long", HISTORY)):
        await s.queues.push([Item(queue, PAYLOAD, f"p{n}") for n in range(10)])
        partitions = [s.queues.catalog.partitions[queue, f"p{n}"] for n in range(10)]
        await s.pool.execute(
            """INSERT INTO penstock.messages (partition_id, seq, created_at, queue_id, transaction_id, payload)
               SELECT p.id, n + 1, now(), p.queue_id, 'h' || n, $2
                 FROM penstock.partitions p, generate_series(1, $3::int) n
                WHERE p.id = ANY ($1::bigint[])""",
            partitions,
            PAYLOAD,
            consumed // 10,
            timeout=600,
        )
        await s.queues.pop(PopRequest(queue=queue))
        await s.queues.groups.seek("__QUEUE_MODE__", queue)
        for _ in range(8):
            await s.queues.push(
                [Item(queue, PAYLOAD, f"p{n}") for n in range(10) for _ in range(100)]
            )
    await s.pool.execute("VACUUM ANALYZE penstock.messages", timeout=600)
    rounds = [(await _cost(s, "short"), await _cost(s, "long")) for _ in range(7)]
    ratio = statistics.median(long / short for short, long in rounds)
    short, long = (statistics.median(column) for column in zip(*rounds, strict=True))
    name = f"a pop after {HISTORY:,} consumed messages against 10,000"
    return Figure(name, ratio, "x", "≤ 1.2", ratio <= 1.2, note=f"{short:.2f} and {long:.2f} ms")


async def _held_back(s: Stage) -> Figure:
    """Throughput while another session's open transaction stops vacuum, against without, in
    alternation.
    """

    async def round_() -> float:
        done, end = 0, time.perf_counter() + 4
        began = time.perf_counter()

        async def one(number: int) -> None:
            nonlocal done
            while time.perf_counter() < end:
                await s.queues.push(s.items("held", 50, f"p{number}"))
                count = await s.pop_and_ack("held", 50)(number)
                done += count

        await asyncio.gather(*(one(number) for number in range(6)))
        return done / (time.perf_counter() - began)

    await round_()
    ratios = []
    for _ in range(5):
        free = await round_()
        async with s.pool.acquire() as holder:
            transaction = holder.transaction()
            await transaction.start()
            await holder.execute("SELECT pg_current_xact_id()")
            held = await round_()
            await transaction.rollback()
        ratios.append(held / free)
    ratio = statistics.median(ratios)
    rows = await s.pool.fetch(
        "SELECT relname, n_dead_tup FROM pg_stat_user_tables WHERE relname IN ('cursors', 'leases')"
    )
    note = ", ".join(f"{row['relname']} {row['n_dead_tup']} dead rows" for row in rows)
    return Figure(
        "throughput while xmin is held back",
        ratio,
        "x",
        "≥ 0.9",
        ratio >= 0.9,
        note=note,
        detail={"ratios": ratios},
    )


def main() -> Any:
    """Only for profiling by hand: python -m bench.queues_engine."""
    for contest in contests():
        print(contest.run(1))


if __name__ == "__main__":
    main()
