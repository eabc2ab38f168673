"""A topic of either format is copied whole while it is appended to."""

import asyncio
from pathlib import Path

import pytest

from penstock.backup.open_files import open_topic
from penstock.log.layout import CHECKPOINT, INDEX, METADATA, find_logs, log_path
from penstock.log.verify import verify
from tests.support.topics import FORMATS, everything, log_directory, running


@pytest.mark.parametrize("form", FORMATS)
async def test_a_snapshot_of_a_busy_topic_is_a_topic(tmp_path: Path, form: str) -> None:
    async with running(tmp_path / "live", format=form, segment_bytes=20_000) as store:
        topic = await store.create("t")
        copies = []
        for round_ in range(5):
            appends = [topic.append([b"%d-%d" % (round_, i)] * 9) for i in range(200)]
            await asyncio.sleep(0)
            directory = topic.directory
            snapshot = await asyncio.to_thread(open_topic, directory)
            assert snapshot is not None
            assert snapshot.name == "t"
            target = log_directory(tmp_path / f"copy{round_}", "t", form)
            target.mkdir(parents=True)
            with snapshot:
                for name, content in snapshot.small.items():
                    (target / name).write_bytes(content)
                for name, file in snapshot.files.items():
                    (target / name).write_bytes(b"".join(file.parts()))
            copies.append((tmp_path / f"copy{round_}", snapshot.next_offset))
            await asyncio.gather(*appends)
        records = everything(topic)
    assert len(copies) == 5
    for copy, end in copies:
        assert find_logs(copy) == {"t": log_path(copy, "t")}
        assert verify(log_path(copy, "t")).findings == []
        async with running(copy) as store:
            restored = store.require("t")
            assert restored.next_offset == end
            assert restored.damage == []
            assert everything(restored) == records[: restored.next_offset]


@pytest.mark.parametrize("form", FORMATS)
async def test_a_snapshot_right_after_a_roll_ends_with_the_sealed_segment(
    tmp_path: Path, form: str
) -> None:
    async with running(tmp_path, format=form) as store:
        topic = await store.create("t")
        # A roll renames the files before its checkpoint replaces these.
        replaced = [name for name in (METADATA, CHECKPOINT) if (topic.directory / name).exists()]
        before = {name: (topic.directory / name).read_bytes() for name in replaced}
        await topic.append([b"x"] * 7)
        await topic.seal()
        for name, content in before.items():
            (topic.directory / name).write_bytes(content)
        if form == "kafka":
            (topic.directory / INDEX).write_bytes(b"")
        snapshot = open_topic(topic.directory)
        assert snapshot is not None
        with snapshot:
            assert snapshot.next_offset == 7


@pytest.mark.parametrize("form", FORMATS)
async def test_a_snapshot_waits_for_a_roll_that_is_being_made(tmp_path: Path, form: str) -> None:
    async with running(tmp_path, format=form) as store:
        topic = await store.create("t")
        await topic.append([b"x"] * 7)
        unfinished = topic.directory / f"{INDEX}.new"
        unfinished.touch()
        opening = asyncio.create_task(asyncio.to_thread(open_topic, topic.directory))
        done, _ = await asyncio.wait([opening], timeout=0.2)
        assert not done
        unfinished.unlink()
        snapshot = await opening
    assert snapshot is not None
    with snapshot:
        assert snapshot.next_offset == 7
