"""What may go wrong around `penstock.Client`: answers that are none, brokers that hang, handlers
that misbehave.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from penstock import Client, SyncClient
from penstock.client import DeadLetter, Message
from penstock.errors import Full, InvalidRequest, Unavailable
from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.routes import Route
from tests.client.test_queue_failover import Scripted, flat, queued
from tests.support.http import run, serving
from tests.support.wait import eventually

MESSAGE = {
    "transactionId": "t",
    "createdAt": "2026-01-01T00:00:00Z",
    "partition": "Default",
    "partitionId": "p",
}
GIVEN = {
    "id": "0",
    "transaction_id": "t",
    "created_at": datetime.now(UTC),
    "partition": "p",
    "partition_id": "p",
}


class Stocked:
    """A broker with some messages in one queue: it hands them out and writes down the acks."""

    def __init__(self, *payloads: Any) -> None:
        self.left = [
            {**MESSAGE, "id": str(n), "transactionId": str(n), "leaseId": "lease", "data": payload}
            for n, payload in enumerate(payloads)
        ]
        self.acks: list[dict[str, Any]] = []

    async def pop(self, request: Request) -> Response:
        batch = int(dict(pair.split("=") for pair in request.query.split("&"))["batch"])
        out, self.left = self.left[:batch], self.left[batch:]
        if not out:
            await asyncio.sleep(0.02)
            return EMPTY
        return json_response({"messages": out, "queue": "q"})

    def ack(self, request: Request) -> Response:
        body = json.loads(request.body)["acknowledgments"]
        self.acks += body
        return json_response(
            [{"transactionId": ack["transactionId"], "success": True} for ack in body]
        )

    @property
    def routes(self) -> tuple[Route, Route]:
        return Route("GET", "/api/v1/pop/queue/{queue}", self.pop), Route(
            "POST", "/api/v1/ack/batch", self.ack
        )

    @property
    def answers(self) -> dict[str, str]:
        return {ack["transactionId"]: ack["status"] for ack in self.acks}


@asynccontextmanager
async def raw_server(answer: bytes | None) -> AsyncIterator[str]:
    """Answers every request with these bytes and hangs up; with None it says nothing at all."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def page(_: Any) -> Response:
    return Response(200, b"<html>Please log in</html>")


def test_a_broker_that_hangs_does_not_keep_the_client_from_the_others():
    async def body() -> None:
        broker = Scripted(queued)
        async with (
            raw_server(None) as hanging,
            serving(broker.route) as server,
            Client([hanging, server.url], timeout=0.2, patience=0.1) as client,
        ):
            assert (await client.push("q", 1)).status == "queued"

    run(body)


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
def test_an_answer_that_is_no_brokers_is_unavailable_whatever_was_asked(answer: bytes) -> None:
    async def body() -> None:
        async with raw_server(answer) as url, Client(url, patience=0) as client:
            for ask in (
                lambda: client.push("q", 1),
                lambda: client.push("q", 1, buffer_ms=5),
                lambda: client.ack(Message(**GIVEN)),
                lambda: client.push_many("q", [1, 2]),
            ):
                with pytest.raises((Unavailable, Full)):
                    await ask()
            for look in (
                lambda: client.pop("q", patience=0),
                lambda: client.extend(Message(**GIVEN)),
            ):
                try:
                    assert await look() in (
                        [],
                        True,
                    )  # an empty list or object may be an answer to these
                except (Unavailable, Full):
                    pass

    run(body)


def test_a_buffer_outlives_garbage_a_full_disk_and_a_token_that_ran_out() -> None:
    def says(status: int) -> Callable[[Any], Response]:
        return lambda _: json_response({"error": "not now"}, status)

    async def body() -> None:
        broker = Scripted(
            page, lambda items: json_response([], 201), says(507), says(401), says(404), queued
        )
        async with serving(broker.route) as server, Client(server.url) as client:
            buffer = client.buffer(batch=3, linger=0.0)
            for number in range(3):
                await buffer.push("q", number)
            with pytest.raises(TypeError):
                await buffer.push("q", object())
            await buffer.push("q", 3)
            await buffer.flush(10)
            assert (buffer.sent, buffer.refused) == (4, [])
        assert flat(broker.payloads)[-4:] == [0, 1, 2, 3]

    run(body)


