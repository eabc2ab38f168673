"""Write answers: those of requests that arrived together leave in one system call."""

import asyncio

JOINED_BYTES = 64 << 10  # larger bodies are written separately
HIGH_WATER_BYTES = 256 << 10


class ResponseOutput:
    """The writing side of a transport. It never waits; `writable`: the client reads."""

    __slots__ = ("_held_bytes", "_stuck_since", "_unsent", "held", "hold", "transport", "writable")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.hold = False  # collect answers until all requests that arrived together are answered
        self.held: list[bytes] = []  # in order; nothing else is written while there are any
        self._held_bytes = 0  # of all of them, at most JOINED_BYTES and one answer
        self.writable = True  # False: the transport's buffer is above its high-water mark
        self._unsent = 0  # bytes in the transport's buffer when progress was last checked
        self._stuck_since = 0.0  # when `_unsent` last changed

    def write(self, data: bytes) -> None:
        self.held.append(data)
        self._held_bytes += len(data)
        if not self.hold or self._held_bytes > JOINED_BYTES:
            self.flush()

    def flush(self) -> None:
        self.hold = False
        if self.held:
            data = b"".join(self.held)
            self.held.clear()
            self._held_bytes = 0
            self.transport.write(data)

    def write_message(self, head: bytes, body: bytes | memoryview) -> None:
        """Write head and body of an answer; a large body is not copied."""
        if len(body) < JOINED_BYTES:
            self.write(head + body)
        else:
            self.flush()
            self.transport.write(head)
            self.transport.write(body)

    def write_chunk(self, data: bytes) -> None:
        """Write a piece of a chunked body."""
        if len(data) < JOINED_BYTES:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self.transport.writelines((b"%x\r\n" % len(data), data, b"\r\n"))

    def watch_progress(self, now: float) -> None:
        """Start to measure whether the client reads."""
        self._unsent, self._stuck_since = -1, now

    def is_stuck(self, now: float, limit: float) -> bool:
        """Return True if the client has read nothing for `limit` seconds."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._stuck_since = unsent, now
            return False
        return now - self._stuck_since > limit
