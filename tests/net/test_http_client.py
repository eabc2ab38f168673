"""The HTTP client against a real socket whose other end does exactly what the test says."""

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.errors import InvalidRequest, TooLarge, Unavailable
from penstock.net import HttpClient
from tests.support.certificates import certificate

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head, await reader.readexactly(length)


@contextlib.asynccontextmanager
async def server(serve: Serve, tls: ssl.SSLContext | None = None):
    """A server that runs `serve` per connection; yields its address and the list of connections so
    far.
    """
    connections: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()

    listening = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}", connections
    finally:
        listening.close()
        for writer in connections:
            writer.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        head, body = await read_request(reader)
        writer.write(
            b"HTTP/1.1 200 OK\r\nX-Head: %d\r\nContent-Length: %d\r\n\r\n" % (len(head), len(body))
            + body
        )
        await writer.drain()


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
async def test_requests_in_turn_share_one_connection():
    async with server(echo) as (url, connections):
        client = HttpClient(url)
        for size in (0, 10, 300_000):
            answer = await client.request("POST", "/echo", b"x" * size)
            assert (answer.status, len(answer.body)) == (200, size)
        assert len(connections) == 1
        await client.close()


async def test_the_pool_is_bounded_and_requests_beyond_it_wait():
    running, most = 0, 0

    async def serve(reader, writer):
        nonlocal running, most
        while True:
            await read_request(reader)
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            writer.write(OK)

    async with server(serve) as (url, connections):
        client = HttpClient(url, pool_size=3)
        answers = await asyncio.gather(*(client.request("GET", "/") for _ in range(12)))
        assert [answer.body for answer in answers] == [b"ok"] * 12
        assert most == 3
        assert len(connections) == 3
        await client.close()


async def test_chunked_unframed_and_interim_answers_are_read_whole():
    answers = [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n3\r\nefg\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 202 Accepted\r\nContent-Length: 1\r\nA: 1\r\na: 2\r\n\r\nx",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nuntil the end",
    ]

    script = iter(answers)

    async def serve(reader, writer):
        while (answer := next(script, None)) is not None:
            await read_request(reader)
            for at in range(len(answer)):
                writer.write(answer[at : at + 1])
                await asyncio.sleep(0)
            if b"until the end" in answer:
                return

    async with server(serve) as (url, connections):
        client = HttpClient(url)
        got = [await client.request("GET", "/") for _ in answers]
        assert [(answer.status, answer.body) for answer in got] == [
            (200, b"abcdefg"),
            (202, b"x"),
            (204, b""),
            (200, b"until the end"),
        ]
        assert got[1].headers["a"] == "1, 2"
        assert len(connections) == 1
        await client.close()


async def test_the_answer_to_head_has_no_body_although_it_names_a_length():
    async def serve(reader, writer):
        head, _ = await read_request(reader)
        writer.write(OK if head.startswith(b"GET") else OK.removesuffix(b"ok"))
        await writer.drain()
        await reader.read()

    async with server(serve) as (url, _):
        client = HttpClient(url)
        answer = await client.request("HEAD", "/", timeout=5)
        assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"", "2")
        assert (await client.request("GET", "/", timeout=5)).body == b"ok"
        await client.close()


@pytest.mark.parametrize(("idempotent", "requests_seen"), [(True, 3), (False, 2)])
async def test_a_reset_on_a_reused_connection_is_retried_once_only_when_idempotent(
    idempotent: bool, requests_seen: int
):
    seen = 0

    async def serve(reader, writer):
        nonlocal seen
        await read_request(reader)
        seen += 1
        writer.write(OK)
        await read_request(reader)
        seen += 1
        writer.transport.abort()

    async with server(serve) as (url, _):
        client = HttpClient(url)
        await client.request("GET", "/")
        if idempotent:
            assert (await client.request("POST", "/", b"x", idempotent=True)).body == b"ok"
        else:
            with pytest.raises(Unavailable):
                await client.request("POST", "/", b"x")
        assert seen == requests_seen
        await client.close()


async def test_a_reset_on_a_fresh_connection_is_never_retried():
    seen = 0

    async def serve(reader, writer):
        nonlocal seen
        await read_request(reader)
        seen += 1
        writer.transport.abort()

    async with server(serve) as (url, _):
        client = HttpClient(url)
        with pytest.raises(Unavailable):
            await client.request("POST", "/", b"x", idempotent=True)
        assert seen == 1
        await client.close()


