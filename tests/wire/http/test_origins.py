"""Which web pages may send requests, which names a broker answers to, and what a body may be."""

import gzip
import json
import socket
import zlib

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, InvalidRequest, TooLarge
from penstock.wire.http.compress import unpack
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import HttpRoute
from penstock.wire.origins import Origins
from tests.support.http import Reply, talking

HERE = "127.0.0.1:6632"


def echo(request: Request) -> Response:
    return Response(200, request.body, "text/plain", (("X-Length", str(len(request.body))),))


ROUTES = (
    HttpRoute("POST", "/push", echo, body=dict[str, int], decode=False),
    HttpRoute("POST", "/raw", echo, body=bytes),
    HttpRoute("POST", "/lines", echo, media=("application/x-ndjson",)),
    HttpRoute("GET", "/pop", lambda _: json_response("a message")),
    HttpRoute("GET", "/page", lambda _: json_response("a page"), page=True),
)


async def ask(
    method: str,
    path: str,
    *headers: str,
    body: bytes = b"",
    host: str = HERE,
    origins: Origins | None = None,
    **limits: int,
) -> Reply:
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        f"Content-Length: {len(body)}",
        *headers,
        "",
        "",
    ]

    async with talking(*ROUTES, origins=origins or Origins(), **limits) as (_, wire):
        return await wire.ask("\r\n".join(lines).encode("latin-1") + body)


def error(reply: Reply) -> str:
    return str(json.loads(reply.body)["error"])


@pytest.mark.parametrize(
    ("request_line", "headers"),
    [
        ("POST /push", ["Origin: https://evil.example", "Content-Type: text/plain"]),
        ("POST /push", ["Origin: https://evil.example", "Sec-Fetch-Site: cross-site"]),
        ("POST /push", ["Origin: null", "Content-Type: application/x-www-form-urlencoded"]),
        ("POST /push", ["Origin: http://127.0.0.1:3000", "Sec-Fetch-Site: same-site"]),
        ("POST /push", ["Origin: http://127.0.0.1:66320"]),
        ("POST /push", ["Origin: http://127.0.0.1.evil.example:6632"]),
        ("POST /push", ["Origin: chrome-extension://abcdef"]),
        ("OPTIONS /push", ["Origin: https://evil.example", "Access-Control-Request-Method: POST"]),
        (
            "GET /pop?autoAck=true",
            ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image"],
        ),
        ("GET /pop?autoAck=true", ["Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors"]),
        (
            "GET /pop?autoAck=true",
            ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"],
        ),
        (
            "GET /page",
            ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe"],
        ),
        ("GET /nowhere", ["Origin: https://evil.example"]),
    ],
)
async def test_a_request_from_a_page_of_another_site_is_refused(
    request_line: str, headers: list[str]
) -> None:
    reply = await ask(*request_line.split(" "), *headers)
    assert (reply.status, "cors_origin" in error(reply)) == (403, True)
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("request_line", "headers", "host"),
    [
        ("POST /push", [], HERE),
        (
            "POST /push",
            ["User-Agent: curl/8.0", "Content-Type: application/x-www-form-urlencoded"],
            HERE,
        ),
        ("POST /push", ["Origin: http://127.0.0.1:6632", "Sec-Fetch-Site: same-origin"], HERE),
        ("POST /push", ["Origin: http://127.0.0.1:6632"], HERE),
        ("POST /push", ["Origin: http://[::1]:6632"], "[::1]:6632"),
        ("POST /push", ["Origin: http://localhost"], "localhost"),
        ("POST /push", ["Origin: https://localhost"], "localhost:443"),
        # A proxy that changes Host: the browser has judged for itself.
        ("POST /push", ["Origin: https://broker.example", "Sec-Fetch-Site: same-origin"], HERE),
        ("GET /pop", ["Sec-Fetch-Site: same-origin"], HERE),
        ("GET /pop", ["Sec-Fetch-Site: none", "Sec-Fetch-Mode: navigate"], HERE),
        (
            "GET /page",
            ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"],
            HERE,
        ),
    ],
)
async def test_pages_of_the_broker_and_programs_that_are_no_browsers_pass(
    request_line: str, headers: list[str], host: str
) -> None:
    assert (
        await ask(
            *request_line.split(" "), *headers, host=host, body=b"{}" * ("POST" in request_line)
        )
    ).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:6632", "127.0.0.1.evil.example", "localhost.evil", ""),
        *("other.local", "a.svc.evil.example", "svc.evil", "xinternal.evil", "a b", "a/b"),
    ],
)
async def test_a_name_that_is_not_ours_is_refused(host: str) -> None:
    reply = await ask("GET", "/pop", f"Origin: http://{host or 'x'}", host=host)
    assert (reply.status, "http_server.hosts" in error(reply)) == (403, True)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1",
            "10.1.2.3:80",
            "[::1]:6632",
            "localhost:6632",
            "LOCALHOST.",
            "app.localhost",
        ),
        *(
            socket.gethostname(),
            "broker.example",
            "broker.example:443",
            "a.b.internal",
            "bound.example:6632",
        ),
    ],
)
async def test_addresses_and_names_of_ours_pass(host: str) -> None:
    origins = Origins(hosts="broker.example, *.internal", bound=("bound.example",))
    assert origins.has_host(host)
    assert (await ask("GET", "/pop", host=host, origins=origins)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *("queen", "penstock:6632", "PENSTOCK_1", "xn--bcher-kva"),
        *("broker.internal", "a.b.localhost:80", "penstock.default.svc"),
        *("penstock.default.svc.cluster.local.", f"{socket.gethostname().split('.')[0]}.local"),
    ],
)
async def test_names_that_nobody_can_register_in_the_public_dns_pass(host: str) -> None:
    assert (await ask("GET", "/pop", host=host)).status == 200
    assert (await ask("GET", "/pop", "Origin: http://evil.example", host=host)).status == 403


