"""The WebSocket protocol against a real server, with the `websockets` library as the client."""

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from penstock.wire.tls import Certificate
from penstock.wire.websocket import session
from tests.support.certificates import certificate
from tests.support.form import pick
from tests.support.idle_clients import said, start
from tests.support.served import Served, serving
from tests.support.wait import eventually

Body = Callable[[Served, "Talk"], Awaitable[None]]


class Talk:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, command: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"command": command, **fields}))

    async def read(self) -> dict[str, Any]:
        async with asyncio.timeout(60):
            return json.loads(await self.socket.recv())  # type: ignore[no-any-return]

    async def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        await self.send(command, **fields)
        return await self.read()

    async def offsets(self, count: int) -> list[int]:
        """The offsets of the next `count` records pushed to us."""
        collected: list[int] = []
        while len(collected) < count:
            said = await self.read()
            assert said["command"] == "message_batch_notification", said
            collected += [record["offset"] for record in said["messages"]]
        return collected


@asynccontextmanager
async def talking(served: Served, **options: Any) -> AsyncIterator[Talk]:
    async with connect(
        f"ws://127.0.0.1:{served.websocket.port}/", **{"max_size": None, **options}
    ) as socket:
        yield Talk(socket)


@asynccontextmanager
async def over_websocket(directory: Path, **settings: Any) -> AsyncIterator[tuple[Served, Talk]]:
    async with serving(directory, **settings) as served, talking(served) as talk:
        yield served, talk


async def test_the_commands_of_the_original_answer_to_the_letter(tmp_path: Path) -> None:
    async with over_websocket(tmp_path) as (_, talk):
        assert await talk.ask("create_topic_request", req_id=4, topic="live_feed") == {
            "command": "create_topic_response",
            "req_id": 4,
            "topic": "live_feed",
            "success": True,
        }
        assert await talk.ask(
            "produce_request", req_id=1, topic="live_feed", message_payload="Event A"
        ) == {
            "command": "produce_response",
            "req_id": 1,
            "topic": "live_feed",
            "offset": 0,
            "success": True,
        }
        assert await talk.ask("list_topics_request", req_id=5) == {
            "command": "list_topics_response",
            "req_id": 5,
            "topics": ["live_feed"],
            "success": True,
        }
        assert await talk.ask("get_next_offset_request", req_id=6, topic="live_feed") == {
            "command": "get_next_offset_response",
            "req_id": 6,
            "topic": "live_feed",
            "next_offset": 1,
            "success": True,
        }
        assert await talk.ask(
            "subscribe_topic_request", req_id=2, topic="live_feed", start_offset=0
        ) == {
            "command": "subscribe_topic_response",
            "req_id": 2,
            "topic": "live_feed",
            "success": True,
        }
        assert await talk.read() == {
            "command": "message_batch_notification",
            "topic": "live_feed",
            "messages": [{"offset": 0, "topic": "live_feed", "payload": "Event A"}],
        }
        assert await talk.ask("unsubscribe_topic_request", req_id=3, topic="live_feed") == {
            "command": "unsubscribe_topic_response",
            "req_id": 3,
            "topic": "live_feed",
            "success": True,
        }
        assert await talk.ask(
            "subscribe_topic_request", req_id=2, topic="non_existent", start_offset=0
        ) == {
            "command": "error_response",
            "req_id": 2,
            "error_message": "Topic 'non_existent' not found for subscription.",
            "original_command_type": "subscribe_topic_request",
            "code": "NotFound",
        }


async def test_req_id_is_echoed_as_it_came_and_left_out_when_there_was_none(tmp_path: Path) -> None:
    async with over_websocket(tmp_path) as (_, talk):
        for req_id in (0, -5, "text", None, 1.5, {"a": [1, 2]}):
            assert (await talk.ask("list_topics_request", req_id=req_id))["req_id"] == req_id
        assert "req_id" not in await talk.ask("list_topics_request")


