"""Messages for later: what waits for its time can be listed, looked at and cancelled."""

import msgspec

from penstock.queues.scheduled import Scheduled, Waiting
from penstock.wire.http.answers import milliseconds
from penstock.wire.http.api.queries import Limit
from penstock.wire.http.routes import Audited, route

ONE = "/api/v1/scheduled/{queue}/{partition}/{transaction}"


class ScheduledQuery(msgspec.Struct, frozen=True):
    queue: str | None = None
    partition: str | None = None
    limit: Limit = 100
    cursor: str | None = None


class ScheduledMessage(msgspec.Struct, rename="camel"):
    transaction_id: str
    queue: str
    partition: str
    partition_id: str
    deliver_at: str | None
    pushed_at: str | None
    trace_id: str | None
    producer_sub: str | None
    is_encrypted: bool
    headers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    payload: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class ScheduledPage(msgspec.Struct):
    messages: list[ScheduledMessage]
    next: str | None


class Cancelled(msgspec.Struct, rename="camel"):
    success: bool
    queue: str
    partition: str
    transaction_id: str


class ScheduledApi:
    tag = "messages"

    def __init__(self, scheduled: Scheduled) -> None:
        self._scheduled = scheduled

    @route("GET", "/api/v1/scheduled")
    async def list_scheduled(self, args: ScheduledQuery) -> ScheduledPage:
        """List delayed messages, next due first."""
        page = await self._scheduled.listing(
            args.queue or None, args.partition or None, args.limit, args.cursor
        )
        return ScheduledPage([_message(one) for one in page.messages], page.next)

    @route("GET", ONE)
    async def detail(self, queue: str, partition: str, transaction: str) -> ScheduledMessage:
        """A delayed message with its payload."""
        return _message(await self._scheduled.detail(queue, partition, transaction))

    @route("DELETE", ONE, audit=Audited("message.cancel"))
    async def cancel(self, queue: str, partition: str, transaction: str) -> Cancelled:
        """Cancel a message before it is due."""
        await self._scheduled.cancel(queue, partition, transaction)
        return Cancelled(True, queue, partition, transaction)


def _message(waiting: Waiting) -> ScheduledMessage:
    return ScheduledMessage(
        waiting.transaction_id,
        waiting.queue,
        waiting.partition,
        waiting.partition_id,
        milliseconds(waiting.deliver_at),
        milliseconds(waiting.pushed_at),
        waiting.trace_id,
        waiting.producer,
        waiting.encrypted,
        msgspec.UNSET if waiting.headers is None else waiting.headers,
        msgspec.UNSET if waiting.payload is None else msgspec.Raw(waiting.payload),
    )
