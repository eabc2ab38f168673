"""Queues at the small end: one message at a time, low rates, and a broker at rest.

Each row has the CPU per message of broker and PostgreSQL, which says more than the rate on a machine
that others use too. The peer takes the way of pgmq on the same server in the same run: a table with
a visibility time, `UPDATE ... RETURNING` to take one and `DELETE` to complete it, a connection per
consumer, no partitions, groups, order, retries or deduplication.

    make bench B=queues_small
"""

import asyncio
import os
import shutil
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

from bench.harness import Figure, percentile
from bench.queues import PAYLOAD, Caller, Ground, _close, _popped, _post, rate
from bench.queues_cost import _clocks, _measure, _parent, _used
from tests.support.broker import ServeProcess

PARTITIONS = 256  # more than consumers: in strict order a partition serves one at a time
FILL = 30_000
ROUNDS = 3
PER_SECOND, PER_PUSH, LOW_RATE_SECONDS = 500, 10, 6.0
REST_SECONDS, WATCHED_SECONDS = 70.0, 10.0  # until unused connections are closed; and then
WORKS: list[tuple[str, int, int, str]] = [
    ("pop + ack, 1 at a time, 1 connection", 1, 1, "partition"),
    ("pop + ack, 1 at a time, 8 connections", 8, 1, "partition"),
    ("pop + ack, 1 at a time, 16 connections", 16, 1, "partition"),
    ("pop + ack, 1 at a time, 64 connections", 64, 1, "partition"),
    ("pop + ack, 1 at a time, 16 connections, ordering none", 16, 1, "none"),
    ("pop + ack, 10 at a time, 8 connections", 8, 10, "partition"),
]
PGMQ = """
DROP TABLE IF EXISTS pgmq;
CREATE TABLE pgmq (msg_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, read_ct int DEFAULT 0 NOT NULL,
  enqueued_at timestamptz DEFAULT now() NOT NULL, vt timestamptz NOT NULL, message jsonb);
CREATE INDEX ON pgmq (vt ASC)"""
READ = """
WITH cte AS (SELECT msg_id FROM pgmq WHERE vt <= clock_timestamp() ORDER BY msg_id ASC LIMIT $1 FOR UPDATE SKIP LOCKED)
UPDATE pgmq m SET vt = clock_timestamp() + interval '300 s', read_ct = read_ct + 1
  FROM cte WHERE m.msg_id = cte.msg_id RETURNING m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message"""
DELETE = "DELETE FROM pgmq WHERE msg_id = ANY ($1) RETURNING msg_id"
PEER = "pgmq's SQL"
Round = Callable[[], Coroutine[Any, Any, float]]


class Consumer:
    """The loop of a consumer: acknowledge the last batch and take the next, in one request or two."""

    def __init__(self, caller: Caller, queue: str, batch: int, *, together: bool) -> None:
        self._caller, self._together = caller, together
        self._path = f"/api/v1/pop/queue/{queue}?batch={batch}"
        self._acks: list[Any] = []

    async def turn(self) -> int:
        body = msgspec.json.encode({"acknowledgments": self._acks})
        if not self._together and self._acks:
            await self._ask(_post("/api/v1/ack/batch", body))
            body = b'{"acknowledgments":[]}'
        self._acks = _popped.decode(await self._ask(_post(self._path, body))).messages
        return len(self._acks)

    async def _ask(self, request: bytes) -> bytes:
        status, body = await self._caller.ask(request)
        if status != 200 or b'"success":false' in body:
            raise RuntimeError(f"answered {status}: {body[:300]!r}")
        return body


async def ours(ground: Ground, work: tuple[str, int, int, str], *, together: bool) -> float:
    _, connections, batch, ordering = work
    queue = ground.fresh()
    callers = await ground.callers(connections)
    options = b'{"queue":"%s","options":{"ordering":"%s"}}' % (queue.encode(), ordering.encode())
    await callers[0].ask(_post("/api/v1/configure", options))
    await ground.fill(queue, FILL, PARTITIONS if ordering == "partition" else 16, 100)
    try:
        return await rate([Consumer(c, queue, batch, together=together).turn for c in callers])
    finally:
        _close(callers)


