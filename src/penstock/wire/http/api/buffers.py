"""The buffer over HTTP: its status, maintenance modes, replay and retry."""

from penstock.buffer import Buffer
from penstock.contract import operations
from penstock.contract.buffers import (
    BufferStats,
    BufferStatus,
    FailedFiles,
    MaintenanceAnswer,
    PopMaintenanceAnswer,
    Retried,
    Switch,
)
from penstock.contract.deliveries import Pushed
from penstock.contract.operation import Audited
from penstock.wire.auth import Role
from penstock.wire.http.api.pushes import push_answer
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import route, serves


class BuffersApi:
    tag = "buffer"

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._maintenance = buffer.maintenance

    @serves(operations.GET_MAINTENANCE)
    def maintenance(self) -> MaintenanceAnswer:
        return self._modes()

    @serves(operations.SWITCH_MAINTENANCE)
    async def switch(self, body: Switch) -> MaintenanceAnswer:
        on = body.enabled
        await self._maintenance.switch(push=on)
        return self._modes(
            "Maintenance mode is on: pushes go to the buffer"
            if on
            else "Maintenance mode is off: the buffer drains into the database"
        )

    @route("GET", "/api/v1/system/maintenance/pop", tag="queen", role=Role.ADMIN)
    def pop_maintenance(self) -> PopMaintenanceAnswer:
        """Whether pop maintenance mode is on."""
        on = self._maintenance.modes.pop
        text = "on: pops get no messages" if on else "off"
        return PopMaintenanceAnswer(on, f"Pop maintenance mode is {text}")

    @serves(operations.SWITCH_POP_MAINTENANCE)
    async def switch_pop(self, body: Switch) -> PopMaintenanceAnswer:
        await self._maintenance.switch(pop=body.enabled)
        return self.pop_maintenance()

    @route(
        "POST",
        "/api/v1/buffers/events",
        tag="internal",
        answer=list[Pushed],
        status=201,
        role=Role.ADMIN,
        audit=Audited("buffer.store"),
    )
    async def store(self, request: Request) -> Response:
        """Store events given as the lines of a buffer file."""
        return push_answer(*await self._buffer.push_lines(request.body))

    @serves(operations.REPLAY_BUFFER)
    def replay(self) -> BufferStatus:
        self._buffer.replay_now()
        return self._buffer.status.report()

    @serves(operations.RETRY_FAILED_EVENTS)
    async def retry_failed(self) -> Retried:
        failed = self._buffer.failed
        tried = len(failed.files)
        await self._buffer.retry_failed(now=True)
        return Retried(tried, failed.events)

    def _modes(self, message: str = "") -> MaintenanceAnswer:
        report, failed = self._buffer.status.report(), self._buffer.failed
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
