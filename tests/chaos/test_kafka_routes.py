"""Routes to and from Kafka while the cluster at the other end is killed and frozen."""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.export.making import exports, kill
from tests.support.broker import BrokerProcess
from tests.support.form import pick
from tests.support.served import serving
from tests.support.wait import eventually

KILLS = pick(short=1, usual=2, soak=20)
PATIENCE = 120.0
TIMEOUT = 0.5  # of a send: shorter than an outage
TOPIC = "ledger"
MAX_QUEUED = 5000  # records


@pytest.fixture
def cluster(database_url: str, tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "cluster", database_url=database_url) as process:
        admin = AdminClient({"bootstrap.servers": process.kafka, "log_level": 0})
        (created,) = admin.create_topics([NewTopic(TOPIC, 2, 1)]).values()
        created.result(PATIENCE)
        yield process


def stored(cluster: BrokerProcess) -> list[list[int]]:
    """The numbers in each partition, as a foreign consumer reads them."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": cluster.kafka, "group.id": "check"})
    partitions = []
    for number in range(2):
        place = confluent_kafka.TopicPartition(TOPIC, number, 0)
        _, end = consumer.get_watermark_offsets(place, PATIENCE)
        consumer.assign([place])
        found: list[int] = []
        while len(found) < end:
            for message in consumer.consume(1000, 0.5):
                assert message.error() is None, message.error()
                found.append(int(message.value()))
        partitions.append(found)
    consumer.close()
    return partitions


async def test_a_cluster_that_is_killed_and_frozen_gets_every_record_once_and_in_order(
    cluster: BrokerProcess, tmp_path: Path
) -> None:
    target = {"type": "kafka", "brokers": cluster.kafka, "topic": TOPIC, "timeout": TIMEOUT}
    queue = {
        "workers": 1,
        "adaptive_workers": {"enabled": False},
        "retry_interval": "50ms",
        "max_retry_delay": "200ms",
        "circuit_breaker": {"enabled": False},
    }
    route = {"destination": target, "queue": queue}
    pushed = 0
    async with exports(tmp_path / "routes", {"out": route}) as running:
        books = running.get("out").queue.books

        async def push(until: int) -> None:
            nonlocal pushed
            while books.delivered < until:
                envelopes = [
                    b'{"$record":{"offset":0,"topic":"","payload":"%d","key":"%d"}}'
                    % (one, one % 5)
                    for one in range(pushed, pushed + 20)
                ]
                await running.get("out").push(envelopes)
                pushed += 20
                await asyncio.sleep(0.002)
                # a full send queue would drop the oldest
                await eventually(lambda: books.queued < MAX_QUEUED, PATIENCE)

        for turn in range(KILLS):
            await asyncio.wait_for(push(books.delivered + 300), PATIENCE)
            pushing = asyncio.ensure_future(push(books.delivered + 600))
            if turn % 2:
                cluster.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(3 * TIMEOUT)  # the outage: longer than a send may take
                cluster.process.send_signal(signal.SIGCONT)
            else:
                await asyncio.to_thread(cluster.kill)
                await asyncio.sleep(3 * TIMEOUT)
                await asyncio.to_thread(cluster.start)
            await asyncio.wait_for(pushing, PATIENCE)
        await eventually(lambda: books.queued == 0, PATIENCE)
    assert not sum(books.dropped)
    partitions = await asyncio.to_thread(stored, cluster)
    counts = Counter(number for one in partitions for number in one)
    assert set(counts) == set(range(pushed)), "none is lost"
    assert max(counts.values()) == 1, "none is there twice"
    for one in partitions:
        assert one == sorted(one), "in order per partition"


async def test_a_cluster_that_is_killed_is_drained_without_a_loss(
    cluster: BrokerProcess, tmp_path: Path
) -> None:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": cluster.kafka, "enable.idempotence": True, "log_level": 0}
    )
    source = {"kafka": {"brokers": cluster.kafka, "topic": TOPIC}, "group": "drain"}
    route = {
        "source": source,
        "destination": {"type": "topic", "topic": "copy"},
        "batch": {"records": 50},
    }
    sent = 0

    def produce(count: int) -> None:
        nonlocal sent
        for number in range(sent, sent + count):
            producer.produce(TOPIC, b"%d" % number, key=b"%d" % (number % 5))
        sent += count
        assert producer.flush(PATIENCE) == 0

    async with serving(tmp_path / "here") as served:

        def copied() -> list[int]:
            numbers: list[int] = []
            copy = served.topics.get("copy")
            while copy is not None and (batch := copy.read(len(numbers), 10_000)).count:
                numbers += map(int, batch.payloads())
            return numbers

        await asyncio.to_thread(produce, 500)
        for turn in range(KILLS):
            async with exports(tmp_path / "routes", {"in": route}, topics=served.topics) as running:
                await eventually(lambda: len(set(copied())) >= sent - 400, PATIENCE)
                await asyncio.to_thread(cluster.kill)
                await asyncio.to_thread(cluster.start)
                await asyncio.to_thread(produce, 500)
                if turn % 2 == 0:
                    await kill(running)
        async with exports(tmp_path / "routes", {"in": route}, topics=served.topics):
            await eventually(lambda: set(copied()) == set(range(sent)), PATIENCE)
