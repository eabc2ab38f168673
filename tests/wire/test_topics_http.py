"""Topics over HTTP and server-sent events, with plain sockets."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.errors import StorageFailed
from penstock.io.fs import DiskFile
from penstock.wire import feed
from penstock.wire.feed import FeedChunk
from tests.support.form import pick
from tests.support.http import Reply, Wire, connected, get, post, request
from tests.support.idle_clients import said, start
from tests.support.served import Served, serving
from tests.support.wait import eventually


@asynccontextmanager
async def over_http(directory: Path, **settings: Any) -> AsyncIterator[tuple[Served, Wire]]:
    async with serving(directory, **settings) as served, connected(served.http) as wire:
        yield served, wire


def answer(reply: Reply) -> tuple[int, Any]:
    return reply.status, json.loads(reply.body)


def produce(topic: str, **body: Any) -> bytes:
    return post(
        f"/topics/{topic}/produce", json.dumps(body).encode(), "Content-Type: application/json"
    )


async def test_the_endpoints_of_the_original_answer_to_the_letter(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (_, wire):
        assert answer(await wire.ask(get("/topics"))) == (200, [])
        assert answer(await wire.ask(post("/topics/t", b""))) == (
            201,
            {"topic": "t", "status": "created_or_exists"},
        )
        assert answer(await wire.ask(post("/topics/t", b""))) == (
            201,
            {"topic": "t", "status": "created_or_exists"},
        )
        assert answer(await wire.ask(get("/topics"))) == (200, ["t"])
        assert answer(await wire.ask(produce("t", payload="Message 1"))) == (
            201,
            {"topic": "t", "offset": 0},
        )
        assert answer(await wire.ask(produce("t", payload="Message 2"))) == (
            201,
            {"topic": "t", "offset": 1},
        )
        assert answer(await wire.ask(get("/topics/t/next_offset"))) == (
            200,
            {"topic": "t", "next_offset": 2},
        )
        reply = await wire.ask(get("/topics/t/consume"))
        assert reply.headers["content-type"] == "application/json"
        assert answer(reply) == (
            200,
            [
                {"offset": 0, "topic": "t", "payload": "Message 1"},
                {"offset": 1, "topic": "t", "payload": "Message 2"},
            ],
        )
        assert (
            answer(await wire.ask(get("/topics/t/consume?offset=1&max_messages=5")))[1][0]["offset"]
            == 1
        )
        assert answer(await wire.ask(get("/topics/t/consume?offset=2"))) == (200, [])
        assert answer(await wire.ask(get("/topics/none/consume"))) == (200, [])
        assert answer(await wire.ask(get("/topics/none/next_offset"))) == (
            200,
            {"topic": "none", "next_offset": 0},
        )
        assert answer(await wire.ask(produce("new%20one", payload=""))) == (
            201,
            {"topic": "new one", "offset": 0},
        )


async def test_max_messages_is_100_unless_told_and_1000_at_most(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (_, wire):
        many = [str(number) for number in range(1500)]
        assert answer(await wire.ask(produce("t", payloads=many))) == (
            201,
            {"topic": "t", "first_offset": 0, "count": 1500},
        )
        for query, count in (
            ("", 100),
            ("?max_messages=7", 7),
            ("?max_messages=5000", 1000),
            ("?max_messages=0", 0),
        ):
            assert len(answer(await wire.ask(get("/topics/t/consume" + query)))[1]) == count


async def test_bytes_that_are_no_text_travel_as_base64_both_ways(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (_, wire):
        raw = bytes(range(256))
        coded = base64.b64encode(raw).decode()
        assert (await wire.ask(produce("t", payload=coded, encoding="base64"))).status == 201
        assert (
            await wire.ask(produce("t", payloads=[coded, "YQ=="], encoding="base64"))
        ).status == 201
        sent = post("/topics/t/produce", raw, "Content-Type: application/octet-stream")
        assert answer(await wire.ask(sent)) == (201, {"topic": "t", "offset": 3})
        assert (await wire.ask(produce("t", payload="é\0"))).status == 201
        binary = {"topic": "t", "payload": coded, "encoding": "base64"}
        assert answer(await wire.ask(get("/topics/t/consume")))[1] == [
            {"offset": 0, **binary},
            {"offset": 1, **binary},
            {"offset": 2, "topic": "t", "payload": "a"},
            {"offset": 3, **binary},
            {"offset": 4, "topic": "t", "payload": "é\0"},
        ]


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (get("/topics/t/consume?offset=-1"), 400),
        (get("/topics/t/consume?offset=x"), 400),
        (get("/topics/t/consume?offset=99999999999999999999999"), 400),
        (get("/topics/t/consume?max_messages=-1"), 400),
        (get("/topics/t/consume?at=yesterday"), 400),
        (get("/topics/t/stream?offset=x"), 400),
        (get("/topics/t/stream?offset=-1"), 400),
        (get("/topics/a%2Fb/stream"), 400),
        (get("/topics/none/stream?offset=x"), 400),
        (get("/topics/none/stream?at=yesterday"), 400),
        (get("/topics/none"), 404),
        (get("/topics/t/offset"), 400),
        (get("/topics/t/offset?at="), 400),
        (get("/topics/none/offset?at=0"), 404),
        (request("DELETE", "/topics/none", b""), 404),
        (post("/topics/a%2Fb", b""), 400),
        (get("/topics/a%2Fb/consume"), 400),
        (produce("..", payload="x"), 400),
        (produce("t"), 400),
        (produce("t", payload=5), 400),
        (produce("t", payload="x", payloads=["y"]), 400),
        (produce("t", payloads=[]), 400),
        (produce("t", payloads=["x"] * 100_001), 413),
        (produce("t", payload="!", encoding="base64"), 400),
        (produce("t", payload="x", encoding="rot13"), 400),
        (post("/topics/t/produce", b"{"), 400),
        (post("/topics/t/produce", b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}"), 400),
        (post("/topics/t/produce", b""), 400),
        (produce("t", payload="x" * 2000), 413),
        (get("/topics/t/groups/none"), 404),
        (post("/topics/t/groups/g/commit", b'{"offset": 5}'), 400),
        (post("/topics/t/groups/g/complete", b'{"lease": "nope"}'), 409),
        (post("/topics/none/groups/g/lease", b'{"member": "m"}'), 404),
    ],
)
async def test_bad_requests_are_told_apart(tmp_path: Path, message: bytes, status: int) -> None:
    async with over_http(tmp_path, max_record=1000) as (served, wire):
        await served.topics.create("t")
        result, said = answer(await wire.ask(message))
        assert result == status
        assert said["error"]
        assert served.topics.require("t").next_offset == 0


async def test_details_offset_by_time_and_delete(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (_, wire):
        await wire.ask(produce("t", payloads=["a", "b"]))
        await asyncio.sleep(0.01)
        between = round(time.time() * 1000)
        await asyncio.sleep(0.01)
        await wire.ask(produce("t", payload="c"))
        assert answer(await wire.ask(get(f"/topics/t/offset?at={between}"))) == (
            200,
            {"topic": "t", "offset": 2},
        )
        assert (
            answer(await wire.ask(get("/topics/t/offset?at=2000-01-01T00:00:00Z")))[1]["offset"]
            == 0
        )
        assert answer(await wire.ask(get("/topics/t/offset?at=2100-01-01")))[1]["offset"] == 3
        assert [
            record["offset"]
            for record in answer(await wire.ask(get(f"/topics/t/consume?at={between}")))[1]
        ] == [2]
        await wire.ask(post("/topics/t/groups/g/commit", b'{"offset": 1}'))
        status, details = answer(await wire.ask(get("/topics/t")))
        assert status == 200
        assert (details["first_offset"], details["next_offset"], details["records"]) == (0, 3, 3)
        assert details["bytes"] > 0
        assert len(details["segments"]) == 1
        assert [
            (group["group"], group["committed"], group["lag"]) for group in details["groups"]
        ] == [("g", 1, 2)]
        assert answer(await wire.ask(request("DELETE", "/topics/t", b""))) == (
            200,
            {"topic": "t", "status": "deleted"},
        )
        assert answer(await wire.ask(get("/topics"))) == (200, [])


async def test_a_group_leases_renews_completes_and_is_forgotten(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (_, wire):
        group = "/topics/t/groups/g"
        await wire.ask(produce("t", payloads=["a", "b", "c"]))
        leased = answer(
            await wire.ask(post(f"{group}/lease", b'{"member": "m", "max_records": 2}'))
        )[1]
        assert (leased["start"], leased["end"]) == (0, 2)
        assert leased["expires_in"] > 1
        lease = json.dumps({"lease": leased["lease"]}).encode()
        assert answer(await wire.ask(post(f"{group}/renew", lease)))[1]["end"] == 2
        second = answer(await wire.ask(post(f"{group}/lease", b'{"member": "n"}')))[1]
        assert (second["start"], second["end"]) == (2, 3)
        assert (
            await wire.ask(post(f"{group}/lease", b'{"member": "n", "wait_ms": 20}'))
        ).status == 204
        assert answer(await wire.ask(post(f"{group}/complete", lease))) == (
            200,
            {"group": "g", "topic": "t", "committed": 2, "lag": 1},
        )
        assert (await wire.ask(post(f"{group}/complete", lease))).status == 409
        details = answer(await wire.ask(get(group)))[1]
        assert (details["committed"], [each["member"] for each in details["leases"]]) == (2, ["n"])
        assert [each["group"] for each in answer(await wire.ask(get("/topics/t/groups")))[1]] == [
            "g"
        ]
        assert (await wire.ask(request("DELETE", group, b""))).status == 200
        assert (await wire.ask(get(group))).status == 404


async def test_topics_are_listed_with_figures_and_a_group_is_reset_after_a_preview(
    tmp_path: Path,
) -> None:
    async with over_http(tmp_path) as (_, wire):
        for name, count in (("big", 5), ("small", 1), ("other", 2)):
            await wire.ask(produce(name, payloads=["x"] * count))
        await wire.ask(post("/topics/big/groups/g/commit", b'{"offset": 4}'))

        async def reset(body: dict[str, Any]) -> tuple[int, Any]:
            return answer(
                await wire.ask(post("/topics/big/groups/g/reset", json.dumps(body).encode()))
            )

        status, preview = await reset({"to": "beginning", "dryRun": True})
        assert status == 200
        assert (preview["lag"], preview["before"], preview["lagBefore"]) == (5, 4, 1)
        status, page = answer(await wire.ask(get("/topics?details=true&sort=-records&limit=2")))
        assert (status, page["total"]) == (200, 3)
        assert [(one["name"], one["records"]) for one in page["topics"]] == [
            ("big", 5),
            ("other", 2),
        ]
        assert (page["topics"][0]["worstLag"], page["topics"][1]["worstLag"]) == (1, None)
        assert (await reset({"to": "beginning"}))[1]["committed"] == 0
        page = answer(await wire.ask(get("/topics?details=true&filter=IG&sort=worstLag")))[1]
        assert [one["worstLag"] for one in page["topics"]] == [5]
        assert (await reset({"offset": 3}))[1]["lag"] == 2
        assert (await reset({"at": "2000-01-01T00:00:00Z"}))[1]["lag"] == 5
        assert (await reset({"offset": 3, "to": "end"}))[0] == 400
        assert (
            await wire.ask(post("/topics/other/groups/g/reset", b'{"to": "end"}'))
        ).status == 404
        assert (await wire.ask(get("/topics?details=true&sort=nothing"))).status == 400


# -- server-sent events
# ---------------------------------------------------------------------------------------------


class Events:
    """Reads an event stream: what `read` returns is the text of one event, or of a comment."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._text = b""

    async def open(self, target: str, *headers: str) -> dict[str, str]:
        self._wire.send(get(target, *headers))
        head = (await self._wire.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        assert head[0].split(" ")[1] == "200", head
        return {
            name.lower(): value
            for name, _, value in (line.partition(": ") for line in head[1:] if line)
        }

    async def read(self) -> str:
        async with asyncio.timeout(60):
            while b"\n\n" not in self._text:
                size = int((await self._wire.reader.readuntil(b"\r\n"))[:-2], 16)
                piece = await self._wire.reader.readexactly(size + 2)
                if not size:
                    return ""
                self._text += piece[:-2]
        event, _, self._text = self._text.partition(b"\n\n")
        return event.decode()

    async def offset(self) -> int:
        event = await self.read()
        identity, kind, data = event.split("\n")
        record = json.loads(data.removeprefix("data: "))
        assert identity == f"id: {record['offset']}"
        assert kind == "event: message"
        return int(record["offset"])


@asynccontextmanager
async def events(served: Served, target: str, *headers: str) -> AsyncIterator[Events]:
    wire = Wire(
        *await asyncio.open_connection("127.0.0.1", served.http.port)
    )  # reads little ahead of the test
    try:
        stream = Events(wire)
        await stream.open(target, *headers)
        yield stream
    finally:
        await wire.close()


async def test_a_stream_begins_with_what_is_there_and_goes_on_with_what_comes(
    tmp_path: Path,
) -> None:
    async with over_http(tmp_path) as (served, wire):
        await wire.ask(produce("t", payload="Message content"))
        async with connected(served.http) as other:
            stream = Events(other)
            headers = await stream.open("/topics/t/stream?offset=0")
            assert headers["content-type"] == "text/event-stream"
            assert headers["cache-control"] == "no-cache"
            assert headers["connection"] == "keep-alive"
            event = await stream.read()
            assert event.startswith(
                'id: 0\nevent: message\ndata: {"offset":0,"topic":"t","payload":"Message content"}'
            )
            for number in range(1, 50):
                await wire.ask(produce("t", payload=f"two\nlines {number}"))
                assert await stream.offset() == number


@pytest.mark.parametrize(
    ("target", "headers", "first"),
    [
        ("", [], 0),
        ("?offset=3", [], 3),
        ("?offset=latest", [], 5),
        ("?offset=9", [], 9),
        ("", ["Last-Event-ID: 1"], 2),
        ("?offset=0", ["Last-Event-ID: 4"], 5),
        ("?at=2000-01-01T00:00:00Z", [], 0),
    ],
)
async def test_a_stream_begins_where_it_is_told(
    tmp_path: Path, target: str, headers: list[str], first: int
) -> None:
    async with over_http(tmp_path) as (served, wire):
        await wire.ask(produce("t", payloads=[*"abcde"]))
        async with events(served, "/topics/t/stream" + target, *headers) as stream:
            await eventually(lambda: served.feeds.subscribers == 1)
            for _ in range(6):
                await wire.ask(produce("t", payload="later"))
            assert await stream.offset() == first
            assert await stream.offset() == first + 1


async def test_every_stream_gets_a_comment_once_in_a_period(tmp_path: Path) -> None:
    async with over_http(tmp_path, keep_alive=0.01) as (served, _):
        await served.topics.create("t")
        async with (
            events(served, "/topics/t/stream") as one,
            events(served, "/topics/t/stream") as two,
        ):
            for _ in range(3):
                assert await one.read() == ": keep-alive"
                assert await two.read() == ": keep-alive"


async def test_a_slow_stream_holds_back_nobody_and_misses_nothing(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (served, _):
        await served.topics.create("t")
        topic = served.topics.require("t")
        async with (
            events(served, "/topics/t/stream") as quick,
            events(served, "/topics/t/stream") as slow,
        ):
            payload = b"x" * 10_000
            for number in range(
                3000
            ):  # 30 MB: far beyond what sockets and buffers of the slow one take
                await topic.append([payload])
                if number % 100 == 99:
                    assert [await quick.offset() for _ in range(100)] == [
                        *range(number - 99, number + 1)
                    ]
            feed = served.feeds.of(topic)
            assert feed.subscribers == 2
            await eventually(lambda: len(feed.live) <= 1)
            assert psutil.Process().memory_info().rss < 2 << 30
            for number in range(3000):
                assert await slow.offset() == number
            await topic.append([b"last"])
            assert await slow.offset() == 3000


async def test_a_deleted_topic_ends_its_streams(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (served, wire):
        await wire.ask(produce("t", payload="x"))
        async with events(served, "/topics/t/stream") as stream:
            assert await stream.offset() == 0
            await wire.ask(request("DELETE", "/topics/t", b""))
            assert await stream.read() == ""
        await eventually(lambda: not served.feeds.subscribers)


async def test_a_stream_of_a_topic_that_is_deleted_at_that_moment_ends(tmp_path: Path) -> None:
    ended = asyncio.Event()

    class Subscriber:
        def deliver(self, chunk: FeedChunk) -> bool:
            return True

        def ended(self) -> None:
            ended.set()

    async with over_http(tmp_path) as (served, _):
        topic = await served.topics.create("t")
        await served.topics.delete("t")
        served.feeds.subscribe(topic, Subscriber(), topic.next_offset)
        await asyncio.wait_for(ended.wait(), 60)


async def test_clients_that_leave_are_forgotten(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (served, _):
        await served.topics.create("t")
        for _ in range(5):
            async with events(served, "/topics/t/stream"):
                await eventually(lambda: served.feeds.subscribers == 1)
            await eventually(lambda: served.feeds.subscribers == 0)
        assert not len(served.topics.require("t").subscriptions)


async def test_damage_is_told_and_the_stream_goes_on_behind_it(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (served, wire):
        for letter in "abc":
            await wire.ask(produce("t", payload=letter))
        with (tmp_path / "t" / "data.log").open("r+b") as file:
            file.seek(13)
            file.write(b"\xff" * 8)  # the second record's offset
        async with events(served, "/topics/t/stream") as stream:
            assert await stream.offset() == 0
            said = await stream.read()
            assert said.startswith("event: error\ndata: ")
            assert "damaged" in said
            assert await stream.offset() == 2


async def test_streams_go_on_when_the_disk_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "RETRY_SECONDS", 0.01)
    failures = 0

    def fail(*_: Any) -> bytes:
        nonlocal failures
        failures += 1
        raise StorageFailed("reading data.log failed: Input/output error")

    async with over_http(tmp_path) as (served, wire):
        await wire.ask(produce("t", payloads=[*"ab"]))
        async with events(served, "/topics/t/stream") as live:
            assert [await live.offset() for _ in "ab"] == [0, 1]
            with monkeypatch.context() as broken:
                broken.setattr(DiskFile, "read_at", fail)
                async with events(served, "/topics/t/stream") as late:
                    await eventually(lambda: failures >= 1)
                    before = failures
                    await wire.ask(produce("t", payload="c"))
                    await eventually(lambda: failures > before + 2)
                    broken.undo()
                    assert [await late.offset() for _ in "abc"] == [0, 1, 2]
                    assert await live.offset() == 2


async def test_many_idle_streams_cost_little_and_all_are_reached(tmp_path: Path) -> None:
    count = pick(short=150, usual=500, soak=10_000)

    async with over_http(tmp_path) as (served, wire):
        await served.topics.create("t")
        before = psutil.Process().memory_info().rss
        clients = await start(served.http.port, count, get("/topics/t/stream"), "everyone")
        await said(clients, "connected")
        await eventually(lambda: served.feeds.subscribers == count, timeout=60)
        each = (psutil.Process().memory_info().rss - before) / count
        print(f"{each / 1024:.1f} KiB for each stream")
        assert each < 32 << 10
        await wire.ask(produce("t", payload="to everyone"))
        await said(clients, "reached")
        await clients.wait()
        await eventually(lambda: served.feeds.subscribers == 0, timeout=60)


@pytest.mark.parametrize(
    ("target", "headers", "first"),
    [
        ("", [], 0),
        ("?offset=earliest", [], 0),
        ("?offset=latest", [], 0),
        ("?offset=2", [], 2),
        ("?offset=0", ["Last-Event-ID: 2"], 3),
        ("?at=2000-01-01T00:00:00Z", [], 0),
    ],
)
async def test_a_stream_waits_for_a_topic_that_does_not_exist_yet(
    tmp_path: Path, target: str, headers: list[str], first: int
) -> None:
    async with (
        serving(tmp_path, keep_alive=0.01) as served,
        connected(served.http) as wire,
        events(served, "/topics/later/stream" + target, *headers) as stream,
    ):
        assert await stream.read() == ": keep-alive"
        assert served.topics.names() == []
        for number in range(6):
            await wire.ask(produce("later", payload=f"{number}"))
        received = [await next_event(stream) for _ in range(2)]
        assert [event.split("\n")[0] for event in received] == [f"id: {first}", f"id: {first + 1}"]


async def next_event(stream: Events) -> str:
    while (event := await stream.read()) == ": keep-alive":
        pass
    return event


async def test_a_stream_that_waits_ends_with_its_client_and_another_gets_the_next_topic(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as served, connected(served.http) as wire:
        async with events(served, "/topics/t/stream"):
            pass
        await wire.ask(produce("t", payload="one"))
        await served.topics.delete("t")
        async with events(served, "/topics/t/stream") as stream:
            await wire.ask(produce("t", payload="two"))
            assert json.loads((await stream.read()).partition("data: ")[2])["payload"] == "two"
            await served.topics.delete("t")
            assert await stream.read() == ""


async def test_a_topic_that_could_not_be_opened_is_an_error_and_not_an_empty_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "t" / "data.log").mkdir(parents=True)
    async with serving(tmp_path) as served, connected(served.http) as wire:
        for message in (
            get("/topics/t/consume"),
            get("/topics/t/next_offset"),
            get("/topics/t/stream"),
            produce("t", payload="x"),
        ):
            answer = await wire.ask(message)
            assert answer.status == 503, answer.body
            assert b"topic 't' cannot be opened" in answer.body
