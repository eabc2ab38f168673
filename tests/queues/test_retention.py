"""What is deleted for its age, and what is not."""

import pytest

from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Item, Queues
from tests.queues.support import answer, complete, pop, push, values


async def _age(queues: Queues, interval: str) -> None:
    await queues.database.fetch(
        f"UPDATE messages SET created_at = created_at - interval '{interval}'"
    )


async def test_ttl_drops_what_is_too_old_and_zero_means_for_ever(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(ttl=60))
    await push(queues, "q", *range(5))
    await queues.database.fetch(
        "UPDATE messages SET created_at = created_at - interval '2 minutes' WHERE seq <= 3"
    )
    assert values(await pop(queues, "q")) == [3, 4]
    assert (await queues.status.queue("q")).counts.dropped == 3
    assert await queues.upkeep.evict() == 3
    assert (await queues.status.queue("q")).counts.stored == 2


async def test_retention_deletes_old_messages_and_completed_ones_sooner(queues: Queues) -> None:
    options = QueueOptions(
        retention_enabled=True, retention_seconds=3600, completed_retention_seconds=60
    )
    await queues.admin.configure("q", options)
    await push(queues, "q", *range(6))
    for group, taken in (("a", 4), ("b", 2)):
        await complete(queues, await pop(queues, "q", taken, group=group))
    await _age(queues, "10 minutes")
    assert await queues.upkeep.retain() == 2  # what both groups have settled
    assert await queues.groups.lag("q", "a") == 2
    assert await queues.groups.lag("q", "b") == 4
    await _age(queues, "2 hours")
    held = await pop(queues, "q", 1, group="b")
    assert await queues.upkeep.retain() == 4
    assert await queues.groups.lag("q", "a") == 0
    assert await queues.groups.lag("q", "b") == 0
    assert (await answer(queues, held.messages))[0].error == "Message not found"
    answers = await queues.push([Item("q", b"7", transaction_id="next")])
    assert (answers[0].message_id or "").endswith("7")  # numbers go on
    assert values(await pop(queues, "q", group="a")) == [7]
    assert values(await pop(queues, "q", group="b")) == [7]


async def test_completed_retention_deletes_nothing_before_somebody_completed_it(
    queues: Queues,
) -> None:
    await queues.admin.configure(
        "q", QueueOptions(retention_enabled=True, completed_retention_seconds=60)
    )
    await push(queues, "q", 1, 2)
    await _age(queues, "10 minutes")
    assert await queues.upkeep.retain() == 0  # there is no group yet: nobody has seen these
    await complete(queues, await pop(queues, "q", 1, group="a"))
    assert await queues.upkeep.retain() == 1
    assert values(await pop(queues, "q", group="b")) == [2]


async def test_an_empty_partition_is_removed_when_it_was_idle_long_and_is_looked_at_once(
    queues: Queues,
) -> None:
    looks = "SELECT queue_tidy(clock_timestamp() + interval '1 day', 1000)"
    await push(queues, "q", 1, partition="full")
    await push(queues, "q", 2, partition="empty")
    await push(queues, "q", 3, partition="in use")
    await queues.admin.clear("q", "empty")
    await queues.database.fetch("UPDATE partitions SET emptied_at = emptied_at - interval '2 days'")
    await queues.upkeep.tidy()
    assert {row.name for row in await queues.admin.partitions("q")} == {
        "full",
        "empty",
        "in use",
    }  # 30 days
    assert (await queues.database.fetch(looks))[0][0] == 3
    assert {row.name for row in await queues.admin.partitions("q")} == {"full", "in use"}
    assert (await queues.database.fetch(looks))[0][
        0
    ] == 0  # those with messages are not looked at again
    await queues.admin.clear("q", "full")
    assert (await queues.database.fetch(looks))[0][0] == 1
    await push(queues, "q", "anew", partition="empty")
    assert {row.name for row in await queues.admin.partitions("q")} == {"empty", "in use"}
    assert sorted(map(str, values(await pop(queues, "q", partitions=5)))) == ["3", "anew"]


async def test_eviction_deletes_only_what_some_group_has_not_taken_in_time(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(max_wait_time_seconds=60))
    await push(queues, "q", *range(6))
    await complete(queues, await pop(queues, "q", 2))
    await _age(queues, "10 minutes")
    await push(queues, "q", "fresh")
    assert await queues.upkeep.evict() == 4
    assert await queues.groups.lag("q", "__QUEUE_MODE__") == 1
    assert values(await pop(queues, "q")) == ["fresh"]
    assert (await queues.status.queue("q")).counts.stored == 3


@pytest.mark.parametrize("deleted", [2, 4])
async def test_retention_of_leased_messages_does_not_hold_up_their_partition(
    queues: Queues, deleted: int
) -> None:
    options = QueueOptions(retention_enabled=True, retention_seconds=3600)
    await queues.admin.configure("q", options)
    await push(queues, "q", *range(4))
    popped = await pop(queues, "q")
    await queues.database.fetch(
        "UPDATE messages SET created_at = created_at - interval '2 hours' WHERE seq <= $1",
        deleted,
    )
    assert await queues.upkeep.retain() == deleted
    await push(queues, "q", "next")
    acked = await answer(queues, popped.messages)
    assert [one.error for one in acked[:deleted]] == ["Message not found"] * deleted
    assert all(one.success for one in acked[deleted:])
    assert values(await pop(queues, "q")) == ["next"]
