"""Limits, policies and the books of a send queue."""

import asyncio
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config.schema import SendQueueSettings as Settings
from penstock.errors import Full, StorageFull, TooLarge
from penstock.export import sendqueue
from penstock.export.context import Clock, RouteContext
from penstock.export.sendqueue import SendQueue
from penstock.export.telemetry import ExportMetrics
from penstock.io.fs import DISK, Fs
from penstock.metrics import Metrics
from tests.export.making import POOL, FakeClock, block, kill_queue, status_of, taken
from tests.support.faults import FaultyFs
from tests.support.form import pick
from tests.support.wait import eventually


async def started(
    directory: Path, *, fs: Fs = DISK, clock: Clock | None = None, **given_settings: Any
) -> SendQueue:
    metrics = ExportMetrics(Metrics(), dict).of("r")
    chosen = Settings(**({"meta_sync_interval": 3600.0, "free_space_reserve": 0} | given_settings))
    context = RouteContext(
        fs=fs, pool=POOL, clock=clock or Clock(), limit=asyncio.Semaphore(1), metrics=Metrics()
    )
    queue = SendQueue("r", chosen, directory, context, metrics, limit=1 << 30)
    await queue.start()
    return queue


def size_of(directory: Path) -> int:
    return sum(
        path.stat().st_size
        for path in directory.iterdir()
        if path.name not in ("fastqueue.meta", "lock")
    )


def dropped(queue: SendQueue) -> dict[str, int]:
    return status_of(queue)["accounting"]["dropped"]


async def test_drop_oldest_makes_room_and_counts_what_went(tmp_path: Path):
    queue = await started(tmp_path, max_size=10)
    for number in range(25):
        assert (await queue.push([block(number, records=2)])).accepted == 2
    assert queue.count == 10
    assert dropped(queue) == {"oldest": 30}
    assert await taken(queue) == list(range(15, 25))
    await queue.stop()


async def test_drop_oldest_by_bytes_frees_real_bytes(tmp_path: Path):
    queue = await started(tmp_path, max_bytes=20_000, compression="none", inmemory_blocks=4)
    for number in range(300):
        await queue.push([block(number, size=800)])
        assert size_of(tmp_path) <= 20_000
    left = await taken(queue)
    assert left == list(range(300 - len(left), 300))
    assert len(left) >= 10
    assert dropped(queue) == {"oldest": 300 - len(left)}
    await queue.stop()


async def test_drop_newest_tells_the_caller_and_counts(tmp_path: Path):
    queue = await started(tmp_path, max_size=3, full_behavior="drop_newest")
    answers = [await queue.push([block(number)]) for number in range(5)]
    assert [answer.dropped for answer in answers] == [0, 0, 0, 1, 1]
    assert dropped(queue) == {"newest": 2}
    assert status_of(queue)["accounting"]["accepted"] == 5
    assert await taken(queue) == [0, 1, 2]
    await queue.stop()
    again = await started(tmp_path)
    assert dropped(again) == {"newest": 2}
    await again.stop()


async def test_block_is_real_backpressure(tmp_path: Path):
    clock = FakeClock()
    queue = await started(
        tmp_path, clock=clock, max_size=2, full_behavior="block", block_timeout=30.0
    )

    def blocks() -> bool:
        return any(due == clock.now + 30.0 for due, _, _ in clock.sleepers)

    await queue.push([block(0), block(1)])
    waiting = asyncio.ensure_future(queue.push([block(2)]))
    await eventually(blocks)
    await clock.advance(29)
    assert not waiting.done()
    queue.ack(await queue.take())
    assert (await waiting).accepted == 1
    late = asyncio.ensure_future(queue.push([block(3)]))
    await eventually(blocks)
    await clock.advance(31)
    with pytest.raises(Full):
        await late
    assert await taken(queue) == [1, 2]
    assert dropped(queue) == {}
    await queue.stop()


async def test_a_push_larger_than_the_queue_is_refused(tmp_path: Path):
    queue = await started(tmp_path, max_size=3)
    with pytest.raises(TooLarge):
        await queue.push([block(number) for number in range(4)])
    await queue.stop()


