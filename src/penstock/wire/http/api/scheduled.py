"""Messages for later: what waits for its time can be listed, looked at and cancelled."""

from datetime import datetime

import msgspec

from penstock.contract.noun import Noun
from penstock.contract.operation import Audited
from penstock.contract.queries import Limit
from penstock.queues.admin.scheduled import Scheduled, Waiting
from penstock.wire.http.answers import of
from penstock.wire.http.routes import route

ONE = "/api/v1/scheduled/{queue}/{partition}/{transaction}"


class ScheduledQuery(msgspec.Struct, frozen=True):
    queue: str | None = None
    partition: str | None = None
    limit: Limit = 100
    cursor: str | None = None


class ScheduledMessage(Noun):
    transaction_id: str
    queue: str
    partition: str
    partition_id: str
    deliver_at: datetime
    pushed_at: datetime
    trace_id: str | None
    producer_sub: str | None
    is_encrypted: bool
    headers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    payload: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class ScheduledPage(Noun):
    messages: list[ScheduledMessage]
    next: str | None


class Cancelled(Noun):
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
    return of(
        ScheduledMessage,
        waiting,
        producer_sub=waiting.producer,
        is_encrypted=waiting.encrypted,
        headers=msgspec.UNSET if waiting.headers is None else waiting.headers,
        payload=msgspec.UNSET if waiting.payload is None else waiting.payload,
    )
