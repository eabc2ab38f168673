"""Consumers with state against a real broker process."""

import asyncio
from typing import Any

import asyncpg
import msgspec
import pytest

from penstock import Client, Message, Retry, State, SyncClient, backoff
from penstock.errors import Conflict, InvalidRequest
from tests.client.support import consume_until
from tests.docs.blocks import blocks
from tests.docs.tools import ROOT
from tests.support.wait import eventually, until


class Payment(msgspec.Struct):
    amount: int


async def balances(client: Client, queue: str) -> dict[str, int]:
    """What a consumer pushed last for each partition."""
    newest: dict[str, int] = {}
    async for message in client.take(f"{queue}-out@check", batch=100, idle=0.5):
        newest[message.partition] = message.data
        await message.ack()
    return newest


@pytest.mark.parametrize("batches", [False, True])
async def test_state_output_and_acknowledgement_are_one(broker, queue, batches):
    async with Client(broker.url) as client:
        for partition in ("a", "b"):
            await client.push_many(
                queue, [{"amount": n} for n in range(1, 11)], partition=partition
            )

        def book(payments: list[Payment], message: Message, state: State) -> None:
            state["balance"] = state.get("balance", 0) + sum(one.amount for one in payments)
            state["calls"] = state.get("calls", 0) + 1
            state.push(f"{queue}-out", state["balance"], partition=message.partition)

        if not batches:

            @client.consumer(f"{queue}@g", batch=4, partitions=2, state="v1")
            async def consumer(payment: Payment, message: Message, state: State) -> None:
                book([payment], message, state)

        else:

            @client.consumer(f"{queue}@g", batch=4, partitions=2, state="v1", batches=True)
            async def consumer(
                payments: list[Payment], messages: list[Message], state: State
            ) -> None:
                assert len({message.partition for message in messages}) == 1
                book(payments, messages[0], state)

        await consume_until(client, lambda: consumer.handled == 20)
        assert await balances(client, queue) == {"a": 55, "b": 55}
        assert await client.pop(f"{queue}@g") == []


async def test_a_failure_commits_what_was_done_before_and_keeps_the_order(broker, queue):
    async with Client(broker.url) as client:
        await client.configure(queue, retry_limit=3, retry_delay=10)
        await client.push_many(queue, [1, 2, 3, 4])
        seen: list[tuple[int, list[int]]] = []
        failures = [RuntimeError("not yet"), Retry()]

        @client.consumer(f"{queue}@g", batch=4, state="v1")
        async def collect(message: Message, state: State) -> None:
            before = state.get("seen", [])
            seen.append((message.data, before))
            state["seen"] = [*before, message.data]
            state.push(f"{queue}-out", message.data)
            if message.data == 3 and failures:
                raise failures.pop(0)

        await consume_until(client, lambda: collect.handled == 4 and not failures)
        assert seen == [
            (1, []), (2, [1]), (3, [1, 2]), (3, [1, 2]), (3, [1, 2]), (4, [1, 2, 3])
        ]  # fmt: skip
        out = [m.data async for m in client.take(f"{queue}-out", batch=9, idle=0.5)]
        assert out == [1, 2, 3, 4]


async def test_retry_decides_how_often_and_when_a_message_with_state_comes_again(broker, queue):
    async with Client(broker.url) as client:
        await client.push_many(queue, [1, 2], partition="p")
        attempts: list[tuple[int, int, int]] = []

        @client.consumer(
            f"{queue}@g", batch=2, state="v1", retry=backoff(2, first=0.2, jitter=False)
        )
        async def count(message: Message, state: State) -> None:
            attempts.append((message.data, message.attempt, state.get("n", 0)))
            state["n"] = state.get("n", 0) + 1
            if message.data == 1:
                raise RuntimeError("never")

        await consume_until(client, lambda: count.handled == 1)
        assert attempts == [(1, 1, 0), (1, 2, 0), (2, 1, 0)]
        assert (await client.admin.dead_letters(queue)).total == 1


async def test_what_cannot_be_stored_fails_the_messages_and_a_misfit_is_put_aside(broker, queue):
    async with Client(broker.url) as client:
        await client.configure(queue, retry_limit=0)
        await client.push_many(queue, [{"amount": 1}, {"amount": "much"}, {"amount": 0}])

        @client.consumer(f"{queue}@g", batch=1, state="v1")
        async def book(payment: Payment, state: State) -> None:
            if not payment.amount:
                state["k" * 600] = 1
            state["balance"] = payment.amount

        async def dead() -> bool:
            return (await client.admin.dead_letters(queue)).total == 2

        await consume_until(client, dead)
        errors = [one.error for one in (await client.admin.dead_letters(queue)).messages]
        assert sorted("longer than" in str(error) for error in errors) == [False, True]
        assert await client.pop(f"{queue}@g") == []


