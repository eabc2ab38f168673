"""Large answers are compressed for clients that ask for it."""

import gzip

from penstock.wire.http.messages import Response, json_response
from penstock.wire.http.routes import HttpRoute
from tests.support.http import get, talking

LARGE = json_response([{"number": number, "text": "the same"} for number in range(5000)])


async def test_large_json_is_compressed_when_the_client_asks_for_it() -> None:
    routes = (
        HttpRoute("GET", "/large", lambda _: LARGE),
        HttpRoute("GET", "/never", lambda _: LARGE, gzip=False),
        HttpRoute("GET", "/small", lambda _: json_response("x" * 1000)),
        HttpRoute(
            "GET", "/binary", lambda _: Response(200, bytes(200_000), "application/octet-stream")
        ),
    )

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
