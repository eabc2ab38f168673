"""Queues over HTTP, the broker and its PostgreSQL on the same cores, against a plain table used as
a queue.

The peer is what a person writes first: `INSERT`, `SELECT ... FOR UPDATE SKIP LOCKED`, `DELETE`,
through asyncpg, on the same server with the same durable settings (fsync and synchronous_commit on)
and as many connections, a statement per message; and once more with its statements batched by hand.
It has no partitions, groups, leases, retries or deduplication. Ours is asked over HTTP by callers
in this process, and every message carries a transaction id, as the published clients send it.

    make bench B=queues           PENSTOCK_BENCH_CONSUMED=1000000 shortens the preparation of the last figure
"""

import asyncio
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import uvloop

from bench.harness import Contest, Figure, percentile
from penstock.database.embedded import EmbeddedPostgres
from tests.support import guard
from tests.support.broker import ServeProcess

PAYLOAD = b'{"order":12345678,"customer":"c-1024","amount":99.95,"note":"' + b"x" * 60 + b'"}'
SECONDS = 2.0
PARTITIONS = 16
CONSUMED = int(os.environ.get("PENSTOCK_BENCH_CONSUMED", "5000000"))
FILL = 120_000  # messages there are to take in a round of taking

PLAIN = """
DROP TABLE IF EXISTS plain;
CREATE TABLE plain (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload jsonb NOT NULL)"""


class Caller(asyncio.Protocol):
    """One HTTP connection that asks one thing at a time; cheaper than a client."""

    def __init__(self) -> None:
        self._answered: Callable[[int, bytes], None] | None = None
        self._data = b""
        self._need = -1

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None:
            self._answered(0, f"the broker closed a connection: {error}".encode())

    def ask(self, request: bytes) -> "asyncio.Future[tuple[int, bytes]]":
        future: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.tell(request, lambda status, body: future.set_result((status, body)))
        return future

    def tell(self, request: bytes, answered: Callable[[int, bytes], None]) -> None:
        self._answered = answered
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        data = self._data = self._data + data if self._data else data
        if self._need < 0:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                return
            at = data.find(b"ontent-Length: ", 0, end)
            self._body = end + 4
            self._need = self._body + (int(data[at + 15 : data.index(b"\r", at)]) if at > 0 else 0)
        if len(data) >= self._need:
            answered, self._answered = self._answered, None
            status, body = int(data[9:12]), data[self._body : self._need]
            self._data, self._need = b"", -1
            assert answered is not None
            answered(status, body)


class _Seen(msgspec.Struct):
    transactionId: str  # noqa: N815
    partitionId: str  # noqa: N815
    leaseId: str  # noqa: N815


class _Popped(msgspec.Struct):
    messages: list[_Seen]


_popped = msgspec.json.Decoder(_Popped)


