"""A producer that is alone has its commits written on the event loop while the disk is quick."""

import asyncio
import errno
import threading
import time
from pathlib import Path

import pytest

from penstock.errors import StorageFailed, StorageFull
from penstock.log import context
from penstock.topics.topic import Appended, Topic
from tests.support.faults import FaultyFs
from tests.support.topics import everything, running

QUICK_SECONDS, SLOW_SHARE = 0.1, 0.5
STALL = 0.12  # seconds that a slow fsync takes


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


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a commit be slow only if the test makes it so, however busy the machine is."""
    monkeypatch.setattr(context, "QUICK_SECONDS", QUICK_SECONDS)
    monkeypatch.setattr(context, "SLOW_SHARE", SLOW_SHARE)


async def append(topic: Topic, payload: bytes, *, alone: bool = True) -> Appended:
    future: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
    topic.appends.enqueue([payload], future)
    topic.appends.commit(alone=alone)
    return await future


async def on_the_loop(fs: TimedFs, topic: Topic, *, alone: bool = True) -> bool:
    """Append a record; whether the event loop waited for its fsync."""
    fs.threads.clear()
    await append(topic, b"x", alone=alone)
    return threading.get_ident() in fs.threads


async def until_on_the_loop(fs: TimedFs, topic: Topic) -> None:
    """Append until the disk counts as quick."""
    async with asyncio.timeout(30):
        while not await on_the_loop(fs, topic):
            pass


async def test_only_a_lone_producer_on_a_quick_disk_is_served_on_the_loop(form: str) -> None:
    fs = TimedFs()
    async with running(Path("/data"), fs=fs, fsync="group") as store:
        topic = await store.create("t")
        assert not await on_the_loop(fs, topic), "nothing is known of the disk yet"
        await until_on_the_loop(fs, topic)
        assert not await on_the_loop(fs, topic, alone=False)


async def test_a_disk_that_stalls_holds_up_the_loop_for_a_share_of_the_time(form: str) -> None:
    fs = TimedFs()
    async with running(Path("/data"), fs=fs, fsync="group") as store:
        topic, other = await store.create("t"), await store.create("other")
        await until_on_the_loop(fs, topic)
        fs.delay = STALL
        await append(topic, b"slow")
        stalled = time.monotonic()
        assert not await on_the_loop(fs, topic), "a disk that stays slow is left to the pool"
        assert not await on_the_loop(fs, other), "the topics lie on one disk"
        fs.delay = 0
        assert not await on_the_loop(fs, topic)
        assert not await on_the_loop(fs, topic), "one quick commit between two stalls is no proof"
        await until_on_the_loop(fs, topic)
        assert time.monotonic() - stalled > STALL / SLOW_SHARE


@pytest.mark.parametrize(
    ("kind", "code", "error"),
    [("sync", errno.EIO, StorageFailed), ("append", errno.ENOSPC, StorageFull)],
)
async def test_a_failure_on_the_loop_refuses_the_append_and_the_next_one_is_stored(
    form: str, kind: str, code: int, error: type[Exception]
) -> None:
    fs = TimedFs()
    async with running(Path("/data"), fs=fs, fsync="group") as store:
        topic = await store.create("t")
        await until_on_the_loop(fs, topic)
        stored = topic.next_offset
        fs.fail(1, code, only=[kind])
        with pytest.raises(error):
            await append(topic, b"refused")
        assert (await append(topic, b"next")).first_offset == stored
        expected = [b"x"] * stored + [b"next"]
        assert [payload for _, payload in everything(topic)] == expected
    async with running(Path("/data"), fs=fs.kill(), fsync="group") as store:
        assert [payload for _, payload in everything(store.require("t"))] == expected
