"""One TCP connection to a broker: requests are pipelined, answers resolve them in order.

A `BufferedProtocol`: the kernel writes straight into our memory. Small answers are parsed out of
one reused buffer and copied; the body of an answer that does not fit into it gets memory of its
own, into which the rest is received, so a FETCH of a megabyte is copied once. That memory is used
again once nobody holds a view of it: fresh pages for every answer would cost more than everything
else (see `Recycled`).

When the connection ends, every unanswered request fails with `ConnectionLost`: what became of it is
unknown to us, and only the caller knows whether it may be sent again.
"""

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from penstock.errors import ConnectionLost, PenstockError, Unauthorized, Unavailable
from penstock.net.addresses import Address, Token
from penstock.net.retry import Backoff
from penstock.net.tls import explain, first_answer_missing
from penstock.protocol import frames
from penstock.protocol.frames import ANSWER, Bytes, Command
from penstock.protocol.status import TcpStatus, error_from_tcp

log = logging.getLogger("penstock.client")

BUFFER_BYTES = 256 << 10


class Recycled:
    """A few large buffers. Each is reused when no view of it is left.

    A bytearray refuses to change its size while a view of it exists: so we try. A caller that keeps
    a body keeps its buffer, and the next body gets fresh memory.
    """

    MAX_BUFFERS = 4

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def take(self, size: int) -> memoryview:
        for buffer in self._buffers:
            if size <= len(buffer) <= 4 * size:
                try:
                    buffer.append(0)
                    buffer.pop()
                except BufferError:
                    continue
                return memoryview(buffer)[:size]
        buffer = bytearray(size + size // 8)  # a little more, for the next one of about this size
        self._buffers = [buffer, *self._buffers[: self.MAX_BUFFERS - 1]]
        return memoryview(buffer)[:size]


class Connection(asyncio.BufferedProtocol):
    """Created by `Link`. `request` may be called at any time; nothing is sent twice."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[
            tuple[asyncio.Future[memoryview], Callable[[memoryview], None] | None]
        ] = deque()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._filled = 0
        self._recycled = Recycled()
        # an answer too large for the buffer, being received into its own memory
        self._body: memoryview | None = None
        self._body_filled = 0
        self._body_head: tuple[int, int] = (0, 0)  # its command and status
        self._writable: asyncio.Future[None] | None = None
        self._heard = False  # any answer
        self._foreign = False  # the peer does not speak this protocol
        # a token that has expired on the way is a reason to connect again, not an answer
        self.renews = False
        self.closed: asyncio.Future[None] = self._loop.create_future()

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def request(
        self, pieces: Bytes | Sequence[Bytes], started: Callable[[memoryview], None] | None = None
    ) -> asyncio.Future[memoryview]:
        """Send a frame. The future returns the answer's body, or raises the error of its status.

        `started` is called with the beginning of a large answer before the rest has arrived.
        """
        future: asyncio.Future[memoryview] = self._loop.create_future()
        if not self.alive or self._transport is None:
            future.set_exception(ConnectionLost("the connection to the broker is closed"))
            return future
        self._waiting.append((future, started))
        if isinstance(pieces, list | tuple):
            self._transport.write(b"".join(pieces))
        else:
            self._transport.write(pieces)  # type: ignore[arg-type]
        return future

    async def drained(self) -> None:
        """Wait until the send buffer has room again."""
        if self._writable is not None:
            await asyncio.shield(self._writable)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        reason = f"the broker closed the connection{f': {explain(error)}' if error else ''}"
        if not self._heard and self._transport is not None:
            reason += first_answer_missing(self._transport)
        waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            if not future.done():
                future.set_exception(
                    Unavailable(frames.NOT_OURS) if self._foreign else ConnectionLost(reason)
                )
        if not self.closed.done():
            self.closed.set_result(None)
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def get_buffer(self, _: int) -> memoryview:
        return (
            self._buffer[self._filled :] if self._body is None else self._body[self._body_filled :]
        )

    def buffer_updated(self, received: int) -> None:
        if self._body is not None:
            self._body_filled += received
            if self._body_filled == len(self._body):
                body, self._body = self._body, None
                self._answer(*self._body_head, body)
            return
        self._filled += received
        self._parse()

    def _parse(self) -> None:
        buffer, at, end = self._buffer, 0, self._filled
        while end - at >= ANSWER.size:
            command, status, length = ANSWER.unpack_from(buffer, at)
            if not command & frames.REPLY and self._transport is not None:
                self._foreign = True
                self._transport.abort()  # its length may be gigabytes
                return
            start = at + ANSWER.size
            if end - start >= length:
                self._answer(command, status, memoryview(bytes(buffer[start : start + length])))
                at = start + length
                continue
            if length > len(buffer) - ANSWER.size:
                body = self._recycled.take(length)
                have = end - start
                body[:have] = buffer[start:end]
                self._body, self._body_filled, self._body_head = body, have, (command, status)
                at = end
                started = self._waiting[0][1] if self._waiting else None
                if started and status == TcpStatus.SUCCESS:
                    started(body[:have])
            break
        if at:
            self._filled = end - at
            buffer[: self._filled] = bytes(buffer[at:end])

    def _answer(self, command: int, status: int, body: memoryview) -> None:
        if not self._waiting:
            if command == frames.ERROR and self._transport is not None:
                self._transport.abort()  # said before it closes: too many connections
            return
        self._heard = True
        future, _ = self._waiting.popleft()
        if future.done():
            return
        if command == frames.ERROR or status != TcpStatus.SUCCESS:
            error = error_from_tcp(status, *frames.read_error(body))
            if self.renews and isinstance(error, Unauthorized):
                self.close()  # the next connection begins with a new token
                error = ConnectionLost(str(error))
            future.set_exception(error)
        else:
            future.set_result(body)


class Waiting:
    """Logs the reason for a wait once, and again when the reason changes."""

    def __init__(self, who: str) -> None:
        self._who = who
        self.error: PenstockError | None = None  # the last error

    def note(self, error: PenstockError, seconds: float) -> None:
        if type(error) is not type(self.error):
            text = "%s waits for the broker, up to %.0f s more: %s"
            log.warning(text, self._who, max(0.0, seconds), error)
        self.error = error

    def over(self) -> None:
        if self.error is not None:
            self.error = None
            log.warning("%s resumes", self._who)


class Endpoint(NamedTuple):
    """Where brokers serve the binary protocol, and the TLS context to use there, if any."""

    addresses: Sequence[Address]
    tls: ssl.SSLContext | None = None


class Link:
    """Keeps one connection to the first of several addresses that answers. It connects when needed,
    and again after a loss.

    The endpoint may be a function that finds it: it is asked before each connection. With a token
    (or a function that gives one, asked at each connection) every connection begins with AUTH.
    """

    def __init__(
        self,
        endpoint: Endpoint | Callable[[], Awaitable[Endpoint]],
        connect_timeout: float = 5.0,
        token: Token | None = None,
    ) -> None:
        self._token = token
        self._find = None if isinstance(endpoint, Endpoint) else endpoint
        self._tls = endpoint.tls if isinstance(endpoint, Endpoint) else None
        self._addresses = list(endpoint.addresses) if isinstance(endpoint, Endpoint) else []
        self._connect_timeout = connect_timeout
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    async def connection(self, deadline: float, waiting: Waiting | None = None) -> Connection:
        """Return a live connection, or raise `Unavailable` if there is none by `deadline` (the
        loop's clock). `waiting` logs the wait.
        """
        if self._connection is not None and self._connection.alive:
            return self._connection
        async with self._lock:
            if self._connection is not None and self._connection.alive:
                return self._connection
            self._connection = await self._connect(deadline, waiting)
            return self._connection

    async def _connect(self, deadline: float, waiting: Waiting | None) -> Connection:
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        while True:
            failures = await self._find_addresses()
            for position, (host, port) in enumerate(self._addresses):
                if self._closed:
                    raise Unavailable("the client is closed")
                try:
                    async with asyncio.timeout(self._connect_timeout):
                        _, connection = await loop.create_connection(
                            Connection,
                            host,
                            port,
                            ssl=self._tls,
                            server_hostname=host if self._tls else None,
                        )
                        await self._authenticate(connection)
                except (OSError, TimeoutError, ConnectionLost) as error:
                    why = explain(error, handshaking=bool(self._tls)) or "no answer"
                    failures.append(f"{host}:{port}: {why}")
                    continue
                # The address that answered comes first next time, before dead ones.
                self._addresses.insert(0, self._addresses.pop(position))
                return connection
            delay = backoff.delay()
            unanswered = Unavailable(f"no broker answers ({'; '.join(failures)})")
            if loop.time() + delay > deadline:
                raise unanswered
            if waiting is not None:
                waiting.note(unanswered, deadline - loop.time())
            await asyncio.sleep(delay)

    async def _find_addresses(self) -> list[str]:
        """Look up the addresses, unless they are fixed. Returns why that failed, if it did."""
        if self._find is None:
            return []
        if self._closed:
            raise Unavailable("the client is closed")
        try:
            addresses, self._tls = await self._find()
        except Unavailable as error:
            return [str(error)]
        if set(addresses) != set(self._addresses):
            self._addresses = list(addresses)
        return []

    async def _authenticate(self, connection: Connection) -> None:
        token = self._token() if callable(self._token) else self._token
        if token:
            try:
                await connection.request(frames.request(Command.AUTH, token.encode()))
                connection.renews = callable(self._token)
            except BaseException:
                connection.close()
                raise

    def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.close()
