"""A thin HTTP/1.1 client for many small requests: httptools over an asyncio Protocol.

One `HttpClient` talks to one origin. It keeps up to `pool_size` connections. A request has its
connection to itself until the answer is complete, so a slow answer delays no other request. The
most recently used connection is taken first: under light load, the server closes the idle others.

A server may close an idle connection just as we write to it. This reset is the only failure that is
retried here: once, on a new connection, if the old one was used before, no byte of an answer
arrived, and the caller marks the request as idempotent. After any other failure, the server may
have executed the request, and only the caller can decide whether to repeat it. It gets
`Unavailable` (cannot connect, reset, answer cut short) or `TimeoutError`.
"""

import asyncio
import contextlib
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httptools

from penstock.errors import InvalidRequest, TooLarge, Unavailable
from penstock.net.addresses import basic_authorization
from penstock.net.tls import client_context, explain, first_answer_missing

Headers = Iterable[tuple[str, str]]
_UNSAFE_TARGET = re.compile(r"[\x00-\x20\x7f]")
_UNSAFE_HEADER = re.compile(r"[\r\n\x00]")
# copying a smaller body beside its headers is cheaper than a second system call
_JOIN_BELOW = 64 << 10


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    headers: dict[str, str]  # names in lower case; repeated ones joined with ", "
    body: bytes


class CannotConnect(Unavailable):
    """No connection could be made, so nothing was sent."""


class _Reset(Exception):
    """The connection broke. `clean`: it was used before, and no byte of this answer arrived."""

    def __init__(self, reason: str, *, clean: bool) -> None:
        super().__init__(reason)
        self.clean = clean


