"""A broker with shared topics while the database is down: what is refused, and what still works."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import httpx
import pytest
from websockets.asyncio.client import connect

from penstock.client import Client
from tests.support.broker import BrokerProcess
from tests.support.postgres import Postgres
from tests.support.wait import until

pytestmark = pytest.mark.xdist_group("shared-topics")
SECONDS = 120.0


@pytest.fixture
def server() -> Iterator[Postgres]:
    with Postgres("one") as server:
        yield server


def consumed_by_a_group(broker: BrokerProcess, topic: str, count: int) -> list[str]:
    """The first records of a topic, for a new group that commits them."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.kafka,
            "group.id": "new",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.subscribe([topic])
        found = [bytes(one.value()).decode() for one in consumer.consume(count, SECONDS)]
        [committed] = consumer.commit(asynchronous=False)
        assert (committed.error, committed.offset) == (None, count)
        return found
    finally:
        consumer.close()


def test_appends_are_refused_while_local_topics_and_reads_from_memory_continue(
    server: Postgres, tmp_path: Path
) -> None:
    settings = {"database__acquire_timeout": 2, "topics__tier_interval": 0.2}
    settings |= {"topics__tier_delay": 0, "topics__shared_tier": f"file://{tmp_path / 'tier'}"}
    with (
        BrokerProcess(tmp_path / "broker", database_url=server.url, **settings) as broker,
        httpx.Client(base_url=broker.url, timeout=SECONDS) as http,
    ):

        def produce(topic: str, value: str) -> httpx.Response:
            return http.post(f"/topics/{topic}/produce", json={"payload": value})

        def stored(topic: str) -> list[str]:
            answer = http.get(f"/topics/{topic}/consume").raise_for_status()
            return [one["payload"] for one in answer.json()]

        http.post("/topics/shared?placement=shared").raise_for_status()
        http.post("/topics/local").raise_for_status()
        for topic in ("shared", "local"):
            produce(topic, "before").raise_for_status()
        objects = "SELECT count(*) FROM penstock.shared_batches WHERE object IS NOT NULL"
        until(lambda: server.sql(objects) == 1, SECONDS, "the record is in object storage")

        failures: list[confluent_kafka.KafkaError | None] = []
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": broker.kafka,
                "message.timeout.ms": int(SECONDS * 1000),
                "log_level": 0,
            }
        )
        server.kill()
        until(lambda: produce("shared", "refused").status_code == 503, SECONDS, "it is noticed")
        refused = produce("shared", "refused")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        produce("local", "during").raise_for_status()
        assert stored("local") == ["before", "during"]
        assert stored("shared") == ["before"]
        # Whether there is more is not known: an empty answer would say that there is not.
        assert http.get("/topics/shared/consume", params={"offset": 1}).status_code == 503
        assert consumed_by_a_group(broker, "local", 2) == ["before", "during"]
        # The error that Kafka's client gets is one that it tries again after.
        producer.produce("shared", b"kafka", on_delivery=lambda error, _: failures.append(error))
        assert producer.flush(2) == 1

        server.start()
        until(lambda: produce("shared", "after").status_code == 201, SECONDS, "it is back")
        assert producer.flush(SECONDS) == 0
        assert failures == [None]
        assert sorted(stored("shared")) == ["after", "before", "kafka"]


RECORDS = 24
VALUES = [f"{i}:".ljust(700_000, "x") for i in range(RECORDS)]
IN_DATABASE = "SELECT count(*) FROM penstock.shared_batches WHERE object IS NULL"


async def over_tcp(broker: BrokerProcess, offset: int) -> str:
    async with (
        Client(broker.url, timeout=SECONDS) as client,
        client.topic("shared").reader(offset) as reader,
    ):
        return bytes((await anext(aiter(reader))).payload).decode()


async def over_http(broker: BrokerProcess, offset: int) -> str:
    async with httpx.AsyncClient(base_url=broker.url, timeout=SECONDS) as http:
        answer = await http.get("/topics/shared/consume", params={"offset": offset})
        found: str = answer.raise_for_status().json()[0]["payload"]
        return found


async def over_sse(broker: BrokerProcess, offset: int) -> str:
    url = f"{broker.url}/topics/shared/stream"
    async with (
        httpx.AsyncClient(timeout=SECONDS) as http,
        http.stream("GET", url, params={"offset": offset}) as stream,
    ):
        lines = (line async for line in stream.aiter_lines() if line.startswith("data:"))
        record = json.loads((await anext(lines))[5:])
        assert record["offset"] == offset
        return str(record["payload"])


