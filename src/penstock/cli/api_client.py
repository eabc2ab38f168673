"""The client of commands that print what the broker's API answers, JSON as it came.

`penstock.Client` gives structs, which have what a program needs; a command shows all of it.
"""

from datetime import datetime
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode

from penstock.client.brokers import Brokers
from penstock.client.queues import QueueClient
from penstock.errors import Unavailable
from penstock.net.tls import client_context


class ApiClient(QueueClient):
    """Push, pop and ack as `penstock.Client`, and the operator's calls with the API's JSON."""

    def __init__(self, url: str, *, token: str = "", patience: float = 5.0) -> None:
        urls = [part.strip() for part in url.split(",") if part.strip()]
        tls = client_context(None) if any(part.startswith("https:") for part in urls) else None
        super().__init__(Brokers(urls, token=token, patience=patience, tls=tls))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._leases.close()
        await self._brokers.close()

    async def configure(
        self, queue: str, *, namespace: str = "", task: str = "", **options: Any
    ) -> dict[str, Any]:
        """Create a queue or replace its options, by their API names."""
        body = {"queue": queue, "namespace": namespace, "task": task, "options": options}
        return await self._object("POST", "/api/v1/configure", body)

    async def queues(self) -> list[dict[str, Any]]:
        """All queues with their counts."""
        return list((await self._object("GET", "/api/v1/resources/queues"))["queues"])

    async def describe(self, queue: str) -> dict[str, Any]:
        """Configuration, partitions and counts of a queue."""
        return await self._object("GET", f"/api/v1/status/queues/{_quoted(queue)}")

    async def delete_queue(self, queue: str) -> bool:
        """Delete a queue with everything in it; False when there was none."""
        target = f"/api/v1/resources/queues/{_quoted(queue)}"
        return bool((await self._object("DELETE", target))["existed"])

    async def clear(self, queue: str) -> dict[str, Any]:
        """Delete the messages of a queue and keep the queue."""
        return await self._object("DELETE", f"/api/v1/queues/{_quoted(queue)}/clear")

    async def groups(self) -> list[dict[str, Any]]:
        """Every group of every queue with its lag."""
        return list(await self._brokers.json("GET", "/api/v1/consumer-groups") or [])

    async def group(self, group: str) -> dict[str, Any]:
        """A group's queues with the lag of each partition."""
        return await self._object("GET", f"/api/v1/consumer-groups/{_quoted(group)}")

    async def seek(
        self, queue: str, group: str, to: datetime | str, *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Move a group to a time, to "end" or to "beginning"."""
        body: dict[str, Any] = {"dryRun": True} if dry_run else {}
        if to in ("end", "beginning"):
            body["toEnd" if to == "end" else "toBeginning"] = True
        else:
            body["timestamp"] = to if isinstance(to, str) else to.isoformat()
        target = f"/api/v1/consumer-groups/{_quoted(group)}/queues/{_quoted(queue)}/seek"
        return await self._object("POST", target, body)

    async def dead_letters(self, queue: str | None = None, **filters: Any) -> dict[str, Any]:
        """A page of the dead-letter queue."""
        return await self._object("GET", f"/api/v1/dlq{_query(queue, filters)}")

    async def requeue(self, queue: str | None = None, **filters: Any) -> dict[str, Any]:
        """Deliver dead letters again to the groups they failed in."""
        target = f"/api/v1/dlq/requeue{_query(queue, filters)}"
        return await self._object("POST", target, again=False)

    async def purge(self, queue: str | None = None, **filters: Any) -> dict[str, Any]:
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
    given = {"queue": queue, "consumerGroup": filters.pop("consumer_group", None), **filters}
    named = {name: value for name, value in given.items() if value is not None}
    return f"?{urlencode(named)}" if named else ""
