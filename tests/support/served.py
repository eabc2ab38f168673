"""Topics with everything that serves them, inside a test; and a plain socket that speaks the binary
protocol.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from penstock.config.schema import Auth as AuthSettings
from penstock.config.schema import HttpServerSettings as HttpSettings
from penstock.config.schema import KafkaServerSettings as KafkaSettings
from penstock.config.schema import TcpServerSettings as TcpSettings
from penstock.config.schema import TopicsSettings as TopicSettings
from penstock.config.schema import WebsocketServerSettings as WebsocketSettings
from penstock.metrics import Metrics
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.wire.auth import verifier_of
from penstock.wire.feed import Feeds
from penstock.wire.http.api.topic_groups import TopicGroupsApi
from penstock.wire.http.api.topics import TopicsApi
from penstock.wire.http.routes import Router, routes_of
from penstock.wire.http.server import Binding, HttpServer
from penstock.wire.kafka import KafkaServer
from penstock.wire.keepalive import KeepAlive
from penstock.wire.request_memory import RequestMemory
from penstock.wire.tcp import TcpServer
from penstock.wire.tls import Certificate
from penstock.wire.websocket import WebsocketServer


@dataclass
class Served:
    topics: TopicStore
    groups: Groups
    tcp: TcpServer
    kafka: KafkaServer
    http: HttpServer
    websocket: WebsocketServer
    feeds: Feeds
    metrics: Metrics

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.tcp.port}"

    @property
    def kafka_address(self) -> str:
        return f"127.0.0.1:{self.kafka.port}"


@asynccontextmanager
async def serving(  # noqa: PLR0913 - settings of every listener
    directory: Path,
    *,
    tcp: dict[str, Any] | None = None,
    kafka: dict[str, Any] | None = None,
    http: dict[str, Any] | None = None,
    websocket: dict[str, Any] | None = None,
    tls: Certificate | None = None,
    keep_alive: float = 1.0,
    auth: dict[str, Any] | None = None,
    max_bodies: int | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """All of topics on free ports. `keep_alive` is a fifteenth of the keep-alive period; `auth` is
    asked over TCP and by Kafka.
    """
    metrics = Metrics()
    settings = {"fsync": "never", "free_space_reserve": 0, **settings}
    with ThreadPoolExecutor(2) as pool:
        topics = TopicStore(directory, TopicSettings(**settings), pool=pool, metrics=metrics)
        await topics.start()
        groups = Groups(directory / ".penstock" / "groups", topics, pool=pool, metrics=metrics)
        await groups.start()
        feeds = Feeds(KeepAlive(keep_alive))
        memory = RequestMemory(max_bodies) if max_bodies else None
        verifier = verifier_of(AuthSettings(enabled=True, **auth), metrics) if auth else None
        parts = (topics, groups, metrics)
        guards = {"verifier": verifier, "certificate": tls, "memory": memory}
        served = Served(
            topics,
            groups,
            TcpServer(TcpSettings(**{"port": 0, **(tcp or {})}), *parts, **guards),
            KafkaServer(KafkaSettings(**{"port": 0, **(kafka or {})}), *parts, **guards),
            HttpServer(
                Router(
                    routes_of(
                        TopicsApi(topics, groups, feeds, None), TopicGroupsApi(topics, groups)
                    )
                ),
                HttpSettings(port=0, **(http or {})),
                metrics=metrics,
                binding=Binding(tls),
            ),
            WebsocketServer(
                WebsocketSettings(port=0, **(websocket or {})),
                *(topics, feeds, metrics),
                tls=tls.context if tls else None,
                memory=memory,
            ),
            feeds,
            metrics,
        )
        servers = (served.tcp, served.kafka, served.http, served.websocket)
        try:
            for server in servers:
                await server.start()
            yield served
        finally:
            groups.assigned.stop()
            for server in servers:
                await server.stop(2.0)
            await groups.stop()
            await topics.stop()


@contextmanager
def serving_in_thread(directory: Path, *, limit: float = 100, **options: Any) -> Iterator[Served]:
    """As `serving`, in a thread of its own, for code that blocks; at most `limit` seconds."""
    stop, started = threading.Event(), threading.Event()
    collected: list[Served] = []

    def serve() -> None:
        async def body() -> None:
            async with serving(directory, **options) as served:
                collected.append(served)
                started.set()
                await asyncio.get_running_loop().run_in_executor(None, stop.wait)

        uvloop.run(body())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert started.wait(60)
        yield collected[0]
    finally:
        stop.set()
        thread.join()


class Wire:
    """A client without any of our code in it: bytes out, bytes in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, receive_buffer: int | None = None) -> "Wire":
        plain = socket.socket()
        if receive_buffer is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=plain))

    def send(self, command: int, body: bytes = b"") -> None:
        self.writer.write(struct.pack(">BI", command, len(body)) + body)

    async def answer(self) -> tuple[int, int, bytes]:
        """Command, status, body."""
        async with asyncio.timeout(60):
            command, status, length = struct.unpack(">BBI", await self.reader.readexactly(6))
            return command, status, await self.reader.readexactly(length)

    async def ask(self, command: int, body: bytes = b"") -> tuple[int, int, bytes]:
        self.send(command, body)
        return await self.answer()

    async def ended(self) -> bool:
        """Whether the server closes the connection without another byte."""
        async with asyncio.timeout(60):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True

    def close(self) -> None:
        self.writer.close()


def named(topic: str) -> bytes:
    raw = topic.encode()
    return struct.pack(">H", len(raw)) + raw


def produce_body(topic: str, payload: bytes) -> bytes:
    return named(topic) + struct.pack(">I", len(payload)) + payload


def consume_body(topic: str, start: int, count: int) -> bytes:
    return named(topic) + struct.pack(">QI", start, count)


def consumed(body: bytes) -> list[tuple[int, bytes]]:
    (count,) = struct.unpack_from(">I", body)
    at, result = 4, []
    for _ in range(count):
        offset, length = struct.unpack_from(">QI", body, at)
        result.append((offset, body[at + 12 : at + 12 + length]))
        at += 12 + length
    assert at == len(body)
    return result
