"""A broker as it is started without any setting, and what a web page of another site can do to it:
nothing.

Two processes, so that requests are judged where they are answered and where they are passed on.
"""

import asyncio
import gzip
import json
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.conftest import fresh_database
from tests.support.broker import ServeProcess

FOREIGN = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
IMAGE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
PUSH = {"items": [{"queue": "orders", "payload": {"id": 1}}]}
TIMES = 8  # connections, so that every process gets some


@pytest.fixture(scope="module")
def broker(postgres, tmp_path_factory) -> Iterator[ServeProcess]:
    directory = tmp_path_factory.mktemp("origins")
    with ServeProcess(directory, database_url=fresh_database(postgres), workers=2) as process:
        assert httpx.post(f"{process.url}/api/v1/push", json=PUSH).status_code == 201
        assert (
            httpx.post(f"{process.url}/topics/t/produce", json={"payload": "x"}).status_code == 201
        )
        yield process


def every_process(
    broker: ServeProcess, method: str, path: str, **more: object
) -> list[httpx.Response]:
    with httpx.Client(headers={"Connection": "close"}, timeout=30) as client:
        return [client.request(method, broker.url + path, **more) for _ in range(TIMES)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/api/v1/push", {**FOREIGN, "Content-Type": "text/plain"}),
        ("OPTIONS", "/api/v1/push", {**FOREIGN, "Access-Control-Request-Method": "POST"}),
        ("GET", "/api/v1/pop/queue/orders?autoAck=true", IMAGE),
        ("DELETE", "/api/v1/resources/queues/orders", FOREIGN),
        ("POST", "/topics/t/produce", FOREIGN),
        ("GET", "/topics/t/stream?offset=0", {**FOREIGN, "Accept": "text/event-stream"}),
        ("DELETE", "/topics/t", FOREIGN),
        ("POST", "/api/v1/system/maintenance", FOREIGN),
        ("GET", "/api/v1/pop/queue/orders?autoAck=true", {"Host": "evil.example:6632"}),
        (
            "GET",
            "/topics/t/consume?offset=0",
            {"Host": "evil.example:6632", "Origin": "http://evil.example:6632"},
        ),
    ],
)
def test_a_foreign_page_changes_nothing_and_reads_nothing(
    broker: ServeProcess, method: str, path: str, headers: dict[str, str]
) -> None:
    for answer in every_process(broker, method, path, headers=headers, content=json.dumps(PUSH)):
        assert (answer.status_code, "http_server." in answer.json()["error"]) == (403, True)
        assert "access-control-allow-origin" not in answer.headers


def test_pages_of_the_broker_itself_are_served(broker: ServeProcess) -> None:
    ours = {"Origin": broker.url, "Sec-Fetch-Site": "same-origin"}
    for answer in every_process(broker, "POST", "/api/v1/push", headers=ours, json=PUSH):
        assert answer.status_code == 201
    for answer in every_process(
        broker, "POST", "/topics/t/produce", headers=ours, json={"payload": "x"}
    ):
        assert answer.status_code == 201
    link = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }
    for path, status in (("/docs", 302), ("/console/docs.html", 200)):
        answers = every_process(broker, "GET", path, headers=link)
        assert {answer.status_code for answer in answers} == {status}


def test_curl_does_not_notice(broker: ServeProcess) -> None:
    name = broker.url.replace("127.0.0.1", "localhost")
    for arguments in (
        ["-X", "POST", f"{broker.url}/api/v1/push", "-d", json.dumps(PUSH)],
        ["-X", "POST", f"{name}/topics/t/produce", "-d", '{"payload": "x"}'],
        ["--http1.0", f"{broker.url}/topics/t/next_offset"],
        [f"{name}/health/live"],
    ):
        for _ in range(TIMES):
            subprocess.run(
                ["curl", "-4", "-sS", "--fail-with-body", *arguments],
                check=True,
                stdout=subprocess.DEVNULL,
            )


def test_bodies_are_judged_by_the_process_that_answers(broker: ServeProcess) -> None:
    for path, body in (("/api/v1/push", PUSH), ("/topics/t/produce", {"payload": "packed"})):
        data = json.dumps(body).encode()
        for answer in every_process(
            broker, "POST", path, content=gzip.compress(data), headers={"Content-Encoding": "gzip"}
        ):
            assert answer.status_code == 201, answer.text
        for answer in every_process(
            broker, "POST", path, content=data, headers={"Content-Type": "text/plain"}
        ):
            assert (answer.status_code, "application/json" in answer.json()["error"]) == (415, True)


async def test_a_websocket_upgrade_from_a_foreign_page_is_refused(broker: ServeProcess) -> None:
    async def status(**headers: str) -> int:
        try:
            async with connect(broker.websocket, additional_headers=headers) as socket:
                await socket.send('{"command":"list_topics_request"}')
                assert "t" in json.loads(await socket.recv())["topics"]
                return 101
        except InvalidStatus as refused:
            answer = refused.response
        assert b"http_server." in answer.body
        return answer.status_code

    assert await status() == 101
    assert await status(Origin=broker.url) == 101  # our own page, which comes from the port of HTTP
    assert await status(Origin="https://evil.example") == 403
    assert await status(Origin="null") == 403
    assert await status(Origin="http://127.0.0.1:1") == 403
    port = broker.websocket.rpartition(":")[2]
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(
            b"GET / HTTP/1.1\r\nHost: evil.example\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert b" 403 " in await reader.readline()
        writer.close()
