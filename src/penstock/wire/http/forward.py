"""Forward requests to another broker process over a Unix socket.

When several worker processes share the port, a topic request may reach a process that does not own
the topic logs. It forwards the request (target, headers, body) and the answer unchanged. A short
answer is forwarded whole. A long or endless one (server-sent events) is streamed, so that a slow
client slows the owner down. If the client disconnects, the connection to the owner is closed.

A request that failed half-way is not retried, since the owner may have executed it. The client gets
503.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import httptools

from penstock.config.schema import HttpServerSettings as Settings
from penstock.errors import Unavailable
from penstock.wire.http.messages import (
    CLIENT_HEADER,
    Answer,
    Handler,
    Request,
    Response,
    Stream,
    StreamResponse,
)

_HOP_BY_HOP = frozenset(
    b"connection content-length expect keep-alive proxy-authenticate proxy-authorization"
    b" proxy-connection te trailer transfer-encoding upgrade".split()
)
# not forwarded: the owner gets the address that this process sees
_NOT_FORWARDED = _HOP_BY_HOP | {CLIENT_HEADER.encode()}
# this server sets these
_OURS = frozenset((b"date", b"content-type", b"access-control-allow-origin"))
_MAX_IDLE = 256  # connections
_READ_BYTES = 64 << 10
_MAX_WHOLE_BYTES = 256 << 10  # answers up to this size are passed on in one piece


def forward_to(path: Path) -> Handler:
    """Return a handler that forwards every request to the Unix socket `path`."""
    return _Forwarder(path).handle


def owner_settings(settings: Settings) -> Settings:
    """Return the settings of the owner's Unix socket. Limits apply in the forwarding process."""
    return replace(
        settings,
        ssl_cert_path=None,
        ssl_key_path=None,
        max_header=2 * settings.max_header,
        max_connections=1 << 30,
        idle_timeout=0.0,
        send_timeout=0.0,
    )


class _Forwarder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: list[_Upstream] = []

    async def handle(self, request: Request) -> Answer:
        upstream = await self._connection()
        request.on_disconnect(lambda: upstream.abort_for(request))
        try:
            status, headers = await upstream.ask(request)
            named = dict(headers)
            length = int(named.get(b"content-length", -1))
            kind = named.get(b"content-type", b"").decode("latin-1")
            passed = tuple(
                (name.decode("latin-1").title(), value.decode("latin-1"))
                for name, value in headers
                if name not in _HOP_BY_HOP and name not in _OURS
            )
            if status in (204, 304) or 0 <= length <= _MAX_WHOLE_BYTES:
                body = b"".join([piece async for piece in upstream.pieces()])
                return Response(status, body, kind, passed)
        except ConnectionError:
            upstream.abort()  # after the end of its stream, the transport is still open
            raise Unavailable(
                "The process that owns the topics has ended; the outcome is unknown"
            ) from None
        except BaseException:
            upstream.abort()
            raise
        if request.head.method == "HEAD":
            upstream.abort()
        live = kind.startswith("text/event-stream")
        return StreamResponse(upstream.copy, kind, passed, status, live=live)

    async def _connection(self) -> "_Upstream":
        while self._idle:
            upstream = self._idle.pop()
            if upstream.usable:
                return upstream
            upstream.abort()
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            raise Unavailable("The process that owns the topics is not running") from None
        return _Upstream(reader, writer, self._release)

    def _release(self, upstream: "_Upstream") -> None:
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(upstream)
        else:
            upstream.abort()


def _encoded(request: Request) -> bytes:
    head = request.head
    method = "GET" if head.method == "HEAD" else head.method
    lines = [f"{method} {head.target} HTTP/1.1\r\n".encode("ascii")]
    lines += [b"%b: %b\r\n" % pair for pair in head.headers if pair[0] not in _NOT_FORWARDED]
    if head.http10 and head.header("host") is None:
        lines.append(b"host: localhost\r\n")
    if request.body or head.length:
        lines.append(b"content-length: %d\r\n" % len(request.body))
    lines.append(f"{CLIENT_HEADER}: {request.address}\r\n\r\n".encode("latin-1"))
    return b"".join(lines) + request.body


class _Upstream:
    """A connection to the owner, with one request at a time, and the callbacks of its parser."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        release: Callable[["_Upstream"], None],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._release = release
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._complete_head = False  # the head of the answer is in `_headers`
        self._complete = False  # the whole answer has arrived
        self._reusable = False  # another request may follow that answer
        self._pieces: list[bytes] = []  # of the body, not forwarded yet
        self._serving: Request | None = None  # until its whole answer is forwarded

    @property
    def usable(self) -> bool:
        return not (self._writer.is_closing() or self._reader.at_eof())

    async def ask(self, request: Request) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Send a request. Return the status and the headers of the answer."""
        self._serving = request
        self._headers, self._pieces = [], []
        self._complete_head = self._complete = False
        self._writer.write(_encoded(request))
        while not self._complete_head:
            await self._read()
        return self._parser.get_status_code(), self._headers

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, then release the connection."""
        while self._pieces or not self._complete:
            if not self._pieces:
                await self._read()
            elif piece := b"".join(self._pieces):
                self._pieces.clear()
                yield piece
        self._serving = None
        if self._reusable and self.usable:
            self._release(self)
        else:
            self.abort()

    async def copy(self, stream: Stream) -> None:
        try:
            async for piece in self.pieces():
                await stream.write(piece)
        finally:
            if self._serving is not None:
                self.abort()

    async def _read(self) -> None:
        data = await self._reader.read(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the owner's connection is closed")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort()
            raise ConnectionResetError(f"the owner's answer is not HTTP: {error}") from error

    def abort_for(self, request: Request) -> None:
        """Close the connection if it still serves this request, whose client has gone."""
        if self._serving is request:
            self.abort()

    def abort(self) -> None:
        self._writer.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._complete_head = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._complete = self._complete_head
        self._reusable = self._parser.should_keep_alive()
