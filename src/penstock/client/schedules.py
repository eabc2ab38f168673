"""`Client.schedules`: messages that are pushed at the times of a cron expression."""

from collections.abc import Mapping
from typing import Any, Literal

from penstock.client.brokers import Brokers
from penstock.client.messages import Address
from penstock.contract import operations
from penstock.contract.schedules import Schedule, ScheduleRun
from penstock.errors import InvalidRequest
from penstock.protocol.headers import check as check_headers
from penstock.protocol.names import DEFAULT_PARTITION
from penstock.protocol.payload import encode_payload


class Schedules:
    """The schedules of the broker."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def list(self) -> list[Schedule]:
        """Return all schedules, sorted by name."""
        return (await self._brokers.call(operations.LIST_SCHEDULES)).schedules

    async def get(self, name: str) -> Schedule:
        """Return a schedule with its next and last runs. Raises `NotFound` if it does not exist."""
        return await self._brokers.call(operations.GET_SCHEDULE, name)

    async def create(
        self,
        name: str,
        *,
        cron: str,
        queue: str | Address,
        payload: Any = None,
        timezone: str = "UTC",
        headers: Mapping[str, str] | None = None,
        catch_up: Literal["none", "one", "all"] = "one",
        paused: bool = False,
    ) -> Schedule:
        """Create a schedule, or replace the one with this name. The payload is pushed to `queue` at
        the times of `cron` in `timezone`. `catch_up` decides what happens to times that passed
        while no broker was running: push nothing, one message, or all of them.
        """
        where = Address.parse(queue)
        if where.group is not None:
            raise InvalidRequest(f"a schedule pushes to a queue, and {queue!s} names a group")
        if headers:
            check_headers(headers)
        body = {
            "cron": cron,
            "timezone": timezone,
            "queue": where.queue,
            "partition": where.partition or DEFAULT_PARTITION,
            "payload": encode_payload(payload),
            "headers": dict(headers) if headers else None,
            "catchUp": catch_up,
            "paused": paused,
        }
        return await self._brokers.call(operations.PUT_SCHEDULE, name, body=body)

    async def pause(self, name: str) -> Schedule:
        """Pause the schedule until `resume`."""
        return await self._brokers.call(operations.CONTROL_SCHEDULE, name, "pause")

    async def resume(self, name: str) -> Schedule:
        """Resume the schedule. Runs that were due while it was paused are skipped."""
        return await self._brokers.call(operations.CONTROL_SCHEDULE, name, "resume")

    async def run(self, name: str) -> ScheduleRun:
        """Push the message now. The next runs do not change."""
        return await self._brokers.call(operations.RUN_SCHEDULE, name)

    async def delete(self, name: str) -> None:
        """Delete the schedule. Messages it has pushed are kept."""
        await self._brokers.call(operations.DELETE_SCHEDULE, name)
