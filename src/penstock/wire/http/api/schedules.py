"""Schedules: messages that are pushed at the times a cron expression gives."""

from datetime import datetime
from typing import Literal

import msgspec

from penstock.protocol import headers
from penstock.protocol.names import DEFAULT_PARTITION
from penstock.queues.schedules import Definition, Schedule, Schedules
from penstock.wire.auth import Role
from penstock.wire.http.api.answers import answer, each, of
from penstock.wire.http.api.bodies import decoder
from penstock.wire.http.messages import EMPTY, Request, Response
from penstock.wire.http.routes import Audited, route

BASE = "/api/v1/schedules"
ONE = f"{BASE}/{{name}}"
CHANGED = ("cron", "timezone", "queue", "partition", "catchUp", "paused")  # not the payload


class DefinitionBody(msgspec.Struct, rename="camel"):
    cron: str
    queue: str
    timezone: str = "UTC"
    partition: str = DEFAULT_PARTITION
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    headers: dict[str, str] | None = None
    catch_up: Literal["none", "one", "all"] = "one"
    paused: bool = False


class RunAnswer(msgspec.Struct, rename="camel"):
    due_at: datetime
    fired_at: datetime
    transaction_id: str
    result: str
    manual: bool
    error: str | None


class ScheduleAnswer(DefinitionBody, rename="camel", kw_only=True):
    name: str
    created_at: datetime
    updated_at: datetime
    next_runs: list[datetime]
    last_runs: list[RunAnswer]


class Listing(msgspec.Struct):
    schedules: list[ScheduleAnswer]


read_definition = decoder(
    DefinitionBody,
    {
        "cron": "cron must be text such as '0 3 * * *'",
        "queue": "queue must be the name of the queue to push to",
        "catchUp": "catchUp must be none, one or all",
        "headers": "headers must be an object of strings",
    },
)


class SchedulesApi:
    """Schedules of pushes."""

    tag = "schedules"

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules

    @route("GET", BASE, answer=Listing, summary="List all schedules with their last and next runs")
    async def listing(self, _: Request) -> Response:
        return answer(Listing([_shown(one) for one in await self._schedules.listing()]))

    @route("GET", ONE, answer=ScheduleAnswer, summary="A schedule with its last and next runs")
    async def one(self, request: Request) -> Response:
        return answer(_shown(await self._schedules.get(request.params["name"])))

    @route(
        "PUT",
        ONE,
        body=DefinitionBody,
        decode=False,
        answer=ScheduleAnswer,
        summary="Create or replace a schedule",
        audit=Audited("schedule.put", body=CHANGED),
    )
    async def put(self, request: Request) -> Response:
        body = read_definition(request.body)
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
        return answer(_shown(await self._schedules.put(request.params["name"], definition)))

    @route(
        "DELETE",
        ONE,
        status=204,
        summary="Delete a schedule; messages it has pushed are kept",
        role=Role.ADMIN,
        audit=Audited("schedule.delete"),
    )
    async def delete(self, request: Request) -> Response:
        await self._schedules.delete(request.params["name"])
        return EMPTY

    @route(
        "POST",
        f"{ONE}/pause",
        answer=ScheduleAnswer,
        summary="Pause a schedule",
        audit=Audited("schedule.pause"),
    )
    async def pause(self, request: Request) -> Response:
        return answer(_shown(await self._schedules.pause(request.params["name"])))

    @route(
        "POST",
        f"{ONE}/resume",
        answer=ScheduleAnswer,
        summary="Resume a schedule; runs that were due while it was paused are skipped",
        audit=Audited("schedule.resume"),
    )
    async def resume(self, request: Request) -> Response:
        return answer(_shown(await self._schedules.pause(request.params["name"], paused=False)))

    @route(
        "POST",
        f"{ONE}/run",
        answer=RunAnswer,
        summary="Push the message of a schedule now; its next runs do not change",
        audit=Audited("schedule.run", answer=("transactionId", "result")),
    )
    async def run(self, request: Request) -> Response:
        return answer(of(RunAnswer, await self._schedules.run(request.params["name"])))


def _shown(schedule: Schedule) -> ScheduleAnswer:
    definition = schedule.definition
    return of(
        ScheduleAnswer,
        definition,
        schedule,
        headers=headers.decode(definition.headers) if definition.headers else None,
        last_runs=each(RunAnswer, schedule.last_runs),
    )
