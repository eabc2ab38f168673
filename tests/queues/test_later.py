"""Messages for later: kept apart, appended when due, never early, once."""

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta

import pytest

from penstock.errors import NotFound
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Ack, Item, PopRequest, Queues
from tests.queues.support import complete, pop, push, running, values
from tests.support.wait import eventually

HOUR = 3600.0


async def now(queues: Queues) -> datetime:
    moment: datetime = (await queues.database.fetch("SELECT clock_timestamp()"))[0][0]
    return moment


async def let_time_pass(queues: Queues, seconds: float) -> None:
    """As if all that waits had been pushed so much earlier; who delivers is told."""
    await queues.database.fetch(
        "UPDATE scheduled_messages SET due_at = due_at - make_interval(secs => $1)", seconds
    )
    queues.waiting.on_delayed(0.0)
    await queues.delayed.deliver()


async def later(queues: Queues, queue: str, value: object, due: object, **item: object) -> str:
    (pushed,) = await queues.push([Item(queue, json.dumps(value).encode(), due=due, **item)])
    assert pushed.status == "scheduled", pushed
    return pushed.transaction_id


async def scheduled(queues: Queues, queue: str) -> int:
    """How many wait, by the counters and by counting."""
    (row,) = await queues.database.fetch(
        """SELECT (SELECT count(*) FROM scheduled_messages s WHERE s.queue_id = q.id) AS rows,
                  (SELECT coalesce(sum(consumed), 0) FROM queue_counts(q.id) WHERE group_id = -1) AS n
             FROM queues q WHERE q.name = $1 AND q.deleted_at IS NULL""",
        queue,
    )
    assert row["rows"] == row["n"]
    return int(row["n"])


async def test_a_message_for_later_is_in_nobodys_way_and_comes_when_it_is_due(
    queues: Queues,
) -> None:
    waiting = asyncio.ensure_future(
        queues.pop(PopRequest(queue="q", wait=True, timeout=60, partition="Default"))
    )
    await push(queues, "q", "first")
    assert values(await waiting) == ["first"]
    await complete(queues, await waiting)
    before = await now(queues)
    due = before + timedelta(hours=1)
    await later(queues, "q", "later", due + timedelta(seconds=0.3))
    (soon,) = await queues.push([Item("q", b'"soon"', due=due + timedelta(seconds=0.2))])
    assert soon.deliver_at == due + timedelta(seconds=0.2)
    await push(queues, "q", "now")
    popped = await pop(queues, "q")
    assert values(popped) == ["now"]
    await complete(queues, popped)
    await let_time_pass(queues, 3600)
    seen = []
    while len(seen) < 2:  # parked, and woken by the delivery
        popped = await queues.pop(PopRequest(queue="q", wait=True, timeout=60))
        for message in popped.messages:
            due = before + timedelta(seconds=0.2 if message.payload == b'"soon"' else 0.3)
            assert message.created_at >= due
            seen.append(json.loads(message.payload))
        await complete(queues, popped)
    assert seen == ["soon", "later"]
    assert await scheduled(queues, "q") == 0


async def test_those_due_at_one_moment_keep_the_order_of_their_pushes(queues: Queues) -> None:
    moment = datetime.now(UTC) + timedelta(hours=1)
    for n in range(5):
        await later(queues, "q", n, moment)
    await later(queues, "q", "earlier", moment - timedelta(seconds=1))
    await push(queues, "q", "now")
    await let_time_pass(queues, 2 * HOUR)
    assert values(await pop(queues, "q")) == ["now", "earlier", 0, 1, 2, 3, 4]


async def test_deduplication_holds_from_the_push_on(queues: Queues) -> None:
    item = Item("q", b"1", transaction_id="t")
    due = Item("q", b"2", transaction_id="t", due=HOUR)
    twins = await queues.push([due, item, Item("q", b"3", "other", "t")])
    assert [one.status for one in twins] == ["scheduled", "duplicate", "queued"]
    for again in (item, due):
        (answer,) = await queues.push([again])
        assert (answer.status, answer.message_id) == ("duplicate", None)
    # fresh ids are not looked for, and others of the partition go in as ever
    await push(queues, "q", "now")
    await let_time_pass(queues, 2 * HOUR)
    for again in (item, due):
        (answer,) = await queues.push([again])
        assert (answer.status, answer.message_id is None) == ("duplicate", False)
    assert values(await pop(queues, "q", partition="Default")) == ["now", 2]
    flags = await queues.database.fetch("SELECT bool_or(scheduled) FROM partitions")
    assert flags[0][0] is False


