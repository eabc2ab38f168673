"""The HTTP layer against uvicorn (bare ASGI, uvloop, httptools): the same small answers, one
process each.

python -m bench.http serve ours|uvicorn      one of the servers alone, to profile it
"""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import uvloop

from bench import load
from bench.harness import Contest
from penstock.config.schema import HttpServerSettings as Settings
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import HttpRoute, Router
from penstock.wire.http.server import HttpServer
from tests.support import guard

ANSWER = b'{"status":"ok"}'
JSON_BODY = b'{"queue":"orders","items":[1,2,3,4,5,6,7,8],"note":"' + b"x" * 200 + b'"}'


class Item(msgspec.Struct):
    queue: str
    items: list[int]
    note: str = ""


def plain(_: Request) -> Response:
    return Response(201, ANSWER)


async def coroutine(_: Request) -> Response:
    await asyncio.sleep(0)
    return Response(201, ANSWER)


def typed(request: Request) -> Response:
    return Response(201, msgspec.json.encode(request.data.items))


async def serve_ours() -> None:
    routes = [
        HttpRoute("POST", "/empty", plain),
        HttpRoute("POST", "/coroutine", coroutine),
        HttpRoute("POST", "/typed", typed, body=Item),
        HttpRoute("POST", "/topics/{topic}/produce", plain),
    ]
    server = HttpServer(Router(routes), Settings(port=0))
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


def serve_uvicorn() -> None:
    import uvicorn

    decode = msgspec.json.Decoder(Item).decode

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        answer = ANSWER
        if scope["path"] == "/typed":
            answer = msgspec.json.encode(decode(body).items)
        elif scope["path"] == "/coroutine":
            await asyncio.sleep(0)
        length = str(len(answer)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    config = uvicorn.Config(
        app,
        port=0,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        lifespan="off",
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(config).run(sockets=[listener])


class Servers:
    """Both servers, each in its own process, for as long as the contests run."""

    def __enter__(self) -> "Servers":
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}
        for name in ("ours", "uvicorn"):
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.http", "serve", name], stdout=subprocess.PIPE
            )
            guard.watch(process.pid)
            assert process.stdout is not None
            self.processes[name] = process
            self.ports[name] = int(process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def rate(self, name: str, requests: list[bytes], depth: int = 1) -> float:
        result = load.run(
            load.Load(port=self.ports[name], requests=requests, connections=32, depth=depth)
        )
        if not result.all_are(201):
            raise RuntimeError(f"{name} answered {result.statuses}")
        return result.rate

    def rate_of_cpu(self, name: str, requests: list[bytes]) -> float:
        """Answers per second of the server's own CPU time: the generator's cost and the neighbours'
        are left out.
        """
        process = psutil.Process(self.processes[name].pid)
        before = process.cpu_times()
        result = load.run(
            load.Load(port=self.ports[name], requests=requests, connections=32, warm_up=0)
        )
        after = process.cpu_times()
        return result.answers / (after.user + after.system - before.user - before.system)

    def contest(self, name: str, requests: list[bytes], at_least: float | None = None) -> Contest:
        return Contest(
            name=name,
            unit="requests/s",
            ours=lambda: self.rate("ours", requests),
            theirs=lambda: self.rate("uvicorn", requests),
            against="uvicorn",
            at_least=at_least,
        )


def contests() -> Iterator[Contest]:
    with Servers() as servers:
        yield servers.contest("HTTP: empty POST, 32 connections", [load.post("/empty")], 5.0)
        yield Contest(
            name="HTTP: empty POST, per second of server CPU",
            unit="requests/s",
            ours=lambda: servers.rate_of_cpu("ours", [load.post("/empty")]),
            theirs=lambda: servers.rate_of_cpu("uvicorn", [load.post("/empty")]),
            against="uvicorn",
        )
        distinct = [
            load.post(f"/topics/t{n % 50}/produce", b"", f"X-Request-Id: {n:032x}")
            for n in range(20_000)
        ]
        yield servers.contest("HTTP: POST, every head different", distinct)
        yield servers.contest("HTTP: POST to a coroutine that suspends", [load.post("/coroutine")])
        yield servers.contest(
            "HTTP: POST of 300 bytes of JSON, decoded to a type", [load.post("/typed", JSON_BODY)]
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["serve", "ours"]:
        uvloop.run(serve_ours())
    elif sys.argv[1:] == ["serve", "uvicorn"]:
        serve_uvicorn()
    else:
        raise SystemExit(__doc__)
