"""Serve the files of a directory over HTTP, for the Console.

The bytes of a file, and their gzip for text, stay in memory, keyed by modification time and size. A
changed file is served at the next request. Browsers revalidate with `If-None-Match`; an unchanged
file is a 304. A path can only name files below the directory, links included.
"""

import mimetypes
from pathlib import Path
from typing import NamedTuple

from penstock.errors import NotFound
from penstock.wire.auth import Role
from penstock.wire.http.compress import gzip, is_compressible
from penstock.wire.http.messages import Headers, Request, Response
from penstock.wire.http.routes import HttpRoute

_TYPES = {  # what the system's table says otherwise, or without a charset
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_GZIP_FROM = 1024


class _File(NamedTuple):
    stamp: tuple[int, int]
    body: bytes
    packed: bytes | None
    content_type: str
    headers: Headers


class StaticFiles:
    def __init__(self, directory: Path, headers: Headers = ()) -> None:
        self._directory = directory.resolve()
        self._headers = headers
        self._files: dict[Path, _File] = {}

    def answer(self, request: Request, name: str) -> Response:
        path = self._locate(name)
        file = self._load(path)
        if _unchanged(request, file):
            return Response(304, headers=file.headers)
        if file.packed is not None and request.head.accepts_gzip:
            return Response(
                200, file.packed, file.content_type, (*file.headers, ("Content-Encoding", "gzip"))
            )
        return Response(200, file.body, file.content_type, file.headers)

    def _locate(self, name: str) -> Path:
        if "\0" not in name and "\\" not in name:
            try:
                path = (self._directory / name.lstrip("/")).resolve()
                if path.is_dir():
                    path = (path / "index.html").resolve()
                if path.is_relative_to(self._directory) and path.is_file():
                    return path
            except OSError:
                pass  # a name that the file system cannot have does not exist
        raise NotFound(f"No file {name!r}")

    def _load(self, path: Path) -> _File:
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size)
        file = self._files.get(path)
        if file is None or file.stamp != stamp:
            file = self._files[path] = self._read(path, stamp)
        return file

    def _read(self, path: Path, stamp: tuple[int, int]) -> _File:
        body = path.read_bytes()
        kind = (
            _TYPES.get(path.suffix.lower())
            or mimetypes.guess_type(path.name)[0]
            or "application/octet-stream"
        )
        packed = None
        if len(body) >= _GZIP_FROM and is_compressible(Response(200, body, kind)):
            packed = gzip(body, 6)
        headers: Headers = (
            ("ETag", f'"{stamp[0]:x}-{stamp[1]:x}"'),
            ("Cache-Control", "no-cache"),  # cache it, but revalidate
            ("Vary", "Accept-Encoding"),
            ("X-Content-Type-Options", "nosniff"),
            *self._headers,
        )
        return _File(stamp, body, packed, kind, headers)


def _unchanged(request: Request, file: _File) -> bool:
    tags = (request.header("if-none-match") or "").split(",")
    return not {"*", file.headers[0][1]}.isdisjoint(tag.strip().removeprefix("W/") for tag in tags)


def static_routes(
    prefix: str, directory: Path, *, headers: Headers = (), role: Role | None = None
) -> list[HttpRoute]:
    """Return routes for everything below `directory` at `prefix/`, with these headers."""
    files = StaticFiles(directory, headers)

    def index(_: Request) -> Response:
        # Relative, so that it works below a path of a reverse proxy.
        return Response(308, b"", "", (("Location", f"{prefix.rpartition('/')[2]}/"),))

    def below(request: Request) -> Response:
        return files.answer(request, request.params["name"])

    return [
        HttpRoute("GET", path, handler, hidden=True, page=True, role=role)
        for path, handler in ((prefix, index), (prefix + "/{name...}", below))
    ]
