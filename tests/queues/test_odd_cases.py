"""What goes wrong in queues when payloads are large, names are long, and queues and groups vanish
under load.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from penstock.errors import Conflict, InvalidRequest, NotFound
from penstock.queues import Ack, Item, Message, PopRequest, Queues
from penstock.queues import ack as acknowledging
from penstock.queues import dead as dead_letters
from penstock.queues import pop as popping
from penstock.queues import push as pushing
from penstock.queues.dead import Which
from penstock.queues.schema import SCHEMA
from tests.queues.support import answer, complete, pop, push, running, values
from tests.support.wait import eventually


def run(url: str, body: Callable[[Queues], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with running(url, **settings) as queues:
            await body(queues)

    asyncio.run(main())


@pytest.mark.parametrize("ordering", ["partition", "none"])
def test_a_pop_takes_as_many_bytes_as_it_may_and_one_message_at_least(
    database_url: str, ordering: str
) -> None:
    """10,000 messages of 10 MB fit into no answer, whatever batch a client asks for."""

    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"ordering": ordering})
        sizes = [400, 400, 400, 5000, 100, 100]
        await push(queues, "q", *("x" * (size - 2) for size in sizes))
        taken = []
        while found := await pop(queues, "q"):
            if not found.messages:
                break
            taken.append([len(message.payload) for message in found.messages])
            await complete(queues, found)
        assert taken == [[400, 400], [400], [5000], [100, 100]]
        assert await queues.groups.lag("q", "__QUEUE_MODE__") == 0

    run(database_url, body, max_batch_bytes=1000)


def test_pops_that_share_a_call_share_its_bytes_and_none_comes_back_empty(
    database_url: str,
) -> None:
    async def body(queues: Queues) -> None:
        for partition in range(6):
            await push(queues, "q", *("x" * 398 for _ in range(4)), partition=str(partition))
        found = await asyncio.gather(*(pop(queues, "q") for _ in range(6)))
        assert {len(one.messages) for one in found} <= {
            1,
            2,
        }  # what the one before left, or all there may be
        everything = await asyncio.gather(*(pop(queues, "q", 2, group=f"g{n}") for n in range(12)))
        assert {len(one.messages) for one in everything} <= {1, 2}

    run(database_url, body, max_batch_bytes=1000)


def test_large_pushes_share_no_call_however_few_they_are(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is merged is one message to PostgreSQL, which takes a gigabyte at most."""
    monkeypatch.setattr(pushing, "HEAVY", 100)

    async def body(queues: Queues) -> None:
        await asyncio.gather(*(push(queues, "q", "x" * 398) for _ in range(12)))
        counted = await queues.admin._database.fetch(
            "SELECT count(*) FROM messages GROUP BY xmin::text"
        )
        assert sum(row["count"] for row in counted) == 12
        assert max(row["count"] for row in counted) <= 2

    run(database_url, body, merge_max=10)


@pytest.mark.parametrize("partition", [None, "Default"])
def test_consumers_that_pop_at_once_from_a_shared_partition_all_get_something(
    database_url: str, partition: str | None
) -> None:
    """They share calls, and calls of two brokers meet on the cursor: none may say that the queue is
    empty.
    """

    async def main() -> None:
        async with running(database_url) as one, running(database_url) as two:
            await one.admin.configure("q", {"ordering": "none"})
            for _ in range(3):
                await push(one, "q", *range(60))
                pops = [
                    pop(queues, "q", 1, partition=partition)
                    for queues in (one, two)
                    for _ in range(30)
                ]
                found = await asyncio.gather(*pops)
                assert sorted(value for one_pop in found for value in values(one_pop)) == list(
                    range(60)
                )

    asyncio.run(main())


def test_all_who_wait_for_a_shared_partition_are_woken_when_there_is_something_for_each(
    database_url: str,
) -> None:
    """By a push to it, and by messages that others give back."""

    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"ordering": "none", "retryDelay": 0})

        async def wait_for_ten(give: Callable[[], Awaitable[Any]]) -> tuple[float, list[Message]]:
            waiting = [
                asyncio.create_task(pop(queues, "q", 1, wait=True, timeout=20)) for _ in range(10)
            ]
            await eventually(lambda: queues.signals.waiting == 10)
            began = time.monotonic()
            await give()
            found = [message for task in waiting for message in (await task).messages]
            return time.monotonic() - began, found

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

    run(database_url, body, poll_interval=15.0)


