"""Kafka's clients while the broker is killed, and groups whose members are killed and frozen."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiokafka
import confluent_kafka
import httpx
import kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support import guard
from tests.support.broker import BrokerProcess
from tests.support.form import pick
from tests.support.wait import until

KILLS = pick(short=2, usual=3, soak=20)
PATIENCE = 240.0
TOPIC = "ledger"


class LedgerProducer(threading.Thread):
    """Sends numbers to its partition until it is stopped; `acked` are those that were confirmed."""

    def __init__(self, address: str, partition: int) -> None:
        super().__init__(daemon=True)
        self.address = address
        self.partition = partition
        self.acked: set[int] = set()
        self.sent = 0
        self.failure: BaseException | None = None
        self.ending = threading.Event()

    def run(self) -> None:
        try:
            self.produce()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            self.failure = error

    def produce(self) -> None:
        raise NotImplementedError

    def next(self) -> int:
        self.ending.wait(0.002)
        self.sent += 1
        return self.sent - 1


class ConfluentLedger(LedgerProducer):
    def produce(self) -> None:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.address,
                "enable.idempotence": True,
                "message.timeout.ms": int(PATIENCE * 1000),
                "linger.ms": 5,
                "log_level": 0,
            }
        )

        def delivered(number: int) -> Callable[[Any, Any], None]:
            def note(error: Any, _: Any) -> None:
                if error is None:
                    self.acked.add(number)
                else:
                    self.failure = confluent_kafka.KafkaException(error)

            return note

        while not self.ending.is_set():
            number = self.next()
            value = b"%d" % number
            producer.produce(TOPIC, value, partition=self.partition, on_delivery=delivered(number))
            producer.poll(0)
        assert producer.flush(PATIENCE) == 0


class KafkaPythonLedger(LedgerProducer):
    def produce(self) -> None:
        producer = kafka.KafkaProducer(
            bootstrap_servers=self.address,
            linger_ms=5,
            delivery_timeout_ms=int(PATIENCE * 1000),
            request_timeout_ms=10_000,
        )
        waiting: list[tuple[int, Any]] = []
        while not self.ending.is_set():
            number = self.next()
            future = producer.send(TOPIC, b"%d" % number, partition=self.partition)
            waiting.append((number, future))
        for number, future in waiting:
            future.get(PATIENCE)
            self.acked.add(number)
        producer.close()


class AiokafkaLedger(LedgerProducer):
    def produce(self) -> None:
        asyncio.run(self._produce())

    async def _produce(self) -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=self.address,
            enable_idempotence=True,
            linger_ms=5,
            request_timeout_ms=int(PATIENCE * 1000),
            retry_backoff_ms=200,
        )
        await producer.start()
        waiting: list[tuple[int, Any]] = []
        while not self.ending.is_set():
            number = self.next()
            value = b"%d" % number
            waiting.append((number, await producer.send(TOPIC, value, partition=self.partition)))
            await asyncio.sleep(0)
        for number, future in waiting:
            await future
            self.acked.add(number)
        await producer.stop()


@pytest.fixture
def broker(database_url: str, tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path, database_url=database_url) as process:
        yield process


def make_topic(broker: BrokerProcess, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": broker.kafka, "log_level": 0})
    (created,) = admin.create_topics([NewTopic(TOPIC, partitions, 1)]).values()
    created.result(PATIENCE)


def stored(broker: BrokerProcess, partition: int) -> list[int]:
    """All numbers of a partition, as a plain consumer reads them."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": broker.kafka, "group.id": "check"})
    place = confluent_kafka.TopicPartition(TOPIC, partition, 0)
    _, end = consumer.get_watermark_offsets(place, PATIENCE)
    consumer.assign([place])
    found: list[int] = []

    def poll() -> bool:
        found.extend(int(one.value()) for one in consumer.consume(1000, 0.2) if not one.error())
        return len(found) >= end

    until(poll, PATIENCE)
    consumer.close()
    return found


@pytest.mark.timeout(3600)
def test_idempotent_producers_lose_nothing_and_store_nothing_twice_while_the_broker_is_killed(
    broker: BrokerProcess,
):
    kinds = (ConfluentLedger, AiokafkaLedger, KafkaPythonLedger)
    make_topic(broker, len(kinds))
    producers = [kind(broker.kafka, number) for number, kind in enumerate(kinds)]
    for producer in producers:
        producer.start()
    for _ in range(KILLS):
        goals = [producer.sent + random.randint(100, 300) for producer in producers]
        until(
            lambda g=goals: all(
                one.sent >= goal or one.failure for one, goal in zip(producers, g, strict=True)
            )
        )
        broker.kill()
        broker.start()
    for producer in producers:
        producer.ending.set()
    for producer in producers:
        producer.join(PATIENCE)
        assert producer.failure is None, (type(producer).__name__, producer.failure)
        assert not producer.is_alive()
    for producer in producers:
        numbers = stored(broker, producer.partition)
        name = type(producer).__name__
        assert producer.acked <= set(numbers), f"{name}: lost"
        assert len(numbers) == len(set(numbers)), f"{name}: twice"
        assert numbers == sorted(numbers), f"{name}: out of order"
        assert len(producer.acked) == producer.sent, f"{name}: not acknowledged"


def lags(broker: BrokerProcess) -> list[float]:
    """Of the group, as the metrics say it, for each partition."""
    text = httpx.get(f"{broker.url}/metrics", timeout=PATIENCE).text
    lines = [line for line in text.splitlines() if 'lag{group="workers"' in line]
    return [float(line.split()[-1]) for line in lines]


@pytest.mark.timeout(3600)
def test_every_record_is_processed_while_members_are_killed_and_frozen(
    broker: BrokerProcess, tmp_path: Path
):
    partitions, rounds = 4, pick(short=1, usual=2, soak=10)
    make_topic(broker, partitions)
    members: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        path = tmp_path / f"member-{len(members)}"
        command = [sys.executable, "-m", "tests.support.kafka_member"]
        member = subprocess.Popen([*command, broker.kafka, "workers", TOPIC, str(path)])
        guard.watch(member.pid)
        members.append(member)
        return member

    def processed() -> set[tuple[int, int]]:
        lines = [
            line.split()
            for path in tmp_path.glob("member-*")
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return {(int(partition), int(value)) for partition, value in lines}

    producer = confluent_kafka.Producer({"bootstrap.servers": broker.kafka, "log_level": 0})
    expected: set[tuple[int, int]] = set()

    def produce(count: int) -> None:
        for _ in range(count):
            record = (len(expected) % partitions, len(expected))
            expected.add(record)
            producer.produce(TOPIC, b"%d" % record[1], partition=record[0])
        assert producer.flush(PATIENCE) == 0

    try:
        alive = [start() for _ in range(3)]
        produce(500)
        until(lambda: len(processed()) > 100, PATIENCE)
        for _ in range(rounds):
            killed, frozen, _ = alive
            killed.kill()
            killed.wait()
            os.kill(frozen.pid, signal.SIGSTOP)
            produce(500)
            alive = [start(), alive[2], frozen]
            until(lambda: processed() >= expected, PATIENCE)  # without the frozen one
            os.kill(frozen.pid, signal.SIGCONT)
            produce(100)
            until(lambda: processed() >= expected, PATIENCE)
        until(lambda: lags(broker) == [0.0] * partitions, PATIENCE)
    finally:
        for member in members:
            member.kill()
            member.wait()
