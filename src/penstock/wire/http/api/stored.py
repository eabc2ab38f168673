"""Stored messages one by one, and their traces: what an operator looks at and mends."""

from datetime import datetime
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec

from penstock.errors import InvalidRequest
from penstock.protocol.names import QUEUE_MODE
from penstock.protocol.times import time_field
from penstock.queues.engine import Queues
from penstock.queues.messages import MessageDetail, MessageFilter, StoredMessage
from penstock.queues.traces import Trace
from penstock.wire.http.api.answers import Body, Pagination, answer, each, of
from penstock.wire.http.api.bodies import Paged, decoder
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import Audited, route

ONE = "/api/v1/messages/{partition}/{transaction}"
T = TypeVar("T")
Limit = Annotated[int, msgspec.Meta(ge=0, le=10_000)]


class ListQuery(Paged, frozen=True):
    queue: str | None = None
    partition: str | None = None
    ns: str | None = None
    task: str | None = None
    status: Literal["pending", "processing", "completed", "dead_letter", ""] | None = None
    from_: str | None = msgspec.field(name="from", default=None)
    to: str | None = None
    limit: Limit = 200
    cursor: str | None = None

    farther: ClassVar[str] = (
        "read on with cursor=<next of the page before>, or narrow it with from and to"
    )


class GroupQuery(msgspec.Struct, rename="camel", frozen=True):
    consumer_group: str | None = None


class PageQuery(Paged, frozen=True):
    limit: Limit = 100

    farther: ClassVar[str] = "use more than one name for so many traces"


class NamesQuery(Paged, frozen=True):
    limit: Limit = 50

    farther: ClassVar[str] = "ask for the traces of a name or of a message"


class BuryBody(msgspec.Struct, rename="camel"):
    consumer_group: str | None = None
    error: str | None = None


class TraceBody(msgspec.Struct, rename="camel"):
    transaction_id: str | None = None
    partition_id: str | None = None
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    consumer_group: str | None = None
    event_type: str | None = None
    trace_names: str | list[str] | None = None


class Mode(Body):
    """How the queue is read: without a group, by groups (a bus), both (hybrid) or not at all."""

    has_queue_mode: bool
    bus_groups_count: int
    type: Literal["queue", "bus", "hybrid", "none"]


class DetailMode(Mode):
    consumed_by_groups: int


class BusStatus(Body):
    consumed_by: int
    total_groups: int


class ListedMessage(Body, kw_only=True):
    """A message without its payload."""

    id: str
    transaction_id: str
    partition_id: str
    queue: str
    partition: str
    namespace: str
    task: str
    status: str
    queue_status: str
    trace_id: str | None
    created_at: datetime
    lease_expires_at: datetime | None
    queue_path: str
    bus_status: BusStatus
    producer_sub: str | None
    queue_priority: int
    headers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class MessagePage(Body):
    messages: list[ListedMessage]
    mode: Mode
    next: str | None
    behind_seconds: float | msgspec.UnsetType = msgspec.UNSET  # of a standby that was read


class MessageGroup(Body):
    name: str
    consumed: bool
    lease_expires_at: datetime | None


class MessageConfig(Body):
    """Options of the message's queue."""

    lease_time: int
    retry_limit: int
    retry_delay: int
    ttl: int
    priority: int


class Message(Body, kw_only=True):
    """A message with its payload."""

    id: str
    transaction_id: str
    partition_id: str
    partition: str
    status: str
    trace_id: str | None
    created_at: datetime
    payload: msgspec.Raw
    queue_path: str
    queue: str
    namespace: str
    task: str
    producer_sub: str | None
    is_encrypted: bool
    error_message: str | None
    retry_count: int
    queue_config: MessageConfig
    mode: DetailMode
    consumer_groups: list[MessageGroup]
    headers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class Deleted(Body):
    success: bool
    partition_id: str
    transaction_id: str
    message: str
    error: str | msgspec.UnsetType = msgspec.UNSET


class Retried(Body):
    success: bool
    partition_id: str
    transaction_id: str
    groups: int


class Buried(Body):
    success: bool
    partition_id: str
    transaction_id: str
    dlq: bool


