"""What an acknowledgement does to a message, its attempts and its lease."""

import asyncio
import json
from uuid import UUID

import pytest

from penstock.errors import InvalidRequest
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Ack, Queues, calls
from penstock.queues.admin.dead_letters import Which
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


async def test_a_failed_message_beside_completed_ones_comes_back_alone(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(retry_delay=0))
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


async def test_acks_out_of_order_twice_and_late_lose_nothing_and_release_nothing_early(
    queues: Queues,
) -> None:
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


async def test_acks_without_a_lease_id_settle_and_unknown_ones_are_not_found(
    queues: Queues,
) -> None:
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


@pytest.mark.parametrize("ordering", ["partition", "none"])
async def test_attempts_belong_to_the_message_and_end_in_the_dead_letters(
    queues: Queues, ordering: str
) -> None:
    await queues.admin.configure("q", QueueOptions(retry_limit=2, retry_delay=0, ordering=ordering))
    await push(queues, "q", *range(10))
    for attempt in range(3):
        popped = await pop(queues, "q", group="g")
        assert values(popped) == list(range(10)), attempt
        acked = await answer(queues, popped.messages, "failed", f"boom {attempt}")
        assert [a.dlq for a in acked] == [attempt == 2] * 10
    assert (await pop(queues, "q", group="g")).messages == []
    dead = await queues.dead.listing(Which(queue="q", group="g"))
    assert dead.total == 10
    assert {(letter.error, letter.attempts) for letter in dead.messages} == {("boom 2", 3)}
    assert sorted(int(letter.data or b"") for letter in dead.messages) == list(range(10))
    assert await queues.groups.lag("q", "g") == 0


@pytest.mark.parametrize("ordering", ["partition", "none"])
async def test_an_expired_lease_counts_an_attempt_and_retry_does_not(
    queues: Queues, ordering: str
) -> None:
    await queues.admin.configure("q", QueueOptions(retry_limit=1, retry_delay=0, ordering=ordering))
    await push(queues, "q", "poison")
    for _ in range(5):
        await answer(queues, (await pop(queues, "q")).messages, "retry")
    assert values(await pop(queues, "q")) == ["poison"]
    await expire_leases(queues)
    assert values(await pop(queues, "q")) == ["poison"]
    await expire_leases(queues)
    assert (await pop(queues, "q")).messages == []
    (dead,) = (await queues.dead.listing(Which(queue="q"))).messages
    assert "lease expired" in dead.error
    assert dead.attempts == 2


async def test_a_message_can_be_sent_straight_to_the_dead_letters(queues: Queues) -> None:
    await push(queues, "q", 1, 2)
    messages = (await pop(queues, "q")).messages
    (acked,) = await answer(queues, messages[:1], "dlq", "no good")
    assert acked.dlq
    (dead,) = (await queues.dead.listing(Which())).messages
    assert (dead.error, dead.group) == ("no good", "__QUEUE_MODE__")


async def test_without_a_dead_letter_queue_exhausted_messages_are_dropped_and_counted(
    queues: Queues,
) -> None:
    for option, options in (
        ("deadLetterQueue", QueueOptions(retry_limit=0, dead_letter_queue=False)),
        ("dlqAfterMaxRetries", QueueOptions(retry_limit=0, dlq_after_max_retries=False)),
    ):
        await queues.admin.configure(option, options)
        await push(queues, option, 1)
        (acked,) = await answer(queues, (await pop(queues, option)).messages, "failed")
        assert not acked.dlq
        assert (await pop(queues, option)).messages == []
        assert (await queues.dead.listing(Which(queue=option))).total == 0
        assert (await queues.status.queue(option)).counts.dropped == 1


async def test_the_retry_delay_is_waited_for_and_strict_order_waits_with_it(queues: Queues) -> None:
    for ordering, meanwhile in (("partition", []), ("none", [2])):
        await queues.admin.configure(ordering, QueueOptions(retry_delay=60_000, ordering=ordering))
        await push(queues, ordering, 1)
        await answer(queues, (await pop(queues, ordering)).messages, "failed")
        await push(queues, ordering, 2)
        assert values(await pop(queues, ordering)) == meanwhile
        await skip_delays(queues)
        await queues.database.fetch(
            "UPDATE cursors SET due_at = clock_timestamp(), version = version + 1 WHERE due_at IS NOT NULL"
        )
        assert values(await pop(queues, ordering)) == ([1] if meanwhile else [1, 2])


