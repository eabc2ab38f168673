"""Bytes that are not what they should be: an error of the protocol or a closed connection, and the
listener serves the others.
"""

import asyncio
import random
import resource
from pathlib import Path

from kio.schema.index import api_key_map

from penstock.wire.kafka.requests import APIS
from tests.support.form import pick
from tests.support.kafka_wire import LENGTH, KafkaWire, plain_batch, request_bytes
from tests.support.served import serving
from tests.support.wait import eventually

FRAMES = pick(short=500, usual=3000, soak=20_000)
GROWTH = 64 << 10  # KiB
JOIN = {
    "group_id": "g",
    "protocol_type": "consumer",
    "protocols": [{"name": "range", "metadata": b"\0" * 20}],
}


def good_frames() -> list[bytes]:
    """A request of every API and version, some with content."""
    frames = []
    for key, api in APIS.items():
        for version in range(max(api.low, api.lowest_read), api.high + 1):
            values = {11: JOIN, 3: {"topics": [{"name": "orders"}]}}.get(key, {})
            frames.append(request_bytes(key, version, values))
    partition = {"index": 0, "records": plain_batch(b"one", b"two")}
    produce = {"acks": 1, "topic_data": [{"name": "orders", "partition_data": [partition]}]}
    fetched = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 100}
    fetch = {"topics": [{"topic": "orders", "partitions": [fetched]}]}
    frames += [request_bytes(0, version, produce) for version in range(3, 10)] * 5
    frames += [request_bytes(1, version, fetch) for version in range(4, 13)] * 3
    return frames


def mutated(chance: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    kind = chance.randrange(4)
    for _ in range(chance.randint(1, 4)):
        if kind == 0:
            data[chance.randrange(4, len(data))] = chance.randrange(256)
        elif kind == 1:
            at = chance.randrange(4, len(data))
            data[at : at + 4] = chance.choice((b"\x7f\xff\xff\xff", b"\xff" * 4, b"\x80\0\0\0"))
        elif kind == 2:
            del data[chance.randrange(4, len(data)) :]
            data += chance.randbytes(chance.randrange(20))
            break
        else:
            at = chance.randrange(4, len(data))
            data[at:at] = chance.randbytes(chance.randint(1, 8))
    data[:4] = LENGTH.pack(len(data) - 4)
    return bytes(data)


async def test_mutated_frames_crash_nothing_hang_nothing_and_take_no_memory(tmp_path: Path):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    # without topics by the thousand, which a frame may well ask for
    async with serving(tmp_path, kafka={"create_topics": False}) as served:
        await served.topics.create("orders", form="kafka")
        frames = good_frames()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        async def send(frame: bytes) -> None:
            wire = await KafkaWire.connect(served.kafka.port)
            try:
                wire.writer.write(frame)
                wire.writer.write_eof()
                async with asyncio.timeout(60):
                    await wire.reader.read()  # to the end: it answers, or closes, or both
            except ConnectionError:
                pass
            finally:
                wire.close()

        for start in range(0, FRAMES, 50):
            some = [mutated(chance, chance.choice(frames)) for _ in range(min(50, FRAMES - start))]
            await asyncio.gather(*map(send, some))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < GROWTH
        wire = await KafkaWire.connect(served.kafka.port)
        assert (await wire.produce("orders", plain_batch(b"alive"))).error_code == 0
        assert (await wire.ask(16, 4)).error_code == 0
        wire.close()
        connections = "penstock_kafka_connections"
        await eventually(lambda: served.metrics.values_of(connections)[()] == 0)


async def test_a_frame_that_is_too_large_or_negative_ends_the_connection(tmp_path: Path):
    async with serving(tmp_path, kafka={"max_frame": 1 << 20}) as served:
        for length in (-1, (1 << 20) + 1, (1 << 31) - 1):
            wire = await KafkaWire.connect(served.kafka.port)
            wire.writer.write(LENGTH.pack(length))
            assert await wire.closed()
            wire.close()


async def test_large_requests_that_arrive_share_a_limit_of_memory(tmp_path: Path):
    async with serving(tmp_path, max_bodies=1 << 20) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        wire.writer.write(LENGTH.pack(2 << 20) + bytes(100))
        assert await wire.closed()
        wire.close()


async def test_a_request_that_is_not_served_ends_the_connection(tmp_path: Path):
    async with serving(tmp_path) as served:
        for key in set(api_key_map) - APIS.keys():
            wire = await KafkaWire.connect(served.kafka.port)
            wire.writer.write(LENGTH.pack(10) + key.to_bytes(2, "big") + bytes(8))
            assert await wire.closed()
            wire.close()


async def test_a_request_that_stops_arriving_ends_the_connection(tmp_path: Path):
    async with serving(tmp_path, kafka={"frame_timeout": 0.2}) as served:
        wire = await KafkaWire.connect(served.kafka.port)
        wire.writer.write(LENGTH.pack(1000) + bytes(10))
        assert await wire.closed()
        wire.close()
