"""Connections: framing, limits, time limits, backpressure, the end."""

import asyncio
import gzip
import json
import socket
import struct
from pathlib import Path

import pytest

from penstock.config.schema import HttpServerSettings as Settings
from penstock.wire.http import connection as http_connection
from penstock.wire.http.connection import HttpConnection
from penstock.wire.http.messages import Request, Response, Stream, StreamResponse, json_response
from penstock.wire.http.routes import HttpRoute, Router
from penstock.wire.http.server import Binding, HttpServer
from tests.support.http import Wire, connected, get, post, serving, talking
from tests.support.wait import eventually


def echo(request: Request) -> Response:
    return Response(200, request.body, "application/octet-stream")


ECHO = HttpRoute("POST", "/echo", echo)
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
HEAD = b"POST /echo HTTP/1.1\r\nHost: t\r\n"


def connection_of(server: HttpServer) -> HttpConnection:
    (connection,) = server.state.connections
    return connection


async def refused(wire: Wire, data: bytes, status: int) -> str:
    """Send, expect this error and the end of the connection; the error's text."""
    wire.send(data)
    reply = await wire.reply()
    assert reply.status == status
    assert reply.headers["connection"] == "close"
    assert await wire.ended() == b""
    return str(json.loads(reply.body)["error"])


async def test_a_chunked_body_arrives_whole_whatever_its_chunks() -> None:
    async with talking(ECHO) as (_, wire):
        chunked = (
            CHUNKED + b"5\r\nhello\r\n1;ext=1\r\n \r\n00005\r\nworld\r\n0\r\nX-Trailer: 1\r\n\r\n"
        )
        wire.send(chunked + post("/echo", b"next") + chunked)
        assert [(await wire.reply()).body for _ in range(3)] == [
            b"hello world",
            b"next",
            b"hello world",
        ]


async def test_a_request_may_arrive_byte_by_byte() -> None:
    async with talking(ECHO) as (_, wire):
        wire.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for data in (b"\r\n" + post("/echo", b"hello"), CHUNKED + b"3\r\nabc\r\n0\r\n\r\n"):
            for byte in data:
                wire.send(bytes([byte]))
                await asyncio.sleep(0)
            assert (await wire.reply()).status == 200


