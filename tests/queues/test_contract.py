"""The promises of the contract's first part, one test each, on the engine itself."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.errors import InvalidRequest, NotFound, Unavailable
from penstock.queues import Ack, Item, PopRequest, Pushed, Queues
from penstock.queues.dead import Which
from tests.queues.support import (
    answer,
    complete,
    expire_leases,
    pop,
    push,
    running,
    skip_delays,
    values,
)

Body = Callable[[Queues], Awaitable[None]]
KEY = "11" * 32


def run(url: str, body: Body, **settings: Any) -> None:
    async def main() -> None:
        async with running(url, **settings) as queues:
            await body(queues)

    asyncio.run(main())


def test_messages_come_in_the_order_they_were_pushed(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        for start in range(0, 50, 10):
            await push(queues, "q", *range(start, start + 10))
        first = await pop(queues, "q", 20)
        await complete(queues, first)
        rest = await pop(queues, "q", 100)
        assert values(first) + values(rest) == list(range(50))

    run(database_url, body)


def test_an_empty_pop_has_no_messages_and_says_why(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        assert (await pop(queues, "nothing")).reason == "unknown"
        await push(queues, "q", 1)
        popped = await pop(queues, "q")
        assert (await pop(queues, "q")).messages == []
        assert (await pop(queues, "q", partition="Default")).reason == "busy"
        assert (await pop(queues, "q", partition="other")).reason == "unknown"
        await complete(queues, popped)
        assert (await pop(queues, "q", partition="Default")).reason == "empty"

    run(database_url, body)


def test_a_transaction_id_is_stored_once_per_partition(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        items = [
            Item("q", b"1", transaction_id="a"),
            Item("q", b"2", transaction_id="a"),
            Item("q", b"3", "p", "a"),
        ]
        first = await queues.push(items)
        assert [answer.status for answer in first] == ["queued", "duplicate", "queued"]
        assert first[1].message_id == first[0].message_id != first[2].message_id
        racing = await asyncio.gather(
            *(queues.push([Item("q", b"9", transaction_id="race")]) for _ in range(8))
        )
        assert sorted(pushed[0].status for pushed in racing) == ["duplicate"] * 7 + ["queued"]
        assert len({pushed[0].message_id for pushed in racing}) == 1
        again = await queues.push(items)
        assert [answer.status for answer in again] == ["duplicate"] * 3
        assert [answer.message_id for answer in again] == [answer.message_id for answer in first]
        assert values(await pop(queues, "q", partition="Default")) == [1, 9]

    run(database_url, body)


def test_a_failed_message_beside_completed_ones_comes_back_alone(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"retryDelay": 0})
        await push(queues, "q", *range(5))
        messages = (await pop(queues, "q")).messages
        acked = await queues.ack(
            [
                Ack(
                    m.transaction_id,
                    m.partition_id,
                    m.lease_id,
                    "failed" if m.seq in (2, 4) else "completed",
                )
                for m in reversed(messages)
            ]
        )
        assert all(a.success and a.lease_released for a in acked)
        assert values(await pop(queues, "q")) == [1, 3]

    run(database_url, body)


def test_acks_out_of_order_twice_and_late_lose_nothing_and_release_nothing_early(
    database_url: str,
) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", *range(4))
        messages = (await pop(queues, "q")).messages
        for _ in range(5):
            (acked,) = await answer(queues, [messages[2]])
            assert acked.success
            assert not acked.lease_released
        assert (await pop(queues, "q")).messages == []  # three are still open
        await answer(queues, [messages[0]])
        assert await queues.groups.lag("q", "__QUEUE_MODE__") == 2
        await expire_leases(queues)
        (late,) = await answer(queues, [messages[1]])
        assert (late.success, late.error) == (False, "Invalid or expired lease")
        again = await pop(queues, "q")
        assert values(again) == [1, 3]
        (late,) = await answer(queues, [messages[3]])
        assert not late.success
        assert (await pop(queues, "q")).messages == []  # the second lease lives
        await complete(queues, again)
        assert all(
            acked.success for acked in await answer(queues, again.messages)
        )  # repeated: nothing happens
        assert await queues.groups.lag("q", "__QUEUE_MODE__") == 0
        await push(queues, "q", 9)
        assert values(await pop(queues, "q")) == [9]

    run(database_url, body)


def test_acks_without_a_lease_id_settle_and_unknown_ones_are_not_found(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", *range(3))
        messages = (await pop(queues, "q")).messages
        acked = await answer(queues, messages[:2], lease=False)
        assert [a.success for a in acked] == [True, True]
        partition = messages[0].partition_id
        odd = await queues.ack(
            [
                Ack("nope", partition),
                Ack("nope", "00000000-0000-0000-0000-000000000000"),
                Ack(messages[2].transaction_id, partition, "not-a-lease"),
                Ack(messages[2].transaction_id, partition, status="maybe"),
                Ack(messages[2].transaction_id, partition, group="stranger"),
            ]
        )
        assert [a.error for a in odd] == [
            "Message not found",
            "Message not found",
            "Invalid or expired lease",
            "Unknown status: maybe",
            None,
        ]
        assert odd[4].lease_released is None
        (last,) = await answer(queues, messages[2:], lease=False)
        assert last.lease_released

    run(database_url, body)


@pytest.mark.parametrize("ordering", ["partition", "none"])
def test_attempts_belong_to_the_message_and_end_in_the_dead_letters(
    database_url: str, ordering: str
) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"retryLimit": 2, "retryDelay": 0, "ordering": ordering})
        await push(queues, "q", *range(10))
        for attempt in range(3):
            popped = await pop(queues, "q", group="g")
            assert values(popped) == list(range(10)), attempt
            acked = await answer(queues, popped.messages, "failed", f"boom {attempt}")
            assert [a.dlq for a in acked] == [attempt == 2] * 10
        assert (await pop(queues, "q", group="g")).messages == []
        dead = await queues.dead.listing(Which(queue="q", group="g"))
        assert dead["total"] == 10
        assert {(d["errorMessage"], d["attempts"]) for d in dead["messages"]} == {("boom 2", 3)}
        assert sorted(json.loads(d["data"]) for d in dead["messages"]) == list(range(10))
        assert await queues.groups.lag("q", "g") == 0

    run(database_url, body)


@pytest.mark.parametrize("ordering", ["partition", "none"])
def test_an_expired_lease_counts_an_attempt_and_retry_does_not(
    database_url: str, ordering: str
) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"retryLimit": 1, "retryDelay": 0, "ordering": ordering})
        await push(queues, "q", "poison")
        for _ in range(5):
            await answer(queues, (await pop(queues, "q")).messages, "retry")
        assert values(await pop(queues, "q")) == ["poison"]
        await expire_leases(queues)
        assert values(await pop(queues, "q")) == ["poison"]
        await expire_leases(queues)
        assert (await pop(queues, "q")).messages == []
        (dead,) = (await queues.dead.listing(Which(queue="q")))["messages"]
        assert "lease expired" in dead["errorMessage"]
        assert dead["attempts"] == 2

    run(database_url, body)


def test_a_message_can_be_sent_straight_to_the_dead_letters(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", 1, 2)
        messages = (await pop(queues, "q")).messages
        (acked,) = await answer(queues, messages[:1], "dlq", "no good")
        assert acked.dlq
        (dead,) = (await queues.dead.listing(Which()))["messages"]
        assert (dead["errorMessage"], dead["consumerGroup"]) == ("no good", "__QUEUE_MODE__")

    run(database_url, body)


def test_without_a_dead_letter_queue_exhausted_messages_are_dropped_and_counted(
    database_url: str,
) -> None:
    async def body(queues: Queues) -> None:
        for option in ("deadLetterQueue", "dlqAfterMaxRetries"):
            await queues.admin.configure(option, {"retryLimit": 0, option: False})
            await push(queues, option, 1)
            (acked,) = await answer(queues, (await pop(queues, option)).messages, "failed")
            assert not acked.dlq
            assert (await pop(queues, option)).messages == []
            assert (await queues.dead.listing(Which(queue=option)))["total"] == 0
            assert (await queues.status.queues(queue=option))[0]["messages"]["dropped"] == 1

    run(database_url, body)


def test_the_retry_delay_is_waited_for_and_strict_order_waits_with_it(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        for ordering, meanwhile in (("partition", []), ("none", [2])):
            await queues.admin.configure(ordering, {"retryDelay": 60_000, "ordering": ordering})
            await push(queues, ordering, 1)
            await answer(queues, (await pop(queues, ordering)).messages, "failed")
            await push(queues, ordering, 2)
            assert values(await pop(queues, ordering)) == meanwhile
            await skip_delays(queues)
            await queues.database.fetch(
                "UPDATE cursors SET due_at = clock_timestamp(), version = version + 1 WHERE due_at IS NOT NULL"
            )
            assert values(await pop(queues, ordering)) == ([1] if meanwhile else [1, 2])

    run(database_url, body)


def test_one_lease_per_partition_under_partition_order_many_under_none(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("strict")
        await queues.admin.configure("shared", {"ordering": "none"})
        for queue in ("strict", "shared"):
            await push(queues, queue, *range(10))
        assert values(await pop(queues, "strict", 3)) == [0, 1, 2]
        assert (await pop(queues, "strict", 3)).messages == []
        taken = [await pop(queues, "shared", 3) for _ in range(4)]
        assert [values(popped) for popped in taken] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        await complete(queues, taken[2])  # the last of them first: the cursor waits for the others
        assert await queues.groups.lag("shared", "__QUEUE_MODE__") == 7
        await answer(queues, taken[0].messages, "retry")
        await push(queues, "shared", 10)
        assert values(await pop(queues, "shared", 100)) == [0, 1, 2, 10]
        await complete(queues, taken[1])
        assert (await pop(queues, "shared", 100)).messages == []

    run(database_url, body)


def test_each_group_sees_everything_and_consumers_of_one_share(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", *range(3))
        assert values(await pop(queues, "q")) == [0, 1, 2]
        assert values(await pop(queues, "q", group="a")) == [0, 1, 2]
        assert values(await pop(queues, "q", group="b")) == [0, 1, 2]
        assert (await pop(queues, "q", group="a")).messages == []

    run(database_url, body)


def test_several_partitions_under_one_lease_id(database_url: str) -> None:
    async def body(queues: Queues) -> None:
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

    run(database_url, body)


def test_extending_never_shortens_and_an_ended_lease_is_refused(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", 1)
        popped = await pop(queues, "q")
        long = await queues.extend(popped.lease_id, 1000)
        short = await queues.extend(popped.lease_id, 1)
        assert short.expires_at == long.expires_at
        await expire_leases(queues)
        assert (await queues.extend(popped.lease_id, 10)).error == "Lease already expired"
        assert (await queues.extend("nonsense", 10)).error == "Lease not found"
        with pytest.raises(InvalidRequest):
            await queues.extend(popped.lease_id, 0)

    run(database_url, body)


def test_an_extended_lease_is_not_taken_over(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"leaseTime": 1})
        await push(queues, "q", 1)
        popped = await pop(queues, "q")
        assert (await queues.extend(popped.lease_id, 600)).success
        assert (await pop(queues, "q", wait=True, timeout=1.2)).messages == []
        await complete(queues, popped)

    run(database_url, body)


def test_auto_ack_settles_at_once_and_needs_no_lease(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", *range(5))
        popped = await pop(queues, "q", 3, auto_ack=True)
        assert values(popped) == [0, 1, 2]
        assert {message.lease_id for message in popped.messages} == {""}
        assert values(await pop(queues, "q", auto_ack=True)) == [3, 4]
        assert (await pop(queues, "q")).messages == []
        assert await queues.groups.lag("q", "__QUEUE_MODE__") == 0

    run(database_url, body)


def test_max_size_refuses_what_does_not_fit_and_says_which(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"maxSize": 3})
        statuses = [
            pushed.status for pushed in await queues.push([Item("q", b"1") for _ in range(5)])
        ]
        assert statuses == ["queued"] * 3 + ["full"] * 2
        await complete(queues, await pop(queues, "q", 2))
        racing = await asyncio.gather(*(queues.push([Item("q", b"2")]) for _ in range(10)))
        assert sorted(pushed[0].status for pushed in racing) == ["full"] * 8 + ["queued"] * 2

    run(database_url, body)


def test_ttl_drops_what_is_too_old_and_zero_means_for_ever(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"ttl": 60})
        await push(queues, "q", *range(5))
        await queues.database.fetch(
            "UPDATE messages SET created_at = created_at - interval '2 minutes' WHERE seq <= 3"
        )
        assert values(await pop(queues, "q")) == [3, 4]
        assert (await queues.status.queues(queue="q"))[0]["messages"]["dropped"] == 3
        assert await queues.upkeep.evict() == 3
        assert (await queues.status.queues(queue="q"))[0]["messages"]["total"] == 2

    run(database_url, body)


def test_delayed_messages_wait_and_never_mask_due_ones(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"delayedProcessing": 3600})
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

    run(database_url, body)


def test_a_delayed_message_arrives_when_it_is_due(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"delayedProcessing": 1})
        await push(queues, "q", 1)
        began = asyncio.get_running_loop().time()
        assert values(await pop(queues, "q", wait=True, timeout=10)) == [1]
        assert 0.9 < asyncio.get_running_loop().time() - began < 3

    run(database_url, body)


def test_the_window_buffer_holds_a_partition_until_it_is_quiet(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"windowBuffer": 3600})
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

    run(database_url, body)


def test_a_namespace_or_task_pop_takes_the_most_important_queue_first(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("low", {"priority": 1}, "shop", "mail")
        await queues.admin.configure("high", {"priority": 9}, "shop", "mail")
        await queues.admin.configure("other", {"priority": 99}, "elsewhere", "mail")
        for queue in ("low", "high", "other"):
            await push(queues, queue, queue)
        found = [await queues.pop(PopRequest(namespace="shop", auto_ack=True)) for _ in range(3)]
        assert [values(popped) for popped in found] == [["high"], ["low"], []]
        assert values(await queues.pop(PopRequest(task="mail"))) == ["other"]
        waiting = asyncio.create_task(
            queues.pop(PopRequest(namespace="shop", wait=True, timeout=10))
        )
        await asyncio.sleep(0.05)
        await push(queues, "low", "woken")
        assert values(await waiting) == ["woken"]

    run(database_url, body)


def test_unknown_options_and_wrong_types_are_named(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        for options, word in (
            ({"leasetime": 1}, "leasetime"),
            ({"leaseTime": "soon"}, "leaseTime"),
            ({"leaseTime": True}, "leaseTime"),
            ({"retryLimit": -1}, "retryLimit"),
            ({"ordering": "random"}, "ordering"),
            ({"retentionEnabled": 1}, "retentionEnabled"),
        ):
            with pytest.raises(InvalidRequest, match=word):
                await queues.admin.configure("q", options)
        with pytest.raises(InvalidRequest, match="queue"):
            await queues.admin.configure("")
        configured = await queues.admin.configure("q", {"leaseTime": 7})
        assert configured["options"].lease_time == 7
        assert (await queues.admin.configure("q", {"retryLimit": 1}))["options"].lease_time == 300

    run(database_url, body)


@pytest.mark.parametrize("mode", ["new", "new-only"])
def test_a_group_may_start_with_what_is_new(database_url: str, mode: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", "old")
        assert (await pop(queues, "q", group="g", subscription_mode=mode)).messages == []
        await push(queues, "q", "new")
        await push(queues, "q", "newer", partition="made later")
        found = await pop(queues, "q", group="g", partitions=5)
        assert sorted(values(found)) == ["new", "newer"]
        assert await queues.groups.lag("q", "g") == 2

    run(database_url, body)


def test_a_group_may_start_at_a_time_also_in_the_future(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", 1)
        (row,) = await queues.database.fetch("SELECT created_at FROM messages")
        await push(queues, "q", 2)
        past = row["created_at"].isoformat()
        assert values(await pop(queues, "q", group="past", subscription_from=past)) == [2]
        soon = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
        assert (await pop(queues, "q", group="soon", subscription_from=soon)).messages == []
        await push(queues, "q", 3)
        assert (await pop(queues, "q", group="soon")).messages == []
        await asyncio.sleep(1.1)
        await push(queues, "q", 4)
        assert values(await pop(queues, "q", group="soon", wait=True, timeout=5)) == [4]
        for wrong in ("yesterday", "2024-13-01T00:00:00Z"):
            with pytest.raises(InvalidRequest, match="subscriptionFrom"):
                await pop(queues, "q", group="x", subscription_from=wrong)
        with pytest.raises(InvalidRequest, match="subscriptionMode"):
            await pop(queues, "q", group="x", subscription_mode="sometimes")

    run(database_url, body)


def test_a_subscription_on_one_partition_says_nothing_about_the_others(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", "a", partition="a")
        await push(queues, "q", "b", partition="b")
        found = await pop(queues, "q", group="g", partition="a", subscription_mode="new")
        assert found.messages == []
        assert values(await pop(queues, "q", group="g", partitions=9)) == ["b"]

    run(database_url, body)


def test_deleting_a_queue_deletes_its_groups_and_their_subscriptions(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", "old")
        await pop(queues, "q", group="g", subscription_mode="new")
        assert await queues.admin.delete("q")
        assert not await queues.admin.delete("q")
        assert await queues.groups.listing() == []
        await push(queues, "q", "after")
        assert values(await pop(queues, "q", group="g")) == ["after"]
        await queues.upkeep.purge()
        rows = await queues.database.fetch("SELECT count(*) FROM messages")
        assert rows[0][0] == 1
        assert values(await pop(queues, "q", group="h")) == ["after"]

    run(database_url, body)


def test_a_waiting_pop_is_woken_by_a_push_an_ack_and_an_expiring_lease(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        loop = asyncio.get_running_loop()
        await queues.admin.configure("q", {"leaseTime": 1})
        waiting = asyncio.create_task(pop(queues, "q", wait=True, timeout=20))
        await asyncio.sleep(0.1)
        began = loop.time()
        await push(queues, "q", 1)
        held = await waiting
        assert values(held) == [1]
        waiting = asyncio.create_task(pop(queues, "q", wait=True, timeout=20))
        await push(queues, "q", 2)
        await complete(queues, held)
        assert values(await waiting) == [2]
        assert loop.time() - began < 0.9  # faster than any polling
        assert values(await pop(queues, "q", wait=True, timeout=20)) == [2]  # its lease ran out
        assert (await pop(queues, "empty", wait=True, timeout=0.05)).messages == []

    run(database_url, body, poll_interval=30)


def test_a_waiter_that_goes_away_holds_no_lease_and_costs_no_attempt(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"retryLimit": 0})
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
        assert queues.signals.waiting == 0
        assert values(await pop(queues, "q", wait=True, timeout=5)) == [1]
        rows = await queues.database.fetch(
            "SELECT (SELECT count(*) FROM attempts) + (SELECT count(*) FROM dead_letters)"
        )
        assert rows[0][0] == 0

    run(database_url, body)


def test_one_bad_request_fails_alone(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        async def pushed(item: Item) -> list[Pushed]:
            return await queues.push([item])

        good = [pushed(Item("q", str(n).encode())) for n in range(20)]
        bad: list[Awaitable[Any]] = [
            pushed(Item("q", b"1", trace_id="not a uuid")),
            pushed(Item("q", b"1", transaction_id="nul\x00")),
            pushed(Item("q", b"1", transaction_id="\ud800")),
            pushed(Item("", b"1")),
            pushed(Item("q", b"1", "p" * 5000)),
        ]
        mixed = await asyncio.gather(*good[:10], *bad, *good[10:], return_exceptions=True)
        assert sum(isinstance(result, InvalidRequest) for result in mixed) == 5
        assert sum(isinstance(result, list) for result in mixed) == 20
        assert len((await pop(queues, "q")).messages) == 20

    run(database_url, body)


def test_a_transaction_is_all_or_nothing(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "in", 1, 2, 3)
        popped = await pop(queues, "in")
        first, second, third = popped.messages
        done = await queues.transaction(
            [Item("out", b"10"), Ack(first.transaction_id, first.partition_id), Item("out", b"11")],
            [popped.lease_id],
        )
        assert done.success
        assert [type(result).__name__ for result in done.results] == ["Pushed", "Acked", "Pushed"]
        failures: list[tuple[list[Item | Ack], list[str], str]] = [
            ([Item("out", b"12"), Ack("nope", first.partition_id)], [], "Message not found"),
            (
                [
                    Item("out", b"12", transaction_id="x"),
                    Item("out", b"13", transaction_id="x"),
                    _ack(second),
                ],
                [],
                "duplicate",
            ),
            (
                [Item("out", b"12"), _ack(second)],
                ["00000000-0000-7000-8000-000000000000"],
                "required lease",
            ),
            (
                [
                    Item("out", b"12"),
                    Ack(second.transaction_id, second.partition_id, status="maybe"),
                ],
                [],
                "Unknown",
            ),
        ]
        for operations, leases, word in failures:
            failed = await queues.transaction(operations, leases)
            assert not failed.success
            assert word in (failed.error or "")
        await expire_leases(queues)
        stale = await queues.transaction([Item("out", b"12"), _ack(second)])
        assert "Invalid or expired lease" in (stale.error or "")
        assert values(await pop(queues, "out")) == [10, 11]
        assert values(await pop(queues, "in")) == [2, 3]
        assert third.seq == 3

    run(database_url, body)


def _ack(message: Any) -> Ack:
    return Ack(message.transaction_id, message.partition_id, message.lease_id, group=message.group)


def test_dead_letters_are_listed_put_back_and_purged(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"retryLimit": 0})
        await push(queues, "q", *range(6))
        for group in ("a", "b"):
            await answer(queues, (await pop(queues, "q", group=group)).messages, "failed", "bad")
        page = await queues.dead.listing(Which(queue="q", group="a"), limit=2, offset=1)
        assert (page["total"], [json.loads(d["data"]) for d in page["messages"]]) == (6, [4, 3])
        one = page["messages"][0]["dlqId"]
        assert await queues.dead.requeue(Which(id=one)) == 1
        assert values(await pop(queues, "q", group="a")) == [4]
        assert (await pop(queues, "q", group="b")).messages == []
        assert await queues.dead.purge(Which(group="a")) == 5
        await queues.admin.clear("q")
        assert (
            await queues.dead.requeue(Which(queue="q")) == 6
        )  # the originals are gone: copies are appended
        assert values(await pop(queues, "q", group="b")) == list(range(6))
        assert (await queues.dead.listing(Which()))["total"] == 0

    run(database_url, body)


def test_seek_moves_a_group_to_a_time_the_end_and_the_beginning(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        for number in range(4):
            await push(queues, "q", number, partition=f"p{number % 2}")
        (row,) = await queues.database.fetch(
            "SELECT max(created_at) AS t FROM messages WHERE seq = 1"
        )
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

    run(database_url, body)


def test_groups_are_listed_with_exact_lag_and_deleted(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", *range(7))
        await complete(queues, await pop(queues, "q", 3, group="g"))
        (entry,) = await queues.groups.listing(group="g")
        assert (entry["totalLag"], entry["partitionsWithLag"], entry["subscriptionMode"]) == (
            4,
            1,
            "all",
        )
        described = await queues.groups.describe("g")
        assert described["q"]["partitions"][0]["offsetLag"] == 4
        await queues.upkeep.roll_up()
        assert await queues.groups.lag("q", "g") == 4
        assert [row["offset_lag"] for row in await queues.groups.lagging(0)] == [4]
        gone = await queues.groups.delete("g")
        assert (gone["deletedPartitions"], gone["metadataDeleted"]) == (1, True)
        assert values(await pop(queues, "q", group="g")) == list(range(7))
        await pop(queues, "q", group="n", subscription_mode="new")
        await queues.groups.delete("n", "q", metadata=False)
        await push(queues, "q", "late")
        assert values(await pop(queues, "q", group="n")) == [
            "late"
        ]  # still starts where it subscribed

    run(database_url, body)


def test_messages_have_a_status_per_group_and_can_be_deleted_retried_and_buried(
    database_url: str,
) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", *range(4))
        popped = await pop(queues, "q", 3)
        await answer(queues, popped.messages[:1])
        await answer(queues, popped.messages[1:2], "dlq")
        found = await queues.messages.listing(queue="q")
        assert [m["status"] for m in found["messages"]] == [
            "pending",
            "processing",
            "dead_letter",
            "completed",
        ]
        assert len((await queues.messages.listing(queue="q", status="pending"))["messages"]) == 1
        first = popped.messages[0]
        detail = await queues.messages.detail(first.partition_id, first.transaction_id)
        assert (detail["payload"], detail["status"]) == (b"0", "completed")
        assert await queues.messages.retry(first.partition_id, first.transaction_id) == 1
        third = popped.messages[2]
        assert await queues.messages.delete(third.partition_id, third.transaction_id)
        assert not await queues.messages.delete(third.partition_id, third.transaction_id)
        again = await pop(queues, "q")  # the deleted one was the last open message of the lease
        assert values(again) == [0, 3]
        assert await queues.messages.bury(first.partition_id, first.transaction_id, error="enough")
        assert (await queues.dead.listing(Which()))["messages"][0]["errorMessage"] == "enough"
        with pytest.raises(NotFound):
            await queues.messages.detail(first.partition_id, "nope")

    run(database_url, body)


def test_traces_are_found_by_message_and_by_name(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", 1)
        (message,) = (await pop(queues, "q")).messages
        await queues.traces.add(
            message.partition_id, message.transaction_id, b'{"step":1}', names=["order-1"]
        )
        await queues.traces.add(
            message.partition_id, message.transaction_id, b'{"step":2}', event_type="done"
        )
        traces = await queues.traces.of_message(message.partition_id, message.transaction_id)
        assert [trace["data"] for trace in traces] == [b'{"step":1}', b'{"step":2}']
        named = await queues.traces.by_name("order-1")
        assert (named["total"], named["traces"][0]["message_payload"]) == (1, b"1")
        assert (await queues.traces.names())["trace_names"][0]["trace_count"] == 1
        with pytest.raises(NotFound):
            await queues.traces.add(message.partition_id, "nope", b"{}")

    run(database_url, body)


def test_encrypted_payloads_are_sealed_in_the_database_and_keys_rotate(database_url: str) -> None:
    async def first(queues: Queues) -> None:
        await queues.admin.configure("q", {"encryptionEnabled": True, "retryLimit": 0})
        await push(queues, "q", "secret one")
        (row,) = await queues.database.fetch("SELECT payload, key_id FROM messages")
        assert b"secret" not in row["payload"]
        assert row["key_id"] == "default"

    async def second(queues: Queues) -> None:
        await push(queues, "q", "secret two")
        popped = await pop(queues, "q")
        assert values(popped) == ["secret one", "secret two"]
        assert [
            row["key_id"]
            for row in await queues.database.fetch("SELECT key_id FROM messages ORDER BY seq")
        ] == [
            "default",
            "2027",
        ]
        await answer(queues, popped.messages, "failed")
        dead = await queues.dead.listing(Which())
        assert {d["data"] for d in dead["messages"]} == {b'"secret one"', b'"secret two"'}
        await queues.dead.requeue(Which())

    async def without(queues: Queues) -> None:
        with pytest.raises(Unavailable, match="no encryption key"):
            await queues.push([Item("q", b"1")])
        with pytest.raises(Unavailable, match="default"):
            await pop(queues, "q")
        with pytest.raises(InvalidRequest, match="encryption"):
            await queues.admin.configure("other", {"encryptionEnabled": True})
        assert (await queues.database.fetch("SELECT count(*) FROM messages"))[0][0] == 2

    run(database_url, first, encryption_key=KEY)
    run(database_url, second, encryption_key=KEY, encryption_keys={"2027": "22" * 32})
    run(database_url, without)


def test_retention_deletes_old_messages_and_completed_ones_sooner(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        options = {
            "retentionEnabled": True,
            "retentionSeconds": 3600,
            "completedRetentionSeconds": 60,
        }
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

    run(database_url, body)


def test_completed_retention_deletes_nothing_before_somebody_completed_it(
    database_url: str,
) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure(
            "q", {"retentionEnabled": True, "completedRetentionSeconds": 60}
        )
        await push(queues, "q", 1, 2)
        await _age(queues, "10 minutes")
        assert await queues.upkeep.retain() == 0  # there is no group yet: nobody has seen these
        await complete(queues, await pop(queues, "q", 1, group="a"))
        assert await queues.upkeep.retain() == 1
        assert values(await pop(queues, "q", group="b")) == [2]

    run(database_url, body)


def test_failing_a_batch_of_100_counts_one_attempt_for_each_of_the_100(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"retryLimit": 3, "retryDelay": 0})
        await push(queues, "q", *range(100))
        await answer(queues, (await pop(queues, "q", 100)).messages, "failed", "no")
        rows = await queues.database.fetch(
            "SELECT attempts, count(*) AS n FROM attempts GROUP BY 1"
        )
        assert [tuple(row) for row in rows] == [(1, 100)]
        assert values(await pop(queues, "q", 100)) == list(range(100))

    run(database_url, body)


def test_an_empty_partition_is_removed_when_it_was_idle_long_and_is_looked_at_once(
    database_url: str,
) -> None:
    async def body(queues: Queues) -> None:
        looks = "SELECT queue_tidy(clock_timestamp() + interval '1 day', 1000)"
        await push(queues, "q", 1, partition="full")
        await push(queues, "q", 2, partition="empty")
        await push(queues, "q", 3, partition="in use")
        await queues.admin.clear("q", "empty")
        await queues.database.fetch(
            "UPDATE partitions SET emptied_at = emptied_at - interval '2 days'"
        )
        await queues.upkeep.tidy()
        assert {row["name"] for row in await queues.admin.partitions("q")} == {
            "full",
            "empty",
            "in use",
        }  # 30 days
        assert (await queues.database.fetch(looks))[0][0] == 3
        assert {row["name"] for row in await queues.admin.partitions("q")} == {"full", "in use"}
        assert (await queues.database.fetch(looks))[0][
            0
        ] == 0  # those with messages are not looked at again
        await queues.admin.clear("q", "full")
        assert (await queues.database.fetch(looks))[0][0] == 1
        await push(queues, "q", "anew", partition="empty")
        assert {row["name"] for row in await queues.admin.partitions("q")} == {"empty", "in use"}
        assert sorted(map(str, values(await pop(queues, "q", partitions=5)))) == ["3", "anew"]

    run(database_url, body)


def test_eviction_deletes_only_what_some_group_has_not_taken_in_time(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", {"maxWaitTimeSeconds": 60})
        await push(queues, "q", *range(6))
        await complete(queues, await pop(queues, "q", 2))
        await _age(queues, "10 minutes")
        await push(queues, "q", "fresh")
        assert await queues.upkeep.evict() == 4
        assert await queues.groups.lag("q", "__QUEUE_MODE__") == 1
        assert values(await pop(queues, "q")) == ["fresh"]
        assert (await queues.status.queues(queue="q"))[0]["messages"]["total"] == 3

    run(database_url, body)


async def _age(queues: Queues, interval: str) -> None:
    await queues.database.fetch(
        f"UPDATE messages SET created_at = created_at - interval '{interval}'"
    )


def test_clearing_a_queue_empties_it_for_every_group_and_frees_its_leases(
    database_url: str,
) -> None:
    async def body(queues: Queues) -> None:
        await push(queues, "q", *range(5))
        await push(queues, "q", *range(5), partition="other")
        await pop(queues, "q", 2)
        await pop(queues, "q", group="g")
        assert await queues.admin.clear("q") == 10
        assert await queues.groups.lag("q", "g") == 0
        await push(queues, "q", "next")
        assert values(await pop(queues, "q")) == ["next"]
        assert values(await pop(queues, "q", group="g")) == ["next"]
        assert {p["messages"] for p in await queues.admin.partitions("q")} == {0, 1}

    run(database_url, body)


def test_an_old_client_without_batch_and_a_new_one_on_autopilot(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        for partition in range(3):
            await push(queues, "q", *range(5), partition=f"p{partition}")
        assert len((await queues.pop(PopRequest(queue="q", group="old"))).messages) == 1
        assert (
            len((await queues.pop(PopRequest(queue="q", group="new", autopilot=True))).messages)
            == 15
        )

    run(database_url, body)


def test_people_can_look_with_psql(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        (pushed,) = await queues.push([Item("q", b'{"amount": 5}', "p", "t-1")])
        rows = await queues.database.fetch(
            "SELECT queue, partition, id, partition_id, payload->>'amount' AS amount FROM queue_messages"
        )
        assert [tuple(map(str, row)) for row in rows] == [
            ("q", "p", pushed.message_id, pushed.partition_id, "5")
        ]

    run(database_url, body)


def test_payload_bytes_come_back_untouched(database_url: str) -> None:
    async def body(queues: Queues) -> None:
        payloads = [
            b"null",
            b"{}",
            b'{ "b":1,  "a":2, "a":3 }',
            b"1e400",
            '"ü\\u0000"'.encode(),
            b"[]",
        ]
        await queues.push([Item("q", payload) for payload in payloads])
        assert [message.payload for message in (await pop(queues, "q")).messages] == payloads

    run(database_url, body)
