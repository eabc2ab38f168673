"""Shared topics: appends on one broker, and how soon another broker's readers have them.

The first peer is what an application would do by hand with the same record batches: a table with an
identity and a `bytea`, one `INSERT ... RETURNING` for each batch, a connection for each that is in
flight. It has no order, no offsets without gaps, no producers and no answer to a lost connection.
Both sides get batches that are encoded already, as Kafka's clients send them, and share uvloop and
one PostgreSQL, which syncs its WAL before it answers. `payloads` is the same for payloads that the
broker encodes, which the table's side has not to do.

The other peers get single records of 300 bytes over one connection (`bench.peer`): local topics,
NATS JetStream and RabbitMQ's quorum queues, one node each.

    make bench B=shared
"""

import asyncio
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import uvloop

from bench.harness import Contest, Figure, percentile
from bench.peer import logs
from bench.peer.rounds import Match
from penstock.config.schema import DatabaseSettings, TcpServerSettings, TopicsSettings
from penstock.database import Database
from penstock.database.embedded import EmbeddedPostgres
from penstock.log.context import Instruments
from penstock.metrics import Metrics
from penstock.protocol.kafka_batch import NewRecord, encode_head, encode_records, split_batches
from penstock.queues.schema import SCHEMA
from penstock.topics.groups import Groups
from penstock.topics.shared.catalog import SharedTopics
from penstock.topics.store import TopicStore
from penstock.wire.tcp import TcpServer
from penstock.wire.tcp.server import keep_freed_memory

SIZE = 200
SECONDS = 2.0
APPENDS = 300
TABLE = """DROP TABLE IF EXISTS plain;
CREATE TABLE plain (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, data bytea NOT NULL);
ALTER TABLE plain ALTER COLUMN data SET STORAGE EXTERNAL"""
INSERT = "INSERT INTO plain (data) VALUES ($1) RETURNING id"


PEERS = (
    ("local topic, fsync before the answer", partial(logs.penstock, "group")),
    ("NATS JetStream on disk, default sync (no fsync before the answer)", logs.nats),
    ("RabbitMQ quorum queue, publisher confirms", logs.rabbitmq),
)


async def serve(directory: Path, url: str) -> None:
    """What the child process runs: a broker with shared topics, and nothing else."""
    metrics = Metrics()
    database = Database(DatabaseSettings(url=url), directory, metrics, SCHEMA)
    await database.start()
    settings = TopicsSettings(placement="shared")
    with ThreadPoolExecutor(2) as pool:
        topics = TopicStore(directory / "topics", settings, pool=pool, metrics=metrics)
        shared = topics.share(database)
        await topics.start()
        await shared.start()
        groups = Groups(directory / "groups", topics, pool=pool, metrics=metrics)
        await groups.start()
        tcp = TcpServer(TcpServerSettings(port=0), topics, groups, metrics)
        await tcp.start()
        print(json.dumps({"tcp": tcp.port, "url": url}), flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def shared(url: str) -> AsyncIterator[SharedTopics]:
    """What a broker has of shared topics."""
    keep_freed_memory()  # as a broker's TCP listener does when it starts
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


def encoded(records: int) -> bytes:
    data = encode_records([NewRecord(bytes(SIZE))] * records, [0] * records)
    return encode_head([data], records, timestamps=(0, 0)) + data


async def ours(url: str, batch: int, count: int) -> float:
    [(head, data)] = split_batches(encoded(batch))
    async with shared(url) as topics:
        log = await topics.create("bench", 1)
        await log.append_batch(head, data)
        return batch * await in_flight(count, lambda _: log.append_batch(head, data))


async def payloads(url: str, batch: int, count: int) -> float:
    values = [bytes(SIZE)] * batch
    async with shared(url) as topics:
        log = await topics.create("bench", 1)
        await log.append(values)
        return batch * await in_flight(count, lambda _: log.append(values))


async def theirs(url: str, batch: int, count: int) -> float:
    data = encoded(batch)
    connections = [await asyncpg.connect(url) for _ in range(count)]
    try:
        await connections[0].execute(TABLE)
        return batch * await in_flight(count, lambda i: connections[i].fetchval(INSERT, data))
    finally:
        await asyncio.gather(*(connection.close() for connection in connections))


async def wal_per_byte(url: str, batch: int) -> float:
    """Bytes of WAL for each byte of record batches, one call for each batch."""
    [(head, data)] = split_batches(encoded(batch))
    connection = await asyncpg.connect(url)
    try:
        async with shared(url) as topics:
            log = await topics.create(f"wal-{batch}", 1)
            await connection.execute("CHECKPOINT")
            before = await connection.fetchval("SELECT pg_current_wal_insert_lsn()")
            for _ in range(APPENDS):
                await log.append_batch(head, data)
            written = "SELECT pg_current_wal_insert_lsn() - $1::pg_lsn"
            return float(await connection.fetchval(written, before)) / (APPENDS * len(data))
    finally:
        await connection.close()


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
        for side, batch, count in (
            *((ours, batch, count) for batch in (1, 100, 1000) for count in (1, 64)),
            (payloads, 100, 64),
        ):
            yield Contest(
                f"append {'payloads, ' if side is payloads else ''}batches of {batch}, "
                f"{count} in flight",
                "records/s",
                lambda side=side, batch=batch, count=count: uvloop.run(side(url, batch, count)),  # type: ignore[misc]
                lambda batch=batch, count=count: uvloop.run(theirs(url, batch, count)),  # type: ignore[misc]
                "INSERT ... RETURNING",
                at_least=0.7 if count == 64 and side is ours else None,
                rounds=3,
            )
        appends, reads = uvloop.run(latencies(url))
        for name, values in (("append", appends), ("append to a reader elsewhere", reads)):
            yield Figure(
                f"{name}, p50",
                statistics.median(values),
                "ms",
                note=f"p99 {percentile(values, 0.99):.1f} ms",
            )
        for batch in (1, 100, 1000):
            yield Figure(
                f"WAL for each byte of record batches, batches of {batch}",
                uvloop.run(wal_per_byte(url, batch)),
                "bytes",
                note=f"{APPENDS} calls after a checkpoint, {SIZE} bytes a record",
            )
        yield from beside_others(url)


def beside_others(url: str) -> Iterator[Figure]:
    for name, peer in PEERS:
        with ExitStack() as stack:
            try:
                theirs = stack.enter_context(peer())
            except logs.Missing as error:
                print(f"  left out: {name}: {error}")
                continue
            ours = stack.enter_context(logs.producing("bench.shared", url))
            for depth in (1, 64):
                yield Match(
                    f"single records over TCP, {depth} in flight",
                    ours=partial(ours.append, depth),
                    theirs=partial(theirs.append, depth),
                    against=name,
                ).run()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(Path(sys.argv[1]), sys.argv[2]))
