"""A shared topic through two real brokers and every protocol."""

import asyncio
import json
import os
import signal
import uuid
from collections.abc import Iterator

import confluent_kafka
import httpx
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from websockets.asyncio.client import connect

from penstock.client import Client
from penstock.database.embedded import EmbeddedPostgres
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.wait import until

pytestmark = pytest.mark.xdist_group("shared-topics")
SECONDS = 60.0


@pytest.fixture(scope="module")
def brokers(
    postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[BrokerProcess]]:
    url = fresh_database(postgres, migrated=True)
    running = [
        BrokerProcess(
            tmp_path_factory.mktemp(f"broker{i}"),
            database_url=url,
            topics__shared_cache="1Mi",  # less than a Fetch asks for
        )
        for i in range(2)
    ]
    try:
        for broker in running:
            broker.start(wait=False)
        for broker in running:
            broker.wait_until_started()
        yield running
    finally:
        for broker in running:
            broker.stop()


@pytest.fixture
def topic() -> str:
    return f"t-{uuid.uuid4().hex[:12]}"


def numbers(first: int, count: int) -> list[bytes]:
    return [b"%d" % i for i in range(first, first + count)]


async def test_every_protocol_appends_and_reads_through_either_broker(
    brokers: list[BrokerProcess], topic: str
) -> None:
    here, there = brokers
    async with Client(here.url) as client, httpx.AsyncClient(base_url=there.url) as http:
        await client.topic(topic).create(shared=True)
        assert await client.topic(topic).produce(*numbers(0, 3)) == 0
        # HTTP on the other broker, which has not been asked for this topic before
        answer = await http.post(f"/topics/{topic}/produce", json={"payloads": ["3", "4"]})
        assert answer.json()["first_offset"] == 3, answer.text
        async with connect(there.websocket) as socket:
            request = {
                "command": "produce_request",
                "topic": topic,
                "message_payload": "5",
                "req_id": 1,
            }
            await socket.send(json.dumps(request))
            assert json.loads(await socket.recv())["offset"] == 5
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": there.kafka, "enable.idempotence": True}
        )
        for value in (b"6", b"7"):
            producer.produce(topic, value, key=b"k")
        assert producer.flush(SECONDS) == 0

        read = await http.get(f"/topics/{topic}/consume", params={"offset": 0})
        assert [one["payload"].encode() for one in read.json()] == numbers(0, 8)
        records = [one.payload async for one in client.topic(topic).read()]
        assert [bytes(one) for one in records] == numbers(0, 8)
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": here.kafka,
                "group.id": topic,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        try:
            consumer.subscribe([topic])
            found = await asyncio.to_thread(lambda: consumer.consume(8, SECONDS))
            assert [one.value() for one in found] == numbers(0, 8)
            consumer.commit(asynchronous=False)
        finally:
            consumer.close()
        details = (await http.get(f"/topics/{topic}/groups/{topic}")).json()
        assert (details["committed"], details["lag"]) == (8, 0)


async def test_streams_on_one_broker_follow_appends_on_the_other(
    brokers: list[BrokerProcess], topic: str
) -> None:
    here, there = brokers
    async with httpx.AsyncClient(timeout=SECONDS) as http:
        created = await http.post(f"{here.url}/topics/{topic}", params={"placement": "shared"})
        assert created.status_code == 201
        async with http.stream("GET", f"{there.url}/topics/{topic}/stream") as stream:
            lines = stream.aiter_lines()
            for i in range(5):
                await http.post(f"{here.url}/topics/{topic}/produce", json={"payload": str(i)})
                async for line in lines:
                    if line.startswith("data:"):
                        assert json.loads(line[5:])["payload"] == str(i)
                        break


