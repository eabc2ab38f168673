"""Groups: where they start, what they see, how they move and how they end."""

import asyncio
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Item, PopRequest, Queues
from penstock.queues.admin.dead_letters import Which
from penstock.queues.schema import SCHEMA
from tests.queues.support import answer, complete, pop, push, running, values
from tests.support.form import pick
from tests.support.wait import eventually


async def test_each_group_sees_everything_and_consumers_of_one_share(queues: Queues) -> None:
    await push(queues, "q", *range(3))
    assert values(await pop(queues, "q")) == [0, 1, 2]
    assert values(await pop(queues, "q", group="a")) == [0, 1, 2]
    assert values(await pop(queues, "q", group="b")) == [0, 1, 2]
    assert (await pop(queues, "q", group="a")).messages == []


@pytest.mark.parametrize("mode", ["new", "new-only"])
async def test_a_group_may_start_with_what_is_new(queues: Queues, mode: str) -> None:
    await push(queues, "q", "old")
    assert (await pop(queues, "q", group="g", subscription_mode=mode)).messages == []
    await push(queues, "q", "new")
    await push(queues, "q", "newer", partition="made later")
    messages = await pop(queues, "q", group="g", partitions=5)
    assert sorted(values(messages)) == ["new", "newer"]
    assert await queues.groups.lag("q", "g") == 2


async def test_a_group_may_start_at_a_time_also_in_the_future(queues: Queues) -> None:
    await push(queues, "q", 1)
    (row,) = await queues.database.fetch("SELECT created_at FROM messages")
    await push(queues, "q", 2)
    past = row["created_at"].isoformat()
    assert values(await pop(queues, "q", group="past", subscription_from=past)) == [2]
    far = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert (await pop(queues, "q", group="far", subscription_from=far)).messages == []
    await push(queues, "q", 3)
    assert (await pop(queues, "q", group="far")).messages == []
    soon = datetime.now(UTC) + timedelta(seconds=0.3)
    start = soon.isoformat()
    assert (await pop(queues, "q", group="soon", subscription_from=start)).messages == []
    await eventually(lambda: datetime.now(UTC) > soon)
    await push(queues, "q", 4)
    assert values(await pop(queues, "q", group="soon", wait=True, timeout=60)) == [4]
    for wrong in ("yesterday", "2024-13-01T00:00:00Z"):
        with pytest.raises(InvalidRequest, match="subscriptionFrom"):
            await pop(queues, "q", group="x", subscription_from=wrong)
    with pytest.raises(InvalidRequest, match="subscriptionMode"):
        await pop(queues, "q", group="x", subscription_mode="sometimes")


async def test_a_subscription_on_one_partition_says_nothing_about_the_others(
    queues: Queues,
) -> None:
    await push(queues, "q", "a", partition="a")
    await push(queues, "q", "b", partition="b")
    messages = await pop(queues, "q", group="g", partition="a", subscription_mode="new")
    assert messages.messages == []
    assert values(await pop(queues, "q", group="g", partitions=9)) == ["b"]


async def test_seek_moves_a_group_to_a_time_the_end_and_the_beginning(queues: Queues) -> None:
    for number in range(4):
        await push(queues, "q", number, partition=f"p{number % 2}")
    (row,) = await queues.database.fetch("SELECT max(created_at) AS t FROM messages WHERE seq = 1")
    held = await pop(queues, "q", group="g", partitions=9)
    await queues.groups.seek("g", "q", to="end")
    assert await queues.groups.lag("q", "g") == 0
    assert not (await answer(queues, held.messages[:1], "failed"))[0].success
    assert (await pop(queues, "q", group="g")).messages == []
    await queues.groups.seek("g", "q", moment=row["t"])
    assert await queues.groups.lag("q", "g") == 2
    assert sorted(values(await pop(queues, "q", group="g", partitions=9))) == [2, 3]
    await queues.groups.seek("g", "q", to="beginning")
    assert await queues.groups.lag("q", "g") == 4
    await queues.groups.seek("g", "q", partition="p0", to="end")
    assert values(await pop(queues, "q", group="g", partitions=9)) == [1, 3]
    with pytest.raises(NotFound):
        await queues.groups.seek("nobody", "q")