async def test_the_reserve_refuses_before_the_disk_is_full_and_lets_go_by_itself(tmp_path: Path):
    fs = FaultyFs()
    fs.free = 10_000
    queue = await started(tmp_path, fs=fs, free_space_reserve=5000)
    await queue.push([block(0)])
    fs.free = 4000
    await queue.tick()
    with pytest.raises(StorageFull, match="in reserve"):
        await queue.push([block(1)])
    fs.free = 1 << 30
    await queue.push([block(2)])
    assert await taken(queue) == [0, 2]
    await queue.stop()


async def test_memory_failover_is_bounded_and_then_says_no(tmp_path: Path):
    import errno

    fs = FaultyFs()
    queue = await started(tmp_path, fs=fs, fsync="never", inmemory_blocks=4, failover_max_size=20)
    fs.fail(1, errno.ENOSPC, forever=True, only={"append", "open"})
    accepted = 0
    with pytest.raises(StorageFull):
        for number in range(100):
            await queue.push([block(number)])
            accepted += 1
            await queue.tick()
    assert 24 <= accepted <= 26
    fs.heal()
    await queue.tick()
    await queue.push([block(accepted)])
    assert await taken(queue) == list(range(accepted + 1))
    await queue.stop()


async def test_the_catch_up_rate_holds_back_the_backlog_and_not_fresh_data(tmp_path: Path):
    clock = FakeClock()
    queue = await started(tmp_path, clock=clock, inmemory_blocks=5, catchup_rate=2.0)
    await queue.push([block(number) for number in range(15)])
    times = []
    for _ in range(10):
        waiting = asyncio.ensure_future(queue.wait_for_block())
        while not waiting.done():
            await clock.advance(0.1)
            await asyncio.sleep(0.001)
        queue.ack(await queue.take())
        times.append(clock.now)
    assert times[-1] - times[0] == pytest.approx(9 / 2, abs=1.1)
    before = clock.now
    while queue.gauges()["fastqueue_inmemory_blocks"]:
        queue.ack(await queue.take())
    assert clock.now == before
    await queue.stop()


async def test_adaptive_sizing_shrinks_the_memory_layer_when_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    queue = await started(tmp_path, inmemory_blocks=64, target_utilization=0.5)
    await queue.push([block(number) for number in range(64)])
    monkeypatch.setattr("penstock.export.sendqueue.queue.memory_used", lambda: 900 << 20)
    for _ in range(3):
        await queue.tick()
    assert queue.gauges()["queue_effective_max_size"] == 8
    assert queue.gauges()["fastqueue_inmemory_blocks"] == 8
    monkeypatch.setattr("penstock.export.sendqueue.queue.memory_used", lambda: 1 << 20)
    for _ in range(20):
        await queue.tick()
    assert queue.gauges()["queue_effective_max_size"] == 64
    assert await taken(queue) == list(range(64))
    await queue.stop()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(1, 6), st.integers(1, 9)),
        st.tuples(
            st.sampled_from(
                ["take", "ack", "ack_dead", "back", "tick", "purge", "stop", "kill", "settle"]
            ),
            st.integers(0, 5),
        ),
    ),
    max_size=40,
)


