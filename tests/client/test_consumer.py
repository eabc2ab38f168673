"""Consumers against a real broker process: typed payloads, retries, health, an orderly end."""

import asyncio
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

from penstock import Client, DeadLetter, Message, Retry, SyncClient, SyncMessage, backoff
from penstock.errors import InvalidRequest
from tests.support.wait import eventually, until


class Struct(msgspec.Struct):
    id: int


@dataclass
class Data:
    id: int


class Model(pydantic.BaseModel):
    id: int


async def dead(client: Client, queue: str) -> dict[Any, str | None]:
    letters = (await client.admin.dead_letters(queue)).messages
    return {str(letter.data): letter.error for letter in letters}


@pytest.mark.parametrize("kind", [Struct, Data, Model])
async def test_a_payload_is_decoded_as_the_handler_says_and_one_that_does_not_fit_is_put_aside(
    broker, queue, kind
):
    async with Client(broker.url) as client:
        await client.push_many(queue, [{"id": 7}, {"id": "seven"}, {"id": 8}])
        orders: list[Any] = []

        @client.consumer(f"{queue}@g", batch=10)
        async def handle(order: kind, message: Message) -> None:
            orders.append((order, message.queue))

        running = asyncio.create_task(client.run())
        await eventually(lambda: len(orders) == 2)
        client.stop()
        await running
        assert orders == [(kind(id=7), queue), (kind(id=8), queue)]
        ((data, reason),) = (await dead(client, queue)).items()
        assert data == "{'id': 'seven'}"
        assert reason is not None
        assert reason.startswith(f"the payload does not fit {kind.__name__}: ")
        assert "id" in reason
        assert await client.pop(f"{queue}@g") == []


async def test_a_handler_of_batches_gets_the_payloads_that_fit(broker, queue):
    async with Client(broker.url) as client:
        await client.push_many(queue, [{"id": 1}, {"no": 2}, {"id": 3}])
        batches: list[Any] = []

        @client.consumer(queue, batch=10, batches=True)
        def handle(orders: list[Struct]) -> None:
            batches.append(orders)

        running = asyncio.create_task(client.run())
        await eventually(lambda: batches)
        client.stop()
        await running
        assert batches == [[Struct(1), Struct(3)]]
        assert len(await dead(client, queue)) == 1


def test_a_function_that_cannot_be_a_handler_is_refused_where_it_is_decorated():
    client = Client("http://127.0.0.1:1")

    def two(message: Message, other: str) -> None: ...
    def no_list(orders: Struct) -> None: ...
    def no_json(order: asyncio.Event) -> None: ...

    with pytest.raises(InvalidRequest, match="takes 2 arguments"):
        client.consumer("q")(two)
    with pytest.raises(InvalidRequest, match=r"annotate it as list\[...\]"):
        client.consumer("q", batches=True)(no_list)
    with pytest.raises(InvalidRequest, match="cannot be decoded as Event"):
        client.consumer("q")(no_json)
    with pytest.raises(InvalidRequest, match="retry= is not possible"):
        client.consumer("q", auto_ack=True, retry=backoff())(print)
    with pytest.raises(InvalidRequest, match="1 or more attempts"):
        backoff(0)
    assert client.consumer("q")(lambda message: message)("as it is") == "as it is"


async def test_a_consumer_answers_for_what_its_function_did(broker, queue):
    async with Client(broker.url) as client:
        await client.configure(queue, retry_limit=1, retry_delay=0)
        for name in ("good", "bad", "poison", "later"):
            await client.push(queue, name, partition=name)
        calls: list[str] = []

        @client.consumer(f"{queue}@g", concurrency=3)
        async def handle(message: Message) -> None:
            calls.append(message.data)
            if message.data == "bad":
                raise ValueError("no good")
            if message.data == "poison":
                raise DeadLetter("never")
            if message.data == "later" and calls.count("later") < 3:
                raise Retry(delay=0.1 if calls.count("later") == 1 else 0)

        running = asyncio.create_task(client.run())

        async def settled() -> bool:
            letters = await client.admin.dead_letters(queue)
            return letters.total == 2 and calls.count("later") == 3

        await eventually(settled)
        client.stop()
        await running
        assert (calls.count("good"), calls.count("bad"), calls.count("poison")) == (1, 2, 1)
        letters = await dead(client, queue)
        assert letters["poison"] == "never"
        assert letters["bad"].startswith("ValueError: no good\n\nTraceback (most recent call")
        assert 'in handle\n    raise ValueError("no good")\n' in letters["bad"]
        assert "penstock/client" not in letters["bad"], "the frames of the program only"
        assert await client.admin.requeue(queue, group="g") == 2


