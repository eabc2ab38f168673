"""Pops and acknowledgements that share a call, and acknowledging by what was remembered of a pop."""

import asyncio
from typing import Any

import pytest

from penstock.errors import ConnectionLost
from penstock.queues import Item, PopRequest, Queues, calls, settling
from tests.queues.support import (
    acks_of,
    answer,
    complete,
    expire_leases,
    pop,
    push,
    running,
    values,
)
from tests.support.wait import eventually

PARTITIONS = 6


def recorded(queues: Queues) -> list[tuple[str, tuple[Any, ...]]]:
    """The calls of pops and acknowledgements from now on, with their arguments."""
    made: list[tuple[str, tuple[Any, ...]]] = []
    fetch = queues.database.fetch

    async def recording(sql: str, *args: Any, **options: Any) -> Any:
        if sql in (calls.TAKE, calls.SETTLE, calls.SETTLE_AND_TAKE):
            made.append((sql, args))
        return await fetch(sql, *args, **options)

    queues.database.fetch = recording  # type: ignore[method-assign]
    return made


async def test_pops_and_acknowledgements_of_different_consumers_share_one_call(
    queues: Queues,
) -> None:
    await push(queues, "q", 0)
    await complete(queues, await pop(queues, "q"))  # the group and its cursors are there
    for partition in range(PARTITIONS):
        await push(queues, "q", 1, 2, partition=f"p{partition}")
    taken = [await pop(queues, "q", 2) for _ in range(PARTITIONS - 1)]
    made = recorded(queues)
    popped, *acked = await asyncio.gather(
        pop(queues, "q", 2), *(answer(queues, one.messages) for one in taken)
    )
    released = [one.success and one.lease_released for some in acked for one in some]
    assert (values(popped), released) == ([1, 2], [True] * 10)
    assert [sql for sql, _ in made] == [calls.SETTLE_AND_TAKE]
    sent = calls.SettleArguments(*made[0][1][: len(calls.SettleArguments._fields)])
    assert sent.versions is not None
    assert [None in sent.versions, len(sent.versions)] == [False, PARTITIONS - 1]
    again = await answer(queues, taken[0].messages)
    assert [one.success for one in again] == [True, True]  # looked up this time
    assert await queues.groups.lag("q", "__QUEUE_MODE__") == 2


async def test_what_is_remembered_counts_only_while_nothing_has_changed(database_url: str) -> None:
    async def body(queues: Queues, other: Queues) -> None:
        await push(queues, "q", -1, *range(10))
        await complete(queues, await pop(queues, "q", 1))
        late = await pop(queues, "q", 2)
        await expire_leases(queues)
        mine = await pop(other, "q", 2)  # delivered again, by another broker
        assert values(mine) == values(late)
        refused = await answer(queues, late.messages)
        assert [one.error for one in refused] == ["Invalid or expired lease"] * 2
        await complete(other, mine)

        extended = await pop(queues, "q", 2)
        assert (await other.extend(extended.lease_id, 500)).success
        # acknowledged, looked up, and the next is there at once although it did not wait for it
        popped = await queues.pop(PopRequest(queue="q", batch=2), acks_of(extended))
        assert [one.success for one in popped.acked] == [True, True]
        assert values(popped) == [4, 5]

        await queues.groups.seek("__QUEUE_MODE__", "q", to="beginning")
        refused = await answer(queues, popped.messages)
        assert [one.success for one in refused] == [False, False]
        again = await pop(queues, "q", 5)
        assert values(again) == [-1, 0, 1, 2, 3]
        await answer(queues, again.messages[3:])  # a part, in any order, then the rest
        await answer(queues, again.messages[:3])
        failed = await pop(queues, "q", 2)
        await answer(queues, failed.messages, "retry")
        again = await pop(queues, "q", 10)
        assert values(again) == [4, 5, 6, 7, 8, 9]
        await complete(queues, again)
        assert await queues.groups.lag("q", "__QUEUE_MODE__") == 0
        assert await queues.database.fetch("SELECT 1 FROM leases") == []

    async with running(database_url) as queues, running(database_url) as other:
        await body(queues, other)


async def test_a_lease_that_ran_out_is_not_completed_by_memory(queues: Queues) -> None:
    await push(queues, "q", 1, 2)
    await complete(queues, await pop(queues, "q", 1))
    late = await pop(queues, "q", 1)
    # by the clock alone: no row was written since
    await queues.database.fetch("UPDATE leases SET expires_at = clock_timestamp() - interval '1 s'")
    await queues.database.fetch(
        "UPDATE cursors SET next_expiry = clock_timestamp() - interval '1 s'"
    )
    assert [one.success for one in await answer(queues, late.messages)] == [False]


