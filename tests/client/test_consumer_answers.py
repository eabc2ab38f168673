"""What a consumer answers when its function misbehaves, its broker fails or its client closes."""

import asyncio
import threading
from typing import Any

import pytest

from penstock import Client, Message
from penstock.client import DeadLetter
from penstock.wire.http.messages import EMPTY, Request, Response
from tests.client.scripted import Stocked, raising
from tests.support.http import serving
from tests.support.wait import eventually


async def test_what_take_fetched_and_did_not_hand_out_goes_back_when_the_client_is_closed() -> None:
    broker = Stocked(1, 2, 3)
    async with serving(*broker.routes) as server:
        async with Client(server.url) as client:
            async for message in client.take("q", batch=3):
                await client.ack(message)
                break
        assert broker.answers == {"0": "completed", "1": "retry", "2": "retry"}


async def test_a_take_that_is_cancelled_gives_back_what_it_had() -> None:
    broker = Stocked(1, 2, 3)
    got = asyncio.Event()

    async def work(client: Client) -> None:
        async for _ in client.take("q", batch=3):
            got.set()
            await asyncio.Event().wait()

    async with serving(*broker.routes) as server, Client(server.url) as client:
        working = asyncio.create_task(work(client))
        await got.wait()
        working.cancel()
        await eventually(lambda: broker.answers == {"1": "retry", "2": "retry"})


async def test_closing_lets_a_handler_finish_and_answer() -> None:
    broker, begun, go_on = Stocked(1), asyncio.Event(), asyncio.Event()
    async with serving(*broker.routes) as server:
        client = Client(server.url)

        @client.consumer("q")
        async def handle(_: Any) -> None:
            begun.set()
            await go_on.wait()

        running = asyncio.create_task(client.run())
        await begun.wait()
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0.01)
        go_on.set()
        assert await closing == []
        await running
    assert broker.answers == {"0": "completed"}


@pytest.mark.parametrize("threaded", [True, False])
async def test_whatever_a_handler_raises_is_an_answer_and_the_consumer_goes_on(
    threaded: bool,
) -> None:
    errors = [ValueError("a \0"), StopIteration(), asyncio.CancelledError(), DeadLetter("no")]
    broker = Stocked(*range(5))
    async with serving(*broker.routes) as server, Client(server.url) as client:
        plain = raising(*errors)

        async def handle(message: Any) -> None:
            plain(message)

        client.consumer("q")(plain if threaded else handle)
        running = asyncio.create_task(client.run())
        await eventually(lambda: len(broker.acks) == 5)
        client.stop()
        await running
    assert list(broker.answers.values()) == ["failed", "failed", "failed", "dlq", "completed"]
    assert broker.acks[0]["error"].startswith("ValueError: a \ufffd\n\nTraceback")


async def test_a_reason_that_is_no_text_is_sent_as_far_as_it_is_one() -> None:
    broker = Stocked(1)
    async with serving(*broker.routes) as server, Client(server.url) as client:
        await client.ack(await client.pop("q"), "failed", error="half a pair: \ud800")
    assert broker.acks[0]["error"] == "half a pair: ?"


async def test_plain_functions_run_as_many_at_a_time_as_asked_for() -> None:
    with_all = threading.Barrier(
        16, timeout=10
    )  # more than the loop's own threads on a small machine

    broker = Stocked(*range(16))
    async with serving(*broker.routes) as server, Client(server.url) as client:

        @client.consumer("q", concurrency=16)
        def handle(_: Any) -> None:
            with_all.wait()

        running = asyncio.create_task(client.run())
        await eventually(lambda: len(broker.acks) == 16)
        client.stop()
        await running
        assert set(broker.answers.values()) == {"completed"}


@pytest.mark.parametrize("broken", [0, 1])
async def test_the_answer_travels_with_the_next_pop_and_alone_when_that_fails(broken: int) -> None:
    broker = Stocked(*range(5), broken=broken)
    async with serving(*broker.routes) as server, Client(server.url) as client:
        seen: list[Any] = []

        @client.consumer("q", prefetch=False)
        async def handle(message: Message) -> None:
            seen.append(message.data)

        running = asyncio.create_task(client.run())
        await eventually(lambda: len(broker.acks) == 5)
        assert broker.acked_with_a_pop == 5 - broken
        client.stop()  # what is cut off now is answered again, which changes nothing
        await running
        assert seen == [0, 1, 2, 3, 4]


async def test_an_answer_that_is_repeated_at_a_stop_may_be_refused_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Silent(Stocked):
        """Takes the acks of a pop, does not answer, and refuses the same acks afterwards."""

        async def ack_and_pop(self, request: Request) -> Response:
            self.acked(request)
            await stopped.wait()
            return EMPTY

        def acked(self, request: Request) -> list[dict[str, Any]]:
            first = not self.acks
            error = {} if first else {"error": "Invalid or expired lease"}
            return [one | {"success": first} | error for one in super().acked(request)]

    broker, stopped = Silent(1), asyncio.Event()
    async with serving(*broker.routes) as server, Client(server.url) as client:

        @client.consumer("q", prefetch=False)
        async def handle(_: Any) -> None:
            pass

        running = asyncio.create_task(client.run())
        await eventually(lambda: len(broker.acks) == 1)
        client.stop()
        await running
        stopped.set()
    assert [ack["transactionId"] for ack in broker.acks] == ["0", "0"]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
