"""What a pop takes, waits for and says when there is nothing."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Delivered, Item, PopRequest, Queues, calls, taking
from penstock.queues.schema import SCHEMA
from tests.queues.support import acks_of, answer, complete, pop, push, running, values
from tests.support.wait import eventually


async def test_messages_come_in_the_order_they_were_pushed(queues: Queues) -> None:
    for start in range(0, 50, 10):
        await push(queues, "q", *range(start, start + 10))
    first = await pop(queues, "q", 20)
    await complete(queues, first)
    rest = await pop(queues, "q", 100)
    assert values(first) + values(rest) == list(range(50))


async def test_acknowledging_and_taking_the_next_is_one_call(queues: Queues) -> None:
    for partition in range(3):
        await push(queues, "q", *range(4), partition=f"p{partition}")
    popped = await pop(queues, "q", 1)
    seen = values(popped)
    made = counted(queues)
    for _ in range(11):
        popped = await queues.pop(PopRequest(queue="q", batch=1), acks_of(popped))
        assert [one.success for one in popped.acked] == [True]
        seen += values(popped)
    assert sorted(seen) == sorted([*range(4)] * 3)
    # the rest of its work is in the same commit
    assert made == [calls.SETTLE_AND_TAKE] * 11

    last, late = popped, acks_of(popped)
    waiting = asyncio.ensure_future(queues.pop(PopRequest(queue="q", wait=True, timeout=20), late))
    await eventually(lambda: queues.waiting.parked == 1)
    assert await queues.groups.lag("q", "__QUEUE_MODE__") == 0  # applied before it waits
    await push(queues, "q", 5, partition="p0")
    popped = await waiting
    assert ([one.success for one in popped.acked], values(popped)) == ([True], [5])

    again = await queues.pop(PopRequest(queue="q"), [*late, *acks_of(popped)])  # repeated
    assert [one.success for one in again.acked] == [True, True]
    assert again.messages == []
    unknown = await queues.pop(PopRequest(queue="none"), acks_of(last))
    assert ([one.success for one in unknown.acked], unknown.reason) == ([True], "unknown")


def counted(queues: Queues) -> list[str]:
    """The statements that the engine sends from now on, but for those of its upkeep."""
    made: list[str] = []
    fetch = queues.database.fetch

    async def counting(sql: str, *args: Any, **options: Any) -> Any:
        if sql in (calls.TAKE, calls.SETTLE, calls.SETTLE_AND_TAKE):
            made.append(sql)
        return await fetch(sql, *args, **options)

    queues.database.fetch = counting  # type: ignore[method-assign]
    return made


async def test_an_empty_pop_has_no_messages_and_says_why(queues: Queues) -> None:
    assert (await pop(queues, "nothing")).reason == "unknown"
    await push(queues, "q", 1)
    popped = await pop(queues, "q")
    assert (await pop(queues, "q")).messages == []
    assert (await pop(queues, "q", partition="Default")).reason == "busy"
    assert (await pop(queues, "q", partition="other")).reason == "unknown"
    await complete(queues, popped)
    assert (await pop(queues, "q", partition="Default")).reason == "empty"


async def test_several_partitions_under_one_lease_id(queues: Queues) -> None:
    for partition in range(6):
        await push(queues, "q", *range(5), partition=f"p{partition}")
    one = await pop(queues, "q", 100)
    assert (len(one.messages), one.partitions_claimed) == (5, 1)
    many = await pop(queues, "q", 12, partitions=10)
    assert (len(many.messages), many.partitions_claimed) == (12, 3)
    assert len({message.lease_id for message in many.messages}) == 1
    for partition in {message.partition for message in many.messages}:
        mine = [json.loads(m.payload) for m in many.messages if m.partition == partition]
        assert mine == list(range(len(mine)))
    extended = await queues.extend(many.lease_id, 5000)
    assert extended.success
    assert extended.expires_at is not None
    assert extended.expires_at > datetime.now(UTC) + timedelta(seconds=4000)
    await complete(queues, many)


async def test_auto_ack_settles_at_once_and_needs_no_lease(queues: Queues) -> None:
    await push(queues, "q", *range(5))
    popped = await pop(queues, "q", 3, auto_ack=True)
    assert values(popped) == [0, 1, 2]
    assert {message.lease_id for message in popped.messages} == {""}
    assert values(await pop(queues, "q", auto_ack=True)) == [3, 4]
    assert (await pop(queues, "q")).messages == []
    assert await queues.groups.lag("q", "__QUEUE_MODE__") == 0


async def test_delayed_messages_wait_and_never_mask_due_ones(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(delayed_processing=3600))
    for partition in range(5):
        await push(queues, "q", partition, partition=f"p{partition}")
    assert (await pop(queues, "q")).messages == []
    await queues.database.fetch(
        """UPDATE messages SET created_at = created_at - interval '2 hours' WHERE partition_id =
                 (SELECT id FROM partitions WHERE name = 'p3')"""
    )
    await queues.database.fetch(
        "UPDATE cursors SET due_at = clock_timestamp(), version = version + 1"
    )
    assert values(await pop(queues, "q")) == [3]
    assert (await pop(queues, "q", partitions=10)).messages == []


async def test_a_delayed_message_arrives_when_it_is_due(database_url: str) -> None:
    async with running(database_url, poll_interval=60) as queues:
        await queues.admin.configure("q", QueueOptions(delayed_processing=1))
        began = asyncio.get_running_loop().time()
        await push(queues, "q", 1)
        assert values(await pop(queues, "q", wait=True, timeout=60)) == [1]
        assert 0.9 < asyncio.get_running_loop().time() - began < 30  # faster than any polling


async def test_the_window_buffer_holds_a_partition_until_it_is_quiet(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(window_buffer=3600))
    await push(queues, "q", 1, partition="busy")
    await push(queues, "q", 2, partition="quiet")
    assert (await pop(queues, "q")).messages == []
    await queues.database.fetch(
        """UPDATE messages SET created_at = created_at - interval '2 hours' WHERE partition_id =
                 (SELECT id FROM partitions WHERE name = 'quiet')"""
    )
    await queues.database.fetch(
        "UPDATE cursors SET due_at = clock_timestamp(), version = version + 1"
    )
    assert values(await pop(queues, "q", partitions=5)) == [2]


async def test_a_namespace_or_task_pop_takes_the_most_important_queue_first(queues: Queues) -> None:
    await queues.admin.configure("low", QueueOptions(priority=1), "shop", "mail")
    await queues.admin.configure("high", QueueOptions(priority=9), "shop", "mail")
    await queues.admin.configure("other", QueueOptions(priority=99), "elsewhere", "mail")
    for queue in ("low", "high", "other"):
        await push(queues, queue, queue)
    messages = [await queues.pop(PopRequest(namespace="shop", auto_ack=True)) for _ in range(3)]
    assert [values(popped) for popped in messages] == [["high"], ["low"], []]
    assert values(await queues.pop(PopRequest(task="mail"))) == ["other"]
    waiting = asyncio.ensure_future(queues.pop(PopRequest(namespace="shop", wait=True, timeout=10)))
    await eventually(lambda: queues.waiting.parked)
    await push(queues, "low", "woken")
    assert values(await waiting) == ["woken"]


async def test_a_waiting_pop_is_woken_by_a_push_an_ack_and_an_expiring_lease(
    database_url: str,
) -> None:
    async with running(database_url, poll_interval=60) as queues:
        loop = asyncio.get_running_loop()
        await queues.admin.configure("q", QueueOptions(lease_time=100))
        waiting = asyncio.create_task(pop(queues, "q", wait=True, timeout=60))
        await eventually(lambda: queues.waiting.parked)
        began = loop.time()
        await push(queues, "q", 1)
        held = await waiting
        assert values(held) == [1]
        await queues.admin.configure("q", QueueOptions(lease_time=1))
        waiting = asyncio.create_task(pop(queues, "q", wait=True, timeout=60))
        await push(queues, "q", 2)
        await complete(queues, held)
        assert values(await waiting) == [2]
        assert values(await pop(queues, "q", wait=True, timeout=60)) == [2]  # its lease ran out
        assert loop.time() - began < 30  # faster than any polling
        assert (await pop(queues, "empty", wait=True, timeout=0.05)).messages == []


async def test_a_waiter_that_goes_away_holds_no_lease_and_costs_no_attempt(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(retry_limit=0))
    await push(queues, "q", 1)
    for round_ in range(40):
        waiting = asyncio.create_task(pop(queues, "q", wait=True, timeout=20))
        await asyncio.sleep(round_ * 0.0005)
        waiting.cancel()
        try:
            popped = await waiting
        except asyncio.CancelledError:
            continue
        await answer(queues, popped.messages, "retry")
    assert queues.waiting.parked == 0
    assert values(await pop(queues, "q", wait=True, timeout=60)) == [1]
    rows = await queues.database.fetch(
        "SELECT (SELECT count(*) FROM attempts) + (SELECT count(*) FROM dead_letters)"
    )
    assert rows[0][0] == 0


async def test_an_old_client_without_batch_and_a_new_one_on_autopilot(queues: Queues) -> None:
    for partition in range(3):
        await push(queues, "q", *range(5), partition=f"p{partition}")
    assert len((await queues.pop(PopRequest(queue="q", group="old"))).messages) == 1
    assert (
        len((await queues.pop(PopRequest(queue="q", group="new", autopilot=True))).messages) == 15
    )


@pytest.mark.parametrize("header_bytes", [0, 300])
@pytest.mark.parametrize("ordering", ["partition", "none"])
async def test_a_pop_takes_as_many_bytes_as_it_may_and_one_message_at_least(
    database_url: str, ordering: str, header_bytes: int
) -> None:
    """10,000 messages of 10 MB fit into no answer, whatever batch a client asks for. Headers count
    as payload does.
    """

    async with running(database_url, max_batch_bytes=1000) as queues:
        await queues.admin.configure("q", QueueOptions(ordering=ordering))
        sizes = [400, 400, 400, 5000, 100, 100]
        headers = b'{"h":"%b"}' % (b"x" * (header_bytes - 8)) if header_bytes else None
        for size in sizes:
            heads = headers if size > header_bytes else None
            payload = b'"%b"' % (b"x" * (size - 2 - len(heads or b"")))
            await queues.push([Item("q", payload, headers=heads)])
        taken = []
        while messages := await pop(queues, "q"):
            if not messages.messages:
                break
            taken.append([len(one.payload) + len(one.headers or b"") for one in messages.messages])
            await complete(queues, messages)
        assert taken == [[400, 400], [400], [5000], [100, 100]]
        assert await queues.groups.lag("q", "__QUEUE_MODE__") == 0


async def test_pops_that_share_a_call_share_its_bytes_and_none_comes_back_empty(
    database_url: str,
) -> None:
    async with running(database_url, max_batch_bytes=1000) as queues:
        for partition in range(6):
            await push(queues, "q", *("x" * 398 for _ in range(4)), partition=str(partition))
        messages = await asyncio.gather(*(pop(queues, "q") for _ in range(6)))
        assert {len(one.messages) for one in messages} <= {
            1,
            2,
        }  # what the one before left, or all there may be
        everything = await asyncio.gather(*(pop(queues, "q", 2, group=f"g{n}") for n in range(12)))
        assert {len(one.messages) for one in everything} <= {1, 2}


@pytest.mark.parametrize("partition", [None, "Default"])
async def test_consumers_that_pop_at_once_from_a_shared_partition_all_get_something(
    database_url: str, partition: str | None
) -> None:
    """They share calls, and calls of two brokers meet on the cursor: none may say that the queue is
    empty.
    """

    async with running(database_url) as one, running(database_url) as two:
        await one.admin.configure("q", QueueOptions(ordering="none"))
        for _ in range(10):
            await push(one, "q", *range(60))
            pops = [
                pop(queues, "q", 1, partition=partition) for queues in (one, two) for _ in range(30)
            ]
            result = await asyncio.gather(*pops)
            assert sorted(value for one_pop in result for value in values(one_pop)) == list(
                range(60)
            )


async def test_all_who_wait_for_a_shared_partition_are_woken_when_there_is_something_for_each(
    database_url: str,
) -> None:
    """By a push to it, and by messages that others give back."""

    async with running(database_url, poll_interval=15.0) as queues:
        await queues.admin.configure("q", QueueOptions(ordering="none", retry_delay=0))

        async def wait_for_ten(give: Callable[[], Awaitable[Any]]) -> tuple[float, list[Delivered]]:
            waiting = [
                asyncio.create_task(pop(queues, "q", 1, wait=True, timeout=20)) for _ in range(10)
            ]
            await eventually(lambda: queues.waiting.parked == 10)
            began = time.monotonic()
            await give()
            messages = [message for task in waiting for message in (await task).messages]
            return time.monotonic() - began, messages

        pushed, given_back = [], []
        for _ in range(3):
            seconds, taken = await wait_for_ten(lambda: push(queues, "q", *range(10)))
            assert len({message.id for message in taken}) == 10
            pushed.append(seconds)
            seconds, again = await wait_for_ten(lambda: answer(queues, taken, "retry"))  # noqa: B023
            assert {message.id for message in again} == {message.id for message in taken}
            given_back.append(seconds)
            await answer(queues, again)
        assert max(min(pushed), min(given_back)) < 1.0  # unwoken they look every other second


async def test_an_empty_pop_under_a_held_transaction_id_reads_what_is_recent_only(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vacuum may remove nothing meanwhile: each batch leaves a dead entry in the ready list."""
    monkeypatch.setattr(taking, "SLACK", timedelta(0))

    async def body(queues: Queues) -> None:
        holder = await asyncpg.connect(database_url)
        await holder.execute("BEGIN")
        await holder.execute("SELECT pg_current_xact_id()")

        async def work(batches: int) -> None:
            for _ in range(batches):
                await push(queues, "q", 1)
                await complete(queues, await pop(queues, "q"))

        async def blocks(back: timedelta) -> int:
            """Pages an empty pop looks at that goes so far back before the last cursor due."""
            [row] = await queues.database.fetch(
                "SELECT group_id, consumed_at FROM cursors ORDER BY version DESC LIMIT 1"
            )
            group, since = row["group_id"], row["consumed_at"] + timedelta(seconds=2)
            pops = calls.TakeArguments([group], [1], [uuid4()], [since - back], None, None, 1000)
            ((plan,),) = await queues.database.fetch(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {calls.TAKE}", *pops
            )
            return int(json.loads(plan)[0]["Plan"]["Shared Hit Blocks"])

        await work(20)
        await blocks(timedelta(0))  # plans are made
        few, few_in_all = await blocks(timedelta(0)), await blocks(timedelta(hours=1))
        await work(400)
        await blocks(timedelta(0))  # plans are made again, if statistics were
        assert await blocks(timedelta(0)) <= few + 5
        assert await blocks(timedelta(hours=1)) > few_in_all + 10  # it would be more and more
        await holder.close()

    async with running(database_url, {"pool_size": 1, "acquire_timeout": 20.0}) as queues:
        await body(queues)


