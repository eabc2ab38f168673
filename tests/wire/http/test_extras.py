"""gzip, static files, TLS."""

import asyncio
import gzip
import ssl
from pathlib import Path

import pytest

from penstock.wire.http.messages import Response, Stream, StreamResponse, json_response
from penstock.wire.http.routes import Route
from penstock.wire.http.server import HttpServer
from penstock.wire.http.static import static_routes
from penstock.wire.tls import Certificate
from tests.support.certificates import certificate
from tests.support.http import Wire, get, post, request, run, serving, talking

LARGE = json_response([{"number": number, "text": "the same"} for number in range(5000)])


def test_large_json_is_compressed_when_the_client_asks_for_it() -> None:
    routes = (
        Route("GET", "/large", lambda _: LARGE),
        Route("GET", "/never", lambda _: LARGE, gzip=False),
        Route("GET", "/small", lambda _: json_response("x" * 1000)),
        Route(
            "GET", "/binary", lambda _: Response(200, bytes(200_000), "application/octet-stream")
        ),
    )

    async def body() -> None:
        async with talking(*routes, compress_from=10_000) as (_, wire):
            asked = "Accept-Encoding: br, gzip;q=0.8"
            wire.send(
                get("/large", asked) + get("/small", asked)
            )  # the order holds while one is being compressed
            reply = await wire.reply()
            assert reply.headers["content-encoding"] == "gzip"
            assert reply.headers["vary"] == "Accept-Encoding"
            assert len(reply.body) < len(LARGE.body) / 5
            assert gzip.decompress(reply.body) == LARGE.body
            assert "content-encoding" not in (await wire.reply()).headers
            for path, header in (
                ("/large", "X: y"),
                ("/large", "Accept-Encoding: gzip;q=0"),
                ("/large", "Accept-Encoding: identity"),
                ("/never", asked),
                ("/binary", asked),
            ):
                reply = await wire.ask(get(path, header))
                assert "content-encoding" not in reply.headers, (path, header)
                assert len(reply.body) >= len(LARGE.body)

    run(body)


def test_static_files_have_types_and_are_revalidated(scratch: Path) -> None:
    (scratch / "index.html").write_text("<p>hello</p>")
    (scratch / "js").mkdir()
    (scratch / "js" / "app.js").write_text("let x = 1; " * 500)
    (scratch / "data").write_bytes(bytes(10))

    async def body() -> None:
        async with talking(*static_routes("/ui", scratch)) as (_, wire):
            index = await wire.ask(get("/ui/"))
            assert (index.body, index.headers["content-type"]) == (
                b"<p>hello</p>",
                "text/html; charset=utf-8",
            )
            moved = await wire.ask(get("/ui"))
            assert (moved.status, moved.headers["location"]) == (308, "/ui/")
            script = await wire.ask(get("/ui/js/app.js", "Accept-Encoding: gzip"))
            assert script.headers["content-type"] == "text/javascript; charset=utf-8"
            assert gzip.decompress(script.body) == b"let x = 1; " * 500
            assert (await wire.ask(get("/ui/data"))).headers[
                "content-type"
            ] == "application/octet-stream"
            assert (await wire.ask(request("HEAD", "/ui/", b""))).headers["content-length"] == "12"

            tag, date = index.headers["etag"], index.headers["last-modified"]
            assert index.headers["cache-control"] == "no-cache"
            for header in (
                f"If-None-Match: {tag}",
                f'If-None-Match: "x", W/{tag}',
                f"If-Modified-Since: {date}",
            ):
                same = await wire.ask(get("/ui/", header))
                assert (same.status, same.headers["etag"]) == (304, tag)
            for header in (
                'If-None-Match: "other"',
                "If-Modified-Since: Mon, 01 Jan 2001 00:00:00 GMT",
                "If-Modified-Since: x",
            ):
                assert (await wire.ask(get("/ui/", header))).status == 200

            (scratch / "index.html").write_text("<p>changed!</p>")
            changed = await wire.ask(get("/ui/", f"If-None-Match: {tag}"))
            assert (changed.status, changed.body) == (200, b"<p>changed!</p>")

    run(body)


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "%2e%2e/secret",
        "..%2fsecret",
        "js/..%2f../secret",
        "%2fetc%2fpasswd",
        "link",
        "%00",
        "x" * 5000,
        "js",
    ],
)
def test_nothing_outside_the_directory_is_served(scratch: Path, name: str) -> None:
    root = scratch / "root"
    (root / "js").mkdir(parents=True)
    (scratch / "secret").write_text("secret")
    (root / "link").symlink_to(scratch / "secret")

    async def body() -> None:
        async with talking(*static_routes("/ui", root)) as (_, wire):
            reply = await wire.ask(get(f"/ui/{name}"))
            assert reply.status == 404
            assert b"error" in reply.body

    run(body)


def test_tls_with_a_certificate_and_a_new_one_without_a_restart(scratch: Path) -> None:
    cert, key = certificate(scratch)

    async def pieces(stream: Stream) -> None:
        for _ in range(100):
            await stream.write(b"x" * 10_000)

    async def secure(server: HttpServer, name: str) -> Wire:
        context = ssl.create_default_context(cafile=str(cert))
        return Wire(
            *await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=context, server_hostname=name, limit=1 << 24
            )
        )

    async def body() -> None:
        routes = (
            Route("POST", "/echo", lambda request: Response(200, request.body, "text/plain")),
            Route("GET", "/stream", lambda _: StreamResponse(pieces)),
        )
        certified = Certificate(cert, key)
        async with serving(*routes, certificate=certified) as server:
            assert server.url == f"https://127.0.0.1:{server.port}"
            wire = await secure(server, "localhost")
            assert wire.writer.get_extra_info("ssl_object").version() in ("TLSv1.2", "TLSv1.3")
            assert (await wire.ask(post("/echo", b"x" * 1_000_000))).body == b"x" * 1_000_000
            assert len((await wire.ask(get("/stream"))).body) == 1_000_000
            wire.send(b"nonsense\r\n\r\n")
            assert (await wire.reply()).status == 400
            await wire.close()

            certificate(scratch, "renewed")
            assert certified.reload()
            wire = await secure(server, "renewed")
            assert (await wire.ask(post("/echo", b"new"))).body == b"new"
            await wire.close()

            plain = Wire(*await asyncio.open_connection("127.0.0.1", server.port))
            plain.send(post("/echo", b"plain"))
            assert (
                await plain.reply()
            ).body == b'{"error":"This port speaks TLS: use https:// or wss://."}\n'
            assert await plain.ended() == b""
            await plain.close()

    run(body)