def test_a_flush_waits_for_what_was_pushed_before_it_and_not_for_what_comes_after() -> None:
    async def body() -> None:
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

    run(body)


def test_leaving_the_clients_block_with_messages_unsent_is_an_error() -> None:
    async def body() -> None:
        async with raw_server(b"") as url:
            client = Client(url)
            await client.buffer().push("q", 1)
            with pytest.raises(Unavailable, match="1 messages"):
                async with client:
                    client.close = lambda: Client.close(client, 0.1)
            with pytest.raises(InvalidRequest):
                client.buffer()

    run(body)


def test_what_take_fetched_and_did_not_hand_out_goes_back_when_the_client_is_closed() -> None:
    async def body() -> None:
        broker = Stocked(1, 2, 3)
        async with serving(*broker.routes) as server:
            async with Client(server.url) as client:
                async for message in client.take("q", batch=3):
                    await client.ack(message)
                    break
            assert broker.answers == {"0": "completed", "1": "retry", "2": "retry"}

    run(body)


def test_a_take_that_is_cancelled_gives_back_what_it_had() -> None:
    async def body() -> None:
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

    run(body)


def test_closing_lets_a_handler_finish_and_answer() -> None:
    async def body() -> None:
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

    run(body)


def raising(*errors: BaseException) -> Callable[[Any], None]:
    left = list(errors)

    def handle(_: Any) -> None:
        if left:
            raise left.pop(0)

    return handle


@pytest.mark.parametrize("threaded", [True, False])
def test_whatever_a_handler_raises_is_an_answer_and_the_consumer_goes_on(threaded: bool) -> None:
    async def body() -> None:
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
        assert broker.acks[0]["error"] == "ValueError: a \ufffd"

    run(body)


def test_a_reason_that_is_no_text_is_sent_as_far_as_it_is_one() -> None:
    async def body() -> None:
        broker = Stocked(1)
        async with serving(*broker.routes) as server, Client(server.url) as client:
            await client.ack(await client.pop("q"), "failed", error="half a pair: \ud800")
        assert broker.acks[0]["error"] == "half a pair: ?"

    run(body)


def test_plain_functions_run_as_many_at_a_time_as_asked_for() -> None:
    with_all = threading.Barrier(
        16, timeout=10
    )  # more than the loop's own threads on a small machine

    async def body() -> None:
        broker = Stocked(*range(16))
        async with serving(*broker.routes) as server, Client(server.url) as client:

            @client.consumer("q", concurrency=16)
            def handle(_: Any) -> None:
                with_all.wait()

            running = asyncio.create_task(client.run())
            await eventually(lambda: len(broker.acks) == 16, 15)
            client.stop()
            await running
            assert set(broker.answers.values()) == {"completed"}

    run(body)


def test_a_lease_that_hangs_does_not_keep_others_from_being_extended() -> None:
    async def body() -> None:
        extended: list[str] = []

        async def extend(request: Request) -> Response:
            lease = request.params["lease"]
            if lease == "stuck":
                await asyncio.Event().wait()
            extended.append(lease)
            return json_response([{"success": True}])

        broker = Stocked(1, 2)
        for message, lease in zip(broker.left, ("stuck", "fine"), strict=True):
            message["leaseId"] = lease

        def pop(_: Request) -> Response:
            out, broker.left = broker.left, []
            return json_response({"messages": out}, headers=(("Lease-Time", "1"),))

        routes = (
            Route("GET", "/api/v1/pop/queue/{queue}", pop),
            Route("POST", "/api/v1/lease/{lease}/extend", extend),
        )
        async with serving(*routes) as server, Client(server.url) as client:
            assert len(await client.pop("q", batch=2)) == 2
            await eventually(lambda: extended.count("fine") >= 3)

    run(body)


