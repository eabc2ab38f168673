"""One HTTP connection: an asyncio Protocol that answers requests strictly one after the other.

The states:

    READY   between requests, or with a part of a head in `rest`
    BODY    a head was read and its body is arriving
    BUSY    a handler is at work (a coroutine, a future or a stream); what else arrives waits
    LINGER  an error was answered; what arrives is dropped until the client closes, for a limited
            time and size
    CLOSED

A plain handler is called and answered inside `data_received`: no task, no callback, one write.
Pipelined requests are not run in parallel (a client that pipelines a push and a pop expects that
order); those that wait are kept as the bytes they came in, and when these exceed `_MAX_WAITING`
we stop reading. We also stop when the client does not read: the transport's buffer above its
high-water mark holds the next request back, and a stream's `write` waits. So a connection costs at
most one request, one answer and a bounded buffer.

The parts: `Output` writes, `Partial` is the head that is arriving, `IncomingBody` the body,
`OutgoingStream` an answer of unknown length. The connection says whose turn it is. Time is looked
at by one sweep over all connections (`sweep`, called by the server), never by a timer per request.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

from penstock.errors import Unavailable
from penstock.wire.http.body import IncomingBody
from penstock.wire.http.compress import compressed, is_compressible
from penstock.wire.http.head import Partial
from penstock.wire.http.messages import (
    UNIX,
    Answer,
    HttpHead,
    Request,
    RequestRefused,
    Response,
    StreamResponse,
    failure_response,
    refusal_response,
)
from penstock.wire.http.output import HIGH_WATER_BYTES, OutgoingStream, ResponseOutput
from penstock.wire.http.server_state import ServerState

log = logging.getLogger("penstock.http")

READY, BODY, BUSY, LINGER, CLOSED = range(5)
_MAX_WAITING = 64 << 10  # bytes of pipelined requests
LINGER_QUIET_SECONDS = 2.0  # without a byte
LINGER_SECONDS = 10.0  # in all
LINGER_BYTES = 64 << 20
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpConnection(asyncio.Protocol):
    __slots__ = (
        "_address", "_body", "_dropped", "_eof", "_lingers_since",
        "_request", "_seen", "_server", "_state", "_stream", "_watchers",
        "output", "partial", "paused", "rest",
    )  # fmt: skip

    def __init__(self, server: ServerState) -> None:
        self._server = server
        self.output: ResponseOutput  # set by connection_made
        self._state = READY
        self.rest = b""  # bytes that wait: the start of a head, or pipelined requests
        self.paused = False  # reading, because too much waits
        self._eof = False  # the client will send no more
        self.partial: Partial | None = None  # the head that is arriving; its bytes are in `rest`
        self._body: IncomingBody | None = None  # until its request is answered
        self._request: Request | None = None  # that a handler is working on, while BUSY
        self._watchers: list[Callable[[], object]] = []  # of that request
        self._stream: OutgoingStream | None = None  # the answer to that request
        self._seen = server.now  # when bytes arrived last
        self._lingers_since = 0.0
        self._dropped = 0  # bytes, while lingering
        self._address = ""  # of the client, once someone asked for it

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.output = ResponseOutput(cast(asyncio.Transport, transport))
        server = self._server
        if len(server.connections) >= server.settings.max_connections:
            self._refuse(
                RequestRefused(503, f"All {server.settings.max_connections} connections are in use")
            )
            self._close()
            return
        self.output.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._seen = self._server.now
        state, output = self._state, self.output
        if state == READY and output.writable:
            if self.rest:
                data = self.rest + data
                self.rest = b""
            self._serve(data)
            if output.held:
                output.flush()
        elif state == BODY:
            rest = self._take_body(data)
            if rest is not None:
                self._serve(rest)
                output.flush()
        elif state == LINGER:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                output.transport.abort()
        elif state <= BUSY:
            self.rest += data
            if len(self.rest) > _MAX_WAITING and not self.paused:
                self.paused = True
                output.transport.pause_reading()

    def eof_received(self) -> bool:
        self._eof = True
        transport = self.output.transport
        if self._state == BUSY:
            self._notify_watchers()
            if self._stream is not None:
                transport.abort()
        elif self._state == BODY:
            self._refuse(RequestRefused(400, "The connection ended within the body"))
        elif self._state == READY and self.rest and self.output.writable:
            self._refuse(RequestRefused(400, "The connection ended within the headers"))
        elif self._state != READY or not self.rest:
            self._close()
        # Keep our half open until the answer is out; TLS cannot.
        return transport.can_write_eof()

    def connection_lost(self, _: Exception | None) -> None:
        self._state = CLOSED
        self.rest = b""
        self.partial = None
        if self._request is None:  # else its handler still has the body
            self._release_body()
        server = self._server
        server.connections.discard(self)
        self._notify_watchers()
        if self._stream is not None:
            self._stream.cancel()
        if server.draining and not server.connections:
            server.drained.set()

    def pause_writing(self) -> None:
        self.output.writable = False
        self.output.watch_progress(self._server.now)

    def resume_writing(self) -> None:
        self.output.writable = True
        if self._stream is not None:
            self._stream.resume()
        if self._state == READY:
            self._serve_waiting()

    # Requests

    def _serve(self, data: bytes) -> None:
        """Answer the requests in `data`, which begins where a request begins; what cannot be
        answered yet waits.
        """
        cache, output = self._server.cache, self.output
        start, size = 0, len(data)
        while start < size:
            end = data.find(b"\r\n\r\n", start) + 4
            if end == 3:
                self._wait_for_head(data[start:])
                return
            raw = data[start:end]
            head = cache.young.get(raw)
            if head is None:
                if raw.startswith(b"\r\n"):  # RFC 9112: empty lines before a request are skipped
                    start += 2
                    continue
                try:
                    if len(raw) > self._server.settings.max_header:
                        raise self._header_too_large()
                    head = cache.get(raw)
                except RequestRefused as refused:
                    self._refuse(refused)
                    return
            if self.partial is not None:
                self.partial = None
            start = end + head.length
            if head.length == 0:
                body = b""
            elif head.length > 0 and start <= size:
                body = data[end:start]
            else:
                rest = self._begin_body(head, data[end:])
                if rest is None:
                    return
                data, start, size = rest, 0, len(rest)
                continue
            output.hold = start < size
            if not self._call(head, body):
                self.rest = data[start:] if self._state != CLOSED else b""
                return
        if self._eof:
            self._close()

    def _call(self, head: HttpHead, body: bytes) -> bool:
        """Run the handler; whether the next request may be served at once."""
        request = Request(head, body, self)
        try:
            answer = head.endpoint.call(request)
        except Exception as error:  # noqa: BLE001 - it becomes an answer and a log line
            answer = failure_response(error, request)
        if type(answer) is Response:
            return self._send(head, answer)
        self._wait_for(request, answer)
        return self._state == READY and self.output.writable

    def _wait_for_head(self, rest: bytes) -> None:
        while rest.startswith(b"\r\n"):
            rest = rest[2:]
        if not rest:
            self.partial = None
            if self._eof:
                self._close()
            return
        try:
            if len(rest) > self._server.settings.max_header:
                raise self._header_too_large()
            if self._eof:
                raise RequestRefused(400, "The connection ended within the headers")
            if self.partial is None:
                self.partial = Partial(self._seen)
            self.partial.feed(rest)
        except RequestRefused as refused:
            self._refuse(refused)
            return
        self.rest = rest

    def _header_too_large(self) -> RequestRefused:
        limit = self._server.settings.max_header
        return RequestRefused(431, f"The headers are larger than the limit of {limit} bytes")

    def _begin_body(self, head: HttpHead, data: bytes) -> bytes | None:
        self.output.flush()
        try:
            precheck = head.endpoint.precheck
            if precheck is not None and (refusal := precheck(head)) is not None:
                raise refusal
            max_body = self._server.settings.max_body
            self._body = IncomingBody(head, self._server.memory, max_body, self._seen)
        except RequestRefused as refused:
            self._refuse(refused, head)
            return None
        self._state = BODY
        if head.expects_continue and not data:
            self.output.transport.write(_CONTINUE)
        rest = self._take_body(data)
        if rest is None and self._state == BODY and self._eof:
            self._refuse(RequestRefused(400, "The connection ended within the body"))
        return rest

    def _take_body(self, data: bytes) -> bytes | None:
        """Add to the body; once it is whole and its request answered, what follows it and can be
        served now.
        """
        body = self._body
        assert body is not None
        try:
            whole = body.feed(data)
        except RequestRefused as refused:
            self._refuse(refused)
            return None
        if whole is None:
            return None
        self._state = READY
        more = self._call(body.head, whole)
        if self._request is None:
            self._release_body()
        if more:
            return body.rest
        self.rest = body.rest if self._state != CLOSED else b""
        return None

    def _serve_waiting(self) -> None:
        """Serve what has waited, then read on."""
        rest, self.rest = self.rest, b""
        if rest or self._eof:
            self._serve(rest)
            self.output.flush()
        if len(self.rest) <= _MAX_WAITING:
            self._resume_reading()

    def _release_body(self) -> None:
        if self._body is not None:
            self._body.release()
            self._body = None

    def _resume_reading(self) -> None:
        if self.paused and self._state != CLOSED:
            self.paused = False
            self.output.transport.resume_reading()

    # Answers

    def _send(self, head: HttpHead, response: Response) -> bool:
        """Write an answer; whether the next request may be served at once."""
        server, output = self._server, self.output
        try:
            if (
                head.plain
                and type(response.headers) is tuple
                and not server.draining
                and len(response.body) < server.simple_below
            ):
                data = server.encoder.simple(response)
                if output.hold or output.held:
                    output.write(data)
                else:
                    output.transport.write(data)
            elif self._wants_gzip(head, response):
                self._compress_and_send(head, response)
                return False
            else:
                self._send_general(head, response)
        except (ValueError, UnicodeEncodeError) as error:  # headers that cannot be sent
            response = failure_response(error, None)
            self._send_general(head, response)
        status = response.status
        labels = head.endpoint.labels.get(status) or server.labels(head.endpoint, status)
        server.counts[labels] = server.counts.get(labels, 0) + 1
        return output.writable and self._state == READY

    def _send_general(self, head: HttpHead, response: Response) -> None:
        close = not head.keep_alive or self._server.draining
        start = self._server.encoder.head(head, response, close)
        bodiless = head.method == "HEAD" or response.status in (204, 304)
        self.output.write_message(start, b"" if bodiless else response.body)
        if close:
            self._close()

    def _wants_gzip(self, head: HttpHead, response: Response) -> bool:
        least = self._server.settings.compress_from
        return (
            head.accepts_gzip
            and 0 < least <= len(response.body)
            and head.endpoint.gzip
            and is_compressible(response)
            and head.method != "HEAD"
        )

    def _compress_and_send(self, head: HttpHead, response: Response) -> None:
        """Compress in the pool for blocking work: a megabyte takes long enough to be noticed by
        everyone else.
        """
        loop = asyncio.get_running_loop()
        request = Request(head, b"", self)
        self._wait_for(request, loop.run_in_executor(self._server.executor, compressed, response))

    def _refuse(self, refused: RequestRefused, head: HttpHead | None = None) -> None:
        """Answer an error of the protocol itself. Where the next request begins is unknown, so this
        is the last one.
        """
        if self._state >= LINGER:
            return
        if self._body is not None:
            head = self._body.head
        head = head or refused.head
        response = refusal_response(head, refused.status, str(refused), refused.headers)
        self.output.flush()
        self.output.write_message(
            self._server.encoder.head(head, response, close=True), response.body
        )
        self._server.refused.add(1, str(refused.status))
        self.rest = b""
        self.partial = None
        self._release_body()
        if self._eof:
            self._close()
            return
        # Closing with unread bytes in the socket would reset the connection and might destroy the
        # answer on its way.
        self._state = LINGER
        self._seen = self._lingers_since = self._server.now
        if self.output.transport.can_write_eof():
            self.output.transport.write_eof()
        self._resume_reading()

    def _close(self) -> None:
        if self._state != CLOSED:
            self.output.flush()
            self._state = CLOSED
            self.output.watch_progress(self._server.now)
            self.output.transport.close()

    # Handlers that take their time

    def _wait_for(self, request: Request, answer: Answer | Awaitable[Answer]) -> None:
        output = self.output
        if output.hold or output.held:
            output.flush()
        self._state, self._request = BUSY, request
        if isinstance(answer, StreamResponse):
            self._start_stream(request, answer)
            return
        future = (
            answer
            if isinstance(answer, asyncio.Future)
            else asyncio.get_running_loop().create_task(cast(Coroutine[Any, Any, Answer], answer))
        )
        self._server.running.add(future)
        future.add_done_callback(self._answered)

    def _answered(self, future: "asyncio.Future[Answer]") -> None:
        self._server.running.discard(future)
        if self._body is not None:
            self._release_body()
        request = self._request
        assert request is not None
        try:
            answer = future.result()
        except asyncio.CancelledError:
            answer = failure_response(Unavailable("The broker is stopping"), request)
        except Exception as error:  # noqa: BLE001 - as for a plain handler
            answer = failure_response(error, request)
        if self._watchers:
            self._watchers.clear()
        if self._state != BUSY:
            self._request = None
        elif isinstance(answer, StreamResponse):
            self._start_stream(request, answer)
        else:
            self._state, self._request = READY, None
            if self._send(request.head, answer) and (self.rest or self._eof or self.paused):
                self._serve_waiting()

    def _start_stream(self, request: Request, answer: StreamResponse) -> None:
        head, server = request.head, self._server
        self._release_body()
        close = not head.keep_alive or head.http10 or server.draining
        try:
            start = server.encoder.stream_head(head, answer, close)
        except (ValueError, UnicodeEncodeError) as error:
            self._state, self._request = READY, None
            if self._send(head, failure_response(error, request)):
                self._serve_waiting()
            return
        self.output.transport.write(start)
        server.requests.add(1, *server.labels(head.endpoint, answer.status))
        self._stream = OutgoingStream(self.output, chunked=not head.http10, live=answer.live)
        task = self._stream.start(answer.run if head.method != "HEAD" else None)
        server.running.add(task)
        task.add_done_callback(self._streamed)

    def _streamed(self, task: "asyncio.Task[None]") -> None:
        """Handle the end of a stream: it ended by itself, it failed, or we cancelled it because the
        client has gone or the server stops.
        """
        server, transport, request = self._server, self.output.transport, self._request
        server.running.discard(task)
        self._stream = self._request = None
        self._watchers.clear()
        assert request is not None
        head = request.head
        error = None if task.cancelled() else task.exception()
        if error is not None:
            gone = isinstance(error, ConnectionError) and transport.is_closing()
            if self._state != CLOSED and not gone:
                log.error("a stream failed: %s %s", head.method, head.path, exc_info=error)
            transport.abort()  # the missing last chunk says that the answer is not whole
        elif self._state == BUSY:
            if head.method != "HEAD" and not head.http10:
                transport.write(b"0\r\n\r\n")
            self._state = READY
            if not head.keep_alive or head.http10 or server.draining:
                self._close()
            elif self.output.writable:
                self._serve_waiting()

    # What a request needs of its connection

    def watch(self, callback: Callable[[], object]) -> None:
        if self._state == CLOSED or self._eof:
            asyncio.get_running_loop().call_soon(callback)
        else:
            self._watchers.append(callback)

    def _notify_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for callback in watchers:
            try:
                callback()
            except Exception:
                log.exception("a disconnect callback failed")

    @property
    def closed(self) -> bool:
        return self._state == CLOSED

    @property
    def address(self) -> str:
        if not self._address:
            peer = self.output.transport.get_extra_info("peername")
            self._address = str(peer[0]) if isinstance(peer, tuple) else UNIX
        return self._address

    # Time, and the end

    def sweep(self, now: float, slack: float) -> None:
        """Enforce the time limits. Our own times may be recorded up to `slack` seconds late."""
        limits = self._server.limits
        quiet = now - self._seen - slack
        if self._state == LINGER and (
            quiet > LINGER_QUIET_SECONDS or now - self._lingers_since - slack > LINGER_SECONDS
        ):
            self.output.transport.abort()
        elif not self.output.writable or self._state == CLOSED:
            self._cut_if_stuck(now, limits.send)
        elif self._state == READY and self.partial is not None:
            if now - self.partial.since - slack > limits.header:
                self._refuse(
                    RequestRefused(408, f"The headers did not arrive within {limits.header:g} s")
                )
        elif self._state == READY and quiet > limits.idle:
            self._close()
        elif self._state == BODY and self._body is not None:
            least = self._server.settings.body_min_rate
            allowed = now - self._body.since - slack - limits.body  # seconds it has to account for
            if quiet > limits.body:
                self._refuse(
                    RequestRefused(408, f"Nothing of the body arrived for {limits.body:g} s")
                )
            elif self._body.received < allowed * least:
                self._refuse(
                    RequestRefused(
                        408, f"The body arrives too slowly, below {least} bytes per second"
                    )
                )

    def _cut_if_stuck(self, now: float, limit: float) -> None:
        if self.output.is_stuck(now, limit):
            transport = self.output.transport
            log.info(
                "cut a client that took no bytes for %g s with %d bytes unsent: %s",
                limit,
                transport.get_write_buffer_size(),
                self.address,
            )
            transport.abort()

    def drain(self) -> None:
        """Close the connection when the server stops: now, or after the open request's answer."""
        if self._state == LINGER or (self._state == READY and not self.rest):
            self._close()
        elif self._stream is not None and self._stream.live:
            self._stream.task.cancel()

    def abort(self) -> None:
        self.output.transport.abort()
