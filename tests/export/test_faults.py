"""The queue on a disk that fails: every call once, for ever, and power lost in the middle."""

import asyncio
import errno
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.errors import Locked, StorageFailed, StorageFull
from penstock.export.sendqueue.journal import CRASH, DAMAGED, OLDEST
from tests.export.making import balanced, block, number_of, opened, taken
from tests.support.faults import CHANGES, HOWS, FaultyFs
from tests.support.form import SOAK, pick

REFUSED = (StorageFull, StorageFailed)
OPTIONS = {"inmemory_blocks": 4, "chunk_size": 1000, "write_buffer_size": 300}
POLICIES = {
    "always": {},
    "interval": {"fsync": "interval"},
    "never": {"fsync": "never", "write_through": False},
}
ROUNDS = pick(short=3, usual=5, soak=12)
CASES = [("always", errno.EIO), ("interval", errno.ENOSPC), ("never", errno.ENOSPC)]
if SOAK:
    CASES += [("always", errno.ENOSPC), ("interval", errno.EIO), ("never", errno.EIO)]


class Run:
    """A fixed course of pushes, takes, acks and upkeep, with what was promised along the way."""

    def __init__(self, directory: Path, fs: FaultyFs, policy: str) -> None:
        self.directory, self.fs, self.options = directory, fs, OPTIONS | POLICIES[policy]
        self.accepted: set[int] = set()
        self.unknown: set[int] = set()
        self.acked: set[int] = set()
        self.queue = None

    async def go(self, rounds: int = ROUNDS) -> None:
        self.queue = await opened(self.directory, fs=self.fs, **self.options)
        for turn in range(rounds):
            numbers = range(turn * 5, turn * 5 + 5)
            try:
                await self.queue.put([block(number) for number in numbers])
                self.accepted.update(numbers)
            except REFUSED:
                self.unknown.update(numbers)
            for _ in range(3):
                try:
                    leased = await self.queue.take()
                except REFUSED:
                    continue
                if leased is not None:
                    self.queue.ack(leased)
                    self.acked.add(number_of(leased))
            await self.queue.tick()
            await asyncio.sleep(0)

    def abandon(self) -> None:
        if self.queue is not None:
            self.queue.abandon()


@pytest.mark.parametrize(("policy", "code"), CASES)
async def test_no_failed_call_loses_what_was_accepted(tmp_path: Path, policy: str, code: int):
    """The n-th call that changes the disk fails, for every n: the queue goes on by itself, and
    nothing is missing.
    """

    async def body() -> int:
        n, untouched = 1, 0
        while True:
            fs = FaultyFs()
            run = Run(tmp_path, fs, policy)
            fs.fail(n, code, only=CHANGES)
            try:
                await run.go()
            except REFUSED:  # while opening: nothing was promised
                assert run.queue is None
            calls = fs.calls
            fs.heal()
            if run.queue is not None:
                await run.queue.tick()
                assert run.queue.store.failing is None
                result = await taken(run.queue)
                assert run.accepted <= run.acked | set(result)
                assert result == sorted(result)
                assert not run.acked & set(result)
                assert balanced(run.queue)
                assert run.queue.books.queued == 0
                await run.queue.close()
            untouched += calls < n  # a run may make fewer calls: work in the background shares them
            if untouched == 3:
                return n
            n += 1

    assert await body() > 30


@pytest.mark.parametrize(("policy", "code"), [case for case in CASES if case[0] != "never"])
async def test_a_disk_that_is_gone_for_ever_keeps_what_was_promised_for_the_next_start(
    tmp_path: Path, policy: str, code: int
):
    async def body() -> int:
        n = 1
        while True:
            fs = FaultyFs()
            run = Run(tmp_path, fs, policy)
            fs.fail(n, code, forever=True, only=CHANGES)
            try:
                await run.go()
            except REFUSED:
                assert run.queue is None
            calls = fs.calls
            run.abandon()
            queue = await opened(tmp_path, fs=fs.kill(), **run.options)
            result = await taken(queue)
            assert run.accepted <= run.acked | set(result)
            assert set(result) <= run.accepted | run.unknown
            assert queue.books.queued == 0
            await queue.close()
            if calls < n:
                return n
            n += 1

    assert await body() > 30


