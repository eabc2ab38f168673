"""Shared topics while brokers, PostgreSQL and the object store fail: the ledger adds up.

Three brokers on one database, four producers and four consumers for each topic. Brokers are killed
and frozen, also in the middle of a move to the object store. PostgreSQL crashes and, in the long
form, fails over. The store throttles, breaks and loses answers. Nothing that was answered is lost
or stored twice, and every consumer gets everything, in order where the protocol promises one.
"""

import asyncio
import os
import queue
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from penstock.client import Client
from tests.support.broker import BrokerProcess
from tests.support.form import SOAK, pick
from tests.support.object_stores import BUCKET, CREDENTIALS, Faults, faulty_proxy, s3_process
from tests.support.postgres import Pair
from tests.support.shared_ledger import IDEMPOTENT, ORDERED, Consumers, Producers
from tests.support.wait import eventually

pytestmark = pytest.mark.xdist_group("shared-topics")
TOPICS = pick(short=2, usual=3, soak=20)
KILLS = pick(short=2, usual=2, soak=30)  # each beside a broker that is frozen
RESTARTS = pick(short=1, usual=1, soak=5)
FAILOVERS = pick(short=0, usual=0, soak=3)
KILLED_MOVES = pick(short=1, usual=1, soak=3)
PAUSE = pick(short=0.01, usual=0.01, soak=0.1)
PATIENCE = pick(short=60.0, usual=60.0, soak=600.0)
SETTINGS = {
    "database__acquire_timeout": 5,
    "database__pool_size": 10,
    "topics__shared_tier": f"s3://{BUCKET}/shared",
    "topics__lease_time": 5,
    "topics__tier_delay": 0.2,
    "topics__tier_interval": 0.5,
}
FAULTS = ("throttle", "error", "slow", "cut", "lost")


@pytest.fixture
def servers() -> Iterator[Pair]:
    with Pair(replicated=SOAK) as pair:
        yield pair


class Cluster:
    """Brokers, each with a proxy of its own before the store."""

    def __init__(self, servers: Pair) -> None:
        self.servers = servers
        self.brokers: list[BrokerProcess] = []
        self.faults: list[Faults] = []

    def often(self) -> None:
        """Let a fifth of the requests to the store fail."""
        for one in self.faults:
            one.choose = lambda method, path: (
                random.choice(FAULTS) if random.random() < 0.2 else None
            )

    def never(self) -> None:
        for one in self.faults:
            one.never()