def test_a_client_belongs_to_one_event_loop() -> None:
    client = Client("http://127.0.0.1:1", patience=0)
    with pytest.raises(Unavailable):
        asyncio.run(client.push("q", 1))
    with pytest.raises(InvalidRequest, match="event loop"):
        asyncio.run(client.push("q", 1))


def test_the_plain_client_is_used_from_many_threads_and_says_when_it_is_closed() -> None:
    async def body() -> None:
        broker = Scripted(queued)
        async with serving(broker.route) as server:

            def use() -> None:
                with SyncClient(server.url) as client:
                    threads = [
                        threading.Thread(target=client.push, args=("q", n)) for n in range(20)
                    ]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join(10)
                assert client.close() == []
                with pytest.raises(Unavailable, match="closed"):
                    client.push("q", 1)

            await asyncio.to_thread(use)
        assert sorted(flat(broker.payloads)) == list(range(20))

    run(body)


NOWHERE = "http://127.0.0.1:1"  # nothing of these reaches a broker


@dataclass
class Reading:
    value: float
    raw: bytes = b""


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (float("nan"), "the payload is nan, which JSON cannot say"),
        ({"prices": [1.5, {"eur": float("-inf")}]}, r"the payload's prices\[1\].eur is -inf"),
        (b'{"id": 7}', r"the payload is bytes.*msgspec.Raw"),
        ({"body": bytearray(b"x")}, r"the payload's body is bytearray.*base64"),
        (Reading(float("nan")), "the payload's value is nan"),
        ((1, Reading(1.0)), r"the payload's \[1\].raw is bytes"),
        (Decimal("NaN"), "the payload is NaN"),
    ],
)
def test_what_json_would_change_in_silence_is_refused_wherever_it_is_pushed(
    payload: Any, text: str
) -> None:
    async def body() -> None:
        async with Client(NOWHERE, patience=0.0) as client:
            refused = pytest.raises(InvalidRequest, match=text)
            with refused:
                await client.push("q", payload)
            with refused:
                await client.push_many("q", [{"fine": 1}, payload])
            with refused:
                client.transaction().push("q", payload)
            with refused:
                await client.trace(Message(**GIVEN), payload)
            async with client.buffer() as buffer:
                with refused:
                    await buffer.push("q", payload)

    run(body)
    with SyncClient(NOWHERE, patience=0.0) as plain, pytest.raises(InvalidRequest, match=text):
        plain.push("q", payload)


def test_payloads_that_json_can_say_are_pushed_as_they_are() -> None:
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    fine = {
        "a": [1, 2.5, None, True, {"b": "c"}],
        "at": moment,
        "sum": Decimal("1.10"),
        "pair": (1, 2),
        "n": 1 << 70,
    }
    sent: list[Any] = []

    def push(request: Request) -> Response:
        sent.extend(json.loads(request.body)["items"])
        return queued(sent[-1:])

    async def body() -> None:
        async with (
            serving(Route("POST", "/api/v1/push", push)) as server,
            Client(server.url) as client,
        ):
            await client.push("q", fine)
            await client.push("q", msgspec.Raw(b'{"n": 7}'))

    run(body)
    assert [item["payload"] for item in sent] == [
        fine | {"at": "2026-01-31T12:00:00Z", "sum": "1.10", "pair": [1, 2]},
        {"n": 7},
    ]


def test_a_push_to_a_group_or_to_two_partitions_is_refused() -> None:
    async def body() -> None:
        async with Client(NOWHERE, patience=0.0) as client:
            for push in (client.push, client.transaction().push, client.buffer().push):
                with pytest.raises(
                    InvalidRequest,
                    match=r"a push has no group, and 'a b/c@d' names 'd': every group",
                ):
                    done = push("a b/c@d", {})
                    if asyncio.iscoroutine(done):
                        await done
            with pytest.raises(
                InvalidRequest, match="names the partition 'one' and the argument 'two'"
            ):
                await client.push("q/one", {}, partition="two")

    run(body)
    with (
        SyncClient(NOWHERE, patience=0.0) as plain,
        pytest.raises(InvalidRequest, match="a push has no group"),
    ):
        plain.push("a@b", {})
