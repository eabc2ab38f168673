"""The buffer over HTTP: its status, maintenance modes, replay and retry."""

import msgspec

from penstock.buffer import Buffer
from penstock.buffer.status import BufferStatus
from penstock.contract.operation import Audited
from penstock.errors import InvalidRequest
from penstock.protocol.status import NOT_JSON
from penstock.wire.auth import Role
from penstock.wire.http.api.pushes import PushAnswer, push_answer
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import route

MAINTENANCE = "/api/v1/system/maintenance"


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


_decode_switch = msgspec.json.Decoder(Switch).decode


def _enabled(body: bytes) -> bool:
    try:
        return _decode_switch(body).enabled
    except NOT_JSON:
        raise InvalidRequest("enabled (boolean) is required") from None


class BuffersApi:
    tag = "buffer"

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._maintenance = buffer.maintenance

    @route("GET", "/api/v1/status/buffers")
    def status(self) -> BufferStatus:
        """Events buffered on disk, and the progress of their replay."""
        return self._buffer.report()

    @route("GET", MAINTENANCE, role=Role.ADMIN)
    def maintenance(self) -> MaintenanceAnswer:
        """Whether the maintenance modes are on."""
        return self._modes()

    @route(
        "POST",
        MAINTENANCE,
        body=Switch,
        role=Role.ADMIN,
        audit=Audited("maintenance.push", body=("enabled",)),
    )
    async def switch(self, request: Request) -> MaintenanceAnswer:
        """Turn maintenance mode on or off; while it is on, pushes go to the buffer."""
        on = _enabled(request.body)
        await self._maintenance.switch(push=on)
        return self._modes(
            "Maintenance mode is on: pushes go to the buffer"
            if on
            else "Maintenance mode is off: the buffer drains into the database"
        )

    @route("GET", f"{MAINTENANCE}/pop", role=Role.ADMIN)
    def pop_maintenance(self) -> PopMaintenanceAnswer:
        """Whether pop maintenance mode is on."""
        on = self._maintenance.modes.pop
        text = "on: pops find nothing" if on else "off"
        return PopMaintenanceAnswer(on, f"Pop maintenance mode is {text}")

    @route(
        "POST",
        f"{MAINTENANCE}/pop",
        body=Switch,
        role=Role.ADMIN,
        audit=Audited("maintenance.pop", body=("enabled",)),
    )
    async def switch_pop(self, request: Request) -> PopMaintenanceAnswer:
        """Turn pop maintenance mode on or off; while it is on, pops return no messages."""
        await self._maintenance.switch(pop=_enabled(request.body))
        return self.pop_maintenance()

    @route(
        "POST",
        "/api/v1/buffers/events",
        tag="internal",
        status=201,
        role=Role.ADMIN,
        audit=Audited("buffer.store"),
    )
    async def store(self, request: Request) -> list[PushAnswer] | Response:
        """Store events given as the lines of a buffer file."""
        return push_answer(*await self._buffer.push_lines(request.body))

    @route("POST", "/api/v1/buffers/replay", role=Role.ADMIN, audit=Audited("buffer.replay"))
    def replay(self) -> BufferStatus:
        """Replay the buffer now."""
        self._buffer.replay_now()
        return self.status()

    @route(
        "POST",
        "/api/v1/buffers/retry-failed",
        role=Role.ADMIN,
        audit=Audited("buffer.retry", answer=("tried", "failed")),
    )
    async def retry_failed(self) -> Retried:
        """Retry the events in `failed/` now."""
        failed = self._buffer.failed
        tried = len(failed.files)
        await self._buffer.retry_failed(now=True)
        return Retried(tried, failed.events)

    def _modes(self, message: str = "") -> MaintenanceAnswer:
        report, failed = self._buffer.report(), self._buffer.failed
        kinds = [file.name.kind for file in failed.files.values()]
        return MaintenanceAnswer(
            maintenance_mode=self._maintenance.modes.push,
            pop_maintenance_mode=self._maintenance.modes.pop,
            buffered_messages=report.pending,
            buffer_healthy=report.db_healthy,
            buffer_stats=BufferStats(
                pending_count=report.pending,
                failed_count=report.failed,
                db_healthy=report.db_healthy,
                failed_files=FailedFiles(
                    count=len(kinds),
                    total_bytes=failed.size,
                    failover_count=kinds.count("failover"),
                    qos0_count=kinds.count("qos0"),
                ),
            ),
            message=message,
        )
