"""What listens: HTTP, TCP and WebSocket over one broker, opened last and closed first.

With several worker processes all of them listen on the HTTP port (SO_REUSEPORT, the kernel spreads connections). A
worker answers the queue API itself and forwards every other request to the owner over a Unix socket; the owner gathers
the workers' metrics the same way. From outside it is one server.
"""

import asyncio
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.server import Broker
from penstock.wire.feed import Feeds
from penstock.wire.http.api import system, topics
from penstock.wire.http.routes import Route, Router
from penstock.wire.http.server import HttpServer, tls_context
from penstock.wire.keepalive import KeepAlive
from penstock.wire.tcp import TcpServer
from penstock.wire.websocket import WebsocketServer

log = logging.getLogger("penstock.wire")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the processes of one broker meet: Unix sockets in a directory with a short path."""

    directory: Path
    workers: int

    @property
    def owner(self) -> Path:
        return self.directory / "owner.sock"

    def worker(self, number: int) -> Path:
        return self.directory / f"worker-{number}.sock"


class Listeners:
    """Every listener of one process."""

    def __init__(self, broker: Broker, worker: int = 0, rendezvous: Rendezvous | None = None) -> None:
        self._broker = broker
        self._worker = worker
        self._http: HttpServer | None = None
        self._private: HttpServer | None = None
        self._tcp: TcpServer | None = None
        self._websocket: WebsocketServer | None = None
        self._feeds = Feeds()
        self._keep_alive = KeepAlive()
        shared = broker.config.workers > 1
        self.rendezvous = rendezvous
        if shared and rendezvous is None:
            directory = Path(tempfile.mkdtemp(prefix="penstock-"))
            self.rendezvous = Rendezvous(directory, broker.config.workers - 1)

    @property
    def http_port(self) -> int:
        return self._http.port if self._http else 0

    @property
    def addresses(self) -> dict[str, str]:
        """Name -> address of everything that listens, as a person would type it."""
        found = {}
        if self._http:
            settings = self._broker.config.http_server
            scheme = "https" if settings.ssl_cert_path else "http"
            found["HTTP"] = f"{scheme}://{settings.host}:{self._http.port}"
        if self._tcp:
            found["TCP"] = f"{self._broker.config.tcp_server.host}:{self._tcp.port}"
        if self._websocket:
            scheme = "wss" if self._websocket.secure else "ws"
            found["WebSocket"] = f"{scheme}://{self._broker.config.websocket_server.host}:{self._websocket.port}"
        return found

    async def start(self) -> None:
        config = self._broker.config
        if config.http_server.enabled:
            router = Router(self._worker_routes() if self._worker else self._owner_routes())
            self._http = HttpServer(
                router,
                config.http_server,
                metrics=self._broker.metrics,
                executor=self._broker.pool,
                reuse_port=config.workers > 1,
            )
            await self._http.start()
            if self.rendezvous:
                await self._meet(self.rendezvous)
        await self._start_topics()

    async def _start_topics(self) -> None:
        """The protocols that only topics have: in the process that owns them."""
        config, broker = self._broker.config, self._broker
        if broker.topics is None or broker.groups is None:
            return
        if config.tcp_server.enabled:
            self._tcp = TcpServer(config.tcp_server, broker.topics, broker.groups, broker.metrics)
            await self._tcp.start()
        if config.websocket_server.enabled:
            self._websocket = WebsocketServer(
                config.websocket_server,
                broker.topics,
                self._feeds,
                broker.metrics,
                keep_alive=self._keep_alive,
                tls=tls_context(
                    config.websocket_server.ssl_cert_path or config.http_server.ssl_cert_path,
                    config.websocket_server.ssl_key_path or config.http_server.ssl_key_path,
                ),
            )
            await self._websocket.start()

    async def stop(self, patience: float) -> None:
        """Stop accepting, let what is in flight finish within `patience` seconds, close."""
        servers = (self._http, self._private, self._tcp, self._websocket)
        await asyncio.gather(*(server.stop(patience) for server in servers if server))
        if self.rendezvous and not self._worker:
            shutil.rmtree(self.rendezvous.directory, ignore_errors=True)

    async def _meet(self, rendezvous: Rendezvous) -> None:
        if self._worker:
            router = Router(system.worker_routes(self._broker))
            path = rendezvous.worker(self._worker)
        else:
            router = Router(self._owner_routes())
            path = rendezvous.owner
        self._private = HttpServer(router, self._broker.config.http_server, unix_path=path)
        await self._private.start()

    def _owner_routes(self) -> list[Route]:
        workers = []
        if self.rendezvous:
            workers = [self.rendezvous.worker(number + 1) for number in range(self.rendezvous.workers)]
        return [
            *system.routes(self._broker, lambda: self.addresses, workers),
            *self._queue_routes(),
            *self._topic_routes(),
        ]

    def _topic_routes(self) -> list[Route]:
        if self._broker.topics is None or self._broker.groups is None:
            return []
        return topics.routes(self._broker.topics, self._broker.groups, self._feeds, self._keep_alive)

    def _worker_routes(self) -> list[Route]:
        return self._queue_routes()

    def _queue_routes(self) -> list[Route]:
        return []