async def theirs(ground: Ground, work: tuple[str, int, int, str]) -> float:
    _, connections, batch, _ = work
    opened = [await asyncpg.connect(ground.plain_url) for _ in range(connections)]
    await opened[0].execute(PGMQ)
    await opened[0].execute(
        "INSERT INTO pgmq (vt, message) SELECT now(), $1::text::jsonb FROM generate_series(1, $2::int)",
        PAYLOAD.decode(),
        FILL,
    )

    async def turn(connection: Any) -> int:
        rows = await connection.fetch(READ, batch)
        await connection.fetch(DELETE, [row["msg_id"] for row in rows])
        return len(rows)

    try:
        return await rate([partial(turn, connection) for connection in opened])
    finally:
        await asyncio.gather(*(connection.close() for connection in opened))


def figures() -> Iterator[Figure]:
    with ExitStack() as stack:
        ground = Ground(stack)
        for work in WORKS:
            sides: dict[str, Round] = {
                "one request": partial(ours, ground, work, together=True),
                "two requests": partial(ours, ground, work, together=False),
                PEER: partial(theirs, ground, work),
            }
            result: dict[str, list[tuple[float, dict[str, float]]]] = {side: [] for side in sides}
            for _ in range(ROUNDS):
                for side, once in sides.items():
                    result[side].append(_measure(ground, once))
            peer = statistics.median(one for one, _ in result[PEER])
            for side in ("one request", "two requests"):
                speed = statistics.median(one for one, _ in result[side])
                yield Figure(
                    f"{work[0]}, {side}",
                    speed,
                    "messages/s",
                    against=PEER,
                    against_value=peer,
                    ratio=speed / peer,
                    note=f"{_costs(result[side])}; {PEER}: {_costs(result[PEER])}",
                )
        yield from ground.runner.run(low_rate(ground))
        yield flush_time(ground.postgres.directory.resolve())
    yield from at_rest()


def _costs(rounds: list[tuple[float, dict[str, float]]]) -> str:
    least = {who: min(costs[who] for _, costs in rounds) for who in rounds[0][1]}
    return ", ".join(f"{who} {cost:.0f} us" for who, cost in least.items())


async def low_rate(ground: Ground) -> list[Figure]:
    """From the send of a push to the consumer having the message, at a steady low rate."""
    queue = ground.fresh()
    await ground.fill(queue, PER_PUSH, 1, PER_PUSH)
    pusher, consumer = await ground.callers(2)
    sent: dict[str, float] = {}
    waits: list[float] = []
    ends = time.perf_counter() + LOW_RATE_SECONDS

    async def consume() -> None:
        acks: list[Any] = []
        path = f"/api/v1/pop/queue/{queue}?batch=100&wait=true&timeout=500"
        while time.perf_counter() < ends + 1:
            body = msgspec.json.encode({"acknowledgments": acks})
            _, answer = await consumer.ask(_post(path, body))
            now = time.perf_counter()
            acks = _popped.decode(answer).messages
            waits.extend(now - sent[m.transactionId] for m in acks if m.transactionId in sent)

    async def produce() -> None:
        turn, due = 0, time.perf_counter()
        while due < ends:
            await asyncio.sleep(max(0, due - time.perf_counter()))
            now = time.perf_counter()
            sent.update((f"{turn}-{number}", now) for number in range(PER_PUSH))
            await ground.push(pusher, queue, 0, PER_PUSH, str(turn))
            turn, due = turn + 1, due + PER_PUSH / PER_SECOND

    before = _clocks(ground)
    await asyncio.gather(consume(), produce())
    after = _clocks(ground)
    _close([pusher, consumer])
    costs = {who: (after[who] - before[who]) / len(waits) for who in ("broker", "PostgreSQL")}
    note = ", ".join(f"{who} {cost:.0f} us of CPU per message" for who, cost in costs.items())
    name = f"end to end at {PER_SECOND}/s, {PER_PUSH} per push"
    total = sum(costs.values())
    return [
        Figure(f"{name}, p50", percentile(waits, 0.5) * 1000, "ms", "≤ 2.5", note=note),
        Figure(f"{name}, p99", percentile(waits, 0.99) * 1000, "ms", "≤ 8"),
        Figure(f"{name}, CPU per message", total, "µs", "≤ 200", total <= 200, note=note),
    ]


