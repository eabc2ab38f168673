"""Nonsense over raw sockets: the server answers 4xx/5xx or closes, and always serves the next
client.
"""

import asyncio
import random
from collections.abc import Iterator
from itertools import pairwise

import httptools
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.wire.http.body import ChunkedBody
from penstock.wire.http.head import parse
from penstock.wire.http.messages import Request, RequestRefused, Response, json_response
from penstock.wire.http.routes import HttpRoute
from penstock.wire.http.server import HttpServer
from tests.support.form import pick
from tests.support.http import Wire, connected, get, post, request, serving

ROUNDS = pick(short=50, usual=150, soak=3000)


class Query(msgspec.Struct):
    limit: int = 1


class Body(msgspec.Struct):
    queue: str
    items: list[int] = []


async def later(request: Request) -> Response:
    await asyncio.sleep(0)
    return json_response(request.args.limit)


ROUTES = (
    HttpRoute("POST", "/push", lambda request: json_response(request.data.queue), body=Body),
    HttpRoute("GET", "/pop/{queue}", later, query=Query),
    HttpRoute(
        "POST",
        "/raw/{rest...}",
        lambda request: Response(200, request.body, "text/plain"),
        body=bytes,
    ),
)
VALID = (
    post("/push", b'{"queue":"orders","items":[1,2,3]}', "Content-Type: application/json"),
    get("/pop/a%20b?limit=10&x=%41", "Accept: */*", "Accept-Encoding: gzip"),
    request("POST", "/raw/x/y", b"5\r\nhello\r\n0\r\nX: y\r\n\r\n", "Transfer-Encoding: chunked"),
    request("POST", "/raw/x", b"hello", "Content-Length: 5", "Expect: 100-continue"),
    request("OPTIONS", "/push", b"", "Origin: x"),
    request("HEAD", "/pop/q", b""),
    b"GET /pop/q HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
)
TOKENS = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"Content-Length: 5\r\n",
    b"Content-Length: 9999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n", b"Host: y\r\n",
    b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"HTTP/1.1", b"HTTP/9.9", b"%", b"%ff", b"/../",
    b"?", b"#", b"{",
    b"[" * 2000, b"\xff\xfe", b"\xc3\x28", b"0\r\n\r\n", b"fffffffffffffff\r\n", b"-1\r\n",
    b"x" * 3000,
    b"CONNECT a:1 HTTP/1.1\r\n\r\n",
)  # fmt: skip


def mutated(chance: random.Random) -> bytes:
    data = bytearray(b"".join(chance.choice(VALID) for _ in range(chance.randint(1, 3))))
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0:
                data[place:place] = chance.choice(TOKENS)
            case 1:
                del data[place : place + chance.randint(1, 20)]
            case 2:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 3:
                data[place:place] = data[place : place + chance.randint(1, 60)]
            case 4:
                data[place:place] = chance.randbytes(chance.randint(1, 30))
            case _:
                del data[place:]
        if not data:
            data = bytearray(chance.randbytes(10))
    return bytes(data)


def split(data: bytes, chance: random.Random) -> Iterator[bytes]:
    while data:
        cut = chance.choice((1, 2, 7, 50, 1000, len(data)))
        yield data[:cut]
        data = data[cut:]


