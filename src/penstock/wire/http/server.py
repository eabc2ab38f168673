"""The HTTP server: listen, sweep idle connections, drain.

A process may have several (the public port and a Unix socket for other worker processes). Each has
its own connections, limits and metrics. `stop` closes the listeners, waits for requests in flight
until the deadline, then closes the rest.
"""

import asyncio
import logging
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from penstock.config.schema import HttpServerSettings as Settings
from penstock.io.tasks import cancelled, repeated
from penstock.metrics import Metrics
from penstock.wire.http.connection import HttpConnection
from penstock.wire.http.routes import Router
from penstock.wire.http.server_state import ServerState
from penstock.wire.origins import Origins
from penstock.wire.request_memory import RequestMemory
from penstock.wire.tls import Certificate
from penstock.wire.tls_server import BACKLOG, Server, listen

log = logging.getLogger("penstock.http")

_HANDSHAKE_SECONDS = 60.0  # used if headers have no time limit
_SPEAKS_TLS = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: 56\r\n\r\n"
    b'{"error":"This port uses TLS: use https:// or wss://."}\n'
)
_MAX_SWEEP_SECONDS = 1.0  # limits the age of the Date header


@dataclass(frozen=True, slots=True)
class Binding:
    """The socket options of a server, besides the host and port of its settings."""

    certificate: Certificate | None = None  # None: plain text
    reuse_port: bool = False  # other processes listen on the same port
    unix_path: Path | None = None  # listen at this Unix socket instead


_IN_CLEAR = Binding()


class HttpServer:
    def __init__(
        self,
        router: Router,
        settings: Settings,
        *,
        metrics: Metrics | None = None,
        executor: Executor | None = None,
        origins: Origins | None = None,
        memory: RequestMemory | None = None,
        binding: Binding = _IN_CLEAR,
    ) -> None:
        """`origins` limits which web pages may send requests; None: no limit.

        `memory` limits all requests of the process; None: no limit.
        """
        self._settings = settings
        self._binding = binding
        self._server: Server | None = None  # while it is started
        self._sweeper: asyncio.Task[None] | None = None
        self._metrics = metrics if metrics is not None else Metrics()
        self.state = ServerState(
            router,
            settings,
            metrics=self._metrics,
            executor=executor,
            origins=origins,
            memory=memory or RequestMemory(),
        )
        self._interval = min(_MAX_SWEEP_SECONDS, *(limit / 4 for limit in self.state.limits))

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.state.now = loop.time()

        def connection() -> HttpConnection:
            return HttpConnection(self.state)

        path = self._binding.unix_path
        if path is not None:
            path.unlink(missing_ok=True)
            self._server = await loop.create_unix_server(connection, str(path), backlog=BACKLOG)
            path.chmod(0o600)
        else:
            self._server = await listen(
                connection,
                self._settings.host,
                self._settings.port,
                self._binding.certificate,
                refusal=_SPEAKS_TLS,
                patience=self._settings.header_timeout or _HANDSHAKE_SECONDS,
                reuse_port=self._binding.reuse_port,
            )
        self._sweeper = repeated(
            "sweep of HTTP connections", self._sweep, self._interval, self._metrics
        )

    @property
    def port(self) -> int:
        """Return the port (0 for a Unix socket)."""
        if self._server is None or self._binding.unix_path is not None:
            return 0
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        return f"{'https' if self._binding.certificate else 'http'}://{host}:{self.port}"

    @property
    def connections(self) -> int:
        return len(self.state.connections)

    def _sweep(self) -> None:
        state = self.state
        state.now = now = asyncio.get_running_loop().time()
        state.encoder.tick()
        for connection in list(state.connections):
            connection.sweep(now, self._interval)

    def drain(self) -> None:
        """Keep serving, and close every connection after its next answer."""
        self.state.draining = True

    async def stop(self, deadline: float = 10.0) -> None:
        """Stop accepting, finish requests in flight within `deadline` seconds, close the rest."""
        if self._server is None:
            return
        self._server.close()
        self.drain()
        state = self.state
        state.drained.clear()  # connections may have been opened since
        for connection in list(state.connections):
            connection.drain()
        try:
            async with asyncio.timeout(deadline):
                if state.connections:
                    await state.drained.wait()
                while state.running:  # handlers whose client has gone still finish
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
        remaining = list(state.running)
        for future in remaining:
            future.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)
        await cancelled(self._sweeper)
        if self._binding.unix_path is not None:
            self._binding.unix_path.unlink(missing_ok=True)
        self._server = None
