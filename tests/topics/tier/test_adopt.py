"""Topics on object storage: a broker that starts from the tier, and who owns it."""

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from penstock.client import Client
from penstock.object_store import ObjectStore
from penstock.topics.tier import tier as tier_module
from penstock.topics.tier.owner import STATE, TierState
from penstock.topics.topic import Topic
from tests.export.making import exports
from tests.support.served import serving
from tests.support.topics import everything, running
from tests.support.wait import eventually
from tests.topics.tier.support import fill, pass_through, read_all, tiered

pytestmark = [
    pytest.mark.xdist_group("tests/topics/tier"),  # they share a store
    pytest.mark.usefixtures("form"),
]


async def test_two_brokers_never_write_one_tier(tmp_path: Path, address: str) -> None:
    async with tiered(tmp_path / "one", address) as one:
        await fill(await one.create("t"))
        await pass_through(one)
        async with tiered(tmp_path / "two", address) as two:
            other = await two.create("t")
            await fill(other)
            assert two.tier is not None
            assert not await two.tier.synchronize()
            assert two.tier.fenced
            assert "take-over" in str(two.tier.problem)
            await fill(other, start=50)  # appends go on
            assert all(segment.local for segment in other.segments)
            ownership = tier_module.Ownership(
                two.tier.store, tmp_path / "two" / ".penstock" / tier_module.DIRECTORY
            )
            assert ownership.take_over() is not None
            await pass_through(two)
            topic = one.require("t")
            await fill(topic, start=8)
            version = topic.tier.version if topic.tier else 0
            assert one.tier is not None
            assert not await one.tier.synchronize()
            assert one.tier.fenced
            assert topic.tier is not None
            assert topic.tier.version == version


async def test_a_start_from_the_tier_has_everything_that_was_there(
    tmp_path: Path, address: str
) -> None:
    from penstock.log.producers import Producer

    producer = Producer(bytes(range(16)), 7)
    async with tiered(tmp_path / "one", address) as one:
        topic = await one.create("t")
        await fill(topic)
        await topic.append([b"once"], producer)
        await topic.set_policy("compact")
        await topic.seal()
        records = everything(topic)
        await one.create("empty")
        assert one.tier is not None
        one.tier.groups = lambda: [_committed("g", topic, 33)]
        await pass_through(one)
        tail = await topic.append([b"only", b"here"])
        await one.tier.synchronize()  # the state says that these were given
        incarnation = topic.incarnation
    async with tiered(tmp_path / "two", address, adopt=True) as two:
        topic = two.require("t")
        assert topic.incarnation == incarnation
        assert topic.policy == "compact"
        assert await read_all(topic) == records
        assert topic.next_offset >= tail.first_offset + 2, "offsets are not given again"
        (lost,) = (place for place in topic.damage if place["outcome"] == "lost")
        assert (lost["lost_from"], lost["lost_to"]) == (len(records), len(records) + 2)
        again = await topic.append([b"once"], producer)
        assert again.first_offset == len(records) - 1, "the producer is known"
        following = await topic.append([b"new"])
        assert two.get("empty") is not None
        offsets = tmp_path / "two/.penstock/groups/offsets.log"
        assert b'["commit","g","t","%b",33]' % incarnation.encode() in offsets.read_bytes()
        await topic.seal()
        await pass_through(two)
        assert (await read_all(topic))[-1] == (following.first_offset, b"new")
    async with tiered(tmp_path / "two", address, adopt=True) as two:
        assert (await read_all(two.require("t")))[:-1] == records


async def test_a_data_directory_with_topics_adopts_nothing(tmp_path: Path, address: str) -> None:
    async with tiered(tmp_path / "one", address) as one:
        await fill(await one.create("t"))
        await one.require("t").seal()
        await pass_through(one)
    async with running(tmp_path / "two") as two:
        await (await two.create("t")).append([b"its own"])
    async with tiered(tmp_path / "two", address, adopt=True) as two:
        assert two.tier is not None
        assert two.tier.adopted is None
        assert everything(two.require("t")) == [(0, b"its own")]


def _committed(group: str, topic: Topic, offset: int) -> Any:
    from penstock.topics.offsets_journal import CommittedOffset

    return CommittedOffset(group, topic.name, topic.incarnation, offset)


