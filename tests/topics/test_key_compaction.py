"""The broker compacts record batches by key: the latest stays, tombstones go in time."""

import contextlib
import errno
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.errors import StorageError
from penstock.log.batches.by_key import TOMBSTONE_SECONDS
from penstock.log.producers import Producer
from penstock.log.verify import verify
from penstock.protocol.kafka_batch import KafkaRecord, NewRecord
from penstock.topics.topic import Topic
from tests.support.faults import CHANGES, HOWS, FaultyFs
from tests.support.form import pick
from tests.support.topics import Clock, log_directory, running

ROOT = Path("/data")
SETTINGS: dict[str, Any] = {"format": "kafka", "segment_bytes": 4000}


def records(topic: Topic) -> list[KafkaRecord]:
    collected, at = list[KafkaRecord](), topic.first_offset
    while at < topic.next_offset:
        batch = topic.read(at)
        if not batch.count:
            break
        collected += batch.records() or []
        at = batch.next_offset
    return collected


async def fill(topic: Topic, random: Random, batches: int = 60) -> None:
    for _ in range(batches):
        some = [
            NewRecord(
                random.choice([None, random.randbytes(20)]) if random.random() < 0.2 else b"v" * 9,
                b"key %d" % random.randrange(25),
                [("h", b"1")],
            )
            for _ in range(random.randrange(1, 8))
        ]
        await topic.append_records(some)
    await topic.append([b"no key"])
    await topic.seal()


def expected(before: list[KafkaRecord], *, tombstones: bool) -> list[KafkaRecord]:
    latest = {one.key: one.offset for one in before}
    last = before[-1].offset
    return [
        one
        for one in before
        if one.key is None
        or one.offset == last
        or (latest[one.key] == one.offset and (tombstones or one.value is not None))
    ]


def without_segment_ends(found: list[KafkaRecord], wanted: list[KafkaRecord]) -> None:
    """What stays is what should, and beside it the last record of a segment at most."""
    assert [one for one in found if one in wanted] == wanted
    assert len(found) - len(wanted) <= 5


async def test_the_latest_record_of_each_key_stays(tmp_path: Path) -> None:
    clock, directory = Clock(), log_directory(tmp_path, "t", "kafka")
    async with running(tmp_path, clock=clock, **SETTINGS) as store:
        topic = await store.create("t")
        await fill(topic, Random(1))
        before, end = records(topic), topic.next_offset
        await store.maintain()
        assert records(topic) == before, "the policy is delete"
        await topic.set_policy("compact")
        await store.maintain()
        after = records(topic)
        assert len(after) < len(before) / 2
        without_segment_ends(after, expected(before, tombstones=True))
        assert topic.next_offset == end
        assert topic.records == len(after)
        for offset in range(0, end, 7):
            following = [one for one in after if one.offset >= offset]
            assert (topic.read(offset).records() or [])[:1] == following[:1]
            assert topic.records_from(offset) == len(following)
        segments = [one.base for one in topic.segments]
        await store.maintain()
        assert [one.base for one in topic.segments] == segments, "there is nothing to do"
        clock.now += TOMBSTONE_SECONDS + 1
        await fill(topic, Random(2), 70)
        before = records(topic)
        await store.maintain()
        old = [one for one in records(topic) if one.offset < end and one.value is None]
        assert len(old) <= 2
    assert verify(directory).findings == []
    async with running(tmp_path, clock=clock, **SETTINGS) as store:
        topic = store.require("t")
        assert topic.damage == []
        after = records(topic)
        await topic.append_records([NewRecord(b"new", b"key 1")])
    for path in directory.glob("index-*.idx"):
        path.unlink()
    async with running(tmp_path, clock=clock, **SETTINGS) as store:
        assert records(store.require("t"))[:-1] == after
        assert store.require("t").damage == []


async def test_producers_are_still_recognised(tmp_path: Path) -> None:
    async with running(tmp_path, **SETTINGS) as store:
        topic = await store.create("t")
        await topic.set_policy("compact")
        for i in range(100):
            await topic.append_records([NewRecord(b"%d" % i, b"k")], Producer(b"p" * 16, i))
        await topic.seal()
        await store.maintain()
        assert topic.records < 10
    async with running(tmp_path, **SETTINGS) as store:
        topic = store.require("t")
        assert (
            await topic.append_records([NewRecord(b"99", b"k")], Producer(b"p" * 16, 99))
        ).duplicate
        assert (await topic.append_records([NewRecord(b"x", b"k")], Producer(b"p" * 16, 100))).count


@pytest.mark.parametrize("how", HOWS)
async def test_a_crash_at_any_call_leaves_the_records_of_before_or_after(how: Any) -> None:
    for n in range(1, 200, pick(short=5, usual=2, soak=1)):
        fs = FaultyFs()
        async with running(ROOT, fs=fs, clock=Clock(), **SETTINGS) as store:
            topic = await store.create("t")
            await topic.set_policy("compact")
            await fill(topic, Random(3), 30)
            before = records(topic)
            fs.fail(n, errno.EIO, forever=True, only=CHANGES)
            with contextlib.suppress(StorageError):
                await store.maintain()
            over, during = fs.failed == 0, records(topic)
            after = fs.crash(Random(n), how)
            fs.heal()
        wanted = expected(before, tombstones=True)
        assert [one for one in during if one in wanted] == wanted
        async with running(ROOT, fs=after, clock=Clock(), **SETTINGS) as store:
            topic = store.require("t")
            assert topic.damage == []
            found = records(topic)
            assert [one for one in found if one in wanted] == wanted
            assert all(one in before for one in found)
            assert (await topic.append([b"next"])).first_offset == before[-1].offset + 1
            await store.maintain()
            assert [one for one in records(topic) if one in wanted] == wanted
        assert verify(log_directory(ROOT, "t", "kafka"), fs=after).findings == []
        if over:
            break
    assert n > 8