async def test_names_are_not_looked_at_when_tokens_are_asked_for_or_all_are_listed() -> None:
    for origins in (Origins(any_host=True), Origins(hosts="*")):
        assert (await ask("GET", "/pop", host="any.example", origins=origins)).status == 200
        assert (
            await ask(
                "GET", "/pop", "Origin: http://evil.example", host="any.example", origins=origins
            )
        ).status == 403


async def test_origins_in_the_configuration_may_send_requests_and_read_the_answers() -> None:
    listed = Origins("https://console.example, http://localhost:3000/")
    for origin, status in (
        ("https://console.example", 200),
        ("http://localhost:3000", 200),
        ("http://c.example", 403),
    ):
        reply = await ask(
            "GET", "/pop", f"Origin: {origin}", "Sec-Fetch-Site: cross-site", origins=listed
        )
        allowed = reply.headers.get("access-control-allow-origin")
        assert (reply.status, allowed) == (status, origin if status == 200 else None)
    asked = ("Origin: https://console.example", "Access-Control-Request-Headers: X-One")
    preflight = await ask("OPTIONS", "/push", *asked, origins=listed)
    assert (preflight.status, preflight.headers["access-control-allow-headers"]) == (204, "X-One")
    assert preflight.headers["access-control-allow-origin"] == "https://console.example"
    assert (
        await ask("GET", "/pop", "Origin: https://any.example", origins=Origins("*"))
    ).status == 200
    too_large = await ask("POST", "/push", asked[0], body=b"x" * 10, origins=listed, max_body=9)
    assert too_large.status == 413


@pytest.mark.parametrize(
    "allowed", ["console.example", "https://", "https://x/path", "http://x:port", "null"]
)
def test_an_origin_that_is_none_is_an_error_at_the_start(allowed: str) -> None:
    with pytest.raises(ConfigError, match="cors_origin"):
        Origins(allowed)


@pytest.mark.parametrize("hosts", ["http://broker.example", "broker.example:80"])
def test_a_host_with_scheme_or_port_is_an_error_at_the_start(hosts: str) -> None:
    with pytest.raises(ConfigError, match=r"http_server\.hosts"):
        Origins(hosts=hosts)


