"""Open and close the HTTP, TCP, Kafka and WebSocket listeners of one broker. They open after
everything else has started, and close before anything else stops.

With several worker processes, all of them listen on the HTTP port (SO_REUSEPORT). A worker answers
the queue API itself and forwards every other request to the owner over a Unix socket. The owner
collects the metrics of the workers the same way. Clients see one server.
"""

import asyncio
import gc
import logging
import shutil
import tempfile
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from penstock.broker import Broker
from penstock.config import Config
from penstock.contract import operations
from penstock.contract.pipelines import PipelineList
from penstock.monitor import StateMetrics
from penstock.monitor.audit import Audit
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.wire.addresses import TITLES, listening
from penstock.wire.auth import Role, verifier_of
from penstock.wire.feed import Feeds
from penstock.wire.framed_server import FramedServer
from penstock.wire.http.api.console import ConsoleApi, console_routes
from penstock.wire.http.api.dead_letters import TasksApi
from penstock.wire.http.api.export import ExportApi
from penstock.wire.http.api.queues import queue_routes
from penstock.wire.http.api.records import RecordsApi
from penstock.wire.http.api.system import SystemApi, WorkerApi
from penstock.wire.http.api.telemetry import TelemetryApi
from penstock.wire.http.api.topic_groups import TopicGroupsApi
from penstock.wire.http.api.topics import TopicsApi, no_topics
from penstock.wire.http.audit import recording
from penstock.wire.http.forward import forward_to, owner_settings
from penstock.wire.http.guard import TokenGuard
from penstock.wire.http.openapi import DocsApi
from penstock.wire.http.routes import Api, HttpRoute, Router, calling, routes_of
from penstock.wire.http.server import Binding, HttpServer
from penstock.wire.origins import Origins
from penstock.wire.queen.maintenance import MaintenanceApi
from penstock.wire.request_memory import RequestMemory
from penstock.wire.tcp import TcpServer
from penstock.wire.tls import Certificates
from penstock.wire.websocket import WebsocketServer

log = logging.getLogger("penstock.wire")

TopicServer = FramedServer | WebsocketServer


@dataclass(frozen=True, slots=True)
class SocketPaths:
    """The Unix sockets between the processes of one broker, in a directory with a short path."""

    directory: Path
    workers: int

    @property
    def owner(self) -> Path:
        return self.directory / "owner.sock"

    def worker(self, number: int) -> Path:
        return self.directory / f"worker-{number}.sock"

    def all_workers(self) -> list[Path]:
        return [self.worker(number + 1) for number in range(self.workers)]


