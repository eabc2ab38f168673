"""Every disk call failed once and for good, and power cut after every disk call: what was answered
is never lost.

The scenario is an outage with rotation, a recovery that begins and is interrupted, and more pushes.
After it the machine or the process ends; a new process on what is left must deliver exactly what
was answered, in order, nothing twice. A push that was refused may have been stored or not (its
outcome is unknown to the client), but never twice.
"""

import asyncio
import errno
import itertools
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from random import Random
from unittest.mock import Mock

import pytest

from penstock.buffer.failed import FailedEvents, RefusedEvent
from penstock.buffer.storage import BufferStorage
from penstock.config.schema import BufferSettings as Settings
from penstock.errors import PenstockError, StorageError
from penstock.io.fs import DISK
from penstock.metrics import Metrics
from penstock.queues.types import Item
from tests.support.buffers import Store, buffering, items, kill, killable
from tests.support.faults import CHANGES, HOWS, FaultyFs
from tests.support.form import pick
from tests.support.wait import eventually

SETTINGS = {"events_per_file": 4, "max_batch": 3, "retry_interval": 0.01}


class Ledger:
    """What was pushed and what became of it."""

    def __init__(self) -> None:
        self.answered: list[int] = []
        self.refused: list[int] = []
        self.next = 0

    async def push(self, buffer, count=1, **how):
        numbers = list(range(self.next, self.next + count))
        self.next += count
        try:
            await buffer.push(items(*numbers), **how)
        except PenstockError:
            self.refused += numbers
        else:
            self.answered += numbers

    def check(self, store: Store) -> None:
        got = [int(payload) for payload in store.payloads()]
        assert len(set(got)) == len(got), f"twice: {got}"
        kept = [number for number in got if number in set(self.answered)]
        assert kept == sorted(kept), f"order: {kept}"
        missing = set(self.answered) - set(got)
        assert not missing, f"lost {missing} of {self.answered}; refused {self.refused}"
        assert set(got) <= set(self.answered) | set(self.refused)


async def scenario(directory, fs, store, ledger):
    """Runs until the end or until the disk refuses to let a buffer start."""
    buffer = await killable(directory, store, fs, **SETTINGS)
    try:
        await ledger.push(buffer)
        store.go(False)
        for _ in range(5):
            await ledger.push(buffer, 2)
        seen = 0

        async def down_again(pushed):
            nonlocal seen
            seen += 1
            if seen == 3:
                store.go(False)

        store.before = down_again
        store.go(True)
        try:
            await eventually(
                lambda: not store.healthy or (seen and not buffer.status.pending), timeout=0.15
            )
        except AssertionError:
            pass  # the disk is gone: replay cannot go on
        store.before = None
        await ledger.push(buffer, 2)
    finally:
        store.go(False)
        await kill(buffer)


async def recover(directory, fs, store, ledger):
    store.go(True)
    buffer = await killable(directory, store, fs, **SETTINGS)
    try:
        await eventually(lambda: not buffer.status.pending and not buffer.failed.events)
        ledger.check(store)
        await ledger.push(buffer)
        ledger.check(store)
        assert ledger.refused[-1:] != [ledger.next - 1]
        assert [
            path for path in fs.files if ".buf" in path.name and path.parent.name != "quarantine"
        ] == []
    finally:
        await kill(buffer)


async def started(work) -> None:
    try:
        await work
    except PenstockError:
        pass  # a broker whose disk fails at start does not start; the next one does


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
async def test_whichever_disk_call_fails_nothing_answered_is_lost(tmp_path, code, forever):
    for n in itertools.count(1, pick(short=9, usual=3, soak=1)):
        fs, store, ledger = FaultyFs(), Store(), Ledger()
        fs.fail(n, code, forever=forever, only=CHANGES)
        await started(scenario(tmp_path, fs, store, ledger))
        hit = fs.failed
        fs.heal()
        await recover(tmp_path, fs, store, ledger)
        if not hit:
            assert n > 20, "the scenario makes too few calls to prove anything"
            break


@pytest.mark.parametrize("how", HOWS)
async def test_wherever_the_power_goes_nothing_answered_is_lost(tmp_path, how):
    for n in itertools.count(1, pick(short=12, usual=4, soak=1)):
        fs, store, ledger = FaultyFs(), Store(), Ledger()
        fs.fail(n, errno.EIO, forever=True, only=CHANGES)
        await started(scenario(tmp_path, fs, store, ledger))
        hit = fs.failed
        await recover(tmp_path, fs.crash(Random(n), how), store, ledger)
        if not hit:
            break