async def test_readers_get_over_the_offsets_that_a_start_from_the_tier_leaves_out(
    tmp_path: Path,
) -> None:
    """Those at the end of what there is wait for the next record, without asking again and again,
    and get it: a stream, a client, a group, a route."""
    address = f"file://{tmp_path}/store"

    async with tiered(tmp_path / "one", address) as one:
        topic = await one.create("t")
        await fill(topic)
        await topic.seal()
        await pass_through(one)
        end = topic.next_offset
    adopting = {"tier": address, "adopt": True, "scrub_interval": 0}
    async with (
        serving(tmp_path / "two", keep_alive=100.0, **adopting) as served,
        Client(topics=served.address) as client,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.http.port}", timeout=60) as http,
        http.stream("GET", f"/topics/t/stream?offset={end}") as stream,
        client.topic("t").reader(end) as reader,
        client.topic("t").reader(group="g", max_records=30) as member,
    ):
        topic = served.topics.require("t")
        assert topic.next_offset > end + 1_000_000
        assert topic.first_from(5) == 5
        assert topic.first_from(end) == topic.next_offset
        reads = Mock(read=Mock(side_effect=topic.read), raw=Mock(side_effect=topic.raw))
        topic.read, topic.raw = reads.read, reads.raw  # type: ignore[method-assign]
        spec = {"source": {"topic": "t"}, "destination": {"type": "topic", "topic": "copy"}}
        async with exports(
            tmp_path / "x", {"r": spec | {"batch": {"linger": 0}}}, topics=served.topics
        ) as routes:
            batches = member.batches()
            grouped: list[int] = []
            while len(grouped) < end:
                grouped += [record.offset for record in await anext(batches)]
            first = asyncio.ensure_future(anext(aiter(reader)))
            last = asyncio.ensure_future(anext(batches))
            lines = stream.aiter_lines()
            event = asyncio.ensure_future(anext(lines))
            await eventually(lambda: routes.get("r").queue.books.delivered == end)
            before = len(reads.mock_calls)
            await asyncio.sleep(0.2)
            assert len(reads.mock_calls) <= before + 5, "nobody asks again and again"
            assert not any(task.done() for task in (first, last, event))
            appended = (await topic.append([b"new"])).first_offset
            async with asyncio.timeout(30):
                assert await event == f"id: {appended}"
                assert (await first).offset == appended
                assert [record.offset for record in await last] == [appended]
            await eventually(lambda: routes.get("r").queue.books.delivered == end + 1)
        assert grouped == [*range(end)]


async def test_the_state_of_a_clean_stop_is_taken_back_before_anything_is_appended(
    tmp_path: Path,
) -> None:
    """Otherwise a start from the tier would give offsets again that readers have seen."""
    address = f"file://{tmp_path}/store"

    async with tiered(tmp_path / "one", address) as one:
        await fill(await one.create("t"))
        assert one.tier is not None
        await one.tier.start()
        await one.tier.stop()
    assert _state(address).clean
    async with tiered(tmp_path / "copy", address, adopt=True) as copy:
        assert copy.require("t").next_offset == 80, "a clean stop leaves nothing out"
    async with tiered(tmp_path / "copy", address) as copy:
        assert copy.tier is not None
        await copy.tier.start()
        assert not _state(address).clean
        copy.tier.close()


def _state(address: str) -> TierState:
    return TierState.parse(ObjectStore(address).get(STATE)[0])


async def test_more_offsets_are_left_out_the_older_the_state_is(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store"
    async with tiered(tmp_path / "one", address) as one:
        await fill(await one.create("t"))
        await pass_through(one)
    hour_ago = time.time() - 3600
    os.utime(tmp_path / "store/state.json", (hour_ago, hour_ago))
    async with tiered(tmp_path / "two", address, adopt=True) as two:
        assert two.require("t").next_offset >= 80 + 3600 * 1_000_000


async def test_a_topic_that_was_deleted_does_not_come_back_in_place_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is lost at any step between the deletion and the state that says so. The steps
    are private: no disk or store fails exactly between them.
    """
    address = f"file://{tmp_path}/store"

    async with tiered(tmp_path / "one", address, tier_grace=0.0) as one:
        assert one.tier is not None
        await fill(await one.create("t"))
        await pass_through(one)
        old = one.require("t").incarnation
        await one.delete("t")
        topic = await one.create("t")
        await fill(topic, batches=3, start=100)
        await topic.seal()
        after = everything(topic)
        done = one.tier._write_state
        with monkeypatch.context() as patch:
            patch.setattr(one.tier, "_finish_deletions", _nothing)
            await one.tier.synchronize()
            assert topic.tier is None, "its predecessor goes first"
        for step in ("deleted", "copied"):
            with monkeypatch.context() as patch:
                patch.setattr(one.tier, "_write_state", _nothing)
                patch.setattr(one.tier, "_copy_topics", one.tier._copy_topics)
                if step == "deleted":
                    patch.setattr(one.tier, "_copy_topics", _nothing)
                await one.tier.synchronize()
            shutil.copytree(tmp_path / "store", tmp_path / step)
            async with tiered(
                tmp_path / f"from {step}", f"file://{tmp_path}/{step}", adopt=True
            ) as two:
                adopted = two.require("t")
                assert adopted.incarnation == topic.incarnation
                records = await read_all(adopted)
                assert records == (after if step == "copied" else [])
        await done(clean=False)
        await one.tier.collect()
        assert not any(old in name for name in ObjectStore(address).names())


async def _nothing(*_: object, **__: object) -> None:
    return None


async def test_a_volume_of_its_own_and_half_written_files_are_no_obstacle(tmp_path: Path) -> None:
    """The root of an ext4 file system has a directory of its own; a writer that was killed leaves
    files that nobody lists."""
    address = f"file://{tmp_path}/store"

    async with tiered(tmp_path / "one", address) as one:
        await fill(await one.create("t"))
        await pass_through(one)
        incarnation = one.require("t").incarnation
    left = tmp_path / "store/topics" / incarnation / "0-0-0.log#1"
    left.write_bytes(b"half")
    (tmp_path / "two/lost+found").mkdir(parents=True)
    async with tiered(tmp_path / "two", address, adopt=True) as two:
        assert two.names() == ["t"]
        await pass_through(two)
    assert not left.exists()
    assert list((tmp_path / "two/lost+found").iterdir()) == []
