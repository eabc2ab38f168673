"""The half of an HTTP connection that answers: what a handler returns becomes bytes, at once,
later, or as a stream.

A plain answer is one write, and those to requests that arrived together are one system call. What a
handler does in its own time (a coroutine, a future) keeps the connection BUSY; so does a stream,
whose `write` waits while the client does not read. The other half, which finds the requests, is
`penstock.wire.http.connection`; the states are explained there.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import cast

from penstock.errors import Unavailable
from penstock.wire.http.chunked import ChunkedBody
from penstock.wire.http.compress import compressed, is_compressible
from penstock.wire.http.head import Head, Partial, Refused
from penstock.wire.http.messages import Answer, Request, Response, StreamResponse, error_response
from penstock.wire.http.shared import JOINED, Shared, failure

log = logging.getLogger("penstock.http")

READY, BODY, BUSY, LINGER, CLOSED = range(5)
HIGH_WATER = 256 << 10


class Answering(asyncio.Protocol):
    __slots__ = (
        "_address", "_body", "_drained", "_eof", "_head", "_held", "_held_bytes", "_hold", "_live", "_partial",
        "_paused", "_received", "_request", "_shared", "_since", "_state", "_stream", "_stuck_since", "_transport",
        "_unsent", "_watchers", "_writable", "rest", "seen",
    )  # fmt: skip

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # set by connection_made
        self._state = READY
        self._writable = True
        self._paused = False  # reading
        self._hold = (
            False  # keep answers back until all requests that arrived together are answered
        )
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._eof = False  # the client will send no more
        self.rest = b""  # bytes that wait: the start of a head, or pipelined requests
        self._partial: Partial | None = None  # the head that is arriving
        self._head: Head | None = None  # the request whose body is arriving
        self._body: BytesIO | ChunkedBody | None = None
        self._request: Request | None = None  # the request a handler is working on
        self._stream: asyncio.Task[None] | None = None
        self._live = False  # the stream never ends by itself
        self._watchers: list[Callable[[], None]] = []
        self._drained: asyncio.Future[None] | None = None  # a stream waits for the client to read
        self.seen = shared.now  # when bytes arrived last
        self._since = 0.0  # when the head, the body or the lingering began
        self._received = 0  # bytes of the body, until its request is answered
        self._unsent = 0
        self._stuck_since = 0.0
        self._address = ""

    def _continue(self) -> None:
        """Serve what has waited, then read on."""
        raise NotImplementedError

    # Answers

    def _write(self, data: bytes) -> None:
        """Send, or hold back while more of the requests that arrived together are being answered:
        one system call.
        """
        self._held.append(data)
        self._held_bytes += len(data)
        if not self._hold or self._held_bytes > JOINED:
            self._flush()

    def _flush(self) -> None:
        self._hold = False
        if self._held:
            data = b"".join(self._held)
            self._held.clear()
            self._held_bytes = 0
            self._transport.write(data)

    def _send(self, head: Head, response: Response) -> bool:
        """Write an answer; whether the next request may be served at once."""
        shared = self._shared
        try:
            if (
                head.plain
                and not response.headers
                and not shared.draining
                and len(response.body) < shared.simple_below
            ):
                data = shared.encoder.simple(response)
                if self._hold or self._held:
                    self._write(data)
                else:
                    self._transport.write(data)
            elif self._wants_gzip(head, response):
                self._compress_and_send(head, response)
                return False
            else:
                self._send_general(head, response)
        except (
            ValueError,
            UnicodeEncodeError,
        ) as error:  # headers or a content type that cannot be sent
            response = failure(error, None)
            self._send_general(head, response)
        status = response.status
        labels = head.endpoint.labels.get(status) or shared.labels(head.endpoint, status)
        shared.counts[labels] = shared.counts.get(labels, 0) + 1
        return self._writable and self._state == READY

    def _send_general(self, head: Head, response: Response) -> None:
        close = not head.keep_alive or self._shared.draining
        start = self._shared.encoder.head(head, response, close)
        if head.method == "HEAD" or response.status in (204, 304):
            self._write(start)
        elif len(response.body) < JOINED:
            self._write(start + response.body)
        else:
            self._flush()
            self._transport.write(start)
            self._transport.write(response.body)
        if close:
            self._close()

    def _wants_gzip(self, head: Head, response: Response) -> bool:
        least = self._shared.settings.compress_from
        return (
            head.accepts_gzip
            and 0 < least <= len(response.body)
            and head.endpoint.gzip
            and is_compressible(response)
            and head.method != "HEAD"
        )

    def _compress_and_send(self, head: Head, response: Response) -> None:
        """Compress in the pool for blocking work: a megabyte takes long enough to be noticed by
        everyone else.
        """
        loop = asyncio.get_running_loop()
        request = Request(head, b"", self)
        self._wait_for(request, loop.run_in_executor(self._shared.executor, compressed, response))

    def _refuse(self, refused: Refused) -> None:
        """Answer an error of the protocol itself. Where the next request begins is unknown, so this
        is the last one.
        """
        if self._state >= LINGER:
            return
        response = error_response(refused.status, str(refused), refused.headers)
        self._flush()
        self._transport.write(
            self._shared.encoder.head(self._head, response, close=True) + cast(bytes, response.body)
        )
        self._shared.refused.add(1, str(refused.status))
        self.rest = b""
        self._head = self._body = self._partial = None
        self._release_body()
        if self._eof:
            self._close()
            return
        # Closing with unread bytes in the socket would reset the connection and might destroy the
        # answer on its way.
        self._state = LINGER
        self.seen = self._since = self._shared.now
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._resume_reading()

    def _release_body(self) -> None:
        """The body that arrived is needed no more."""
        self._shared.memory.total -= self._received
        self._received = 0

    def _close(self) -> None:
        if self._state != CLOSED:
            self._flush()
            self._state = CLOSED
            self._unsent, self._stuck_since = -1, self._shared.now
            self._transport.close()

    def _resume_reading(self) -> None:
        if self._paused and self._state != CLOSED:
            self._paused = False
            self._transport.resume_reading()

    # Handlers that take their time

    def _wait_for(self, request: Request, answer: Answer | Awaitable[Answer]) -> None:
        self._hold = False
        if self._held:
            self._flush()
        self._state, self._request = BUSY, request
        if isinstance(answer, StreamResponse):
            self._start_stream(request, answer)
            return
        later = cast(Awaitable[Answer], answer)
        future = later if isinstance(later, asyncio.Future) else asyncio.ensure_future(later)
        self._shared.running.add(future)
        future.add_done_callback(self._answered)

    def _answered(self, future: "asyncio.Future[Answer]") -> None:
        self._shared.running.discard(future)
        if self._received:
            self._release_body()
        request = self._request
        assert request is not None
        try:
            answer = future.result()
        except asyncio.CancelledError:
            answer = failure(Unavailable("The broker is stopping"), request)
        except Exception as error:  # noqa: BLE001 - as for a plain handler
            answer = failure(error, request)
        if self._watchers:
            self._watchers.clear()
        if self._state != BUSY:
            self._request = None
            return
        if isinstance(answer, StreamResponse):
            self._start_stream(request, answer)
            return
        self._state, self._request = READY, None
        if self._send(request.head, answer) and (self.rest or self._eof or self._paused):
            self._continue()

    def _start_stream(self, request: Request, answer: StreamResponse) -> None:
        head = request.head
        self._release_body()
        close = not head.keep_alive or head.http10 or self._shared.draining
        try:
            start = self._shared.encoder.stream_head(
                head, answer.status, answer.content_type, answer.headers, close
            )
        except (ValueError, UnicodeEncodeError) as error:
            self._state, self._request = READY, None
            if self._send(head, failure(error, request)):
                self._continue()
            return
        self._transport.write(start)
        self._shared.requests.add(1, *self._shared.labels(head.endpoint, answer.status))
        self._live = answer.live
        self._stream = asyncio.get_running_loop().create_task(self._run_stream(head, answer, close))
        self._shared.running.add(self._stream)
        self._stream.add_done_callback(self._shared.running.discard)

    async def _run_stream(self, head: Head, answer: StreamResponse, close: bool) -> None:
        try:
            if head.method != "HEAD":
                await answer.run(_Pieces(self, chunked=not head.http10))
        except asyncio.CancelledError:
            pass  # by us: the client has gone, or a live stream ends because the server stops
        except Exception as error:
            if self._state != CLOSED and not (
                isinstance(error, ConnectionError) and self._transport.is_closing()
            ):
                log.exception("a stream failed: %s %s", head.method, head.path)
            # the missing last chunk tells the client that the answer is not whole
            self._transport.abort()
            return
        self._stream = self._request = None
        self._watchers.clear()
        if self._state != BUSY:
            return
        if head.method != "HEAD" and not head.http10:
            self._transport.write(b"0\r\n\r\n")
        self._state = READY
        if close or self._shared.draining:
            self._close()
        elif self._writable:
            self._continue()

    def write_piece(self, data: bytes, chunked: bool) -> bool:
        """Write it; whether more may be written."""
        if self._state == BUSY and not self._transport.is_closing():
            transport = self._transport
            if not chunked:
                transport.write(data)
            elif len(data) < JOINED:
                transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            else:
                transport.writelines((b"%x\r\n" % len(data), data, b"\r\n"))
        return self._writable and self._state == BUSY and not self._transport.is_closing()

    async def drained(self) -> None:
        """Wait until more may be written."""
        if self._state == BUSY and not self._writable and not self._transport.is_closing():
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
        if self._state != BUSY or self._transport.is_closing():
            raise ConnectionResetError("the client has gone")

    def _wake_stream(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def watch(self, callback: Callable[[], None]) -> None:
        if self._state == CLOSED or self._eof:
            asyncio.get_running_loop().call_soon(callback)
        else:
            self._watchers.append(callback)

    def _tell_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for callback in watchers:
            try:
                callback()
            except Exception:
                log.exception("a disconnect callback failed")

    @property
    def address(self) -> str:
        if not self._address:
            peer = self._transport.get_extra_info("peername")
            self._address = str(peer[0]) if isinstance(peer, tuple) else "unix"
        return self._address


class _Pieces:
    """The Stream a handler writes to."""

    __slots__ = ("_chunked", "_connection", "_unbroken")

    def __init__(self, connection: Answering, chunked: bool) -> None:
        self._connection = connection
        self._chunked = chunked
        # bytes since the loop last ran: a client that reads as fast as we write must not keep it
        self._unbroken = 0

    async def write(self, data: bytes) -> None:
        if not self.write_now(data):
            await self._connection.drained()
            self._unbroken = 0
        self._unbroken += len(data)
        if self._unbroken > HIGH_WATER:
            self._unbroken = 0
            await asyncio.sleep(0)

    def write_now(self, data: bytes) -> bool:
        # An empty chunk would end the body.
        return self._connection.write_piece(data, self._chunked) if data else True

    async def drained(self) -> None:
        await self._connection.drained()
