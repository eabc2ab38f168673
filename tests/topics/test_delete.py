"""Deleting a topic beside everything else that is done with it and with its name."""

import asyncio
import threading
from pathlib import Path

import pytest

from penstock.config.schema import LocalRetention
from penstock.errors import InvalidRequest, NotFound, StorageFailed
from penstock.io.fs import Bytes, Disk
from penstock.topics.store import TopicStore
from tests.support.topics import everything, running
from tests.support.wait import eventually
from tests.topics.tier.support import fill, pass_through, read_all, tiered


class HeldDisk(Disk):
    """A disk that waits before it renames a topic away, or before it replaces one file or renames
    to its name, as a busy one does.
    """

    def __init__(self, file: str = "") -> None:
        self._file = file
        self.reached = threading.Event()
        self.free = threading.Event()
        self.fails = False  # to rename

    def rename(self, source: Path, target: Path) -> None:
        if target.name == self._file:
            self._wait()
        if target.parent.name == "deleted-topics":
            if not self._file:
                self._wait()
            if self.fails:
                raise StorageFailed("renaming failed")
        super().rename(source, target)

    def replace(self, path: Path, data: Bytes, *, sync: bool = True) -> None:
        if path.name == self._file:
            self._wait()
        super().replace(path, data, sync=sync)

    def _wait(self) -> None:
        self.reached.set()
        assert self.free.wait(60)


async def produce(store: TopicStore, name: str, payload: bytes) -> int:
    """As the listeners do."""
    topic = store.get(name) or await store.create(name)
    return (await topic.append([payload])).first_offset


async def test_records_appended_while_a_topic_is_deleted_are_those_of_its_successor(
    tmp_path: Path,
) -> None:
    disk = HeldDisk()
    async with running(tmp_path, fs=disk) as store:
        topic = await store.create("t")
        await topic.append([b"old"])
        deletion = asyncio.ensure_future(store.delete("t"))
        await eventually(disk.reached.is_set)
        assert store.get("t") is None
        with pytest.raises(NotFound):
            await store.delete("t")
        appends = [asyncio.ensure_future(produce(store, "t", b"%d" % i)) for i in range(5)]
        done, _ = await asyncio.wait([*appends, deletion], timeout=0.05)
        assert not done, "the name is taken until the directory is renamed"
        disk.free.set()
        await deletion
        assert sorted(await asyncio.gather(*appends)) == [0, 1, 2, 3, 4]
        assert await produce(store, "t", b"5") == 5
        successor = store.require("t")
        assert successor.incarnation != topic.incarnation
        records = everything(successor)
    assert sorted(payload for _, payload in records) == [b"%d" % i for i in range(6)]
    async with running(tmp_path) as store:
        assert everything(store.require("t")) == records
        assert store.require("t").damage == []


async def test_a_deletion_continues_without_its_caller_and_stop_waits_for_it(
    tmp_path: Path,
) -> None:
    disk = HeldDisk()
    async with running(tmp_path, fs=disk) as store:
        await (await store.create("t")).append([b"old"])
        deletion = asyncio.ensure_future(store.delete("t"))
        await eventually(disk.reached.is_set)
        deletion.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deletion
        asyncio.get_running_loop().call_later(0.05, disk.free.set)
    assert not (tmp_path / "t").exists()


