"""Topics of this release in a data directory, or on a database, that release 0.2.0 uses too.

0.2.0 does not know record batches. It is the commit that set this version; `PENSTOCK_PREVIOUS` names
another one.
"""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest

from penstock import Client
from tests.conftest import create_database
from tests.support.api import call
from tests.support.broker import BrokerProcess, ServeProcess
from tests.support.releases import chosen, git, unpack

RELEASE = "0.2.0"


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What to put on PYTHONPATH for 0.2.0."""
    version = f'-S__version__ = "{RELEASE}"'
    reference = chosen() or git("log", "-1", "--format=%H", version, "--", "src/penstock")
    if not reference:
        pytest.skip(f"needs the commit of {RELEASE}: the repository's history ends before it")
    return unpack(reference, tmp_path_factory.mktemp("previous"))


def old_broker(data_dir: Path, database_url: str, previous: Path) -> ServeProcess:
    """A broker of 0.2.0, which has no listener for Kafka."""
    env = {"PYTHONPATH": str(previous), "PYTHONSAFEPATH": "1"}
    broker = ServeProcess(data_dir, database_url=database_url, env=env)
    broker.ports.pop("kafka")
    return broker


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def database(postgres) -> Iterator[str]:
    return asyncio.run(create_database(postgres, empty=True))


async def read_all(broker: BrokerProcess, topic: str) -> list[bytes]:
    async with (
        Client(broker.url) as client,
        client.topic(topic).reader(follow=False) as reader,
    ):
        return [record.payload async for record in reader]


async def produce(broker: BrokerProcess, topic: str, *payloads: bytes) -> None:
    async with Client(broker.url) as client:
        await client.topic(topic).produce(*payloads)


def produce_with_keys(broker: BrokerProcess, topic: str, numbers: range) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.kafka, "log_level": 0})
    for number in numbers:
        producer.produce(topic, b"%d" % number, key=b"k")
    assert producer.flush(60) == 0


def test_0_2_0_leaves_record_batches_alone_and_appends_to_the_topics_it_knows(
    database: str, tmp_path: Path, previous: Path
) -> None:
    data = tmp_path / "data"
    with old_broker(data, database, previous) as broker:
        asyncio.run(produce(broker, "plain", b"1"))
    with BrokerProcess(data, database_url=database) as broker:
        produce_with_keys(broker, "keyed", range(100))
        asyncio.run(produce(broker, "plain", b"2"))
    logs = data / ".penstock" / "logs"
    before = files_of(logs)
    with old_broker(data, database, previous) as broker:
        asyncio.run(produce(broker, "plain", b"3"))
        assert asyncio.run(read_all(broker, "plain")) == [b"1", b"2", b"3"], (
            "our client reads from it, without the format byte"
        )
        names = set(call(f"{broker.url}/topics"))
        assert names == {"plain"}
        assert not re.search("error|traceback", broker.log, re.IGNORECASE), broker.log
    assert files_of(logs) == before, "0.2.0 has not touched them"
    with BrokerProcess(data, database_url=database) as broker:
        assert asyncio.run(read_all(broker, "plain")) == [b"1", b"2", b"3"]
        assert asyncio.run(read_all(broker, "keyed")) == [b"%d" % number for number in range(100)]
        produce_with_keys(broker, "keyed", range(100, 110))


async def push_and_take(pushing: BrokerProcess, taking: BrokerProcess, data: str) -> None:
    async with Client(pushing.url) as client:
        await client.push("jobs", data)
    async with Client(taking.url) as client:
        message = await anext(aiter(client.take("jobs")))
        assert message.data == data
        await message.ack()


def test_0_2_0_serves_queues_and_does_not_see_shared_topics_beside_this_release(
    database: str, tmp_path: Path, previous: Path
) -> None:
    with old_broker(tmp_path / "old", database, previous) as old:
        asyncio.run(push_and_take(old, old, "alone"))
        with BrokerProcess(tmp_path / "new", database_url=database) as new:
            call(f"{new.url}/topics/orders?placement=shared", "POST")
            asyncio.run(produce(new, "orders", b"1", b"2"))
            asyncio.run(push_and_take(old, new, "to this release"))
            asyncio.run(push_and_take(new, old, "to 0.2.0"))
            assert "orders" not in set(call(f"{old.url}/topics"))
            assert call(f"{old.url}/topics/orders/consume") == []  # as for any unknown topic
            asyncio.run(produce(old, "orders", b"local"))  # a topic of its own, on its own disk
            asyncio.run(produce(new, "orders", b"3"))
            assert asyncio.run(read_all(old, "orders")) == [b"local"]
            assert asyncio.run(read_all(new, "orders")) == [b"1", b"2", b"3"]
            old.stop()
            old.start()  # it joins the database that this release has migrated
            asyncio.run(push_and_take(old, new, "once more"))
        asyncio.run(push_and_take(old, old, "alone again"))
        assert not re.search("error|traceback", old.log, re.IGNORECASE), old.log
    with BrokerProcess(tmp_path / "new", database_url=database) as new:
        assert asyncio.run(read_all(new, "orders")) == [b"1", b"2", b"3"]


def test_a_name_that_0_2_0_used_for_another_topic_is_refused_and_both_stay(
    database: str, tmp_path: Path, previous: Path
) -> None:
    data = tmp_path / "data"
    with old_broker(data, database, previous):
        pass  # it has worked on this database, so it can come back
    with BrokerProcess(data, database_url=database) as broker:
        produce_with_keys(broker, "orders", range(5))
    with old_broker(data, database, previous) as broker:
        asyncio.run(produce(broker, "orders", b"old"))
    with BrokerProcess(data, database_url=database) as broker:
        assert "topic orders/0 cannot be opened" in broker.log
        assert asyncio.run(read_all(broker, "orders")) == [b"old"]
    (data / "orders").rename(tmp_path / "orders-of-0.2.0")  # what the page says to do
    with BrokerProcess(data, database_url=database) as broker:
        assert asyncio.run(read_all(broker, "orders")) == [b"%d" % number for number in range(5)]
