"""Answers that are written piece by piece."""

import asyncio
import logging
import sys

import pytest

from penstock.wire.http.messages import Request, Response, Stream, StreamResponse
from penstock.wire.http.routes import HttpRoute
from tests.support.http import connected, get, request, serving, talking
from tests.support.wait import eventually


async def three(stream: Stream) -> None:
    for piece in (b"one ", b"", b"two ", b"x" * 100_000):
        await stream.write(piece)
        await asyncio.sleep(0)


def streaming(request: Request) -> StreamResponse:
    return StreamResponse(three, "text/plain", (("X-A", "b"),))


async def streaming_later(request: Request) -> StreamResponse:
    await asyncio.sleep(0)
    return StreamResponse(three, "text/plain")


WHOLE = b"one two " + b"x" * 100_000


async def test_a_stream_is_sent_in_chunks_and_the_connection_stays_usable() -> None:
    routes = HttpRoute("GET", "/s", streaming), HttpRoute("GET", "/l", streaming_later)
    async with talking(*routes) as (_, wire):
        wire.send(get("/s") + get("/l") + get("/nope"))
        first, second, third = [await wire.reply() for _ in range(3)]
        assert (first.body, first.headers["x-a"], first.headers["content-type"]) == (
            WHOLE,
            "b",
            "text/plain",
        )
        assert (second.body, third.status) == (WHOLE, 404)


async def test_an_old_client_gets_the_stream_until_the_connection_closes() -> None:
    async with talking(HttpRoute("GET", "/s", streaming)) as (_, wire):
        reply = await wire.ask(b"GET /s HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert "transfer-encoding" not in reply.headers
        assert (reply.body, reply.headers["connection"]) == (WHOLE, "close")


async def test_head_of_a_stream_sends_only_the_head() -> None:
    async with talking(HttpRoute("GET", "/s", streaming)) as (_, wire):
        assert (await wire.ask(request("HEAD", "/s", b""))).headers["x-a"] == "b"
        assert (await wire.ask(get("/s"))).body == WHOLE


async def test_a_stream_waits_for_a_client_that_does_not_read() -> None:
    written = 0

    async def endless(stream: Stream) -> None:
        nonlocal written
        while True:
            await stream.write(b"x" * 10_000)
            written += 10_000

    async with talking(HttpRoute("GET", "/s", lambda _: StreamResponse(endless))) as (server, wire):
        wire.send(get("/s"))
        await wire.reader.readuntil(b"\r\n\r\n")
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        (connection,) = server.state.connections
        await eventually(lambda: not connection.output.writable)
        before = written
        for _ in range(20):
            await asyncio.sleep(0.005)
            assert connection.output.transport.get_write_buffer_size() < 1_000_000
        assert written == before
        wire.writer.transport.resume_reading()  # type: ignore[attr-defined]
        while written < before + 5_000_000:
            assert await wire.reader.read(1 << 20)


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_stream_is_cancelled_when_the_client_goes_away(how: str) -> None:
    ended = asyncio.Event()

    async def quiet(stream: Stream) -> None:
        try:
            await stream.write(b"hello")
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(
        HttpRoute("GET", "/s", lambda _: StreamResponse(quiet, live=True))
    ) as server:
        async with connected(server) as wire:
            wire.send(get("/s"))
            assert await wire.reader.readuntil(b"hello")
            {"close": wire.writer.close, "abort": wire.writer.transport.abort}[how]()
            async with asyncio.timeout(30):
                await ended.wait()
        await eventually(lambda: not server.state.running)


async def test_a_live_stream_ends_properly_at_once_when_the_server_stops() -> None:
    async def live(stream: Stream) -> None:
        await stream.write(b"hello")
        await asyncio.Event().wait()

    async with talking(HttpRoute("GET", "/s", lambda _: StreamResponse(live, live=True))) as (
        server,
        wire,
    ):
        wire.send(get("/s"))
        await wire.reader.readuntil(b"hello\r\n")
        loop = asyncio.get_running_loop()
        began = loop.time()
        await server.stop(60.0)
        assert loop.time() - began < 30
        assert await wire.ended() == b"0\r\n\r\n"


async def test_a_stream_that_ends_by_itself_is_finished_before_the_server_stops() -> None:
    release = asyncio.Event()

    async def slow(stream: Stream) -> None:
        await stream.write(b"begin ")
        await release.wait()
        await stream.write(b"end")

    async with talking(HttpRoute("GET", "/s", lambda _: StreamResponse(slow))) as (server, wire):
        wire.send(get("/s"))
        head = await wire.reader.readuntil(b"begin \r\n")
        stopping = asyncio.ensure_future(server.stop(10.0))
        await asyncio.sleep(0)
        release.set()
        assert head.endswith(b"begin \r\n")
        assert await wire.ended() == b"3\r\nend\r\n0\r\n\r\n"
        await stopping


async def test_a_stream_that_fails_is_cut_so_that_the_client_knows_it_is_not_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(stream: Stream) -> None:
        await stream.write(b"begin")
        raise RuntimeError("disk on fire")

    with caplog.at_level(logging.ERROR, "penstock.http"):
        async with talking(HttpRoute("GET", "/s", lambda _: StreamResponse(broken))) as (_, wire):
            wire.send(get("/s"))
            try:
                rest = await wire.ended()
            except ConnectionResetError:
                rest = b""
            assert not rest.endswith(b"0\r\n\r\n")
    assert len(caplog.records) == 1


async def test_a_stream_with_a_header_that_cannot_be_sent_is_a_500() -> None:
    bad = StreamResponse(three, headers=(("X", "a\nb"),))
    async with talking(
        HttpRoute("GET", "/s", lambda _: bad), HttpRoute("GET", "/r", lambda _: Response())
    ) as (_, wire):
        wire.send(get("/s") + get("/r"))
        assert [(await wire.reply()).status for _ in range(2)] == [500, 200]


async def test_a_stream_to_a_fast_client_leaves_the_loop_to_others() -> None:
    async def endless(stream: Stream) -> None:
        while True:
            await stream.write(b"x" * 10_000)

    routes = (
        HttpRoute("GET", "/s", lambda _: StreamResponse(endless)),
        HttpRoute("GET", "/r", lambda _: Response()),
    )
    async with talking(*routes) as (server, other):
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-c", READ_FAST, str(server.port), stdout=asyncio.subprocess.PIPE
        )
        assert reader.stdout is not None
        assert await reader.stdout.readline() == b"reading\n"
        for _ in range(50):
            assert (await other.ask(get("/r"))).status == 200
        reader.kill()
        await reader.wait()


READ_FAST = """
import socket, sys
wire = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
wire.sendall(b"GET /s HTTP/1.1\\r\\nHost: t\\r\\n\\r\\n")
buffer = bytearray(1 << 20)
wire.recv_into(buffer)
print("reading", flush=True)
while wire.recv_into(buffer):
    pass
"""