async def over_websocket(broker: BrokerProcess, offset: int) -> str:
    request = {"command": "subscribe_topic_request", "topic": "shared", "start_offset": offset}
    async with connect(broker.websocket, max_size=None) as socket:
        await socket.send(json.dumps({**request, "req_id": 1}))
        while True:
            answer = json.loads(await socket.recv())
            if "messages" in answer:
                return str(answer["messages"][0]["payload"])


async def over_kafka(broker: BrokerProcess, offset: int) -> str:
    return first_record(broker, confluent_kafka.TopicPartition("shared", 0, offset))


def first_record(broker: BrokerProcess, *positions: confluent_kafka.TopicPartition) -> str:
    """The record that a Kafka consumer gets first, from one of these positions."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": broker.kafka, "group.id": "none", "enable.auto.commit": False}
    )
    try:
        consumer.assign(list(positions))
        [record] = consumer.consume(1, SECONDS)
        assert record.error() is None
        assert (record.topic(), record.offset()) in [(one.topic, one.offset) for one in positions]
        return bytes(record.value()).decode()
    finally:
        consumer.close()


def test_records_in_object_storage_are_read_that_nobody_has_read_before(
    server: Postgres, tmp_path: Path
) -> None:
    """By every protocol, through a broker that has more to read than it has memory for."""
    tier = tmp_path / "tier"
    settings = {"database__acquire_timeout": 2, "topics__shared_tier": f"file://{tier}"}
    moving = settings | {"topics__tier_interval": 0.2, "topics__tier_delay": 0}
    with (
        BrokerProcess(tmp_path / "mover", database_url=server.url, **moving),
        BrokerProcess(
            tmp_path / "broker", database_url=server.url, topics__shared_cache="1Mi", **settings
        ) as broker,
        httpx.Client(base_url=broker.url, timeout=SECONDS) as http,
    ):
        http.post("/topics/shared?placement=shared").raise_for_status()
        for value in VALUES:
            http.post("/topics/shared/produce", json={"payload": value}).raise_for_status()
        until(lambda: server.sql(IN_DATABASE) == 0, SECONDS, "everything is in object storage")
        server.kill()
        refused = {"payload": ""}
        until(
            lambda: http.post("/topics/shared/produce", json=refused).status_code == 503,
            SECONDS,
            "it is noticed",
        )
        protocols = (over_tcp, over_http, over_sse, over_websocket, over_kafka)
        for i, read in enumerate(protocols * 2):
            assert asyncio.run(read(broker, 2 * i)) == VALUES[2 * i], read.__name__
        broker.stop()
        broker.start()  # it knows from its data directory what is shared
        for i, read in enumerate(protocols):
            assert asyncio.run(read(broker, 2 * i + 1)) == VALUES[2 * i + 1], read.__name__
        with httpx.Client(base_url=broker.url, timeout=SECONDS) as again:
            assert again.post("/topics/shared/produce", json=refused).status_code == 503
            again.post("/topics/local/produce", json={"payload": "local"}).raise_for_status()
        # An object that is not there any more is an error, and not another record. The broker starts
        # again, because it may have the record in memory.
        broker.stop()
        shutil.rmtree(tier)
        broker.start()
        with httpx.Client(base_url=broker.url, timeout=SECONDS) as again:
            answer = again.get("/topics/shared/consume", params={"offset": 2})
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) > 0
        # A consumer of both gets what there is of the local topic.
        places = [confluent_kafka.TopicPartition(name, 0, 0) for name in ("shared", "local")]
        assert first_record(broker, *places) == "local"


def test_a_broker_that_never_reached_the_database_makes_no_local_topic_of_a_shared_ones_name(
    server: Postgres, tmp_path: Path
) -> None:
    settings = {"database_url": server.url, "database__acquire_timeout": 2}
    record = {"payload": "once"}
    with BrokerProcess(tmp_path / "first", **settings) as broker:
        httpx.post(f"{broker.url}/topics/orders?placement=shared").raise_for_status()
    server.kill()
    with (
        BrokerProcess(tmp_path / "new", **settings) as broker,
        httpx.Client(base_url=broker.url, timeout=SECONDS) as http,
    ):

        def produce() -> httpx.Response:
            return http.post("/topics/orders/produce", json=record)

        assert produce().status_code == 503
        assert http.get("/topics/orders/consume").status_code == 503
        server.start()
        until(lambda: produce().status_code == 201, SECONDS, "the database is back")
        assert http.get("/topics/orders").raise_for_status().json()["placement"] == "shared"
