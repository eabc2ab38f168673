"""Schedules: messages that are pushed at the times a cron expression gives."""

from datetime import datetime
from typing import ClassVar, Literal

import msgspec

from penstock.contract.noun import Noun
from penstock.contract.operation import Audited
from penstock.contract.schedules import ScheduleRun
from penstock.protocol import headers
from penstock.protocol.names import DEFAULT_PARTITION
from penstock.queues.background.schedules import Definition, Schedule, Schedules
from penstock.wire.auth import Role
from penstock.wire.http.answers import each, of
from penstock.wire.http.routes import route

BASE = "/api/v1/schedules"
ONE = f"{BASE}/{{name}}"
CHANGED = ("cron", "timezone", "queue", "partition", "catchUp", "paused")  # not the payload


class DefinitionBody(Noun):
    cron: str
    queue: str
    timezone: str = "UTC"
    partition: str = DEFAULT_PARTITION
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    headers: dict[str, str] | None = None
    catch_up: Literal["none", "one", "all"] = "one"
    paused: bool = False

    texts: ClassVar = {
        "cron": "cron must be text such as '0 3 * * *'",
        "queue": "queue must be the name of the queue to push to",
        "catchUp": "catchUp must be none, one or all",
        "headers": "headers must be an object of strings",
    }


class ScheduleAnswer(DefinitionBody, kw_only=True):
    name: str
    created_at: datetime
    updated_at: datetime
    next_runs: list[datetime]
    last_runs: list[ScheduleRun]


class Listing(Noun):
    schedules: list[ScheduleAnswer]


class SchedulesApi:
    tag = "schedules"

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules

    @route("GET", BASE)
    async def listing(self) -> Listing:
        """List all schedules with their last and next runs."""
        return Listing([_shown(one) for one in await self._schedules.listing()])

    @route("GET", ONE)
    async def one(self, name: str) -> ScheduleAnswer:
        """A schedule with its last and next runs."""
        return _shown(await self._schedules.get(name))

    @route("PUT", ONE, audit=Audited("schedule.put", body=CHANGED))
    async def put(self, name: str, body: DefinitionBody) -> ScheduleAnswer:
        """Create or replace a schedule."""
        definition = Definition(
            body.cron,
            body.queue,
            body.timezone,
            body.partition,
            bytes(body.payload),
            headers.encode(body.headers or {}),
            body.catch_up,
            body.paused,
        )
        return _shown(await self._schedules.put(name, definition))

    @route("DELETE", ONE, role=Role.ADMIN, audit=Audited("schedule.delete"))
    async def delete(self, name: str) -> None:
        """Delete a schedule; messages it has pushed are kept."""
        await self._schedules.delete(name)

    @route("POST", f"{ONE}/pause", audit=Audited("schedule.pause"))
    async def pause(self, name: str) -> ScheduleAnswer:
        """Pause a schedule."""
        return _shown(await self._schedules.pause(name))

    @route("POST", f"{ONE}/resume", audit=Audited("schedule.resume"))
    async def resume(self, name: str) -> ScheduleAnswer:
        """Resume a schedule; runs that were due while it was paused are skipped."""
        return _shown(await self._schedules.pause(name, paused=False))

    @route("POST", f"{ONE}/run", audit=Audited("schedule.run", answer=("transactionId", "result")))
    async def run(self, name: str) -> ScheduleRun:
        """Push the message of a schedule now; its next runs do not change."""
        return of(ScheduleRun, await self._schedules.run(name))


def _shown(schedule: Schedule) -> ScheduleAnswer:
    definition = schedule.definition
    return of(
        ScheduleAnswer,
        definition,
        schedule,
        headers=headers.decode(definition.headers) if definition.headers else None,
        last_runs=each(ScheduleRun, schedule.last_runs),
    )