async def test_a_large_body_arrives_whole_and_goes_back_whole() -> None:
    async with talking(ECHO) as (_, wire):
        payload = bytes(range(256)) * 40_000
        reply = await wire.ask(post("/echo", payload))
        assert reply.body == payload


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc", 400),
        (HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (HEAD + b"Content-Length: 3, 4\r\n\r\nabcd", 400),
        (HEAD + b"Content-Length: +3\r\n\r\nabc", 400),
        (HEAD + b"Content-Length: -1\r\n\r\nabc", 400),
        (HEAD + b"Content-Length: 3x\r\n\r\nabc", 400),
        (HEAD + b"Content-Length : 3\r\n\r\nabc", 400),
        (HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"X: 1\r\n Content-Length: 3\r\n\r\nabc", 400),
        (HEAD + b"X: 1\nContent-Length: 3\r\n\r\nabc", 400),
        (HEAD + b"X: 1\rContent-Length: 3\r\n\r\nabc", 400),
        (HEAD + b"X: a\x00b\r\n\r\n", 400),
        (HEAD + b": empty\r\n\r\n", 400),
        (HEAD + b"Host: other\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\nHost: t\n\n", 400),
        (b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /echo#x HTTP/1.1\r\nHost: t\r\n\r\n", 400),
        (b"POST /echo HTTP/2.0\r\nHost: t\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /echo\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (HEAD + b"Expect: something\r\n\r\n", 417),
        (CHUNKED + b"x\r\n", 400),
        (CHUNKED + b"3\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", 400),
        (CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"11111111111111111\r\nabc", 400),
        (CHUNKED + b"3" + b";" + b"x" * 2000, 400),
    ],
)
async def test_what_two_servers_could_read_differently_is_refused_and_ends_the_connection(
    data: bytes, status: int
) -> None:
    async with talking(ECHO) as (_, wire):
        assert await refused(wire, data + post("/echo", b"smuggled"), status)


async def test_expect_100_continue_is_answered_before_the_body_is_sent() -> None:
    async with talking(ECHO, max_body=10) as (_, wire):
        wire.send(HEAD + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert (await wire.reply()).status == 100
        wire.send(b"abc")
        assert (await wire.reply()).body == b"abc"
        wire.send(HEAD + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\nabc")
        assert (await wire.reply()).body == b"abc"
        await refused(wire, HEAD + b"Content-Length: 11\r\nExpect: 100-continue\r\n\r\n", 413)


async def test_headers_above_the_limit_are_a_431_also_before_they_end() -> None:
    async with serving(ECHO, max_header=1000) as server:
        async with connected(server) as wire:
            assert "1000" in await refused(wire, HEAD + b"X: " + b"x" * 1000, 431)
        async with connected(server) as wire:
            await refused(wire, HEAD + b"X: " + b"x" * 1000 + b"\r\n\r\n", 431)
        async with connected(server) as wire:
            assert (await wire.ask(HEAD + b"X: " + b"x" * 800 + b"\r\n\r\n")).status == 200


async def test_a_body_above_the_limit_is_a_413_before_it_is_kept() -> None:
    async with serving(ECHO, max_body=1000) as server:
        async with connected(server) as wire:
            assert "1000" in await refused(wire, HEAD + b"Content-Length: 1001\r\n\r\n", 413)
        async with connected(server) as wire:
            await refused(wire, CHUNKED + b"3E8\r\n" + b"x" * 1000 + b"\r\n1\r\n", 413)
        async with connected(server) as wire:
            await refused(wire, CHUNKED + b"ffffffffffff\r\n", 413)
        async with connected(server) as wire:
            assert len((await wire.ask(post("/echo", b"x" * 1000))).body) == 1000


async def test_a_client_still_sending_its_refused_body_gets_to_read_the_answer() -> None:
    async with talking(ECHO, max_body=1000) as (_, wire):
        wire.send(HEAD + b"Content-Length: 9000000\r\n\r\n")
        for _ in range(90):
            wire.send(b"x" * 100_000)
            await wire.writer.drain()
        assert (await wire.reply()).status == 413


@pytest.mark.parametrize(
    ("data", "setting", "text"),
    [
        (b"POST /echo HT", "header_timeout", "headers"),
        (b"\r", "header_timeout", "headers"),
        (HEAD + b"Content-Length: 5\r\n\r\nab", "body_timeout", "body"),
        (CHUNKED + b"5\r\nab", "body_timeout", "body"),
    ],
)
async def test_a_request_that_does_not_arrive_in_time_is_a_408(
    data: bytes, setting: str, text: str
) -> None:
    async with talking(ECHO, **{setting: 0.1}) as (_, wire):
        assert text in await refused(wire, data, 408)


async def test_headers_that_trickle_in_do_not_extend_their_time() -> None:
    async with talking(ECHO, header_timeout=0.2) as (_, wire):

        async def trickle() -> None:
            while True:
                wire.send(
                    b"POST /echo HTTP/1.1\r\nHost: t\r\nX: 1234567890123456789"[
                        sent[0] : sent[0] + 1
                    ]
                    or b"x"
                )
                sent[0] += 1
                await asyncio.sleep(0.02)

        sent = [0]
        task = asyncio.ensure_future(trickle())
        assert (await wire.reply()).status == 408
        task.cancel()


async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with talking(ECHO, idle_timeout=0.1) as (server, fresh), connected(server) as used:
        assert (await used.ask(post("/echo", b"1"))).status == 200
        assert await used.ended() == b""
        assert await fresh.ended() == b""


async def test_a_handler_that_takes_long_is_not_cut_by_any_time_limit() -> None:
    async def slow(_: Request) -> Response:
        await asyncio.sleep(0.5)
        return json_response("done")

    limits = dict.fromkeys(("idle_timeout", "header_timeout", "body_timeout", "send_timeout"), 0.1)
    async with talking(HttpRoute("GET", "/slow", slow), **limits) as (_, wire):
        assert (await wire.ask(get("/slow"))).body == b'"done"'


async def test_connections_beyond_the_limit_get_a_503_and_a_freed_place_is_used_again() -> None:
    async with serving(ECHO, max_connections=2) as server:
        async with connected(server) as one, connected(server) as two:
            for wire in (one, two):
                assert (await wire.ask(post("/echo", b"1"))).status == 200
            async with connected(server) as third:
                assert (await third.reply()).status == 503
                assert await third.ended() == b""
        await eventually(lambda: server.connections == 0)
        async with connected(server) as wire:
            assert (await wire.ask(post("/echo", b"1"))).status == 200


async def test_a_client_that_pipelines_and_does_not_read_stops_being_served_and_read() -> None:
    called = 0

    def big(_: Request) -> Response:
        nonlocal called
        called += 1
        return Response(200, b"x" * 50_000, "text/plain")

    async with talking(HttpRoute("GET", "/big", big)) as (server, wire):
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        flood = get("/big", "X-Pad: " + "x" * 2000) * 100
        sending = asyncio.ensure_future(_send_all(wire, flood, 500))
        connection = connection_of(server)
        await eventually(lambda: connection.paused)
        before = called
        most = 0
        for _ in range(20):
            most = max(
                most,
                connection.output.transport.get_write_buffer_size() + len(connection.rest),
            )
            await asyncio.sleep(0.01)
        assert called == before < 1000, "requests were answered although nobody reads"
        assert most < 1_000_000
        assert not sending.done(), "the server kept reading"
        wire.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(2000):
            assert len((await wire.reply()).body) == 50_000
        sending.cancel()


async def _send_all(wire: Wire, data: bytes, times: int) -> None:
    for _ in range(times):
        wire.send(data)
        await wire.writer.drain()


async def test_a_slow_handler_holds_back_what_is_pipelined_behind_it_within_a_bound() -> None:
    release = asyncio.Event()

    async def slow(_: Request) -> Response:
        await release.wait()
        return json_response("slow")

    async with talking(HttpRoute("GET", "/slow", slow), ECHO) as (server, wire):
        wire.send(get("/slow"))
        sending = asyncio.ensure_future(_send_all(wire, post("/echo", b"x" * 1000) * 100, 100))
        connection = connection_of(server)
        await eventually(lambda: connection.paused)
        assert len(connection.rest) < 1_000_000
        assert not sending.done()
        release.set()
        assert (await wire.reply()).body == b'"slow"'
        for _ in range(10_000):
            assert len((await wire.reply()).body) == 1000
        await sending


async def test_a_client_that_takes_nothing_for_too_long_is_cut() -> None:
    route = HttpRoute("GET", "/big", lambda _: Response(200, b"x" * 20_000_000, "text/plain"))
    async with talking(route, send_timeout=0.2) as (server, wire):
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        wire.send(get("/big", "Connection: close"))
        await eventually(lambda: server.connections == 1)
        await eventually(lambda: server.connections == 0)


async def test_keep_alive_follows_the_version_and_the_connection_header() -> None:
    async with serving(ECHO) as server:
        for head, kept in (
            (b"POST /echo HTTP/1.1\r\nHost: t\r\n\r\n", True),
            (b"POST /echo HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n", False),
            (b"POST /echo HTTP/1.0\r\n\r\n", False),
            (b"POST /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
        ):
            async with connected(server) as wire:
                reply = await wire.ask(head)
                assert reply.status == 200
                if kept:
                    assert (await wire.ask(head)).status == 200
                else:
                    assert reply.headers["connection"] == "close"
                    assert await wire.ended() == b""


async def test_a_client_that_closes_its_sending_half_still_gets_all_its_answers() -> None:
    async def later(_: Request) -> Response:
        await asyncio.sleep(0.05)
        return json_response("later")

    async with serving(ECHO, HttpRoute("GET", "/later", later)) as server:
        async with connected(server) as wire:
            chunked = CHUNKED + b"1\r\ny\r\n0\r\n\r\n"
            wire.send(get("/later") + post("/echo", b"x") + chunked + get("/later") + chunked)
            wire.writer.write_eof()
            assert [(await wire.reply()).body for _ in range(5)] == [
                b'"later"',
                b"x",
                b"y",
                b'"later"',
                b"y",
            ]
            assert await wire.ended() == b""
        for cut in (post("/echo", b"x")[:-1], CHUNKED + b"5\r\nab", b"POST /echo HTTP/1.1\r\n"):
            async with connected(server) as wire:
                wire.send(cut)
                wire.writer.write_eof()
                reply = await wire.reply()
                assert (reply.status, b"ended within" in reply.body) == (400, True)


@pytest.mark.parametrize("how", ["close", "abort", "half"])
async def test_a_handler_is_told_once_when_its_client_goes_away(how: str) -> None:
    reported: list[str] = []
    waiting = asyncio.Event()

    async def poll(request: Request) -> Response:
        gone = asyncio.get_running_loop().create_future()
        request.on_disconnect(lambda: (reported.append("gone"), gone.set_result(None))[0])
        waiting.set()
        await gone
        return json_response("too late")

    async with serving(HttpRoute("GET", "/poll", poll)) as server:
        async with connected(server) as wire:
            wire.send(get("/poll"))
            await waiting.wait()
            {
                "close": wire.writer.close,
                "abort": wire.writer.transport.abort,
                "half": wire.writer.write_eof,
            }[how]()
            await eventually(lambda: reported)
            await eventually(lambda: server.connections == 0 or how == "half")
        assert reported == ["gone"]


async def test_a_handler_is_not_told_after_its_answer() -> None:
    reported: list[str] = []

    async def answer(request: Request) -> Response:
        request.on_disconnect(lambda: reported.append("gone"))
        await asyncio.sleep(0)
        return json_response("ok")

    async with serving(HttpRoute("GET", "/x", answer)) as server:
        async with connected(server) as wire:
            assert (await wire.ask(get("/x"))).status == 200
        await eventually(lambda: server.connections == 0)
    assert reported == []


async def test_stopping_closes_idle_connections_and_finishes_what_is_under_way() -> None:
    release = asyncio.Event()
    waiting = asyncio.Event()

    async def slow(_: Request) -> Response:
        waiting.set()
        await release.wait()
        return json_response("finished")

    routes = HttpRoute("GET", "/slow", slow), ECHO
    async with (
        talking(*routes) as (server, idle),
        connected(server) as busy,
        connected(server) as uploading,
    ):
        assert (await idle.ask(post("/echo", b""))).status == 200
        uploading.send(post("/echo", b"12345")[:-1])
        busy.send(get("/slow"))
        await waiting.wait()
        await eventually(lambda: server.connections == 3)
        port = server.port
        stopping = asyncio.ensure_future(server.stop(5.0))
        assert await idle.ended() == b""
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)
        uploading.send(b"5")
        reply = await uploading.reply()
        assert (reply.body, reply.headers["connection"]) == (b"12345", "close")
        assert not stopping.done()
        release.set()
        reply = await busy.reply()
        assert (reply.body, reply.headers["connection"]) == (b'"finished"', "close")
        await stopping


async def test_stopping_cuts_what_does_not_finish_within_the_deadline() -> None:
    cancelled = asyncio.Event()
    waiting = asyncio.Event()

    async def never(_: Request) -> Response:
        waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return json_response("never")

    async with talking(HttpRoute("GET", "/never", never)) as (server, wire):
        wire.send(get("/never"))
        await waiting.wait()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await server.stop(0.1)
        assert loop.time() - began < 30
        assert cancelled.is_set()


async def test_a_unix_socket_serves_as_well(scratch: Path) -> None:
    path = scratch / "http.sock"
    server = HttpServer(Router([ECHO]), Settings(), binding=Binding(unix_path=path))
    await server.start()
    wire = Wire(*await asyncio.open_unix_connection(str(path)))
    assert (await wire.ask(post("/echo", b"unix"))).body == b"unix"
    await wire.close()
    await server.stop()
    assert not path.exists()


async def test_two_servers_share_a_port_when_told_to() -> None:
    one = HttpServer(Router([ECHO]), Settings(port=0), binding=Binding(reuse_port=True))
    await one.start()
    two = HttpServer(Router([ECHO]), Settings(port=one.port), binding=Binding(reuse_port=True))
    await two.start()
    try:
        served = set()
        for _ in range(200):
            async with connected(one) as wire:
                assert (await wire.ask(post("/echo", b"x"))).status == 200
                served.update(
                    number for number, server in enumerate((one, two)) if server.connections
                )
            if len(served) == 2:
                break
        assert served == {0, 1}
    finally:
        await one.stop()
        await two.stop()


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_it_also_runs_on_the_loop_of_the_standard_library() -> None:
    async with talking(ECHO) as (_, wire):
        wire.send(
            post("/echo", b"1") + CHUNKED + b"1\r\n2\r\n0\r\n\r\n" + post("/echo", b"3" * 500_000)
        )
        assert [len((await wire.reply()).body) for _ in range(3)] == [1, 1, 500_000]


async def test_after_an_error_a_connection_lingers_for_a_limited_time_however_much_its_client_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connection, "LINGER_SECONDS", 0.5)

    async with talking(ECHO, header_timeout=0.4) as (server, wire):
        wire.send(b"nonsense\r\n\r\n")
        assert (await wire.reply()).status == 400

        async def drip() -> None:
            while True:
                wire.send(b"x")
                await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        await eventually(lambda: server.connections == 0)
        dripping.cancel()


async def test_after_an_error_a_limited_number_of_bytes_is_read_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connection, "LINGER_BYTES", 1_000_000)
    monkeypatch.setattr(http_connection, "LINGER_SECONDS", 600.0)

    async with talking(ECHO, max_body=1000) as (server, wire):
        wire.send(HEAD + b"Content-Length: 9000000\r\n\r\n" + b"x" * 100_000)
        assert (await wire.reply()).status == 413
        assert server.connections == 1
        sending = asyncio.ensure_future(_send_all(wire, b"x" * 100_000, 60))
        await eventually(lambda: server.connections == 0)
        with pytest.raises(ConnectionError):
            await sending


@pytest.mark.parametrize("head", [HEAD + b"Content-Length: 5000\r\n\r\n", CHUNKED + b"1000\r\n"])
async def test_a_body_that_trickles_in_is_a_408(head: bytes) -> None:
    async with talking(ECHO, body_timeout=0.2, body_min_rate=1000) as (_, wire):

        async def trickle() -> None:
            wire.send(head)
            while True:
                wire.send(b"x")
                await asyncio.sleep(0.02)

        task = asyncio.ensure_future(trickle())
        reply = await wire.reply()
        assert (reply.status, b"1000 bytes per second" in reply.body) == (408, True)
        task.cancel()


async def test_a_body_that_arrives_in_pieces_fast_enough_is_served() -> None:
    async with talking(ECHO, body_timeout=0.2, body_min_rate=1000) as (_, wire):
        wire.send(HEAD + b"Content-Length: 100000\r\n\r\n")
        for _ in range(20):
            wire.send(b"x" * 5000)
            await asyncio.sleep(0.05)
        assert len((await wire.reply()).body) == 100_000


@pytest.mark.parametrize("chunked", [False, True])
async def test_all_bodies_that_are_arriving_have_a_common_bound(chunked: bool) -> None:
    start = CHUNKED + b"7A120\r\n" if chunked else HEAD + b"Content-Length: 500000\r\n\r\n"
    end = b"x\r\n0\r\n\r\n" if chunked else b"x"
    async with serving(ECHO, max_body=600_000, max_bodies=1_010_000) as server:
        memory = server.state.memory
        async with (
            connected(server) as one,
            connected(server) as two,
            connected(server) as three,
        ):
            for count, wire in enumerate((one, two), 1):
                wire.send(start + b"x" * 499_999)
                await eventually(lambda: memory.total >= count * 499_999)  # noqa: B023
            three.send(start + b"x" * 300_000)
            reply = await three.reply()
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            async with connected(server) as small:
                assert (await small.ask(post("/echo", b"x" * 60_000))).status == 200
                small.send(post("/echo", b"x" * 60_000)[:-1])
                await eventually(lambda: memory.total > 1_010_000)
                async with connected(server) as large:  # refused when it is announced
                    large.send(HEAD + b"Content-Length: 70000\r\n\r\n")
                    assert (await large.reply()).status == 503
                small.send(b"x")
                assert (await small.reply()).status == 200
            for wire in (one, two):
                wire.send(end)
                assert len((await wire.reply()).body) == 500_000
            async with connected(server) as again:
                assert (await again.ask(post("/echo", b"x" * 500_000))).status == 200
            one.send(start + b"x" * 1000)
        await eventually(lambda: server.connections == 0)
        assert memory.total == 0


@pytest.mark.parametrize("client_stays", [True, False])
async def test_a_large_body_counts_until_its_request_is_answered(client_stays: bool) -> None:
    release = asyncio.Event()

    async def slow(_: Request) -> Response:
        await release.wait()
        return json_response("done")

    async with serving(HttpRoute("POST", "/slow", slow)) as server:
        memory = server.state.memory
        async with connected(server) as wire:
            wire.send(post("/slow", b"x" * 3_000_000))
            await eventually(lambda: memory.total >= 3_000_000 and server.state.running)
            if client_stays:
                release.set()
                assert (await wire.reply()).status == 200
            else:  # reset: a client that has closed may still wait for its answer
                never = struct.pack("ii", 1, 0)
                wire.writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, never
                )
                wire.writer.transport.abort()
        if not client_stays:
            await eventually(lambda: server.connections == 0)
            assert memory.total >= 3_000_000
            release.set()
        await eventually(lambda: memory.total == 0)