@pytest.mark.parametrize(
    ("message", "command", "req_id"),
    [
        ("not json", None, None),
        ("[]", None, None),
        ('"text"', None, None),
        ("{}", None, None),
        ('{"req_id": 7}', None, 7),
        ('{"command": 5, "req_id": 7}', None, 7),
        ('{"command": "fly_request", "req_id": 7}', "fly_request", 7),
        ('{"command": "produce_request", "req_id": 7, "topic": "t"}', "produce_request", 7),
        (
            '{"command": "produce_request", "req_id": 7, "topic": 5, "message_payload": ""}',
            "produce_request",
            7,
        ),
        (
            '{"command": "produce_request", "req_id": 7, "topic": "a/b", "message_payload": ""}',
            "produce_request",
            7,
        ),
        (
            (
                '{"command": "produce_request", "req_id": 7, "topic": "t", "message_payload": "!",'
                ' "encoding": "base64"}'
            ),
            "produce_request",
            7,
        ),
        (
            '{"command": "create_topic_request", "req_id": 7, "topic": ".."}',
            "create_topic_request",
            7,
        ),
        (
            '{"command": "subscribe_topic_request", "req_id": 7, "topic": "t", "start_offset": -1}',
            "subscribe_topic_request",
            7,
        ),
        (
            '{"command": "unsubscribe_topic_request", "req_id": 7, "topic": "t"}',
            "unsubscribe_topic_request",
            7,
        ),
    ],
)
async def test_a_bad_message_is_answered_and_the_connection_stays_usable(
    tmp_path: Path, message: str, command: str | None, req_id: int | None
) -> None:
    async with over_websocket(tmp_path) as (served, talk):
        await served.topics.create("t")
        await talk.socket.send(message)
        said = await talk.read()
        assert said["command"] == "error_response"
        assert said["error_message"]
        assert said.get("original_command_type") == command
        assert said.get("req_id") == req_id
        assert (await talk.ask("list_topics_request"))["success"]


async def test_several_subscriptions_on_one_connection_are_pushed_to_as_records_come(
    tmp_path: Path,
) -> None:
    async with over_websocket(tmp_path) as (served, talk):
        for name in ("a", "b"):
            await talk.ask("produce_request", topic=name, message_payload="first")
            await talk.ask("subscribe_topic_request", topic=name, start_offset="latest")
        async with talking(served) as other:
            for number in range(1, 20):
                for name in ("a", "b"):
                    await other.ask(
                        "produce_request", topic=name, message_payload=f"{name}{number}"
                    )
                    said = await talk.read()
                    assert (said["topic"], said["messages"]) == (
                        name,
                        [{"offset": number, "topic": name, "payload": f"{name}{number}"}],
                    )
            await talk.ask("unsubscribe_topic_request", topic="a")
            for name in ("a", "b"):
                await other.ask("produce_request", topic=name, message_payload="x")
            assert (await talk.read())["topic"] == "b"


async def test_subscribing_again_moves_the_subscription(tmp_path: Path) -> None:
    async with over_websocket(tmp_path) as (_, talk):
        for letter in "abc":
            await talk.ask("produce_request", topic="t", message_payload=letter)
        await talk.ask("subscribe_topic_request", topic="t", start_offset=2)
        assert await talk.offsets(1) == [2]
        await talk.ask("subscribe_topic_request", topic="t", start_offset=1)
        assert await talk.offsets(2) == [1, 2]


async def test_bytes_that_are_no_text_travel_as_base64_both_ways(tmp_path: Path) -> None:
    async with over_websocket(tmp_path) as (_, talk):
        coded = base64.b64encode(b"\xff\x00").decode()
        await talk.ask("produce_request", topic="t", message_payload=coded, encoding="base64")
        await talk.ask("subscribe_topic_request", topic="t", start_offset=0)
        assert (await talk.read())["messages"] == [
            {"offset": 0, "topic": "t", "payload": coded, "encoding": "base64"}
        ]


