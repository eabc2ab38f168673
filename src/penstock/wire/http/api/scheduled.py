"""Messages for later: what waits for its time can be listed, looked at and cancelled."""

import msgspec

from penstock.queues.scheduled import Scheduled, Waiting
from penstock.wire.http.api.answers import milliseconds
from penstock.wire.http.api.stored import Limit
from penstock.wire.http.messages import Request, Response, json_response
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

    @route(
        "GET",
        "/api/v1/scheduled",
        query=ScheduledQuery,
        answer=ScheduledPage,
        summary="List delayed messages, next due first",
    )
    async def list_scheduled(self, request: Request) -> Response:
        args: ScheduledQuery = request.args
        page = await self._scheduled.listing(
            args.queue or None, args.partition or None, args.limit, args.cursor
        )
        return json_response(ScheduledPage([_message(one) for one in page.messages], page.next))

    @route("GET", ONE, answer=ScheduledMessage, summary="A delayed message with its payload")
    async def detail(self, request: Request) -> Response:
        return json_response(_message(await self._scheduled.detail(*_names(request))))

    @route(
        "DELETE",
        ONE,
        answer=Cancelled,
        summary="Cancel a message before it is due",
        audit=Audited("message.cancel"),
    )
    async def cancel(self, request: Request) -> Response:
        names = _names(request)
        await self._scheduled.cancel(*names)
        return json_response(Cancelled(True, *names))


def _names(request: Request) -> tuple[str, str, str]:
    params = request.params
    return params["queue"], params["partition"], params["transaction"]


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
