"""The client's push buffer: order, bounds, and what cannot be sent."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock import Client
from penstock.errors import InvalidRequest, Unavailable
from penstock.wire.http.messages import Response, json_response
from tests.client.scripted import Scripted, down, flat, page, queued, raw_server
from tests.support.http import serving
from tests.support.wait import eventually


async def test_a_buffer_outlives_garbage_a_full_disk_and_a_token_that_ran_out() -> None:
    def says(status: int) -> Callable[[Any], Response]:
        return lambda _: json_response({"error": "not now"}, status)

    broker = Scripted(
        page, lambda items: json_response([], 201), says(507), says(401), says(404), queued
    )
    async with serving(broker.route) as server, Client(server.url) as client:
        buffer = client.buffer(batch=3, linger=0.0)
        for number in range(3):
            await buffer.push("q", number)
        with pytest.raises(InvalidRequest, match="an instance of object"):
            await buffer.push("q", object())
        await buffer.push("q", 3)
        await buffer.flush(10)
        assert (buffer.sent, buffer.refused) == (4, [])
    assert flat(broker.payloads)[-4:] == [0, 1, 2, 3]


async def test_a_flush_waits_for_what_was_pushed_before_it_and_not_for_what_comes_after() -> None:
    broker = Scripted(queued)
    async with serving(broker.route) as server, Client(server.url) as client:
        buffer = client.buffer(batch=1, max_messages=50)

        async def pour() -> None:
            for number in range(100_000):
                await buffer.push("q", number)

        pouring = asyncio.create_task(pour())
        await eventually(lambda: len(buffer) == 50)
        await buffer.flush(10)
        pouring.cancel()
        assert len(buffer) > 0


async def test_leaving_the_clients_block_with_messages_unsent_is_an_error() -> None:
    async with raw_server(b"") as url:
        client = Client(url)
        await client.buffer().push("q", 1)
        with pytest.raises(Unavailable, match="1 messages"):
            async with client:
                client.close = lambda: Client.close(client, 0.1)
        with pytest.raises(InvalidRequest):
            client.buffer()


async def test_a_buffer_gathers_pushes_into_batches_in_order():
    broker = Scripted(queued)
    async with serving(broker.route) as server, Client(server.url) as client:
        async with client.buffer(batch=10, linger=5.0) as buffer:
            for number in range(25):
                await buffer.push("q", number)
            await eventually(lambda: len(broker.pushes) == 2)
        assert buffer.sent == 25
    assert [len(payloads) for payloads in broker.payloads] == [10, 10, 5]
    assert flat(broker.payloads) == list(range(25))


async def test_a_full_buffer_blocks_and_a_failed_batch_goes_back_to_the_front():
    broker = Scripted(down, down, queued)
    async with serving(broker.route) as server, Client(server.url) as client:
        buffer = client.buffer(max_messages=4, batch=2, linger=0.0)
        pushing = asyncio.create_task(_push_all(buffer, 8))
        longest = 0
        while not pushing.done():
            longest = max(longest, len(buffer))
            await asyncio.sleep(0)
        await buffer.flush(5)
        assert await buffer.close() == []
    assert longest == 4
    assert broker.payloads[:3] == [[0, 1]] * 3
    assert flat(broker.payloads[2:]) == list(range(8))
    assert len({json.dumps(items) for items in broker.pushes[:3]}) == 1  # the same ids each time


async def _push_all(buffer: Any, count: int) -> None:
    for number in range(count):
        await buffer.push("q", number)


async def test_closing_a_buffer_has_a_deadline_and_says_what_is_left():
    async with serving(Scripted(down).route) as server:
        client = Client(server.url)
        buffer = client.buffer(linger=0.0)
        for number in range(3):
            await buffer.push("q", number)
        left = await client.close(timeout=0.3)
        assert [item["payload"] for item in left] == [0, 1, 2]
        with pytest.raises(InvalidRequest, match="closed"):
            await buffer.push("q", 4)


async def test_leaving_a_buffers_block_with_messages_unsent_is_an_error():
    async with serving(Scripted(down).route) as server, Client(server.url) as client:
        with pytest.raises(Unavailable, match="1 messages"):
            async with client.buffer(close_timeout=0.2) as buffer:
                await buffer.push("q", 1)


async def test_one_bad_message_in_a_batch_is_set_aside_alone():
    def picky(items: list[dict[str, Any]]) -> Response:
        if any(item["payload"] == "bad" for item in items):
            return json_response({"error": "bad payload"}, 400)
        return queued(items)

    broker = Scripted(picky)
    async with serving(broker.route) as server, Client(server.url) as client:
        async with client.buffer(batch=3, linger=1.0) as buffer:
            for payload in (1, "bad", 2):
                await buffer.push("q", payload)
            await buffer.flush(5)
        assert buffer.sent == 2
        ((item, error),) = buffer.refused
        assert item["payload"] == "bad"
        assert "bad payload" in str(error)
