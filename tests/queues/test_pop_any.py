"""One pop over several queues: what it takes, what wakes it, and what it leaves behind."""

import asyncio
from typing import Any

import pytest

from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Item, PopOutcome, PopRequest, Queues
from tests.queues.support import answer, complete, pop, push, running, values
from tests.support.wait import eventually


def wanting(queue: str, **request: Any) -> PopRequest:
    return PopRequest(queue=queue, wait=True, timeout=60, **request)


async def test_it_takes_from_the_first_source_that_has_messages(queues: Queues) -> None:
    await queues.admin.configure("low", QueueOptions(priority=1), "steps")
    await queues.admin.configure("high", QueueOptions(priority=9), "steps")
    for queue in ("a", "low", "high"):
        await push(queues, queue, *(f"{queue}-{n}" for n in range(3)))
    await push(queues, "replies", "mine", partition="p")
    await push(queues, "replies", "not mine", partition="other")
    sources = [
        PopRequest(queue="nothing"),
        PopRequest(queue="replies", partition="p", auto_ack=True),
        PopRequest(namespace="steps", batch=2),
        PopRequest(queue="a", group="g", batch=10),
    ]
    taken: list[PopOutcome] = []
    while (popped := await queues.pop_any(sources)).messages:
        taken.append(popped)
    seen = [(one.source, one.queue, one.group, values(one)) for one in taken]
    assert seen == [
        (1, "replies", "__QUEUE_MODE__", ["mine"]),
        (2, "high", "__QUEUE_MODE__", ["high-0", "high-1"]),
        (2, "low", "__QUEUE_MODE__", ["low-0", "low-1"]),
        (3, "a", "g", ["a-0", "a-1", "a-2"]),
    ]
    assert [one.lease_id == "" for one in taken] == [True, False, False, False]
    for popped in taken[1:]:
        await complete(queues, popped)


async def test_while_it_waits_each_of_its_sources_wakes_it(database_url: str) -> None:
    async with running(database_url, poll_interval=60) as queues:
        await queues.admin.configure("shared", QueueOptions(ordering="none"))
        sources = [
            wanting("first"),
            wanting("news", group="g", subscription_mode="new"),
            wanting("shared", batch=5),
            wanting("replies", partition="p", auto_ack=True),
            PopRequest(namespace="later"),
        ]
        for number, (queue, partition) in enumerate(
            [("first", "x"), ("news", "Default"), ("shared", "Default"), ("replies", "p")]
        ):
            waiting = asyncio.create_task(queues.pop_any(sources))
            await eventually(lambda: queues.waiting.parked)
            await push(queues, queue, queue, partition=partition)
            popped = await waiting
            assert (popped.source, popped.queue, values(popped)) == (number, queue, [queue])
        waiting = asyncio.create_task(queues.pop_any(sources))
        await eventually(lambda: queues.waiting.parked)
        await push(queues, "replies", "not mine", partition="other")
        await queues.admin.configure("created", QueueOptions(), "later")
        await push(queues, "created", 1)
        popped = await waiting
        assert (popped.source, popped.queue) == (4, "created")
        assert queues.waiting.pops == {}


async def test_a_queue_that_wakes_it_is_served_although_others_have_messages(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push wakes one pop for each partition. A pop that took from another queue then would leave
    the message to nobody.
    """
    for name in ("a", "b"):
        await queues.admin.configure(name, QueueOptions(ordering="none"))
    waiting = asyncio.create_task(queues.pop_any([wanting("a"), wanting("b")]))
    await eventually(lambda: queues.waiting.parked)
    with monkeypatch.context() as context:
        context.setattr(queues.waiting, "wake", lambda *_, **__: None)
        await queues.push([Item("a", b"1"), Item("b", b"2")])
    queues.waiting.wake("b", 1)
    assert (await waiting).queue == "b"


async def test_a_cancelled_one_returns_what_it_took_without_an_attempt(queues: Queues) -> None:
    for queue in ("a", "b"):
        await queues.admin.configure(queue, QueueOptions(retry_limit=0, ordering="none"))
        await push(queues, queue, queue)
    for round_ in range(40):
        sources = [wanting("empty"), wanting("a"), wanting("b")][:: 1 if round_ % 2 else -1]
        waiting = asyncio.create_task(queues.pop_any(sources))
        await asyncio.sleep(round_ * 0.0005)
        waiting.cancel()
        try:
            popped = await waiting
        except asyncio.CancelledError:
            continue
        await answer(queues, popped.messages, "retry")
    assert (queues.waiting.parked, queues.waiting.pops) == (0, {})
    for queue in ("a", "b"):
        assert values(await pop(queues, queue, wait=True, timeout=60)) == [queue]
    [[failed]] = await queues.database.fetch(
        "SELECT (SELECT count(*) FROM attempts) + (SELECT count(*) FROM dead_letters)"
    )
    assert failed == 0


async def test_a_broker_that_stops_answers_it(queues: Queues) -> None:
    waiting = asyncio.create_task(queues.pop_any([wanting("a"), wanting("b", group="g")]))
    await eventually(lambda: queues.waiting.parked)
    queues.answer_waiting()
    async with asyncio.timeout(30):
        assert (await waiting).messages == []