async def test_members_on_both_brokers_share_a_group_by_leases(
    brokers: list[BrokerProcess], topic: str
) -> None:
    async with Client(brokers[0].url) as first, Client(brokers[1].url) as second:
        await first.topic(topic).create(shared=True)
        await first.topic(topic).produce(*numbers(0, 100))
        done: list[tuple[int, int]] = []
        async with httpx.AsyncClient(timeout=SECONDS) as http:
            for i in range(10):
                base = f"{brokers[i % 2].url}/topics/{topic}/groups/workers"
                body = {"member": f"m{i % 2}", "max_records": 10}
                lease = (await http.post(f"{base}/lease", json=body)).json()
                done.append((lease["start"], lease["end"]))
                other = f"{brokers[(i + 1) % 2].url}/topics/{topic}/groups/workers"
                assert (
                    await http.post(f"{other}/renew", json={"lease": lease["lease"]})
                ).status_code == 200
                answer = await http.post(f"{other}/complete", json={"lease": lease["lease"]})
                assert answer.json()["committed"] == (i + 1) * 10
                again = await http.post(f"{base}/complete", json={"lease": lease["lease"]})
                assert again.status_code == 409
        assert done == [(i, i + 10) for i in range(0, 100, 10)]
        assert await second.topic(topic).group("workers").committed() == (100, 0)


def test_kafka_creates_them_and_names_all_brokers_which_share_the_partitions(
    brokers: list[BrokerProcess], topic: str
) -> None:
    admin = AdminClient({"bootstrap.servers": brokers[0].kafka})
    asked = NewTopic(topic, 16, 1, config={"penstock.placement": "shared"})
    admin.create_topics([asked])[topic].result(SECONDS)
    # Each broker says every second that it is there.
    until(lambda: len(admin.list_topics(timeout=10).brokers) == 2, SECONDS)
    metadata = AdminClient({"bootstrap.servers": brokers[1].kafka}).list_topics(topic, SECONDS)
    leaders = {one.leader for one in metadata.topics[topic].partitions.values()}
    assert leaders == set(metadata.brokers)
    addresses = {f"{one.host}:{one.port}" for one in metadata.brokers.values()}
    assert addresses == {broker.kafka for broker in brokers}
    producer = confluent_kafka.Producer({"bootstrap.servers": brokers[0].kafka})
    for i in range(64):
        producer.produce(topic, (b"%d" % i).rjust(100_000), partition=i % 16)
    assert producer.flush(SECONDS) == 0
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": brokers[1].kafka, "group.id": topic, "auto.offset.reset": "earliest"}
    )
    try:
        consumer.subscribe([topic])
        assert sorted(int(one.value()) for one in consumer.consume(64, SECONDS)) == list(range(64))
    finally:
        consumer.close()


async def test_a_local_topic_stands_in_the_way_of_a_shared_one(
    brokers: list[BrokerProcess], topic: str
) -> None:
    async with httpx.AsyncClient() as http:
        await http.post(f"{brokers[0].url}/topics/{topic}")
        refused = await http.post(f"{brokers[0].url}/topics/{topic}?placement=shared")
        assert refused.status_code == 409
        wrong = await http.post(f"{brokers[0].url}/topics/{topic}-2?placement=elsewhere")
        assert wrong.status_code == 400
        layout = await http.post(f"{brokers[0].url}/topics/{topic}-2?placement=shared&format=aiq")
        assert layout.status_code == 400


async def test_a_broker_frozen_in_the_middle_of_an_append_blocks_nobody(
    brokers: list[BrokerProcess], topic: str
) -> None:
    """It continues after others have appended, and stores what it had accepted once."""
    frozen, other = brokers
    async with (
        Client(frozen.url, timeout=SECONDS) as here,
        Client(other.url, timeout=SECONDS) as there,
    ):
        await here.topic(topic).create(shared=True)
        await there.topic(topic).produce(b"first")
        pending = [asyncio.create_task(here.topic(topic).produce(b"f%d" % i)) for i in range(200)]
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        os.kill(frozen.process.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(20):
                for i in range(20):
                    await there.topic(topic).produce(b"o%d" % i)
        finally:
            os.kill(frozen.process.pid, signal.SIGCONT)
        await asyncio.gather(*pending)
        stored = [bytes(one.payload) async for one in there.topic(topic).read()]
    ours = [b"o%d" % i for i in range(20)]
    assert sorted(stored) == sorted([b"first", *(b"f%d" % i for i in range(200)), *ours])
    assert [value for value in stored if value[:1] == b"o"] == ours
