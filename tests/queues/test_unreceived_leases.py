"""A lease that no client received is returned, and no attempt is counted."""

import asyncio
from typing import Any

import pytest

from penstock.errors import PenstockError, Unavailable
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import PopOutcome, PopRequest, Queues
from penstock.queues.catalog import QueueCatalog
from tests.queues.support import acks_of, complete, pop, push, running, values


async def leases_end(queues: Queues, partition: str = "Default") -> None:
    """Wait until nothing of a partition is leased."""
    sql = "SELECT 1 FROM leases l JOIN partitions p ON p.id = l.partition_id WHERE p.name = $1"
    async with asyncio.timeout(30):
        while await queues.database.fetch(sql, partition):
            await queues.database.fetch("SELECT pg_sleep(0.01)")


async def test_a_database_that_goes_away_after_a_commit_costs_no_attempt(database_url: str) -> None:
    """The acknowledgements that a pop brings along are of a lease that another broker extended since,
    so that they have to be looked up. The database answers one call and is gone.
    """
    async with running(database_url) as queues, running(database_url) as other:
        await push(queues, "q", 0)
        await complete(queues, await pop(queues, "q"))
        await push(queues, "q", 1)
        before = await pop(queues, "q")
        await push(queues, "q", 2, partition="next")
        assert (await other.extend(before.lease_id, 500)).success
        fetch, answered = queues.database.fetch, 0

        async def fetching(sql: str, *args: Any) -> Any:
            nonlocal answered
            if answered:
                raise Unavailable("the database is down")
            answered += 1
            return await fetch(sql, *args)

        queues.database.fetch = fetching  # type: ignore[method-assign]
        try:
            popped = await queues.pop(PopRequest(queue="q"), acks_of(before))
        except PenstockError:
            popped = PopOutcome("")
        finally:
            queues.database.fetch = fetch  # type: ignore[method-assign]
        if not popped.messages:  # nobody has the message
            await leases_end(queues, "next")
            popped = await queues.pop(PopRequest(queue="q"), acks_of(before))
        assert (values(popped), [one.success for one in popped.acked]) == ([2], [True])
        assert await queues.database.fetch("SELECT 1 FROM attempts") == []


@pytest.mark.parametrize("wait", [False, True])
async def test_messages_that_cannot_be_decrypted_are_available_again_uncounted(
    database_url: str, wait: bool
) -> None:
    key = "11" * 32
    async with running(database_url, encryption_key=key) as queues:
        await queues.admin.configure("q", QueueOptions(encryption_enabled=True, retry_limit=0))
        await push(queues, "q", 1)
        async with running(database_url) as keyless:
            with pytest.raises(PenstockError):
                await pop(keyless, "q", wait=wait, timeout=60)
            await leases_end(keyless)
        assert values(await pop(queues, "q")) == [1]
        assert await queues.database.fetch("SELECT 1 FROM attempts") == []


async def test_a_fault_after_the_commit_of_a_call_returns_what_it_took(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(database_url) as queues:
        faults = ("uuids", ZeroDivisionError), ("partition_uuid", Unavailable)
        for method, expected in faults:  # in the pop; in the call that pops share
            await push(queues, "q", 1)
            monkeypatch.setattr(QueueCatalog, method, lambda *_: 1 // 0)
            with pytest.raises(expected):
                await pop(queues, "q")
            monkeypatch.undo()
            await leases_end(queues)
            again = await pop(queues, "q")
            assert values(again) == [1]
            await complete(queues, again)
        assert await queues.database.fetch("SELECT 1 FROM attempts") == []


async def test_pops_that_are_cancelled_while_their_call_is_under_way_return_what_it_takes(
    database_url: str,
) -> None:
    async with running(database_url) as queues:
        await push(queues, "q", 1)
        fetch, called, answered = queues.database.fetch, asyncio.Event(), asyncio.Event()

        async def fetching(sql: str, *args: Any) -> Any:
            rows = await fetch(sql, *args)
            if "take(" in sql:
                called.set()
                await answered.wait()
            return rows

        queues.database.fetch = fetching  # type: ignore[method-assign]
        popping = asyncio.create_task(pop(queues, "q"))
        await called.wait()
        popping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await popping
        answered.set()
        await leases_end(queues)
        assert values(await pop(queues, "q")) == [1]
        assert await queues.database.fetch("SELECT 1 FROM attempts") == []