async def test_state_of_another_version_is_refused_unless_it_is_reset(broker, queue):
    async with Client(broker.url) as old, Client(broker.url) as refused, Client(broker.url) as new:
        states: dict[str, list[dict[str, Any]]] = {"v1": [], "v2": []}

        def consumer(client: Client, version: str, **options: Any) -> Any:
            @client.consumer(f"{queue}@g", state=version, **options)
            async def count(message: Message, state: State) -> None:
                states[version].append(dict(state))
                state[version] = state.get(version, 0) + 1

            return count

        first = consumer(old, "v1")
        old_run = asyncio.create_task(old.run(handle_signals=False))
        await old.push_many(queue, [0, 0], partition="p")
        await eventually(lambda: first.handled == 2)
        consumer(refused, "v2")
        with pytest.raises(Conflict, match="config_hash mismatch"):
            await refused.run(handle_signals=False)
        second = consumer(new, "v2", reset_state=True)
        new_run = asyncio.create_task(new.run(handle_signals=False))

        async def handled_by_the_new_one() -> bool:
            await new.push(queue, 0, partition="p")
            return old_run.done() and second.handled > 1

        await eventually(handled_by_the_new_one)
        with pytest.raises(Conflict, match="config_hash mismatch"):  # the old version has ended
            await old_run
        new.stop()
        await new_run
        assert states["v1"][:2] == [{}, {"v1": 1}]
        # a message that the old version handled and could not commit is handled again
        assert states["v2"] == [{}, *({"v2": n} for n in range(1, len(states["v2"])))]


async def test_a_queue_without_order_is_refused_with_the_remedy(broker, queue):
    async with Client(broker.url) as client:
        await client.push(queue, 1)
        client.consumer(queue, state="v1")(lambda message, state: None)
        with pytest.raises(InvalidRequest, match="has no order, which a consumer with state needs"):
            await client.run(handle_signals=False)


async def test_options_that_state_does_not_allow_are_refused(broker, queue):
    async with Client(broker.url) as client:
        with pytest.raises(InvalidRequest, match="auto_ack"):
            client.consumer(queue, state="v1", auto_ack=True)(lambda message, state: None)
        with pytest.raises(InvalidRequest, match="last one"):
            client.consumer(queue, state="v1")(lambda message: None)
        state = State({})
        for value in (object(), float("nan")):
            with pytest.raises((InvalidRequest, TypeError)):  # as a push of it
                state["x"] = value
        state["x"] = [1]
        state["x"].append(2)  # a copy
        assert (dict(state), len(state), "y" in state) == ({"x": [1]}, 1, False)


def test_a_function_that_is_not_async_has_state_too(broker, queue):
    with SyncClient(broker.url) as client:
        client.push_many(queue, [1, 2, 3], partition="p")

        @client.consumer(f"{queue}@g", batch=2, state="v1")
        def add(message: Message, state: State) -> None:
            state["sum"] = state.get("sum", 0) + message.data
            state.push(f"{queue}-out", state["sum"])
            if message.data == 3:
                client.stop()

        client.run(handle_signals=False)
        until(lambda: add.handled == 3)
        assert [m.data for m in client.pop(f"{queue}-out", batch=9)] == [1, 3, 6]


async def test_the_state_can_be_read_with_sql(broker, queue):
    """The statement of docs/how-to/stateful-consumers.md."""
    page = ROOT / "docs/how-to/stateful-consumers.md"
    (statement,) = [block.text for block in blocks(page) if block.language == "sql"]
    assert "payments@balances" in statement
    async with Client(broker.url) as client:

        @client.consumer(f"{queue}@g", state="v1")
        async def book(message: Message, state: State) -> None:
            state["balance"] = state.get("balance", 0) + message.data

        await client.push_many(queue, [30, -10], partition="p")
        await consume_until(client, lambda: book.handled == 2)
    connection = await asyncpg.connect(broker.database_url)
    try:
        rows = await connection.fetch(statement.replace("payments@balances", f"{queue}@g"))
    finally:
        await connection.close()
    assert [(row["partition"], row["key"], row["value"]) for row in rows] == [
        ("p", "balance", "20")
    ]
