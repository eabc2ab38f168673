"""Produce, Fetch and offsets, request by request."""

import asyncio
import time
from pathlib import Path

import cramjam
import pytest

from penstock.client import Client
from penstock.errors import Damaged
from penstock.log.format import InvalidRecord
from penstock.protocol.kafka_batch import NewRecord, decode_batch, encode_head, split_batches
from penstock.wire.kafka.requests import APIS
from tests.support.kafka_wire import KafkaWire, encode_batch, plain_batch, request_bytes
from tests.support.served import serving
from tests.support.wait import eventually

PRODUCE, FETCH, OFFSETS, METADATA, API_VERSIONS, INIT_PRODUCER = 0, 1, 2, 3, 18, 22
OFFSET_COMMIT, OFFSET_FETCH = 8, 9
HEARTBEAT = 12
OFFSET_OUT_OF_RANGE, INVALID_GROUP_ID, INVALID_RECORD = 1, 24, 87


def values(data: bytes) -> list[bytes | None]:
    return [
        record.value for _, batch in split_batches(data) for record in decode_batch(bytes(batch))
    ]


async def test_a_batch_is_stored_and_read_as_it_came(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        await served.topics.create("orders", form="kafka")
        sent = plain_batch(b"one", b"two")
        answer = await wire.produce("orders", sent)
        assert (answer.error_code, answer.base_offset, answer.log_start_offset) == (0, 0, 0)
        again = await wire.produce("orders", sent)
        assert again.base_offset == 2
        found = await wire.fetch("orders", 0)
        assert (found.error_code, found.high_watermark, found.log_start_offset) == (0, 4, 0)
        # only base offset and leader epoch, which no checksum covers, are ours
        assert found.records[16 : len(sent)] == sent[16:]
        assert values(found.records) == [b"one", b"two"] * 2
        wire.close()


async def test_an_offset_inside_a_batch_gives_the_whole_batch(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        await served.topics.create("orders", form="kafka")
        await wire.produce("orders", plain_batch(b"0", b"1", b"2"))
        await wire.produce("orders", plain_batch(b"3"))
        assert values((await wire.fetch("orders", 1)).records) == [b"0", b"1", b"2", b"3"]
        assert values((await wire.fetch("orders", 3)).records) == [b"3"]
        wire.close()


async def test_at_least_one_batch_is_returned_however_small_the_limit(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        await served.topics.create("orders", form="kafka")
        await wire.produce("orders", plain_batch(b"x" * 100_000))
        await wire.produce("orders", plain_batch(b"y"))
        found = await wire.fetch("orders", 0, max_bytes=10, partition_max_bytes=10)
        assert values(found.records) == [b"x" * 100_000]
        wire.close()


async def test_a_fetch_session_is_declined(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        declined = await wire.ask(1, 11, session_id=7, session_epoch=1, topics=[])
        assert declined.error_code == 70
        wire.close()


async def test_a_fetch_waits_for_min_bytes_and_at_most_max_wait(tmp_path: Path):
    async with serving(tmp_path) as served:
        reading, writing = [await KafkaWire.connect(served.kafka.port) for _ in range(2)]
        await served.topics.create("orders", form="kafka")
        began = time.monotonic()
        empty = await reading.fetch("orders", 0, max_wait=0.2)
        assert (empty.records, empty.high_watermark) == (b"", 0)
        assert time.monotonic() - began >= 0.199  # the loop's timers have steps of a millisecond
        waiting = asyncio.create_task(reading.fetch("orders", 0, max_wait=60, min_bytes=150))
        await writing.produce("orders", plain_batch(b"small"))
        await asyncio.sleep(0)
        assert not waiting.done()
        await writing.produce("orders", plain_batch(b"x" * 100))
        assert values((await waiting).records) == [b"small", b"x" * 100]
        reading.close()
        writing.close()


async def test_a_fetch_that_waits_ends_when_the_topic_is_deleted(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        await served.topics.create("orders", form="kafka")
        waiting = asyncio.create_task(wire.fetch("orders", 0, max_wait=60))
        requests = "penstock_kafka_requests_total"
        await eventually(lambda: ("fetch",) in served.metrics.values_of(requests))
        await served.topics.delete("orders")
        assert (await waiting).error_code == 3
        wire.close()


async def test_acks_0_gets_no_answer_and_is_stored(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        topic = await served.topics.create("orders", form="kafka")
        data = {"index": 0, "records": plain_batch(b"quiet")}
        wire.send(PRODUCE, 7, acks=0, topic_data=[{"name": "orders", "partition_data": [data]}])
        answer = await wire.ask(API_VERSIONS, 3)  # the next answer is that of the next request
        assert answer.error_code == 0
        await eventually(lambda: topic.next_offset == 1)
        wire.close()


async def test_produce_requests_are_under_way_together_and_answered_in_order(tmp_path: Path):
    async with serving(tmp_path, fsync="group") as served:
        wire = await KafkaWire.connect(served.kafka.port)
        await served.topics.create("orders", form="kafka")
        sent = []
        for number in range(50):
            data = {"index": 0, "records": plain_batch(b"%d" % number)}
            topics = [{"name": "orders", "partition_data": [data]}]
            sent.append(wire.send(PRODUCE, 9, acks=-1, topic_data=topics))
        answers = [await wire.receive(PRODUCE, 9) for _ in sent]
        assert [correlation for correlation, _ in answers] == sent
        offsets = [one.responses[0].partition_responses[0].base_offset for _, one in answers]
        assert offsets == list(range(50))
        wire.close()


async def test_what_is_wrong_with_a_batch_is_said_for_its_partition(tmp_path: Path):
    async with serving(tmp_path, max_record=10_000) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        await served.topics.create("orders", form="kafka")
        good = plain_batch(b"good")
        torn = good[:-1] + bytes([good[-1] ^ 1])
        transactional = plain_batch(b"t", attributes=0x10)
        for data, code in (
            (torn, 2),
            (good[:30], 2),
            (b"", 42),
            (good + good, 42),
            (plain_batch(b"x" * 10_001), 10),
            (transactional, 42),
        ):
            assert (await wire.produce("orders", data)).error_code == code
        assert (await wire.produce("orders", good, partition=1)).error_code == 3
        assert (await wire.produce("missing", good)).error_code == 3
        assert (await wire.produce("orders", good)).base_offset == 0
        assert (await wire.fetch("orders", 5)).error_code == 1
        assert (await wire.fetch("orders", -1)).error_code == 1
        assert (await wire.fetch("missing", 0)).error_code == 3
        wire.close()


async def test_timestamps_in_nanoseconds_are_refused_and_the_topic_goes_on(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        topic = await served.topics.create("orders", form="kafka")
        now = time.time_ns()
        refused = await wire.produce("orders", encode_batch([NewRecord(b"x")], now))
        assert (refused.error_code, refused.error_message) == (
            INVALID_RECORD,
            f"the timestamp {now} is out of range: it is milliseconds, up to the year 9999",
        )
        with pytest.raises(InvalidRecord):
            await topic.append_records([NewRecord(b"x", timestamp=now)])
        assert (await wire.produce("orders", plain_batch(b"y"))).base_offset == 0
        await topic.seal()
        assert topic.read(0).payloads() == [b"y"]
        wire.close()


def undecodable_batches() -> list[bytes]:
    """Intact batches with offsets 1, 2 to 61, 62 and 63, whose records nobody can decode."""
    many = plain_batch(*[b"many"] * 60)
    (lost_header,) = split_batches(encode_batch([NewRecord(b"h", headers=[("n", b"v")])], 1))
    return [
        encode_head([bodies], count, timestamps=(1, 1), **head) + bodies
        for bodies, count, head in (
            (b"\xff" * 20, 1, {}),
            (many[61:-200] + bytes(200), 60, {}),
            (b"not compressed", 1, {"attributes": 4}),
            (bytes(lost_header[1][61:-4]) + b"\xff" * 4, 1, {}),
        )
    ]


@pytest.mark.parametrize("compacted", [False, True])
async def test_records_that_cannot_be_decoded_stop_nobody(tmp_path: Path, compacted: bool):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        topic = await served.topics.create("orders", form="kafka")
        await wire.produce("orders", plain_batch(b"before"))
        for batch in undecodable_batches():
            assert (await wire.produce("orders", batch)).error_code == 0
        await wire.produce("orders", plain_batch(b"after"))
        await topic.seal()
        wire.close()
    async with serving(tmp_path) as served:
        topic = served.topics.require("orders")
        if compacted:
            await topic.set_policy("compact")
            await served.topics.maintain()
        found, lost, at = list[bytes](), list[int](), 0
        while at < topic.next_offset:
            try:
                batch = topic.read(at)
                found += [one.value or b"" for one in batch.records() or []]
                at = batch.next_offset
            except Damaged as error:
                lost.append(at)
                at = error.resume or topic.next_offset
        assert (found, lost) == ([b"before", b"h", b"after"], [1, 2, 62])
        found, lost, at = [], [], 0
        async with Client(topics=served.address) as client:
            while at < topic.next_offset:
                try:
                    async for record in client.topic("orders").read(at):
                        found.append(record.payload)
                        at = record.offset + 1
                except Damaged as error:
                    lost.append(at)
                    at = error.resume or topic.next_offset
        assert (found, lost) == ([b"before", b"h", b"after"], [1, 2, 62])


async def test_batches_that_grow_when_decompressed_are_read_one_by_one(tmp_path: Path):
    async with serving(tmp_path) as served:
        topic = await served.topics.create("orders", form="kafka")
        body = bytes(cramjam.zstd.compress(plain_batch(bytes(1 << 20))[61:]))
        grown = encode_head([body], 1, timestamps=(1, 1), attributes=4) + body
        for _ in range(3):
            await topic.append_batch(*split_batches(grown)[0])
        assert len(grown) < 1000
        assert len(topic.read(0).buffer) < 2 << 20
        assert topic.read(0, max_bytes=4 << 20).count == 3


async def test_an_idempotent_producer_is_answered_twice_and_stored_once(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        await served.topics.create("orders", form="kafka")
        given = await wire.ask(INIT_PRODUCER, 4, transactional_id=None)
        producer, epoch = given.producer_id, given.producer_epoch
        first = plain_batch(b"a", b"b", producer=(producer, epoch, 0))
        assert (await wire.produce("orders", first)).base_offset == 0
        assert (await wire.produce("orders", first)).base_offset == 0
        gap = plain_batch(b"d", producer=(producer, epoch, 3))
        assert (await wire.produce("orders", gap)).error_code == 45
        second = plain_batch(b"c", producer=(producer, epoch, 2))
        assert (await wire.produce("orders", second)).base_offset == 2
        bumped = await wire.ask(
            INIT_PRODUCER, 4, transactional_id=None, producer_id=producer, producer_epoch=epoch
        )
        assert (bumped.producer_id, bumped.producer_epoch) == (producer, epoch + 1)
        newer = plain_batch(b"d", producer=(producer, epoch + 1, 0))
        assert (await wire.produce("orders", newer)).base_offset == 3
        fenced = plain_batch(b"e", producer=(producer, epoch, 3))
        assert (await wire.produce("orders", fenced)).error_code == 47
        other = await wire.ask(INIT_PRODUCER, 0, transactional_id=None)
        assert other.producer_id != producer
        transactional = await wire.ask(INIT_PRODUCER, 4, transactional_id="t")
        assert transactional.error_code == 42
        wire.close()


async def test_topics_in_aiqs_layout_are_read_and_take_plain_values(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        topic = await served.topics.create("events")
        await topic.append([b"one", b"two"])
        assert (await wire.produce("events", plain_batch(b"three"))).base_offset == 2
        assert values((await wire.fetch("events", 0)).records) == [b"one", b"two", b"three"]
        keyed = encode_batch([NewRecord(b"v", key=b"k")], 1)
        refused = await wire.produce("events", keyed)
        assert refused.error_code == 87
        assert "aiq" in refused.error_message
        assert (await wire.produce("events", encode_batch([NewRecord(None)], 1))).error_code == 87
        wire.close()


async def test_offsets_are_found_by_time(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        await served.topics.create("orders", form="kafka")
        for at in (10_000, 20_000, 30_000):
            records = [NewRecord(b"v", timestamp=at), NewRecord(b"w", timestamp=at + 1)]
            await wire.produce("orders", encode_batch(records, at))

        async def find(timestamp: int) -> tuple[int, int, int]:
            partitions = [{"partition_index": 0, "timestamp": timestamp}]
            topics = [{"name": "orders", "partitions": partitions}]
            answer = await wire.ask(OFFSETS, 6, replica_id=-1, topics=topics)
            found = answer.topics[0].partitions[0]
            return found.error_code, found.offset, found.timestamp

        assert await find(-2) == (0, 0, -1)
        assert await find(-1) == (0, 6, -1)
        assert await find(0) == (0, 0, 10_000)
        assert await find(15_000) == (0, 2, 20_000)
        assert await find(20_001) == (0, 3, 20_001)
        assert await find(40_000) == (0, -1, -1)
        assert (await find(-9))[0] == 42
        wire.close()


async def test_metadata_creates_topics_only_where_the_client_and_the_settings_allow_it(
    tmp_path: Path,
):
    async with serving(tmp_path, kafka={"partitions": 3}) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        await served.topics.create("with space")
        asked = [{"name": "orders"}]
        no = await wire.ask(METADATA, 8, topics=asked, allow_auto_topic_creation=False)
        assert no.topics[0].error_code == 3
        yes = await wire.ask(METADATA, 8, topics=asked, allow_auto_topic_creation=True)
        assert [one.partition_index for one in yes.topics[0].partitions] == [0, 1, 2]
        assert served.topics.require("orders").format.name == "kafka"
        everything = await wire.ask(METADATA, 8, topics=None)
        assert [topic.name for topic in everything.topics] == ["orders"]
        assert everything.brokers[0].port == served.kafka.port
        bad = await wire.ask(METADATA, 8, topics=[{"name": "no/slash"}, {"name": "with space"}])
        assert [topic.error_code for topic in bad.topics] == [17, 17]
        wire.close()


async def test_a_version_that_is_too_new_gets_the_list_of_versions(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        frame = request_bytes(API_VERSIONS, 4, {}, 7)
        wire.writer.write(frame[:6] + b"\0\x63" + frame[8:])
        correlation, answer = await wire.receive(API_VERSIONS, 0)
        assert (correlation, answer.error_code) == (7, 35)
        offered = {one.api_key: (one.min_version, one.max_version) for one in answer.api_keys}
        assert offered == {key: (api.low, api.high) for key, api in APIS.items()}
        assert not {24, 25, 26, 28, 68, 69, 76, 78} & offered.keys()  # transactions and so on
        wire.close()


@pytest.mark.parametrize("key", APIS)
async def test_every_version_of_every_request_is_answered(tmp_path: Path, key: int):
    """Empty requests; the answers are read by kio, without a byte left over."""
    async with serving(tmp_path) as served:
        api = APIS[key]
        for version in range(max(api.low, api.lowest_read), api.high + 1):
            wire = await KafkaWire.connect(served.kafka.port)
            try:
                await wire.ask(key, version, **({"acks": 1} if key == PRODUCE else {}))
            finally:
                wire.close()


async def test_the_offset_of_the_newest_record_is_listed(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        topic = await served.topics.create("orders", form="kafka")
        times = [1_700_000_000_000, 1_700_000_009_000, 1_700_000_005_000]
        for at in times:
            await topic.append_records([NewRecord(b"v", timestamp=at)])
        partitions = [{"partition_index": 0, "timestamp": -3, "current_leader_epoch": -1}]
        body = {"replica_id": -1, "topics": [{"name": "orders", "partitions": partitions}]}
        answer = await wire.ask(OFFSETS, 7, **body, isolation_level=0)
        (found,) = answer.topics[0].partitions
        assert (found.error_code, found.offset, found.timestamp) == (0, 1, times[1])
        wire.close()


async def test_an_answer_without_an_error_has_no_error_message(tmp_path: Path):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        topic = {"name": "new", "num_partitions": 1, "replication_factor": 1}
        answer = await wire.ask(19, 4, topics=[{**topic, "assignments": [], "configs": []}])
        assert (answer.topics[0].error_code, answer.topics[0].error_message) == (0, None)
        wire.close()


async def test_a_commit_beyond_the_end_and_a_group_without_a_name_are_refused(
    tmp_path: Path,
):
    async with serving(tmp_path) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        await served.topics.create("orders", form="kafka")
        await wire.produce("orders", plain_batch(b"one", b"two"))

        async def commit(offset: int) -> int:
            partitions = [{"partition_index": 0, "committed_offset": offset}]
            topics = [{"name": "orders", "partitions": partitions}]
            answer = await wire.ask(OFFSET_COMMIT, 7, group_id="g", topics=topics)
            return answer.topics[0].partitions[0].error_code

        assert await commit(2) == 0
        assert await commit(3) == OFFSET_OUT_OF_RANGE
        answer = await wire.ask(HEARTBEAT, 0, group_id="", generation_id=1, member_id="m")
        assert answer.error_code == INVALID_GROUP_ID
        asked = [{"name": "orders", "partition_indexes": [0]}]
        answer = await wire.ask(OFFSET_FETCH, 7, group_id="g", topics=asked)
        assert answer.topics[0].partitions[0].committed_offset == 2
        wire.close()