@pytest.mark.parametrize(
    "cut", [b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"]
)
async def test_an_answer_cut_short_is_an_error_and_not_retried(cut: bytes):
    async def serve(reader, writer):
        await read_request(reader)
        writer.write(OK)
        await read_request(reader)
        writer.write(cut)
        await writer.drain()

    async with server(serve) as (url, connections):
        client = HttpClient(url)
        await client.request("GET", "/")
        with pytest.raises(Unavailable, match="middle of an answer"):
            await client.request("GET", "/", idempotent=True)
        assert len(connections) == 1
        await client.close()


async def test_a_connection_closed_while_idle_is_not_used_again():
    closed = asyncio.Event()

    async def serve(reader, writer):
        await read_request(reader)
        writer.write(OK)
        writer.write_eof()
        await reader.read()  # ends when the client has closed its side
        closed.set()

    async with server(serve) as (url, connections):
        client = HttpClient(url)
        await client.request("GET", "/")
        await closed.wait()
        assert (await client.request("POST", "/", b"x")).status == 200
        assert len(connections) == 2
        await client.close()


async def test_a_late_answer_never_reaches_the_next_request():
    release = asyncio.Event()

    async def serve(reader, writer):
        head, _ = await read_request(reader)
        if b"/slow" in head:
            await release.wait()
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + head.split(b" ")[1][:5].ljust(5)
        )
        await reader.read()

    async with server(serve) as (url, _):
        client = HttpClient(url, pool_size=1)
        with pytest.raises(TimeoutError):
            await client.request("GET", "/slow", timeout=0.05)
        release.set()
        assert (await client.request("GET", "/fast", timeout=5)).body == b"/fast"
        await client.close()


async def test_half_an_answer_behind_the_one_asked_for_never_reaches_the_next_request():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwr")
        await read_request(reader)
        writer.write(b"ong")

    async with server(serve) as (url, connections):
        client = HttpClient(url)
        for _ in range(2):
            assert (await client.request("GET", "/")).body == b"ok"
        assert len(connections) == 2
        await client.close()


async def test_a_refused_connection_is_unavailable():
    async with server(echo) as (url, _):
        pass
    client = HttpClient(url)
    with pytest.raises(Unavailable, match="cannot connect"):
        await client.request("GET", "/")
    await client.close()


async def test_garbage_and_oversized_answers_are_errors():
    async def serve(reader, writer):
        head, _ = await read_request(reader)
        writer.write(b"SMTP ready\r\n\r\n" if b"/garbage" in head else OK)
        await reader.read()

    async with server(serve) as (url, _):
        client = HttpClient(url, max_answer=1)
        with pytest.raises(Unavailable, match="not valid HTTP"):
            await client.request("GET", "/garbage")
        with pytest.raises(TooLarge):
            await client.request("GET", "/")
        await client.close()


async def test_closing_fails_requests_under_way_and_refuses_new_ones():
    asked = asyncio.Event()

    async def serve(reader, writer):
        await read_request(reader)
        asked.set()
        await reader.read()

    async with server(serve) as (url, _):
        client = HttpClient(url)
        pending = asyncio.ensure_future(client.request("GET", "/"))
        await asked.wait()
        await client.close()
        with pytest.raises(Unavailable):
            await pending
        with pytest.raises(Unavailable):
            await client.request("GET", "/")


@pytest.mark.parametrize(
    ("target", "header"),
    [
        ("/a b", ("a", "b")),
        ("/a\r\nX: y", ("a", "b")),
        ("/", ("a", "b\r\nc: d")),
        ("/", ("a:b", "c")),
    ],
)
async def test_nothing_can_be_smuggled_into_a_request(target: str, header: tuple[str, str]):
    with pytest.raises(InvalidRequest):
        await HttpClient("http://127.0.0.1:1").request("GET", target, headers=[header])


async def test_the_prefix_credentials_and_standard_headers_are_sent():
    heads = []

    async def serve(reader, writer):
        heads.append((await read_request(reader))[0])
        writer.write(OK)

    async with server(serve) as (url, _):
        client = HttpClient(
            url.replace("://", "://me:s%40fe@") + "/base/", headers=[("X-App", "1")]
        )
        await client.request("GET", "/x?y=1", headers=[("X-Req", "2")])
        lines = heads[0].decode().split("\r\n")
        assert lines[0] == "GET /base/x?y=1 HTTP/1.1"
        assert {
            "X-App: 1",
            "X-Req: 2",
            "Authorization: Basic bWU6c0BmZQ==",
            "Host: " + url[7:],
        } <= set(lines)
        await client.close()


async def test_tls_verifies_the_server(tmp_path: Path):
    certificate_path, key_path = certificate(tmp_path)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate_path, key_path)
    trusting = ssl.create_default_context(cafile=str(certificate_path))
    async with server(echo, serving) as (url, _):
        url = url.replace("127.0.0.1", "localhost")
        trusted = HttpClient(url, tls=trusting)
        assert (await trusted.request("POST", "/", b"y" * 100_000)).body == b"y" * 100_000
        await trusted.close()
        strict = HttpClient(url)
        with pytest.raises(Unavailable, match="cannot connect"):
            await strict.request("GET", "/")
        await strict.close()
