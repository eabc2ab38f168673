"""Files of a directory over HTTP."""

import gzip
from pathlib import Path

import pytest

from penstock.wire.http.static import static_routes
from tests.support.http import get, request, talking


async def test_static_files_have_types_and_are_revalidated(scratch: Path) -> None:
    (scratch / "index.html").write_text("<p>hello</p>")
    (scratch / "js").mkdir()
    (scratch / "js" / "app.js").write_text("let x = 1; " * 500)
    (scratch / "data").write_bytes(bytes(10))

    async with talking(*static_routes("/ui", scratch)) as (_, wire):
        index = await wire.ask(get("/ui/"))
        assert (index.body, index.headers["content-type"]) == (
            b"<p>hello</p>",
            "text/html; charset=utf-8",
        )
        moved = await wire.ask(get("/ui"))
        assert (moved.status, moved.headers["location"]) == (308, "ui/")
        script = await wire.ask(get("/ui/js/app.js", "Accept-Encoding: gzip"))
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        assert gzip.decompress(script.body) == b"let x = 1; " * 500
        assert (await wire.ask(get("/ui/data"))).headers[
            "content-type"
        ] == "application/octet-stream"
        assert (await wire.ask(request("HEAD", "/ui/", b""))).headers["content-length"] == "12"

        tag = index.headers["etag"]
        assert index.headers["cache-control"] == "no-cache"
        for header in (f"If-None-Match: {tag}", f'If-None-Match: "x", W/{tag}'):
            same = await wire.ask(get("/ui/", header))
            assert (same.status, same.headers["etag"]) == (304, tag)
        assert (await wire.ask(get("/ui/", 'If-None-Match: "other"'))).status == 200

        (scratch / "index.html").write_text("<p>changed!</p>")
        changed = await wire.ask(get("/ui/", f"If-None-Match: {tag}"))
        assert (changed.status, changed.body) == (200, b"<p>changed!</p>")


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
async def test_nothing_outside_the_directory_is_served(scratch: Path, name: str) -> None:
    root = scratch / "root"
    (root / "js").mkdir(parents=True)
    (scratch / "secret").write_text("secret")
    (root / "link").symlink_to(scratch / "secret")

    async with talking(*static_routes("/ui", root)) as (_, wire):
        reply = await wire.ask(get(f"/ui/{name}"))
        assert reply.status == 404
        assert b"error" in reply.body
