"""One HTTP connection: an asyncio Protocol that answers requests strictly one after the other.

The states:

    READY   between requests, or with a part of a head in `rest`
    BODY    a head was read and its body is arriving
    BUSY    a handler is at work (a coroutine, a future or a stream); what else arrives waits in `rest`
    LINGER  an error was answered; what arrives is dropped until the client closes, for a limited time and size
    CLOSED

A plain handler is called and answered inside `data_received`: no task, no callback, one write.
Pipelined requests are not run in parallel (a client that pipelines a push and a pop expects that
order); those that wait are kept as the bytes they came in, and when these exceed `_MOST_WAITING` we
stop reading. We also stop when the client does not read: the transport's buffer above its
high-water mark holds the next request back, and a stream's `write` waits. So a connection costs at
most one request, one answer and a bounded buffer.

How answers are written, also those that take their time, is in `penstock.wire.http.answering`. Time
is looked at by one sweep over all connections (`sweep`, called by the server), never by a timer per
request.
"""

import asyncio
import logging
from io import BytesIO
from typing import cast

from penstock.wire.http.answering import BODY, BUSY, CLOSED, HIGH_WATER, LINGER, READY, Answering
from penstock.wire.http.chunked import ChunkedBody
from penstock.wire.http.head import CHUNKED, Head, Partial, Refused
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.shared import Shared, failure
from penstock.wire.request_memory import RETRY_SECONDS, SMALL, TOO_MANY

log = logging.getLogger("penstock.http")

_MOST_WAITING = 64 << 10
_LINGER_QUIET = 2.0  # seconds without a byte
_LINGER_TIME = 10.0  # in all
_LINGER_BYTES = 64 << 20
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def _too_many_bodies() -> Refused:
    return Refused(503, TOO_MANY, (("Retry-After", f"{RETRY_SECONDS:.0f}"),))