async def test_a_first_pop_that_meets_pushes_in_every_partition_sees_them_when_they_are_committed(
    database_url: str, queues: Queues
) -> None:
    """The cursor it makes must not rest: `array_agg` over no rows is NULL, and so is everything
    made of it.
    """

    await push(queues, "q", "first")
    other = await asyncpg.connect(
        database_url, server_settings={"search_path": SCHEMA.search_path("penstock")}
    )
    number = await other.fetchval("SELECT id FROM partitions")
    transaction = other.transaction()
    await transaction.start()
    await other.execute(
        """SELECT * FROM append(ARRAY[$1::bigint], ARRAY[0], ARRAY['t'], true, NULL, NULL, NULL,
                                        '2'::bytea, ARRAY[1, 2])""",
        number,
    )
    await complete(queues, await pop(queues, "q", group="all"))
    assert (await pop(queues, "q", group="new", subscription_mode="new")).messages == []
    await transaction.commit()
    await other.close()
    assert values(await pop(queues, "q", group="all", wait=True, timeout=10)) == [2]
    assert (await pop(queues, "q", group="new")).messages == []  # it was pushed before
    assert [await queues.groups.lag("q", group) for group in ("all", "new")] == [1, 0]
    await push(queues, "q", 3)
    assert values(await pop(queues, "q", group="new")) == [3]
    assert await queues.upkeep.heal() == 0


