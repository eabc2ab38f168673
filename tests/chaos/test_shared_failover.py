"""Shared topics when a standby of PostgreSQL is promoted: an asynchronous one has lost the newest
records, and none of their offsets is given again.
"""

import asyncio
from collections.abc import Iterator

import pytest

from penstock.errors import PenstockError
from penstock.log.producers import Producer
from penstock.topics.shared.log import SharedLog
from tests.support.postgres import Pair
from tests.support.wait import eventually
from tests.topics.shared.conftest import shared_topics
from tests.topics.shared.test_log import values

pytestmark = pytest.mark.xdist_group("postgres_failover")
SECONDS = 120.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as servers:
        yield servers


async def append(log: SharedLog, value: bytes, producer: Producer | None = None) -> int:
    """Append until it is answered, as a client that retries does."""
    while True:
        try:
            async with asyncio.timeout(SECONDS):
                return (await log.append([value], producer)).first_offset
        except PenstockError:
            await asyncio.sleep(0.1)


async def test_an_asynchronous_standby_gives_no_offset_twice_and_the_gap_is_reported(
    pair: Pair,
) -> None:
    lost_from, lost_to = 10, 15
    async with shared_topics(pair.url(), acquire_timeout=2.0) as topics:
        log = await topics.create("orders", 1)
        for i in range(lost_from):
            assert await append(log, b"%d" % i) == i
        await asyncio.to_thread(pair.primary.synchronous, "")
        await asyncio.to_thread(pair.cut_off)
        before = topics.timeline
        seen = [await append(log, b"lost %d" % i) for i in range(lost_from, lost_to)]
        assert seen == list(range(lost_from, lost_to))
        assert len(await values(log)) == lost_to
        pair.primary.kill()
        await asyncio.to_thread(pair.promote)
        # The control file still has the old timeline: an append must not trust it.
        control = "SELECT timeline_id FROM pg_control_checkpoint()"
        assert await asyncio.to_thread(pair.primary.sql, control) == before
        again = await append(log, b"after")
        assert again >= lost_to + (1 << 20)
        assert topics.timeline == before + 1
        assert await append(log, b"more") == again + 1
        # What this broker had in memory of the lost records is not read any more.
        found = await eventually(lambda: _values_if(log, lost_from + 2), SECONDS)
        assert found == [b"%d" % i for i in range(lost_from)] + [b"after", b"more"]
        [gap] = await log.gaps()
        assert (gap["gap_start"], gap["gap_end"], gap["timeline"]) == (lost_from, again, before)
        # A Kafka consumer that saw lost records learns where the old epoch ended.
        assert await log.end_of_timeline(before) == lost_from
        assert await log.end_of_timeline(before + 1) == log.next_offset


async def _values_if(log: SharedLog, count: int) -> list[bytes] | None:
    found = await values(log)
    return found if len(found) == count else None


async def test_a_synchronous_standby_has_everything_that_was_answered(pair: Pair) -> None:
    async with shared_topics(pair.url(), acquire_timeout=2.0) as topics:
        log, producer = await topics.create("orders", 1), bytes(16)
        answered = [await append(log, b"%d" % i, Producer(producer, i)) for i in range(10)]
        sending = asyncio.create_task(append(log, b"10", Producer(producer, 10)))
        pair.primary.kill()
        await asyncio.to_thread(pair.promote)
        answered.append(await sending)
        answered.append(await append(log, b"11", Producer(producer, 11)))
        found = await eventually(lambda: _values_if(log, 12), SECONDS)
        assert found == [b"%d" % i for i in range(12)]
        assert answered == sorted(set(answered))
