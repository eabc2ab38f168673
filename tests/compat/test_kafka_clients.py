"""Kafka's own clients, unchanged, against our listener: kcat, confluent-kafka, aiokafka and
kafka-python.
"""

import asyncio
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import aiokafka
import confluent_kafka
import kafka
import pytest
from aiokafka.abc import AbstractTokenProvider
from aiokafka.helpers import create_ssl_context
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
)

from penstock.errors import Conflict
from penstock.wire.tls import Certificate
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.served import Served, serving_in_thread
from tests.support.tokens import SECRET, token
from tests.support.wait import eventually, until

pytestmark = pytest.mark.xdist_group("compat-kafka")

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
LIMIT = 3600.0  # seconds for all tests of a listener
PATIENCE = 90.0  # seconds for a machine that is busy with other things
Records = list[tuple[bytes | None, bytes | None]]  # key and value


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("kafka")
    with serving_in_thread(directory, limit=LIMIT, kafka={"partitions": 2}) as one:
        yield one


@pytest.fixture
def topic() -> str:
    return f"t-{uuid.uuid4().hex[:12]}"


class Client(Protocol):
    """One of the foreign clients, as the tests need it. Options are those of a connection."""

    def produce(
        self, address: str, topic: str, records: Records, *, codec: str = "none", **options: Any
    ) -> None: ...

    def consume(self, address: str, topic: str, count: int, **options: Any) -> Records: ...


