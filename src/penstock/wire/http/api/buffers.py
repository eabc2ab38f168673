"""The buffer over HTTP: its status, maintenance modes, replay and retry."""

from penstock.buffer import Buffer
from penstock.contract import operations
from penstock.contract.broker import BufferStatus, MaintenanceModes
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
    async def replay(self, action: str) -> BufferStatus:
        if action == "replay":
            self._buffer.replay_now()
        else:
            await self._buffer.retry_failed(now=True)
        return self._buffer.status.report()

    @serves(operations.SWITCH_MAINTENANCE)
    async def switch(self, body: MaintenanceModes) -> BufferStatus:
        await self._buffer.maintenance.switch(push=body.push, pop=body.pop)
        return self._buffer.status.report()
