"""Answers as bytes. The lines that repeat (status, content type) are joined once per kind."""

from email.utils import formatdate
from typing import cast

from penstock.protocol.status import REASONS
from penstock.wire.http.messages import Headers, HttpHead, Response, StreamResponse

_SMALL = 1024
_MAX_STARTS = 256  # kinds: some have headers that are another for each answer
_LENGTHS = [b"Content-Length: %d\r\n\r\n" % size for size in range(_SMALL)]
_BODILESS = frozenset((204, 304))
_NAME = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class Encoder:
    __slots__ = ("_date", "_starts")

    def __init__(self) -> None:
        self._date = b""
        self._starts: dict[tuple[int, str, Headers], bytes] = {}  # what comes before the date
        self.tick()

    def tick(self) -> None:
        """Update the Date header. Called every second."""
        self._date = f"Date: {formatdate(usegmt=True)}\r\n".encode()

    def start(self, status: int, content_type: str, headers: Headers = ()) -> bytes:
        """Return the status line and the lines that every answer of this kind has."""
        start = self._starts.get((status, content_type, headers))
        if start is None:
            line = f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}\r\n".encode()
            typed = content_type and status not in _BODILESS
            kind = (("Content-Type", content_type),) if typed else ()
            start = line + header_lines((*kind, *headers))
            if len(self._starts) >= _MAX_STARTS:
                self._starts.clear()
            self._starts[(status, content_type, headers)] = start
        return start

    def simple(self, response: Response) -> bytes:
        """Return an answer to a request without special needs; its headers are a tuple."""
        status, body = response.status, response.body
        key = status, response.content_type, response.headers
        start = self._starts.get(key) or self.start(*key)
        if status in _BODILESS:
            return start + self._date + b"\r\n"
        size = len(body)
        if size < _SMALL:
            return b"".join((start, self._date, _LENGTHS[size], body))
        date = self._date
        return b"%b%bContent-Length: %d\r\n\r\n%b" % (start, date, size, cast(bytes, body))

    def head(self, head: HttpHead | None, response: Response, close: bool) -> bytes:
        """Return everything before the body, in the general case."""
        start = self.start(response.status, response.content_type)
        parts = [start, self._date, header_lines(response.headers)]
        if response.status not in _BODILESS:
            parts.append(b"Content-Length: %d\r\n" % len(response.body))
        if head is not None:
            parts.append(head.cors)
        parts.append(_connection(head, close))
        return b"".join(parts)

    def stream_head(self, head: HttpHead, answer: StreamResponse, close: bool) -> bytes:
        start = self.start(answer.status, answer.content_type)
        parts = [start, self._date, header_lines(answer.headers), head.cors]
        if not head.http10:
            parts.append(b"Transfer-Encoding: chunked\r\n")
        parts.append(_connection(head, close, live=answer.live))
        return b"".join(parts)


def _connection(head: HttpHead | None, close: bool, *, live: bool = False) -> bytes:
    """Return the Connection header. HTTP/1.1 needs none to keep alive; aiq sends it on streams."""
    if close:
        return b"Connection: close\r\n\r\n"
    named = live or (head is not None and head.http10)
    return b"Connection: keep-alive\r\n\r\n" if named else b"\r\n"


def header_lines(headers: Headers) -> bytes:
    """Return headers as lines. Raise ValueError for one that could break out of its line."""
    if not headers:
        return b""
    lines = []
    for name, value in headers:
        if not name or not _NAME.issuperset(name) or any(letter in value for letter in "\r\n\0"):
            raise ValueError(f"not a header: {name!r}: {value!r}")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode("latin-1")