async def test_one_lease_per_partition_under_partition_order_many_under_none(
    queues: Queues,
) -> None:
    await queues.admin.configure("strict")
    await queues.admin.configure("shared", QueueOptions(ordering="none"))
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


async def test_extending_never_shortens_and_an_ended_lease_is_refused(queues: Queues) -> None:
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


async def test_an_extended_lease_is_not_taken_over(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(lease_time=1))
    await push(queues, "q", 1)
    popped = await pop(queues, "q")
    assert (await queues.extend(popped.lease_id, 600)).success
    assert (await pop(queues, "q", wait=True, timeout=1.2)).messages == []
    await complete(queues, popped)


async def test_failing_a_batch_of_100_counts_one_attempt_for_each_of_the_100(
    queues: Queues,
) -> None:
    await queues.admin.configure("q", QueueOptions(retry_limit=3, retry_delay=0))
    await push(queues, "q", *range(100))
    await answer(queues, (await pop(queues, "q", 100)).messages, "failed", "no")
    rows = await queues.database.fetch("SELECT attempts, count(*) AS n FROM attempts GROUP BY 1")
    assert [tuple(row) for row in rows] == [(1, 100)]
    assert values(await pop(queues, "q", 100)) == list(range(100))


async def test_acknowledging_part_of_a_lease_costs_the_same_however_many_leases_the_partition_has(
    database_url: str,
) -> None:
    async def body(queues: Queues) -> None:
        await queues.admin.configure("q", QueueOptions(ordering="none"))

        async def blocks() -> int:
            """Pages that acknowledging one message of two looks at."""
            await push(queues, "q", 1, 2)
            message = (await pop(queues, "q", 2)).messages[0]
            ((plan,),) = await queues.database.fetch(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {calls.SETTLE}",
                *(
                    [0],
                    [queues.catalog.partition_id(message.partition_id)],
                    [message.group],
                    [UUID(message.lease_id)],
                ),
                *(["completed"], [None], [message.transaction_id], *[None] * 6),
            )
            return int(json.loads(plan)[0]["Plan"]["Shared Hit Blocks"])

        await blocks()
        few = await blocks()
        await push(queues, "q", *range(600))
        await asyncio.gather(*(pop(queues, "q", 1) for _ in range(600)))
        assert await blocks() < few + 12

    async with running(database_url, {"pool_size": 1, "acquire_timeout": 20.0}) as queues:
        await body(queues)


async def test_deliveries_are_recorded_of_queues_that_ask_and_only_while_they_do(
    queues: Queues,
) -> None:
    fetch = queues.database.fetch

    async def deliveries() -> list[tuple[str, str]]:
        rows = await fetch(
            """SELECT q.name, d.seqs::text FROM deliveries d JOIN queues q ON q.id = d.queue_id
                    WHERE d.ended_at >= d.taken_at ORDER BY d.ended_at"""
        )
        return [tuple(row) for row in rows]

    async def triggers() -> int:
        rows = await fetch(
            "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'leases'::regclass AND NOT tgisinternal"
        )
        return int(rows[0][0])

    for queue in ("q", "silent"):
        await push(queues, queue, *range(4))
    assert await triggers() == 0, "nobody asked, nobody pays"
    await queues.admin.configure("q", QueueOptions(record_deliveries=True, retry_delay=0))
    assert await triggers() == 2
    await complete(queues, await pop(queues, "silent"))
    messages = (await pop(queues, "q")).messages
    await answer(queues, messages[:1])
    await answer(queues, messages[1:2], "failed")
    await answer(queues, messages[2:])
    await complete(queues, await pop(queues, "q"))
    assert await deliveries() == [
        *(("q", "{[1,2)}"), ("q", "{[2,3)}"), ("q", "{[3,5)}"), ("q", "{[2,3)}")),
    ]
    await fetch(
        "UPDATE deliveries SET ended_at = now() - interval '8 days' WHERE seqs @> 1::bigint"
    )
    await queues.upkeep.tidy()
    assert len(await deliveries()) == 3
    await queues.admin.configure("q", QueueOptions())
    assert await triggers() == 0
