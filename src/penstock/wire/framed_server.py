"""Listen for a framed protocol and watch its connections: their number, idleness and end."""

import asyncio
import logging
import time

from penstock.config.schema import FramedListener
from penstock.io.tasks import cancelled, repeated
from penstock.metrics import Metrics
from penstock.wire.auth import Verifier
from penstock.wire.framed import FramedConnection
from penstock.wire.request_memory import RequestMemory
from penstock.wire.tls import Certificate
from penstock.wire.tls_server import Server, finish_all, listen

HANDSHAKE_SECONDS = 10.0
MAX_SWEEP_SECONDS = 5.0


class FramedServer:
    name: str  # in the log; in lower case in metrics
    refusal = b""  # the answer to plain text on a TLS port

    def __init__(
        self,
        settings: FramedListener,
        metrics: Metrics,
        verifier: Verifier | None,
        certificate: Certificate | None,
        memory: RequestMemory | None,
    ) -> None:
        """`memory` bounds all requests of the process; None: no bound."""
        self._settings = settings
        self._metrics = metrics
        self._certificate = certificate
        self._asks_for_tokens = verifier is not None
        self.memory = memory or RequestMemory()
        self.connections: set[FramedConnection] = set()
        self._ended = asyncio.Event()  # a connection has ended
        self._server: Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._log = logging.getLogger(f"penstock.{self.name.lower()}")
        self.bytes_in = 0
        self.bytes_out = 0
        prefix = f"penstock_{self.name.lower()}"
        self._refused = metrics.counter(
            f"{prefix}_connections_refused_total",
            f"{self.name} connections closed because there were too many",
        )
        metrics.gauge(
            f"{prefix}_connections",
            f"Open {self.name} connections",
            read=lambda: len(self.connections),
        )
        metrics.gauge(
            f"{prefix}_received_bytes",
            f"Bytes received over {self.name}",
            read=lambda: self.bytes_in,
        )
        metrics.gauge(
            f"{prefix}_sent_bytes", f"Bytes sent over {self.name}", read=lambda: self.bytes_out
        )

    def connect(self) -> FramedConnection:
        """Return the protocol of an accepted connection."""
        raise NotImplementedError

    @property
    def port(self) -> int:
        if self._server is None:
            raise RuntimeError(f"the {self.name} server is not started")
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        settings = self._settings
        self._server = await listen(
            self.connect,
            settings.host,
            settings.port,
            self._certificate,
            refusal=self.refusal,
            patience=HANDSHAKE_SECONDS,
        )
        limits = (settings.idle_timeout, settings.frame_timeout, settings.auth_timeout)
        interval = min((MAX_SWEEP_SECONDS, *(limit / 4 for limit in limits if limit)))
        self._sweeper = repeated(
            f"sweep of {self.name} connections", self._sweep, max(interval, 0.05), self._metrics
        )
        self._log.info(
            "%s on %s:%d%s",
            self.name,
            settings.host,
            self.port,
            " with TLS" if self._certificate else "",
        )

    async def stop(self, timeout: float = 10.0) -> None:
        """Stop accepting, answer requests in flight within `timeout` seconds, and close."""
        if self._server is None:
            return
        self._server.close()
        await cancelled(self._sweeper)
        if late := await finish_all(self.connections, self._ended, timeout):
            self._log.warning("%d connections were closed with requests in flight", late)
        self._server = None

    def opened(self, connection: FramedConnection) -> bool:
        """Register a connection; return False if there are too many."""
        if len(self.connections) >= self._settings.max_connections or self._server is None:
            self._refused.add()
            return False
        self.connections.add(connection)
        return True

    def lost(self, connection: FramedConnection) -> None:
        self.connections.discard(connection)
        self._ended.set()

    def _sweep(self) -> None:
        """Close connections that are idle, slow or unauthenticated for too long."""
        settings = self._settings
        now = asyncio.get_running_loop().time()
        for connection in list(self.connections):
            if (
                settings.idle_timeout
                and now - connection.seen > settings.idle_timeout
                and connection.idle
            ):
                connection.finish()
            elif settings.frame_timeout and connection.is_stalled(now, settings.frame_timeout):
                connection.abort()
            elif (
                self._asks_for_tokens
                and settings.auth_timeout
                and self._is_stranger(connection, now)
            ):
                connection.finish_or_abort()

    def _is_stranger(self, connection: FramedConnection, now: float) -> bool:
        """Return True if the connection had enough time and has not authenticated."""
        identity, limit = connection.identity, self._settings.auth_timeout
        if identity is None:
            return now - connection.opened > limit
        return time.time() - identity.expires > limit
