"""A topic on another broker: mirroring.

    type: broker
    url: http://other:6632
    topic: orders
    token: "..."        sent as a bearer token

Records arrive byte for byte and in the order they are sent; with one worker that is the order of the source. A batch
whose answer was lost is sent again, so the other topic may hold it twice.
"""

import base64
from typing import Any
from urllib.parse import quote

import msgspec

from penstock.errors import Unavailable
from penstock.export.destinations import Batch, Retry, cheap_to_open
from penstock.export.destinations.http import check_status
from penstock.export.payload import FRAMES
from penstock.net import HttpClient


class BrokerDestination:
    encoding = FRAMES
    compression: int | None = None

    def __init__(self, url: str, topic: str, *, token: str = "", timeout: float = 30.0) -> None:
        self._url, self._topic, self._timeout = url, topic, timeout
        self._headers = [("Content-Type", "application/json")]
        if token:
            self._headers.append(("Authorization", f"Bearer {token}"))
        self._target = f"/topics/{quote(topic, safe='')}/produce"
        self._client: HttpClient | None = None
        HttpClient(url, headers=self._headers)

    async def start(self) -> None:
        self._client = HttpClient(self._url, headers=self._headers)

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()

    def is_cheap(self, batch: Batch) -> bool:
        return cheap_to_open(batch)

    def prepare(self, batch: Batch) -> bytes:
        records = batch.split()
        try:
            return msgspec.json.encode({"payloads": [record.decode() for record in records]})
        except UnicodeDecodeError:
            encoded = [base64.b64encode(record).decode() for record in records]
            return msgspec.json.encode({"payloads": encoded, "encoding": "base64"})

    async def send(self, batch: Batch, prepared: Any) -> None:
        assert self._client is not None
        headers = [("Idempotency-Key", batch.key)]
        try:
            answer = await self._client.request("POST", self._target, prepared, headers, timeout=self._timeout)
        except TimeoutError as error:
            raise Retry("timeout", str(error)) from error
        except Unavailable as error:
            raise Retry("network", str(error)) from error
        check_status(answer.status, answer.headers, answer.body)

    def describe(self) -> str:
        return f"topic {self._topic} at {self._url.rpartition('@')[2]}"
