"""Messages for later: what waits for its time can be listed, looked at and cancelled."""

from penstock.contract import operations
from penstock.contract.messages import ScheduledMessage, ScheduledMessages
from penstock.contract.queries import ScheduledQuery
from penstock.queues.admin.scheduled import DelayedMessages
from penstock.wire.http.routes import serves


class ScheduledApi:
    tag = "messages"

    def __init__(self, scheduled: DelayedMessages) -> None:
        self._scheduled = scheduled

    @serves(operations.LIST_SCHEDULED)
    async def list_scheduled(self, args: ScheduledQuery) -> ScheduledMessages:
        return await self._scheduled.listing(
            args.queue or None, args.partition or None, args.limit, args.cursor
        )

    @serves(operations.GET_SCHEDULED)
    async def detail(self, queue: str, partition: str, transaction: str) -> ScheduledMessage:
        return await self._scheduled.detail(queue, partition, transaction)

    @serves(operations.CANCEL_SCHEDULED)
    async def cancel(self, queue: str, partition: str, transaction: str) -> None:
        await self._scheduled.cancel(queue, partition, transaction)