async def test_a_stream_that_answers_a_large_body_gives_its_bytes_back() -> None:
    def stream(_: Request) -> StreamResponse:
        async def write(stream: Stream) -> None:
            await stream.write(b"piece")

        return StreamResponse(write)

    async with talking(HttpRoute("POST", "/stream", stream)) as (server, wire):
        assert (await wire.ask(post("/stream", b"x" * 3_000_000))).body == b"piece"
        assert server.state.memory.total == 0


async def test_unpacked_bodies_count_as_well() -> None:
    release = asyncio.Event()

    async def slow(_: Request) -> Response:
        await release.wait()
        return json_response("done")

    packed = post("/slow", gzip.compress(b"x" * 600_000), "Content-Encoding: gzip")
    async with serving(
        HttpRoute("POST", "/slow", slow), max_body=600_000, max_bodies=600_000
    ) as server:
        async with (
            connected(server) as one,
            connected(server) as two,
            connected(server) as three,
        ):
            for count, wire in enumerate((one, two), 1):
                wire.send(packed)
                await eventually(lambda: server.state.memory.total == count * 600_000)  # noqa: B023
            reply = await three.ask(packed)
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            release.set()
            assert [(await wire.reply()).status for wire in (one, two)] == [200, 200]
        assert server.state.memory.total == 0


async def test_half_an_empty_line_before_a_request_is_not_the_start_of_its_head() -> None:
    async with talking(ECHO) as (server, wire):
        connection = connection_of(server)
        wire.send(b"\r")
        await eventually(lambda: connection.partial is not None)
        wire.send(b"\n")
        # else the time for the headers of the next request would have begun already
        await eventually(lambda: connection.partial is None)
        wire.send(post("/echo", b"x"))
        assert (await wire.reply()).body == b"x"
