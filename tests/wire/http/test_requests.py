"""Requests and answers: routing, decoding, keep-alive, pipelining, bodies."""

import asyncio

import msgspec

from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import Route
from tests.support.http import get, post, run, talking


class Page(msgspec.Struct, frozen=True):
    limit: int = 10
    wait: bool = False
    name: str | None = None
    tag: list[str] = []


class Push(msgspec.Struct):
    queue: str
    items: list[int]


def echo(request: Request) -> Response:
    return Response(200, request.body, "application/octet-stream")


def shown(request: Request) -> Response:
    return json_response({"params": dict(request.params), "path": request.path})


async def later(request: Request) -> Response:
    await asyncio.sleep(0)
    return json_response({"later": request.params["id"]})


def test_a_plain_handler_and_a_coroutine_answer_on_one_connection_in_the_order_of_the_requests() -> None:
    async def body() -> None:
        async with talking(Route("POST", "/echo", echo), Route("GET", "/later/{id}", later)) as (_, wire):
            wire.send(
                post("/echo", b"1") + get("/later/2") + post("/echo", b"3") + get("/later/4") + post("/echo", b"5")
            )
            answers = [(await wire.reply()).body for _ in range(5)]
            assert answers == [b"1", b'{"later":"2"}', b"3", b'{"later":"4"}', b"5"]

    run(body)