@settings(
    max_examples=pick(short=20, usual=60, soak=1000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    steps,
    st.sampled_from(["always", "interval", "never"]),
    st.sampled_from(["drop_oldest", "drop_newest"]),
    st.sampled_from(["fifo", "newest_first", "mixed"]),
)
async def test_the_books_balance_after_anything(
    course: list[Any], policy: str, full: str, order: str
):
    """accepted = delivered + dead-lettered + dropped + queued, and `queued` is what can really be
    taken out.
    """

    async def body(directory: Path) -> None:
        options = {
            "fsync": policy,
            "full_behavior": full,
            "drain_order": order,
            "max_size": 12,
            "inmemory_blocks": 3,
            "chunk_size": 4096,
            "max_bytes": 32768,
            "compression": "none",
        }
        queue = await started(directory, **options)
        leased: list[Any] = []
        pushed = 0
        for step in course:
            what, amount = step[0], step[1]
            if what == "push":
                made = [block(pushed + n, records=step[2]) for n in range(amount)]
                pushed += amount
                await queue.push(made)
            elif what == "take":
                taken = [await queue.take() for _ in range(amount)]
                leased += [each for each in taken if each is not None]
            elif what in ("ack", "ack_dead") and leased:
                each = leased.pop(amount % len(leased))
                queue.ack(each, dead=min(amount, each.records) if what == "ack_dead" else 0)
            elif what == "back" and leased:
                queue.give_back(leased.pop(amount % len(leased)))
            elif what == "tick":
                await queue.tick()
            elif what == "purge":
                await queue.purge()
            elif what == "settle":
                await asyncio.sleep(0)
            elif what in ("stop", "kill"):
                if what == "stop":
                    for each in leased:
                        queue.give_back(each, attempted=False)
                    await queue.stop()
                else:
                    await asyncio.sleep(0)
                    await kill_queue(queue)
                leased = []
                queue = await started(directory, **options)
            state = queue.books
            assert (
                state.accepted == state.delivered + state.dead + sum(state.dropped) + state.queued
            )
            assert state.queued >= 0
        for each in leased:
            queue.give_back(each)
        left = 0
        while (each := await queue.take()) is not None:
            left += each.records
            queue.ack(each)
        state = queue.books
        assert state.queued == 0
        assert queue.count == 0
        await queue.stop()
        again = await started(directory, **options)
        assert again.books.queued == 0
        assert again.books.delivered == state.delivered
        await again.stop()

    with tempfile.TemporaryDirectory() as directory:
        await body(Path(directory))


async def test_a_taker_waits_for_a_push_and_stops_with_the_queue(tmp_path: Path):
    queue = await started(tmp_path)
    waiting = [asyncio.ensure_future(queue.wait_for_block()) for _ in range(3)]
    await asyncio.sleep(0)
    await queue.push([block(1)])
    await eventually(lambda: sum(each.done() for each in waiting) == 1)
    await queue.stop()
    assert sorted([await each for each in waiting]) == [False, False, True]


async def test_rates_time_to_full_and_time_to_empty_follow_what_happens(tmp_path: Path):
    clock = FakeClock()
    queue = await started(tmp_path, clock=clock, max_size=1000)
    assert (queue.time_to_full(), queue.drain_eta()) == (-1, 0)
    for second in range(200):  # two batches come in per second, one is delivered every other second
        await queue.push([block(second), block(second)])
        if second % 2:
            queue.ack(await queue.take())
        clock.now += 1
        await queue.tick()
    assert queue.count == 300
    assert queue.arrivals == pytest.approx(2, rel=0.05)
    assert queue.time_to_full() == pytest.approx(700 / 1.5, rel=0.1)
    assert queue.drain_eta() == -1, "it grows"
    assert queue.gauges()["queue_oldest_age_seconds"] == pytest.approx(150, abs=1)
    for _ in range(140):
        queue.ack(await queue.take())
        clock.now += 1
        await queue.tick()
    assert queue.time_to_full() == -1
    assert queue.drain_eta() == pytest.approx(160, rel=0.1), "160 left, about one a second"
    assert queue.gauges()["queue_utilization_ratio"] == pytest.approx(0.16)
    await queue.stop()


async def test_what_was_delivered_before_a_restart_is_no_part_of_the_rates(tmp_path: Path):
    clock = FakeClock()
    queue = await started(tmp_path, clock=clock)
    await queue.push([block(number) for number in range(1000)])
    assert len(await taken(queue)) == 1000
    await queue.stop()
    queue = await started(tmp_path, clock=clock)
    await clock.advance(1)
    await queue.tick()
    status = queue.status()
    assert (status.batches_in_per_second, status.batches_out_per_second) == (0, 0)
    await queue.stop()


def test_nobody_outside_reaches_into_the_send_queue():
    """Its package is the one door; commands and the manager also look into files."""
    package = Path(sendqueue.__file__).parent
    doors = {"penstock.export.sendqueue", "penstock.export.sendqueue.inspect"}
    sources = [path for path in package.parents[1].rglob("*.py") if package not in path.parents]
    assert len(sources) > 100
    for path in sources:
        used = set(re.findall(r"penstock\.export\.sendqueue[\w.]*", path.read_text()))
        assert used <= doors, f"{path.name} uses {used - doors}"
        assert "._fast" not in path.read_text(), path.name