async def test_a_topic_that_could_not_be_deleted_keeps_its_name_until_it_is(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.free.set()
    async with running(tmp_path, fs=disk) as store:
        await (await store.create("t")).append([b"old"])
        disk.fails = True
        with pytest.raises(StorageFailed, match="renaming failed"):
            await store.delete("t")
        with pytest.raises(StorageFailed, match="could not be deleted: renaming failed"):
            await produce(store, "t", b"new")
        disk.fails = False
        await store.delete("t")
        assert await produce(store, "t", b"new") == 0
        assert everything(store.require("t")) == [(0, b"new")]


async def test_a_partition_that_is_being_added_is_deleted_with_its_topic(tmp_path: Path) -> None:
    disk = HeldDisk("1")
    async with running(tmp_path, fs=disk, format="kafka") as store:
        await store.create("t")
        adding = asyncio.ensure_future(store.add_partitions("t", 2))
        await eventually(disk.reached.is_set)
        deletion = asyncio.ensure_future(store.delete("t"))
        await asyncio.wait([deletion], timeout=0.05)
        disk.free.set()
        await asyncio.gather(adding, deletion)
        assert store.names() == []
        await store.create("t")
        assert store.partitions("t") == 1
    async with running(tmp_path) as store:
        assert store.partitions("t") == 1
        assert not store.unreadable


async def test_partitions_that_are_added_at_once_are_added_one_after_the_other(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, format="kafka") as store:
        await store.create("t")
        adding = [store.add_partitions("t", count) for count in (2, 3, 3, 4)]
        two, three, again, four = await asyncio.gather(*adding, return_exceptions=True)
        assert (two, three, four) == (None, None, None)
        assert isinstance(again, InvalidRequest), "there are three already"
        assert store.partitions("t") == 4
        assert (await store.partition("t", 3).append([b"new"])).first_offset == 0


async def test_a_policy_that_is_being_written_is_not_that_of_the_next_topic(tmp_path: Path) -> None:
    disk = HeldDisk("policy")
    async with running(tmp_path, fs=disk) as store:
        topic = await store.create("t")
        setting = asyncio.ensure_future(topic.set_policy("compact"))
        await eventually(disk.reached.is_set)
        deletion = asyncio.ensure_future(store.delete("t"))
        creation = asyncio.ensure_future(store.create("t"))
        done, _ = await asyncio.wait([deletion, creation], timeout=0.05)
        assert not done
        disk.free.set()
        await asyncio.gather(setting, deletion, creation)
        assert not (tmp_path / "t" / "policy").exists()
        with pytest.raises(NotFound):
            await topic.set_policy("compact")
        with pytest.raises(NotFound):
            await topic.mark_archived(1)


async def test_what_still_has_a_deleted_topic_does_not_touch_its_successor(tmp_path: Path) -> None:
    async with running(tmp_path, segment_age=1.0, retention_bytes=1) as store:
        old = await store.create("t")
        await old.append([b"old"] * 3)
        await store.delete("t")
        successor = await store.create("t")
        await successor.append([b"new"] * 3)
        files = sorted(path.name for path in successor.directory.iterdir())
        with pytest.raises(NotFound):
            await old.seal()
        with pytest.raises(NotFound):
            await old.rest()
        with pytest.raises(NotFound):
            old.read(0)
        with pytest.raises(NotFound):
            old.raw(0, 1000)
        await old.close_if_idle(-1.0)
        assert sorted(path.name for path in successor.directory.iterdir()) == files
        await successor.append([b"new"])
        assert everything(successor) == [(i, b"new") for i in range(4)]
    async with running(tmp_path) as store:
        assert everything(store.require("t")) == [(i, b"new") for i in range(4)]


async def test_a_directory_that_is_gone_already_does_not_keep_a_topic_from_being_deleted(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("t")
        topic.directory.rename(tmp_path / ".penstock" / "elsewhere")
        await store.delete("t")
        assert await produce(store, "t", b"new") == 0


async def test_a_topic_in_a_tier_is_deleted_and_created_again_while_passes_run(
    tmp_path: Path,
) -> None:
    disk = HeldDisk()
    async with tiered(
        tmp_path / "data",
        f"file://{tmp_path}/store",
        fs=disk,
        local_retention=LocalRetention(bytes=1),
    ) as store:
        topic = await store.create("t")
        await fill(topic)
        await pass_through(store)
        assert topic.tier is not None
        deletion = asyncio.ensure_future(store.delete("t"))
        await eventually(disk.reached.is_set)
        creation = asyncio.ensure_future(store.create("t"))
        await pass_through(store)  # the note is there, and the directory still is
        disk.free.set()
        await deletion
        successor = await creation
        await fill(successor, start=100)
        for _ in range(3):
            await pass_through(store)
        records = await read_all(successor)
        assert len(records) == 80
        assert records[0][1].startswith(b"000100-000")
    async with tiered(tmp_path / "data", f"file://{tmp_path}/store") as store:
        assert await read_all(store.require("t")) == records
        await pass_through(store)


async def test_a_pass_leaves_a_note_of_a_deletion_alone_that_is_being_written(
    tmp_path: Path,
) -> None:
    notes = tmp_path / "data" / ".penstock" / "topic-tier" / "deleted"
    async with tiered(tmp_path / "data", f"file://{tmp_path}/store") as store:
        topic = await store.create("t")
        await fill(topic)
        notes.mkdir(parents=True)
        unfinished = notes / f"{topic.incarnation}.new"
        unfinished.write_bytes(b"")
        await pass_through(store)
        assert unfinished.exists()
