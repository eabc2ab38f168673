"""The disk buffer: QoS 0 against direct pushes, failover against direct pushes, replay against one
insert per event.

All of it in one process over the real engine and a private PostgreSQL with durable settings, so
that the ratios compare paths and not network stacks. Database writes are counted as transaction ids
used: what wrote nothing uses none.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

from bench.harness import Contest, Figure, percentile
from penstock.buffer import Buffer
from penstock.config import schema
from penstock.database import Database
from penstock.database.embedded import EmbeddedPostgres
from penstock.io.fs import DISK
from penstock.metrics import Metrics
from penstock.queues.engine import Queues
from penstock.queues.schema import SCHEMA
from penstock.queues.types import Item
from tests.support import guard

PAYLOAD = b'{"order":12345,"customer":"c-6789","lines":[{"sku":"a-1","count":2},{"sku":"b-2","count":1}],"total":"99.95"}'
MANY = 16  # producers
PARTITIONS = 16


class Bench:
    """A server, an engine and a buffer on one event loop that the rounds share."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        self.directory.chmod(0o711)  # PostgreSQL's user passes through when we are root
        self.postgres = EmbeddedPostgres(self.directory / "pg")
        self.postgres.start()
        guard.watch_postgres(self.postgres.directory)
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.pool = ThreadPoolExecutor(2)
        self.number = 0
        self.run(self._start())

    def run(self, work: Awaitable[Any]) -> Any:
        async def done() -> Any:
            return await work

        return self.runner.run(done())

    async def _start(self) -> None:
        metrics = Metrics()
        self.database = Database(
            schema.DatabaseSettings(url=self.postgres.url), self.directory, metrics, SCHEMA
        )
        self.queues = Queues(self.database, schema.QueuesSettings(), metrics)
        self.buffer = Buffer(
            self.queues,
            self.database,
            schema.BufferSettings(),
            self.directory / "buffers",
            DISK,
            self.pool,
            metrics,
        )
        for part in (self.database, self.queues, self.buffer):
            await part.start()

    async def _stop(self) -> None:
        for part in (self.buffer, self.queues, self.database):
            await part.stop()

    def close(self) -> None:
        self.run(self._stop())
        self.runner.close()
        self.pool.shutdown()
        self.postgres.stop("immediate")
        shutil.rmtree(self.directory, ignore_errors=True)

    async def drained(self) -> None:
        while self.buffer.status.pending or self.buffer.qos0.busy:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    def items(self, count: int = 1) -> list[Item]:
        self.number += 1
        return [
            Item(f"bench{self.number % 4}", PAYLOAD, f"p{(self.number + n) % PARTITIONS}")
            for n in range(count)
        ]

    async def load(
        self, push: Callable[[], Awaitable[Any]], producers: int = MANY, seconds: float = 1.0
    ) -> tuple[int, float, list[float]]:
        """Closed-loop single-event pushes; how many, in what time, and the latencies."""
        latencies: list[float] = []
        end = time.monotonic() + seconds

        async def one() -> None:
            while (began := time.monotonic()) < end:
                await push()
                latencies.append(time.monotonic() - began)
                await asyncio.sleep(
                    0
                )  # a request comes from the network: between two of them the loop turns

        began = time.monotonic()
        await asyncio.gather(*(one() for _ in range(producers)))
        return len(latencies), time.monotonic() - began, latencies

    async def maintenance(self, on: bool) -> None:
        await self.buffer.maintenance.switch(push=on)

    async def writes(self) -> int:
        return int((await self.database.fetch("SELECT pg_current_xact_id()::text"))[0][0])


def contests() -> Iterator[Contest]:
    bench = Bench()
    try:
        yield _qos0_contest(bench, 1, at_least=5)
        yield _qos0_contest(bench, MANY, at_least=None)
        yield Contest(
            "failover accept",
            "events/s",
            lambda: bench.run(_failover(bench)),
            lambda: bench.run(_direct(bench)),
            "direct pushes",
            at_least=1,
            note="fsynced by group commit before the answer",
        )
        yield Contest(
            "replay",
            "events/s",
            lambda: bench.run(_replay(bench)),
            lambda: bench.run(_one_by_one(bench)),
            "one insert per event",
            at_least=5,
            rounds=3,
        )
    finally:
        bench.close()


