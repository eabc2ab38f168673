"""Topics of record batches: keys, times, Kafka's producers, batches as they come, partitions."""

import asyncio
import contextlib
import shutil
import struct
from pathlib import Path
from random import Random

import numpy as np
import pytest
from crc32c import crc32c

from penstock.errors import Conflict, Damaged, InvalidRequest, NotFound, StorageError
from penstock.log.batches.index import INTERVAL_BYTES, SparseIndex
from penstock.log.format import InvalidRecord
from penstock.log.layout import CHECKPOINT, DATA, INDEX
from penstock.log.producers import OutOfOrder, Producer, ProducerFenced
from penstock.log.segment import StoredBatch
from penstock.log.verify import verify
from penstock.protocol.kafka_batch import (
    PRODUCER_HEADER,
    KafkaRecord,
    NewRecord,
    decode_batch,
    split_batches,
)
from penstock.topics import scrub
from penstock.topics.topic import Appended, Topic
from tests.support.faults import CHANGES, FaultyFs
from tests.support.kafka_wire import encode_batch
from tests.support.topics import Clock, everything, log_directory, running
from tests.support.wait import eventually

ROOT = Path("/data")
NOW = 1_700_000_000
KAFKA = {"format": "kafka"}


def batch(
    values: list[bytes], producer: tuple[int, int, int] = (-1, -1, -1), now: int = NOW
) -> bytes:
    return encode_batch([NewRecord(value) for value in values], now * 1000, producer=producer)


async def produce(topic: Topic, data: bytes) -> Appended:
    ((head, view),) = split_batches(data)
    return await topic.append_batch(head, view)


async def test_keys_headers_and_times_are_kept(tmp_path: Path) -> None:
    clock = Clock(NOW)
    records = [
        NewRecord(b"one", b"k", [("a", b"1"), ("a", None)], 5_000),
        NewRecord(None, b"k"),
        NewRecord(b"", b"", [], 7_000),
    ]
    expected = [
        KafkaRecord(0, 5_000, b"k", b"one", (("a", b"1"), ("a", None))),
        KafkaRecord(1, NOW * 1000, b"k", None),
        KafkaRecord(2, 7_000, b"", b""),
    ]
    async with running(tmp_path, clock=clock, **KAFKA) as store:
        topic = await store.create("t")
        assert (await topic.append_records(records, Producer(b"p" * 16, 0))).count == 3
        assert (await topic.append_records(records, Producer(b"p" * 16, 0))).duplicate
        assert topic.read(0).records() == expected
        assert topic.read(0).payloads() == [b"one", b"", b""]
        raw = topic.raw(1, 1 << 20).read()
        assert decode_batch(raw) == expected
        assert PRODUCER_HEADER.encode() in raw
    async with running(tmp_path, clock=clock, **KAFKA) as store:
        topic = store.require("t")
        assert topic.read(0).records() == expected
        assert (await topic.append_records(records, Producer(b"p" * 16, 0))).duplicate
        assert (await topic.append([b"plain"])).first_offset == 3
        (plain,) = topic.read(3).records() or []
        assert (plain.key, plain.value, plain.headers) == (None, b"plain", ())