class _Connection(asyncio.Protocol):
    """One connection with at most one request, and the callbacks (`on_*`) of its parser."""

    def __init__(self, client: "HttpClient") -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[HttpAnswer] | None = None  # set during a request
        self._served = 0  # answers completed on this connection
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._length = 0
        self._any_byte = False
        self._until_close = False  # the body ends when the server closes the connection
        self._no_body = False  # a HEAD request
        self.reusable = True

    def send(self, head: bytes, body: bytes, *, no_body: bool) -> "asyncio.Future[HttpAnswer]":
        transport = self._transport
        if transport is None or transport.is_closing():
            raise _Reset("the connection was closed", clean=self._served > 0)
        self._answer = asyncio.get_running_loop().create_future()
        self._any_byte = self._until_close = False
        self._no_body = no_body
        if len(body) < _JOIN_BELOW:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        return self._answer

    def abort(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.abort()  # an unsolicited answer would be mistaken for the next one
            return
        self._any_byte = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(Unavailable("the server switched protocols without being asked"))
        except httptools.HttpParserError as error:
            self._fail(Unavailable(f"the answer is not valid HTTP: {error}"))

    def eof_received(self) -> None:
        return None  # close the transport; connection_lost does the rest

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._client._forget(self)
        answer = self._answer
        if answer is None:
            return
        if self._until_close and error is None:
            self._complete()
        elif self._any_byte:
            self._fail(Unavailable("the connection broke in the middle of an answer"))
        else:
            reason = (
                f"the connection was reset: {error}"
                if error
                else "the connection was closed without an answer"
            )
            if not self._served and self._transport is not None:
                reason += first_answer_missing(self._transport)
            self._fail(_Reset(reason, clean=self._served > 0))

    # httptools.HttpResponseParser

    def on_message_begin(self) -> None:
        if self._answer is None:
            self.reusable = False  # an unsolicited answer followed
        self._headers = {}
        self._body = []
        self._length = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        before = self._headers.get(key)
        self._headers[key] = text if before is None else f"{before}, {text}"

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._no_body and status >= 200:
            self.reusable = False  # the parser would wait for a body of Content-Length
            self._complete()
            return
        framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        self._until_close = not framed and status >= 200 and status not in (204, 304)

    def on_body(self, data: bytes) -> None:
        self._length += len(data)
        if self._length > self._client.max_answer:
            self._fail(TooLarge(f"the answer is larger than {self._client.max_answer} bytes"))
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._answer is None or self._parser.get_status_code() < 200:
            return  # 100 Continue and the like come before the answer
        if not self._parser.should_keep_alive():
            self.reusable = False
        self._complete()

    def _complete(self) -> None:
        answer, self._answer = self._answer, None
        if answer is None:
            return
        self._served += 1
        if not answer.done():
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            answer.set_result(HttpAnswer(self._parser.get_status_code(), self._headers, body))
        self._body = []

    def _fail(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)
        self.abort()


class HttpClient:
    """Send requests to one origin over a bounded pool of connections, on one event loop."""

    def __init__(
        self,
        base_url: str,
        *,
        headers: Headers = (),
        pool_size: int = 64,
        connect_timeout: float = 5.0,
        tls: ssl.SSLContext | None = None,
        max_answer: int = 256 << 20,
        unix_path: Path | None = None,
    ) -> None:
        """Connect to the host in `base_url`, or to the socket `unix_path` if that is set."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise InvalidRequest(f"not an HTTP address: {base_url!r}")
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = (tls or client_context()) if url.scheme == "https" else None
        self._prefix = url.path.rstrip("/")
        self._connect_timeout = connect_timeout
        self._unix_path = unix_path
        self.max_answer = max_answer
        host = f"[{self._host}]" if ":" in self._host else self._host
        standard: list[tuple[str, str]] = [("Host", f"{host}:{url.port}" if url.port else host)]
        if basic := basic_authorization(url):
            standard.append(("Authorization", basic))
        self._standard = render_headers((*standard, *headers))
        self._slots = asyncio.Semaphore(pool_size)
        self._idle: list[_Connection] = []  # most recently used last
        self._busy: set[_Connection] = set()
        self._closed = False

    async def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Headers = (),
        timeout: float = 30.0,
        idempotent: bool = False,
    ) -> HttpAnswer:
        """Send a request and wait for the whole answer, for at most `timeout` seconds in all."""
        if _UNSAFE_TARGET.search(target) or not method.isalpha():
            raise InvalidRequest(f"not a request line: {method} {target!r}")
        length = (
            b""
            if not body and method in ("GET", "HEAD", "DELETE")
            else b"Content-Length: %d\r\n" % len(body)
        )
        line = f"{method} {self._prefix}{target} HTTP/1.1\r\n".encode()
        head = line + self._standard + render_headers(headers) + length + b"\r\n"
        try:
            async with asyncio.timeout(timeout), self._slots:
                return await self._exchange(head, body, method == "HEAD", idempotent)
        except TimeoutError:
            raise TimeoutError(
                f"no answer from {self._host}:{self._port} within {timeout:g} s"
            ) from None

    async def _exchange(
        self, head: bytes, body: bytes, no_body: bool, idempotent: bool
    ) -> HttpAnswer:
        fresh = False
        while True:
            if self._closed:
                raise Unavailable("the client is closed")
            connection = self._idle.pop() if self._idle and not fresh else await self._connect()
            self._busy.add(connection)
            try:
                answer = await connection.send(head, body, no_body=no_body)
            except _Reset as reset:
                if reset.clean and idempotent and not fresh:
                    fresh = True
                    continue
                raise Unavailable(f"{self._host}:{self._port}: {reset}") from reset
            except BaseException:
                # time-out or cancellation: the answer may still arrive
                connection.abort()
                raise
            finally:
                self._busy.discard(connection)
            if connection.reusable and not self._closed:
                self._idle.append(connection)
            else:
                connection.abort()
            return answer

    async def _connect(self) -> _Connection:
        loop, new = asyncio.get_running_loop(), partial(_Connection, self)
        try:
            async with asyncio.timeout(self._connect_timeout):
                if self._unix_path:
                    made = await loop.create_unix_connection(new, str(self._unix_path))
                else:
                    name = self._host if self._tls else None
                    made = await loop.create_connection(
                        new, self._host, self._port, ssl=self._tls, server_hostname=name
                    )
        except TimeoutError as error:
            text = f"cannot connect to {self._host}:{self._port} within {self._connect_timeout:g} s"
            raise CannotConnect(text) from error
        except OSError as error:  # includes ssl.SSLError
            why = explain(error, handshaking=bool(self._tls))
            raise CannotConnect(f"cannot connect to {self._host}:{self._port}: {why}") from error
        return made[1]

    def _forget(self, connection: _Connection) -> None:
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    async def close(self) -> None:
        """Drop all connections. Requests in flight fail with `Unavailable`."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # let the transports call connection_lost


def render_headers(headers: Headers) -> bytes:
    lines = []
    for name, value in headers:
        if _UNSAFE_HEADER.search(name) or _UNSAFE_HEADER.search(value) or ":" in name:
            raise InvalidRequest(f"not a header: {name!r}: {value!r}")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode("latin-1")
