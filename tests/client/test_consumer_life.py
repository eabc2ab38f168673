"""What happens around handlers: hooks, resources, log lines, and how consumers end together."""

import asyncio
import contextvars
import inspect
import logging
from typing import Any

import pytest

from penstock import Client, Message, SyncClient
from penstock.errors import InvalidRequest, PenstockError
from tests.client.support import consume_until
from tests.support.ports import free_port

current = contextvars.ContextVar[str]("current")


@pytest.mark.parametrize("threaded", [False, True])
async def test_hooks_run_around_each_call_and_see_its_exception(broker, queue, threaded):
    async with Client(broker.url) as client:
        events: list[Any] = []

        @client.lifespan
        async def resources():
            events.append("open")
            yield
            events.append("close")

        @client.around
        async def session(messages: list[Message]):
            token = current.set(f"session of {messages[0].data}")
            try:
                yield
            except ValueError as error:
                events.append(str(error))
                raise
            finally:
                current.reset(token)

        def work(message: Message) -> None:
            events.append(current.get())
            if message.data == "bad":
                raise ValueError("seen by the hook")

        async def work_async(message: Message) -> None:
            work(message)

        consumer = client.consumer(f"{queue}@g")(work if threaded else work_async)
        await client.configure(queue, retry_limit=0)
        await client.push_many(queue, ["good", "bad"])
        await consume_until(client, lambda: consumer.handled + consumer.failed == 2)
        assert events == [
            "open", "session of good", "session of bad", "seen by the hook", "close",
        ]  # fmt: skip


def test_plain_code_has_hooks_and_resources_too(broker, queue):
    with SyncClient(broker.url) as client:
        events: list[str] = []

        @client.lifespan
        def resources():
            events.append("open")
            yield
            events.append("close")

        @client.around
        def timed(messages):
            events.append(f"before {messages[0].data}")
            yield
            events.append("after")

        @client.consumer(f"{queue}@g")
        def handle(number: int) -> None:
            events.append("work")
            client.stop()

        client.push(queue, 1)
        client.run()
        assert events == ["open", "before 1", "work", "after", "close"]
        with pytest.raises(InvalidRequest, match="has no yield"):
            client.around(lambda messages: None)


def test_a_consumer_keeps_the_name_and_the_signature_of_its_function():
    client = Client()

    @client.consumer("orders")
    async def bill(order: dict[str, int], message: Message) -> None:
        """Bill an order."""

    assert (bill.__name__, bill.__doc__) == ("bill", "Bill an order.")
    assert list(inspect.signature(bill).parameters) == ["order", "message"]
    assert asyncio.run(bill({}, None)) is None


async def test_when_one_consumer_fails_the_others_end_and_the_error_is_raised(broker, queue):
    async with Client(broker.url) as client:
        before = asyncio.all_tasks()
        other = client.consumer(f"{queue}@g")(lambda message: None)
        client.consumer(queue, subscription_from="no time at all")(lambda message: None)
        with pytest.raises(PenstockError, match="subscriptionFrom"):
            async with asyncio.timeout(30):
                await client.run(handle_signals=False)
        assert other.in_flight == 0
        assert asyncio.all_tasks() == before, "no consumer is left behind"


async def test_a_consumer_logs_its_life_in_one_line_each_with_fields(broker, queue, caplog):
    caplog.set_level(logging.INFO, "penstock.client")
    async with Client(broker.url) as client:
        await client.configure(queue, retry_limit=1, retry_delay=200)
        await client.push(queue, 1, partition="p", transaction_id="t-1")

        @client.consumer(f"{queue}@g", concurrency=2, batch=16, name="biller")
        async def handle(message: Message) -> None:
            raise ValueError("no such customer")

        await consume_until(client, lambda: handle.failed == 2)
    lines = [record.getMessage() for record in caplog.records]
    failed = f"{queue}@g: t-1 in partition p,"
    assert lines == [
        f"ready: {queue}@g, concurrency 2, batch 16, prefetch while it pays",
        f"{failed} attempt 1 of 2: ValueError: no such customer; next attempt in 0.2 s",
        f"{failed} attempt 2 of 2: ValueError: no such customer; no further attempt",
        f"stopping: {queue}@g, 0 in progress",
    ]
    fields = vars(caplog.records[1])
    assert (fields["queue"], fields["group"], fields["consumer"]) == (queue, "g", "biller")
    assert (fields["transaction_id"], fields["attempt"], fields["outcome"]) == ("t-1", 1, "failed")
    assert fields["next_attempt_seconds"] == 0.2


async def test_an_outage_is_one_line_per_client_and_so_is_its_end(caplog):
    caplog.set_level(logging.INFO, "penstock.client")
    async with Client(f"http://127.0.0.1:{free_port()}") as client:
        for number in range(3):
            client.consumer(f"q-{number}", concurrency=8)(lambda message: None)
        tried = 0
        pop = client.pop

        async def counted(*args: Any, **options: Any) -> Any:
            nonlocal tried
            tried += 1
            return await pop(*args, **options)

        client.pop = counted  # type: ignore[method-assign]
        await consume_until(client, lambda: tried >= 48)
        client.outage.end()
    outages = [r.getMessage() for r in caplog.records if "broker" in r.getMessage()]
    assert len(outages) == 2, outages
    assert outages[0].startswith("consumers wait for a broker: ")
    assert outages[1].startswith("a broker answers the consumers again, after ")