async def test_a_pop_whose_caller_is_cancelled_in_the_turn_of_its_answer_is_returned(
    database_url: str,
) -> None:
    async with running(database_url, poll_interval=60.0) as queues:
        await push(queues, "q", 0)
        await complete(queues, await pop(queues, "q"))
        fetch, loop = queues.database.fetch, asyncio.get_running_loop()
        for way in ("looked", "handed over"):
            taken: list[Any] = []

            async def fetching(sql: str, *args: Any) -> Any:
                rows = await fetch(sql, *args)
                if sql in (calls.TAKE, calls.APPEND_AND_TAKE):
                    some = rows if sql == calls.TAKE else rows[0]["taken"]
                    taken.extend(row for row in some if row["seqs"])  # noqa: B023
                    if taken:  # noqa: B023
                        loop.call_soon(consuming.cancel)  # noqa: B023 - before it gets the answer
                return rows

            if way == "looked":
                await push(queues, "q", way)
            queues.database.fetch = fetching  # type: ignore[method-assign]
            consuming = asyncio.create_task(
                queues.pop(PopRequest(queue="q", wait=True, timeout=60))
            )
            if way == "handed over":
                await eventually(lambda: queues.waiting.parked == 1)
                await push(queues, "q", way)
            with pytest.raises(asyncio.CancelledError):
                await consuming
            queues.database.fetch = fetch  # type: ignore[method-assign]
            assert taken  # it was there, and nobody got it
            again = await pop(queues, "q", wait=True, timeout=60)
            assert values(again) == [way]
            await complete(queues, again)
        assert await queues.database.fetch("SELECT 1 FROM attempts") == []


