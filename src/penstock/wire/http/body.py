"""Collect the body of one request, and account for its memory until it is answered.

Bodies with `Transfer-Encoding: chunked` are read strictly:

    body    := chunk* last trailer* CRLF
    chunk   := size (";" name ["=" token])* CRLF  <size bytes>  CRLF    size: 1 to 16 hex digits
    last    := "0"+ (";" name ["=" token])* CRLF
    trailer := name ":" value CRLF                                      read and dropped

All of this llhttp also accepts, with the same meaning (a property test checks it). The body grows
in one buffer, so a body of single-byte chunks costs its own size and no more. The limit is checked
when a chunk is announced, before any of it is kept.
"""

import re
from io import BytesIO

from penstock.wire.http.messages import CHUNKED, HttpHead, RequestRefused
from penstock.wire.request_memory import RETRY_AFTER_SECONDS, SMALL, TOO_MANY, RequestMemory


class IncomingBody:
    __slots__ = ("_buffer", "_memory", "head", "received", "rest", "since")

    def __init__(self, head: HttpHead, memory: RequestMemory, max_body: int, since: float) -> None:
        if memory.full and head.length > SMALL:
            raise _too_many()
        self.head = head
        self.since = since  # when its head was read
        self.received = 0  # bytes, all of them counted in `memory.total` until `release`
        self.rest = b""  # what follows the body, once it is whole
        self._memory = memory
        self._buffer = ChunkedBody(max_body) if head.length == CHUNKED else BytesIO()

    def feed(self, data: bytes) -> bytes | None:
        """Add a piece; return the whole body once it is complete."""
        self.received += len(data)
        self._memory.total += len(data)
        if self._memory.full and self.received > SMALL:
            raise _too_many()
        buffer = self._buffer
        if isinstance(buffer, ChunkedBody):
            whole = buffer.feed(data)
            self.rest = buffer.rest
            return whole
        missing = self.head.length - buffer.tell()
        buffer.write(data[:missing] if len(data) > missing else data)
        if len(data) < missing:
            return None
        self.rest = data[missing:]
        return buffer.getvalue()

    def release(self) -> None:
        """Release the memory of the body."""
        self._memory.total -= self.received
        self.received = 0


def _too_many() -> RequestRefused:
    return RequestRefused(503, TOO_MANY, (("Retry-After", f"{RETRY_AFTER_SECONDS:.0f}"),))


_MAX_LINE_BYTES = 1024
_MAX_TRAILER_BYTES = 8192
_HEX = frozenset(b"0123456789abcdefABCDEF")
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;%b(?:=%b)?)*" % (_TOKEN, _TOKEN))
_TRAILER = re.compile(_TOKEN + rb":[\t\x20-\x7e\x80-\xff]*")


class ChunkedBody:
    __slots__ = (
        "_body",
        "_in_trailer",
        "_limit",
        "_missing",
        "_pending",
        "_size",
        "_trailer_bytes",
        "rest",
    )

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._body = BytesIO()
        self._size = 0  # bytes announced so far, at most `limit`
        self._missing = 0  # bytes of the current chunk still to come, its closing CRLF included
        self._pending = b""  # an unfinished line, or an unfinished closing CRLF
        self._in_trailer = False
        self._trailer_bytes = 0
        self.rest = b""  # what follows the body, once it is whole

    def feed(self, data: bytes) -> bytes | None:
        """Take the next piece; the whole body once its end was seen, with what follows it in
        `rest`.
        """
        if self._pending:
            data = self._pending + data
            self._pending = b""
        place = 0
        while True:
            if self._missing > 2:
                piece = data[place : place + self._missing - 2]
                self._body.write(piece)
                place += len(piece)
                self._missing -= len(piece)
                if self._missing > 2:
                    return None
            if self._missing:
                if len(data) - place < 2:
                    self._pending = data[place:]
                    return None
                if data[place : place + 2] != b"\r\n":
                    raise RequestRefused(
                        400, "Malformed chunked body: a chunk is longer than its announced size"
                    )
                place += 2
                self._missing = 0
            end = data.find(b"\r\n", place)
            line = data[place:end] if end >= 0 else data[place:]
            self._check_line(line, end >= 0)
            if end < 0:
                self._pending = line
                return None
            place = end + 2
            if self._in_trailer:
                if not line:
                    self.rest = data[place:]
                    return self._body.getvalue()
                if not _TRAILER.fullmatch(line):
                    raise RequestRefused(
                        400, "Malformed chunked body: expected a header after the last chunk"
                    )
                self._trailer_bytes += len(line)
                if self._trailer_bytes > _MAX_TRAILER_BYTES:
                    raise RequestRefused(
                        431, f"The trailer is larger than {_MAX_TRAILER_BYTES} bytes"
                    )
            else:
                self._announce(line)

    def _check_line(self, line: bytes, whole: bool) -> None:
        if len(line) > _MAX_LINE_BYTES:
            raise RequestRefused(
                400, f"Malformed chunked body: a line is longer than {_MAX_LINE_BYTES} bytes"
            )
        if b"\n" in line or b"\r" in (line if whole else line[:-1]):
            raise RequestRefused(400, "Malformed chunked body: lines must end with CR LF")
        if not whole and not self._in_trailer and line and line[0] not in _HEX:
            raise RequestRefused(400, "Malformed chunked body: expected the size of a chunk")

    def _announce(self, line: bytes) -> None:
        match = _SIZE.fullmatch(line)
        if match is None:
            raise RequestRefused(400, "Malformed chunked body: expected the size of a chunk")
        size = int(match[1], 16)
        if size == 0:
            self._in_trailer = True
            return
        self._size += size
        if self._size > self._limit:
            raise RequestRefused(413, f"The body is larger than the limit of {self._limit} bytes")
        self._missing = size + 2
