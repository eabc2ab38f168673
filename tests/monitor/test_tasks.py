"""Dead letters are requeued and purged in the background, in steps that others see."""

from collections.abc import AsyncIterator

import pytest

from penstock.errors import NotFound, Unavailable
from penstock.monitor.tasks import Task, Tasks
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Queues
from penstock.queues import dead as dead_letters
from penstock.queues.dead import Which
from tests.queues.support import answer, pop, push, run, values
from tests.support.wait import eventually


async def make_letters(queues: Queues) -> None:
    """Six that died of one thing and one of another, in the group `g`."""
    await queues.admin.configure("q", QueueOptions(retry_limit=0))
    await push(queues, "q", *range(7))
    messages = (await pop(queues, "q", group="g")).messages
    await answer(queues, messages[:6], "failed", "Gateway timeout")
    await answer(queues, messages[6:], "failed", "bad address")


def test_all_that_match_are_requeued_and_the_end_is_reported(database_url, monkeypatch) -> None:
    monkeypatch.setattr(dead_letters, "STEP", 2)

    async def body(queues: Queues) -> None:
        ended: list[Task] = []

        async def note(task: Task) -> None:
            ended.append(task)

        await make_letters(queues)
        tasks = Tasks(queues, note)
        task = await tasks.start("requeue", Which(error="gateway TIME"), "q@g", "ana")
        assert (task.total, task.exact, task.state) == (6, True, "running")
        await eventually(lambda: bool(ended))
        assert (tasks.get(task.id).done, task.state, task.who) == (6, "finished", "ana")
        assert values(await pop(queues, "q", group="g")) == list(range(6))
        (rest,) = (await queues.dead.listing(Which())).letters
        assert rest.error == "bad address"
        purge = await tasks.start("purge", Which(queue="q"), "q", "ana")
        await eventually(lambda: len(ended) == 2)
        assert (purge.done, purge.state) == (1, "finished")
        assert [one.id for one in tasks.all()] == [purge.id, task.id]
        with pytest.raises(NotFound):
            tasks.get("nobody")

    run(database_url, body)


def test_it_ends_although_what_it_puts_back_fails_again(database_url, monkeypatch) -> None:
    monkeypatch.setattr(dead_letters, "STEP", 2)

    async def body(queues: Queues) -> None:
        async def note(_: Task) -> None:
            pass

        await make_letters(queues)
        put_back = queues.dead.requeue_steps

        async def failing(which: Which) -> AsyncIterator[int]:
            async for count in put_back(which):
                again = (await pop(queues, "q", group="g")).messages
                await answer(queues, again, "failed", "Gateway timeout")
                yield count

        monkeypatch.setattr(queues.dead, "requeue_steps", failing)
        tasks = Tasks(queues, note)
        task = await tasks.start("requeue", Which(), "q", "ana")
        await eventually(lambda: task.state != "running")
        assert (task.state, task.done) == ("finished", 7)
        assert await queues.dead.count(Which()) == 7

    run(database_url, body)


def test_it_waits_for_the_database_and_can_be_cancelled(database_url, monkeypatch) -> None:
    monkeypatch.setattr(dead_letters, "STEP", 2)

    async def body(queues: Queues) -> None:
        ended: list[Task] = []

        async def note(task: Task) -> None:
            ended.append(task)

        await make_letters(queues)
        fetch, calls = queues.database.fetch, iter([1, 0])

        async def lost(sql: str, *args: object, timeout: float | None = None):
            if sql == dead_letters.PURGE and not next(calls, 1):
                raise Unavailable("the database is down")
            return await fetch(sql, *args, timeout=timeout)

        monkeypatch.setattr(queues.database, "fetch", lost)
        tasks = Tasks(queues, note)
        first = await tasks.start("purge", Which(error="timeout"), "q", "ana")
        await eventually(lambda: bool(ended))
        assert (first.state, first.done) == ("finished", 6)
        second = await tasks.start("purge", Which(), "q", "ana")
        tasks.cancel(second.id)
        await eventually(lambda: len(ended) == 2)
        assert second.state == "cancelled"
        await tasks.stop()

    run(database_url, body)