async def test_power_loss_under_always_loses_nothing_that_was_accepted(tmp_path: Path):
    for seed in range(pick(short=10, usual=40, soak=400)):
        random = Random(seed)
        fs = FaultyFs()
        run = Run(tmp_path, fs, "always")
        await run.go(random.randint(1, 12))
        run.abandon()
        how = HOWS[seed % len(HOWS)]
        queue = await opened(tmp_path, fs=fs.crash(random, how), **run.options)
        result = await taken(queue)
        assert run.accepted <= run.acked | set(result), (seed, how)
        assert len(result) == len(set(result))
        assert balanced(queue)
        assert queue.books.queued == 0
        await queue.close()


@pytest.mark.parametrize("policy", ["interval", "never"])
async def test_power_loss_under_weaker_policies_keeps_what_was_synced_and_the_books(
    tmp_path: Path, policy: str
):
    """What is gone is the end of what was pushed (a torn or late write: some of it), only since the
    last sync.
    """

    lost_some = 0
    for seed in range(pick(short=10, usual=40, soak=400)):
        random = Random(seed)
        fs = FaultyFs()
        run = Run(tmp_path, fs, policy)
        await run.go(random.randint(1, 8))
        synced = (
            set(run.accepted) if policy == "interval" else set()
        )  # `go` ends with a tick, which syncs
        extra = range(1000, 1000 + random.randint(1, 9))
        await run.queue.put([block(number) for number in extra])
        run.abandon()
        how = HOWS[seed % len(HOWS)]
        queue = await opened(tmp_path, fs=fs.crash(random, how), **run.options)
        result = await taken(queue)
        assert synced <= run.acked | set(result), seed
        kept = [number for number in extra if number in result]
        assert kept == list(extra)[: len(kept)] or how in ("tear", "reorder")
        lost_some += len(kept) < len(extra)
        assert balanced(queue)
        assert queue.books.queued == 0
        await queue.close()
    assert lost_some, "no crash lost anything: this test proves nothing"


async def test_after_power_loss_a_source_is_read_again_from_where_the_queue_has_no_hole(
    tmp_path: Path,
):
    """Writes out of order leave a hole before a good block, whose position must not be believed."""

    holes = 0
    for seed in range(80):
        random = Random(seed)
        fs = FaultyFs()
        queue = await opened(tmp_path, fs=fs, fsync="interval", write_buffer_size=100)
        for number in range(8):
            each = block(number)
            each.position = number + 1
            await queue.put([each])
            if number == 2:
                await queue.tick()
        queue.abandon()
        again = await opened(tmp_path, fs=fs.crash(random, "reorder"), fsync="interval")
        position = again.books.position
        result = await taken(again)
        assert position >= 3
        assert result == list(range(position)), seed  # all before the position, nothing behind it
        holes += position < 8
        await again.close()
    assert holes


async def test_a_position_in_the_metadata_is_not_believed_without_its_blocks(tmp_path: Path):
    queue = await opened(tmp_path, fsync="interval")
    for number in range(5):
        each = block(number)
        each.position = number + 1
        await queue.put([each])
    await queue.tick()
    queue.abandon()
    (chunk,) = tmp_path.glob("0*")
    os.truncate(chunk, chunk.stat().st_size - 10)  # power loss kept the metadata
    again = await opened(tmp_path, fsync="interval")
    assert again.books.position == 4
    assert await taken(again) == list(range(4))
    await again.close()


