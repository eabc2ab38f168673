"""The HTTP API of a broker in another process, for tests that block."""

import json
from typing import Any

import httpx

JSON = {"Content-Type": "application/json"}


def call(url: str, method: str = "GET", body: Any = None) -> Any:
    """Send one request, which must succeed, and return the JSON of the answer."""
    answer = httpx.request(method, url, content=_encode(body), headers=JSON, timeout=30)
    answer.raise_for_status()
    return answer.json() if answer.content else None


def _encode(body: Any) -> bytes | None:
    return body if body is None or isinstance(body, bytes) else json.dumps(body).encode()


class Api:
    """Short words for the requests, with the status each test expects."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def ask(self, method: str, path: str, body: Any = None, status: int = 200, **query: Any) -> Any:
        answer = self.client.request(
            method, f"/api/v1/{path}", content=_encode(body), params=query or None
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