async def test_closed_pops_find_nothing_and_go_on_when_they_are_opened(database_url: str) -> None:
    async with running(database_url, poll_interval=60.0) as queues:
        await push(queues, "q", 1, 2)
        first = await pop(queues, "q", 1)
        waiting = asyncio.create_task(queues.pop(PopRequest(queue="other", wait=True, timeout=60)))
        await eventually(lambda: queues.waiting.parked == 1)
        queues.pause_pops(True)
        assert (await waiting).messages == []  # at once
        closed = await queues.pop(PopRequest(queue="q"), acks_of(first))
        assert (closed.messages, [one.success for one in closed.acked]) == ([], [True])
        began = time.monotonic()
        assert (await pop(queues, "q", wait=True, timeout=0.05)).messages == []
        assert time.monotonic() - began >= 0.048  # the loop counts whole milliseconds
        wanted = PopRequest(queue="q", wait=True, timeout=60)
        patient = [asyncio.create_task(queues.pop(wanted)) for _ in range(2)]
        await asyncio.sleep(0)  # they begin
        patient[0].cancel()
        await push(queues, "q", 3)  # nothing is handed over either
        assert not patient[1].done()
        queues.pause_pops(False)
        assert values(await patient[1]) == [2]
        queues.pause_pops(True)
        patient[0] = asyncio.create_task(queues.pop(wanted))
        await asyncio.sleep(0)
        queues.answer_waiting()  # the broker is about to stop
        assert (await patient[0]).messages == []