class Ground:
    """A PostgreSQL, a broker on it and a database for the plain table, for as long as the benchmark
    runs.
    """

    def __init__(self, stack: ExitStack) -> None:
        directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o755)
        self.postgres = EmbeddedPostgres(directory / "pg")
        self.postgres.start()
        guard.watch_postgres(self.postgres.directory)
        stack.callback(self.postgres.stop, "immediate")
        self.runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        self.plain_url = self.runner.run(self.database("plain"))
        self.broker_url = self.runner.run(self.database("broker"))
        self.broker = stack.enter_context(
            ServeProcess(directory / "data", database_url=self.broker_url)
        )
        self.port = int(self.broker.url.rpartition(":")[2])
        self.number = 0

    async def database(self, name: str) -> str:
        connection = await asyncpg.connect(self.postgres.url)
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()
        return self.postgres.url.replace("/postgres?", f"/{name}?")

    def fresh(self) -> str:
        self.number += 1
        return f"bench-{self.number}"

    # -- ours
    # ---------------------------------------------------------------------------------------------------------

    async def callers(self, count: int) -> list[Caller]:
        loop = asyncio.get_running_loop()
        return [
            (await loop.create_connection(Caller, "127.0.0.1", self.port))[1] for _ in range(count)
        ]

    def push_request(self, queue: str, partition: int, count: int, tag: str) -> bytes:
        items = [
            b'{"queue":"%s","partition":"p%d","payload":%s,"transactionId":"%s-%d"}'
            % (queue.encode(), partition, PAYLOAD, tag.encode(), number)
            for number in range(count)
        ]
        return _post("/api/v1/push", b'{"items":[%s]}' % b",".join(items))

    async def push(self, caller: Caller, queue: str, partition: int, count: int, tag: str) -> None:
        status, body = await caller.ask(self.push_request(queue, partition, count, tag))
        if status != 201:
            raise RuntimeError(f"push answered {status}: {body[:200]!r}")

    async def take(self, caller: Caller, queue: str, batch: int, more: str = "") -> int:
        """Pop a batch and acknowledge it; how many."""
        status, body = await caller.ask(_get(f"/api/v1/pop/queue/{queue}?batch={batch}{more}"))
        if status == 204:
            return 0
        count = body.count(b'"leaseId":') - 1
        status, body = await caller.ask(_ack(body))
        if status != 200 or b'"success":false' in body:
            raise RuntimeError(f"ack answered {status}: {body[:300]!r}")
        return count

    async def fill(self, queue: str, count: int, partitions: int, step: int = 1000) -> None:
        callers = await self.callers(4)
        left = [(place, min(step, count - place)) for place in range(0, count, step)]

        async def work(caller: Caller) -> None:
            while left:
                place, some = left.pop()
                await self.push(caller, queue, place // step % partitions, some, f"f{place}")

        await asyncio.gather(*map(work, callers))
        _close(callers)

    # -- the plain table
    # ----------------------------------------------------------------------------------------------

    async def plain(self, count: int) -> list[Any]:
        connections = [await asyncpg.connect(self.plain_url) for _ in range(count)]
        await connections[0].execute(PLAIN)
        return connections

    async def plain_fill(self, count: int) -> None:
        connection = await asyncpg.connect(self.plain_url)
        await connection.execute(
            "INSERT INTO plain (payload) SELECT $1::text::jsonb FROM generate_series(1, $2::int)",
            PAYLOAD.decode(),
            count,
        )
        await connection.close()


async def plain_take(connection: Any, batch: int) -> int:
    async with connection.transaction():
        rows = await connection.fetch(
            "SELECT id, payload FROM plain ORDER BY id FOR UPDATE SKIP LOCKED LIMIT $1", batch
        )
        if rows:
            await connection.execute(
                "DELETE FROM plain WHERE id = ANY ($1)", [row["id"] for row in rows]
            )
    return len(rows)


async def plain_push(connection: Any, batch: int, *, one_by_one: bool) -> None:
    if batch == 1:
        await connection.execute("INSERT INTO plain (payload) VALUES ($1)", PAYLOAD.decode())
    elif one_by_one:
        async with connection.transaction():
            for _ in range(batch):
                await connection.execute(
                    "INSERT INTO plain (payload) VALUES ($1)", PAYLOAD.decode()
                )
    else:
        await connection.executemany(
            "INSERT INTO plain (payload) VALUES ($1)", [(PAYLOAD.decode(),)] * batch
        )


def meter() -> None:
    """Called when the part of a round that counts begins and when it ends; `queues_cost` reads
    clocks here.
    """


async def rate(workers: list[Callable[[], Awaitable[int]]], seconds: float = SECONDS) -> float:
    """What the workers, each called again and again, get done per second; they stop early when
    nothing is left.
    """
    done = 0
    ends = time.perf_counter() + seconds

    async def work(worker: Callable[[], Awaitable[int]]) -> None:
        nonlocal done
        empty = 0
        while time.perf_counter() < ends and empty < 3:
            count = await worker()
            done += count
            empty = 0 if count else empty + 1

    meter()
    began = time.perf_counter()
    await asyncio.gather(*map(work, workers))
    took = time.perf_counter() - began
    meter()
    return done / took


async def produce(
    ground: Ground,
    callers: list[Caller],
    queue: str,
    batch: int,
    seconds: float = SECONDS,
    turn: int = 0,
) -> float:
    """Messages pushed per second when each caller pushes again as soon as it is answered. The
    requests are prepared: a generator that shares the cores with what it measures should cost
    little. `turn`: of the first request; those of another call to the same queue must be others.
    """
    finished = asyncio.get_running_loop().create_future()
    done, busy = 0, len(callers)
    meter()
    began = time.perf_counter()

    def start(caller: Caller, place: int) -> None:
        mark = b"@@@@@@@@@@@@"
        prepared = ground.push_request(queue, place % PARTITIONS, batch, mark.decode())
        turns = itertools.count(turn)

        def go() -> None:
            caller.tell(prepared.replace(mark, b"%03d-%08d" % (place, next(turns))), answered)

        def answered(status: int, body: bytes) -> None:
            nonlocal done, busy
            if status != 201:
                finished.set_exception(RuntimeError(f"push answered {status}: {body[:200]!r}"))
                return
            done += batch
            if time.perf_counter() < began + seconds:
                go()
                return
            busy -= 1
            if not busy:
                finished.set_result(None)

        go()

    for place, caller in enumerate(callers):
        start(caller, place)
    await finished
    took = time.perf_counter() - began
    meter()
    return done / took


PLAINLY, BATCHED = "plain table, a statement per message", "plain table, batched by hand"


class Rounds:
    """One round of each contest, ours and theirs."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    def contest(
        self, name: str, ours: Any, theirs: Any, at_least: float | None, against: str = PLAINLY
    ) -> Contest:
        run = self.ground.runner.run
        return Contest(
            name=name,
            unit="messages/s",
            ours=lambda: run(ours()),
            theirs=lambda: run(theirs()),
            against=against,
            at_least=at_least,
            rounds=3,
        )

    async def push(self, connections: int, batch: int, seconds: float = SECONDS) -> float:
        ground, queue = self.ground, self.ground.fresh()
        await ground.fill(queue, PARTITIONS, PARTITIONS, 1)
        callers = await ground.callers(connections)
        try:
            return await produce(ground, callers, queue, batch, seconds)
        finally:
            _close(callers)

    async def plain_push(self, connections: int, batch: int, *, one_by_one: bool = True) -> float:
        opened = await self.ground.plain(connections)
        try:
            return await rate([_plain_pusher(c, batch, one_by_one) for c in opened])
        finally:
            await asyncio.gather(*(connection.close() for connection in opened))

    async def take(self, connections: int, batch: int) -> float:
        ground, queue = self.ground, self.ground.fresh()
        await ground.fill(queue, FILL, PARTITIONS)
        callers = await ground.callers(connections)
        try:
            return await rate([partial(ground.take, c, queue, batch) for c in callers])
        finally:
            _close(callers)

    async def plain_take(self, connections: int, batch: int) -> float:
        opened = await self.ground.plain(connections)
        await self.ground.plain_fill(FILL)
        try:
            return await rate([partial(plain_take, c, batch) for c in opened])
        finally:
            await asyncio.gather(*(connection.close() for connection in opened))

    async def end_to_end(self, connections: int, batch: int) -> float:
        ground, queue = self.ground, self.ground.fresh()
        await ground.fill(queue, PARTITIONS, PARTITIONS, 1)
        pushing, taking = await ground.callers(connections), await ground.callers(connections)
        waiting = "&wait=true&timeout=50"  # the plain table has to be asked again and again
        consumers = [_patient(partial(ground.take, c, queue, batch, waiting)) for c in taking]
        try:
            _, taken = await asyncio.gather(produce(ground, pushing, queue, batch), rate(consumers))
            return taken
        finally:
            _close([*pushing, *taking])

    async def plain_end_to_end(
        self, connections: int, batch: int, *, one_by_one: bool = True
    ) -> float:
        opened = await self.ground.plain(2 * connections)
        producers = [_plain_pusher(c, batch, one_by_one) for c in opened[:connections]]
        at_once = 1 if one_by_one else batch
        consumers = [_patient(partial(plain_take, c, at_once)) for c in opened[connections:]]
        try:
            _, taken = await asyncio.gather(rate(producers), rate(consumers))
            return taken
        finally:
            await asyncio.gather(*(connection.close() for connection in opened))

    # -- figures without a peer
    # ---------------------------------------------------------------------------------------

    async def latencies(self, count: int = 300) -> list[float]:
        """Seconds from the answer to a push until the waiting consumer has the message."""
        ground, queue = self.ground, self.ground.fresh()
        producer, consumer = await ground.callers(2)
        await ground.push(producer, queue, 0, 1, "first")
        await ground.take(consumer, queue, 1)
        collected: list[float] = []
        for turn in range(count):
            waiting = consumer.ask(_get(f"/api/v1/pop/queue/{queue}?wait=true&timeout=10000"))
            await asyncio.sleep(0.01)
            await ground.push(producer, queue, 0, 1, f"l{turn}")
            pushed = time.perf_counter()
            _, body = await waiting
            collected.append(max(0.0, time.perf_counter() - pushed))
            await consumer.ask(_ack(body))
        _close([producer, consumer])
        return collected

    async def pop_cost(self, queue: str, count: int = 400) -> float:
        """Median seconds of a pop of one message that acknowledges itself."""
        (caller,) = await self.ground.callers(1)
        request = _get(f"/api/v1/pop/queue/{queue}?autoAck=true")
        costs = []
        for _ in range(count):
            began = time.perf_counter()
            status, _ = await caller.ask(request)
            costs.append(time.perf_counter() - began)
            if status != 200:
                raise RuntimeError(f"a pop answered {status}")
        _close([caller])
        return statistics.median(costs)

    async def with_partitions(self, partitions: int) -> str:
        queue = self.ground.fresh()
        (caller,) = await self.ground.callers(1)
        for begin in range(0, partitions, 1000):
            items = [
                b'{"queue":"%s","partition":"p%d","payload":%s}' % (queue.encode(), number, PAYLOAD)
                for number in range(begin, min(partitions, begin + 1000))
                for _ in range(max(1, 3000 // partitions))
            ]
            status, _ = await caller.ask(
                _post("/api/v1/push", b'{"items":[%s]}' % b",".join(items))
            )
            assert status == 201
        _close([caller])
        return queue

    async def with_consumed(self, consumed: int) -> str:
        """A queue whose group has `consumed` messages behind it (put there by SQL) and some in
        front of it.
        """
        ground, queue = self.ground, self.ground.fresh()
        await ground.fill(queue, 1, 1)
        (caller,) = await ground.callers(1)
        await ground.take(caller, queue, 1)
        connection = await asyncpg.connect(ground.broker_url, timeout=60, command_timeout=900)
        await connection.execute("SET search_path = penstock; SET maintenance_work_mem = '256MB'")
        async with (
            connection.transaction()
        ):  # millions of rows: building the indexes afterwards is much faster
            indexes = await connection.fetch(
                """SELECT indexname, indexdef FROM pg_indexes
                    WHERE tablename = 'messages' AND indexname <> 'messages_pkey'"""
            )
            for name, _ in indexes:
                await connection.execute(f"DROP INDEX {name}")
            await connection.execute(
                """INSERT INTO messages (partition_id, seq, created_at, queue_id, transaction_id, payload)
                   SELECT p.id, g, clock_timestamp(), q.id, 'c' || g, '{"n":1}'
                     FROM queues q JOIN partitions p ON p.queue_id = q.id, generate_series(2, $2::bigint) g
                    WHERE q.name = $1 AND p.name = 'p0'""",
                queue,
                consumed,
            )
            for _, definition in indexes:
                await connection.execute(definition)
        await connection.close()
        _close([caller])  # idle for so long that the broker may have closed it
        (caller,) = await ground.callers(1)
        status, body = await caller.ask(
            _post(f"/api/v1/consumer-groups/__QUEUE_MODE__/queues/{queue}/seek", b'{"toEnd":true}')
        )
        assert status == 200, body
        await ground.fill(queue, 3000, 1)
        _close([caller])
        return queue


def _post(path: str, body: bytes) -> bytes:
    return (
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (
            path.encode(),
            len(body),
            body,
        )
    )


def _ack(popped: bytes) -> bytes:
    """The request that completes everything in the answer to a pop."""
    return _post(
        "/api/v1/ack/batch",
        msgspec.json.encode({"acknowledgments": _popped.decode(popped).messages}),
    )


def _get(path: str) -> bytes:
    return b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode()


def _close(callers: list[Caller]) -> None:
    for caller in callers:
        caller.transport.close()


def _plain_pusher(connection: Any, batch: int, one_by_one: bool) -> Callable[[], Awaitable[int]]:
    async def one() -> int:
        await plain_push(connection, batch, one_by_one=one_by_one)
        return batch

    return one


def _patient(action: Callable[[], Awaitable[int]]) -> Callable[[], Awaitable[int]]:
    """Tries again shortly when there was nothing, instead of giving up."""

    async def one() -> int:
        for _ in range(100):
            count = await action()
            if count:
                return count
            await asyncio.sleep(0.005)
        return 0

    return one


_stack = ExitStack()
_ground: list[Ground] = []


def _get_ground() -> Ground:
    if not _ground:
        _ground.append(Ground(_stack))
    return _ground[0]


def contests() -> Iterator[Contest]:
    rounds = Rounds(_get_ground())
    yield rounds.contest(
        "queues: push, 1 per request, 64 connections",
        lambda: rounds.push(64, 1),
        lambda: rounds.plain_push(64, 1),
        4.0,
    )
    for one_by_one in (True, False):
        against = PLAINLY if one_by_one else BATCHED
        yield rounds.contest(
            "queues: push, 100 per request, 16 connections",
            lambda: rounds.push(16, 100),
            partial(rounds.plain_push, 16, 100, one_by_one=one_by_one),
            2.0 if one_by_one else None,
            against,
        )
        yield rounds.contest(
            "queues: pop + ack, 100 per request, 8 connections",
            lambda: rounds.take(8, 100),
            partial(rounds.plain_take, 8, 1 if one_by_one else 100),
            4.0 if one_by_one else None,
            against,
        )
        yield rounds.contest(
            "queues: end to end, 100 per request, 4 producers and 4 consumers",
            lambda: rounds.end_to_end(4, 100),
            partial(rounds.plain_end_to_end, 4, 100, one_by_one=one_by_one),
            3.0 if one_by_one else None,
            against,
        )


def figures() -> Iterator[Figure]:
    with _stack:
        rounds = Rounds(_get_ground())
        run = rounds.ground.runner.run
        latencies = run(rounds.latencies())
        for share, limit in ((0.5, 0.005), (0.99, 0.020)):
            value = percentile(latencies, share)
            yield Figure(
                name=f"queues: waiting consumer, p{share * 100:g} after the push is answered",
                value=value * 1000,
                unit="ms",
                target=f"< {limit * 1000:g} ms",
                met=value < limit,
            )
        few, many = (run(rounds.with_partitions(count)) for count in (10, 10_000))
        yield _growth(rounds, "queues: pop, 10,000 partitions against 10", many, few, 1.5)
        some, lots = (run(rounds.with_consumed(count)) for count in (10_000, CONSUMED))
        yield _growth(
            rounds, f"queues: pop, {CONSUMED:,} consumed messages against 10,000", lots, some, 1.2
        )
    _ground.clear()


def _growth(rounds: Rounds, name: str, large: str, small: str, limit: float) -> Figure:
    run = rounds.ground.runner.run
    run(rounds.pop_cost(small, 50))
    run(rounds.pop_cost(large, 50))
    ratios, costs = [], []
    for _ in range(5):
        costs.append(run(rounds.pop_cost(large, 300)))
        ratios.append(costs[-1] / run(rounds.pop_cost(small, 300)))
    ratio = statistics.median(ratios)
    return Figure(
        name=name,
        value=statistics.median(costs) * 1000,
        unit="ms",
        ratio=ratio,
        target=f"≤ {limit:g}x",
        met=ratio <= limit,
        note="median cost of a pop",
    )
