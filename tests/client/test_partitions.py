"""Keys, headers, timestamps and partitions of our client, against a broker."""

from datetime import UTC, datetime

import pytest

from penstock import Client, SyncClient
from penstock.errors import InvalidRequest
from penstock.protocol.partitions import Rotation, murmur2, partition_of
from penstock.protocol.record_batch import Record

# The vectors of Kafka's own test of the hash, as it prints them: signed.
VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "expected"), VECTORS.items())
def test_keys_are_hashed_as_kafkas_clients_do(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected % (1 << 32)
    assert partition_of(key, 7) == (expected & 0x7FFFFFFF) % 7


def test_batches_without_keys_go_to_every_partition_in_turn() -> None:
    rotation = Rotation()
    assert sorted(rotation.next(3) for _ in range(6)) == [0, 0, 1, 1, 2, 2]


def details(record: Record) -> tuple[object, ...]:
    return (*record, record.key, record.headers, record.timestamp, record.partition)


AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
AT_MS = 1769860800000


async def test_a_record_has_its_key_headers_timestamp_and_partition(broker, queue):
    async with Client(broker.url) as client:
        topic = client.topic(queue)
        await topic.create(format="kafka", partitions=3)
        info = await topic.info()
        assert (info.partitions, info.format) == (3, "kafka")
        headers = [("a", b"1"), ("a", None)]
        assert await topic.produce(b"v", key=b"k", headers=headers, timestamp=AT, partition=2) == 0
        assert await topic.produce(None, key=b"k", partition=2) == 1
        one, two = await topic.consume(partition=2)
        assert details(one) == (0, b"v", b"k", tuple(headers), AT_MS, 2)
        assert details(two)[:4] == (1, b"", b"k", ())
        assert (two.tombstone, one.tombstone) == (True, False)
        assert [details(r) for r in [r async for r in topic.read(partition=2)]] == [
            details(one),
            details(two),
        ]
        assert [r async for r in topic.read()] == []


async def test_records_with_one_key_are_in_one_partition_and_the_others_rotate(broker, queue):
    async with Client(broker.url) as client:
        topic = client.topic(queue)
        await topic.create(format="kafka", partitions=3)
        keys = [b"%d" % i for i in range(20)]
        for key in keys:
            await topic.produce(b"v", key=key)
        for number in range(3):
            read = [record.key async for record in topic.read(partition=number)]
            assert read == [key for key in keys if partition_of(key, 3) == number]
        before = [await topic.next_offset(partition=number) for number in range(3)]
        for _ in range(6):
            await topic.produce(b"plain")
        after = [await topic.next_offset(partition=number) for number in range(3)]
        assert [b - a for a, b in zip(before, after, strict=True)] == [2, 2, 2]


async def test_a_batching_producer_keeps_the_order_of_each_key(broker, queue):
    async with Client(broker.url) as client:
        topic = client.topic(queue)
        await topic.create(format="kafka", partitions=3)
        async with topic.producer(max_batch_records=7) as producer:
            for i in range(300):
                await producer.send(b"%d" % i, key=b"key %d" % (i % 10))
            await producer.send(b"named", partition=1, headers=[("h", b"x")])
        assert producer.records == 301
        seen: dict[bytes | None, list[int]] = {}
        for number in range(3):
            async for record in topic.read(partition=number):
                if record.key is None:
                    assert details(record)[1:4] == (b"named", None, (("h", b"x"),))
                    assert number == 1
                    continue
                assert partition_of(record.key, 3) == number
                seen.setdefault(record.key, []).append(int(record.payload))
        assert seen == {b"key %d" % n: list(range(n, 300, 10)) for n in range(10)}


async def test_a_batching_producer_without_keys_uses_every_partition(broker, queue):
    async with Client(broker.url) as client:
        topic = client.topic(queue)
        await topic.create(format="kafka", partitions=3)
        async with topic.producer(max_batch_records=5) as producer:
            await producer.send_many(b"%d" % i for i in range(60))
        ends = [await topic.next_offset(partition=number) for number in range(3)]
        assert ends == [20, 20, 20]


def test_plain_code_produces_and_reads_keys(broker, queue):
    with SyncClient(broker.url) as client:
        topic = client.topic(queue)
        topic.create(format="kafka", partitions=2)
        topic.produce(b"one", key=b"k", partition=1)
        with topic.producer() as producer:
            assert producer.offset(producer.send(b"two", key=b"l", partition=1)) == 1
        assert [record.key for record in topic.read(partition=1)] == [b"k", b"l"]


async def test_a_key_for_a_topic_in_aiqs_layout_is_refused_by_name(broker, queue):
    async with Client(broker.url) as client:
        topic = client.topic(queue)
        await topic.produce(b"plain")
        with pytest.raises(InvalidRequest, match="aiq"):
            await topic.produce(b"v", key=b"k")
        async with topic.producer() as producer:
            delivery = await producer.send(b"v", key=b"k")
            with pytest.raises(InvalidRequest, match="aiq"):
                await producer.flush()
            with pytest.raises(InvalidRequest, match="aiq"):
                await delivery
            await producer.send(b"still working")
        assert [record.payload async for record in topic.read()] == [b"plain", b"still working"]


async def test_a_group_keeps_an_offset_for_each_partition(broker, queue):
    async with Client(broker.url) as client:
        topic = client.topic(queue)
        await topic.create(format="kafka", partitions=2)
        await topic.produce(b"a", b"b", partition=0)
        await topic.produce(b"c", b"d", b"e", partition=1)
        group = topic.group("g")
        taken = [batch async for batch in group.take(follow=False, partition=1)]
        assert [payload for batch in taken for payload in batch.payloads()] == [b"c", b"d", b"e"]
        assert await group.committed(partition=1) == (3, 0)
        assert await group.committed() == (0, 2)
        await group.commit(1)
        assert await group.committed() == (1, 1)
        assert await group.committed(partition=1) == (3, 0)
