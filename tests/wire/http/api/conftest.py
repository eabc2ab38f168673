"""One broker for all tests of the HTTP contract of queues, on the wire, with a real PostgreSQL."""

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess

MICROS = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")
MILLIS = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")


@pytest.fixture(scope="package")
def broker(postgres, tmp_path_factory) -> Iterator[BrokerProcess]:
    with BrokerProcess(
        tmp_path_factory.mktemp("api"), database_url=fresh_database(postgres)
    ) as process:
        yield process
        process.stop()
        assert [line for line in process.log.splitlines() if '"level":"error"' in line] == []


@pytest.fixture
def api(broker) -> Iterator["Api"]:
    with httpx.Client(base_url=broker.url, timeout=30) as client:
        yield Api(client)


@pytest.fixture
def queue() -> str:
    return f"q-{uuid.uuid4().hex[:12]}"


class Api:
    """Short words for the requests, with the status each test expects."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def ask(self, method: str, path: str, body: Any = None, status: int = 200, **query: Any) -> Any:
        content = (
            body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        )
        answer = self.client.request(
            method, f"/api/v1/{path}", content=content, params=query or None
        )
        assert answer.status_code == status, answer.text
        if status >= 400:
            assert isinstance(answer.json()["error"], str)
            assert "SELECT" not in answer.text
        assert status != 204 or answer.content == b""
        return answer.json() if answer.content else None

    def get(self, path: str, status: int = 200, **query: Any) -> Any:
        return self.ask("GET", path, None, status, **query)

    def post(self, path: str, body: Any = None, status: int = 200, **query: Any) -> Any:
        return self.ask("POST", path, body, status, **query)

    def delete(self, path: str, status: int = 200, **query: Any) -> Any:
        return self.ask("DELETE", path, None, status, **query)

    def push(self, queue: str, *payloads: Any, **fields: Any) -> list[dict[str, Any]]:
        items = [{"queue": queue, "payload": payload, **fields} for payload in payloads]
        return self.post("push", {"items": items}, 201)

    def pop(self, queue: str, **query: Any) -> list[dict[str, Any]]:
        answer = self.client.get(f"/api/v1/pop/queue/{queue}", params=query)
        assert answer.status_code in (200, 204), answer.text
        return answer.json()["messages"] if answer.content else []

    def ack(
        self, *messages: dict[str, Any], group: str | None = None, **fields: Any
    ) -> list[dict[str, Any]]:
        keys = ("transactionId", "partitionId", "leaseId")
        items = [{key: message[key] for key in keys} | fields for message in messages]
        return self.post("ack/batch", {"acknowledgments": items, "consumerGroup": group})

    def configure(self, queue: str, **options: Any) -> dict[str, Any]:
        return self.post("configure", {"queue": queue, "options": options})