@pytest.mark.parametrize(
    ("path", "media", "status"),
    [
        ("/push", "application/json", 200),
        ("/push", "Application/JSON; charset=utf-8", 200),
        ("/push", "application/cloudevents+json", 200),
        ("/push", "application/x-www-form-urlencoded", 200),
        ("/push", "application/octet-stream", 200),
        ("/push", "text/plain;charset=UTF-8", 415),
        ("/push", "multipart/form-data; boundary=x", 415),
        ("/push", "application/xml", 415),
        ("/lines", "application/x-ndjson", 200),
        ("/lines", "text/csv", 415),
        ("/raw", "text/plain", 200),
    ],
)
async def test_a_body_of_a_wrong_type_is_a_415_that_says_which_is_right(
    path: str, media: str, status: int
) -> None:
    reply = await ask("POST", path, f"Content-Type: {media}", body=b'{"a":1}')
    assert reply.status == status
    if status == 415:
        assert "application/json" in error(reply)
    else:
        assert reply.body == b'{"a":1}'
    assert (
        await ask("POST", path, f"Content-Type: {media}")
    ).status == 200  # of nothing, the type says nothing


def zstd(data: bytes) -> bytes:
    return bytes(cramjam.zstd.compress(data))


PACKED = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "zstd": zstd,
    "identity": bytes,
    "GZIP": gzip.compress,
}


@pytest.mark.parametrize("coding", PACKED)
async def test_a_packed_body_is_unpacked_before_anybody_sees_it(coding: str) -> None:
    for text in (b"{}", b'{"a":"' + b"x" * 3_000_000 + b'"}'):
        reply = await ask("POST", "/push", f"Content-Encoding: {coding}", body=PACKED[coding](text))
        assert (reply.status, reply.body == text) == (200, True)


@pytest.mark.parametrize("coding", ["br", "deflate", "gzip, gzip", "gzip, zstd"])
async def test_another_coding_is_a_415_that_names_ours(coding: str) -> None:
    reply = await ask("POST", "/push", f"Content-Encoding: {coding}", body=b"{}")
    assert (reply.status, reply.headers["accept-encoding"]) == (415, "gzip, zstd")


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_a_body_that_unpacks_to_more_than_the_limit_is_a_413(coding: str) -> None:
    bomb = PACKED[coding](b"\0" * 50_000_000)
    assert len(bomb) < 60_000
    reply = await ask("POST", "/push", f"Content-Encoding: {coding}", body=bomb, max_body=1_000_000)
    assert (reply.status, "1000000 bytes once it is unpacked" in error(reply)) == (413, True)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_a_body_that_is_not_packed_as_it_says_is_a_400(coding: str) -> None:
    whole = PACKED[coding](b"x" * 1000)
    for bad in (b"{}", whole[:-1], whole[:4], whole + b"rest"):
        reply = await ask("POST", "/push", f"Content-Encoding: {coding}", body=bad)
        assert (reply.status, coding in error(reply)) == (400, True)


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=5000),
    st.integers(1, 200),
    st.integers(0, 3000),
    st.sampled_from(["gzip", "zstd"]),
)
def test_unpacking_gives_what_was_packed_or_says_that_it_is_too_large(
    data: bytes, times: int, limit: int, coding: str
) -> None:
    text = data * times
    packed = PACKED[coding](text)
    if len(text) <= limit:
        assert unpack(packed, coding, limit) == text
    else:
        with pytest.raises(TooLarge):
            unpack(packed, coding, limit)


def test_members_of_gzip_are_joined_and_bounded_together() -> None:
    members = gzip.compress(b"a" * 600) + gzip.compress(b"b" * 600)
    assert unpack(members, "gzip", 1200) == b"a" * 600 + b"b" * 600
    with pytest.raises(TooLarge):
        unpack(members, "gzip", 1199)
    with pytest.raises(InvalidRequest):
        unpack(zlib.compress(b"not gzip"), "gzip", 1000)
