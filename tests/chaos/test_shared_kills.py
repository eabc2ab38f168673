"""Shared topics while brokers are killed and frozen and PostgreSQL is restarted: the ledger adds up.

Three brokers on one database. Producers number their records: one over TCP and one of Kafka's, both
idempotent, and a plain one over HTTP, for each topic. Nothing that was answered is lost, nothing is
stored twice, each producer's records are in order, and a group of Kafka's clients gets everything.
"""

import asyncio
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import httpx
import pytest

from penstock.client import Client
from penstock.errors import PenstockError
from tests.support.broker import BrokerProcess
from tests.support.form import SOAK, pick
from tests.support.postgres import Postgres
from tests.support.wait import eventually, until

pytestmark = pytest.mark.xdist_group("shared-topics")
TOPICS = pick(short=2, usual=3, soak=20)
KILLS = pick(short=2, usual=3, soak=30)
RESTARTS = pick(short=1, usual=1, soak=5)
PATIENCE = 300.0
MAX_QUEUED = 5000  # of the Kafka client, while a broker is away
SETTINGS = {"database__acquire_timeout": 5, "database__pool_size": 10, "topics__tier_delay": 0.2}


@pytest.fixture
def server() -> Iterator[Postgres]:
    postgres = Postgres("ledger")
    try:
        postgres.create()
        yield postgres
    finally:
        postgres.remove()


@pytest.fixture
def brokers(server: Postgres, tmp_path: Path) -> Iterator[list[BrokerProcess]]:
    url = f"postgresql://postgres@{server.address}/postgres?sslmode=disable"
    store = (tmp_path / "store").as_uri()
    running = [
        BrokerProcess(
            tmp_path / f"broker{i}",
            database_url=url,
            topics__shared_tier=store,
            topics__tier_interval=0.5,
            **SETTINGS,
        )
        for i in range(3)
    ]
    try:
        for broker in running:
            broker.start()
        yield running
    finally:
        for broker in running:
            if broker.process is not None:
                broker.process.send_signal(signal.SIGCONT)
                broker.kill()


class Producers:
    """What each of them sent and what was answered, by topic."""

    def __init__(self) -> None:
        self.acked: dict[str, dict[str, int]] = {}  # value -> offset, by topic
        self.sent = Counter[str]()
        self.ending = asyncio.Event()
        self.stopping = threading.Event()

    def value(self, topic: str, who: str) -> str:
        key = f"{topic}/{who}"
        self.sent[key] += 1
        return f"{who}:{self.sent[key] - 1}"

    def answered(self, topic: str, value: str, offset: int) -> None:
        self.acked.setdefault(topic, {})[value] = offset

    async def over_tcp(self, urls: list[str], topic: str) -> None:
        async with Client(urls, timeout=10.0, retry_for=PATIENCE) as client:
            while not self.ending.is_set():
                value = self.value(topic, "tcp")
                try:
                    offset = await client.topic(topic).produce(value.encode())
                except PenstockError:
                    continue  # unknown: it may be there
                self.answered(topic, value, offset)
                await asyncio.sleep(0.005)

    async def over_http(self, brokers: list[BrokerProcess], topic: str) -> None:
        with httpx.Client(timeout=10.0) as http:
            while not self.ending.is_set():
                value = self.value(topic, "http")
                broker = random.choice(brokers)
                try:
                    url = f"http://127.0.0.1:{broker.ports['http']}/topics/{topic}/produce"
                    answer = await asyncio.to_thread(http.post, url, json={"payload": value})
                except httpx.HTTPError:
                    continue
                if answer.status_code == 201:
                    self.answered(topic, value, answer.json()["offset"])
                else:
                    assert answer.status_code == 503, answer.text
                    assert answer.headers["retry-after"]
                await asyncio.sleep(0.01)

    def over_kafka(self, addresses: str, topics: list[str]) -> None:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": addresses,
                "enable.idempotence": True,
                "message.timeout.ms": int(PATIENCE * 1000),
                "socket.timeout.ms": 10_000,
                "linger.ms": 5,
                "log_level": 0,
            }
        )

        def delivered(topic: str, value: str) -> Callable[[Any, Any], None]:
            def note(error: Any, message: Any) -> None:
                if error is None:
                    self.answered(topic, value, message.offset())

            return note

        while not self.stopping.wait(0.01):
            if len(producer) > MAX_QUEUED:
                producer.poll(0.1)
                continue
            for topic in topics:
                value = self.value(topic, "kafka")
                producer.produce(topic, value.encode(), on_delivery=delivered(topic, value))
            producer.poll(0)
        assert producer.flush(PATIENCE) == 0


