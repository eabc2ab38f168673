"""The HTTP server: listens, sweeps, drains.

One process may hold several (the public port and a Unix socket that other worker processes forward
to); each has its own connections, limits and metrics. `stop` closes the listeners, lets what is in
flight finish within the deadline, then cuts.
"""

import asyncio
import contextlib
import logging
import socket
import sys
from concurrent.futures import Executor
from pathlib import Path

from penstock.config.schema import HttpServer as Settings
from penstock.metrics import Metrics
from penstock.wire.http.connection import Connection
from penstock.wire.http.routes import Router
from penstock.wire.http.server_state import ServerState
from penstock.wire.origins import Origins
from penstock.wire.request_memory import RequestMemory
from penstock.wire.tls import Certificate
from penstock.wire.tls_server import Server, listen

log = logging.getLogger("penstock.http")

_BACKLOG = 4096
_HANDSHAKE = 60.0  # seconds for one, where headers have no limit
_SPEAKS_TLS = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: 58\r\n\r\n"
    b'{"error":"This port speaks TLS: use https:// or wss://."}\n'
)
_LONGEST_SWEEP = 1.0  # the Date header is as old as this at most


class HttpServer:
    def __init__(
        self,
        router: Router,
        settings: Settings,
        *,
        metrics: Metrics | None = None,
        executor: Executor | None = None,
        sock: socket.socket | None = None,
        unix_path: Path | None = None,
        reuse_port: bool = False,
        certificate: Certificate | None = None,
        origins: Origins | None = None,
        memory: RequestMemory | None = None,
    ) -> None:
        """`origins`: which web pages may send requests; None: nobody looks where they come from.

        `memory`: what all requests of the process may take; None: as much as they like.
        """
        self._settings = settings
        self._sock = sock
        self._unix_path = unix_path
        self._reuse_port = reuse_port
        self._server: Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._certificate = certificate
        self._state = ServerState(
            router,
            settings,
            metrics=metrics if metrics is not None else Metrics(),
            executor=executor,
            origins=origins,
            memory=memory if memory is not None else RequestMemory(sys.maxsize),
        )
        self._interval = min(_LONGEST_SWEEP, *(limit / 4 for limit in self._state.limits))

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._state.now = loop.time()

        def connection() -> Connection:
            return Connection(self._state)

        if self._unix_path is not None:
            self._unix_path.unlink(missing_ok=True)
            self._server = await loop.create_unix_server(
                connection, str(self._unix_path), backlog=_BACKLOG
            )
            self._unix_path.chmod(0o600)
        else:
            self._server = await listen(
                connection,
                self._settings.host,
                self._settings.port,
                self._certificate,
                refusal=_SPEAKS_TLS,
                patience=self._settings.header_timeout or _HANDSHAKE,
                backlog=_BACKLOG,
                reuse_port=self._reuse_port,
                sock=self._sock,
            )
        self._sweep()

    @property
    def port(self) -> int:
        """The port it listens on (0 for a Unix socket)."""
        if self._server is None or self._unix_path is not None:
            return 0
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        return f"{'https' if self._certificate else 'http'}://{host}:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._state.connections)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        state = self._state
        state.now = now = loop.time()
        state.encoder.tick()
        for connection in list(state.connections):
            connection.sweep(now, self._interval)
        self._sweeper = loop.call_later(self._interval, self._sweep)

    async def stop(self, deadline: float = 10.0) -> None:
        """Accept no more, finish what is under way within `deadline` seconds, then cut the rest."""
        if self._server is None:
            return
        self._server.close()
        state = self._state
        state.draining = True
        for connection in list(state.connections):
            connection.drain()
        try:
            async with asyncio.timeout(deadline):
                if state.connections:
                    await state.drained.wait()
                while state.running:  # handlers whose client has gone still finish what they began
                    await asyncio.wait(state.running)
        except TimeoutError:
            log.warning(
                "cut at the end of the drain time of %g s: %d connections, %d handlers",
                deadline,
                len(state.connections),
                len(state.running),
            )
        for connection in list(state.connections):
            connection.abort()
        left = list(state.running)
        for future in left:
            future.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._sweeper is not None:
            self._sweeper.cancel()
        with contextlib.suppress(FileNotFoundError):
            if self._unix_path is not None:
                self._unix_path.unlink()
        self._server = None
