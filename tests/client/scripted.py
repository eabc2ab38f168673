"""Brokers that answer as they are told to, for what a real one does not do on demand."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.routes import HttpRoute

MESSAGE = {
    "transactionId": "t",
    "createdAt": "2026-01-01T00:00:00Z",
    "partition": "Default",
    "partitionId": "p",
}


GIVEN = {
    "id": "0",
    "transaction_id": "t",
    "created_at": datetime.now(UTC),
    "partition": "p",
    "partition_id": "p",
}


class Stocked:
    """A broker with some messages in one queue: it hands them out and writes down the acks. The
    first `broken` acks that come with a pop get no answer.
    """

    def __init__(self, *payloads: Any, broken: int = 0) -> None:
        self.left = [
            {**MESSAGE, "id": str(n), "transactionId": str(n), "leaseId": "lease", "data": payload}
            for n, payload in enumerate(payloads)
        ]
        self.acks: list[dict[str, Any]] = []
        self.acked_with_a_pop = 0
        self.broken = broken

    async def taken(self, request: Request) -> list[dict[str, Any]]:
        batch = int(dict(pair.split("=") for pair in request.head.query.split("&"))["batch"])
        out, self.left = self.left[:batch], self.left[batch:]
        if not out:
            await asyncio.sleep(0.02)
        return out

    async def pop(self, request: Request) -> Response:
        out = await self.taken(request)
        return json_response({"messages": out, "queue": "q"}) if out else EMPTY

    async def ack_and_pop(self, request: Request) -> Response:
        if self.broken:
            self.broken -= 1
            return json_response({"error": "stopping"}, 503)
        acked = self.acked(request)
        self.acked_with_a_pop += len(acked)
        out = await self.taken(request)
        return json_response({"messages": out, "queue": "q", "acknowledged": acked})

    def acked(self, request: Request) -> list[dict[str, Any]]:
        body = json.loads(request.body)["acknowledgments"]
        self.acks += body
        return [{"transactionId": ack["transactionId"], "success": True} for ack in body]

    @property
    def routes(self) -> tuple[HttpRoute, ...]:
        path = "/api/v1/pop/queue/{queue}"
        return (
            HttpRoute("GET", path, self.pop),
            HttpRoute("POST", path, self.ack_and_pop),
            HttpRoute("POST", "/api/v1/ack/batch", lambda one: json_response(self.acked(one))),
        )

    @property
    def answers(self) -> dict[str, str]:
        return {ack["transactionId"]: ack["status"] for ack in self.acks}


@asynccontextmanager
async def raw_server(answer: bytes | None) -> AsyncIterator[str]:
    """Answers every request with these bytes and hangs up; with None it says nothing at all."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def page(_: Any) -> Response:
    return Response(200, b"<html>Please log in</html>")


def raising(*errors: BaseException) -> Callable[[Any], None]:
    left = list(errors)

    def handle(_: Any) -> None:
        if left:
            raise left.pop(0)

    return handle


Answering = Callable[[list[dict[str, Any]]], Response]


def queued(items: list[dict[str, Any]], status: str = "queued") -> Response:
    rows = [
        {"index": n, "status": status, "transaction_id": item["transactionId"]}
        for n, item in enumerate(items)
    ]
    return json_response(rows, 201)


class Scripted:
    """A broker whose answers to push are a list of functions, the last one for ever."""

    def __init__(self, *answers: Answering) -> None:
        self.answers = list(answers)
        self.pushes: list[list[dict[str, Any]]] = []

    def push(self, request: Request) -> Response:
        items = json.loads(request.body)["items"]
        self.pushes.append(items)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(items)

    @property
    def route(self) -> HttpRoute:
        return HttpRoute("POST", "/api/v1/push", self.push)

    @property
    def payloads(self) -> list[list[Any]]:
        return [[item["payload"] for item in items] for items in self.pushes]


def flat(lists: list[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]


def down(_: Any) -> Response:
    return json_response({"error": "the database is down"}, 503)
