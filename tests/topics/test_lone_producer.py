"""A producer that is alone has its commits written on the event loop while the disk is quick."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from penstock.errors import StorageFailed
from penstock.log.segment_store import QUICK_SECONDS
from penstock.topics.topic import Appended, Topic
from tests.support.faults import FaultyFs
from tests.support.topics import everything, running


class TimedFs(FaultyFs):
    """A disk in memory whose fsync takes as long as the test says; it notes who called it."""

    def __init__(self) -> None:
        super().__init__()
        self.delay = 0.0
        self.threads: list[int] = []

    def failing(self, kind: str) -> OSError | None:
        if kind == "sync":
            self.threads.append(threading.get_ident())
            time.sleep(self.delay)
        return super().failing(kind)


async def append(topic: Topic, payload: bytes, *, alone: bool) -> Appended:
    future: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
    topic.appends.enqueue([payload], future)
    topic.appends.commit(alone=alone)
    return await future


async def test_a_slow_fsync_moves_the_commits_of_a_lone_producer_to_the_pool(form: str) -> None:
    fs, here = TimedFs(), threading.get_ident()
    async with running(Path("/data"), fs=fs, fsync="group") as store:
        topic = await store.create("t")

        async def on_the_loop(payload: bytes, *, alone: bool = True) -> bool:
            fs.threads.clear()
            await append(topic, payload, alone=alone)
            return here in fs.threads

        async def until_on_the_loop(payload: bytes) -> None:
            """Append until the disk counts as quick: on a busy machine the first may be slow."""
            async with asyncio.timeout(30):
                while not await on_the_loop(payload):
                    pass

        assert not await on_the_loop(b"0"), "nothing is known of the disk yet"
        await until_on_the_loop(b"1")
        assert not await on_the_loop(b"2", alone=False)
        await until_on_the_loop(b"3")
        fs.delay = 2 * QUICK_SECONDS
        await append(topic, b"4", alone=True)
        assert not await on_the_loop(b"5")
        fs.delay = 0
        await until_on_the_loop(b"6")
        payloads = [payload for _, payload in everything(topic)]
        assert sorted(set(payloads)) == [b"%d" % i for i in range(7)]


async def test_an_fsync_that_fails_on_the_loop_refuses_the_append_and_the_next_one_is_stored(
    form: str,
) -> None:
    fs = TimedFs()
    async with running(Path("/data"), fs=fs, fsync="group") as store:
        topic = await store.create("t")
        stored = 0
        async with asyncio.timeout(30):
            while threading.get_ident() not in fs.threads:
                await append(topic, b"stored", alone=True)
                stored += 1
        fs.fail(1, only=["sync"])
        with pytest.raises(StorageFailed):
            await append(topic, b"refused", alone=True)
        assert (await append(topic, b"next", alone=True)).first_offset == stored
        expected = [b"stored"] * stored + [b"next"]
        assert [payload for _, payload in everything(topic)] == expected
    async with running(Path("/data"), fs=fs.kill(), fsync="group") as store:
        assert [payload for _, payload in everything(store.require("t"))] == expected
