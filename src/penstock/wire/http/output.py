"""Write answers. The answers to requests that arrived together are sent in one system call. A task
writes an answer of unknown length piece by piece.
"""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.wire.http.messages import Stream

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


class OutgoingStream:
    """The `Stream` that a handler writes to; `write` waits while the client does not read."""

    __slots__ = ("_chunked", "_output", "_over", "_readable", "_unbroken", "live", "task")

    def __init__(self, output: ResponseOutput, *, chunked: bool, live: bool) -> None:
        self._output = output
        self._chunked = chunked  # False for HTTP/1.0: the connection's end is the body's
        self.live = live  # endless
        self.task: asyncio.Task[None]  # set by `start`
        self._over = False  # the client has gone
        self._readable: asyncio.Future[None] | None = None  # the handler waits for the client
        # bytes since the loop last ran: a fast client must not block the loop
        self._unbroken = 0

    def start(self, run: Callable[[Stream], Awaitable[None]] | None) -> "asyncio.Task[None]":
        """Run `run`, which writes the body; None: without a body (HEAD)."""
        self.task = asyncio.get_running_loop().create_task(self._run(run))
        return self.task

    async def _run(self, run: Callable[[Stream], Awaitable[None]] | None) -> None:
        if run is not None:
            await run(self)

    async def write(self, data: bytes) -> None:
        if not self.write_now(data):
            await self.drained()
            self._unbroken = 0
        self._unbroken += len(data)
        if self._unbroken > HIGH_WATER_BYTES:
            self._unbroken = 0
            await asyncio.sleep(0)

    def write_now(self, data: bytes) -> bool:
        if not data:
            return True  # an empty chunk would end the body
        output = self._output
        if self._over or output.transport.is_closing():
            return False
        if self._chunked:
            output.write_chunk(data)
        else:
            output.transport.write(data)
        return output.writable and not output.transport.is_closing()

    async def drained(self) -> None:
        transport = self._output.transport
        if not (self._over or self._output.writable or transport.is_closing()):
            self._readable = asyncio.get_running_loop().create_future()
            await self._readable
        if self._over or transport.is_closing():
            raise ConnectionResetError("the client has gone")

    def resume(self) -> None:
        """Continue: the client reads again."""
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)
        self._readable = None

    def cancel(self) -> None:
        """Stop: the client has gone."""
        self._over = True
        self.task.cancel()
        self.resume()
