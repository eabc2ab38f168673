"""Listens for the binary protocol and watches its connections: how many, how idle, how they end."""

import asyncio
import logging
import time

from penstock.config.schema import TcpServer as Settings
from penstock.metrics import Metrics
from penstock.protocol import frames
from penstock.protocol.status import TcpStatus
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.wire.auth import Verifier
from penstock.wire.request_memory import RequestMemory
from penstock.wire.tcp.commands import Commands
from penstock.wire.tcp.connection import Connection
from penstock.wire.tcp.memory import keep_freed_memory
from penstock.wire.tls import Certificate
from penstock.wire.tls_server import Server, listen

log = logging.getLogger("penstock.tcp")

HANDSHAKE_SECONDS = 10.0
MAX_SWEEP_SECONDS = 5.0
SPEAKS_TLS = frames.failure(
    TcpStatus.INVALID_REQUEST, "this port speaks TLS: use tls:// in the address"
)


class TcpServer:
    def __init__(
        self,
        settings: Settings,
        topics: TopicStore,
        groups: Groups,
        metrics: Metrics,
        verifier: Verifier | None = None,
        certificate: Certificate | None = None,
        memory: RequestMemory | None = None,
    ) -> None:
        """`verifier`: connections must begin with AUTH and a token it accepts; None: they need not.

        `memory`: what all requests of the process may take; None: as much as they like.
        """
        self._settings = settings
        self._certificate = certificate
        self._asks_for_tokens = verifier is not None
        self.memory = memory or RequestMemory()
        self.commands = Commands(topics, groups, metrics, settings.max_frame, verifier)
        self._connections: set[Connection] = set()
        self._ended = asyncio.Event()  # a connection has ended
        self._server: Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self.last_producer: Connection | None = None  # whose read appended last
        self.bytes_in = 0
        self.bytes_out = 0
        self._refused = metrics.counter(
            "penstock_tcp_connections_refused_total",
            "TCP connections closed because there were too many",
        )
        metrics.gauge(
            "penstock_tcp_connections", "Open TCP connections", read=lambda: len(self._connections)
        )
        metrics.gauge(
            "penstock_tcp_received_bytes", "Bytes received over TCP", read=lambda: self.bytes_in
        )
        metrics.gauge("penstock_tcp_sent_bytes", "Bytes sent over TCP", read=lambda: self.bytes_out)

    @property
    def port(self) -> int:
        """The port it listens on, also when the configuration said 0."""
        if self._server is None:
            raise RuntimeError("the TCP server is not started")
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        keep_freed_memory()
        self._server = await listen(
            lambda: Connection(self, self.commands),
            self._settings.host,
            self._settings.port,
            self._certificate,
            refusal=SPEAKS_TLS,
            patience=HANDSHAKE_SECONDS,
        )
        self._sweep()
        log.info(
            "TCP on %s:%d%s",
            self._settings.host,
            self.port,
            " with TLS" if self._certificate else "",
        )

    async def stop(self, timeout: float = 10.0) -> None:
        """Accept no one, answer what is under way for at most `timeout` seconds, close."""
        if self._server is None:
            return
        self._server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._connections):
            connection.finish()
        try:
            async with asyncio.timeout(timeout):
                while self._connections:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            log.warning(
                "%d TCP connections were cut off with requests under way", len(self._connections)
            )
        for connection in list(self._connections):
            connection.abort()
        self._server = None

    def opened(self, connection: Connection) -> bool:
        """Whether the connection may stay."""
        if len(self._connections) >= self._settings.max_connections or self._server is None:
            self._refused.add()
            return False
        self._connections.add(connection)
        return True

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if self.last_producer is connection:
            self.last_producer = None
        self._ended.set()

    def _sweep(self) -> None:
        """Close connections that are silent, slow or strangers for too long; one timer for all of
        them.
        """
        loop = asyncio.get_running_loop()
        settings = self._settings
        now = loop.time()
        for connection in list(self._connections):
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
        limits = (settings.idle_timeout, settings.frame_timeout, settings.auth_timeout)
        interval = min((MAX_SWEEP_SECONDS, *(limit / 4 for limit in limits if limit)))
        self._sweeper = loop.call_later(max(interval, 0.05), self._sweep)

    def _is_stranger(self, connection: Connection, now: float) -> bool:
        """Whether it has had time enough to show a token that is valid."""
        identity, limit = connection.identity, self._settings.auth_timeout
        if identity is None:
            return now - connection.opened > limit
        return time.time() - identity.expires > limit
