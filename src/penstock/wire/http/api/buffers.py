"""The buffer over HTTP: its status, maintenance modes, and the two things a person may ask of it."""

from typing import Any

import msgspec

from penstock.buffer import Buffer
from penstock.buffer.status import BufferStatus
from penstock.errors import InvalidRequest
from penstock.wire.auth import Role
from penstock.wire.http.api.messages import PushAnswer, push_answer
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import Route


class Switch(msgspec.Struct):
    enabled: bool


class FailedFiles(msgspec.Struct, rename="camel"):
    count: int
    total_bytes: int
    failover_count: int
    qos0_count: int


class BufferStats(msgspec.Struct, rename="camel"):
    pending_count: int
    failed_count: int
    db_healthy: bool
    failed_files: FailedFiles


class MaintenanceAnswer(msgspec.Struct, rename="camel", omit_defaults=True):
    maintenance_mode: bool
    pop_maintenance_mode: bool
    buffered_messages: int
    buffer_healthy: bool
    buffer_stats: BufferStats
    message: str = ""


class PopMaintenanceAnswer(msgspec.Struct, rename="camel"):
    pop_maintenance_mode: bool
    message: str


class Retried(msgspec.Struct):
    tried: int
    failed: int


def routes(buffer: Buffer) -> list[Route]:
    maintenance = buffer.maintenance

    def status(_: Request) -> Response:
        return json_response(buffer.status.report())

    def answer(message: str = "") -> Response:
        report = buffer.status.report()
        files = list(buffer.failed.files.values())
        return json_response(
            MaintenanceAnswer(
                maintenance_mode=maintenance.push,
                pop_maintenance_mode=maintenance.pop,
                buffered_messages=report.pending,
                buffer_healthy=report.db_healthy,
                buffer_stats=BufferStats(
                    pending_count=report.pending,
                    failed_count=report.failed,
                    db_healthy=report.db_healthy,
                    failed_files=FailedFiles(
                        count=len(files),
                        total_bytes=buffer.failed.size,
                        failover_count=sum(file.name.kind == "failover" for file in files),
                        qos0_count=sum(file.name.kind == "qos0" for file in files),
                    ),
                ),
                message=message,
            )
        )

    async def switch(request: Request) -> Response:
        on = _enabled(request.body)
        await maintenance.switch(push=on)
        return answer(
            "Maintenance mode is on: pushes go to the buffer"
            if on
            else "Maintenance mode is off: the buffer drains into the database"
        )

    def pop_answer() -> Response:
        text = (
            "Pop maintenance mode is on: pops find nothing"
            if maintenance.pop
            else "Pop maintenance mode is off"
        )
        return json_response(PopMaintenanceAnswer(maintenance.pop, text))

    async def switch_pop(request: Request) -> Response:
        await maintenance.switch(pop=_enabled(request.body))
        return pop_answer()

    def replay(_: Request) -> Response:
        buffer.replay_now()
        return json_response(buffer.status.report())

    async def retry_failed(_: Request) -> Response:
        tried = len(buffer.failed.files)
        await buffer.retry_failed(now=True)
        return json_response(Retried(tried, buffer.failed.events))

    async def store(request: Request) -> Response:
        return push_answer(await buffer.push_lines(request.body))

    about: dict[str, Any] = {"tag": "buffer"}
    path = "/api/v1/system/maintenance"
    admin: dict[str, Any] = {"role": Role.ADMIN, **about}
    change: dict[str, Any] = {"body": Switch, "decode": False, **admin}
    return [
        Route(
            "GET",
            "/api/v1/status/buffers",
            status,
            answer=BufferStatus,
            summary="What is buffered on disk, and how its replay goes",
            **about,
        ),
        Route(
            "GET",
            path,
            lambda _: answer(),
            answer=MaintenanceAnswer,
            summary="Maintenance modes",
            **admin,
        ),
        Route(
            "POST",
            path,
            switch,
            answer=MaintenanceAnswer,
            summary="Send pushes to the buffer, or not",
            **change,
        ),
        Route(
            "GET",
            f"{path}/pop",
            lambda _: pop_answer(),
            answer=PopMaintenanceAnswer,
            summary="Pop maintenance",
            **admin,
        ),
        Route(
            "POST",
            f"{path}/pop",
            switch_pop,
            answer=PopMaintenanceAnswer,
            summary="Stop pops, or not",
            **change,
        ),
        Route(
            "POST",
            "/api/v1/buffers/events",
            store,
            answer=list[PushAnswer],
            status=201,
            summary="Store the events of a buffer file's lines, as they are",
            **admin,
        ),
        Route(
            "POST",
            "/api/v1/buffers/replay",
            replay,
            answer=BufferStatus,
            summary="Replay now",
            **admin,
        ),
        Route(
            "POST",
            "/api/v1/buffers/retry-failed",
            retry_failed,
            answer=Retried,
            summary="Try the events in failed/ again now",
            **admin,
        ),
    ]


_switch = msgspec.json.Decoder(Switch)


def _enabled(body: bytes) -> bool:
    try:
        return _switch.decode(body).enabled
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest("enabled (boolean) is required") from None
