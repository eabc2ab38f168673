"""A shared topic through two real brokers and every protocol."""

import asyncio
import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import asyncpg
import confluent_kafka
import httpx
import pytest
from asyncpg.transaction import Transaction
from confluent_kafka.admin import AdminClient, NewTopic
from websockets.asyncio.client import connect

from penstock.cli.topic import commands
from penstock.client import Client
from penstock.database.embedded import EmbeddedPostgres
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.cli import CliRunner
from tests.support.wait import eventually, until

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
        call = ["create", topic, "--shared", "--broker", "{}:{}".format(*here.tcp)]
        created = await asyncio.to_thread(CliRunner().invoke, commands, call)
        assert created.exit_code == 0, created.stderr
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


async def test_nothing_is_lost_with_a_broker_and_its_disk(
    postgres: EmbeddedPostgres, tmp_path: Path, topic: str
) -> None:
    url = await asyncio.to_thread(fresh_database, postgres, migrated=True)
    settings = {"database_url": url, "topics__placement": "shared"}
    lost = BrokerProcess(tmp_path / "lost", **settings)
    await asyncio.to_thread(lost.start)
    async with Client(lost.url) as client:  # by `topics.placement`, nobody says that it is shared
        assert await client.topic(topic).produce(*numbers(0, 100)) == 0
        await client.topic(topic).group("billing").commit(40)
        lost.kill()
    await asyncio.to_thread(shutil.rmtree, tmp_path / "lost")
    other = BrokerProcess(tmp_path / "other", **settings)
    try:
        await asyncio.to_thread(other.start)
        async with Client(other.url) as client:
            read = [bytes(record.payload) async for record in client.topic(topic).read()]
            assert read == numbers(0, 100)
            assert await client.topic(topic).group("billing").committed() == (40, 60)
            assert await client.topic(topic).produce(b"100") == 100
    finally:
        other.stop()


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


async def test_a_local_topic_moves_with_its_offsets_groups_and_producers(
    brokers: list[BrokerProcess], topic: str
) -> None:
    here, there = brokers
    async with Client(here.url) as client, Client(there.url) as other:
        for name, options in ((topic, {}), (f"{topic}-k", {"format": "kafka", "partitions": 2})):
            await client.topic(name).create(**options)
            for i in range(20):
                for partition in range(options.get("partitions", 1)):
                    first = await client.topic(name).produce(
                        *numbers(i * 50, 50), partition=partition
                    )
                    assert first == i * 50
            await client.topic(name).group("billing").commit(123)
            assert await client.topic(name).produce(b"before", partition=0) == 1000
            if options:
                await client.admin.move_topic(name)
            else:
                call = ["move", name, "--shared", "--url", here.url]
                moved = await asyncio.to_thread(CliRunner().invoke, commands, call)
                assert moved.exit_code == 0, moved.stderr
                assert "shared" in moved.stdout
            assert await client.topic(name).produce(b"after", partition=0) == 1001
            assert await client.topic(name).produce(b"here", partition=0) == 1002
            assert await other.topic(name).produce(b"there", partition=0) == 1003
            for one in (client, other):
                read = [(r.offset, r.payload) async for r in one.topic(name).read()]
                values = [*numbers(0, 1000), b"before", b"after", b"here", b"there"]
                assert read == list(enumerate(values))
                assert (await one.topic(name).group("billing").committed())[0] == 123
        assert await other.topic(f"{topic}-k").next_offset(partition=1) == 1000
        answer = await asyncio.to_thread(httpx.get, f"{there.url}/topics/{topic}")
        assert (answer.json()["placement"], answer.json()["move"]) == ("shared", None)
        await client.admin.move_topic(topic)  # it is there already


async def lock(connection: asyncpg.Connection, sql: str) -> Transaction:
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute(sql)
    return transaction


async def waiting_process(
    watcher: asyncpg.Connection, statement: str, by: str, count: int = 1
) -> int:
    """Return the process that waits for a lock in a statement, when so many do."""

    async def enough() -> int | None:
        rows = await watcher.fetch(
            """SELECT pid FROM pg_stat_activity WHERE datname = current_database()
                  AND (wait_event = 'relation') = $2 AND wait_event_type = 'Lock'
                  AND position($1 IN query) > 0""",
            *(statement, by == "table"),
        )
        return rows[0]["pid"] if len(rows) == count else None

    return int(await eventually(enough))


async def assert_refused_while_closing(url: str, topic: str) -> None:
    for method, address, body in (
        ("POST", f"{url}/topics/{topic}/produce", {"payloads": ["no"]}),
        ("DELETE", f"{url}/topics/{topic}", None),
    ):
        refused = await asyncio.to_thread(httpx.request, method, address, json=body)
        assert refused.status_code == 503, refused.text


