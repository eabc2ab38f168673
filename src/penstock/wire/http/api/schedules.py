"""Schedules: messages that are pushed at the times a cron expression gives."""

from penstock.contract import operations
from penstock.contract.schedules import Schedule, ScheduleDefinition, ScheduleList, ScheduleRun
from penstock.queues.background.schedules import Scheduler
from penstock.wire.http.routes import serves


class SchedulesApi:
    tag = "schedules"

    def __init__(self, schedules: Scheduler) -> None:
        self._schedules = schedules

    @serves(operations.LIST_SCHEDULES)
    async def listing(self) -> ScheduleList:
        return ScheduleList(await self._schedules.listing())

    @serves(operations.GET_SCHEDULE)
    async def one(self, name: str) -> Schedule:
        return await self._schedules.get(name)

    @serves(operations.PUT_SCHEDULE)
    async def put(self, name: str, body: ScheduleDefinition) -> Schedule:
        return await self._schedules.put(name, body)

    @serves(operations.DELETE_SCHEDULE)
    async def delete(self, name: str) -> None:
        await self._schedules.delete(name)

    @serves(operations.PAUSE_SCHEDULE)
    async def pause(self, name: str) -> Schedule:
        return await self._schedules.pause(name)

    @serves(operations.RESUME_SCHEDULE)
    async def resume(self, name: str) -> Schedule:
        return await self._schedules.pause(name, paused=False)

    @serves(operations.RUN_SCHEDULE)
    async def run(self, name: str) -> ScheduleRun:
        return await self._schedules.run(name)
