"""Routes to and from a Kafka cluster (a listener of ours), with foreign clients at the other end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiokafka
import pytest
from aiokafka.structs import TopicPartition

from penstock.config.schema import SendQueueSettings
from penstock.errors import ConfigError
from penstock.export.spec import parse_route
from penstock.protocol.kafka_batch import NewRecord
from penstock.topics.store import TopicStore
from penstock.wire.tls import Certificate
from tests.export.making import exports, kill, status_of
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.served import Served, serving
from tests.support.tokens import SECRET, token
from tests.support.wait import eventually

QUEUE = {"workers": 1, "retry_interval": "10ms", "max_retry_delay": "50ms"}
RECORDS = [
    NewRecord(b"one", b"a", [("h", b"1"), ("h", None)], 1_700_000_000_123),
    NewRecord(b"\xff\xfe", b"\x00key", [("bin", b"\xff")], 1_700_000_000_124),
    NewRecord(None, b"a", (), 1_700_000_000_125),  # a tombstone
    NewRecord(b'{"$record":{"payload":"no"}}', None, (), 1_700_000_000_126),
]


@asynccontextmanager
async def cluster(directory: Path, **settings: Any) -> AsyncIterator[Served]:
    async with serving(directory / "cluster", **settings) as served:
        yield served


@asynccontextmanager
async def here(directory: Path) -> AsyncIterator[TopicStore]:
    async with serving(directory / "here") as served:
        yield served.topics


def to_kafka(served: Served, source: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    target = {"type": "kafka", "brokers": served.kafka_address, "topic": "there"} | more
    route = {"destination": target, "batch": {"records": 100}, "queue": QUEUE}
    return route if source is None else {**route, "source": source}


async def read_there(served: Served, count: int, **options: Any) -> list[Any]:
    """Everything in the topic, read by aiokafka without a group."""
    consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=served.kafka_address, **options)
    await consumer.start()
    try:
        partitions = served.topics.partitions("there")
        places = [TopicPartition("there", number) for number in range(partitions)]
        consumer.assign(places)
        await consumer.seek_to_beginning(*places)
        records: list[Any] = []
        while len(records) < count:
            found = await consumer.getmany(timeout_ms=10_000)
            records += [record for one in found.values() for record in one]
            assert found, f"{len(records)} of {count} records"
        return records
    finally:
        await consumer.stop()


async def test_a_topic_with_keys_arrives_with_keys_headers_and_timestamps(tmp_path: Path) -> None:
    async with cluster(tmp_path) as served, here(tmp_path) as topics:
        await served.topics.create("there", form="kafka", partitions=3)
        source = await topics.create("orders", form="kafka")
        await source.append_records(RECORDS)
        route = to_kafka(served, {"topic": "orders"})
        async with exports(tmp_path / "routes", {"out": route}, topics=topics):
            arrived = await read_there(served, len(RECORDS))
    shown = {
        (record.key, record.value, tuple(record.headers), record.timestamp): record.partition
        for record in arrived
    }
    assert set(shown) == {
        (one.key, one.value, tuple(one.headers), one.timestamp) for one in RECORDS
    }
    partitioner = aiokafka.producer.producer.DefaultPartitioner()
    for (key, *_), partition in shown.items():
        if key is not None:
            assert partition == partitioner(key, [0, 1, 2], [0, 1, 2])


async def test_a_topic_in_aiq_layout_and_direct_pushes_arrive_as_values(tmp_path: Path) -> None:
    payloads = [b"%d" % number for number in range(500)]
    async with cluster(tmp_path) as served, here(tmp_path) as topics:
        await served.topics.create("there", form="kafka")
        await (await topics.create("plain")).append([*payloads, b'{"$record":{}}'])
        routes = {
            "out": to_kafka(served, {"topic": "plain"}, codec="zstd"),
            "push": to_kafka(served, None),
        }
        async with exports(tmp_path / "routes", routes, topics=topics) as running:
            arrived = await read_there(served, len(payloads) + 1)
            assert [record.value for record in arrived] == [*payloads, b'{"$record":{}}']
            await running.get("push").push(
                [b'{"$record":{"offset":0,"topic":"","payload":"v","key":"k"}}']
            )
            arrived = await read_there(served, len(payloads) + 2)
            assert (arrived[-1].key, arrived[-1].value) == (b"k", b"v")


async def test_a_record_that_the_cluster_refuses_is_a_dead_letter_and_the_others_arrive_once(
    tmp_path: Path,
) -> None:
    records = [b"%d" % number for number in range(20)]
    records[7] = b"x" * 3000
    async with cluster(tmp_path, max_record=2000) as served:
        await served.topics.create("there", form="kafka")
        async with exports(tmp_path / "routes", {"out": to_kafka(served, None)}) as running:
            route = running.get("out")
            await route.push(records)
            await eventually(lambda: route.queue.books.queued == 0)
            (letter,) = await route.letters(0, 10)
            assert letter is not None
            assert letter.record == records[7]
            arrived = await read_there(served, 19)
            assert sorted(record.value for record in arrived) == sorted(
                one for one in records if one != records[7]
            )


async def test_an_unknown_topic_and_a_wrong_token_pause_the_route(tmp_path: Path) -> None:
    auth = {"secret": SECRET}
    async with cluster(tmp_path, auth=auth, kafka={"create_topics": False}) as served:
        login = {"username": "route", "timeout": "2s"}
        routes = {
            "wrong": to_kafka(served, None, password="no-token", **login),
            "right": to_kafka(served, None, password=token("read-write"), **login),
            "absent": to_kafka(served, None, password=token(), **login, topic="absent"),
            "scram": to_kafka(
                served, None, password=token("read-write"), mechanism="SCRAM-SHA-512", **login
            ),
        }
        await served.topics.create("there", form="kafka")
        async with exports(tmp_path / "routes", routes) as running:
            for name in routes:
                await running.get(name).push([b"a"])
            await eventually(lambda: running.get("wrong").paused)
            assert "uthentication" in str(running.get("wrong").paused)
            await eventually(lambda: running.get("right").queue.books.delivered == 1)
            assert not running.get("right").paused
            await eventually(lambda: running.get("absent").paused)
            assert "nknown topic" in str(running.get("absent").paused)
            await eventually(lambda: running.get("scram").paused)
            assert "Unsupported SASL mechanism" in str(running.get("scram").paused)


async def test_a_route_writes_and_reads_with_tls_and_a_token(tmp_path: Path) -> None:
    authority = Authority()
    ca, _ = authority.write(tmp_path)
    certificate = Certificate(*authority.issue(tmp_path), None, "1.2")
    port = free_port()
    listener = {"port": port, "advertised": f"localhost:{port}"}
    async with (
        cluster(tmp_path, tls=certificate, auth={"secret": SECRET}, kafka=listener) as served,
        here(tmp_path) as topics,
    ):
        remote = await served.topics.create("there", form="kafka")
        reached = {
            "brokers": f"localhost:{port}",
            "topic": "there",
            "username": "route",
            "password": token("read-write"),
            "tls": True,
            "timeout": "2s",
        }
        trusted = reached | {"ca": str(ca)}
        routes = {
            "out": to_kafka(served, None, **trusted),
            "stranger": to_kafka(served, None, **reached),
            "back": {
                "source": {"kafka": {key: trusted[key] for key in trusted if key != "timeout"}},
                "destination": {"type": "topic", "topic": "back"},
                "queue": QUEUE,
            },
        }
        async with exports(tmp_path / "routes", routes, topics=topics) as running:
            await running.get("out").push([b"a", b"b"])
            await running.get("stranger").push([b"c"])
            await eventually(lambda: remote.next_offset == 2)
            await eventually(lambda: topics.get("back") and topics.require("back").next_offset == 2)
            await eventually(lambda: status_of(running.get("stranger"))["lastError"])
        assert remote.next_offset == 2, "nothing comes from a route that does not trust the cluster"


async def test_kafka_is_read_into_a_topic_with_keys_and_each_record_once(tmp_path: Path) -> None:
    async with cluster(tmp_path) as served, here(tmp_path) as topics:
        await served.topics.create("there", form="kafka", partitions=2)
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=served.kafka_address)
        await producer.start()
        kafka = {"brokers": served.kafka_address, "topic": "there"}
        route = {
            "source": {"kafka": kafka, "group": "drain"},
            "destination": {"type": "topic", "topic": "copy"},
            "queue": QUEUE,
        }

        async def send(first: int, count: int) -> None:
            for number in range(first, first + count):
                key = b"k%d" % (number % 7)
                await producer.send(
                    "there", b"%d" % number, key=key, headers=[("n", b"%d" % number)]
                )
            await producer.flush()

        def copied() -> list[Any]:
            copy = topics.get("copy")
            batch = copy.read(0, 10_000) if copy is not None else None
            return (batch.records() or []) if batch is not None else []

        await send(0, 300)
        async with exports(tmp_path / "routes", {"in": route}, topics=topics) as running:
            await eventually(lambda: len(copied()) == 300)
            await eventually(lambda: status_of(running.get("in"))["lag"] == 0)
            assert status_of(running.get("in"))["source"] == {"kafka": "there", "group": "drain"}
        await send(300, 300)
        async with exports(tmp_path / "routes", {"in": route}, topics=topics) as running:
            await eventually(lambda: len(copied()) >= 600)
            await kill(running)  # what was committed is not read again
        await send(600, 100)
        async with exports(tmp_path / "routes", {"in": route}, topics=topics):
            await eventually(lambda: len({one.value for one in copied()}) == 700)
        await producer.stop()
        records = copied()
    assert all(
        one.key == b"k%d" % (int(one.value) % 7) and one.headers == (("n", one.value),)
        for one in records
    )
    for key in range(7):
        values = [int(one.value) for one in records if one.key == b"k%d" % key]
        assert list(dict.fromkeys(values)) == sorted(set(values)), "in order per key"


async def test_a_route_names_the_partition_it_reads(tmp_path: Path) -> None:
    async with cluster(tmp_path) as served, here(tmp_path) as topics:
        await served.topics.create("there", form="kafka")
        await topics.create("many", form="kafka", partitions=2)
        for number in range(2):
            await topics.partition("many", number).append([b"from %d" % number])
        routes = {
            "none": to_kafka(served, {"topic": "many"}),
            "one": to_kafka(served, {"topic": "many", "partition": 1}),
        }
        async with exports(tmp_path / "routes", routes, topics=topics) as running:
            (record,) = await read_there(served, 1)
            assert record.value == b"from 1"
            await eventually(
                lambda: "source.partition" in (status_of(running.get("none"))["sourceError"] or "")
            )


def refused(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_route("r", tree, SendQueueSettings())
    return str(caught.value)


def test_definitions_that_cannot_work_are_refused() -> None:
    target = {"type": "kafka", "brokers": "kafka:9092", "topic": "t"}
    kafka = {"brokers": "kafka:9092", "topic": "t"}
    assert "not host:port" in refused({"destination": {**target, "brokers": "kafka"}})
    assert "not a topic name in Kafka" in refused({"destination": {**target, "topic": "a b"}})
    assert "given together" in refused({"destination": {**target, "username": "u"}})
    assert "ca needs tls" in refused({"destination": {**target, "ca": "x.pem"}})
    assert "brokers is missing" in refused({"destination": {"type": "kafka", "topic": "t"}})
    assert "one of topic, queue and kafka" in refused(
        {"source": {"kafka": kafka, "queue": "q"}, "destination": target}
    )
    assert "earliest or latest" in refused(
        {"source": {"kafka": kafka, "start": "5"}, "destination": {"type": "queue", "queue": "q"}}
    )
    assert "source.partition" in refused(
        {"source": {"queue": "q", "partition": 1}, "destination": target}
    )


async def test_without_the_library_the_route_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "confluent_kafka", None)
    route = {"destination": {"type": "kafka", "brokers": "kafka:9092", "topic": "t"}}
    async with exports(tmp_path, {}) as running:
        with pytest.raises(Exception, match=r"pip install 'penstock\[kafka\]'"):
            await asyncio.wait_for(running.create("r", route), 60)