def flush_time(directory: Path) -> Figure:
    """What a commit cannot be faster than."""
    times = []
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        for _ in range(200):
            file.write(b"x" * 8192)
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return Figure("a flush of the disk, p50", statistics.median(times) * 1000, "ms")


def at_rest() -> Iterator[Figure]:
    """A broker with its own PostgreSQL that nobody asks anything."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    directory.chmod(0o755)
    # An installed package is compiled; a checkout may not be allowed to keep what was compiled.
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(directory / "compiled")}
    try:
        with ServeProcess(directory / "data", env=compiled):
            pass
        began = time.perf_counter()
        with ServeProcess(directory / "data", env=compiled) as broker:
            took = time.perf_counter() - began
            ready = next(line for line in broker.log.splitlines() if '"ready in' in line)
            note = "of it " + msgspec.json.decode(ready)["message"]
            yield Figure("second start, from the command to ready", took, "s", "< 1", note=note)
            assert broker.process is not None
            server = directory / "data" / ".penstock" / "postgres" / "data" / "postmaster.pid"
            roots = [broker.process.pid, int(server.read_text().split()[0])]
            time.sleep(REST_SECONDS)
            everyone = _family(roots)
            switches, used = _switches(everyone), sum(map(_used, everyone))
            time.sleep(WATCHED_SECONDS)
            switched = (_switches(everyone) - switches) / WATCHED_SECONDS
            share = (sum(map(_used, everyone)) - used) / WATCHED_SECONDS / 1e4
            memory = _memory(_family(roots))  # connections may have been opened meanwhile
            yield Figure("at rest: wake-ups", switched, "per s", "< 20", switched < 20)
            yield Figure("at rest: CPU", share, "% of a core", "< 0.3", share < 0.3)
            yield Figure("at rest: memory", memory, "MiB", "< 90", memory < 90)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _family(roots: list[int]) -> list[int]:
    """These processes and their children, now."""
    return [*roots, *(int(p) for p in _numbers() if _parent(int(p)) in roots)]


def _numbers() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _switches(pids: list[int]) -> int:
    """Voluntary context switches of all threads: each is a sleep that ended."""
    total = 0
    for pid in pids:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            line = next(x for x in status.read_text().splitlines() if x.startswith("voluntary"))
            total += int(line.split()[1])
    return total


def _memory(pids: list[int]) -> float:
    """MiB of the pages that these processes use, each counted once. PSS would be less where others
    (a second broker, this benchmark) share some; only root may see which pages they are.
    """
    frames: set[int] = set()
    for pid in pids:
        with suppress(ProcessLookupError, FileNotFoundError):  # it ended meanwhile
            frames |= _frames(pid)
    if frames - {0}:
        return len(frames) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return sum(map(_pss, pids)) / 1024


def _frames(pid: int) -> set[int]:
    """The numbers of the page frames that a process has mapped (proc_pid_pagemap(5))."""
    size, frames = os.sysconf("SC_PAGE_SIZE"), set()
    with Path(f"/proc/{pid}/pagemap").open("rb") as pagemap:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, end = (int(text, 16) for text in line.split()[0].split("-"))
            if end > 1 << 47:  # the kernel's own
                continue
            pagemap.seek(start // size * 8)
            entries = pagemap.read((end - start) // size * 8)
            present = (one for (one,) in struct.iter_unpack("<Q", entries) if one >> 63)
            frames |= {one & ((1 << 55) - 1) for one in present}
    return frames


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it ended meanwhile
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
