"""An answer of unknown length: a task runs the handler, which writes piece by piece."""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.wire.http.messages import Stream
from penstock.wire.http.output import HIGH_WATER_BYTES, ResponseOutput


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
