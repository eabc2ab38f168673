"""`penstock.Client` and its sync facade against a real broker process."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import Client, SyncClient
from penstock.client import Message
from penstock.client.items import new_item
from penstock.errors import AckRefused, Conflict, InvalidRequest, QueueFull


def test_the_client_comes_from_the_package_root_without_the_server():
    code = "import sys; from penstock import Client; print([m for m in sys.modules if m.startswith('penstock.')])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "penstock.client.client" in loaded
    for part in ("server", "queues'", "database", "wire.http", "config"):
        assert f"penstock.{part}" not in loaded


async def test_push_take_ack_as_the_seeds_write_it(broker, queue):
    async with Client(broker.url) as client:
        pushed = await client.push(queue, {"id": 7}, partition="c-1")
        assert (pushed.status, pushed.index) == ("queued", 0)
        await client.push(f"{queue}/c-1", {"id": 8})
        seen = []
        async for message in client.take(f"{queue}@billing", batch=10, idle=0):
            seen.append(
                (message.data["id"], message.partition, message.consumer_group, message.queue)
            )
            await client.ack(message)
        assert seen == [(7, "c-1", "billing", queue), (8, "c-1", "billing", queue)]
        assert [
            m.data["id"] async for m in client.take(queue, batch=10, auto_ack=True, idle=0)
        ] == [7, 8]
        assert await client.pop(queue) == []


async def test_a_delayed_push_is_answered_with_its_time(broker, queue):
    async with Client(broker.url) as client:
        at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
        pushed = await client.push(queue, 1, deliver_at=at)
        assert (pushed.status, pushed.deliver_at) == ("scheduled", at)
        assert (await client.push(queue, 2)).deliver_at is None


async def test_a_taken_batch_goes_back_when_the_loop_is_left(broker, queue):
    async with Client(broker.url) as client:
        await client.push_many(queue, range(5))
        taking = client.take(queue, batch=5)
        first = await anext(taking)
        await client.ack(first)
        await taking.aclose()
        assert [m.data for m in await client.pop(queue, batch=9, wait=5)] == [1, 2, 3, 4]


async def test_take_ends_after_a_limit_or_when_idle(broker, queue):
    async with Client(broker.url) as client:
        await client.push_many(queue, range(5))
        assert [
            m.data async for m in client.take(f"{queue}@a", batch=10, limit=3, auto_ack=True)
        ] == [0, 1, 2]
        assert [
            m.data async for m in client.take(f"{queue}@a", batch=10, idle=0.2, auto_ack=True)
        ] == [3, 4]


async def test_leases_are_kept_while_messages_are_worked_on(broker, queue, caplog):
    async with Client(broker.url) as client, Client(broker.url) as other:
        await client.configure(queue, lease_time=1, retry_limit=0)
        await client.push(queue, "slow")
        (message,) = await client.pop(queue)
        assert await other.pop(queue, wait=2.5) == []
        await client.ack(message)
        assert await other.pop(queue, wait=1.0) == []
        assert "lease was lost" not in caplog.text, "it is not extended after its ack"
        assert (await client.admin.dead_letters(queue)).total == 0


async def test_messages_that_the_program_let_go_of_are_delivered_again(broker, queue):
    """A loop that was left, by an error of an ack or of the program."""
    async with Client(broker.url) as client:
        await client.configure(queue, lease_time=1)
        await client.push_many(queue, [1, 2, 3])
        for message in await client.pop(queue, batch=3):
            await client.ack(message)
            break
        assert [one.data for one in await client.pop(queue, batch=3, wait=30)] == [2, 3]


async def test_a_lost_lease_is_raised_with_the_results(broker, queue):
    async with Client(broker.url) as client:
        await client.configure(queue, lease_time=1)
        await client.push_many(queue, [1, 2])
        messages = await client.pop(queue, batch=2, renew=False)

        async def again() -> list[Message]:
            return await client.pop(queue, batch=2, wait=5)

        assert await again()
        with pytest.raises(
            AckRefused, match="2 of 2 acks refused: Invalid or expired lease"
        ) as caught:
            await client.ack(messages)
        assert [result.success for result in caught.value.results] == [False, False]


async def test_a_transaction_moves_a_message_on(broker, queue):
    async with Client(broker.url) as client:
        await client.push(queue, 1)
        (message,) = await client.pop(f"{queue}@g")
        async with client.transaction() as tx:
            tx.ack(message).push(f"{queue}-next", 2, partition="p")
        assert [step.type for step in tx.results] == ["ack", "push"]
        assert await client.pop(f"{queue}@g") == []
        assert [m.data for m in await client.pop(f"{queue}-next/p")] == [2]
        with pytest.raises(Conflict):
            async with client.transaction() as tx:
                tx.ack(message)


async def test_a_full_queue_raises_with_what_did_not_fit(broker, queue):
    async with Client(broker.url) as client:
        await client.configure(queue, max_size=1)
        with pytest.raises(QueueFull) as caught:
            await client.push_many(queue, [1, 2])
        assert [result.status for result in caught.value.results] == ["queued", "failed"]
        with pytest.raises(InvalidRequest, match="leaseTimes"):
            await client.configure(queue, leaseTimes=1)


async def test_more_messages_than_a_broker_takes_at_once_go_in_several_requests(broker, queue):
    async with Client(broker.url) as client:
        results = await client.push_many(queue, range(10_050))
        assert [result.index for result in results] == list(range(10_050))
        assert {result.status for result in results} == {"queued"}
        first = await client.pop(queue, batch=10_000, auto_ack=True)
        assert [message.data for message in first] == list(range(10_000))
        rest = await client.pop(queue, batch=10_000, auto_ack=True)
        assert [message.data for message in rest] == list(range(10_000, 10_050))


async def test_qos_0_goes_through_the_brokers_buffer(broker, queue):
    async with Client(broker.url) as client:
        pushed = await client.push(queue, "fast", buffer_ms=20, buffer_max=100)
        assert pushed.status == "buffered"
        assert [m.data for m in await client.pop(queue, wait=10)] == ["fast"]


def test_plain_code_uses_the_same_client(broker, queue):
    with SyncClient(broker.url) as client:
        client.configure(queue, retry_limit=0)
        assert client.push(queue, 1).status == "queued"
        client.push_many(queue, [2, 3, 4])
        with client.buffer() as buffer:
            buffer.push(queue, 5)
        taken = []
        for message in client.take(f"{queue}@g", batch=2, idle=0):
            taken.append(message.data)
            client.ack(message)
        assert taken == [1, 2, 3, 4, 5]
        (message,) = client.pop(queue)
        assert client.extend(message) is True
        with client.transaction() as tx:
            tx.ack(message, "dlq", error="no").push(f"{queue}-b", "moved")
        assert client.admin.dead_letters(queue).messages[0].error == "no"
        assert queue in [row.name for row in client.admin.queues()]
        assert client.admin.delete_queue(queue) is True
        assert client.close() == []


@pytest.mark.parametrize(
    "about",
    [
        {"headers": {"a": b"bytes"}},
        {"headers": {1: "a"}},
        {"headers": ["a"]},
        {"headers": {"a": "\ud800"}},
        {"delay": "5"},
        {"delay": -1},
        {"delay": float("nan")},
        {"delay": timedelta(seconds=-1)},
        {"deliver_at": "2030-01-01T00:00:00Z"},
        {"deliver_at": datetime(2030, 1, 1)},
        {"delay": 1, "deliver_at": datetime(2030, 1, 1, tzinfo=UTC)},
    ],
)
def test_what_a_message_cannot_have_is_refused_before_it_is_sent(about: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        new_item("q", 1, **about)


async def test_one_pop_takes_from_several_queues(broker, queue):
    addresses = [f"{queue}-a/c-1@billing", f"{queue}-b"]
    async with Client(broker.url) as client:
        for address, partition in (
            (f"{queue}-a", "c-2"),
            (f"{queue}-a", "c-1"),
            (f"{queue}-b", "x"),
        ):
            await client.push_many(
                address, [f"{partition}-{n}" for n in range(4)], partition=partition
            )
        first = await client.pop(addresses, batch=1)
        second = await client.pop(addresses, batch=9, wait=5)
        assert [m.data for m in [*first, *second]] == ["c-1-0", *(f"x-{n}" for n in range(4))]
        assert [(m.queue, m.consumer_group) for m in (first[0], second[0])] == [
            (f"{queue}-a", "billing"),
            (f"{queue}-b", "__QUEUE_MODE__"),
        ]
        await client.ack([*first, *second])
        await client.push_many(f"{queue}-b", ["y-0", "y-1"], partition="y")
        taken = []
        async for message in client.take(addresses, limit=5):
            taken.append(message.data)
            await message.ack()
        assert sorted(taken) == ["c-1-1", "c-1-2", "c-1-3", "y-0", "y-1"]
        assert {one[0] for one in taken[:2]} == {"c", "y"}  # they take turns


def test_the_plain_client_pops_from_several_queues(broker, queue):
    with SyncClient(broker.url) as client:
        client.push(f"{queue}-b", 1)
        [message] = client.pop([queue, f"{queue}-b"], wait=5)
        assert (message.queue, message.data) == (f"{queue}-b", 1)
        message.ack()
        assert [m.data for m in client.take([queue, f"{queue}-b"], idle=0)] == []


async def test_a_pop_names_several_addresses_or_a_namespace_and_not_both():
    async with Client("http://127.0.0.1:1", retry_for=0) as client:
        with pytest.raises(InvalidRequest, match="not both"):
            await client.pop(["orders", "mail"], namespace="shop")
        with pytest.raises(InvalidRequest, match="name a queue, a namespace or a task"):
            await client.pop()
