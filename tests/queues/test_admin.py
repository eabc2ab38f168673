"""Queues configured, cleared and deleted; messages looked at, one by one and with psql."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.errors import Conflict, InvalidRequest, NotFound, Unavailable
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Ack, Item, Queues
from penstock.queues.admin.dead_letters import Which
from penstock.queues.admin.messages import MessageFilter
from penstock.queues.options import parse
from tests.queues.support import answer, complete, pop, push, running, values
from tests.support.form import pick

KEY = "11" * 32


async def test_unknown_options_and_wrong_types_are_named(queues: Queues) -> None:
    for options, word in (
        ({"leasetime": 1}, "leasetime"),
        ({"leaseTime": "soon"}, "leaseTime"),
        ({"leaseTime": True}, "leaseTime"),
        ({"retryLimit": -1}, "retryLimit"),
        ({"ordering": "random"}, "ordering"),
        ({"retentionEnabled": 1}, "retentionEnabled"),
    ):
        with pytest.raises(InvalidRequest, match=word):
            parse(options)
    with pytest.raises(InvalidRequest, match="leaseTime"):
        await queues.admin.configure("q", QueueOptions(lease_time=-1))
    with pytest.raises(InvalidRequest, match="queue"):
        await queues.admin.configure("")
    configured = await queues.admin.configure("q", QueueOptions(lease_time=7))
    assert configured.options.lease_time == 7
    configured = await queues.admin.configure("q", QueueOptions(retry_limit=1))
    assert configured.options.lease_time == 300


async def test_deleting_a_queue_deletes_its_groups_and_their_subscriptions(queues: Queues) -> None:
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


async def test_messages_have_a_status_per_group_and_can_be_deleted_retried_and_buried(
    queues: Queues,
) -> None:
    await push(queues, "q", *range(4))
    popped = await pop(queues, "q", 3)
    await answer(queues, popped.messages[:1])
    await answer(queues, popped.messages[1:2], "dlq")
    page = await queues.messages.listing(MessageFilter(queue="q"))
    assert [message.state for message in page.messages] == [
        "waiting",
        "leased",
        "dead_letter",
        "completed",
    ]
    page = await queues.messages.listing(MessageFilter(queue="q", state="waiting"))
    assert len(page.messages) == 1
    first = popped.messages[0]
    detail = await queues.messages.detail(first.partition_id, first.transaction_id)
    assert (detail.payload, detail.state) == (b"0", "completed")
    assert await queues.messages.retry(first.partition_id, first.transaction_id) == 1
    third = popped.messages[2]
    assert await queues.messages.delete(third.partition_id, third.transaction_id)
    assert not await queues.messages.delete(third.partition_id, third.transaction_id)
    again = await pop(queues, "q")  # the deleted one was the last open message of the lease
    assert values(again) == [0, 3]
    assert await queues.messages.move_to_dead_letters(
        first.partition_id, first.transaction_id, error="enough"
    )
    assert (await queues.dead.listing(Which())).messages[0].error == "enough"
    with pytest.raises(NotFound):
        await queues.messages.detail(first.partition_id, "nope")


async def test_traces_are_found_by_message_and_by_name(queues: Queues) -> None:
    await push(queues, "q", 1)
    (message,) = (await pop(queues, "q")).messages
    await queues.traces.add(
        message.partition_id, message.transaction_id, b'{"step":1}', names=["order-1"]
    )
    await queues.traces.add(
        message.partition_id, message.transaction_id, b'{"step":2}', event_type="done"
    )
    traces = await queues.traces.of_message(message.partition_id, message.transaction_id)
    assert [trace.data for trace in traces] == [b'{"step":1}', b'{"step":2}']
    named = await queues.traces.by_name("order-1")
    assert named.total == 1
    assert named.traces[0].message is not None
    assert named.traces[0].message.payload == b"1"
    assert (await queues.traces.names()).names[0].trace_count == 1
    with pytest.raises(NotFound):
        await queues.traces.add(message.partition_id, "nope", b"{}")


async def test_encrypted_payloads_are_sealed_in_the_database_and_keys_rotate(
    database_url: str,
) -> None:
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
        assert {letter.data for letter in dead.messages} == {b'"secret one"', b'"secret two"'}
        await queues.dead.requeue(Which())

    async with running(database_url, encryption_key=KEY) as queues:
        await queues.admin.configure("q", QueueOptions(encryption_enabled=True, retry_limit=0))
        await push(queues, "q", "secret one")
        (row,) = await queues.database.fetch("SELECT payload, key_id FROM messages")
        assert b"secret" not in row["payload"]
        assert row["key_id"] == "default"
    async with running(
        database_url, encryption_key=KEY, encryption_keys={"2027": "22" * 32}
    ) as queues:
        await second(queues)
    async with running(database_url) as queues:
        with pytest.raises(Unavailable, match="no encryption key"):
            await queues.push([Item("q", b"1")])
        with pytest.raises(Unavailable, match="default"):
            await pop(queues, "q")
        with pytest.raises(InvalidRequest, match="encryption"):
            await queues.admin.configure("other", QueueOptions(encryption_enabled=True))
        assert (await queues.database.fetch("SELECT count(*) FROM messages"))[0][0] == 2


async def test_clearing_a_queue_empties_it_for_every_group_and_frees_its_leases(
    queues: Queues,
) -> None:
    await push(queues, "q", *range(5))
    await push(queues, "q", *range(5), partition="other")
    await pop(queues, "q", 2)
    await pop(queues, "q", group="g")
    assert await queues.admin.clear("q") == 10
    assert await queues.groups.lag("q", "g") == 0
    await push(queues, "q", "next")
    assert values(await pop(queues, "q")) == ["next"]
    assert values(await pop(queues, "q", group="g")) == ["next"]
    assert {partition.messages for partition in await queues.admin.partitions("q")} == {0, 1}


async def test_people_can_look_with_psql(queues: Queues) -> None:
    (pushed,) = await queues.push([Item("q", b'{"amount": 5}', "p", "t-1")])
    rows = await queues.database.fetch(
        "SELECT queue, partition, id, partition_id, payload->>'amount' AS amount FROM queue_messages"
    )
    assert [tuple(map(str, row)) for row in rows] == [
        ("q", "p", pushed.message_id, pushed.partition_id, "5")
    ]


async def assert_that_a_group_gets_all_that_is_stored(queues: Queues, name: str) -> None:
    loop = asyncio.get_running_loop()
    if await queues.groups.listing(name):
        await queues.groups.seek(name, "q", to="beginning")
    ((stored,),) = await queues.database.fetch(
        "SELECT count(*) FROM messages JOIN queues q ON q.id = queue_id WHERE q.name = 'q'"
    )
    assert stored > 0
    seen, deadline = 0, loop.time() + 60
    while seen < stored or await queues.groups.lag("q", name) > 0:
        assert loop.time() < deadline, f"{name} got {seen} of {stored}"
        messages = await pop(queues, "q", 1000, group=name, partitions=100, wait=True, timeout=3)
        seen += len(messages.messages)
        await complete(queues, messages)


async def test_queues_and_groups_deleted_configured_and_moved_under_load_leave_nobody_without_an_answer(
    queues: Queues,
) -> None:
    """Whoever is refused gets a reason; nothing waits for a statement's timeout, and all counts are
    right.
    """

    loop = asyncio.get_running_loop()
    end = loop.time() + pick(short=1.5, usual=4, soak=40)
    chance = random.Random(4)

    async def produce() -> None:
        while loop.time() < end:
            await queues.push([Item("q", b"1", str(chance.randrange(12))) for _ in range(10)])

    async def consume(group: str) -> None:
        while loop.time() < end:
            messages = await pop(queues, "q", group=group, partitions=6, wait=True, timeout=0.2)
            chance.shuffle(messages.messages)
            if chance.random() < 0.3 and messages.messages:
                acks = [
                    Ack(m.transaction_id, m.partition_id, group=group) for m in messages.messages
                ]
                await queues.transaction([*acks, Item("q", b"2", str(chance.randrange(12)))])
            else:
                await answer(
                    queues,
                    messages.messages,
                    chance.choice(["completed", "completed", "failed", "dlq"]),
                )

    async def disturb(pause: float, what: Callable[[], Awaitable[Any]]) -> None:
        while loop.time() < end:
            await asyncio.sleep(pause * chance.random())
            with contextlib.suppress(NotFound, Conflict):
                await what()

    def group() -> str:
        return chance.choice("ab")

    def options() -> QueueOptions:
        return QueueOptions(
            ordering="none" if chance.random() < 0.5 else "partition",
            retry_limit=1,
            max_size=chance.choice([0, 500]),
        )

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
    await queues.admin.configure("q", QueueOptions(lease_time=1, retry_delay=0))
    await push(queues, "q", "last", partition="last")
    for name in "ab":
        await assert_that_a_group_gets_all_that_is_stored(queues, name)
