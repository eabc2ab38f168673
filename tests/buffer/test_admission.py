"""How fast pushes may join a backlog while it is replayed: always slower than it shrinks."""

import asyncio

from penstock.buffer.backlog import FIRST_EVENTS, Admission


async def test_half_of_what_is_committed_is_admitted_in_the_order_of_asking():
    admission = Admission()
    assert await admission.ask(10)  # nothing is being replayed
    admission.begin()
    assert await admission.ask(FIRST_EVENTS)
    first, second = (asyncio.create_task(admission.ask(10)) for _ in range(2))
    await asyncio.sleep(0)
    admission.committed(18)
    await asyncio.sleep(0)
    assert not first.done()
    admission.committed(2)
    await asyncio.sleep(0)
    assert first.done()
    assert not second.done()
    late = asyncio.create_task(admission.ask(1))
    admission.committed(10)  # enough for the late one, but it is not its turn
    await asyncio.sleep(0)
    assert not late.done()
    admission.committed(12)
    assert await asyncio.gather(first, second, late) == [True, True, True]


async def test_the_last_pass_admits_nobody_and_its_end_sends_everybody_to_look_again():
    admission = Admission()
    admission.begin()
    admission.close()
    waiting = [asyncio.create_task(admission.ask(1)) for _ in range(3)]
    await asyncio.sleep(0)
    admission.committed(1000)
    await asyncio.sleep(0)
    assert admission.waiting == 3
    admission.end()
    assert await asyncio.gather(*waiting) == [False, False, False]
    assert await admission.ask(1)


async def test_a_push_larger_than_the_first_credit_is_not_stuck():
    admission = Admission()
    admission.begin()
    assert await admission.ask(50 * FIRST_EVENTS)
    waiting = asyncio.create_task(admission.ask(50 * FIRST_EVENTS))
    await asyncio.sleep(0)
    admission.committed(200 * FIRST_EVENTS)
    assert await waiting