@pytest.mark.parametrize("passes", ["damage", "chunk"])
async def test_after_power_loss_no_position_in_the_journal_is_ahead_of_the_blocks(
    tmp_path: Path, passes: str
):
    """A position is written without a block when damage is passed over, and when a chunk goes."""

    for seed in range(60):
        fs = FaultyFs()
        queue = await opened(
            tmp_path, fs=fs, fsync="interval", chunk_size=1000, write_buffer_size=100
        )
        acked = set()
        for number in range(12):
            each = block(number)
            each.position = number + 1
            await queue.put([each])
        while queue.store.chunks.chunks[0].stop > queue.books.first_open():
            leased = await queue.take()
            queue.ack(leased)
            acked.add(number_of(leased))
        if passes == "chunk":
            assert await queue.store.remove_completed_chunks()
        else:
            await queue.pass_over(5, DAMAGED, 17)
            queue.store.flush()
        queue.abandon()
        again = await opened(
            tmp_path, fs=fs.crash(Random(seed), HOWS[seed % len(HOWS)]), fsync="interval"
        )
        position = again.books.position
        result = set(await taken(again))
        assert set(range(min(position, 12))) <= result | acked, (seed, position)
        assert again.books.dropped[CRASH] == 0
        assert balanced(again)
        await again.close()


async def test_the_books_balance_when_damaged_blocks_are_among_those_dropped(tmp_path: Path):
    for seed in range(40):
        random, directory = Random(seed), tmp_path / str(seed)
        options = {"fsync": "interval", "chunk_size": 2000, "inmemory_blocks": 2}
        queue = await opened(directory, **options)
        for number in range(40):
            records, size = random.randrange(1, 9), random.randrange(50, 400)
            await queue.put([block(number, records, size)])
        await queue.close()
        for chunk in queue.store.chunks.chunks:
            data = bytearray(chunk.path.read_bytes())
            start = random.randrange(len(data))
            stop = min(len(data), start + random.randrange(1, 500))
            data[start:stop] = bytes(stop - start)
            chunk.path.write_bytes(data)
        again = await opened(directory, **options)
        while again.count:
            await again.drop_oldest(random.randrange(6), OLDEST)
            if (leased := await again.take()) is not None:
                again.ack(leased)
        assert again.books.queued == 0, seed
        await again.close()


async def test_a_failed_fsync_is_never_retried_on_the_same_file(tmp_path: Path):
    """The pages of a failed fsync are gone for good: the data must be written again, elsewhere,
    before it counts.
    """

    fs = FaultyFs()
    queue = await opened(tmp_path, fs=fs)
    await queue.put([block(1)])
    fs.fail(1, errno.EIO, only={"sync"})
    await queue.put([block(2)])  # answered only after it was written anew and synced
    assert fs.failed == 1
    queue.abandon()
    again = await opened(tmp_path, fs=fs.crash(Random(1), "drop"))
    assert await taken(again) == [1, 2]
    await again.close()


async def test_enospc_under_never_goes_on_in_memory_and_spills_when_there_is_room(tmp_path: Path):
    fs = FaultyFs()
    queue = await opened(tmp_path, fs=fs, fsync="never", write_through=False, inmemory_blocks=4)
    fs.fail(1, errno.ENOSPC, forever=True, only={"append", "open"})
    for number in range(40):
        await queue.put([block(number)])
    await queue.tick()
    assert queue.store.failing is not None
    assert len(queue.memory.unwritten) == 40
    fs.heal()
    await queue.tick()
    assert not queue.memory.unwritten
    assert queue.memory.unwritten_bytes == 0
    assert queue.store.failing is None
    assert await taken(queue) == list(range(40))
    await queue.close()


async def test_a_read_error_is_no_damage(tmp_path: Path):
    """EIO on a read says nothing about the block: it stays, and is read later."""

    fs = FaultyFs()
    queue = await opened(tmp_path, fs=fs, inmemory_blocks=1)
    await queue.put([block(number) for number in range(10)])
    fs.fail(1, errno.EIO, only={"read_at"})
    with pytest.raises(StorageFailed):
        await queue.take()
    assert await taken(queue) == list(range(10))
    assert not sum(queue.books.dropped)
    await queue.close()


def test_a_lock_is_taken_on_a_disk_without_a_byte_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", full)
    from penstock.io.lock import DirectoryLock

    with DirectoryLock(tmp_path), pytest.raises(Locked), DirectoryLock(tmp_path):
        pass
