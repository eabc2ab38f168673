"""Who is connected to a group, and what that says about it."""

import pytest

from penstock.contract.groups import Group
from penstock.metrics import Metrics
from penstock.queues import Queues, consumers
from penstock.queues.background.presence import Presence
from tests.queues.support import complete, pop, push, running


class Connection:
    closed = False


async def status(queues: Queues, group: str = "g") -> Group:
    (one,) = await queues.groups.listing(group)
    return one


async def test_members_are_the_open_connections_that_pop_and_the_state_says_if_there_are_any(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    for partition in "abc":
        await push(queues, "q", 1, partition=partition)
    await queues.database.fetch(
        "UPDATE messages SET created_at = created_at - interval '10 minutes'"
    )
    first, second = Connection(), Connection()
    held = await pop(queues, "q", group="g", consumer=first)
    await pop(queues, "q", group="g", consumer=second)
    await pop(queues, "q", group="other", consumer=second)
    one = await status(queues)
    assert (one.members, one.state) == (2, "Lagging")  # an old backlog, just begun
    assert (await status(queues, "other")).members == 1
    second.closed = True
    assert (await status(queues)).members == 1
    assert (await status(queues, "other")).state == "Empty"
    await complete(queues, held)
    await queues.groups.seek("g", "q", to="end")
    assert (await status(queues)).state == "Stable"
    monkeypatch.setattr(consumers, "MEMBER_SECONDS", 0.0)  # it asks for nothing any more
    assert (await status(queues)).state == "Empty"


async def test_members_of_all_processes_are_added_up_and_those_of_dead_ones_are_not(
    database_url: str,
) -> None:
    async with running(database_url) as one, running(database_url) as two:
        there = [
            Presence(queues.database, queues.waiting, queues.consumers, Metrics())
            for queues in (one, two)
        ]
        await push(one, "q", 1)
        for queues in (one, two):
            await pop(queues, "q", group="g", consumer=Connection())
        for presence in there:
            await presence.say()
        assert (await status(one)).members == 2
        assert (await status(two)).members == 2
        await pop(one, "q", group="g", consumer=Connection())
        assert (await status(one)).members == 3  # its own it knows at once
        await one.database.fetch(
            "UPDATE members SET seen_at = seen_at - interval '1 minute' WHERE member = $1",
            there[1].member,
        )
        assert (await status(one)).members == 2
