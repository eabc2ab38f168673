"""An HTTP destination that misbehaves on order and writes down what it got."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.export.payload import decompress

HANG, RESET, TAKE_AND_RESET = "hang", "reset", "take_and_reset"
COMPRESSIONS = {"snappy": 1, "zstd": 2, "gzip": 3}


@dataclass
class Received:
    key: str
    ids: list[int]
    answered: bool  # False: taken, but the answer never left
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


Rule = Callable[[list[int], int], Any]  # (ids in the request, number of the request) -> what to do


def accept(ids: list[int], number: int) -> Any:
    return 200


class ScriptedDestination:
    """`rule` answers each request: a status, (status, headers), HANG, RESET, TAKE_AND_RESET, or an
    awaitable of those.

    Records are JSON objects with a unique "id". `ledger` holds every batch that was taken, in
    order.
    """

    def __init__(self, rule: Rule = accept) -> None:
        self.rule = rule
        self.field = ""  # of a record, in which it is
        self.ledger: list[Received] = []
        self.requests = 0
        self.keys: list[str] = []
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def __aenter__(self) -> "ScriptedDestination":
        await self.open()
        return self

    async def __aexit__(self, *failure: object) -> None:
        self.close()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=256)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/in"

    @property
    def ids(self) -> list[int]:
        return [each for received in self.ledger for each in received.ids]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(
                asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
            ):
                while await self._one(reader, writer):
                    pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:]) if k}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        body = decompress(raw, COMPRESSIONS.get(headers.get("content-encoding", ""), 0))
        text = body.decode()
        records = (
            json.loads(text)
            if text.startswith("[")
            else [json.loads(line) for line in text.splitlines()]
        )
        ids = [(record[self.field] if self.field else record)["id"] for record in records]
        self.requests += 1
        self.keys.append(headers["idempotency-key"])
        action = self.rule(ids, self.requests)
        if asyncio.iscoroutine(action):
            action = await action
        received = Received(headers["idempotency-key"], ids, True, raw, headers)
        if action == HANG:
            await reader.read()
            return False
        if action in (RESET, TAKE_AND_RESET):
            if action == TAKE_AND_RESET:
                received.answered = False
                self.ledger.append(received)
            writer.transport.abort()
            return False
        status, extra = action if isinstance(action, tuple) else (action, {})
        if 200 <= status < 300:
            self.ledger.append(received)
        lines = "".join(f"{name}: {value}\r\n" for name, value in extra.items())
        writer.write(f"HTTP/1.1 {status} X\r\n{lines}Content-Length: 0\r\n\r\n".encode())
        await writer.drain()
        return True


def record(number: int, pad: int = 0) -> bytes:
    return json.dumps({"id": number, **({"pad": "x" * pad} if pad else {})}).encode()
