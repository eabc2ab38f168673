"""HTTP with a certificate."""

import asyncio
import ssl
from pathlib import Path

from penstock.wire.http.messages import Response, Stream, StreamResponse
from penstock.wire.http.routes import HttpRoute
from penstock.wire.http.server import HttpServer
from penstock.wire.tls import Certificate
from tests.support.certificates import certificate
from tests.support.http import Wire, get, post, serving


async def test_tls_with_a_certificate_and_a_new_one_without_a_restart(scratch: Path) -> None:
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

    routes = (
        HttpRoute("POST", "/echo", lambda request: Response(200, request.body, "text/plain")),
        HttpRoute("GET", "/stream", lambda _: StreamResponse(pieces)),
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
        ).body == b'{"error":"This port uses TLS: use https:// or wss://."}\n'
        assert await plain.ended() == b""
        await plain.close()