async def test_aiqs_layout_takes_plain_records_only(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("t")
        for record in (NewRecord(b"v", b"k"), NewRecord(None), NewRecord(b"v", None, [("a", b"")])):
            with pytest.raises(InvalidRecord, match="format 'aiq'"):
                await topic.append_records([record])
            ((head, view),) = split_batches(encode_batch([record], 0))
            with pytest.raises(InvalidRecord, match="format 'aiq'"):
                topic.append_batch(head, view)
        assert (await topic.append_records([NewRecord(b"v")])).count == 1
        assert topic.read(0).records() is None
        first = await produce(topic, batch([b"x", b"y"], (9, 0, 0)))
        assert await produce(topic, batch([b"x", b"y"], (9, 0, 0))) == Appended(
            first.first_offset, 2, True
        )
    async with running(tmp_path) as store:
        topic = store.require("t")
        assert (await produce(topic, batch([b"x", b"y"], (9, 0, 0)))).duplicate
        with pytest.raises(OutOfOrder):
            await produce(topic, batch([b"z"], (9, 0, 5)))
        assert [payload for _, payload in everything(topic)] == [b"v", b"x", b"y"]


async def test_a_batch_is_stored_as_it_comes_but_for_its_offset(tmp_path: Path) -> None:
    async with running(tmp_path, **KAFKA) as store:
        topic = await store.create("t")
        await topic.append([b"before"])
        data = batch([b"x", b"y"])
        assert await produce(topic, data) == Appended(1, 2, False)
        stored = topic.raw(1, 1 << 20).read()
        assert stored[16:] == data[16:]
        assert [record.offset for record in decode_batch(stored)] == [1, 2]
        control = bytearray(encode_batch([NewRecord(b"x")], 0, attributes=0x20))
        with pytest.raises(InvalidRequest, match="transactions"):
            await produce(topic, bytes(control))


async def test_batches_of_a_producer_that_arrive_together_are_told_apart(tmp_path: Path) -> None:
    async with running(tmp_path, **KAFKA) as store:
        topic = await store.create("t")
        await produce(topic, batch([b"a"], (7, 0, 0)))
        together = [
            (batch([b"b"], (7, 1, 0)), 1),
            (batch([b"x"], (7, 0, 1)), ProducerFenced),  # of the former epoch, late
            (batch([b"c"], (7, 1, 1)), 2),
            (batch([b"x", b"x"], (7, 1, 1)), OutOfOrder),  # the same number, but not the same batch
            (batch([b"d"], (7, 1, 2)), 3),
            (batch([b"c"], (7, 1, 1)), 2),
            (batch([b"plain"]), 4),
        ]
        answers = await asyncio.gather(
            *(topic.append_batch(*split_batches(data)[0]) for data, _ in together),
            return_exceptions=True,
        )
        for answer, (_, expected) in zip(answers, together, strict=True):
            got = answer.first_offset if isinstance(answer, Appended) else type(answer)
            assert got == expected
        assert [value for _, value in everything(topic)] == [b"a", b"b", b"c", b"d", b"plain"]


@pytest.mark.parametrize("stop", ["stopped", "killed"])
async def test_kafkas_producers_are_idempotent_across_restarts(stop: str) -> None:
    fs = FaultyFs()
    async with running(ROOT, fs=fs, **KAFKA) as store:
        topic = await store.create("t")
        first = await produce(topic, batch([b"a", b"b"], (7, 0, 0)))
        # pipelined, in one commit, and one of them twice
        three = [topic.append_batch(*split_batches(batch([b"c"], (7, 0, n)))[0]) for n in (2, 3, 3)]
        answers = await asyncio.gather(*three)
        assert [one.first_offset for one in answers] == [2, 3, 3]
        assert [one.duplicate for one in answers] == [False, False, True]
        await topic.seal()
        assert (await produce(topic, batch([b"d"], (8, 3, (1 << 31) - 1)))).first_offset == 4
        after = fs.kill() if stop == "killed" else fs
    async with running(ROOT, fs=after, **KAFKA) as store:
        topic = store.require("t")
        assert await produce(topic, batch([b"a", b"b"], (7, 0, 0))) == Appended(
            first.first_offset, 2, True
        )
        for sequence in (5, 9):
            with pytest.raises(OutOfOrder, match="4 is expected"):
                await produce(topic, batch([b"x"], (7, 0, sequence)))
        with pytest.raises(OutOfOrder):  # the same number, but not the same batch
            await produce(topic, batch([b"a"], (7, 0, 0)))
        assert (await produce(topic, batch([b"e"], (7, 0, 4)))).first_offset == 5
        assert (await produce(topic, batch([b"f"], (8, 3, 0)))).first_offset == 6  # starts over
        with pytest.raises(OutOfOrder, match="begins with sequence 0"):
            await produce(topic, batch([b"x"], (7, 1, 3)))
        assert (await produce(topic, batch([b"g"], (7, 1, 0)))).first_offset == 7
        with pytest.raises(ProducerFenced):
            await produce(topic, batch([b"x"], (7, 0, 5)))
        assert [value for _, value in everything(topic)] == [*b"a b c c d e f g".split()]


async def test_times_are_the_records_own(tmp_path: Path) -> None:
    clock = Clock(NOW)
    async with running(tmp_path, clock=clock, segment_bytes=2000, **KAFKA) as store:
        topic = await store.create("t")
        for i in range(60):
            clock.now = NOW + i
            await topic.append([b"%d" % i, b"x" * 40])
        assert len(topic.segments) > 2
        offsets = np.arange(120)
        expected = [(NOW + i // 2) * 1_000_000 for i in range(120)]
        assert topic.timestamps(offsets).tolist() == expected
        assert topic.timestamps(offsets[[3, 77, 119]]).tolist() == [
            expected[i] for i in (3, 77, 119)
        ]
        for i in (0, 1, 29, 59):
            assert topic.offset_at(NOW + i) == topic.offset_at(NOW + i - 0.5) == 2 * i
        assert topic.offset_at(NOW + 60) == 120
        await topic.append_records([NewRecord(b"old", timestamp=5), NewRecord(b"new")])
        assert topic.timestamps(np.array([120])).tolist() == [5000]


async def test_every_offset_is_found_however_batches_lie(tmp_path: Path) -> None:
    random, payloads = Random(1), []
    async with running(tmp_path, segment_bytes=200_000, fsync="never", **KAFKA) as store:
        topic = await store.create("t")
        while len(payloads) < 6000:
            some = [
                random.randbytes(random.choice((0, 9, 300)))
                for _ in range(random.choice((1, 7, 90)))
            ]
            await topic.append(some)
            payloads += some
    async with running(tmp_path, **KAFKA) as store:
        topic = store.require("t")
        assert len(topic.segments) > 2
        assert any(s.data_size > 4 * INTERVAL_BYTES for s in topic.segments)
        for offset in random.sample(range(6000), 300):
            read = topic.read(offset, 3)
            assert read.payloads() == payloads[offset : offset + read.count]
            raw = topic.raw(offset, random.choice((1, 5000, 50_000)))
            assert raw.first_offset <= offset < raw.next_offset
            data, at, records = raw.read(), 0, []
            while at < len(data):
                records += decode_batch(data, at)
                at += int.from_bytes(data[at + 8 : at + 12], "big") + 12
            assert (records[0].offset, len(records)) == (raw.first_offset, raw.count)
            assert records[-1].offset + 1 == raw.next_offset
            assert [one.value for one in records] == payloads[raw.first_offset : raw.next_offset]
            assert topic.records_from(offset) == len(payloads) - offset
        assert [payload for _, payload in everything(topic)] == payloads
    assert verify(log_directory(tmp_path, "t", "kafka")).findings == []


async def test_one_commit_makes_one_write_and_one_fsync() -> None:
    fs = FaultyFs()
    async with running(ROOT, fs=fs, **KAFKA) as store:
        topic = await store.create("t")
        await topic.append([b"first"])
        before = fs.calls
        await topic.append([b"second"])
        assert fs.calls - before == 2


@pytest.mark.parametrize("torn", [0, 1, 2])
async def test_a_torn_commit_of_several_batches_is_no_damage(tmp_path: Path, torn: int) -> None:
    """Power fails while a commit of three batches is written, and one of them is not on disk."""
    async with running(tmp_path / "live", **KAFKA) as store:
        topic = await store.create("t")
        await topic.append([b"answered"])
        before = topic.segments[-1].data_size
        appends = [topic.append([b"%d" % i], Producer(bytes([i]) * 16, 0)) for i in range(3)]
        await asyncio.gather(*appends)
        shutil.copytree(tmp_path / "live", tmp_path / "killed")
    path = log_directory(tmp_path / "killed", "t", "kafka") / DATA
    data = bytearray(path.read_bytes())
    start = before + torn * (len(data) - before) // 3
    data[start : start + 40] = bytes(40)
    path.write_bytes(data)
    async with running(tmp_path / "killed", **KAFKA) as store:
        topic = store.require("t")
        assert (topic.damage, topic.next_offset) == ([], 1 + torn)
        assert (await topic.append([b"next"])).first_offset == 1 + torn


async def test_damage_before_a_later_commit_is_a_hole(tmp_path: Path) -> None:
    async with running(tmp_path / "live", **KAFKA) as store:
        topic = await store.create("t")
        for i in range(3):
            await topic.append([b"%d" % i] * 2)
        shutil.copytree(tmp_path / "live", tmp_path / "killed")
    path = log_directory(tmp_path / "killed", "t", "kafka") / DATA
    data = bytearray(path.read_bytes())
    data[len(data) // 3 : len(data) // 3 + 40] = bytes(40)
    path.write_bytes(data)
    async with running(tmp_path / "killed", **KAFKA) as store:
        topic = store.require("t")
        assert [(place["lost_from"], place["lost_to"]) for place in topic.damage] == [(2, 4)]
        assert topic.next_offset == 6
        assert [offset for offset, _ in topic.read(0)] == [0, 1]
        with pytest.raises(Damaged) as caught:
            topic.read(2)
        assert caught.value.resume == 4
        assert [offset for offset, _ in topic.read(4)] == [4, 5]


def test_an_index_is_these_bytes() -> None:
    index = SparseIndex(7)
    index.add(StoredBatch(7, 9, 2, 100, 5000))
    index.add(StoredBatch(9, 10, 1, INTERVAL_BYTES, 4000))
    index.add(StoredBatch(10, 12, 2, 50, 6000))
    rows = (7, 0, 0, 0), (10, 100 + INTERVAL_BYTES, 5000, 3)
    body = b"".join(struct.pack("<QQQQ", *row) for row in rows)
    body += struct.pack("<8sQQQQQI", b"PENSIDX1", 7, 150 + INTERVAL_BYTES, 12, 5, 6000, 0)
    assert index.pack() == body + struct.pack("<I", crc32c(body))
    parsed = SparseIndex.parse(index.pack())
    assert parsed is not None
    assert parsed.pack() == index.pack()
    for i in range(len(index.pack())):
        harmed = bytearray(index.pack())
        harmed[i] ^= 4
        assert SparseIndex.parse(bytes(harmed)) is None
    assert SparseIndex.parse(b"") is None


async def test_the_index_is_rebuilt_from_the_data(tmp_path: Path) -> None:
    directory = log_directory(tmp_path, "t", "kafka")
    async with running(tmp_path, **KAFKA) as store:
        topic = await store.create("t")
        for _ in range(20):
            await topic.append([b"x" * 3000] * 2)
        await topic.seal()
        await topic.append([b"y"])
    sealed, active = directory / f"index-{0:020d}.idx", directory / INDEX
    before = sealed.read_bytes()
    index = SparseIndex.parse(before)
    assert index is not None
    assert (index.records, index.end, index.row_count) == (40, 40, 7)
    sealed.unlink()
    active.write_bytes(b"")
    async with running(tmp_path, **KAFKA) as store:
        assert len(everything(store.require("t"))) == 41
        assert store.require("t").damage == []
    assert sealed.read_bytes() == before
    assert verify(directory).findings == []


@pytest.mark.parametrize("where", [100, 30_000])
async def test_the_scrub_finds_a_flipped_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: int
) -> None:
    monkeypatch.setattr(scrub, "START_SECONDS", 0.0)
    path = log_directory(tmp_path, "t", "kafka") / f"data-{0:020d}.log"
    async with running(tmp_path, **KAFKA) as store:
        topic = await store.create("t")
        for i in range(40):
            await topic.append([b"%d" % i * 500] * 5)
        await topic.seal()
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    async with running(tmp_path, **KAFKA) as store:
        store.scrub.ask()
        await eventually(lambda: store.scrub.status().last)
        topic = store.require("t")
        (place,) = topic.damage
        lost = range(place["lost_from"], place["lost_to"])
        assert len(lost) == 5
        with pytest.raises(Damaged) as caught:
            topic.read(lost[0])
        assert caught.value.resume == lost.stop
        assert [o for o, _ in topic.read(lost.stop, 1)] == [lost.stop]
        assert topic.raw(lost.stop - 6, 1 << 20).next_offset == lost[0] if lost[0] else True
        store.scrub.ask()
        await eventually(lambda: (store.scrub.status().last or scrub.Pass(started=0)).findings == 0)
        assert len(topic.damage) == 1


# Partitions


async def test_partitions_are_logs_with_one_name(tmp_path: Path) -> None:
    async with running(tmp_path, **KAFKA) as store:
        await store.create("orders", partitions=3)
        for number in range(3):
            await store.partition("orders", number).append([b"%d" % number] * (number + 1))
        assert store.names() == ["orders"]
        assert store.get("orders") is store.partition("orders", 0)
        with pytest.raises(NotFound, match="3 partitions"):
            store.partition("orders", 3)
        with pytest.raises(NotFound, match="has 3 partitions, not 7"):
            await store.create("orders/7")  # as for a record to a partition that there is not
        await store.add_partitions("orders", 4)
        with pytest.raises(InvalidRequest, match="not removed"):
            await store.add_partitions("orders", 2)
        await store.partition("orders", 3).append([b"new"])
        await store.create("plain", form="aiq")
        with pytest.raises(Conflict, match="one partition"):
            await store.add_partitions("plain", 2)
        with pytest.raises(InvalidRequest, match="requires the format 'kafka'"):
            await store.create("other", form="aiq", partitions=2)
    async with running(tmp_path) as store:
        assert store.names() == ["orders", "plain"]
        assert [store.partition("orders", n).next_offset for n in range(4)] == [1, 2, 3, 1]
        assert [topic.name for topic in store] == [
            "plain", "orders", "orders/1", "orders/2", "orders/3",
        ]  # fmt: skip
        await store.delete("orders")
        assert store.names() == ["plain"]
        assert not (tmp_path / ".penstock" / "logs" / "orders").exists()
        with pytest.raises(NotFound):
            store.partition("orders", 0)
        await store.create("orders")  # the name is free, in the other layout
    assert (tmp_path / "orders" / DATA).exists()


async def test_a_topic_is_created_with_all_its_partitions_or_not_at_all() -> None:
    for n in range(1, 60):
        fs = FaultyFs()
        async with running(ROOT, fs=fs, **KAFKA) as store:
            fs.fail(n, forever=True, only=CHANGES)
            with contextlib.suppress(StorageError):
                await store.create("t", partitions=3)
            over, after = fs.failed == 0, fs.crash(Random(n), "reorder")
            fs.heal()
        async with running(ROOT, fs=after, **KAFKA) as store:
            assert store.partitions("t") in (0, 3)
            assert not store.unreadable
            await store.create("t", partitions=3)
            await store.partition("t", 2).append([b"x"])
        if over:
            break
    assert n > 10


async def test_two_layouts_of_one_name_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, **KAFKA) as store:
        await (await store.create("t")).append([b"batch"])
    (tmp_path / "t").mkdir()
    async with running(tmp_path) as store:
        assert store.require("t").format.name == "aiq"
        assert "same name" in store.unreadable["t/0"]


async def test_a_checkpoint_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    directory = log_directory(tmp_path, "t", "kafka")
    async with running(tmp_path, **KAFKA) as store:
        topic = await store.create("t")
        await topic.append([b"a"], Producer(b"p" * 16, 0))
        await topic.seal()
        await topic.append([b"b"], Producer(b"p" * 16, 1))
    (directory / CHECKPOINT).unlink()
    async with running(tmp_path, **KAFKA) as store:
        topic = store.require("t")
        assert (await topic.append([b"b"], Producer(b"p" * 16, 1))).duplicate
        assert [payload for _, payload in everything(topic)] == [b"a", b"b"]


async def test_kafkas_clients_get_batches_of_either_layout(tmp_path: Path, form: str) -> None:
    clock = Clock(NOW)
    async with running(tmp_path, clock=clock, format=form) as store:
        topic = await store.create("t")
        for i in range(30):
            clock.now += 1
            await topic.append([b"%d" % i, b"x" * i])
        at, records = 7, list[KafkaRecord]()
        while at < topic.next_offset:
            fetched = topic.batches(at, 500)
            for head, view in split_batches(fetched.data):
                assert head.next_offset <= fetched.next_offset
                records += decode_batch(view)
            at = fetched.next_offset
        values = [value for i in range(30) for value in (b"%d" % i, b"x" * i)]
        assert records[0].offset <= 7
        first = records[0].offset
        assert [one.offset for one in records] == list(range(first, 60))
        assert [one.value for one in records] == values[first:]
        assert [one.timestamp for one in records] == [
            (NOW + 1 + i // 2) * 1000 for i in range(first, 60)
        ]
        at_the_end = topic.batches(60, 500)
        assert (at_the_end.data, at_the_end.next_offset) == (b"", 60)