class TraceAdded(Body):
    success: bool
    trace_id: str


class TraceEntry(Body, rename=None, kw_only=True):
    """A trace event of a message. Fields of the message are present in lists that span messages."""

    id: str
    event_type: str
    data: msgspec.Raw
    consumer_group: str
    worker_id: str | None
    created_at: datetime
    trace_names: list[str]
    transaction_id: str | msgspec.UnsetType | None = msgspec.UNSET  # null: it was deleted
    partition_id: str | msgspec.UnsetType = msgspec.UNSET
    queue_name: str | msgspec.UnsetType = msgspec.UNSET
    partition_name: str | msgspec.UnsetType = msgspec.UNSET
    message_payload: msgspec.Raw | msgspec.UnsetType | None = msgspec.UNSET


class TraceList(Body):
    traces: list[TraceEntry]


class TracePage(TraceList):
    total: int
    pagination: Pagination


class TraceName(Body, rename=None):
    trace_name: str
    trace_count: int
    message_count: int
    last_seen: datetime


class TraceNames(Body, rename=None):
    trace_names: list[TraceName]
    total: int
    pagination: Pagination


read_bury = decoder(BuryBody, {}, empty=BuryBody())
_IDS = "transactionId and partitionId are required"
read_trace = decoder(TraceBody, {"transactionId": _IDS, "partitionId": _IDS})


class StoredApi:
    """Stored messages and their traces."""

    tag = "messages"

    def __init__(self, queues: Queues) -> None:
        self._messages = queues.messages
        self._traces = queues.traces

    @route(
        "GET",
        "/api/v1/messages",
        query=ListQuery,
        answer=MessagePage,
        summary="List messages, newest first",
    )
    async def list_messages(self, request: Request) -> Response:
        args: ListQuery = request.args
        which = MessageFilter(
            queue=args.queue or None,
            partition=args.partition or None,
            namespace=args.ns or None,
            task=args.task or None,
            status=args.status or None,
            since=time_field(args.from_, "from") if args.from_ else None,
            until=time_field(args.to, "to") if args.to else None,
        )
        page = await self._messages.listing(which, args.limit, args.offset, args.cursor)
        return answer(
            MessagePage(
                messages=[_message(message) for message in page.messages],
                mode=_mode(page.queue_mode, page.groups),
                next=page.next,
                behind_seconds=_or_unset(page.behind_seconds),
            )
        )

    @route(
        "GET",
        "/api/v1/messages/{partition}/{transaction}",
        answer=Message,
        summary="A message with its payload and its state in each group",
    )
    async def detail(self, request: Request) -> Response:
        return answer(_detail(await self._messages.detail(*_ids(request))))

    @route(
        "DELETE",
        "/api/v1/messages/{partition}/{transaction}",
        answer=Deleted,
        summary="Delete a message",
        audit=Audited("message.delete"),
    )
    async def delete(self, request: Request) -> Response:
        partition, transaction = _ids(request)
        deleted = await self._messages.delete(partition, transaction)
        if deleted:
            return answer(Deleted(True, partition, transaction, "Message deleted successfully"))
        missing = "Message not found"
        return answer(Deleted(False, partition, transaction, missing, error=missing), 404)

    @route(
        "POST",
        "/api/v1/messages/{partition}/{transaction}/retry",
        query=GroupQuery,
        answer=Retried,
        summary="Deliver a message again",
        audit=Audited("message.retry"),
    )
    async def retry(self, request: Request) -> Response:
        partition, transaction = _ids(request)
        groups = await self._messages.retry(
            partition, transaction, request.args.consumer_group or None
        )
        return answer(Retried(True, partition, transaction, groups))

    @route(
        "POST",
        "/api/v1/messages/{partition}/{transaction}/dlq",
        query=GroupQuery,
        answer=Buried,
        summary="Move a message to a group's dead letters",
        audit=Audited("message.bury", body=("consumerGroup", "error")),
    )
    async def bury(self, request: Request) -> Response:
        partition, transaction = _ids(request)
        body = read_bury(request.body)
        group = request.args.consumer_group or body.consumer_group or QUEUE_MODE
        moved = await self._messages.bury(partition, transaction, group, body.error)
        return answer(Buried(moved, partition, transaction, moved))

    @route(
        "POST",
        "/api/v1/traces",
        body=TraceBody,
        decode=False,
        answer=TraceAdded,
        summary="Attach a trace event to a message",
        tag="traces",
    )
    async def add_trace(self, request: Request) -> Response:
        body = read_trace(request.body)
        if not body.transaction_id or not body.partition_id:
            raise InvalidRequest(_IDS)
        if not bytes(body.data):
            raise InvalidRequest("data is required")
        names = [body.trace_names] if isinstance(body.trace_names, str) else body.trace_names
        trace = await self._traces.add(
            body.partition_id,
            body.transaction_id,
            bytes(body.data),
            group=body.consumer_group or QUEUE_MODE,
            event_type=body.event_type or "info",
            names=[name for name in names or [] if name],
        )
        return answer(TraceAdded(True, trace))

    @route(
        "GET",
        "/api/v1/traces/{partition}/{transaction}",
        answer=TraceList,
        summary="The trace events of a message",
        tag="traces",
    )
    async def of_message(self, request: Request) -> Response:
        traces = await self._traces.of_message(*_ids(request))
        return answer(TraceList([_trace(trace) for trace in traces]))

    @route(
        "GET",
        "/api/v1/traces/by-name/{name}",
        query=PageQuery,
        answer=TracePage,
        summary="Trace events with a given trace name",
        tag="traces",
    )
    async def by_name(self, request: Request) -> Response:
        args = request.args
        page = await self._traces.by_name(request.params["name"], args.limit, args.offset)
        traces = [_trace(trace) for trace in page.traces]
        return answer(TracePage(traces, page.total, Pagination(args.limit, args.offset)))

    @route(
        "GET",
        "/api/v1/traces/names",
        query=NamesQuery,
        answer=TraceNames,
        summary="List trace names",
        tag="traces",
    )
    async def names(self, request: Request) -> Response:
        args = request.args
        page = await self._traces.names(args.limit, args.offset)
        names = each(TraceName, page.names)
        return answer(TraceNames(names, page.total, Pagination(args.limit, args.offset)))