async def test_a_message_may_come_in_pieces_but_not_without_end(tmp_path: Path) -> None:
    async with over_websocket(tmp_path, websocket={"max_message": 4000}) as (served, talk):
        text = json.dumps(
            {"command": "produce_request", "topic": "t", "message_payload": "x" * 1000, "req_id": 1}
        )
        await talk.socket.send([text[:5], text[5:500], text[500:]])
        assert (await talk.read())["offset"] == 0
        async with talking(served) as other:
            with pytest.raises(ConnectionClosed):
                await other.socket.send("y" * 900 for _ in range(10))  # type: ignore[arg-type]
                await other.read()
        async with talking(served) as other:
            with pytest.raises(ConnectionClosed):
                await other.socket.send("y" * 5000)
                await other.read()
        assert (await talk.ask("list_topics_request"))["success"]


async def test_messages_in_parts_have_a_common_bound_and_a_least_rate(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(session, "PART_SECONDS", -300.0)
        async with over_websocket(tmp_path, max_bodies=200_000, keep_alive=0.1) as (served, talk):
            memory = served.websocket.memory
            sent, release = asyncio.Event(), asyncio.Event()

            async def parts(count: int) -> AsyncIterator[str]:
                for _ in range(count):
                    yield "x" * 50_000
                sent.set()
                await release.wait()
                yield "x"

            holding = asyncio.ensure_future(talk.socket.send(parts(3)))
            await eventually(lambda: memory.total == 150_000)
            async with talking(served) as other:
                await other.ask("produce_request", topic="t", message_payload="small")
                too_much = asyncio.ensure_future(other.socket.send(parts(2)))
                await other.socket.wait_closed()
                assert (
                    other.socket.close_code,
                    "try again" in (other.socket.close_reason or ""),
                ) == (
                    1013,
                    True,
                )
                too_much.cancel()
            assert memory.total == 150_000
            await (
                talk.socket.wait_closed()
            )  # its message does not go on, though it answers to pings
            assert memory.total == 0
            holding.cancel()


async def test_pipelined_produces_are_answered_in_order_and_create_their_topic(
    tmp_path: Path,
) -> None:
    async with over_websocket(tmp_path, fsync="group") as (_, talk):
        for number in range(200):
            await talk.send(
                "produce_request", req_id=number, topic="t", message_payload=str(number)
            )
        for number in range(200):
            said = await talk.read()
            assert (said["req_id"], said["offset"]) == (number, number)


async def test_a_slow_subscriber_holds_back_nobody_and_resumes_where_it_was(tmp_path: Path) -> None:
    async with over_websocket(tmp_path) as (served, talk):
        topic = await served.topics.create("t")
        await talk.ask("subscribe_topic_request", topic="t", start_offset=0)
        async with talking(served, max_queue=1) as slow:
            await slow.ask("subscribe_topic_request", topic="t", start_offset=0)
            payload = b"x" * 10_000
            for number in range(3000):
                await topic.append([payload])
                if number % 100 == 99:
                    assert await talk.offsets(100) == [*range(number - 99, number + 1)]
            feed = served.feeds.of(topic)
            assert feed.subscribers == 2
            assert len(feed.live) == 1
            assert await slow.offsets(3000) == [*range(3000)]
            await topic.append([b"last"])
            assert await slow.offsets(1) == [3000]


async def test_a_deleted_topic_is_told_to_its_subscribers(tmp_path: Path) -> None:
    async with over_websocket(tmp_path) as (served, talk):
        await talk.ask("create_topic_request", topic="t")
        await talk.ask("subscribe_topic_request", topic="t")
        await served.topics.delete("t")
        said = await talk.read()
        assert (said["command"], said["error_message"]) == (
            "error_response",
            "Topic 't' was deleted.",
        )
        assert not served.feeds.subscribers


async def test_connections_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    async with over_websocket(tmp_path, websocket={"max_connections": 1}) as (served, talk):
        with pytest.raises(InvalidStatus):
            async with talking(served):
                pass
        assert (await talk.ask("list_topics_request"))["success"]


async def test_a_client_that_answers_no_ping_is_given_up_and_others_stay(tmp_path: Path) -> None:
    async with over_websocket(tmp_path, keep_alive=0.005) as (served, talk):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.websocket.port)
        writer.write(
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        async with asyncio.timeout(60):
            while await reader.read(1000):
                pass
        writer.close()
        assert (await talk.ask("list_topics_request"))["success"]
        await eventually(lambda: len(served.websocket.sessions) == 1)


async def test_stopping_answers_what_is_under_way_and_says_goodbye(tmp_path: Path) -> None:
    async with over_websocket(tmp_path, fsync="group") as (served, talk):
        await talk.ask("create_topic_request", topic="t")
        for number in range(10):
            await talk.send("produce_request", req_id=number, topic="t", message_payload="x")
        await eventually(lambda: served.topics.require("t").next_offset > 0)
        await served.websocket.stop(5)
        answers = 0
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                answers += (await talk.read())["success"]
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        assert answers == served.topics.require("t").next_offset


async def test_with_a_certificate_it_speaks_wss(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)

    tls = Certificate(cert, key)
    trust = ssl.create_default_context(cafile=str(cert))
    async with serving(tmp_path / "data", tls=tls) as served:
        url = f"wss://localhost:{served.websocket.port}"
        async with connect(url, ssl=trust, host="127.0.0.1", server_hostname="localhost") as socket:
            talk = Talk(socket)
            assert (await talk.ask("produce_request", topic="t", message_payload="x"))[
                "offset"
            ] == 0
            await talk.ask("subscribe_topic_request", topic="t")
            assert await talk.offsets(1) == [0]


async def test_many_idle_subscribers_cost_little_and_all_are_reached(tmp_path: Path) -> None:
    count = pick(short=150, usual=500, soak=10_000)
    hello = (
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    subscribe = json.dumps({"command": "subscribe_topic_request", "topic": "t"}).encode()

    async with over_websocket(tmp_path) as (served, talk):
        await talk.ask("create_topic_request", topic="t")
        before = psutil.Process().memory_info().rss
        clients = await start(
            served.websocket.port,
            count,
            hello + bytes((0x81, 0x80 | len(subscribe), 0, 0, 0, 0)) + subscribe,
            "everyone",
        )
        await said(clients, "connected")
        await eventually(lambda: served.feeds.subscribers == count, timeout=60)
        each = (psutil.Process().memory_info().rss - before) / count
        print(f"{each / 1024:.1f} KiB for each subscriber")
        assert each < 32 << 10
        await talk.ask("produce_request", topic="t", message_payload="to everyone")
        await said(clients, "reached")
        await clients.wait()
        await eventually(lambda: served.feeds.subscribers == 0, timeout=60)


async def test_records_have_keys_headers_and_partitions(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, talking(served) as talk:
        created = await talk.ask("create_topic_request", topic="t", format="kafka", partitions=2)
        assert created["success"], created
        fields = {"key": "k", "headers": [["h", {"base64": "/w=="}], ["h", None]], "timestamp": 5}
        done = await talk.ask(
            "produce_request", topic="t", message_payload="v", partition=1, **fields
        )
        assert (done["success"], done["offset"]) == (True, 0)
        await talk.ask("produce_request", topic="t", message_payload=None, key="k", partition=1)
        following = await talk.ask("get_next_offset_request", topic="t", partition=1)
        assert following["next_offset"] == 2
        assert (await talk.ask("get_next_offset_request", topic="t"))["next_offset"] == 0
        await talk.ask("subscribe_topic_request", topic="t", partition=1)
        pushed: list[dict[str, Any]] = []
        while len(pushed) < 2:
            said = await talk.read()
            assert (said["topic"], said["partition"]) == ("t", 1)
            pushed += said["messages"]
        assert pushed[0] == {"offset": 0, "topic": "t", "payload": "v", **fields}
        assert (pushed[1]["payload"], pushed[1]["key"]) == (None, "k")
        gone = await talk.ask("unsubscribe_topic_request", topic="t", partition=1)
        assert gone["success"]


async def test_a_partition_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, talking(served) as talk:
        await talk.ask("create_topic_request", topic="t")
        for command in ("produce_request", "subscribe_topic_request"):
            said = await talk.ask(command, topic="t", message_payload="v", partition=3)
            assert (said["command"], said["code"]) == ("error_response", "NotFound")
        said = await talk.ask("produce_request", topic="t", message_payload="v", key="k")
        assert "aiq" in said["error_message"]
