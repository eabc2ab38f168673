"""How much a machine takes: the figures of the page docs/how-to/sizing.md.

CPU time per message and bytes per message hardly depend on what else the machine does, so these are
what to plan with; a rate is one second divided by the CPU time, for each core. One broker, one
PostgreSQL, payloads of 128 bytes with transaction ids, sixteen partitions.

    make bench B=sizing
"""

import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from bench.harness import Figure
from bench.queues import PARTITIONS, Ground, Rounds
from bench.queues_cost import _cost

STORED = 50_000  # messages whose bytes are weighed
NEW_PARTITIONS = 5_000
IDLE_CONNECTIONS = 500
SIZE = """SELECT pg_total_relation_size('penstock.messages')"""
WAL = "SELECT pg_current_wal_insert_lsn() - '0/0'"


def figures() -> Iterator[Figure]:
    with ExitStack() as stack:
        ground = Ground(stack)
        run = ground.runner.run
        yield run(_connections(ground))
        yield from _cpu(ground)
        yield from run(_bytes(ground))
        yield run(_partitions(ground))
        yield from run(_memory(ground))


def _cpu(ground: Ground) -> Iterator[Figure]:
    rounds = Rounds(ground)
    kinds: tuple[tuple[str, Callable[[], Coroutine[Any, Any, float]]], ...] = (
        ("push, 1 per request", partial(rounds.push, 64, 1)),
        ("push, 100 per request", partial(rounds.push, 16, 100)),
        ("pop + ack, 1 per request", partial(rounds.take, 16, 1)),
        ("pop + ack, 100 per request", partial(rounds.take, 8, 100)),
    )
    for name, once in kinds:
        cost = _cost(ground, once)
        total = cost["broker"] + cost["PostgreSQL"]
        yield Figure(
            name=f"sizing: {name}, per core",
            value=1e6 / total,
            unit="messages/s",
            note=f"broker {cost['broker']:.0f} µs, PostgreSQL {cost['PostgreSQL']:.0f} µs of CPU",
        )


async def _bytes(ground: Ground) -> list[Figure]:
    connection = await asyncpg.connect(ground.broker_url)
    figures = []
    for step in (1, 100):
        count = STORED if step > 1 else STORED // 25
        await connection.execute("CHECKPOINT")
        size, wal = await connection.fetchval(SIZE), await connection.fetchval(WAL)
        await ground.fill(ground.fresh(), count, PARTITIONS, step)
        stored = (await connection.fetchval(SIZE) - size) / count
        logged = float(await connection.fetchval(WAL) - wal) / count
        if step > 1:
            figures.append(
                Figure("sizing: a stored message", stored, "bytes", note="with its indexes")
            )
        figures.append(Figure(f"sizing: WAL of a push, {step} per request", logged, "bytes"))
    queue = ground.fresh()
    await ground.fill(queue, STORED, PARTITIONS)
    wal = await connection.fetchval(WAL)
    (caller,) = await ground.callers(1)
    taken = 0
    while taken < STORED:
        taken += await ground.take(caller, queue, 100)
    logged = float(await connection.fetchval(WAL) - wal) / taken
    figures.append(Figure("sizing: WAL of pop + ack, 100 per request", logged, "bytes"))
    caller.transport.close()
    await connection.close()
    return figures


async def _partitions(ground: Ground) -> Figure:
    """What a partition costs for as long as it exists, with one message that was consumed."""
    connection = await asyncpg.connect(ground.broker_url)
    total = "SELECT pg_database_size(current_database())"
    size = await connection.fetchval(total)
    queue = ground.fresh()
    await ground.fill(queue, NEW_PARTITIONS, NEW_PARTITIONS, 1)
    grown = await connection.fetchval(total) - size
    await connection.close()
    return Figure(
        "sizing: a partition with one message",
        grown / NEW_PARTITIONS,
        "bytes",
        note=f"of {NEW_PARTITIONS}",
    )


async def _connections(ground: Ground) -> Figure:
    """Before any load: memory that was used once is used again, and would not count."""
    broker = _broker(ground)
    before = broker.memory_info().rss
    callers = await ground.callers(IDLE_CONNECTIONS)
    for caller in callers:
        await caller.ask(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    grown = broker.memory_info().rss - before
    for caller in callers:
        caller.transport.close()
    return Figure("sizing: an HTTP connection", grown / IDLE_CONNECTIONS, "bytes")


async def _memory(ground: Ground) -> list[Figure]:
    connection = await asyncpg.connect(ground.broker_url)
    held = await connection.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND pid <> pg_backend_pid()"
    )
    await connection.close()
    server = psutil.Process(ground.postgres.pid() or os.getpid())
    private = sum(_private(child.pid) for child in (server, *server.children()))
    used = _broker(ground).memory_info().rss
    return [
        Figure("sizing: the broker's memory after this load", used / 1e6, "MB"),
        Figure("sizing: database connections of a broker", held, "connections"),
        Figure("sizing: PostgreSQL's memory", private / 1e6, "MB", note="beside shared_buffers"),
    ]


def _broker(ground: Ground) -> psutil.Process:
    assert ground.broker.process is not None
    return psutil.Process(ground.broker.process.pid)


def _private(pid: int) -> int:
    """Bytes that only this process has."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
