"""Collect the body of one request, and account for its memory until it is answered."""

from io import BytesIO

from penstock.wire.http.chunked import ChunkedBody
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