class GroupReader(threading.Thread):
    """A member of a group of Kafka's clients that commits what it got."""

    def __init__(self, addresses: str, topics: list[str]) -> None:
        super().__init__(daemon=True)
        self.seen: dict[str, set[str]] = {topic: set() for topic in topics}
        self.ending = threading.Event()
        self._addresses = addresses

    def run(self) -> None:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._addresses,
                "group.id": "ledger",
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 10_000,
                "auto.commit.interval.ms": 500,
                "log_level": 0,
            }
        )
        consumer.subscribe(list(self.seen))
        while not self.ending.is_set():
            message = consumer.poll(0.2)
            if message is not None and message.error() is None:
                self.seen[message.topic()].add(message.value().decode())
        consumer.close()


async def everything(url: str, topic: str) -> list[tuple[int, str]]:
    """All records of a topic with their offsets, as one broker has them."""
    found: list[tuple[int, str]] = []
    async with httpx.AsyncClient(timeout=60.0) as http:
        offset = 0
        while True:
            params = {"offset": offset, "max_messages": 1000}
            answer = await http.get(f"{url}/topics/{topic}/consume", params=params)
            assert answer.status_code == 200, answer.text
            records = answer.json()
            if not records:
                return found
            found += [(one["offset"], one["payload"]) for one in records]
            offset = found[-1][0] + 1


async def disturb(brokers: list[BrokerProcess], server: Postgres) -> None:
    """Kill and freeze brokers, and crash PostgreSQL now and then, while the others go on."""
    restarts = set(random.sample(range(KILLS), min(RESTARTS, KILLS)))
    for round_ in range(KILLS):
        broker = brokers[round_ % len(brokers)]
        assert broker.process is not None
        frozen = brokers[(round_ + 1) % len(brokers)].process
        assert frozen is not None
        os.kill(frozen.pid, signal.SIGSTOP)
        broker.kill()
        if round_ in restarts:
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        await asyncio.sleep(random.uniform(0.2, 1.0))
        os.kill(frozen.pid, signal.SIGCONT)
        await asyncio.to_thread(broker.start)
        await asyncio.sleep(random.uniform(0.2, 1.0))


@pytest.mark.timeout(pick(short=300, usual=300, soak=1800))
async def test_nothing_answered_is_lost_or_doubled_while_brokers_die_and_freeze(
    brokers: list[BrokerProcess], server: Postgres
) -> None:
    topics = [f"ledger-{i}" for i in range(TOPICS)]
    urls = [broker.url for broker in brokers]
    addresses = ",".join(broker.kafka for broker in brokers)
    async with Client(urls) as client:
        for topic in topics:
            await client.topic(topic).create(shared=True)
    producers, reader = Producers(), GroupReader(addresses, topics)
    reader.start()
    tasks = [
        asyncio.create_task(work)
        for topic in topics
        for work in (producers.over_tcp(urls, topic), producers.over_http(brokers, topic))
    ]
    kafka = asyncio.create_task(asyncio.to_thread(producers.over_kafka, addresses, topics))
    await eventually(lambda: all(len(producers.acked.get(one, ())) > 20 for one in topics), 60)
    await disturb(brokers, server)
    counts = {one: len(producers.acked[one]) for one in topics}
    await eventually(
        lambda: all(len(producers.acked[one]) > counts[one] + 20 for one in topics), PATIENCE
    )
    producers.ending.set()
    producers.stopping.set()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*tasks, kafka)

    for topic in topics:
        found = await everything(urls[0], topic)
        for url in urls[1:]:
            assert await everything(url, topic) == found
        values = [value for _, value in found]
        assert [offset for offset, _ in found] == list(range(len(found))), "offsets have gaps"
        doubled = {value: n for value, n in Counter(values).items() if n > 1}
        assert not doubled, f"{topic}: {doubled}"
        acked = producers.acked[topic]
        lost = acked.keys() - set(values)
        assert not lost, f"{topic}: {sorted(lost)[:10]}"
        places = {value: offset for offset, value in found}
        wrong = {value for value, offset in acked.items() if places[value] != offset}
        assert not wrong, f"{topic}: answered with other offsets: {sorted(wrong)[:10]}"
        for who in ("tcp", "kafka"):
            numbers = [int(one.partition(":")[2]) for one in values if one.startswith(f"{who}:")]
            assert numbers == sorted(numbers), f"{topic}: {who} is out of order"
        until(
            lambda t=topic, v=set(values): reader.seen[t] >= v, PATIENCE, f"the group has {topic}"
        )
    reader.ending.set()
    reader.join(PATIENCE)
    if SOAK:  # a short run may end before another broker takes over from a mover that was killed
        moved = "SELECT count(*) FROM penstock.shared_batches WHERE object IS NOT NULL"
        assert await asyncio.to_thread(server.sql, moved)  # and much of it came from the store
