"""`penstock.Client`: queues, their consumers and buffers, and what an operator asks, from one
object.

async with Client("http://localhost:6632") as client:
    await client.push("orders", {"id": 7}, partition="c-1")
    async for message in client.take("orders@billing", batch=10):
        ...
        await client.ack(message)
"""

import asyncio
import os
import ssl
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode

from penstock.client.brokers import Brokers
from penstock.client.buffer import Item, PushBuffer
from penstock.client.consumer import Consumer, Handler
from penstock.client.messages import Address
from penstock.client.queues import QueueClient
from penstock.errors import InvalidRequest, Unavailable
from penstock.net.addresses import Token
from penstock.net.tls import client_context

DEFAULT_URL = "http://127.0.0.1:6632"
GIVE_BACK_SECONDS = 1.0  # always remain for it


class Client(QueueClient):
    """Talks to one broker, or to several on one database; with no URL, to PENSTOCK_URL or the local
    one.

    `token` (default: PENSTOCK_TOKEN) is sent to brokers that ask for one; a function is asked
    before each request. With https://, `ca` is the CA to believe (a PEM file or its text, default:
    PENSTOCK_CA_FILE, or the system's), or `tls` a context of yours. `timeout` limits one request,
    `patience` how long a request is tried again while no broker answers. A client belongs to the
    event loop of its first request.
    """

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        *,
        token: Token | None = None,
        timeout: float = 30.0,
        patience: float = 30.0,
        pool_size: int = 64,
        ca: str | Path | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if urls is None:
            urls = os.environ.get("PENSTOCK_URL") or DEFAULT_URL
        if token is None:
            token = os.environ.get("PENSTOCK_TOKEN")
        if isinstance(urls, str):
            urls = [url.strip() for url in urls.split(",") if url.strip()]
        if tls is None and any(url.startswith("https:") for url in urls):
            tls = client_context(ca)
        super().__init__(
            Brokers(
                urls, token=token, timeout=timeout, patience=patience, pool_size=pool_size, tls=tls
            )
        )
        self._buffers: list[PushBuffer] = []
        self._consumers: list[Consumer] = []

    # Consumers and buffers

    def consumer(self, address: str | Address, **options: Any) -> Callable[[Handler], Consumer]:
        """Make the function below a consumer of `address`; `run` starts it. The options are those
        of `Consumer`.
        """

        def register(handler: Handler) -> Consumer:
            consumer = Consumer(self, address, handler, **options)
            self._consumers.append(consumer)
            return consumer

        return register

    async def run(self) -> None:
        """Run all consumers until `stop`."""
        await asyncio.gather(*(consumer.run() for consumer in self._consumers))

    def stop(self) -> None:
        """Have all consumers finish what they handle and end."""
        for consumer in self._consumers:
            consumer.stop()

    def buffer(self, **options: Any) -> PushBuffer:
        """A buffer that gathers pushes into batches; the options are those of `PushBuffer`."""
        if self._brokers.closed:
            raise InvalidRequest("the client is closed")
        buffer = PushBuffer(self, **options)
        self._buffers.append(buffer)
        return buffer

    async def close(self, timeout: float = 10.0) -> list[Item]:
        """Let consumers finish, send what the buffers hold, within `timeout` seconds in all; what
        could not be sent.

        Consumers get half of the time at most. Messages that a `take` had fetched and not handed
        out go back.
        """
        if self._brokers.closed:
            return []
        self.stop()
        clock = asyncio.get_running_loop().time
        ends = clock() + timeout
        running = [
            asyncio.ensure_future(consumer.ended(asyncio.current_task()))
            for consumer in self._consumers
        ]
        if running:
            _, late = await asyncio.wait(running, timeout=timeout / 2)
            for task in late:
                task.cancel()
        rest = max(0.0, ends - clock())
        lefts = await asyncio.gather(
            *(buffer.close(rest) for buffer in self._buffers if not buffer.closed)
        )
        unsent = [item for items in lefts for item in items]
        fetched = [message for messages in self._fetched.values() for message in messages]
        for messages in self._fetched.values():
            messages.clear()  # or their loops would give them back again
        if fetched:
            await asyncio.wait(
                [asyncio.ensure_future(self.give_back(fetched))],
                timeout=max(GIVE_BACK_SECONDS, ends - clock()),
            )
        await self._leases.close()
        await self._brokers.close()
        return unsent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        unsent = await self.close()
        if unsent and kind is None:
            raise Unavailable(
                f"{len(unsent)} messages could not be sent before the client was closed"
            )

    # What an operator asks

    async def configure(
        self, /, queue: str, *, namespace: str = "", task: str = "", **options: Any
    ) -> dict[str, Any]:
        """Create a queue or replace its options, by their API names (`leaseTime=30`) or as
        `lease_time=30`.
        """
        body = {
            "queue": queue,
            "namespace": namespace,
            "task": task,
            "options": {_camel(name): value for name, value in options.items()},
        }
        return await self._object("POST", "/api/v1/configure", body)

    async def queues(self) -> list[dict[str, Any]]:
        """All queues with their counts."""
        return list((await self._object("GET", "/api/v1/resources/queues"))["queues"])

    async def describe(self, queue: str) -> dict[str, Any]:
        """Configuration, partitions and counts of a queue."""
        return await self._object("GET", f"/api/v1/status/queues/{_quoted(queue)}")

    async def delete_queue(self, queue: str) -> bool:
        """Delete a queue with everything in it; False when there was none."""
        return bool(
            (await self._object("DELETE", f"/api/v1/resources/queues/{_quoted(queue)}"))["existed"]
        )

    async def clear(self, queue: str, partition: str | None = None) -> dict[str, Any]:
        """Delete the messages of a queue, or of one partition, and keep the queue."""
        query = f"?{urlencode({'partition': partition})}" if partition else ""
        return await self._object("DELETE", f"/api/v1/queues/{_quoted(queue)}/clear{query}")

    async def groups(self) -> list[dict[str, Any]]:
        """Every group of every queue with its lag."""
        return list(await self._brokers.json("GET", "/api/v1/consumer-groups") or [])

    async def group(self, group: str) -> dict[str, Any]:
        """A group's queues with the lag of each partition."""
        return dict(
            await self._brokers.json("GET", f"/api/v1/consumer-groups/{_quoted(group)}") or {}
        )

    async def seek(
        self,
        queue: str,
        group: str,
        to: "datetime | str",
        *,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Move a group to a time, to "end" or to "beginning". A dry run only says what would be
        delivered again.
        """
        body: dict[str, Any] = {"dryRun": True} if dry_run else {}
        if isinstance(to, datetime):
            body["timestamp"] = to.isoformat()
        elif to == "end":
            body["toEnd"] = True
        elif to == "beginning":
            body["toBeginning"] = True
        else:
            body["timestamp"] = to
        return await self._object(
            "POST", f"/api/v1/consumer-groups/{_quoted(group)}/queues/{_quoted(queue)}/seek", body
        )

    async def delete_group(self, group: str, queue: str | None = None) -> dict[str, Any]:
        """Delete the group and its cursors, on one queue or on all of them."""
        path = f"/api/v1/consumer-groups/{_quoted(group)}"
        return await self._object("DELETE", f"{path}/queues/{_quoted(queue)}" if queue else path)

    async def dead_letters(self, /, queue: str | None = None, **filters: Any) -> dict[str, Any]:
        """A page of the dead-letter queue: `consumerGroup`, `partition`, `from`, `to`, `limit`,
        `offset`.
        """
        return await self._object("GET", f"/api/v1/dlq{_query(queue, filters)}")

    async def requeue(self, /, queue: str | None = None, **filters: Any) -> dict[str, Any]:
        """Deliver dead letters again to the groups they failed in: those that match, or the one
        with `id`.
        """
        return await self._object(
            "POST", f"/api/v1/dlq/requeue{_query(queue, filters)}", again=False
        )

    async def purge(self, /, queue: str | None = None, **filters: Any) -> dict[str, Any]:
        """Delete the dead letters that match."""
        return await self._object("DELETE", f"/api/v1/dlq{_query(queue, filters)}")

    async def _object(
        self, method: str, target: str, body: Any = None, *, again: bool = True
    ) -> dict[str, Any]:
        answer = await self._brokers.json(method, target, body, again=again) or {}
        if not isinstance(answer, dict):
            raise Unavailable("the answer is not a broker's: no object")
        return answer


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _query(queue: str | None, filters: dict[str, Any]) -> str:
    given = {"queue": queue, **{_camel(name): value for name, value in filters.items()}}
    given = {name: value for name, value in given.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""


def _camel(name: str) -> str:
    first, *rest = name.rstrip("_").split("_")
    return first + "".join(word.capitalize() for word in rest)
