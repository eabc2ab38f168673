"""Listen in plain text or for TLS. A plain-text client of a TLS port gets an error in its protocol.

For plain text, the server of the event loop listens. For TLS, the broker accepts connections itself
and peeks at the first byte. 0x16 begins a handshake, and the connection goes to the event loop. Any
other byte gets `refusal`, and the connection is closed. The peek costs a few system calls; the
handshake takes about a millisecond.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Collection
from typing import Any, Protocol

from penstock.io.tasks import RETRY_SECONDS
from penstock.wire.tls import Certificate

log = logging.getLogger("penstock.tls")

HANDSHAKE = b"\x16"
ACCEPTS_PER_TURN = 64  # connections accepted before other tasks run
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
BACKLOG = 4096  # connections that the kernel holds until they are accepted
LINGER_SECONDS = 2.0  # for the client to read the refusal


class Server(Protocol):
    """The part of `asyncio.Server` that both servers have."""

    @property
    def sockets(self) -> tuple[socket.socket, ...]: ...

    def close(self) -> None: ...


async def finish_all(connections: Collection[Any], ended: asyncio.Event, timeout: float) -> int:
    """Let connections finish for `timeout` seconds. Abort the others, and return their number."""
    for connection in list(connections):
        connection.finish()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while connections:
                ended.clear()
                await ended.wait()
    late = list(connections)
    for connection in late:
        connection.abort()
    return len(late)


async def listen(
    make: Callable[[], asyncio.Protocol],
    host: str,
    port: int,
    certificate: Certificate | None,
    *,
    refusal: bytes,
    patience: float,
    reuse_port: bool = False,
) -> Server:
    """Listen on an address. `patience` limits the wait for the first byte and the handshake."""
    loop = asyncio.get_running_loop()
    if certificate is None:
        return await loop.create_server(
            make, host, port, backlog=BACKLOG, reuse_port=reuse_port or None
        )
    sockets = await _bind(host, port, reuse_port)
    return TlsServer(make, sockets, certificate.context, refusal, patience)


async def _bind(host: str, port: int, reuse_port: bool) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(addresses):
            sockets.append(
                socket.create_server(
                    address[:2], family=family, backlog=BACKLOG, reuse_port=reuse_port
                )
            )
    except OSError:
        for one in sockets:
            one.close()
        raise
    return sockets


class TlsServer:
    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        sockets: list[socket.socket],
        context: ssl.SSLContext,
        refusal: bytes,
        patience: float,
    ) -> None:
        self.sockets = tuple(sockets)
        self._make = make
        self._context = context
        self._refusal = refusal
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        # connections without a first byte, or being closed -> when they are dropped
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._handshakes: set[asyncio.Task[None]] = set()
        self._closed = False
        for one in sockets:
            one.setblocking(False)
            self._loop.add_reader(one, self._accept, one)

    def close(self) -> None:
        """Stop accepting, and drop connections that have not sent anything."""
        if self._closed:
            return
        self._closed = True
        for one in self.sockets:
            self._loop.remove_reader(one)
            one.close()
        for connection in list(self._waiting):
            self._drop(connection)
        for task in self._handshakes:
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                log.error("cannot accept more connections at the moment: %s", error.strerror)
                self._loop.remove_reader(listening)
                self._loop.call_later(RETRY_SECONDS, self._resume_accepting, listening)
                return
            connection.setblocking(False)
            self._waiting[connection] = self._loop.call_later(
                self._patience, self._drop, connection
            )
            self._loop.add_reader(connection, self._peek, connection)

    def _resume_accepting(self, listening: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listening, self._accept, listening)

    def _peek(self, connection: socket.socket) -> None:
        try:
            first = connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        self._loop.remove_reader(connection)
        self._waiting.pop(connection).cancel()
        if first == HANDSHAKE:
            task = self._loop.create_task(self._handshake(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
        elif first:
            self._refuse(connection)
        else:
            connection.close()

    async def _handshake(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=self._patience
            )
        except (OSError, TimeoutError) as error:  # no common version, or no accepted certificate
            log.info("a TLS handshake failed: %s", error)

    def _refuse(self, connection: socket.socket) -> None:
        """Answer, then read what the client sent: closing earlier would reset the connection."""
        with contextlib.suppress(OSError):
            connection.send(self._refusal)
            connection.shutdown(socket.SHUT_WR)
        self._waiting[connection] = self._loop.call_later(LINGER_SECONDS, self._drop, connection)
        self._loop.add_reader(connection, self._discard, connection)

    def _discard(self, connection: socket.socket) -> None:
        try:
            if connection.recv(1 << 16):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass  # the client has gone
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()
            self._loop.remove_reader(connection)
            connection.close()