async def test_killed_at_any_moment_qos0_loses_nothing(tmp_path):
    only_on_disk = 0
    for turns in range(pick(short=30, usual=60, soak=240)):
        fs, store, ledger = FaultyFs(), Store(), Ledger()

        async def slow(pushed):
            for _ in range(5):
                await asyncio.sleep(0)

        store.before = slow
        buffer = await killable(tmp_path, store, fs, **SETTINGS)

        async def load(buffer=buffer, ledger=ledger):
            while True:
                await ledger.push(buffer, buffer_ms=1, buffer_max=3)

        task = asyncio.create_task(load())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await kill(buffer)
        only_on_disk += len(ledger.answered) > len(store.payloads())
        store.go(True)
        survivor = await killable(tmp_path, store, fs, **SETTINGS)
        assert set(ledger.answered) <= {int(payload) for payload in store.payloads()}
        got = [int(payload) for payload in store.payloads()]
        assert got == sorted(set(got))
        await kill(survivor)
    assert only_on_disk > 3, "it was never killed at a moment that matters"


async def test_after_a_failed_fsync_the_same_events_go_to_a_new_file(tmp_path):
    fs, store, ledger = FaultyFs(), Store(healthy=False), Ledger()
    buffer = await killable(tmp_path, store, fs)
    await ledger.push(buffer, 2)
    fs.fail(1, errno.EIO, only={"sync"})
    await ledger.push(buffer, 2)
    assert ledger.answered == [0, 1, 2, 3]
    assert len([path for path in fs.files if "failover" in path.name]) == 2
    await kill(buffer)
    await recover(tmp_path, fs.crash(Random(1), "drop"), store, ledger)


async def test_a_push_is_refused_and_does_not_wait_forever_when_its_directory_is_deleted(tmp_path):
    async with buffering(tmp_path / "buffers", Store(healthy=False)) as buffer:
        shutil.rmtree(tmp_path / "buffers")
        with pytest.raises(StorageError):
            async with asyncio.timeout(10):
                await buffer.push(items(1))
        (tmp_path / "buffers").mkdir()
        assert [one.status for one in await buffer.push(items(2))] == ["buffered"]


async def test_a_bug_in_the_writer_refuses_the_pushes_that_it_was_writing(tmp_path, monkeypatch):
    fs, store = FaultyFs(), Store(healthy=False)
    buffer = await killable(tmp_path, store, fs)
    with monkeypatch.context() as patch:
        patch.setattr(fs, "open", Mock(side_effect=RuntimeError("a bug")))
        with pytest.raises(StorageError, match="writer ended"):
            async with asyncio.timeout(10):
                await buffer.push(items(1))
    assert [one.status for one in await buffer.push(items(2))] == ["buffered"]
    await kill(buffer)


def test_the_table_of_failed_files_can_be_read_while_pool_threads_change_it(tmp_path):
    settings = Settings(free_space_reserve=0)
    with ThreadPoolExecutor(2) as pool:
        storage = BufferStorage(tmp_path, DISK, pool, settings, lambda item: item)
        failed = FailedEvents(storage)
        storage.fs.make_dir(tmp_path / "failed")
        names = [storage.namer.next("failover") for _ in range(400)]
        item = Item("q", b"1", transaction_id="t")
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            writing = pool.submit(
                lambda: [failed.write(name, [RefusedEvent(item, "no")]) for name in names]
            )
            while not writing.done():
                failed.due()
                assert failed.next_due > 0
                assert failed.events <= len(names)
            writing.result()
        finally:
            sys.setswitchinterval(interval)
        assert len(failed.due(now=True)) == len(names)


async def test_a_bug_in_the_worker_does_not_end_replay_and_is_counted(tmp_path, caplog):
    store, metrics = Store(), Metrics()
    async with buffering(tmp_path, store, metrics=metrics) as buffer:
        store.go(False)
        await buffer.push(items(1, 2))
        failures = 2

        async def fail(pushed):
            nonlocal failures
            if failures:
                failures -= 1
                raise RuntimeError("a bug")

        store.before = fail
        store.go(True)
        await eventually(lambda: store.payloads() == [b"1", b"2"])
        await eventually(lambda: buffer.status.report().pending == 0)
    assert metrics.background_restarts.value("buffer replay") == 2
    failures_logged = [record.exc_info for record in caplog.records if record.exc_info]
    assert [repr(info[1]) for info in failures_logged] == ["RuntimeError('a bug')"] * 2
