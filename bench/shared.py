"""Shared topics: appends to PostgreSQL through the log that brokers use, beside plain `INSERT`s.

Theirs is what a program of its own would do with the same record batches: a table with an identity
and a `bytea`, one `INSERT ... RETURNING` for each batch, a connection for each that is in flight.
It has no order, no offsets without gaps, no producers and no answer to a lost connection.

    make bench B=shared
"""

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg

from bench.harness import Contest, Figure, percentile
from penstock.config.schema import DatabaseSettings, TopicsSettings
from penstock.database import Database
from penstock.database.embedded import EmbeddedPostgres
from penstock.log.context import Instruments
from penstock.metrics import Metrics
from penstock.protocol.kafka_batch import NewRecord, encode_batch
from penstock.queues.schema import SCHEMA
from penstock.topics.shared.catalog import SharedTopics

SIZE = 200
SECONDS = 3.0
APPENDS = 300
TABLE = """DROP TABLE IF EXISTS plain;
CREATE TABLE plain (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, data bytea NOT NULL);
ALTER TABLE plain ALTER COLUMN data SET STORAGE EXTERNAL"""
INSERT = "INSERT INTO plain (data) VALUES ($1) RETURNING id"


@asynccontextmanager
async def shared(url: str) -> AsyncIterator[SharedTopics]:
    """What a broker has of shared topics."""
    metrics = Metrics()
    database = Database(DatabaseSettings(url=url), Path("unused"), metrics, SCHEMA)
    await database.start()
    topics = SharedTopics(database, TopicsSettings(), Instruments(metrics), metrics)
    await topics.start()
    try:
        yield topics
    finally:
        await topics.stop()
        await database.stop()


async def in_flight(count: int, work: Callable[[int], Any]) -> float:
    """How often `work` was done per second, by so many at a time."""
    done = 0
    end = time.perf_counter() + SECONDS

    async def repeat(number: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await work(number)
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(repeat(i) for i in range(count)))
    return done / (time.perf_counter() - began)


async def ours(url: str, batch: int, count: int) -> float:
    payloads = [bytes(SIZE)] * batch
    async with shared(url) as topics:
        log = await topics.create("bench", 1)
        await log.append(payloads)
        return batch * await in_flight(count, lambda _: log.append(payloads))


async def theirs(url: str, batch: int, count: int) -> float:
    data = encode_batch([NewRecord(bytes(SIZE))] * batch, 0)
    connections = [await asyncpg.connect(url) for _ in range(count)]
    try:
        await connections[0].execute(TABLE)
        return batch * await in_flight(count, lambda i: connections[i].fetchval(INSERT, data))
    finally:
        await asyncio.gather(*(connection.close() for connection in connections))


async def latencies(url: str) -> tuple[list[float], list[float]]:
    """Milliseconds of appends, and until a reader on another broker has the record."""
    appends, reads = [], []
    async with shared(url) as here, shared(url) as there:
        log = await here.create("latency", 1)
        other = await there.find("latency")
        assert other is not None
        end = other.next_offset
        for _ in range(APPENDS):
            waiting = asyncio.create_task(other.wait_for(end))
            await asyncio.sleep(0.03)  # one at a time: the notice before has been sent
            began = time.perf_counter()
            await log.append([bytes(SIZE)])
            appends.append((time.perf_counter() - began) * 1000)
            await waiting
            other.read(end)
            reads.append((time.perf_counter() - began) * 1000)
            end += 1
    return appends, reads


def contests() -> Iterator[Contest | Figure]:
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o755)
        postgres = EmbeddedPostgres(directory / "pg")
        postgres.start()
        stack.callback(postgres.stop, "immediate")
        url = postgres.url
        for batch in (1, 100, 1000):
            for count in (1, 64):
                yield Contest(
                    f"append batches of {batch}, {count} in flight",
                    "records/s",
                    lambda batch=batch, count=count: asyncio.run(ours(url, batch, count)),  # type: ignore[misc]
                    lambda batch=batch, count=count: asyncio.run(theirs(url, batch, count)),  # type: ignore[misc]
                    "INSERT ... RETURNING",
                    at_least=0.7 if count == 64 else None,
                    rounds=3,
                )
        appends, reads = asyncio.run(latencies(url))
        for name, values in (("append", appends), ("append to a reader elsewhere", reads)):
            yield Figure(
                f"{name}, p50",
                statistics.median(values),
                "ms",
                note=f"p99 {percentile(values, 0.99):.1f} ms",
            )
