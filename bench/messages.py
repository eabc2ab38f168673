"""What headers and messages for later cost, over HTTP on a broker with its PostgreSQL.

- Pushes with three headers against pushes without, alternating on one broker: the same headers in
  all messages of a request, as one traced call sends them, and another trace in each.
- Pushes without headers against a broker of an earlier checkout, each with its own database on one
  PostgreSQL: `PENSTOCK_BENCH_BASE=/path/to/checkout` names it (`git worktree add /path <commit>`).
- How long after the moment at which many messages are due the last of them is in its queue
  (`PENSTOCK_BENCH_DUE`, 100,000), while a million others wait in the same table
  (`PENSTOCK_BENCH_WAITING`).
- How late messages are whose times are spread over some seconds.

    make bench B=messages
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import asyncpg

from bench.harness import Contest, Figure, percentile
from bench.queues import PARTITIONS, PAYLOAD, Ground, Rounds, _post
from tests.support.broker import ServeProcess

DUE = int(os.environ.get("PENSTOCK_BENCH_DUE", "100000"))
WAITING = int(os.environ.get("PENSTOCK_BENCH_WAITING", "1000000"))
BASE = os.environ.get("PENSTOCK_BENCH_BASE", "")
HEADERS = (
    b',"headers":{"tenant":"acme","content-type":"application/json",'
    b'"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}'
)
TRACE = b"4bf92f3577b34da6"
SPREAD_MESSAGES, SPREAD_SECONDS = 2000, 4.0
PATIENCE_SECONDS = 300.0
POLL_SECONDS = 0.02
WAIT = """INSERT INTO penstock.scheduled_messages
            (due_at, partition_id, queue_id, pushed_at, transaction_id, payload)
          SELECT now() + interval '1 year' + make_interval(secs => n), p.id, p.queue_id, now(),
                 'w' || n, '1' FROM generate_series(1, $1::int) n,
                 (SELECT * FROM penstock.partitions ORDER BY id LIMIT 1) p"""


class MessageGround(Ground):
    """`extra` is written into every item of a push, with another trace in each if `traces`."""

    extra = b""
    traces = False

    def push_request(self, queue: str, partition: int, count: int, tag: str) -> bytes:
        items = [
            b'{"queue":"%s","partition":"p%d","payload":%s,"transactionId":"%s-%d"%s}'
            % (queue.encode(), partition, PAYLOAD, tag.encode(), number, self._extra(number))
            for number in range(count)
        ]
        return _post("/api/v1/push", b'{"items":[%s]}' % b",".join(items))

    def _extra(self, number: int) -> bytes:
        return self.extra.replace(TRACE, b"%016x" % number) if self.traces else self.extra


def contests() -> Iterator[Contest]:
    with ExitStack() as stack:
        ground = MessageGround(stack)
        yield from _headers(ground)
        if BASE:
            yield from _base(ground, stack)


def _headers(ground: MessageGround) -> Iterator[Contest]:
    rounds = Rounds(ground)

    def push(extra: bytes, connections: int, batch: int, traces: bool = False) -> float:
        ground.extra, ground.traces = extra, traces
        try:
            return ground.runner.run(rounds.push(connections, batch))
        finally:
            ground.extra, ground.traces = b"", False

    for connections, batch, traces in ((64, 1, False), (16, 100, False), (16, 100, True)):
        yield Contest(
            name=f"messages: push, {batch} per request, three headers"
            + (", another trace in each" if traces else ""),
            unit="messages/s",
            ours=partial(push, HEADERS, connections, batch, traces),
            theirs=partial(push, b"", connections, batch),
            against="without headers",
            at_least=0.85,
        )


def _base(ground: MessageGround, stack: ExitStack) -> Iterator[Contest]:
    """This broker against that of another checkout; both without headers."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
    directory.chmod(0o755)
    url = ground.runner.run(ground.database("base"))
    base = stack.enter_context(
        ServeProcess(
            directory / "base",
            database_url=url,
            env={"PYTHONPATH": f"{BASE}/src", "PYTHONSAFEPATH": "1"},
        )
    )
    own, other = ground.port, int(base.url.rpartition(":")[2])
    rounds = Rounds(ground)

    def run(port: int, verb: str, connections: int, batch: int) -> float:
        ground.port = port
        try:
            return float(ground.runner.run(getattr(rounds, verb)(connections, batch)))
        finally:
            ground.port = own

    for name, verb, connections, batch in (
        ("push, 1 per request", "push", 64, 1),
        ("push, 100 per request", "push", 16, 100),
        ("pop + ack, 100 per request", "take", 8, 100),
    ):
        yield Contest(
            name=f"messages: {name}, no headers",
            unit="messages/s",
            ours=partial(run, own, verb, connections, batch),
            theirs=partial(run, other, verb, connections, batch),
            against=f"the broker in {BASE}",
            at_least=0.97,
        )


