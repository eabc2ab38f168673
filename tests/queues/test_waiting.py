"""Pops that wait: how they are woken, and what a broker keeps for them."""

import asyncio
import gc
import tracemalloc

from penstock.queues.taking import Take, Taken
from penstock.queues.waiting import WaitingPop
from tests.queues.support import pop, push, running
from tests.support.wait import eventually


async def test_queues_that_nobody_waits_for_take_no_memory(database_url: str) -> None:
    async with running(database_url) as queues:
        tracemalloc.start()
        try:
            names = [f"queue-{number}" for number in range(30_000)]
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            for name in names:
                queues.waiting.wake(name, 1, announce=False)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < 100_000


async def test_a_pop_that_is_over_leaves_nothing_behind(database_url: str) -> None:
    async with running(database_url) as queues:
        await push(queues, "q", 1)
        await asyncio.gather(
            pop(queues, "q", wait=True, timeout=60),
            *(pop(queues, f"empty-{n}", wait=True, timeout=0.01) for n in range(20)),
        )
        assert [name in queues.waiting.pops for name in ("q", "empty-0")] == [False, False]


async def test_a_wake_up_during_a_look_is_not_lost(database_url: str) -> None:
    waiting = WaitingPop()
    waiting.begin_poll()
    waiting.wake()
    assert await waiting.park(60, lambda _: None) is None  # at once
    waiting.begin_poll()
    parked = asyncio.create_task(waiting.park(60, lambda _: None))
    await eventually(lambda: waiting.parked)
    waiting.wake()
    assert await parked is None


async def test_a_delivery_in_the_turn_of_a_cancellation_is_given_back() -> None:
    waiting = WaitingPop()
    taken = Taken(Take(0, "q", "g", 1, None, 1, 1, None), [], "ok")
    returned: list[Taken] = []
    parked = asyncio.create_task(waiting.park(60, returned.append))
    await eventually(lambda: waiting.parked)
    assert waiting.hand_off(taken)
    parked.cancel()
    await asyncio.wait([parked])
    assert (parked.cancelled(), returned) == (True, [taken])
    assert not waiting.hand_off(taken)
