"""Local topics that become shared ones."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.errors import Conflict, InvalidRequest, NotFound
from penstock.io.fs import Disk
from penstock.log.producers import Producer
from penstock.metrics import Metrics
from penstock.topics.groups import Groups
from penstock.topics.moves import TopicMoves
from penstock.topics.shared.catalog import SharedTopics
from penstock.topics.shared.log import SharedLog
from penstock.topics.store import TopicStore
from tests.support.database import started
from tests.support.topics import running
from tests.support.wait import eventually
from tests.topics.shared.test_log import kafka_batch


class Moving(NamedTuple):
    topics: TopicStore
    moves: TopicMoves

    async def move(self, name: str) -> SharedLog:
        await self.moves.begin(name)

        def has_ended() -> bool:
            move = self.moves.status(name)
            return move is None or move.state == "failed"

        await eventually(has_ended)
        moved = self.topics.require(name)
        assert isinstance(moved, SharedLog), self.moves.status(name)
        return moved


@pytest.fixture
async def moving(tmp_path: Path, broker: SharedTopics, database_url: str) -> AsyncIterator[Moving]:
    with ThreadPoolExecutor(1) as pool:
        async with started(database_url) as database, running(tmp_path / "data") as topics:
            topics.shared = broker
            groups = Groups(tmp_path / "groups", topics, pool=pool, metrics=Metrics())
            await groups.start()
            moves = TopicMoves(tmp_path / "moves", topics, groups, database)
            await moves.start()
            yield Moving(topics, moves)
            await moves.stop()
            await groups.stop()
            topics.shared = None


async def test_batches_that_were_sent_before_are_recognised_after(moving: Moving) -> None:
    ours = Producer(b"p" * 16, 1)
    local = await moving.topics.create("orders", form="kafka")
    await local.append([b"a", b"b"], Producer(b"p" * 16, 0))
    await local.append([b"c"], ours)
    await moving.topics.local("orders").set_policy("compact")
    shared = await moving.move("orders")
    again = await shared.append([b"c"], ours)
    assert (again.first_offset, again.duplicate) == (2, True)
    with pytest.raises(Conflict):
        await shared.append([b"e"], Producer(b"p" * 16, 3))
    assert (await shared.append([b"d"], Producer(b"p" * 16, 2))).first_offset == 3
    assert shared.policy == "compact"


async def test_sequences_of_kafka_producers_continue(moving: Moving) -> None:
    local = await moving.topics.create("orders", form="kafka")
    await local.append_batch(*kafka_batch(0, 3))
    await local.append_batch(*kafka_batch(3, 2))
    shared = await moving.move("orders")
    again = await shared.append_batch(*kafka_batch(3, 2))
    assert (again.first_offset, again.duplicate) == (3, True)
    with pytest.raises(Conflict):
        await shared.append_batch(*kafka_batch(6, 1))
    assert (await shared.append_batch(*kafka_batch(5, 1))).first_offset == 5


async def test_a_partition_that_is_being_added_moves_with_the_others(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, free = threading.Event(), threading.Event()
    rename = Disk.rename

    def held(disk: Disk, source: Path, target: Path) -> None:
        if target.name == "1":
            reached.set()
            assert free.wait(60)
        rename(disk, source, target)

    monkeypatch.setattr(Disk, "rename", held)
    topics = moving.topics
    await (await topics.create("orders", form="kafka")).append([b"a"])
    adding = asyncio.ensure_future(topics.add_partitions("orders", 2))
    await eventually(reached.is_set)
    await moving.moves.begin("orders")
    move = asyncio.ensure_future(moving.move("orders"))
    await eventually(lambda: move.done() or moving.moves.status("orders").copied == 1)
    await asyncio.wait([move], timeout=0.2)
    free.set()
    await asyncio.gather(adding, move)
    assert topics.partitions("orders") == 2
    second = topics.partition("orders", 1)
    assert isinstance(second, SharedLog)
    assert (await second.append([b"b"])).first_offset == 0


async def test_a_move_that_cannot_be_made_is_refused(moving: Moving, broker: SharedTopics) -> None:
    with pytest.raises(NotFound):
        await moving.moves.begin("nothing")
    assert moving.moves.status("nothing") is None
    await moving.topics.create("parts", form="kafka", partitions=2)
    with pytest.raises(InvalidRequest):
        await moving.moves.begin("parts/1")
    await broker.create("parts", 1)
    with pytest.raises(Conflict, match="other records"):
        await moving.moves.begin("parts")
    assert broker.partitions("parts") == 1
