"""Several brokers, brokers that hang, answers that are none: what the client makes of them."""

import asyncio
import json
import threading
from typing import Any

import pytest

from penstock import Client, SyncClient
from penstock.client import Message
from penstock.errors import Conflict, Full, InvalidRequest, QueueFull, Unavailable
from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.routes import HttpRoute
from tests.client.scripted import GIVEN, Scripted, Stocked, down, flat, queued, raw_server
from tests.support.http import serving
from tests.support.wait import eventually


async def test_a_broker_that_hangs_does_not_keep_the_client_from_the_others():
    broker = Scripted(queued)
    async with (
        raw_server(None) as hanging,
        serving(broker.route) as server,
        Client([hanging, server.url], timeout=0.2, retry_for=0.1) as client,
    ):
        assert (await client.push("q", 1)).status == "queued"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n<html>a proxy's</html>",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 429 Slow down\r\nContent-Length: 4\r\n\r\nslow",
        # as long as the connection lasts, which is not long
        b'HTTP/1.1 200 OK\r\n\r\n[{"status":"que',
        b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n[",
        b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
    ],
)
async def test_an_answer_that_is_no_brokers_is_unavailable_whatever_was_asked(
    answer: bytes,
) -> None:
    async with raw_server(answer) as url, Client(url, retry_for=0) as client:
        for ask in (
            lambda: client.push("q", 1),
            lambda: client.push("q", 1, buffer_ms=5),
            lambda: client.ack(Message(**GIVEN)),
            lambda: client.push_many("q", [1, 2]),
        ):
            with pytest.raises((Unavailable, Full)):
                await ask()
        for look in (
            lambda: client.pop("q", retry_for=0),
            lambda: client.extend(Message(**GIVEN)),
        ):
            try:
                assert await look() in (
                    [],
                    True,
                )  # an empty list or object may be an answer to these
            except (Unavailable, Full):
                pass


async def test_a_lease_that_hangs_does_not_keep_others_from_being_extended() -> None:
    extended: list[str] = []
    done = asyncio.Event()

    async def extend(request: Request) -> Response:
        lease = request.params["lease"]
        if lease == "stuck":
            await done.wait()
        extended.append(lease)
        return json_response([{"success": True}])

    broker = Stocked(1, 2)
    for message, lease in zip(broker.left, ("stuck", "fine"), strict=True):
        message["leaseId"] = lease

    def pop(_: Request) -> Response:
        out, broker.left = broker.left, []
        return json_response({"messages": out}, headers=(("Lease-Time", "1"),))

    routes = (
        HttpRoute("GET", "/api/v1/pop/queue/{queue}", pop),
        HttpRoute("POST", "/api/v1/lease/{lease}/extend", extend),
    )
    async with serving(*routes) as server, Client(server.url) as client:
        messages = await client.pop("q", batch=2)
        assert len(messages) == 2
        await eventually(lambda: extended.count("fine") >= 3)
        done.set()  # or the server waits for it before it stops


async def test_a_client_belongs_to_one_event_loop() -> None:
    client = Client("http://127.0.0.1:1", retry_for=0)
    with pytest.raises(Unavailable):
        await client.push("q", 1)
    with pytest.raises(InvalidRequest, match="event loop"):
        await asyncio.to_thread(lambda: asyncio.run(client.push("q", 1)))


async def test_the_plain_client_is_used_from_many_threads_and_says_when_it_is_closed() -> None:
    broker = Scripted(queued)
    async with serving(broker.route) as server:

        def use() -> None:
            with SyncClient(server.url) as client:
                threads = [threading.Thread(target=client.push, args=("q", n)) for n in range(20)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(10)
            assert client.close() == []
            with pytest.raises(Unavailable, match="closed"):
                client.push("q", 1)

        await asyncio.to_thread(use)
    assert sorted(flat(broker.payloads)) == list(range(20))


async def test_a_push_goes_to_the_next_broker_with_the_same_transaction_id():
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


async def test_a_broker_that_is_not_there_is_passed_over_and_one_that_comes_back_is_found():
    broker = Scripted(queued)
    async with serving(broker.route) as server:
        port = server.port
        async with Client(["http://127.0.0.1:1", server.url]) as client:
            await client.push("q", 1)
    async with Client(f"http://127.0.0.1:{port}", retry_for=10) as client:
        waiting = asyncio.create_task(client.push("q", 2))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        async with serving(broker.route, port=port):
            assert (await waiting).status == "queued"


async def test_a_broker_whose_answer_closes_the_connection_is_left_before_it_stops():
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


async def test_when_patience_ends_the_failure_is_raised():
    async with Client("http://127.0.0.1:1", retry_for=0.2) as client:
        with pytest.raises(Unavailable, match="cannot connect"):
            await client.push("q", 1)


async def test_a_duplicate_of_an_id_the_client_made_counts_as_queued_and_of_the_callers_as_duplicate():
    broker = Scripted(lambda items: queued(items, "duplicate"))
    async with serving(broker.route) as server, Client(server.url) as client:
        assert (await client.push("q", 1)).status == "queued"
        assert (await client.push("q", 1, transaction_id="mine")).status == "duplicate"


async def test_a_full_queue_says_which_messages_did_not_fit():
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


async def test_a_refusal_is_raised_at_once_as_what_it_means():
    broker = Scripted(lambda _: json_response({"error": "Queue must be a string"}, 400))
    async with serving(broker.route) as server, Client(server.url) as client:
        with pytest.raises(InvalidRequest, match="Queue must be a string"):
            await client.push("q", 1)
    assert len(broker.pushes) == 1


async def test_an_empty_pop_is_an_empty_list():
    route = HttpRoute("GET", "/api/v1/pop/queue/{queue}", lambda _: EMPTY)
    async with serving(route) as server, Client(server.url) as client:
        assert await client.pop("nothing") == []
        assert [message async for message in client.take("nothing", idle=0)] == []


async def test_a_transaction_whose_answer_was_lost_is_not_sent_again():
    count = 0

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(broken, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with Client(url, retry_for=5) as client:
        with pytest.raises(Unavailable):
            async with client.transaction() as tx:
                tx.push("q", 1)
    assert count == 1
    server.close()


async def test_a_transaction_is_discarded_when_its_block_fails():
    asked = []

    def transaction(request: Request) -> Response:
        asked.append(json.loads(request.body))
        return json_response({"transactionId": "t", "success": False, "error": "no lease"}, 409)

    async with (
        serving(HttpRoute("POST", "/api/v1/transaction", transaction)) as server,
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