def freeze_gc() -> None:
    """Exclude all objects loaded so far from garbage collection, and collect the rest less often.

    Requests create thousands of short-lived objects, which reference counting frees.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _max_request_bytes(config: Config) -> int:
    """Return the memory limit of all requests together: at least the largest request."""
    largest = (
        config.http_server.max_body,
        config.tcp_server.max_frame,
        config.kafka_server.max_frame,
        config.websocket_server.max_message,
    )
    return max(config.max_bodies, *largest)


class Listeners:
    """Every listener of one process."""

    def __init__(self, broker: Broker, worker: int = 0, sockets: SocketPaths | None = None) -> None:
        self._broker = broker
        self._worker = worker
        self._http: HttpServer | None = None
        self._servers: dict[str, TopicServer] = {}  # by section of the configuration
        self._private: HttpServer | None = None  # for the other processes of this broker
        # None: authentication is off
        self._verifier = verifier_of(broker.config.auth, broker.metrics)
        self.certificates = Certificates(broker.config)
        http = broker.config.http_server
        self._origins = Origins(
            http.cors_origin,
            http.hosts,
            (http.host, broker.config.websocket_server.host),
            any_host=self._verifier is not None,
            ports=lambda: (self.http_port,),
        )
        self._memory = RequestMemory(_max_request_bytes(broker.config))
        broker.metrics.gauge(
            "penstock_request_bytes",
            "Memory held by large requests in progress",
            read=lambda: self._memory.total,
        )
        self._feeds = Feeds()
        self._audit = Audit(broker.database, broker.presence.member)
        self._tasks = TasksApi(broker.queues, broker.presence.member, self._audit)
        # state that all processes share is reported once, by the owner
        self._state = None if worker else StateMetrics(broker)
        self.sockets = sockets  # None: the broker has one process
        if sockets is None and broker.config.workers > 1:
            directory = Path(tempfile.mkdtemp(prefix="penstock-"))
            self.sockets = SocketPaths(directory, broker.config.workers - 1)

    @property
    def http_port(self) -> int:
        return self._http.port if self._http else 0

    @property
    def addresses(self) -> dict[str, str]:
        """Map the name of each listener to its address."""
        addresses = {"HTTP": self._http.url} if self._http else {}
        for section, server in self._servers.items():
            plain, with_tls, certificate = {
                "tcp_server": ("tcp://", "tls://", self.certificates.tcp),
                "kafka_server": ("", "", self.certificates.kafka),
                "websocket_server": ("ws://", "wss://", self.certificates.websocket),
            }[section]
            host = getattr(self._broker.config, section).host
            scheme = with_tls if certificate else plain
            addresses[TITLES[section]] = f"{scheme}{host}:{server.port}"
        return addresses

    async def start(self) -> None:
        freeze_gc()
        if self._verifier:
            await self._verifier.keys.start()
        broker, config = self._broker, self._broker.config
        if not self._worker:
            self._tasks.tasks.claim_abandoned()
        if config.http_server.enabled:
            self._http = HttpServer(
                self._router(),
                config.http_server,
                metrics=broker.metrics,
                executor=broker.pool,
                origins=self._origins,
                memory=self._memory,
                binding=Binding(self.certificates.http, reuse_port=config.workers > 1),
            )
            with listening("http_server", config.http_server):
                await self._http.start()
        if self.sockets:
            await self._start_private(self.sockets)
        if broker.logs:
            await self._start_topics(broker.logs.topics, broker.logs.groups)
        if self.certificates.all:
            self.certificates.start(broker.metrics)
            broker.metrics.gauge(
                "penstock_tls_certificate_expires_seconds",
                "Unix time at which the first TLS certificate expires",
                read=lambda: self.certificates.expires,
                merge="max",
            )

    async def _start_topics(self, topics: TopicStore, groups: Groups) -> None:
        config, metrics, certificates = self._broker.config, self._broker.metrics, self.certificates
        if config.tcp_server.enabled:
            tcp = TcpServer(
                config.tcp_server,
                topics,
                groups,
                metrics,
                verifier=self._verifier if config.auth.tcp == "token" else None,
                certificate=certificates.tcp,
                memory=self._memory,
            )
            tcp.commands.record = self._audit.record
            await self._open("tcp_server", tcp)
        if config.kafka_server.enabled:
            # Imported here: the schemas take 10 MiB.
            from penstock.wire.kafka import KafkaServer

            kafka = KafkaServer(
                config.kafka_server,
                topics,
                groups,
                metrics,
                verifier=self._verifier,
                certificate=certificates.kafka,
                memory=self._memory,
            )
            kafka.record_changes(self._audit.record)
            await self._open("kafka_server", kafka)
        if config.websocket_server.enabled:
            websocket = WebsocketServer(
                config.websocket_server,
                topics,
                self._feeds,
                metrics,
                tls=certificates.websocket.context if certificates.websocket else None,
                verifier=self._verifier,
                origins=self._origins,
                memory=self._memory,
            )
            await self._open("websocket_server", websocket)

    async def _open(self, section: str, server: TopicServer) -> None:
        with listening(section, getattr(self._broker.config, section)):
            await server.start()
        self._servers[section] = server  # now it has an address

    async def stop(
        self, patience: float, delay: float = 0.0, others: Awaitable[None] | None = None
    ) -> None:
        """Report "not ready" for `delay` seconds, stop accepting, finish requests, close.

        `others` ends when the processes that forward requests to this one have stopped.
        """
        self._broker.draining = True
        if self._http:  # first: answers then close their connections
            self._http.drain()
        stopping = asyncio.ensure_future(others) if others else None
        await asyncio.sleep(delay)
        self._broker.queues.answer_waiting()
        self.certificates.stop()
        if self._broker.logs:  # answer members that wait for a rebalance
            self._broker.logs.groups.assigned.stop()
        servers = [*([self._http] if self._http else []), *self._servers.values()]
        await asyncio.gather(*(server.stop(patience) for server in servers))
        if stopping:
            await stopping
        if self._private:
            await self._private.stop(patience)
        await self._tasks.tasks.stop()
        if self._verifier:
            await self._verifier.keys.stop()
        if self.sockets and not self._worker:
            shutil.rmtree(self.sockets.directory, ignore_errors=True)

    def _router(self) -> Router:
        guard = TokenGuard(self._verifier) if self._verifier else None
        protect = guard.protect if guard else None
        trail = partial(recording, self._audit.record)
        if self._worker:
            assert self.sockets is not None
            # The owner checks token and origin itself: it gets the headers of the request.
            handler = forward_to(self.sockets.owner)
            rest = HttpRoute(
                "*", "/{rest...}", handler, hidden=True, forwards=True, role=Role.PUBLIC
            )
            return Router([*queue_routes(self._broker), rest], protect, trail)
        router = Router(self.owner_routes(), protect, trail)
        router.extend(routes_of(DocsApi(router, guard)))
        return router

    @cached_property
    def _console(self) -> ConsoleApi:
        """Return the Console, which the public port and the workers' socket share."""
        return ConsoleApi(self._broker, authentication=self._verifier is not None)

    def owner_routes(self) -> list[HttpRoute]:
        broker, logs = self._broker, self._broker.logs
        workers = self.sockets.all_workers() if self.sockets else []
        assert self._state is not None
        system = SystemApi(broker, self._state, lambda: self.addresses, workers)
        apis: list[Api] = [
            MaintenanceApi(broker.buffer),
            self._console,
            self._tasks,
        ]
        direct = [
            calling(operations.GET_BUFFER, broker.buffer.status.report),
            calling(operations.LIST_CHANGES, self._audit.page),
            calling(operations.LIST_TASKS, self._tasks.tasks.all),
            calling(operations.GET_TASK, self._tasks.tasks.get),
            calling(operations.CANCEL_TASK, self._tasks.tasks.cancel),
        ]
        if logs:
            pipelines = logs.pipelines
            apis.append(TopicsApi(logs.topics, logs.groups, self._feeds, logs.moves))
            apis.append(TopicGroupsApi(logs.topics, logs.groups))
            apis.append(RecordsApi(logs.topics, logs.groups))
            direct += [
                calling(operations.LIST_PIPELINES, lambda: PipelineList(pipelines.all())),
                calling(operations.GET_PIPELINE, pipelines.get),
                calling(operations.REPORT_PIPELINE, pipelines.put),
                calling(operations.STOP_PIPELINE, pipelines.ask_to_stop),
                calling(operations.FORGET_PIPELINE, pipelines.forget),
                calling(operations.MOVE_TOPIC, logs.moves.begin),
            ]
        else:
            direct += no_topics()
        if broker.exports:
            apis.append(ExportApi(broker.exports))
            max_body = broker.config.http_server.max_body
            apis.append(TelemetryApi(broker.exports, broker.pool, max_body))
        return [
            *routes_of(system),
            *queue_routes(broker),
            *routes_of(*apis),
            *direct,
            *console_routes(),
        ]

    async def _start_private(self, sockets: SocketPaths) -> None:
        """Listen for the other processes of this broker."""
        if self._worker:
            path = sockets.worker(self._worker)
            router = Router(routes_of(WorkerApi(self._broker)))
        else:
            path, router = sockets.owner, self._router()
        settings = owner_settings(self._broker.config.http_server)
        origins = None if self._worker else self._origins
        self._private = HttpServer(
            router,
            settings,
            executor=self._broker.pool,
            origins=origins,
            memory=self._memory,
            binding=Binding(unix_path=path),
        )
        await self._private.start()
