"""What chaos in PostgreSQL costs, as a score: throughput under or after it over throughput without
it; 1.00 is none.

Machines are shared and drift, so a rate alone says nothing. Two engines run the same load on two
servers in short alternated windows; the fault hits one of them, the other is the control. The score
is the median of the ratios of neighbouring windows: the two servers are alike, so without a fault
it is 1.

Sessions that only sit there (an idle transaction with an xid, scanners with old snapshots, idle
connections) are measured while they do, since they never end; restarts and killed connections are
measured when they are over: what must come back by itself is all of the throughput. The normal form
has short windows and tells a broken queue from a busy machine; the long form (`PENSTOCK_SOAK=1
pytest -s`) has the limits of the specification and prints the scores.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import asyncpg
import pytest

from penstock.database.embedded import EmbeddedPostgres
from penstock.errors import Unavailable
from penstock.queues import Ack, Item, PopRequest, Queues
from tests.conftest import create_database, running_postgres
from tests.queues.support import running
from tests.support.form import SOAK
from tests.support.wait import eventually

pytestmark = [pytest.mark.xdist_group("chaos-scores"), pytest.mark.timeout(1800 if SOAK else 120)]

WINDOW, PAIRS, TRIES = (1.0, 10, 1) if SOAK else (0.2, 4, 4)
LEAST = 0.9 if SOAK else 0.7


@pytest.fixture(scope="module")
def victim() -> Iterator[EmbeddedPostgres]:
    with running_postgres() as server:
        yield server


@dataclass
class Pair:
    """The engine whose server meets the fault, and the control."""

    engine: Queues
    control: Queues
    url: str
    server: EmbeddedPostgres
    messages: int = 0  # through the engine so far
    batches: int = 0

    async def ratio(self) -> float:
        collected = []
        for turn in range(PAIRS):
            rates = {}
            for queues in (self.engine, self.control) if turn % 2 else (self.control, self.engine):
                rates[queues is self.engine] = await self.rate(queues)
            collected.append(rates[True] / rates[False])
        return statistics.median(collected)

    async def score(self) -> float:
        """In the normal form a busy machine gets a few tries; what a fault really costs shows in
        all of them.
        """
        await self.rate(self.engine)
        result = 0.0
        for _ in range(TRIES):
            result = max(result, await self.ratio())
            if result >= LEAST:
                break
        return result

    async def rate(self, queues: Queues) -> float:
        """Messages per second through push, pop of whatever is ready, and ack."""
        count = 0
        began = time.perf_counter()

        async def one(name: int) -> None:
            nonlocal count
            while time.perf_counter() < began + WINDOW:
                await queues.push([Item("q", b'{"n":1}', f"p{name}") for _ in range(20)])
                popped = await queues.pop(PopRequest(queue="q", batch=20))
                await queues.ack(
                    [Ack(m.transaction_id, m.partition_id, m.lease_id) for m in popped.messages]
                )
                count += len(popped.messages)
                if queues is self.engine:
                    self.batches += 1
                    self.messages += len(popped.messages)

        await asyncio.gather(*(one(name) for name in range(4)))
        return count / (time.perf_counter() - began)

    async def sizes(self) -> dict[str, int]:
        """Bytes of the tables whose rows change."""
        rows = await self.engine.database.fetch(
            "SELECT pg_relation_size('cursors') AS cursors, pg_relation_size('leases') AS leases"
        )
        return dict(rows[0])


@pytest.fixture
async def pair(victim: EmbeddedPostgres, postgres: EmbeddedPostgres) -> AsyncIterator[Pair]:
    """A warm pair of engines."""
    url, other = await create_database(victim), await create_database(postgres)
    async with running(url) as engine, running(other) as control:
        made = Pair(engine, control, url, victim)
        for queues in (engine, control):
            await made.rate(queues)
        yield made


def report(fault: str, score: float, more: str = "") -> None:
    if SOAK:
        print(f"\n{fault:52} {score:6.2f}  {more}", flush=True)


@asynccontextmanager
async def an_idle_transaction(pair: Pair) -> AsyncIterator[None]:
    holder = await asyncpg.connect(pair.url)
    await holder.execute("BEGIN; SELECT pg_current_xact_id()")
    yield
    await holder.close()


@asynccontextmanager
async def four_scanners(pair: Pair) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        stop = asyncio.Event()
        scans = 0

        async def scan(connection: asyncpg.Connection) -> None:
            nonlocal scans
            while not stop.is_set():
                await connection.fetch("SELECT count(*) FROM messages")
                await connection.fetch("SELECT count(*) FROM cursors")
                scans += 1
                await asyncio.sleep(0.1)

        scanners = []
        for _ in range(4):
            connection = await asyncpg.connect(
                pair.url, server_settings={"search_path": "penstock"}
            )
            stack.push_async_callback(connection.close)
            await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            scanners.append(asyncio.create_task(scan(connection)))
        yield
        stop.set()
        await asyncio.gather(*scanners)
        assert scans > 8


@asynccontextmanager
async def idle_connections(pair: Pair) -> AsyncIterator[None]:
    pool = await asyncpg.create_pool(pair.url, min_size=300, max_size=300)
    yield
    pool.terminate()


SITTING = {
    "an idle transaction holds an xid": [an_idle_transaction],
    "four REPEATABLE READ scanners": [four_scanners],
    "300 idle foreign connections": [idle_connections],
}
ALL_AT_ONCE = {"all of them at once": [an_idle_transaction, four_scanners, idle_connections]}


@pytest.mark.parametrize("fault", [*SITTING, *ALL_AT_ONCE] if SOAK else [*ALL_AT_ONCE])
async def test_sessions_that_hold_back_vacuum_or_sit_idle_cost_no_throughput_and_few_dead_rows(
    pair: Pair, fault: str
) -> None:
    async with AsyncExitStack() as stack:
        for begin in (SITTING | ALL_AT_ONCE)[fault]:
            await stack.enter_async_context(begin(pair))
        scores = [
            await pair.score() for _ in range(3 if SOAK else 1)
        ]  # dead rows add up while they stay
        sizes = await pair.sizes()
    per_message = (sizes["cursors"] + sizes["leases"]) / pair.messages
    dead = f"{pair.messages} messages, {per_message:.0f} bytes of dead rows per message"
    report(fault, scores[-1], f"of {', '.join(f'{score:.2f}' for score in scores)}; {dead}")
    # A few row versions per batch and partition, whatever the number of messages in it.
    assert sizes["cursors"] < 8192 * 40 + pair.batches * 4 * 300
    assert sizes["leases"] < 8192 * 40 + pair.batches * 300
    assert scores[-1] >= LEAST, scores
    if SOAK:  # and when they are gone vacuum makes room by itself: the tables stop growing
        await pair.ratio()
        settled = await pair.sizes()
        await pair.ratio()
        assert (await pair.sizes())["cursors"] <= settled["cursors"] * 1.1 + 8192 * 20


async def test_throughput_is_back_after_our_connections_were_killed_again_and_again(
    pair: Pair,
) -> None:
    killer = await asyncpg.connect(pair.url)
    kills = 0

    async def kill(times: int) -> None:
        nonlocal kills
        for _ in range(times):
            kills += await killer.fetchval(
                """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                    WHERE application_name = 'penstock' AND datname = current_database()"""
            )
            await asyncio.sleep(0.25)

    killing = asyncio.create_task(kill(40 if SOAK else 4))
    while not killing.done():
        try:
            await pair.rate(pair.engine)
        except Unavailable:
            await asyncio.sleep(0.05)
    await killing
    await killer.close()
    score = await pair.score()
    report("after pg_terminate_backend again and again", score, f"{kills} connections killed")
    assert kills > 4
    assert score >= LEAST


async def test_throughput_is_back_after_restarts_of_postgresql(pair: Pair) -> None:
    waits = []
    for mode in ("fast", "immediate") * (3 if SOAK else 1):
        await asyncio.to_thread(pair.server.stop, mode)
        await asyncio.to_thread(pair.server.start)
        began = time.monotonic()

        async def answers() -> bool:
            try:
                await pair.engine.push([Item("q", b"1", "p0")])
            except Unavailable:
                return False
            return True

        await eventually(answers, 30)
        waits.append(time.monotonic() - began)
    score = await pair.score()
    report(
        "after restarts of PostgreSQL",
        score,
        f"back {max(waits):.1f} s after the server at the latest",
    )
    assert score >= LEAST
    assert max(waits) < 15
