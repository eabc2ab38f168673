"""Requests passed on to the process that owns the topics."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from penstock.config.schema import HttpServerSettings as Settings
from penstock.errors import Conflict
from penstock.wire.http.forward import forward_to, owner_settings
from penstock.wire.http.messages import (
    EMPTY,
    Request,
    Response,
    Stream,
    StreamResponse,
    json_response,
)
from penstock.wire.http.routes import HttpRoute, Router
from penstock.wire.http.server import Binding, HttpServer
from tests.support.http import Wire, connected, get, request, serving
from tests.support.wait import eventually


class Body(msgspec.Struct):
    number: int


def mirror(request: Request) -> Response:
    about = [
        request.head.method,
        request.head.path,
        request.head.query,
        request.header("x-a"),
        request.header("x-forwarded-for"),
    ]
    return json_response([*about, request.body.decode()], 201, (("X-B", "back"),))


def conflict(_: Request) -> Response:
    raise Conflict("not now")


async def large(stream: Stream) -> None:
    for _ in range(200):
        await stream.write(b"y" * 10_000)


ROUTES = [
    HttpRoute("*", "/topics/{rest...}", mirror),
    HttpRoute("GET", "/conflict", conflict),
    HttpRoute("GET", "/empty", lambda _: EMPTY),
    HttpRoute("GET", "/large", lambda _: StreamResponse(large, "text/plain")),
    HttpRoute("GET", "/big", lambda _: Response(200, b"z" * 3_000_000, "text/plain")),
    HttpRoute(
        "POST", "/typed", lambda request: json_response(request.data.number), body=Body, tag="t"
    ),
]


@asynccontextmanager
async def pair(
    scratch: Path, owner_routes: list[HttpRoute] = ROUTES
) -> AsyncIterator[tuple[HttpServer, HttpServer, Wire]]:
    path = scratch / "owner.sock"
    owner = HttpServer(
        Router(owner_routes), owner_settings(Settings()), binding=Binding(unix_path=path)
    )
    await owner.start()
    async with (
        serving(HttpRoute("*", "/{rest...}", forward_to(path))) as front,
        connected(front) as wire,
    ):
        yield owner, front, wire
    await owner.stop()


async def test_method_path_query_headers_body_and_answer_pass_through_unchanged(
    scratch: Path,
) -> None:
    async with pair(scratch) as (owner, _, wire):
        for method in ("POST", "DELETE", "PUT"):
            reply = await wire.ask(
                request(method, "/topics/a%2Fb?x=1&y=%20", b"hi", "X-A: 1", "Content-Length: 2")
            )
            assert reply.status == 201
            assert json.loads(reply.body) == [
                method,
                "/topics/a%2Fb",
                "x=1&y=%20",
                "1",
                "127.0.0.1",
                "hi",
            ]
            assert (reply.headers["x-b"], reply.headers["content-type"]) == (
                "back",
                "application/json",
            )
        wire.send(get("/conflict") + get("/empty") + get("/large") + get("/big") + get("/nope"))
        replies = [await wire.reply() for _ in range(5)]
        assert [reply.status for reply in replies] == [409, 204, 200, 200, 404]
        assert json.loads(replies[0].body) == {"error": "not now", "code": "Conflict"}
        assert replies[2].body == b"y" * 2_000_000
        assert replies[3].body == b"z" * 3_000_000
        head = await wire.ask(request("HEAD", "/topics/x", b""))
        assert (head.status, int(head.headers["content-length"]) > 0) == (201, True)
        assert owner.connections == 1, "connections to the owner are used again"


async def test_an_event_stream_is_passed_on_as_it_comes_and_ends_when_the_client_leaves(
    scratch: Path,
) -> None:
    events: asyncio.Queue[bytes] = asyncio.Queue()
    ended = asyncio.Event()

    async def live(stream: Stream) -> None:
        try:
            while True:
                await stream.write(await events.get())
        finally:
            ended.set()

    route = HttpRoute(
        "GET", "/events", lambda _: StreamResponse(live, "text/event-stream", live=True)
    )
    async with pair(scratch, [route]) as (_, front, wire):
        wire.send(get("/events"))
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert b"Content-Type: text/event-stream" in head
        for number in range(3):
            events.put_nowait(b"data: %d\n\n" % number)
            assert await wire.reader.readuntil(b"data: %d\n\n" % number)
        await wire.close()
        async with asyncio.timeout(30):
            await ended.wait()
        await eventually(lambda: front.connections == 0)


async def test_a_client_that_leaves_before_the_answer_is_reported_to_the_owner(
    scratch: Path,
) -> None:
    gone = asyncio.Event()
    waiting = asyncio.Event()

    async def poll(request: Request) -> Response:
        request.on_disconnect(gone.set)
        waiting.set()
        await gone.wait()
        return EMPTY

    async with pair(scratch, [HttpRoute("GET", "/poll", poll)]) as (_, _, wire):
        wire.send(get("/poll"))
        await waiting.wait()
        await wire.close()
        async with asyncio.timeout(30):
            await gone.wait()


async def test_a_slow_client_slows_the_owner_down(scratch: Path) -> None:
    written = 0

    async def endless(stream: Stream) -> None:
        nonlocal written
        while True:
            await stream.write(b"x" * 10_000)
            written += 10_000

    async with pair(scratch, [HttpRoute("GET", "/s", lambda _: StreamResponse(endless))]) as (
        _,
        _,
        wire,
    ):
        wire.send(get("/s"))
        await wire.reader.readuntil(b"\r\n\r\n")
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        last = -1

        def stands_still() -> bool:
            nonlocal last
            last, before = written, last
            return before == written > 0

        await eventually(stands_still)
        assert written < 30_000_000


async def test_an_owner_that_is_away_is_a_503_and_it_is_found_again(scratch: Path) -> None:
    path = scratch / "owner.sock"
    async with (
        serving(HttpRoute("*", "/{rest...}", forward_to(path))) as front,
        connected(front) as wire,
    ):
        for _ in range(2):
            reply = await wire.ask(get("/topics/x"))
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            owner = HttpServer(
                Router(ROUTES), owner_settings(Settings()), binding=Binding(unix_path=path)
            )
            await owner.start()
            assert (await wire.ask(get("/topics/x"))).status == 201
            await owner.stop()


async def test_an_owner_that_dies_within_an_answer_is_a_503(scratch: Path) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
        writer.close()

    path = scratch / "owner.sock"
    owner = await asyncio.start_unix_server(die, str(path))
    async with (
        serving(HttpRoute("*", "/{rest...}", forward_to(path))) as front,
        connected(front) as wire,
    ):
        reply = await wire.ask(get("/topics/x"))
        assert (reply.status, b"outcome is unknown" in reply.body) == (503, True)
    owner.close()
