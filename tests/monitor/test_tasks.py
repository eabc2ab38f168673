"""Dead letters are requeued and purged in the background, in steps that others see."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.contract.dead_letters import BackgroundTask
from penstock.errors import NotFound, Unavailable
from penstock.monitor import tasks as task_module
from penstock.monitor.tasks import ADVANCE, Tasks
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Queues
from penstock.queues.admin import dead_letters
from penstock.queues.admin.dead_letters import Which
from tests.queues.support import answer, pop, push, running, values
from tests.support.wait import eventually


async def make_letters(queues: Queues) -> None:
    """Six that died of one thing and one of another, in the group `g`."""
    await queues.admin.configure("q", QueueOptions(retry_limit=0))
    await push(queues, "q", *range(7))
    messages = (await pop(queues, "q", group="g")).messages
    await answer(queues, messages[:6], "failed", "Gateway timeout")
    await answer(queues, messages[6:], "failed", "bad address")


@pytest.fixture(autouse=True)
def steps_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "LETTERS_PER_STEP", 2)


class Ended(list[BackgroundTask]):
    """The tasks whose end was reported."""

    async def note(self, task: BackgroundTask) -> None:
        self.append(task)


async def nothing(_: BackgroundTask) -> None:
    pass


async def has_done(tasks: Tasks, task: BackgroundTask, count: int) -> bool:
    return (await tasks.get(task.id)).done == count


async def test_all_that_match_are_requeued_and_the_end_is_reported(database_url) -> None:
    async with running(database_url) as queues:
        ended = Ended()
        await make_letters(queues)
        tasks = Tasks(queues, "me", ended.note)
        task = await tasks.start("requeue", Which(error="gateway TIME"), "q@g", "ana")
        assert (task.total, task.exact, task.state) == (6, True, "running")
        await eventually(lambda: bool(ended))
        task = await tasks.get(task.id)
        assert (task.done, task.state, task.who) == (6, "finished", "ana")
        assert values(await pop(queues, "q", group="g")) == list(range(6))
        (rest,) = (await queues.dead.listing(Which())).messages
        assert rest.error == "bad address"
        purge = await tasks.start("purge", Which(queue="q"), "q", "ana")
        await eventually(lambda: len(ended) == 2)
        assert (ended[1].done, ended[1].state) == (1, "finished")
        assert [one.id for one in (await tasks.all()).tasks] == [purge.id, task.id]
        for nobody in ("nobody", "00000000-0000-0000-0000-000000000000"):
            with pytest.raises(NotFound):
                await tasks.get(nobody)


async def test_it_ends_although_what_it_puts_back_fails_again(database_url, monkeypatch) -> None:
    async with running(database_url) as queues:
        ended = Ended()
        await make_letters(queues)
        put_back = queues.dead.requeue_steps

        async def failing(which: Which) -> AsyncIterator[int]:
            async for count in put_back(which):
                again = (await pop(queues, "q", group="g")).messages
                await answer(queues, again, "failed", "Gateway timeout")
                yield count

        monkeypatch.setattr(queues.dead, "requeue_steps", failing)
        await Tasks(queues, "me", ended.note).start("requeue", Which(), "q", "ana")
        await eventually(lambda: bool(ended))
        assert (ended[0].state, ended[0].done) == ("finished", 7)
        assert await queues.dead.count(Which()) == 7


async def test_what_a_process_left_behind_is_done_by_another_and_any_can_cancel(
    database_url, monkeypatch
) -> None:
    async with running(database_url) as queues:
        ended = Ended()
        await make_letters(queues)
        purge, go_on = queues.dead.purge_steps, asyncio.Event()

        async def slowly(which: Which) -> AsyncIterator[int]:
            async for count in purge(which):
                yield count
                await go_on.wait()

        monkeypatch.setattr(queues.dead, "purge_steps", slowly)
        first, second = Tasks(queues, "first", nothing), Tasks(queues, "second", ended.note)
        task = await first.start("purge", Which(error="timeout"), "q", "ana")
        await eventually(lambda: has_done(first, task, 2))
        await second.all()  # somebody looks at the other one: it is not abandoned
        assert await queues.dead.count(Which()) == 5
        second.claim_abandoned()
        monkeypatch.setattr(task_module, "ABANDONED_SECONDS", 0.05)
        await first.stop()
        await second.stop()
        go_on.set()
        second.claim_abandoned()
        await eventually(lambda: bool(ended))
        assert (ended[0].id, ended[0].state, ended[0].done) == (task.id, "finished", 6)
        go_on.clear()
        other = await second.start("purge", Which(), "q", "ana")
        await eventually(lambda: has_done(second, other, 1))
        assert (await first.cancel(other.id)).state == "cancelled"
        go_on.set()
        await eventually(lambda: len(ended) == 2)
        assert (ended[1].state, ended[1].done) == ("cancelled", 1)
        await second.stop()


async def test_it_waits_for_the_database(database_url, monkeypatch) -> None:
    async with running(database_url) as queues:
        ended = Ended()
        await make_letters(queues)
        fetch, lose = queues.database.fetch, {dead_letters.PURGE: [False, True], ADVANCE: [True]}

        async def lost(sql: str, *args: object):
            if lose.get(sql) and lose[sql].pop(0):
                raise Unavailable("the database is down")
            return await fetch(sql, *args)

        monkeypatch.setattr(queues.database, "fetch", lost)
        tasks = Tasks(queues, "me", ended.note)
        await tasks.start("purge", Which(error="timeout"), "q", "ana")
        await eventually(lambda: bool(ended))
        assert (ended[0].state, ended[0].done) == ("finished", 6)
        await tasks.stop()
