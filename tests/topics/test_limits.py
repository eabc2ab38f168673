"""A topic's own retention and largest record, and records that are deleted by hand; both formats."""

from pathlib import Path

import pytest

from penstock.errors import InvalidOffset, StorageError, TooLarge
from penstock.log.limits import TopicLimits
from penstock.log.topic_files import TopicFiles
from penstock.log.verify import verify
from penstock.topics.topic import Topic
from tests.support.faults import CHANGES, FaultyFs
from tests.support.topics import Clock, log_directory, running

pytestmark = pytest.mark.usefixtures("form")
DAY = 86_400.0


def visible(topic: Topic) -> list[int]:
    numbers, at = list[int](), topic.first_offset
    while at < topic.next_offset:
        batch = topic.read(at)
        numbers += map(int, batch.payloads())
        at = batch.next_offset
    return numbers


async def fill(topic: Topic, first: int = 0, batches: int = 6) -> None:
    for start in range(first, first + 5 * batches, 5):
        await topic.append([b"%d" % number for number in range(start, start + 5)])


async def test_records_are_deleted_up_to_an_offset_inside_a_batch(
    tmp_path: Path, form: str
) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("a")
        await fill(topic)
        await topic.seal()
        await fill(topic, 30)
        await store.delete_before(topic, 7)
        assert (topic.first_offset, visible(topic)) == (7, list(range(7, 60)))
        assert topic.records == topic.records_from(0) == 53
        assert len(topic.segments) == 2
        with pytest.raises(InvalidOffset):
            topic.read(6, strict=True)
        assert topic.read(0).first_offset == 7
        assert topic.first_from(0) == topic.offset_at(0) == 7
        await store.delete_before(topic, 31)  # its segment goes with the rest of its records
        assert (topic.first_offset, len(topic.segments)) == (31, 1)
        await store.delete_before(topic, 20)  # records do not come back
        with pytest.raises(InvalidOffset):
            await store.delete_before(topic, 61)
    async with running(tmp_path) as store:
        topic = store.require("a")
        assert visible(topic) == list(range(31, 60))
        files = TopicFiles(log_directory(tmp_path, "a", form))
        assert files.bounds() == (31, 60)
        with pytest.raises(InvalidOffset):
            list(files.read(30, 60))
        assert sum(len(piece.offsets) for piece in files.read(31, 60)) == 29
        await store.delete_before(topic, 60)
        assert visible(topic) == []
        assert topic.first_offset == topic.next_offset == 60
        assert (await topic.append([b"60"])).first_offset == 60
        assert visible(topic) == [60]
    assert not verify(log_directory(tmp_path, "a", form)).findings


async def test_a_topic_has_its_own_retention(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock=clock, retention_age=DAY) as store:
        for name in ("default", "short", "long"):
            topic = await store.create(name)
            await fill(topic)
            await topic.seal()
        await store.require("short").set_limits(TopicLimits(retention_age=60.0))
        await store.require("long").set_limits(TopicLimits(retention_age=0.0))
        clock.now += 3600
        await store.maintain()
        firsts = {name: store.require(name).first_offset for name in store.names()}
        assert firsts == {"default": 0, "short": 30, "long": 0}
    async with running(tmp_path, clock=clock, retention_age=DAY) as store:
        clock.now += 2 * DAY
        await store.maintain()
        firsts = {name: store.require(name).first_offset for name in store.names()}
        assert firsts == {"default": 30, "short": 30, "long": 0}


async def test_a_topic_has_its_own_largest_record(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("a")
        await topic.set_limits(TopicLimits(max_record=100))
        with pytest.raises(TooLarge, match="at most 100 bytes"):
            topic.append([b"x" * 101])
    async with running(tmp_path) as store:
        with pytest.raises(TooLarge, match="at most 100 bytes"):
            store.require("a").append([b"x" * 101])


async def test_a_damaged_file_keeps_everything_and_is_reported(tmp_path: Path, form: str) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("a")
        await fill(topic)
        await topic.seal()
        await store.delete_before(topic, 7)
    file = log_directory(tmp_path, "a", form) / "limits"
    file.write_bytes(file.read_bytes().replace(b"7", b"9"))
    assert any("limits" in str(one) for one in verify(log_directory(tmp_path, "a", form)).findings)
    async with running(tmp_path, retention_bytes=1) as store:
        await store.maintain()
        assert visible(store.require("a")) == list(range(30))


async def test_a_limit_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    disk = FaultyFs()
    async with running(Path("/data"), fs=disk) as store:
        topic = await store.create("a")
        await fill(topic)
        disk.fail(1, only=CHANGES)
        with pytest.raises(StorageError):
            await store.delete_before(topic, 7)
        assert topic.first_offset == 0
        await store.delete_before(topic, 7)
        assert topic.first_offset == 7