async def test_a_move_continues_after_kills_in_each_of_its_states(
    postgres: EmbeddedPostgres, tmp_path: Path, topic: str
) -> None:
    """A lock on a table stops the move before a statement, a lock on the row inside of it. Such a
    statement is executed although its broker is gone by then.
    """
    url = await asyncio.to_thread(fresh_database, postgres, migrated=True)
    broker = BrokerProcess(tmp_path / "broker", database_url=url)
    values = numbers(0, 8)
    connections = [
        await asyncpg.connect(url, server_settings={"search_path": "penstock"}) for _ in range(3)
    ]
    watcher, for_table, for_row = connections
    stopped = partial(waiting_process, watcher)
    row = "SELECT FROM shared_logs FOR UPDATE"
    copy, switch = "next_offset = $3", "moving = false"
    try:
        await asyncio.to_thread(broker.start)
        move = f"{broker.url}/topics/{topic}/move"
        async with Client(broker.url, retry_for=SECONDS) as client:
            await client.topic(topic).produce(*values[:7])
            await client.topic(topic).group("billing").commit(3)
        table_lock = await lock(for_table, "LOCK TABLE shared_batches IN SHARE MODE")
        begun = await asyncio.to_thread(httpx.post, move, timeout=SECONDS)
        assert begun.json()["state"] == "copying"
        await stopped(copy, "table")
        row_lock = await lock(for_row, row)
        await table_lock.commit()
        await stopped(copy, "row")
        async with Client(broker.url, retry_for=SECONDS) as client:
            assert await client.topic(topic).produce(values[7]) == 7
        broker.kill()  # while it copies
        await asyncio.to_thread(broker.start)
        # The statement of the killed broker has a record less than the one from the same offset on.
        await stopped(copy, "row", 2)
        table_lock = await lock(for_table, "LOCK TABLE shared_producers IN SHARE MODE")
        await row_lock.commit()

        before_switch = await stopped(switch, "table")
        about = (await asyncio.to_thread(httpx.get, f"{broker.url}/topics/{topic}")).json()
        state = about["move"]
        assert (state["state"], state["copied"], state["total"]) == ("closing", 8, 8)
        broker.kill()  # before the switch
        await watcher.execute("SELECT pg_terminate_backend($1)", before_switch)
        await asyncio.to_thread(broker.start)
        await stopped(switch, "table")
        await assert_refused_while_closing(broker.url, topic)
        row_lock = await lock(for_row, row)
        await table_lock.commit()
        await stopped(switch, "row")
        broker.kill()  # before the answer of the switch
        await row_lock.commit()
        await eventually(lambda: watcher.fetchval("SELECT NOT bool_or(moving) FROM shared_logs"))

        await asyncio.to_thread(broker.start)
        async with Client(broker.url, retry_for=SECONDS) as client:
            await client.admin.move_topic(topic)
            assert await client.topic(topic).produce(b"later") == 8
            read = [(r.offset, r.payload) async for r in client.topic(topic).read()]
            assert read == list(enumerate([*values, b"later"]))
            assert (await client.topic(topic).group("billing").committed())[0] == 3
        info = (await asyncio.to_thread(httpx.get, f"{broker.url}/topics/{topic}")).json()
        assert info["placement"] == "shared"
    finally:
        broker.stop()
        for connection in connections:
            await connection.close()


async def _knows(broker: BrokerProcess, topic: str) -> bool:
    async with httpx.AsyncClient(base_url=broker.url, timeout=SECONDS) as http:
        return (await http.get(f"/topics/{topic}")).status_code == 200


async def test_a_group_skips_nothing_that_another_broker_has_just_appended(
    brokers: list[BrokerProcess], topic: str
) -> None:
    """PostgreSQL hands out ranges, and a broker may not have heard of their records yet."""
    async with (
        Client(brokers[0].url) as here,
        Client(brokers[1].url) as there,
        httpx.AsyncClient(base_url=f"{brokers[1].url}/topics/{topic}", timeout=SECONDS) as http,
    ):
        await here.topic(topic).create(shared=True)
        # A new topic, unlike a new record, is known elsewhere when its notice has arrived.
        await eventually(lambda: _knows(brokers[1], topic))
        got = []
        for value in numbers(0, 20):
            offset = await here.topic(topic).produce(value)
            answer = await http.get("/consume", params={"offset": offset})
            assert [one["payload"].encode() for one in answer.json()] == [value]
        for value in numbers(20, 20):
            await here.topic(topic).produce(value)
            async for batch in there.topic(topic).group("workers").take(follow=False):
                got += [bytes(record.payload) for record in batch]
        assert got == numbers(0, 40)
