"""The maintenance modes, in Queen MQ's API."""

from functools import partial
from typing import ClassVar

import msgspec

from penstock.buffer import Buffer
from penstock.contract.operation import Audited
from penstock.wire.auth import Role
from penstock.wire.http.routes import route
from penstock.wire.queen.aliases import Json

MODES = "/api/v1/system/maintenance"
_admin = partial(route, role=Role.ADMIN)


class SwitchBody(msgspec.Struct):
    enabled: bool

    texts: ClassVar = {"enabled": "enabled (boolean) is required"}


class MaintenanceApi:
    tag = "queen"

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._maintenance = buffer.maintenance

    @_admin("GET", MODES)
    def modes(self) -> Json:
        """Tell whether the maintenance modes are on."""
        report, failed = self._buffer.status.report(), self._buffer.failed
        kinds = [file.name.kind for file in failed.files.values()]
        return {
            "maintenanceMode": report.maintenance_mode,
            "popMaintenanceMode": report.pop_maintenance_mode,
            "bufferedMessages": report.pending,
            "bufferHealthy": report.db_healthy,
            "bufferStats": {
                "pendingCount": report.pending,
                "failedCount": report.failed,
                "dbHealthy": report.db_healthy,
                "failedFiles": {
                    "count": len(kinds),
                    "totalBytes": failed.size,
                    "failoverCount": kinds.count("failover"),
                    "qos0Count": kinds.count("qos0"),
                },
            },
        }

    @_admin("POST", MODES, audit=Audited("maintenance.push", body=("enabled",)))
    async def switch(self, body: SwitchBody) -> Json:
        """Turn maintenance mode on or off; while it is on, pushes go to the buffer."""
        await self._maintenance.switch(push=body.enabled)
        on = "on: pushes go to the buffer"
        text = on if body.enabled else "off: the buffer drains into the database"
        return {**self.modes(), "message": f"Maintenance mode is {text}"}

    @_admin("GET", f"{MODES}/pop")
    def pop_mode(self) -> Json:
        """Tell whether pop maintenance mode is on."""
        on = self._maintenance.modes.pop
        text = "on: pops get no messages" if on else "off"
        return {"popMaintenanceMode": on, "message": f"Pop maintenance mode is {text}"}

    @_admin("POST", f"{MODES}/pop", audit=Audited("maintenance.pop", body=("enabled",)))
    async def switch_pop(self, body: SwitchBody) -> Json:
        """Turn pop maintenance mode on or off; while it is on, pops return no messages."""
        await self._maintenance.switch(pop=body.enabled)
        return self.pop_mode()