class Kcat:
    @staticmethod
    def _run(address: str, *arguments: str, given: bytes | None = None, **options: Any) -> bytes:
        if shutil.which("kcat") is None:
            pytest.skip("needs kcat: tools/test-programs installs it with apt-get")
        settings = [f"-X{name.replace('_', '.')}={value}" for name, value in options.items()]
        ran = subprocess.run(
            ["kcat", "-b", address, "-q", *settings, *arguments],
            input=given,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr.decode()
        return ran.stdout

    def produce(
        self, address: str, topic: str, records: Records, *, codec: str = "none", **options: Any
    ) -> None:
        lines = b"".join(b"%s\t%s\n" % record for record in records)  # type: ignore[misc]
        arguments = ["-P", "-t", topic, "-K\t", "-z", codec]
        self._run(address, *arguments, given=lines, **_librdkafka(options))

    def consume(self, address: str, topic: str, count: int, **options: Any) -> Records:
        arguments = ["-C", "-t", topic, "-o", "beginning", "-c", str(count), "-f", "%k\t%s\n"]
        out = self._run(address, *arguments, **_librdkafka(options))
        return [tuple(line.split(b"\t", 1)) for line in out.splitlines()]  # type: ignore[misc]


def _librdkafka(options: dict[str, Any]) -> dict[str, Any]:
    renamed = {}
    if "ca" in options:
        renamed |= {"security_protocol": "SSL", "ssl_ca_location": options["ca"]}
    if "password" in options:
        renamed |= {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "PLAIN",
            "sasl_username": "me",
            "sasl_password": options["password"],
        }
    return renamed


class Confluent:
    @staticmethod
    def config(address: str, options: dict[str, Any]) -> dict[str, Any]:
        options = dict(options)
        bearer = options.pop("bearer", None)
        config = {"bootstrap.servers": address, "log_level": 2}
        config |= {name.replace("_", "."): value for name, value in _librdkafka(options).items()}
        if bearer is not None:
            config |= {
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "OAUTHBEARER",
                "oauth_cb": lambda _: (bearer, time.time() + 3600),
            }
        return config

    def produce(
        self, address: str, topic: str, records: Records, *, codec: str = "none", **options: Any
    ) -> None:
        idempotent = options.pop("idempotent", False)
        producer = confluent_kafka.Producer(
            {
                **self.config(address, options),
                "compression.type": codec,
                "enable.idempotence": idempotent,
            }
        )
        failed: list[Any] = []
        for key, value in records:
            producer.produce(
                topic, value, key, partition=0, on_delivery=lambda error, _: failed.append(error)
            )
        assert producer.flush(PATIENCE) == 0
        assert set(failed) == {None}

    def consume(self, address: str, topic: str, count: int, **options: Any) -> Records:
        consumer = confluent_kafka.Consumer(
            {
                **self.config(address, options),
                "group.id": f"g-{uuid.uuid4().hex}",
                "auto.offset.reset": "earliest",
            }
        )
        consumer.subscribe([topic])
        found: Records = []
        until(lambda: _poll_into(consumer, found) or len(found) >= count, PATIENCE)
        consumer.close()
        return found


def _poll_into(consumer: Any, found: Records) -> None:
    for message in consumer.consume(1000, 0.2):
        assert message.error() is None, message.error()
        found.append((message.key(), message.value()))


class KafkaPython:
    @staticmethod
    def config(address: str, options: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = {"bootstrap_servers": address}
        if "ca" in options:
            config |= {"security_protocol": "SSL", "ssl_cafile": str(options["ca"])}
        if "password" in options:
            config |= {
                "security_protocol": "SASL_PLAINTEXT",
                "sasl_mechanism": "PLAIN",
                "sasl_plain_username": "me",
                "sasl_plain_password": options["password"],
            }
        return config

    def produce(
        self, address: str, topic: str, records: Records, *, codec: str = "none", **options: Any
    ) -> None:
        config = self.config(address, options)
        if not options.get("idempotent", True):
            config["enable_idempotence"] = False
        producer = kafka.KafkaProducer(
            **config, compression_type=None if codec == "none" else codec, linger_ms=5
        )
        sent = [producer.send(topic, value, key, partition=0) for key, value in records]
        for future in sent:
            future.get(PATIENCE)
        producer.close()

    def consume(self, address: str, topic: str, count: int, **options: Any) -> Records:
        consumer = kafka.KafkaConsumer(
            topic,
            **self.config(address, options),
            group_id=f"g-{uuid.uuid4().hex}",
            auto_offset_reset="earliest",
        )
        found: Records = []

        def poll() -> bool:
            for records in consumer.poll(200).values():
                found.extend((record.key, record.value) for record in records)
            return len(found) >= count

        until(poll, PATIENCE)
        consumer.close()
        return found


class BearerToken(AbstractTokenProvider):  # type: ignore[misc]
    def __init__(self, value: str) -> None:
        self._value = value

    async def token(self) -> str:
        return self._value


class Aiokafka:
    @staticmethod
    def config(address: str, options: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = {"bootstrap_servers": address}
        if "ca" in options:
            config["security_protocol"] = "SSL"
            config["ssl_context"] = create_ssl_context(cafile=str(options["ca"]))
        if "password" in options:
            config |= {
                "security_protocol": "SASL_PLAINTEXT",
                "sasl_mechanism": "PLAIN",
                "sasl_plain_username": "me",
                "sasl_plain_password": options["password"],
            }
        if "bearer" in options:
            config |= {
                "security_protocol": "SASL_PLAINTEXT",
                "sasl_mechanism": "OAUTHBEARER",
                "sasl_oauth_token_provider": BearerToken(options["bearer"]),
            }
        return config

    def produce(
        self, address: str, topic: str, records: Records, *, codec: str = "none", **options: Any
    ) -> None:
        async def body() -> None:
            producer = aiokafka.AIOKafkaProducer(
                **self.config(address, options),
                compression_type=None if codec == "none" else codec,
                enable_idempotence=options.get("idempotent", False),
            )
            await producer.start()
            try:
                sent = [await producer.send(topic, value, key, 0) for key, value in records]
                await asyncio.gather(*sent)
            finally:
                await producer.stop()

        asyncio.run(body())

    def consume(self, address: str, topic: str, count: int, **options: Any) -> Records:
        async def body() -> Records:
            found: Records = []
            consumer = aiokafka.AIOKafkaConsumer(
                topic,
                **self.config(address, options),
                group_id=f"g-{uuid.uuid4().hex}",
                auto_offset_reset="earliest",
            )
            await consumer.start()
            try:
                async with asyncio.timeout(PATIENCE):
                    while len(found) < count:
                        record = await consumer.getone()
                        found.append((record.key, record.value))
            finally:
                await consumer.stop()
            return found

        return asyncio.run(body())


CLIENTS: dict[str, Callable[[], Client]] = {
    "kcat": Kcat,
    "confluent": Confluent,
    "aiokafka": Aiokafka,
    "kafka-python": KafkaPython,
}


def numbered(count: int) -> Records:
    return [(b"k%d" % number, b"value %d" % number) for number in range(count)]


# Records


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_produces_and_consumes_with_every_codec(
    served: Served, topic: str, name: str, codec: str
):
    client, records = CLIENTS[name](), numbered(300)
    client.produce(served.kafka_address, topic, records, codec=codec)
    assert sorted(client.consume(served.kafka_address, topic, len(records))) == sorted(records)


@pytest.mark.parametrize("codec", CODECS)
def test_what_one_client_compresses_the_others_and_we_read(served: Served, topic: str, codec: str):
    records = numbered(100)
    Confluent().produce(served.kafka_address, topic, records, codec=codec)
    for client in (Aiokafka(), KafkaPython()):
        assert client.consume(served.kafka_address, topic, len(records)) == records
    stored = served.topics.require(topic).read(0, 1000)
    assert [bytes(one) for one in stored.payloads()] == [value for _, value in records]


@pytest.mark.parametrize("name", ["confluent", "aiokafka", "kafka-python"])
def test_an_idempotent_producer_stores_each_record_once_and_in_order(
    served: Served, topic: str, name: str
):
    records = numbered(2000)
    CLIENTS[name]().produce(served.kafka_address, topic, records, idempotent=True)
    assert Confluent().consume(served.kafka_address, topic, len(records)) == records


@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_records_arrive_whatever_the_producer_waits_for(served: Served, topic: str, acks: Any):
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": served.kafka_address, "acks": acks, "log_level": 2}
    )
    for _, value in numbered(100):
        producer.produce(topic, value, partition=0)
    assert producer.flush(PATIENCE) == 0
    assert len(Confluent().consume(served.kafka_address, topic, 100)) == 100


# Access


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: Any) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("kafka-sasl")
    with serving_in_thread(directory, limit=LIMIT, auth={"secret": SECRET}) as one:
        yield one


@pytest.mark.parametrize("name", CLIENTS)
def test_a_token_is_the_password_of_sasl_plain(guarded: Served, topic: str, name: str):
    client, records = CLIENTS[name](), numbered(10)
    client.produce(guarded.kafka_address, topic, records, password=token("read-write"))
    found = client.consume(guarded.kafka_address, topic, 10, password=token("read-write"))
    assert found == records


@pytest.mark.parametrize("name", ["confluent", "aiokafka"])
def test_a_token_is_what_oauthbearer_brings(guarded: Served, topic: str, name: str):
    client, records = CLIENTS[name](), numbered(10)
    client.produce(guarded.kafka_address, topic, records, bearer=token("read-write"))
    assert client.consume(guarded.kafka_address, topic, 10, bearer=token("read-write")) == records


async def test_a_wrong_token_and_a_role_that_is_too_low_are_refused(guarded: Served, topic: str):
    async def start(password: str) -> None:
        producer = aiokafka.AIOKafkaProducer(
            **Aiokafka.config(guarded.kafka_address, {"password": password})
        )
        try:
            await producer.start()
            await producer.send_and_wait(topic, b"value", partition=0)
        finally:
            await producer.stop()

    with pytest.raises(aiokafka.errors.KafkaError):
        await start("not a token")
    guarded_topic = guarded.topics.get(topic)
    assert guarded_topic is None
    Confluent().produce(guarded.kafka_address, topic, numbered(1), password=token("read-write"))
    with pytest.raises(aiokafka.errors.TopicAuthorizationFailedError):
        await start(token("read-only"))
    assert guarded.topics.require(topic).next_offset == 1


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_speaks_tls(tmp_path: Path, topic: str, name: str):
    authority = Authority()
    ca, _ = authority.write(tmp_path)
    certificate = Certificate(*authority.issue(tmp_path), None, "1.2")
    port = free_port()
    address = f"localhost:{port}"
    listener = {"port": port, "advertised": address}
    with serving_in_thread(tmp_path / "data", tls=certificate, kafka=listener):
        client, records = CLIENTS[name](), numbered(10)
        client.produce(address, topic, records, ca=str(ca))
        assert client.consume(address, topic, 10, ca=str(ca)) == records


# Groups


class ConfluentMember:
    """A member of a group that counts what it gets."""

    def __init__(self, address: str, group: str, topic: str, **options: Any) -> None:
        self.found: Records = []
        self.consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": address,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 6000,
                "heartbeat.interval.ms": 500,
                "log_level": 2,
                **options,
            }
        )
        self.consumer.subscribe([topic])

    def poll(self) -> set[int]:
        """The partitions it has."""
        _poll_into(self.consumer, self.found)
        return {one.partition for one in self.consumer.assignment()}


