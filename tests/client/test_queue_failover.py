"""What the queue client does when brokers fail: scripted brokers on real sockets."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock import Client
from penstock.client import QueueFull
from penstock.errors import Conflict, InvalidRequest, Unavailable
from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.routes import Route
from tests.support.http import run, serving
from tests.support.wait import eventually

Answering = Callable[[list[dict[str, Any]]], Response]


def queued(items: list[dict[str, Any]], status: str = "queued") -> Response:
    rows = [
        {"index": n, "status": status, "transaction_id": item["transactionId"]}
        for n, item in enumerate(items)
    ]
    return json_response(rows, 201)


class Scripted:
    """A broker whose answers to push are a list of functions, the last one for ever."""

    def __init__(self, *answers: Answering) -> None:
        self.answers = list(answers)
        self.pushes: list[list[dict[str, Any]]] = []

    def push(self, request: Request) -> Response:
        items = json.loads(request.body)["items"]
        self.pushes.append(items)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(items)

    @property
    def route(self) -> Route:
        return Route("POST", "/api/v1/push", self.push)

    @property
    def payloads(self) -> list[list[Any]]:
        return [[item["payload"] for item in items] for items in self.pushes]


def flat(lists: list[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]


def down(_: Any) -> Response:
    return json_response({"error": "the database is down"}, 503)


def test_a_push_goes_to_the_next_broker_with_the_same_transaction_id():
    async def body() -> None:
        first, second = Scripted(down), Scripted(queued)
        async with (
            serving(first.route) as one,
            serving(second.route) as two,
            Client([one.url, two.url]) as client,
        ):
            pushed = await client.push("orders", {"n": 1})
            assert pushed.status == "queued"
            await client.push("orders", {"n": 2})
        assert len(first.pushes) == 1  # the client stays with the broker that answered
        assert [items[0]["transactionId"] for items in (*first.pushes, second.pushes[0])] == [
            pushed.transaction_id
        ] * 2

    run(body)


def test_a_broker_that_is_not_there_is_passed_over_and_one_that_comes_back_is_found():
    async def body() -> None:
        broker = Scripted(queued)
        async with serving(broker.route) as server:
            port = server.port
            async with Client(["http://127.0.0.1:1", server.url]) as client:
                await client.push("q", 1)
        async with Client(f"http://127.0.0.1:{port}", patience=10) as client:
            waiting = asyncio.create_task(client.push("q", 2))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            async with serving(broker.route, port=port):
                assert (await waiting).status == "queued"

    run(body)


def test_a_broker_whose_answer_closes_the_connection_is_left_before_it_stops():
    async def body() -> None:
        first, second = Scripted(queued), Scripted(queued)
        async with (
            serving(first.route) as one,
            serving(second.route) as two,
            Client([one.url, two.url]) as client,
        ):
            await client.push("q", 1)
            one.drain()
            for number in (2, 3, 4):
                await client.push("q", number)
        assert (first.payloads, second.payloads) == ([[1], [2]], [[3], [4]])

    run(body)


def test_when_patience_ends_the_failure_is_raised():
    async def body() -> None:
        async with Client("http://127.0.0.1:1", patience=0.2) as client:
            with pytest.raises(Unavailable, match="cannot connect"):
                await client.push("q", 1)

    run(body)


def test_a_duplicate_of_an_id_the_client_made_counts_as_queued_and_of_the_callers_as_duplicate():
    async def body() -> None:
        broker = Scripted(lambda items: queued(items, "duplicate"))
        async with serving(broker.route) as server, Client(server.url) as client:
            assert (await client.push("q", 1)).status == "queued"
            assert (await client.push("q", 1, transaction_id="mine")).status == "duplicate"

    run(body)


def test_a_full_queue_says_which_messages_did_not_fit():
    async def body() -> None:
        def full(items: list[dict[str, Any]]) -> Response:
            rows = [
                {"index": 0, "status": "queued"},
                {"index": 1, "status": "failed", "error": "full"},
            ]
            return json_response({"error": "queue full", "results": rows}, 429)

        async with serving(Scripted(full).route) as server, Client(server.url) as client:
            with pytest.raises(QueueFull) as caught:
                await client.push_many("q", [1, 2])
            assert [result.status for result in caught.value.results] == ["queued", "failed"]

    run(body)


def test_a_refusal_is_raised_at_once_as_what_it_means():
    async def body() -> None:
        broker = Scripted(lambda _: json_response({"error": "Queue must be a string"}, 400))
        async with serving(broker.route) as server, Client(server.url) as client:
            with pytest.raises(InvalidRequest, match="Queue must be a string"):
                await client.push("q", 1)
        assert len(broker.pushes) == 1

    run(body)


def test_an_empty_pop_is_an_empty_list():
    async def body() -> None:
        route = Route("GET", "/api/v1/pop/queue/{queue}", lambda _: EMPTY)
        async with serving(route) as server, Client(server.url) as client:
            assert await client.pop("nothing") == []
            assert [message async for message in client.take("nothing", idle=0)] == []

    run(body)


def test_the_address_names_queue_partition_and_group():
    async def body() -> None:
        seen = []

        def pop(request: Request) -> Response:
            seen.append((request.params, request.query))
            return EMPTY

        route = Route("GET", "/api/v1/pop/queue/{queue}/partition/{partition}", pop)
        async with serving(route) as server, Client(server.url) as client:
            await client.pop("or ders/c 1@billing", batch=3)
            for bad in ("", "@g", "q/", "q@"):
                with pytest.raises(InvalidRequest):
                    await client.pop(bad)
        assert seen == [({"queue": "or ders", "partition": "c 1"}, "batch=3&consumerGroup=billing")]

    run(body)


def test_a_transaction_whose_answer_was_lost_is_not_sent_again():
    async def body() -> None:
        count = 0

        async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal count
            count += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(broken, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Client(url, patience=5) as client:
            with pytest.raises(Unavailable):
                async with client.transaction() as tx:
                    tx.push("q", 1)
        assert count == 1
        server.close()

    run(body)


def test_a_transaction_is_discarded_when_its_block_fails():
    async def body() -> None:
        asked = []

        def transaction(request: Request) -> Response:
            asked.append(json.loads(request.body))
            return json_response({"transactionId": "t", "success": False, "error": "no lease"}, 409)

        async with (
            serving(Route("POST", "/api/v1/transaction", transaction)) as server,
            Client(server.url) as client,
        ):
            with pytest.raises(ZeroDivisionError):
                async with client.transaction() as tx:
                    tx.push("q", 1)
                    raise ZeroDivisionError
            assert asked == []
            with pytest.raises(Conflict, match="no lease"):
                async with client.transaction() as tx:
                    tx.push("q", 1)
            assert asked[0]["operations"][0]["items"][0]["queue"] == "q"

    run(body)


# -- the buffer
# -------------------------------------------------------------------------------------------------------


def test_a_buffer_gathers_pushes_into_batches_in_order():
    async def body() -> None:
        broker = Scripted(queued)
        async with serving(broker.route) as server, Client(server.url) as client:
            async with client.buffer(batch=10, linger=5.0) as buffer:
                for number in range(25):
                    await buffer.push("q", number)
                await eventually(lambda: len(broker.pushes) == 2)
            assert buffer.sent == 25
        assert [len(payloads) for payloads in broker.payloads] == [10, 10, 5]
        assert flat(broker.payloads) == list(range(25))

    run(body)


def test_a_full_buffer_blocks_and_a_failed_batch_goes_back_to_the_front():
    async def body() -> None:
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
        assert (
            len({json.dumps(items) for items in broker.pushes[:3]}) == 1
        )  # the same ids each time

    run(body)


async def _push_all(buffer: Any, count: int) -> None:
    for number in range(count):
        await buffer.push("q", number)


def test_closing_a_buffer_has_a_deadline_and_says_what_is_left():
    async def body() -> None:
        async with serving(Scripted(down).route) as server:
            client = Client(server.url)
            buffer = client.buffer(linger=0.0)
            for number in range(3):
                await buffer.push("q", number)
            left = await client.close(timeout=0.3)
            assert [item["payload"] for item in left] == [0, 1, 2]
            with pytest.raises(InvalidRequest, match="closed"):
                await buffer.push("q", 4)

    run(body)


def test_leaving_a_buffers_block_with_messages_unsent_is_an_error():
    async def body() -> None:
        async with serving(Scripted(down).route) as server, Client(server.url) as client:
            with pytest.raises(Unavailable, match="1 messages"):
                async with client.buffer(close_timeout=0.2) as buffer:
                    await buffer.push("q", 1)

    run(body)


def test_one_bad_message_in_a_batch_is_set_aside_alone():
    async def body() -> None:
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

    run(body)