def _qos0_contest(bench: Bench, producers: int, at_least: float | None) -> Contest:
    return Contest(
        f"QoS 0 single-event pushes, {producers} at a time",
        "events/s",
        lambda: bench.run(_qos0(bench, producers)),
        lambda: bench.run(_direct(bench, producers)),
        "direct pushes",
        at_least=at_least,
        note="closed loop; the time to commit the last batch is included",
    )


async def _direct(bench: Bench, producers: int = MANY) -> float:
    count, took, _ = await bench.load(lambda: bench.buffer.push(bench.items()), producers)
    return count / took


async def _qos0(bench: Bench, producers: int) -> float:
    began = time.monotonic()
    how = {"buffer_ms": 100, "buffer_max": 1000}
    count, _, _ = await bench.load(lambda: bench.buffer.push(bench.items(), **how), producers)
    await bench.drained()
    return count / (time.monotonic() - began)


async def _failover(bench: Bench) -> float:
    await bench.maintenance(True)
    count, took, _ = await bench.load(lambda: bench.buffer.push(bench.items()))
    await bench.maintenance(False)
    await bench.drained()
    return count / took


async def _replay(bench: Bench, events: int = 20_000) -> float:
    await bench.maintenance(True)
    for _ in range(events // 500):
        await bench.buffer.push(bench.items(500))
    began = time.monotonic()
    await bench.maintenance(False)
    await bench.drained()
    return events / (time.monotonic() - began)


async def _one_by_one(bench: Bench, events: int = 500) -> float:
    began = time.monotonic()
    for _ in range(events):
        await bench.queues.push(bench.items())
    return events / (time.monotonic() - began)


def figures() -> Iterator[Figure]:
    bench = Bench()
    try:
        direct, buffered = bench.run(_writes(bench))
        yield Figure(
            "database writes saved by QoS 0",
            100 * (1 - buffered / direct),
            "%",
            target="≥ 90 %",
            met=buffered <= direct * 0.1,
            note=f"{direct:.4f} write transactions per event directly, {buffered:.4f} with QoS 0; one producer each",
        )
        worst = bench.run(_latency(bench))
        yield Figure("failover push p99", worst * 1000, "ms", target="< 20 ms", met=worst < 0.02)
        took = bench.run(_recovery(bench))
        yield Figure("10,000 events recovered at start", took, "s", target="< 2 s", met=took < 2)
    finally:
        bench.close()


async def _writes(bench: Bench, events: int = 1000) -> tuple[float, float]:
    """Write transactions per event of one producer after the other, directly and with QoS 0."""
    collected = []
    for how in ({}, {"buffer_ms": 100, "buffer_max": 100}):
        await bench.buffer.push(bench.items(4))
        before = await bench.writes()
        for _ in range(events):
            await bench.buffer.push(bench.items(), **how)
        await bench.drained()
        collected.append((await bench.writes() - before - 1) / events)
    return collected[0], collected[1]


async def _latency(bench: Bench) -> float:
    await bench.maintenance(True)
    _, _, latencies = await bench.load(lambda: bench.buffer.push(bench.items()), seconds=2.0)
    await bench.maintenance(False)
    await bench.drained()
    return percentile(latencies, 0.99)


async def _recovery(bench: Bench, events: int = 10_000) -> float:
    """A second process's buffer, in a directory of its own, left with events and started again."""
    directory = bench.directory / "recovery"

    def another() -> Buffer:
        return Buffer(
            bench.queues,
            bench.database,
            schema.BufferSettings(),
            directory,
            DISK,
            bench.pool,
            Metrics(),
        )

    await bench.maintenance(True)
    left = another()
    await left.start()
    for _ in range(events // 500):
        await left.push(bench.items(500))
    await left.stop()
    await bench.maintenance(False)
    began = time.monotonic()
    right = another()
    await right.start()
    took = time.monotonic() - began
    assert right.status.pending == 0
    await right.stop()
    return took