async def test_a_consumer_may_be_a_plain_function_and_take_batches(broker, queue):
    async with Client(broker.url) as client:
        await client.push_many(queue, range(10))
        batches: list[list[Any]] = []

        @client.consumer(queue, batch=5, batches=True)
        def handle(messages: list[Message]) -> None:
            batches.append([message.data for message in messages])

        running = asyncio.create_task(client.run())
        await eventually(lambda: sum(map(len, batches)) == 10)
        client.stop()
        await running
        assert batches == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        assert await client.pop(queue) == []


async def pops_wait(client: Client, count: int) -> bool:
    return (await client.status()).waiting_pops == count


async def test_stopping_a_consumer_does_not_wait_for_its_long_poll(broker, queue):
    async with Client(broker.url) as client:
        client.consumer(queue, concurrency=4)(lambda message: None)
        running = asyncio.create_task(client.run())
        await eventually(lambda: pops_wait(client, 4))
        async with asyncio.timeout(20):
            client.stop()
            await running


async def test_the_answer_to_the_last_message_is_stored_while_the_next_pop_waits(broker, queue):
    async with Client(broker.url) as client:
        await client.push(queue, 1)
        client.consumer(f"{queue}@g")(lambda message: None)
        running = asyncio.create_task(client.run())

        async def done() -> bool:
            return [(row.completed, row.waiting) for row in await client.admin.groups()
                    if row.queue == queue] == [(1, 0)]  # fmt: skip

        await eventually(done)
        await eventually(lambda: pops_wait(client, 1))
        client.stop()
        await running
        assert await client.pop(f"{queue}@g") == []


async def test_the_health_of_consumers_is_told_while_they_run(broker, queue, monkeypatch):
    monkeypatch.setattr("penstock.client.health.REPORT_SECONDS", 0.1)

    async with Client(broker.url) as client, Client(broker.url) as operator:
        await client.push(queue, "bad")
        await client.push(queue, "slow", partition="p")
        release = asyncio.Event()

        @client.consumer(f"{queue}@g", concurrency=2, name="biller")
        async def handle(message: Message) -> None:
            if message.data == "bad":
                raise DeadLetter("no such customer")
            await release.wait()

        running = asyncio.create_task(client.run())

        async def reported() -> bool:
            result = await operator.admin.consumers(queue, group="g")
            return [(one.name, one.in_flight, one.failed, one.last_error) for one in result] == [
                ("biller", 1, 1, "DeadLetter: no such customer")
            ]

        await eventually(reported, 60)
        release.set()
        client.stop()
        await running
        assert await operator.admin.consumers(queue) == []


def test_plain_code_consumes_with_plain_messages(broker, queue):
    with SyncClient(broker.url) as client:
        client.push(queue, {"id": 1}, headers={"tenant": "a"})
        seen: list[Any] = []

        @client.consumer(f"{queue}@g")
        def handle(order: Struct, message: SyncMessage) -> None:
            seen.append((order.id, message.headers, message.extend(20)))
            client.stop()

        client.run()
        assert seen == [(1, {"tenant": "a"}, True)]
        (message,) = client.pop(queue)
        message.ack()
        assert client.pop(queue) == []


