"""What holds of shared topics under load: a topic made again under appends, and a reader far behind
beside producers."""

import asyncio
import time

import pytest

from penstock.errors import NotFound
from penstock.topics.shared.catalog import SharedTopics
from penstock.topics.shared.log import SharedLog
from tests.support.form import SOAK
from tests.support.wait import eventually
from tests.topics.shared.conftest import shared_topics
from tests.topics.shared.test_log import Pair, values

BEHIND = 1_000_000 if SOAK else 50_000  # offsets between the reader and the end
APPENDS = 5_000 if SOAK else 250
PER_SECOND = 500 if SOAK else 250
READ_SECONDS = 0.02  # between two reads of the reader that is behind: its rate is limited


async def test_a_topic_made_again_under_appends_mixes_nothing(pair: Pair) -> None:
    """Each append is in the topic whose incarnation answered it, and in no other."""
    here, there = pair
    answered: dict[str, set[bytes]] = {}
    stop = asyncio.Event()

    async def append(topics: SharedTopics, name: str) -> None:
        number = 0
        while not stop.is_set():
            log = await topics.find("orders")
            if log is None:
                await asyncio.sleep(0.002)
                continue
            payload = b"%s-%d" % (name.encode(), number)
            number += 1
            try:
                await log.append([payload])
            except NotFound:
                continue  # deleted: nothing was stored
            answered.setdefault(log.incarnation, set()).add(payload)

    producers = [
        asyncio.create_task(append(topics, f"{i}{j}"))
        for i, topics in enumerate(pair)
        for j in range(3)
    ]
    incarnations = []
    for _ in range(8):
        made = await here.create("orders", 1)
        incarnations.append(made.incarnation)
        await eventually(lambda one=made.incarnation: len(answered.get(one, ())) >= 20)
        if len(incarnations) < 8:
            await here.delete("orders")
    stop.set()
    await asyncio.gather(*producers)
    await there.read_catalog()
    last = await there.find("orders")
    assert last is not None
    stored = await values(last)
    assert len(set(incarnations)) == 8
    assert last.incarnation == incarnations[-1]
    assert sorted(stored) == sorted(answered[last.incarnation])


@pytest.mark.timeout(600)
async def test_a_reader_far_behind_does_not_slow_producers(database_url: str) -> None:
    async with (
        shared_topics(database_url, shared_cache=4 << 20) as writing,
        shared_topics(database_url, shared_cache=4 << 20) as reading,
    ):
        log = await writing.create("orders", 1)
        for _ in range(0, BEHIND, 5_000):
            await log.append([b"x" * 100] * 5_000)
        behind = await reading.find("orders")
        assert behind is not None
        await behind.refresh()
        alone: list[float] = []
        beside: list[float] = []
        for _ in range(2):  # alternated: the machine has other things to do, too
            alone += await _latencies(log, APPENDS // 2)
            read = asyncio.create_task(_read_slowly(behind))
            try:
                beside += await _latencies(log, APPENDS // 2)
                assert not read.done(), read
            finally:
                read.cancel()
        await asyncio.gather(read, return_exceptions=True)
    # The short form is for what goes badly wrong: 250 latencies have no steady p99.
    share = 0.99 if SOAK else 0.9
    before, after = (sorted(times)[int(len(times) * share)] for times in (alone, beside))
    print(f"seconds of an append: {before:.4f} alone, {after:.4f} beside the reader")
    assert after < (2 * before if SOAK else max(5 * before, 0.02))


async def _latencies(log: SharedLog, count: int) -> list[float]:
    """Append at a steady rate; the seconds of each append."""
    began = time.perf_counter()

    async def one() -> float:
        start = time.perf_counter()
        await log.append([b"y" * 100])
        return time.perf_counter() - start

    tasks = []
    for i in range(count):
        await asyncio.sleep(max(0.0, began + i / PER_SECOND - time.perf_counter()))
        tasks.append(asyncio.create_task(one()))
    return list(await asyncio.gather(*tasks))


async def _read_slowly(log: SharedLog) -> None:
    """Read from the beginning again and again, at a limited rate."""
    offset = 0
    while True:
        batch = await log.read_through(lambda at=offset: log.read(at))
        offset = batch.next_offset if batch.next_offset < BEHIND else 0
        await asyncio.sleep(READ_SECONDS)