async def provoke(server: HttpServer, pieces: list[bytes]) -> list[int]:
    """Send, half-close, and read until the server closes: the statuses it gave."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    wire = Wire(reader, writer)
    received = bytearray()
    try:
        for piece in pieces:
            wire.send(piece)
            await asyncio.sleep(0)
        writer.write_eof()
        async with asyncio.timeout(30):
            while piece := await reader.read(1 << 16):
                received += piece
    except (ConnectionError, RuntimeError):
        # it closed on us, as it may (uvloop calls writing to a closed transport a RuntimeError)
        pass
    finally:
        await wire.close()
    return statuses(bytes(received))


def statuses(received: bytes) -> list[int]:
    collected = []
    for part in received.split(b"HTTP/1.1 ")[1:]:
        assert part[:3].isdigit(), received[:200]
        collected.append(int(part[:3]))
    assert not received or received.startswith(b"HTTP/1.1 "), received[:200]
    return collected


async def healthy(server: HttpServer) -> None:
    async with connected(server) as wire:
        reply = await wire.ask(post("/push", b'{"queue":"fine"}'))
        assert (reply.status, reply.body) == (200, b'"fine"')


@pytest.mark.parametrize("seed", range(4))
async def test_mutated_requests_get_an_error_or_an_answer_and_the_next_client_is_served(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(*ROUTES, max_body=100_000, max_header=2000) as server:
        for number in range(ROUNDS):
            chance = random.Random(f"{seed} {number}")
            for status in await provoke(server, list(split(mutated(chance), chance))):
                assert status < 500 or status in (501, 505), (seed, number)
            if number % 25 == 0:
                await healthy(server)
        await healthy(server)
    assert not caplog.records, "nothing a client sends is an internal error"


async def test_garbage_gets_an_error_or_nothing() -> None:
    async with serving(*ROUTES, max_body=100_000) as server:
        for number in range(ROUNDS):
            chance = random.Random(number)
            result = await provoke(server, [chance.randbytes(chance.choice((1, 10, 100, 5000)))])
            assert set(result) <= {400, 505}, number
        await healthy(server)


async def test_valid_requests_are_answered_the_same_wherever_they_are_split() -> None:
    async with serving(*ROUTES) as server:
        for data in VALID:
            expected = [status for status in await provoke(server, [data]) if status != 100]
            assert expected in ([200], [204])
            for cut in range(1, len(data)):
                result = await provoke(server, [data[:cut], data[cut:]])
                assert [status for status in result if status != 100] == expected, (data, cut)


class Llhttp:
    """The body as llhttp reads it."""

    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


def read_by_llhttp(encoded: bytes) -> bytes | None:
    collected = Llhttp()
    parser = httptools.HttpRequestParser(collected)
    try:
        parser.feed_data(
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + encoded
        )
    except httptools.HttpParserError:
        return None
    return collected.body if collected.complete else None


def read_by_us(encoded: bytes, cuts: list[int]) -> bytes | None:
    body = ChunkedBody(1 << 20)
    places = [0, *sorted(min(cut, len(encoded)) for cut in cuts), len(encoded)]
    try:
        for begin, end in pairwise(places):
            whole = body.feed(encoded[begin:end])
            if whole is not None:
                return whole if not body.rest and end == len(encoded) else None
    except RequestRefused:
        return None
    return None


CHUNKS = st.lists(st.binary(min_size=1, max_size=40), max_size=6)
CUTS = st.lists(st.integers(0, 300), max_size=6)


@settings(deadline=None, database=None, derandomize=True, max_examples=ROUNDS)
@given(chunks=CHUNKS, cuts=CUTS)
def test_a_chunked_body_is_its_chunks_joined_however_it_is_cut(
    chunks: list[bytes], cuts: list[int]
) -> None:
    encoded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    assert read_by_us(encoded, cuts) == b"".join(chunks) == read_by_llhttp(encoded)


PARTS = st.sampled_from(
    [
        b"0\r\n\r\n",
        b"3\r\nabc\r\n",
        b"3;a=b\r\nabc\r\n",
        b"03\r\nabc\r\n",
        b"3\nabc\n",
        b"3 \r\nabc\r\n",
        b"\r\n",
        b"0\r\n",
        b"3",
        b"\n",
        b"X: y\r\n",
        b"1;a;b=c\r\nx\r\n",
        b'1;a="b"\r\nx\r\n',
        b"1;a=\r\nx\r\n",
        b"X:\r\n",
        b"X y: z\r\n",
        b" x\r\n",
        b"0;x\r\nX: y\r\n\r\n",
        b"abc",
        b"g\r\n",
        b"ffffffffffffffffff\r\n",
        b"-1\r\n",
        b"0x1\r\na\r\n",
        b";\r\n",
        b"\r",
        b" ",
        b"A\r\n0123456789\r\n",
    ]
)


@settings(deadline=None, database=None, derandomize=True, max_examples=4 * ROUNDS)
@given(parts=st.lists(PARTS, max_size=7), cuts=CUTS)
def test_no_chunked_body_is_read_differently_from_llhttp(
    parts: list[bytes], cuts: list[int]
) -> None:
    encoded = b"".join(parts)
    ours = read_by_us(encoded, cuts)
    if ours is not None:
        assert ours == read_by_llhttp(encoded)


@settings(deadline=None, database=None, derandomize=True, max_examples=2 * ROUNDS)
@given(st.binary(max_size=200))
def test_a_head_of_any_bytes_is_parsed_or_refused(data: bytes) -> None:
    for raw in (
        data + b"\r\n\r\n",
        b"GET /" + data + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + data + b"\r\n\r\n",
    ):
        try:
            head = parse(raw)
        except RequestRefused:
            continue
        assert head.path.startswith("/") or head.path == "*"