PROGRAM = """
    import asyncio, sys, time
    from pathlib import Path
    from penstock import Client, SyncClient

    client = (Client if sys.argv[3] == "async" else SyncClient)(sys.argv[1])
    told = Path(sys.argv[4])

    if sys.argv[3] == "async":
        @client.consumer(sys.argv[2])
        async def handle(message):
            print("begun", flush=True)
            while not told.exists():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            print("done", flush=True)

        async def main():
            async with client:
                await client.run()
        asyncio.run(main())
    else:
        @client.consumer(sys.argv[2])
        def handle(message):
            print("begun", flush=True)
            while not told.exists():
                time.sleep(0.01)
            time.sleep(0.1)
            print("done", flush=True)

        with client:
            client.run()
    print("ended", flush=True)
"""


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_sigterm_lets_a_program_finish_what_it_handles(broker, queue, tmp_path: Path, kind):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    with SyncClient(broker.url) as client:
        client.push_many(queue, [1, 2])
        output, told = tmp_path / "output", tmp_path / "told"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, program, broker.url, queue, kind, told], stdout=file
            )
        until(lambda: "begun" in output.read_text(), 60, "the handler runs")
        process.send_signal(signal.SIGTERM)
        told.touch()
        assert process.wait(60) == 0
        assert output.read_text().split() == ["begun", "done", "ended"]
        assert [message.data for message in client.pop(queue, wait=10)] == [2]


async def test_a_consumer_fetches_ahead_and_gives_back_what_it_did_not_begin(broker, queue):
    async with Client(broker.url) as client, Client(broker.url) as other:
        for partition in ("a", "b", "c"):
            await client.push_many(queue, [partition], partition=partition)
        begun: list[Any] = []
        go_on = asyncio.Event()

        @client.consumer(f"{queue}@g", prefetch=True)
        async def handle(payload: str) -> None:
            begun.append(payload)
            await go_on.wait()

        async def two_leased() -> bool:
            return (await client.admin.describe(queue)).leased == 2

        running = asyncio.create_task(client.run())
        await eventually(lambda: begun)
        # the one it handles and the one it has ready
        await eventually(two_leased)
        client.stop()
        go_on.set()
        await running
        assert len(begun) == 1
        rest = await other.pop(f"{queue}@g", batch=10, partitions=10)
        assert sorted(one.data for one in rest) == sorted({"a", "b", "c"} - set(begun))
        assert await dead(client, queue) == {}
        assert handle.handled == 1


async def test_in_a_queue_of_one_partition_an_answer_does_not_wait_for_the_fetch_ahead(
    broker, queue
):
    async with Client(broker.url) as client:
        await client.configure(queue, ordering="partition")
        await client.push_many(queue, list(range(5)))
        seen: list[int] = []

        @client.consumer(f"{queue}@g", prefetch=True)
        async def handle(number: int) -> None:
            seen.append(number)
            if number == 2 and seen.count(2) == 1:
                raise Retry

        running = asyncio.create_task(client.run())
        await eventually(lambda: len(seen) == 6)
        client.stop()
        await running
        assert seen == [0, 1, 2, 2, 3, 4]
        assert await client.pop(f"{queue}@g") == []


async def test_a_loop_that_fetches_ahead_gives_back_what_it_did_not_begin(broker, queue):
    async with Client(broker.url) as client, Client(broker.url) as other:
        for partition in ("a", "b", "c"):
            await client.push_many(queue, [partition], partition=partition)
        seen = []
        async for message in client.take(f"{queue}@g", prefetch=True):
            seen.append(message.data)
            await message.ack()
            if len(seen) == 1:
                continue
            break
        rest = await other.pop(f"{queue}@g", batch=10, wait=10.0)
        assert sorted([*seen, *(one.data for one in rest)]) == ["a", "b", "c"]
        with pytest.raises(InvalidRequest, match="prefetch would lose"):
            client.consumer(queue, auto_ack=True, prefetch=True)(print)
    with SyncClient(broker.url) as plain:
        plain.push_many(f"{queue}-2", list(range(7)))
        taken = plain.take(f"{queue}-2", batch=2, limit=7, prefetch=True)
        numbers = []
        for message in taken:
            numbers.append(message.data)
            message.ack()
        assert numbers == list(range(7))