def _ids(request: Request) -> tuple[str, str]:
    return request.params["partition"], request.params["transaction"]


def _or_unset(value: T | None) -> T | msgspec.UnsetType:
    return msgspec.UNSET if value is None else value


def _message(message: StoredMessage) -> ListedMessage:
    return of(
        ListedMessage,
        message,
        headers=_or_unset(message.headers),
        queue_path=f"{message.queue}/{message.partition}",
        bus_status=BusStatus(message.groups_done, message.groups),
        producer_sub=message.producer,
        queue_priority=message.priority,
    )


def _detail(message: MessageDetail) -> Message:
    groups, queue = message.groups, message.queue
    buses = [group for group in groups if group.name != QUEUE_MODE]
    return of(
        Message,
        message,
        headers=_or_unset(message.headers),
        queue_path=f"{queue.name}/{message.partition}",
        queue=queue.name,
        namespace=queue.namespace,
        task=queue.task,
        producer_sub=message.producer,
        is_encrypted=message.encrypted,
        error_message=message.error,
        retry_count=message.attempts,
        queue_config=of(MessageConfig, queue.options),
        mode=of(
            DetailMode,
            _mode(len(buses) < len(groups), len(buses)),
            consumed_by_groups=sum(group.consumed for group in groups),
        ),
        consumer_groups=each(MessageGroup, groups),
    )


def _mode(queue_mode: bool, buses: int) -> Mode:
    if queue_mode:
        return Mode(True, buses, "hybrid" if buses else "queue")
    return Mode(False, buses, "bus" if buses else "none")


def _trace(trace: Trace) -> TraceEntry:
    entry = of(
        TraceEntry,
        trace,
        consumer_group=trace.group,
        worker_id=trace.worker,
        trace_names=trace.names,
    )
    if trace.message is not None:
        entry.transaction_id = trace.message.transaction_id
        entry.partition_id = trace.message.partition_id
        entry.queue_name = trace.message.queue
        entry.partition_name = trace.message.partition
        entry.message_payload = trace.message.payload  # type: ignore[assignment]
    return entry