async def test_groups_are_listed_with_exact_lag_and_deleted(queues: Queues) -> None:
    await push(queues, "q", *range(7))
    await complete(queues, await pop(queues, "q", 3, group="g"))
    (entry,) = await queues.groups.listing(group="g")
    assert (entry.waiting, entry.lagging_partitions, entry.mode) == (4, 1, "all")
    assert [(row.queue, row.waiting) for row in await queues.groups.describe("g")] == [("q", 4)]
    await queues.upkeep.roll_up()
    assert await queues.groups.lag("q", "g") == 4
    assert [row.waiting for row in await queues.groups.lagging(0)] == [4]
    gone = await queues.groups.delete("g")
    assert (gone.partitions, gone.subscription_deleted) == (1, True)
    assert values(await pop(queues, "q", group="g")) == list(range(7))
    await pop(queues, "q", group="n", subscription_mode="new")
    await queues.groups.delete("n", "q", metadata=False)
    await push(queues, "q", "late")
    assert values(await pop(queues, "q", group="n")) == ["late"]  # still starts where it subscribed


async def test_a_deleted_group_is_gone_at_once_and_what_it_left_goes_in_steps(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.queues.admin.groups.PARTITIONS_PER_STEP", 4)

    async def left(queues: Queues) -> int:
        tables = ("cursors", "leases", "attempts", "dropped_groups")
        rows = await queues.database.fetch(
            "SELECT " + " + ".join(f"(SELECT count(*) FROM {table})" for table in tables)
        )
        return int(rows[0][0])

    async with running(database_url) as queues:
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
        assert (await queues.groups.delete("g")).partitions == 10
        assert await left(queues) == 0


async def test_a_group_deleted_without_its_metadata_keeps_its_dead_letters(queues: Queues) -> None:
    await push(queues, "q", "bad", "good")
    await answer(queues, (await pop(queues, "q", 1, group="g")).messages, "dlq")
    await queues.groups.delete("g", metadata=False)
    assert (await queues.dead.listing(Which(group="g"))).total == 1
    assert values(await pop(queues, "q", group="g")) == ["bad", "good"]


@pytest.mark.parametrize("ordering", ["partition", "none"])
async def test_a_cursor_at_rest_beside_messages_is_healed_loudly_and_counted(
    database_url: str,
    ordering: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing else is: not what is done, leased, delayed, or of a deleted group."""
    monkeypatch.setattr("penstock.queues.background.upkeep.CURSORS_PER_STEP", 3)

    caplog.set_level("WARNING", logger="penstock.queues")
    async with running(database_url) as queues:
        await queues.admin.configure("q", QueueOptions(ordering=ordering, retry_delay=60_000))
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
            return sum([await queues.upkeep.heal() for _ in range(3)])  # more than all

        assert await walk() == 0
        assert not caplog.records
        await queues.database.fetch(
            """UPDATE cursors c SET due_at = NULL, version = version + 1 FROM partitions p, groups g
                WHERE p.id = c.partition_id AND p.name = '1' AND g.id = c.group_id AND g.name = 'g'"""
        )
        assert (await pop(queues, "q", group="g", partitions=6)).messages == []
        entry = (await queues.groups.listing("g"))[0]
        assert entry.waiting == 3
        assert await walk() == 1
        assert values(await pop(queues, "q", group="g", partitions=6, wait=True, timeout=10)) == [
            "c1"
        ]
        assert await walk() == 0
        counted = queues.database.metrics.values_of("penstock_queue_cursors_healed_total")
        assert counted == {("q",): 1}
        (line,) = [
            record.getMessage() for record in caplog.records if record.levelname == "WARNING"
        ]
        assert "'g'" in line
        assert "'q'" in line
        assert "'1'" in line
        await complete(queues, leased)


async def test_a_group_with_lag_that_no_partition_shows_is_not_called_stable_and_seeking_heals_it(
    queues: Queues,
) -> None:
    await push(queues, "q", *range(100))
    await pop(queues, "q", group="g", auto_ack=True)
    await push(queues, "q", *range(100))
    await queues.database.fetch("UPDATE cursors SET due_at = NULL, version = version + 1")
    entry = (await queues.groups.listing("g"))[0]
    assert (entry.waiting, entry.lagging_partitions, entry.state) == (100, 0, "Empty")
    rows = await queues.database.fetch("SELECT max(seq) AS last FROM messages")
    assert rows[0]["last"] == 200
    await queues.groups.seek("g", "q", to="beginning")
    assert len((await pop(queues, "q", 200, group="g")).messages) == 200


async def test_seeking_to_where_a_blind_cursor_is_makes_it_see(queues: Queues) -> None:
    await push(queues, "q", 1, 2)
    assert values(await pop(queues, "q", 1, group="g")) == [1]
    await queues.groups.seek("g", "q", to="beginning")
    await queues.database.fetch("UPDATE cursors SET due_at = NULL, version = version + 1")
    assert (await pop(queues, "q", group="g")).messages == []
    await queues.groups.seek("g", "q", to="beginning")
    assert values(await pop(queues, "q", group="g")) == [1, 2]


async def test_a_group_that_decides_for_a_queue_while_a_partition_is_made_gets_that_partition(
    database_url: str, queues: Queues
) -> None:
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
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    await eventually(lambda: queues.database.fetch(waiting))
    await transaction.commit()
    await other.close()
    assert await deciding == 1
    await push(queues, "q", 2, partition="two")
    assert values(await pop(queues, "q", group="g")) == [2]


async def test_a_new_group_on_many_partitions_finds_what_there_is(database_url: str) -> None:
    count = pick(short=1000, usual=3000, soak=100_000)
    async with running(database_url) as queues:
        for start in range(0, count, 1000):
            await queues.push([Item("q", b"1", f"p{n}") for n in range(start, start + 1000)])
        await queues.admin.clear("q")
        await push(queues, "q", "needle", partition=f"p{count - 5}")
        assert values(await pop(queues, "q", group="late", wait=True, timeout=60)) == ["needle"]
        assert (await pop(queues, "q", group="fresh", subscription_mode="new")).messages == []
        await push(queues, "q", "later", partition="p7")
        assert values(await pop(queues, "q", group="fresh", wait=True, timeout=60)) == ["later"]
        while (await queues.groups.listing("fresh", "q"))[0].discovering:
            assert (await pop(queues, "q", group="fresh")).messages == []
        assert await queues.groups.lag("q", "fresh") == 1


@pytest.mark.parametrize("start", ["all", "new"])
@pytest.mark.parametrize("ordering", ["partition", "none"])
async def test_a_partition_removed_while_a_new_group_finds_it_is_not_looked_at_for_ever(
    database_url: str, queues: Queues, ordering: str, start: str
) -> None:
    await queues.admin.configure("q", QueueOptions(ordering=ordering))
    await push(queues, "q", 1)
    await complete(queues, await pop(queues, "q"))
    path = SCHEMA.search_path("penstock")
    removing = await asyncpg.connect(database_url, server_settings={"search_path": path})
    await removing.execute("DELETE FROM messages; UPDATE partitions SET emptied_at = now()")
    async with removing.transaction():
        await removing.fetch("SELECT queue_tidy(clock_timestamp() + interval '1 hour', 100)")
        await queues.pop(PopRequest(queue="q", group="late", subscription_mode=start))
        cursors = "SELECT 1 FROM cursors c JOIN groups g ON g.id = c.group_id WHERE name = 'late'"
        assert await queues.database.fetch(cursors), "it saw the partition"
    await removing.close()
    assert values(await pop(queues, "q", group="late")) == []
    assert not await queues.database.fetch(cursors)
    await push(queues, "q", 2)
    assert values(await pop(queues, "q", group="late")) == [2]