class Connection(Answering):
    __slots__ = ("_dropped", "_fed")

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._dropped = 0  # bytes, while lingering
        self._fed = 0  # how much of `rest` the head that is arriving has seen

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        shared = self._shared
        if len(shared.connections) >= shared.settings.max_connections:
            self._refuse(
                Refused(503, f"All {shared.settings.max_connections} connections are in use")
            )
            self._close()
            return
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        shared.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self.seen = self._shared.now
        state = self._state
        if state == READY and self._writable:
            if self.rest:
                data = self.rest + data
                self.rest = b""
            self._serve(data)
            if self._held:
                self._flush()
        elif state == BODY:
            rest = self._take_body(data)
            if rest is not None:
                self._serve(rest)
                self._flush()
        elif state == LINGER:
            self._dropped += len(data)
            if self._dropped > _LINGER_BYTES:
                self._transport.abort()
        elif state <= BUSY:
            self.rest += data
            if len(self.rest) > _MOST_WAITING and not self._paused:
                self._paused = True
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._eof = True
        if self._state == BUSY:
            self._tell_watchers()
            if self._stream is not None:
                self._transport.abort()
        elif self._state == BODY:
            self._refuse(Refused(400, "The connection ended within the body"))
        elif self._state == READY and self.rest and self._writable:
            self._refuse(Refused(400, "The connection ended within the headers"))
        elif self._state != READY or not self.rest:
            self._close()
        return (
            self._transport.can_write_eof()
        )  # keep our half open until the answer is out; TLS cannot

    def connection_lost(self, _: Exception | None) -> None:
        self._state = CLOSED
        self.rest = b""
        self._head = self._body = self._partial = None
        if self._request is None:  # else its handler still has the body
            self._release_body()
        shared = self._shared
        shared.connections.discard(self)
        self._tell_watchers()
        if self._stream is not None:
            self._stream.cancel()
        self._wake_stream()
        if shared.draining and not shared.connections:
            shared.drained.set()

    def pause_writing(self) -> None:
        self._writable = False
        self._unsent, self._stuck_since = 0, self._shared.now

    def resume_writing(self) -> None:
        self._writable = True
        self._wake_stream()
        if self._state == READY:
            self._continue()

    # Requests

    def _serve(self, data: bytes) -> None:
        """Answer the requests in `data`, which begins where a request begins; what cannot be
        answered yet waits.
        """
        cache = self._shared.cache
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
                    if len(raw) > self._shared.settings.max_header:
                        raise self._header_too_large()
                    head = cache.get(raw)
                except Refused as refused:
                    self._refuse(refused)
                    return
            if self._partial is not None:
                self._partial = None
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
            self._hold = start < size
            if not self._call(head, body):
                self.rest = data[start:] if self._state != CLOSED else b""
                return
        if self._eof:
            self._close()

    def _call(self, head: Head, body: bytes) -> bool:
        """Run the handler; whether the next request may be served at once."""
        request = Request(head, body, self)
        try:
            answer = head.endpoint.call(request)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises becomes an answer and a log line
            answer = failure(error, request)
        if type(answer) is Response:
            return self._send(head, answer)
        self._wait_for(request, answer)
        return self._state == READY and self._writable

    def _wait_for_head(self, rest: bytes) -> None:
        while rest.startswith(b"\r\n"):
            rest = rest[2:]
        if not rest:
            if self._eof:
                self._close()
            return
        try:
            if len(rest) > self._shared.settings.max_header:
                raise self._header_too_large()
            if self._eof:
                raise Refused(400, "The connection ended within the headers")
            if self._partial is None:
                self._partial, self._fed, self._since = Partial(), 0, self.seen
            if rest != b"\r":  # which may turn out to be half an empty line
                self._partial.feed(rest[self._fed :])
                self._fed = len(rest)
        except Refused as refused:
            self._refuse(refused)
            return
        self.rest = rest

    def _header_too_large(self) -> Refused:
        return Refused(
            431,
            f"The headers are larger than the limit of {self._shared.settings.max_header} bytes",
        )

    def _begin_body(self, head: Head, data: bytes) -> bytes | None:
        self._flush()
        refusal = head.endpoint.admit(head) if head.endpoint.admit is not None else None
        self._head = head
        if refusal is None and head.length > SMALL and self._shared.memory.full:
            refusal = _too_many_bodies()
        if refusal is not None:
            self._refuse(refusal)
            return None
        self._state, self._since = BODY, self.seen
        self._body = (
            ChunkedBody(self._shared.settings.max_body) if head.length == CHUNKED else BytesIO()
        )
        if head.expects_continue and not data:
            self._transport.write(_CONTINUE)
        rest = self._take_body(data)
        if rest is None and self._state == BODY and self._eof:
            self._refuse(Refused(400, "The connection ended within the body"))
        return rest

    def _take_body(self, data: bytes) -> bytes | None:
        """Add to the body; once it is whole and its request answered, what follows it and can be
        served now.
        """
        head, body = self._head, self._body
        assert head is not None
        memory = self._shared.memory
        self._received += len(data)
        memory.total += len(data)
        if memory.full and self._received > SMALL:
            self._refuse(_too_many_bodies())
            return None
        if isinstance(body, ChunkedBody):
            try:
                whole = body.feed(data)
            except Refused as refused:
                self._refuse(refused)
                return None
            if whole is None:
                return None
            rest = body.rest
        else:
            assert body is not None
            missing = head.length - body.tell()
            body.write(data[:missing] if len(data) > missing else data)
            if len(data) < missing:
                return None
            whole, rest = body.getvalue(), data[missing:]
        self._state, self._head, self._body = READY, None, None
        more = self._call(head, whole)
        if self._request is None:
            self._release_body()
        if more:
            return rest
        self.rest = rest if self._state != CLOSED else b""
        return None

    def _continue(self) -> None:
        """Serve what has waited, then read on."""
        rest, self.rest = self.rest, b""
        if rest or self._eof:
            self._serve(rest)
            self._flush()
        if len(self.rest) <= _MOST_WAITING:
            self._resume_reading()

    # Time, and the end

    def sweep(self, now: float, slack: float) -> None:
        """Enforce the time limits; `slack` is how late `seen` and `since` may have been written
        down.
        """
        limits = self._shared.limits
        quiet = now - self.seen - slack
        if self._state == LINGER and (
            quiet > _LINGER_QUIET or now - self._since - slack > _LINGER_TIME
        ):
            self._transport.abort()
        elif not self._writable or self._state == CLOSED:
            self._check_progress(now, limits.send)
        elif self._state == READY:
            if self.rest:
                if now - self._since - slack > limits.header:
                    self._refuse(
                        Refused(408, f"The headers did not arrive within {limits.header:g} s")
                    )
            elif quiet > limits.idle:
                self._close()
        elif self._state == BODY:
            if quiet > limits.body:
                self._refuse(Refused(408, f"Nothing of the body arrived for {limits.body:g} s"))
            elif (
                self._received
                < (now - self._since - slack - limits.body) * self._shared.settings.body_min_rate
            ):
                least = self._shared.settings.body_min_rate
                self._refuse(
                    Refused(408, f"The body arrives too slowly, below {least} bytes per second")
                )

    def _check_progress(self, now: float, limit: float) -> None:
        unsent = self._transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._stuck_since = unsent, now
        elif now - self._stuck_since > limit:
            log.info(
                "cut a client that took no bytes for %g s with %d bytes unsent: %s",
                limit,
                unsent,
                self.address,
            )
            self._transport.abort()

    def drain(self) -> None:
        """The server stops: close now if nothing is under way, else after the answer."""
        if self._state == LINGER or (self._state == READY and not self.rest):
            self._close()
        elif self._stream is not None and self._live:
            self._stream.cancel()

    def abort(self) -> None:
        self._transport.abort()
