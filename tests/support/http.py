"""Run an HttpServer inside a test, and talk to it over plain sockets."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from penstock.config.schema import HttpServerSettings as Settings
from penstock.metrics import Metrics
from penstock.wire.http.openapi import DocsApi
from penstock.wire.http.routes import HttpRoute, Router, routes_of
from penstock.wire.http.server import Binding, HttpServer
from penstock.wire.origins import Origins
from penstock.wire.request_memory import RequestMemory
from penstock.wire.tls import Certificate


@asynccontextmanager
async def serving(
    *routes: HttpRoute,
    metrics: Metrics | None = None,
    certificate: Certificate | None = None,
    origins: Origins | None = None,
    max_bodies: int | None = None,
    **settings: Any,
) -> AsyncIterator[HttpServer]:
    server = HttpServer(
        Router(routes),
        Settings(**{"port": 0, **settings}),
        metrics=metrics,
        binding=Binding(certificate),
        origins=origins,
        memory=RequestMemory(max_bodies) if max_bodies else None,
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop(2.0)


@dataclass(slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


class Wire:
    """A raw client: what it sends is what the test says, byte for byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self, to: str = "GET") -> Reply:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
        headers = {
            name.lower(): value
            for name, _, value in (line.partition(": ") for line in head[1:] if line)
        }
        if to == "HEAD" or status in (204, 304) or status < 200:
            return Reply(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while True:
                size = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
                piece = (await self.reader.readexactly(size + 2))[:-2]
                body += piece
                if size == 0:
                    return Reply(status, headers, body)
        if "content-length" in headers:
            return Reply(
                status, headers, await self.reader.readexactly(int(headers["content-length"]))
            )
        return Reply(status, headers, await self.reader.read())

    async def ask(self, data: bytes) -> Reply:
        self.send(data)
        return await self.reply(data.split(b" ", 1)[0].decode("latin-1"))

    async def ended(self) -> bytes:
        """What still comes until the server closes."""
        return await self.reader.read()

    async def close(self) -> None:
        if self.writer.transport.get_write_buffer_size():
            self.writer.transport.abort()  # the server may never take it
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            pass


@asynccontextmanager
async def connected(server: HttpServer) -> AsyncIterator[Wire]:
    wire = Wire(*await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 24))
    try:
        yield wire
    finally:
        await wire.close()


def get(path: str, *headers: str) -> bytes:
    return request("GET", path, b"", *headers)


def post(path: str, body: bytes, *headers: str) -> bytes:
    return request("POST", path, body, f"Content-Length: {len(body)}", *headers)


def request(method: str, path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: test", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


@asynccontextmanager
async def talking(*routes: HttpRoute, **settings: Any) -> AsyncIterator[tuple[HttpServer, Wire]]:
    """A server and one connection to it."""
    async with serving(*routes, **settings) as server, connected(server) as wire:
        yield server, wire


@contextmanager
def serving_in_thread(*routes: HttpRoute, **settings: Any) -> Iterator[HttpServer]:
    """A server on a loop of its own, for clients that block."""
    loop = uvloop.new_event_loop()
    router = Router(routes)
    router.extend(routes_of(DocsApi(router)))
    server = HttpServer(router, Settings(**{"port": 0, **settings}))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(2.0), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