async def test_it_can_be_listed_looked_at_and_cancelled(queues: Queues) -> None:
    moment = datetime(2100, 1, 1, tzinfo=UTC)
    for n in (3, 1, 2):
        await later(queues, "q", n, moment + timedelta(days=n), transaction_id=f"t{n}")
    await later(queues, "r", 0, moment, partition="p", headers=b'{"a":"b"}')
    page = await queues.scheduled.listing(limit=2)
    assert [one.queue for one in page.messages] == ["r", "q"]
    assert page.messages[0].headers == {"a": "b"}
    rest = await queues.scheduled.listing(limit=2, cursor=page.next)
    assert [one.transaction_id for one in rest.messages] == ["t2", "t3"]
    last = await queues.scheduled.listing(limit=2, cursor=rest.next)
    assert (last.messages, last.next) == ([], None)
    only = await queues.scheduled.listing("r", "p")
    assert [one.partition for one in only.messages] == ["p"]
    one = await queues.scheduled.detail("q", "Default", "t2")
    assert (one.payload, one.deliver_at) == (b"2", moment + timedelta(days=2))
    await queues.scheduled.cancel("q", "Default", "t2")
    for call in (queues.scheduled.cancel, queues.scheduled.detail):
        with pytest.raises(NotFound, match="'t2' waits"):
            await call("q", "Default", "t2")
    assert await scheduled(queues, "q") == 2
    await later(queues, "q", 2, 0.001, transaction_id="t2")  # its id is free again
    assert await eventually(lambda: _popped(queues, "q")) == [2]
    assert await queues.admin.clear("q") == 3
    assert (await scheduled(queues, "q"), await scheduled(queues, "r")) == (0, 1)
    await queues.admin.delete("r")
    await queues.upkeep.purge()
    rows = await queues.database.fetch("SELECT count(*) FROM scheduled_messages")
    assert rows[0][0] == 0


async def _popped(queues: Queues, queue: str) -> list[object]:
    return values(await pop(queues, queue))


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_transaction_pushes_for_later_and_all_of_it_or_nothing(
    database_url: str, encrypted: bool
) -> None:
    async with running(
        database_url, **({"encryption_key": "ab" * 32} if encrypted else {})
    ) as queues:
        await queues.admin.configure("q", QueueOptions(encryption_enabled=encrypted))
        await push(queues, "work", 1)
        (message,) = (await pop(queues, "work")).messages
        ack = Ack(message.transaction_id, message.partition_id, message.lease_id)
        item = Item("q", b'"later"', transaction_id="t", due=HOUR, headers=b'{"a":"b"}')
        bad = await queues.transaction([item, Ack("nobody", message.partition_id)])
        assert not bad.success
        assert await scheduled(queues, "q") == 0
        done = await queues.transaction([ack, item])
        assert [result.success for result in done.results[:1]] == [True]
        again = await queues.transaction([item])
        assert "duplicate transactionId t" in str(again.error)
        stored = await queues.database.fetch("SELECT payload FROM scheduled_messages")
        assert (stored[0][0] == b'"later"') is not encrypted
        await let_time_pass(queues, 2 * HOUR)
        (message,) = (await pop(queues, "q")).messages
        assert (message.payload, message.headers) == (b'"later"', b'{"a":"b"}')


async def test_what_waits_takes_its_room_in_a_queue_with_max_size(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(max_size=3))
    answers = await queues.push([Item("q", b"1"), *[Item("q", b"2", due=HOUR)] * 1])
    assert [one.status for one in answers] == ["queued", "scheduled"]
    answers = await queues.push([Item("q", b"3"), Item("q", b"4", due=HOUR), Item("q", b"5")])
    assert [one.status for one in answers] == ["queued", "full", "full"]
    await let_time_pass(queues, 2 * HOUR)
    assert values(await pop(queues, "q")) == [1, 3, 2]


async def test_a_partition_that_somebody_has_locked_holds_up_no_other(queues: Queues) -> None:
    for partition in ("held", "free"):
        for n in range(3):
            await later(queues, "q", n, HOUR, partition=partition)
    async with queues.database.connection() as connection, connection.transaction():
        await connection.execute("SELECT 1 FROM partitions WHERE name = 'held' FOR UPDATE")
        await let_time_pass(queues, 2 * HOUR)
        assert values(await pop(queues, "q", partitions=9)) == [0, 1, 2]
        assert await scheduled(queues, "q") == 3
    assert await eventually(lambda: _popped(queues, "q")) == [0, 1, 2]


async def test_another_broker_delivers_when_the_one_that_took_the_push_is_gone(
    database_url: str,
) -> None:
    """Woken for it by NOTIFY: it would look again only half a minute later."""

    async with running(database_url) as other:
        await push(other, "q", "seen")
        # Nothing public says when it looks again, and the test is about that.
        await eventually(lambda: other.delayed._next_call_at > time.monotonic() + 20)
        async with running(database_url) as queues:
            began = time.monotonic()
            await later(queues, "q", "later", 1.0)
        seen: list[object] = []
        while len(seen) < 2:
            popped = await other.pop(PopRequest(queue="q", wait=True, timeout=60))
            seen += values(popped)
            await complete(other, popped)
        assert 1.0 <= time.monotonic() - began < 25.0


async def test_a_partition_with_something_for_later_is_not_removed_as_idle(queues: Queues) -> None:
    await later(queues, "q", 1, HOUR, partition="p")
    await queues.database.fetch("SELECT queue_tidy(clock_timestamp() + interval '1 day', 100)")
    await let_time_pass(queues, 2 * HOUR)
    assert values(await pop(queues, "q")) == [1]