def make_topic(served: Served, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": served.kafka_address})
    for future in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
        future.result(PATIENCE)


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_members_come_and_go_and_every_partition_always_has_one(
    served: Served, topic: str, strategy: str
):
    make_topic(served, topic, 4)
    producer = confluent_kafka.Producer({"bootstrap.servers": served.kafka_address})
    group = f"g-{topic}"
    options = {"partition.assignment.strategy": strategy}
    first = ConfluentMember(served.kafka_address, group, topic, **options)
    until(lambda: first.poll() == {0, 1, 2, 3}, PATIENCE)
    second = ConfluentMember(served.kafka_address, group, topic, **options)
    until(
        lambda: (
            len(first.poll()) == len(second.poll()) == 2
            and first.poll() | second.poll() == {0, 1, 2, 3}
        ),
        PATIENCE,
    )
    for number in range(400):
        producer.produce(topic, b"%d" % number, partition=number % 4)
    assert producer.flush(PATIENCE) == 0
    until(
        lambda: [first.poll(), second.poll()] and len(first.found) + len(second.found) >= 400,
        PATIENCE,
    )
    seen = sorted(int(value or b"") for _, value in first.found + second.found)
    assert seen == list(range(400))
    first.consumer.close()
    until(lambda: second.poll() == {0, 1, 2, 3}, PATIENCE)
    second.consumer.close()
    assert sum(served.groups.lag(group, f"{topic}/{n}" if n else topic) for n in range(4)) == 0


def test_members_of_different_libraries_share_a_group(served: Served, topic: str):
    make_topic(served, topic, 2)
    group = f"g-{topic}"
    options = {"partition.assignment.strategy": "range"}
    ours = ConfluentMember(served.kafka_address, group, topic, **options)
    until(lambda: ours.poll() == {0, 1}, PATIENCE)
    theirs = kafka.KafkaConsumer(
        topic,
        bootstrap_servers=served.kafka_address,
        group_id=group,
        auto_offset_reset="earliest",
        partition_assignment_strategy=[kafka.coordinator.assignors.range.RangePartitionAssignor],
        session_timeout_ms=10_000,
        heartbeat_interval_ms=500,
    )
    until(
        lambda: (
            (theirs.poll(100) is not None)
            and len(ours.poll()) == 1
            and len(theirs.assignment()) == 1
        ),
        PATIENCE,
    )
    theirs.close()
    until(lambda: ours.poll() == {0, 1}, PATIENCE)
    ours.consumer.close()


def test_a_static_member_comes_back_without_a_rebalance(served: Served, topic: str):
    make_topic(served, topic, 2)
    group = f"g-{topic}"
    rebalances = "penstock_kafka_rebalances_total"

    def member(name: str) -> ConfluentMember:
        return ConfluentMember(served.kafka_address, group, topic, **{"group.instance.id": name})

    first, second = member("a"), member("b")
    until(lambda: len(first.poll()) == len(second.poll()) == 1, PATIENCE)
    had = first.poll()
    before = served.metrics.values_of(rebalances)[group,]
    first.consumer.close()  # a static member does not leave
    first = member("a")
    until(lambda: (second.poll(), first.poll())[1] == had, PATIENCE)
    assert served.metrics.values_of(rebalances)[group,] == before
    first.consumer.close()
    second.consumer.close()


def test_commits_keep_their_metadata_over_a_restart(tmp_path: Path, topic: str):
    position = confluent_kafka.TopicPartition(topic, 0, 7, metadata="checkpoint 12")
    asked = [confluent_kafka.TopicPartition(topic, 0)]
    with serving_in_thread(tmp_path) as served:
        Confluent().produce(served.kafka_address, topic, numbered(10))
        config = {"bootstrap.servers": served.kafka_address, "group.id": "g"}
        consumer = confluent_kafka.Consumer(config)
        consumer.commit(offsets=[position], asynchronous=False)
        consumer.close()
    with serving_in_thread(tmp_path) as served:
        consumer = confluent_kafka.Consumer({**config, "bootstrap.servers": served.kafka_address})
        (found,) = consumer.committed(asked, PATIENCE)
        assert (found.offset, found.metadata) == (7, "checkpoint 12")
        consumer.close()


async def test_a_group_is_leased_or_assigned_and_never_both(served: Served, topic: str):
    Confluent().produce(served.kafka_address, topic, numbered(10))
    group = f"g-{topic}"
    member = ConfluentMember(served.kafka_address, group, topic)
    until(lambda: len(member.poll()) == 2 and len(member.found) == 10, PATIENCE)
    with pytest.raises(Conflict):
        served.groups.lease(group, topic, "ours", 10)
    member.consumer.commit(asynchronous=False)
    (details,) = (one for one in served.groups.details(group) if one.topic == topic)
    assert details.lag == 0
    (described,) = details.members
    assert (described.client, described.partitions) == ("rdkafka", [0, 1])
    member.consumer.close()
    await eventually(lambda: not served.groups.assigned.has_members(group))
    served.groups.set_committed(group, topic, 0)
    lease = served.groups.lease(group, topic, "ours", 10)
    assert lease is not None
    refused = ConfluentMember(served.kafka_address, group, topic)
    errors = until(
        lambda: [one.error().code() for one in refused.consumer.consume(1, 0.2)], PATIENCE
    )
    assert errors == [confluent_kafka.KafkaError.INCONSISTENT_GROUP_PROTOCOL]
    refused.consumer.close()
    await served.groups.complete(lease.lease_id)


# Administration


def test_an_admin_client_manages_topics_and_groups(served: Served, topic: str):
    admin = AdminClient({"bootstrap.servers": served.kafka_address})

    def done(futures: dict[Any, Any]) -> list[Any]:
        return [future.result(PATIENCE) for future in futures.values()]

    done(admin.create_topics([NewTopic(topic, 2, 1, config={"cleanup.policy": "compact"})]))
    with pytest.raises(confluent_kafka.KafkaException, match="exists"):
        done(admin.create_topics([NewTopic(topic, 2, 1)]))
    done(admin.create_partitions([NewPartitions(topic, 3)]))
    assert len(admin.list_topics(topic).topics[topic].partitions) == 3
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    (configs,) = done(admin.describe_configs([resource]))
    assert configs["cleanup.policy"].value == "compact"
    assert int(configs["max.message.bytes"].value) == 64 << 20
    change = ConfigEntry("cleanup.policy", "delete", incremental_operation=AlterConfigOpType.SET)
    changed = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[change])
    done(admin.incremental_alter_configs([changed]))
    assert served.topics.partition(topic, 2).policy == "delete"

    def alter(name: str, value: str | None) -> None:
        how = AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
        entry = ConfigEntry(name, value, incremental_operation=how)
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
        done(admin.incremental_alter_configs([resource]))

    alter("retention.ms", "3600000")
    alter("max.message.bytes", "1000")
    (configs,) = done(admin.describe_configs([resource]))
    assert configs["retention.ms"].value == "3600000"
    assert served.topics.partition(topic, 2).limits.retention_age == 3600
    with pytest.raises(confluent_kafka.KafkaException, match=r"topics\.max_record"):
        alter("max.message.bytes", str(65 << 20))
    with pytest.raises(AssertionError, match="MSG_SIZE_TOO_LARGE"):
        Confluent().produce(served.kafka_address, topic, [(None, b"x" * 2000)])
    alter("max.message.bytes", None)
    (configs,) = done(admin.describe_configs([resource]))
    assert int(configs["max.message.bytes"].value) == 64 << 20
    Confluent().produce(served.kafka_address, topic, numbered(20))
    first = confluent_kafka.TopicPartition(topic, 0)
    (offset,) = done(admin.list_offsets({first: OffsetSpec.latest()}))
    assert offset.offset == 20
    (deleted,) = done(admin.delete_records([confluent_kafka.TopicPartition(topic, 0, 7)]))
    assert deleted.low_watermark == served.topics.require(topic).first_offset == 7
    (deleted,) = done(admin.delete_records([confluent_kafka.TopicPartition(topic, 0, 20)]))
    assert deleted.low_watermark == served.topics.require(topic).first_offset == 20
    group = f"g-{topic}"
    member = ConfluentMember(served.kafka_address, group, topic)
    until(lambda: len(member.poll()) == 3, PATIENCE)
    (described,) = done(admin.describe_consumer_groups([group]))
    assert described.state == confluent_kafka.ConsumerGroupState.STABLE
    assert len(described.members[0].assignment.topic_partitions) == 3
    with pytest.raises(confluent_kafka.KafkaException):
        done(admin.delete_consumer_groups([group]))
    member.consumer.commit(offsets=[first.__class__(topic, 1, 0)], asynchronous=False)
    member.consumer.close()
    assert group in [one.group_id for one in admin.list_consumer_groups().result(PATIENCE).valid]
    until(lambda: not served.groups.assigned.has_members(group), PATIENCE)
    done(admin.delete_consumer_groups([group]))
    assert group not in served.groups.names()
    assert admin.describe_cluster().result(PATIENCE).cluster_id == "penstock"
    done(admin.delete_topics([topic]))
    assert served.topics.get(topic) is None


def test_many_topics_with_short_names_are_seen(tmp_path: Path) -> None:
    names = [f"{i:x}" for i in range(40)]
    with serving_in_thread(tmp_path, kafka={"partitions": 1}) as served:
        producer = confluent_kafka.Producer({"bootstrap.servers": served.kafka_address})
        for name in names:
            producer.produce(name, b"x")
        assert producer.flush(PATIENCE) == 0
        listed = producer.list_topics(timeout=PATIENCE)
    assert set(names) <= listed.topics.keys()
