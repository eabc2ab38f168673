"""`Client.routes`: the broker's export routes."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.client.brokers import Brokers
from penstock.contract import operations
from penstock.contract.routes import RoutePushed, RouteStatus
from penstock.protocol.payload import encode_payload


class Routes:
    """The export routes of the broker."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def list(self) -> list[RouteStatus]:
        """Return all routes with their status."""
        return (await self._brokers.call(operations.LIST_ROUTES)).routes

    async def get(self, name: str) -> RouteStatus:
        """Return the status of a route. Raises `NotFound` if it does not exist."""
        return await self._brokers.call(operations.GET_ROUTE, name)

    async def create(
        self,
        name: str,
        *,
        destination: Mapping[str, Any],
        source: Mapping[str, Any] | str | None = None,
        batch: Mapping[str, Any] | None = None,
        queue: Mapping[str, Any] | None = None,
    ) -> RouteStatus:
        """Create a route. `destination`, `source`, `batch` and `queue` are those of the
        configuration file; see "Export" in the reference.
        """
        given = {"destination": destination, "source": source, "batch": batch, "queue": queue}
        body = {"name": name} | {part: value for part, value in given.items() if value is not None}
        return await self._brokers.call(operations.CREATE_ROUTE, body=body)

    async def push(self, name: str, records: Sequence[Any]) -> RoutePushed:
        """Add records to the route's send queue. A record is anything that JSON can express."""
        body = {"records": [encode_payload(record) for record in records]}
        return await self._brokers.call(operations.PUSH_TO_ROUTE, name, body=body)

    async def pause(self, name: str) -> RouteStatus:
        """Pause sending."""
        return await self._brokers.call(operations.CONTROL_ROUTE, name, "pause")

    async def resume(self, name: str) -> RouteStatus:
        """Resume sending. It also ends a drain."""
        return await self._brokers.call(operations.CONTROL_ROUTE, name, "resume")

    async def drain(self, name: str) -> RouteStatus:
        """Accept no new records and deliver the queued ones."""
        return await self._brokers.call(operations.CONTROL_ROUTE, name, "drain")

    async def purge(self, name: str) -> int:
        """Drop all queued records. Returns how many."""
        return (await self._brokers.call(operations.PURGE_ROUTE, name)).records

    async def replay(self, name: str) -> int:
        """Put the route's dead letters back into its send queue. Returns how many."""
        return (await self._brokers.call(operations.REPLAY_ROUTE, name)).records

    async def delete(self, name: str, *, force: bool = False) -> None:
        """Stop and delete the route. With `force`, drop undelivered records with it."""
        forced = "true" if force else None
        await self._brokers.call(operations.DELETE_ROUTE, name, force=forced)