async def test_no_more_leases_are_remembered_than_there_is_room_for(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "MAX_REMEMBERED_MESSAGES", 4)

    async with running(database_url) as queues:
        await push(queues, "q", 0)
        await complete(queues, await pop(queues, "q"))
        for partition in range(3):
            await push(queues, "q", 1, 2, partition=f"p{partition}")
        taken = [await pop(queues, "q", 2) for _ in range(3)]
        made = recorded(queues)
        for one in taken:
            await complete(queues, one)
        remembered = [calls.SettleArguments(*arguments).versions for _, arguments in made]
        assert [one is not None for one in remembered] == [False, True, True]


def test_what_is_remembered_is_bounded_by_messages_and_forgotten_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settling, "MAX_REMEMBERED_MESSAGES", 4)
    memory = settling.LeaseMemory()
    leases = {name: settling.AckRun(1, "g", None, ["1", "2"]) for name in "abc"}
    for name, lease in leases.items():
        memory.add(name, lease)
    assert (len(memory), memory.messages) == (2, 4)
    assert [memory.forget(name) for name in "abca"] == [None, leases["b"], leases["c"], None]
    assert (len(memory), memory.messages) == (0, 0)


async def test_a_waiting_pop_gets_its_message_in_the_call_that_pushes_it(database_url: str) -> None:
    async with running(database_url, poll_interval=60.0) as queues:
        await push(queues, "q", 0)
        await complete(queues, await pop(queues, "q"))
        patient = PopRequest(queue="q", batch=2, wait=True, timeout=60)
        waiting = [asyncio.ensure_future(queues.pop(patient)) for _ in range(3)]
        await eventually(lambda: queues.waiting.parked == 3)
        made = recorded(queues)
        await push(queues, "q", 1, 2, 3)
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (popped,) = [task.result() for task in done]
        assert values(popped) == [1, 2]
        # no call but that of the push, and nobody else was woken: the partition is leased
        assert (made, queues.waiting.parked) == ([], 2)
        await push(queues, "q", 4)  # behind what is leased: one looks, and waits again
        await eventually(lambda: made and queues.waiting.parked == 2)
        assert [sql for sql, _ in made] == [calls.TAKE]
        next_one = await queues.pop(patient, acks_of(popped))  # in order, and by its own call
        assert values(next_one) == [3, 4]
        await complete(queues, next_one)

        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await push(queues, "q", 5)
        assert values(await pop(queues, "q")) == [5]


async def test_a_waiting_pop_with_auto_ack_is_handed_its_message_and_completes_it(
    database_url: str,
) -> None:
    async with running(database_url, poll_interval=60.0) as queues:
        await push(queues, "q", 0)
        await complete(queues, await pop(queues, "q"))
        wanted = PopRequest(queue="q", auto_ack=True, wait=True, timeout=60)
        waiting = asyncio.create_task(queues.pop(wanted))
        await eventually(lambda: queues.waiting.parked == 1)
        made = recorded(queues)
        await push(queues, "q", 1)
        popped = await waiting
        assert (values(popped), popped.lease_id, made) == ([1], "", [])
        assert await queues.groups.lag("q", "__QUEUE_MODE__") == 0
        assert await queues.database.fetch("SELECT 1 FROM leases") == []
        assert len(queues._exchanges.memory) == 0  # which nothing public shows


async def test_what_was_taken_for_a_pop_that_went_away_is_there_for_the_next(
    database_url: str,
) -> None:
    async with running(database_url, poll_interval=60.0) as queues:
        await push(queues, "q", 0)
        await complete(queues, await pop(queues, "q"))
        patient = PopRequest(queue="q", wait=True, timeout=60)
        fetch = queues.database.fetch
        for outcome in ("committed", "cut off"):
            waiting = asyncio.ensure_future(queues.pop(patient))
            await eventually(lambda: queues.waiting.parked == 1)

            async def fetching(sql: str, *args: Any, **options: Any) -> Any:
                rows = await fetch(sql, *args, **options)
                if sql == calls.APPEND_AND_TAKE:
                    if outcome == "cut off":  # noqa: B023 - read at once
                        raise ConnectionLost("after its commit")
                    waiting.cancel()  # noqa: B023
                    await asyncio.wait([waiting])  # noqa: B023
                return rows

            queues.database.fetch = fetching  # type: ignore[method-assign]
            (pushed,) = await queues.push([Item("q", b"1", transaction_id=outcome)])
            queues.database.fetch = fetch  # type: ignore[method-assign]
            assert pushed.status == ("queued" if outcome == "committed" else "duplicate")
            if outcome == "committed":
                waiting = asyncio.ensure_future(queues.pop(patient))
            popped = await waiting
            assert [m.transaction_id for m in popped.messages] == [outcome]
            await complete(queues, popped)
        attempts = await queues.database.fetch("SELECT 1 FROM attempts")
        assert (attempts, await queues.groups.lag("q", "__QUEUE_MODE__")) == ([], 0)