@pytest.fixture
def cluster(servers: Pair, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(servers)
    with ExitStack() as stack:
        store = stack.enter_context(s3_process())
        for i in range(3):
            url, faults = stack.enter_context(faulty_proxy(store))
            broker = BrokerProcess(
                tmp_path / f"broker{i}",
                database_url=servers.url(),
                env={**CREDENTIALS, "AWS_ENDPOINT_URL": url},
                **SETTINGS,
            )
            stack.callback(_end, broker)
            broker.start(wait=False)
            made.brokers.append(broker)
            made.faults.append(faults)
        for broker in made.brokers:
            broker.wait_until_started()
        yield made


def _end(broker: BrokerProcess) -> None:
    if broker.process is not None:
        broker.process.send_signal(signal.SIGCONT)
        broker.kill()


async def kill_inside_a_move(cluster: Cluster) -> None:
    """Kill the broker that moves records while it writes an object."""
    moving: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i, faults in enumerate(cluster.faults):

        def choose(method: str, path: str, mover: int = i) -> str | None:
            if method not in ("PUT", "POST"):
                return None
            moving.put(mover)
            return "slow"

        faults.slow_seconds, faults.choose = 1.0, choose
    mover = cluster.brokers[await asyncio.to_thread(moving.get, True, PATIENCE)]
    mover.kill()
    for faults in cluster.faults:
        faults.slow_seconds = 0.2
    cluster.often()
    await asyncio.to_thread(mover.start)


async def fail_over(servers: Pair) -> None:
    """Crash the primary; its synchronous standby has everything that was answered."""
    await asyncio.to_thread(servers.primary.kill)
    await asyncio.to_thread(servers.promote)
    await asyncio.to_thread(servers.rejoin)


async def fail_over_with_loss(servers: Pair) -> None:
    """Crash the primary; its standby was asynchronous, and lacks the last second."""
    await asyncio.to_thread(servers.primary.synchronous, "")
    await asyncio.to_thread(servers.cut_off)
    await asyncio.sleep(1.0)
    await asyncio.to_thread(servers.primary.kill)
    await asyncio.to_thread(servers.promote)


async def disturb(cluster: Cluster) -> None:
    """Kill and freeze brokers, crash PostgreSQL and break the store, while the others continue."""
    brokers, servers = cluster.brokers, cluster.servers
    rounds = random.sample(range(KILLS), RESTARTS + FAILOVERS)
    restarts, failovers = set(rounds[:RESTARTS]), set(rounds[RESTARTS:])
    moves = set(range(0, KILLS, KILLS // KILLED_MOVES))
    for round_ in range(KILLS):
        if round_ in moves:
            await kill_inside_a_move(cluster)
        broker, frozen = brokers[round_ % 3], brokers[(round_ + 1) % 3].process
        assert frozen is not None
        os.kill(frozen.pid, signal.SIGSTOP)
        broker.kill()
        if round_ in restarts:
            await asyncio.to_thread(servers.primary.kill)
            await asyncio.to_thread(servers.primary.start)
        if round_ in failovers:
            await fail_over(servers)
        await asyncio.sleep(random.uniform(0.2, 1.0))
        os.kill(frozen.pid, signal.SIGCONT)
        await asyncio.to_thread(broker.start)
        await asyncio.sleep(random.uniform(0.2, 1.0))
        print(f"round {round_ + 1} of {KILLS}", flush=True)
    if SOAK:
        await fail_over_with_loss(servers)


async def everything(http: httpx.AsyncClient, url: str, topic: str) -> list[tuple[int, str]]:
    """All records of a topic with their offsets, as one broker has them."""
    stored: list[tuple[int, str]] = []
    while True:
        offset = stored[-1][0] + 1 if stored else 0
        params = {"offset": offset, "max_messages": 1000}
        answer = await http.get(f"{url}/topics/{topic}/consume", params=params)
        assert answer.status_code == 200, answer.text
        if not (records := answer.json()):
            return stored
        stored += [(one["offset"], one["payload"]) for one in records]


@pytest.mark.timeout(pick(short=300, usual=300, soak=2400))
async def test_nothing_answered_is_lost_or_doubled_while_everything_fails(cluster: Cluster) -> None:
    topics = [f"ledger-{i}" for i in range(TOPICS)]
    async with Client([broker.url for broker in cluster.brokers]) as client:
        for topic in topics:
            await client.topic(topic).create(shared=True)
    producers = Producers(cluster.brokers, PATIENCE, PAUSE)
    consumers = Consumers(cluster.brokers, topics)
    consuming = consumers.start()
    sending = producers.start(topics)

    def nothing_failed() -> None:
        for task in (*consuming, *sending):
            if task.done():
                task.result()

    try:
        await _everyone_is_answered(producers, topics, nothing_failed)
        cluster.often()
        await disturb(cluster)
        cluster.never()
        await _everyone_is_answered(producers, topics, nothing_failed)
        producers.ending.set()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*sending)
        async with httpx.AsyncClient(timeout=60.0) as http:
            for topic in topics:
                await _check(http, cluster.brokers, topic, producers, consumers)
    finally:
        producers.ending.set()  # threads would keep the process alive
        await consumers.stop()
    if SOAK:  # a short run may end before another broker takes over from a mover that was killed
        moved = "SELECT count(*) FROM penstock.shared_batches WHERE object IS NOT NULL"
        assert await asyncio.to_thread(cluster.servers.primary.sql, moved)


async def _everyone_is_answered(
    producers: Producers, topics: list[str], nothing_failed: Callable[[], None]
) -> None:
    """Wait until each producer got further answers on each topic."""

    def counts() -> Counter[tuple[str, str]]:
        return Counter(
            (topic, value.partition(":")[0])
            for topic in topics
            for value in list(producers.acked.get(topic, ()))
        )

    before = counts()
    expected = [(topic, name) for topic in topics for name in ("tcp", "http", "websocket", "kafka")]

    def all_went_on() -> bool:
        nothing_failed()
        after = counts()
        return all(after[one] >= before[one] + 5 for one in expected)

    await eventually(all_went_on, PATIENCE)


async def _check(
    http: httpx.AsyncClient,
    brokers: list[BrokerProcess],
    topic: str,
    producers: Producers,
    consumers: Consumers,
) -> None:
    stored = await everything(http, brokers[0].url, topic)
    for broker in brokers[1:]:
        assert await everything(http, broker.url, topic) == stored
    details = (await http.get(f"{brokers[0].url}/topics/{topic}")).json()
    gaps = [range(one["lost_from"], one["lost_to"]) for one in details["damage"]]
    assert SOAK or not gaps
    offsets = [offset for offset, _ in stored]
    reported = {gap.start: gap.stop for gap in gaps}
    next_offset = 0
    for offset in offsets:
        if offset != next_offset:
            assert reported.get(next_offset) == offset, f"{topic}: a gap at {next_offset}"
        next_offset = offset + 1
    places = {value: offset for offset, value in stored}
    doubled = [value for value, n in Counter(value for _, value in stored).items() if n > 1]
    assert not doubled, f"{topic}: {doubled[:10]}"

    acked = producers.acked[topic]
    assert len(set(acked.values())) == len(acked), f"{topic}: an offset was answered twice"
    wrong = [value for value, offset in acked.items() if places.get(value, offset) != offset]
    assert not wrong, f"{topic}: stored at other offsets: {wrong[:10]}"
    lost = {value: offset for value, offset in acked.items() if value not in places}
    silent = [one for one, offset in lost.items() if not any(offset in gap for gap in gaps)]
    assert not silent, f"{topic}: lost: {silent[:10]}"
    for name in IDEMPOTENT:
        numbers = [int(one.partition(":")[2]) for one in places if one.startswith(f"{name}:")]
        assert numbers == sorted(numbers), f"{topic}: {name} is out of order"

    for name, seen in consumers.seen.items():
        try:
            await eventually(lambda seen=seen: seen[topic].keys() >= places.keys(), PATIENCE)
        except AssertionError:
            missing = sorted(places[one] for one in places.keys() - seen[topic].keys())
            raise AssertionError(f"{topic}: {name} did not get {missing[:10]}") from None
        got = [offset for value, offset in seen[topic].items() if value in places]
        if name in ORDERED:
            assert got == offsets, f"{topic}: {name} got it out of order"
        gone = [offset for value, offset in seen[topic].items() if value not in places]
        assert all(any(offset in gap for gap in gaps) for offset in gone), f"{topic}: {name}"