@pytest.mark.parametrize(("deleted", "left"), [(2, [2, 3]), (4, [4, 5, 6, 7])])
async def test_messages_that_are_deleted_while_they_are_taken_are_not_delivered(
    queues: Queues, deleted: int, left: list[int]
) -> None:
    """A queue is cleared, or retention runs, between the claim and the read of a pop. Nothing
    beyond the lease is delivered, and a lease without messages is released.
    """
    await push(queues, "q", *range(10))

    async def delete_with_the_next_lease(connection: Any) -> None:
        first = await connection.fetchval("SELECT min(seq) FROM messages")
        await connection.execute(
            f"""CREATE FUNCTION delete_taken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            DELETE FROM messages WHERE seq < {first + deleted}; RETURN NULL; END $$;
            CREATE TRIGGER delete_taken AFTER INSERT ON leases
            FOR EACH ROW EXECUTE FUNCTION delete_taken()"""
        )

    await queues.database.transact(delete_with_the_next_lease)
    # From several partitions: the claim and the read are two statements.
    popped = await pop(queues, "q", 4, partitions=2, wait=True, timeout=20)
    assert values(popped) == left
    await complete(queues, popped)  # nothing is left of the lease, so the partition is free again
    following = await pop(queues, "q", 10, wait=True, timeout=5)
    assert values(following) == list(range(left[-1] + 1, 10))