def figures() -> Iterator[Figure]:
    with ExitStack() as stack:
        ground = MessageGround(stack)
        yield ground.runner.run(_all_at_once(ground))
        yield ground.runner.run(_lateness(ground))


async def _all_at_once(ground: MessageGround) -> Figure:
    """The moment is put off until all are pushed, so that they wait for it together."""
    connection = await asyncpg.connect(ground.broker_url)
    try:
        await ground.fill(ground.fresh(), 1, 1)
        queue = ground.fresh()
        await connection.execute(WAIT, WAITING)
        await connection.execute("ANALYZE penstock.scheduled_messages")
        ground.extra = b',"deliverAt":"2100-01-01T00:00:00Z"'
        began = time.perf_counter()
        await ground.fill(queue, DUE, PARTITIONS)
        pushing = time.perf_counter() - began
        ground.extra = b""
        moment = datetime.now(UTC) + timedelta(seconds=2 + DUE / 50_000)
        await connection.execute(
            """UPDATE penstock.scheduled_messages SET due_at = $1
                WHERE due_at = '2100-01-01T00:00:00Z'""",
            moment,
        )
        # the broker is told by a push that is due then too
        ground.extra = b',"deliverAt":"%s"' % moment.isoformat().encode()
        (caller,) = await ground.callers(1)
        await ground.push(caller, queue, 0, 1, "last")
        ground.extra = b""
        await _stored(connection, queue, DUE + 1)
        took = (datetime.now(UTC) - moment).total_seconds()
        last = await connection.fetchval(
            """SELECT extract(epoch FROM max(m.created_at) - $2)::float8 FROM penstock.messages m
                JOIN penstock.queues q ON q.id = m.queue_id WHERE q.name = $1""",
            queue,
            moment,
        )
    finally:
        await connection.close()
    return Figure(
        name=f"messages: {DUE} due in one moment, until the last is in its queue",
        value=took,
        unit="s",
        target="≤ 10 s",
        met=took <= 10,
        note=f"last appended {last:.1f} s after; pushed at {DUE / pushing:.0f}/s beside {WAITING} waiting",
    )


async def _lateness(ground: MessageGround) -> Figure:
    connection = await asyncpg.connect(ground.broker_url)
    try:
        queue = ground.fresh()
        (caller,) = await ground.callers(1)
        for number in range(SPREAD_MESSAGES):
            ground.extra = b',"delay":%.3f' % (1 + SPREAD_SECONDS * number / SPREAD_MESSAGES)
            if number % 20 == 0:
                await asyncio.sleep(SPREAD_SECONDS / (SPREAD_MESSAGES / 20))
            await ground.push(caller, queue, number % PARTITIONS, 1, f"l{number}")
        ground.extra = b""
        dues = {
            row["transaction_id"]: row["due_at"]
            for row in await connection.fetch(
                "SELECT transaction_id, due_at FROM penstock.scheduled_messages WHERE due_at < now() + interval '1 hour'"
            )
        }
        await _stored(connection, queue, SPREAD_MESSAGES)
        rows = await connection.fetch(
            """SELECT m.transaction_id, m.created_at FROM penstock.messages m
                JOIN penstock.queues q ON q.id = m.queue_id WHERE q.name = $1""",
            queue,
        )
        caller.transport.close()
    finally:
        await connection.close()
    late = [
        (row["created_at"] - dues[row["transaction_id"]]).total_seconds()
        for row in rows
        if row["transaction_id"] in dues
    ]
    assert min(late) >= 0, "a message came early"
    return Figure(
        name="messages: lateness, p99",
        value=percentile(late, 0.99),
        unit="s",
        target="< 1 s",
        met=percentile(late, 0.99) < 1,
        note=f"p50 {percentile(late, 0.5) * 1000:.0f} ms, of {len(late)}",
    )


async def _stored(connection: asyncpg.Connection, queue: str, count: int) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    stored = 0
    while stored < count:
        if time.monotonic() > ends:
            raise RuntimeError(f"{stored} of {count} messages came within {PATIENCE_SECONDS} s")
        await asyncio.sleep(POLL_SECONDS)
        stored = await connection.fetchval(
            """SELECT coalesce(sum(pushed), 0) FROM (
                 SELECT queue_id, group_id, pushed FROM penstock.tallies UNION ALL
                 SELECT queue_id, group_id, pushed FROM penstock.tally_log) t
                WHERE queue_id = (SELECT id FROM penstock.queues WHERE name = $1)""",
            queue,
        )