def test_a_dead_letter_that_cannot_be_put_back_stays_one(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"retryLimit": 0, "maxSize": 3})
        await push(queues, "q", 1, 2)
        await answer(queues, (await pop(queues, "q")).messages, "failed")
        await push(queues, "q", 3)
        await answer(queues, (await pop(queues, "q", 1)).messages, "failed")
        await queues.admin.clear("q")  # the originals are gone: putting back stores copies
        await push(queues, "q", "a", "b")
        assert await queues.dead.requeue(Which(queue="q")) == 1  # there was room for one
        page = await queues.dead.listing(Which(queue="q"))
        assert page["total"] == 2
        with pytest.raises(Conflict):
            await queues.dead.requeue(Which(id=page["messages"][0]["dlqId"]))
        await complete(queues, await pop(queues, "q"))
        assert await queues.dead.requeue(Which(queue="q")) == 2
        assert sorted(values(await pop(queues, "q"))) == [2, 3]

        await push(queues, "other", "for a group that goes")
        await answer(queues, (await pop(queues, "other", group="g")).messages, "dlq")
        await queues.groups.delete("g")
        assert await queues.dead.requeue(Which(queue="other")) == 0
        assert (await queues.dead.listing(Which(queue="other")))["total"] == 1

    run(database_url, body)


def test_two_dead_letters_of_one_transaction_id_become_one_message(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"retryLimit": 0})
        for _ in range(2):
            await queues.push([Item("q", b"1", transaction_id="t")])
            await answer(queues, (await pop(queues, "q")).messages, "failed")
            await queues.admin.clear("q")
        assert await queues.dead.requeue(Which(queue="q")) == 2
        assert [m.transaction_id for m in (await pop(queues, "q")).messages] == ["t"]

    run(database_url, body)


