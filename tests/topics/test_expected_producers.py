"""A producer whose first batch failed: the broker expects that batch, also after a restart."""

import errno
from pathlib import Path

import pytest

from penstock.errors import Conflict, StorageFull
from penstock.log.producers import Producer
from penstock.protocol.frames import SPARSE
from tests.support.faults import FaultyFs
from tests.support.topics import Clock, everything, running

pytestmark = pytest.mark.usefixtures("form")

ME = b"producer-of-test"
DATA = Path("/data")


@pytest.mark.parametrize("number", [0, 7])
async def test_its_next_batch_is_not_taken_for_the_first_after_a_restart(number: int) -> None:
    fs = FaultyFs()
    async with running(DATA, fs=fs) as store:
        topic = await store.create("t")
        await topic.append([b"of another"])
        fs.fail(1, errno.ENOSPC, only=["append"])
        with pytest.raises(StorageFull):
            await topic.append([b"first"], Producer(ME, number))
    async with running(DATA, fs=fs) as store:
        topic = store.require("t")
        with pytest.raises(Conflict, match=f"comes too early; {number} is expected"):
            await topic.append([b"second"], Producer(ME, number + 1))
        assert (await topic.append([b"first"], Producer(ME, number))).first_offset == 1
        assert (await topic.append([b"second"], Producer(ME, number + 1))).first_offset == 2
        again = await topic.append([b"first"], Producer(ME, number))
        assert (again.first_offset, again.duplicate) == (1, True)
        assert [payload for _, payload in everything(topic)] == [b"of another", b"first", b"second"]


async def test_it_is_remembered_from_its_failure_on_however_old_the_last_record_is() -> None:
    fs, clock = FaultyFs(), Clock()
    fs.free = 5000
    settings = {"fs": fs, "clock": clock, "producer_expiry": 60.0, "free_space_reserve": 1000}
    async with running(DATA, **settings) as store:
        topic = await store.create("t")
        await topic.append([b"of another"])
        clock.now += 1000
        with pytest.raises(StorageFull):
            await topic.append([b"first" * 1000], Producer(ME, 3))
    async with running(DATA, **settings) as store:
        with pytest.raises(Conflict, match="3 is expected"):
            await store.require("t").append([b"second"], Producer(ME, 4))


async def test_a_sparse_number_does_not_count_as_stored_when_a_later_one_failed() -> None:
    fs = FaultyFs()
    async with running(DATA, fs=fs) as store:
        topic = await store.create("t")
        fs.fail(1, errno.ENOSPC, only=["append"])
        with pytest.raises(StorageFull):
            await topic.append([b"later"], Producer(ME, SPARSE + 9))
        first = await topic.append([b"earlier"], Producer(ME, SPARSE + 5))
        assert (first.first_offset, first.count, first.duplicate) == (0, 1, False)