def test_a_page_of_dead_letters_holds_so_many_bytes_and_says_what_it_left_out(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MOST_BYTES", 1000)

    async def body(queues: Queues) -> None:
        await push(queues, "q", *("x" * 600 for _ in range(4)))
        await answer(queues, (await pop(queues, "q")).messages, "dlq")
        page = (await queues.dead.listing(Which(queue="q")))["messages"]
        assert [len(letter["data"]) for letter in page] == [602, 602, 4, 4]
        assert [letter.get("dataOmitted", False) for letter in page] == [False, False, True, True]

    run(database_url, body)


def test_a_deleted_group_is_gone_at_once_and_what_it_left_goes_in_steps(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.queues.upkeep.TIDY_STEP", 4)

    async def left(queues: Queues) -> int:
        tables = ("cursors", "leases", "attempts", "dropped_groups")
        rows = await queues.database.fetch(
            "SELECT " + " + ".join(f"(SELECT count(*) FROM {table})" for table in tables)
        )
        return int(rows[0][0])

    async def body(queues: Queues) -> None:
        for partition in range(10):
            await push(queues, "q", partition, partition=str(partition))
        held = await pop(queues, "q", group="g", partitions=10)
        await answer(queues, held.messages[:3], "failed")
        # The broker dies right after the first call: another one goes on.
        ((ids,),) = await queues.database.fetch("SELECT queue_drop_groups('g', NULL, false)")
        assert len(ids) == 1
        assert await queues.groups.listing(group="g") == []
        assert await left(queues) > 20
        assert not any(acked.lease_released for acked in await answer(queues, held.messages))
        assert await queues.upkeep.purge() == 10
        assert await left(queues) == 0
        again = await pop(queues, "q", group="g", partitions=10)
        assert sorted(values(again)) == list(range(10))
        assert (await queues.groups.delete("g"))["deletedPartitions"] == 10
        assert await left(queues) == 0

    run(database_url, body)


def test_a_group_deleted_without_its_metadata_keeps_its_dead_letters(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", "bad", "good")
        await answer(queues, (await pop(queues, "q", 1, group="g")).messages, "dlq")
        await queues.groups.delete("g", metadata=False)
        assert (await queues.dead.listing(Which(group="g")))["total"] == 1
        assert values(await pop(queues, "q", group="g")) == ["bad", "good"]

    run(database_url, body)


def test_a_transaction_needs_one_connection_even_when_all_was_forgotten(database_url: str) -> None:
    """A second one might wait for somebody who waits for the locks of the first: no database finds
    such a deadlock.
    """

    async def body(queues: Queues) -> None:
        await push(queues, "in", *range(20), partition="p")
        taken = (await pop(queues, "in", 20)).messages

        async def forget() -> None:
            while True:
                queues.catalog.forget()
                await asyncio.sleep(0)

        forgetting = asyncio.create_task(forget())
        moves = [
            queues.transaction(
                [Item("out", m.payload, str(n)), Ack(m.transaction_id, m.partition_id)]
            )
            for n, m in enumerate(taken)
        ]
        async with asyncio.timeout(30):
            assert all(result.success for result in await asyncio.gather(*moves))
        forgetting.cancel()
        assert sorted(values(await pop(queues, "out", partitions=100))) == list(range(20))

    async def main() -> None:
        async with running(database_url, {"pool_size": 1, "acquire_timeout": 20.0}) as queues:
            await body(queues)

    asyncio.run(main())


def test_queues_and_groups_deleted_configured_and_moved_under_load_leave_nobody_without_an_answer(
    database_url: str,
) -> None:
    """Whoever is refused gets a reason; nothing waits for a statement's timeout, and all counts are
    right.
    """

    async def body(queues: Queues) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + 4
        chance = random.Random(4)

        async def produce() -> None:
            while loop.time() < end:
                await queues.push([Item("q", b"1", str(chance.randrange(12))) for _ in range(10)])

        async def consume(group: str) -> None:
            while loop.time() < end:
                found = await pop(queues, "q", group=group, partitions=6, wait=True, timeout=0.2)
                chance.shuffle(found.messages)
                if chance.random() < 0.3 and found.messages:
                    acks = [
                        Ack(m.transaction_id, m.partition_id, group=group) for m in found.messages
                    ]
                    await queues.transaction([*acks, Item("q", b"2", str(chance.randrange(12)))])
                else:
                    await answer(
                        queues,
                        found.messages,
                        chance.choice(["completed", "completed", "failed", "dlq"]),
                    )

        async def disturb(pause: float, what: Callable[[], Awaitable[Any]]) -> None:
            while loop.time() < end:
                await asyncio.sleep(pause * chance.random())
                with contextlib.suppress(NotFound, Conflict):
                    await what()

        def group() -> str:
            return chance.choice("ab")

        def options() -> dict[str, Any]:
            return {
                "ordering": chance.choice(["partition", "none"]),
                "retryLimit": 1,
                "maxSize": chance.choice([0, 500]),
            }

        await asyncio.gather(
            *(produce() for _ in range(2)),
            *(consume(group) for group in "aabb"),
            disturb(0.2, lambda: queues.admin.configure("q", options())),
            disturb(1.5, lambda: queues.admin.delete("q")),
            disturb(0.3, lambda: queues.groups.delete(group(), metadata=chance.random() < 0.5)),
            disturb(
                0.3,
                lambda: queues.groups.seek(group(), "q", to=chance.choice(["end", "beginning"])),
            ),
            disturb(0.5, lambda: queues.admin.clear("q")),
            disturb(0.3, lambda: queues.dead.requeue(Which(queue="q"))),
        )
        assert loop.time() < end + 10  # not a statement's timeout, nor a row of lost deadlocks
        await queues.upkeep.purge()
        await queues.admin.configure("q", {"leaseTime": 1, "retryDelay": 0})
        await push(queues, "q", "last", partition="last")
        for name in "ab":
            await queues.groups.seek(name, "q", to="beginning") if await queues.groups.listing(
                name
            ) else None
            seen = 0
            while found := await pop(
                queues, "q", 1000, group=name, partitions=100, wait=True, timeout=3
            ):
                if not found.messages:
                    break
                seen += len(found.messages)
                await complete(queues, found)
            ((stored,),) = await queues.database.fetch(
                "SELECT count(*) FROM messages JOIN queues q ON q.id = queue_id WHERE q.name = 'q'"
            )
            assert seen >= stored > 0
            assert await queues.groups.lag("q", name) == 0

    run(database_url, body)


def test_an_empty_pop_under_a_held_transaction_id_reads_what_is_recent_only(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vacuum may remove nothing meanwhile: each batch leaves a dead entry in the ready list."""
    monkeypatch.setattr(popping, "SLACK", timedelta(0))

    async def body(queues: Queues) -> None:
        holder = await asyncpg.connect(database_url)
        await holder.execute("BEGIN")
        await holder.execute("SELECT pg_current_xact_id()")

        async def work(batches: int) -> None:
            for _ in range(batches):
                await push(queues, "q", 1)
                await complete(queues, await pop(queues, "q"))

        async def blocks(back: timedelta) -> int:
            """Pages an empty pop looks at that goes so far back."""
            ((group, floor),) = queues._popper._floors.items()
            ((plan,),) = await queues.database.fetch(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {popping.SQL}",
                *([group], [None], [1], [1], [uuid4()], [floor], [floor - back], 1000),
            )
            return int(json.loads(plan)[0]["Plan"]["Shared Hit Blocks"])

        await work(20)
        await blocks(timedelta(0))  # plans are made
        few, few_in_all = await blocks(timedelta(0)), await blocks(timedelta(hours=1))
        await work(400)
        assert await blocks(timedelta(0)) <= few + 5
        assert await blocks(timedelta(hours=1)) > few_in_all + 10  # it would be more and more
        await holder.close()

    async def main() -> None:
        async with running(database_url, {"pool_size": 1, "acquire_timeout": 20.0}) as queues:
            await body(queues)

    asyncio.run(main())


def test_acknowledging_part_of_a_lease_costs_the_same_however_many_leases_the_partition_has(
    database_url: str,
) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"ordering": "none"})

        async def blocks() -> int:
            """Pages that acknowledging one message of two looks at."""
            await push(queues, "q", 1, 2)
            message = (await pop(queues, "q", 2)).messages[0]
            ((plan,),) = await queues.database.fetch(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {acknowledging.SQL}",
                *(
                    [0],
                    [queues.catalog.partition_id(message.partition_id)],
                    [message.group],
                    [UUID(message.lease_id)],
                ),
                *(["completed"], [None], [message.transaction_id]),
            )
            return int(json.loads(plan)[0]["Plan"]["Shared Hit Blocks"])

        await blocks()
        few = await blocks()
        await push(queues, "q", *range(600))
        await asyncio.gather(*(pop(queues, "q", 1) for _ in range(600)))
        assert await blocks() < few + 12

    async def main() -> None:
        async with running(database_url, {"pool_size": 1, "acquire_timeout": 20.0}) as queues:
            await body(queues)

    asyncio.run(main())


def test_names_that_cannot_be_indexed_are_refused_by_name(database_url: str) -> None:
    long = json.dumps([random.Random(1).random() for _ in range(300)])

    async def body(queues: Queues) -> None:
        await push(queues, "q", 1)
        with pytest.raises(InvalidRequest, match="consumerGroup"):
            await queues.pop(PopRequest(queue="q", group=long))
        (message,) = (await pop(queues, "q")).messages
        with pytest.raises(InvalidRequest, match="trace name"):
            await queues.traces.add(
                message.partition_id, message.transaction_id, b"1", names=[long]
            )
        with pytest.raises(InvalidRequest, match="consumerGroup"):
            await queues.messages.bury(message.partition_id, message.transaction_id, long)

    run(database_url, body)


@pytest.mark.parametrize("ordering", ["partition", "none"])
def test_a_cursor_at_rest_beside_messages_is_healed_loudly_and_counted(
    database_url: str,
    ordering: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing else is: not what is done, leased, delayed, or of a deleted group."""
    monkeypatch.setattr("penstock.queues.upkeep.HEAL_STEP", 3)

    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"ordering": ordering, "retryDelay": 60_000})
        for partition in range(6):
            await push(queues, "q", f"a{partition}", f"b{partition}", partition=str(partition))
        for group in ("g", "h"):
            assert (
                len((await pop(queues, "q", group=group, partitions=6, auto_ack=True)).messages)
                == 12
            )
        await push(queues, "q", "c1", partition="1")
        await push(queues, "q", "c2", partition="2")
        await push(queues, "q", "c3", partition="3")
        leased = await pop(queues, "q", group="g", partition="2")
        failed = await pop(queues, "q", group="g", partition="3")
        await answer(queues, failed.messages, "failed")

        async def walk() -> int:
            healed = await queues.upkeep.heal()
            while queues.upkeep._walked != (0, 0):
                healed += await queues.upkeep.heal()
            return healed

        assert await walk() == 0
        assert not caplog.records
        await queues.database.fetch(
            """UPDATE cursors c SET due_at = NULL, version = version + 1 FROM partitions p, groups g
                WHERE p.id = c.partition_id AND p.name = '1' AND g.id = c.group_id AND g.name = 'g'"""
        )
        assert (await pop(queues, "q", group="g", partitions=6)).messages == []
        entry = (await queues.groups.listing("g"))[0]
        assert entry["totalLag"] == 3
        assert await walk() == 1
        assert values(await pop(queues, "q", group="g", partitions=6, wait=True, timeout=10)) == [
            "c1"
        ]
        assert await walk() == 0
        assert queues.upkeep._healed.value("q") == 1
        (line,) = [
            record.getMessage() for record in caplog.records if record.levelname == "WARNING"
        ]
        assert "'g'" in line
        assert "'q'" in line
        assert "'1'" in line
        await complete(queues, leased)

    caplog.set_level("WARNING", logger="penstock.queues")
    run(database_url, body)


def test_a_group_with_lag_that_no_partition_shows_is_not_called_stable_and_seeking_heals_it(
    database_url: str,
) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", *range(100))
        await pop(queues, "q", group="g", auto_ack=True)
        await push(queues, "q", *range(100))
        await queues.database.fetch("UPDATE cursors SET due_at = NULL, version = version + 1")
        entry = (await queues.groups.listing("g"))[0]
        assert (entry["totalLag"], entry["partitionsWithLag"], entry["state"]) == (
            100,
            0,
            "Lagging",
        )
        rows = await queues.database.fetch("SELECT max(seq) AS last FROM messages")
        assert rows[0]["last"] == 200
        await queues.groups.seek("g", "q", to="beginning")
        assert len((await pop(queues, "q", 200, group="g")).messages) == 200

    run(database_url, body)


def test_seeking_to_where_a_blind_cursor_is_makes_it_see(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", 1, 2)
        assert values(await pop(queues, "q", 1, group="g")) == [1]
        await queues.groups.seek("g", "q", to="beginning")
        await queues.database.fetch("UPDATE cursors SET due_at = NULL, version = version + 1")
        assert (await pop(queues, "q", group="g")).messages == []
        await queues.groups.seek("g", "q", to="beginning")
        assert values(await pop(queues, "q", group="g")) == [1, 2]

    run(database_url, body)


def test_a_first_pop_that_meets_pushes_in_every_partition_sees_them_when_they_are_committed(
    database_url: str,
) -> None:
    """The cursor it makes must not rest: `array_agg` over no rows is NULL, and so is everything
    made of it.
    """

    async def body(queues: Queues) -> None:
        await push(queues, "q", "first")
        other = await asyncpg.connect(
            database_url, server_settings={"search_path": SCHEMA.search_path("penstock")}
        )
        number = await other.fetchval("SELECT id FROM partitions")
        transaction = other.transaction()
        await transaction.start()
        await other.execute(
            """SELECT * FROM queue_push(ARRAY[$1::bigint], ARRAY[0], ARRAY['t'], ARRAY[true], NULL, NULL, NULL,
                                        ARRAY['2'::bytea])""",
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

    run(database_url, body)


def test_a_group_that_decides_for_a_queue_while_a_partition_is_made_gets_that_partition(
    database_url: str,
) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", 1, partition="one")
        await complete(queues, await pop(queues, "q", group="g", partition="one"))
        other = await asyncpg.connect(
            database_url, server_settings={"search_path": SCHEMA.search_path("penstock")}
        )
        transaction = other.transaction()
        await transaction.start()
        await other.execute("SELECT queue_ensure(ARRAY['q'], ARRAY['two'])")
        deciding = asyncio.create_task(
            queues.groups.subscription("g", datetime(2000, 1, 1, tzinfo=UTC))
        )
        await asyncio.wait({deciding}, timeout=0.3)
        await transaction.commit()
        await other.close()
        assert (await deciding)["rowsUpdated"] == 1
        await push(queues, "q", 2, partition="two")
        assert values(await pop(queues, "q", group="g")) == [2]

    run(database_url, body)
