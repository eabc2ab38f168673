"""Stored messages one by one, and their traces: what an operator looks at and mends."""

from datetime import datetime
from typing import ClassVar, Literal, TypeVar

import msgspec

from penstock.contract.noun import Noun, Pagination
from penstock.contract.operation import Audited
from penstock.contract.queries import Limit, Offset, Paged, TimesQuery, check_offset
from penstock.errors import InvalidRequest
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.admin.messages import MessageDetail, MessageFilter, MessageGroup, StoredMessage
from penstock.queues.admin.traces import Trace, TraceName
from penstock.queues.engine import Queues
from penstock.wire.http.answers import of, plain
from penstock.wire.http.messages import Response, json_response
from penstock.wire.http.routes import route

ONE = "/api/v1/messages/{partition}/{transaction}"
T = TypeVar("T")


class ListQuery(TimesQuery, frozen=True):
    queue: str | None = None
    partition: str | None = None
    ns: str | None = None
    task: str | None = None
    status: Literal["pending", "processing", "completed", "dead_letter", ""] | None = None
    limit: Limit = 200
    cursor: str | None = None
    offset: Offset = 0

    def __post_init__(self) -> None:
        farther = "read on with cursor=<next of the page before>, or narrow it with from and to"
        check_offset(self.offset, farther)


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

    texts: ClassVar[dict[str, str]] = {}


_IDS = "transactionId and partitionId are required"


class TraceBody(msgspec.Struct, rename="camel"):
    transaction_id: str | None = None
    partition_id: str | None = None
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    consumer_group: str | None = None
    event_type: str | None = None
    trace_names: str | list[str] | None = None

    texts: ClassVar = {"transactionId": _IDS, "partitionId": _IDS}


class Mode(Noun):
    """How the queue is read: without a group, by groups (a bus), both (hybrid) or not at all."""

    has_queue_mode: bool
    bus_groups_count: int
    type: Literal["queue", "bus", "hybrid", "none"]


class DetailMode(Mode):
    consumed_by_groups: int


class BusStatus(Noun):
    consumed_by: int
    total_groups: int


class NewestMessage(Noun, kw_only=True):
    id: str
    transaction_id: str
    partition_id: str
    queue: str
    partition: str
    status: str
    created_at: datetime
    queue_path: str


class MessageFields(NewestMessage, kw_only=True):
    """What the list of messages and a single one have in common."""

    namespace: str
    task: str
    trace_id: str | None
    producer_sub: str | None
    headers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class ListedMessage(MessageFields, kw_only=True):
    """A message without its payload."""

    queue_status: str
    lease_expires_at: datetime | None
    bus_status: BusStatus
    queue_priority: int


class MessagePage(Noun):
    messages: list[ListedMessage]
    mode: Mode
    next: str | None
    behind_seconds: float | msgspec.UnsetType = msgspec.UNSET  # of a standby that was read


class MessageConfig(Noun):
    """Options of the message's queue."""

    lease_time: int
    retry_limit: int
    retry_delay: int
    ttl: int
    priority: int


class Message(MessageFields, kw_only=True):
    """A message with its payload."""

    payload: msgspec.Raw
    is_encrypted: bool
    error_message: str | None
    retry_count: int
    queue_config: MessageConfig
    mode: DetailMode
    consumer_groups: list[MessageGroup]


class Changed(Noun):
    success: bool
    partition_id: str
    transaction_id: str


class Deleted(Changed):
    message: str
    error: str | msgspec.UnsetType = msgspec.UNSET


class Retried(Changed):
    groups: int


class Buried(Changed):
    dlq: bool


class TraceAdded(Noun):
    success: bool
    trace_id: str


class TraceEntry(Noun, rename=None, kw_only=True):
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


class TraceList(Noun):
    traces: list[TraceEntry]


class TracePage(TraceList):
    total: int
    pagination: Pagination


class TraceNames(Noun, rename=None):
    trace_names: list[TraceName]
    total: int
    pagination: Pagination


class StoredApi:
    tag = "messages"

    def __init__(self, queues: Queues) -> None:
        self._messages = queues.messages
        self._traces = queues.traces

    @route("GET", "/api/v1/messages")
    async def list_messages(self, args: ListQuery) -> MessagePage:
        """List messages, newest first."""
        which = MessageFilter(
            queue=args.queue or None,
            partition=args.partition or None,
            namespace=args.ns or None,
            task=args.task or None,
            status=args.status or None,
            since=args.since,
            until=args.until,
        )
        page = await self._messages.listing(which, args.limit, args.offset, args.cursor)
        return MessagePage(
            messages=[_message(message) for message in page.messages],
            mode=_mode(page.queue_mode, page.groups),
            next=page.next,
            behind_seconds=_or_unset(page.behind_seconds),
        )

    @route("GET", ONE)
    async def detail(self, partition: str, transaction: str) -> Message:
        """A message with its payload and its state in each group."""
        return _detail(await self._messages.detail(partition, transaction))

    @route("DELETE", ONE, audit=Audited("message.delete"))
    async def delete(self, partition: str, transaction: str) -> Deleted | Response:
        """Delete a message."""
        deleted = await self._messages.delete(partition, transaction)
        if deleted:
            return Deleted(True, partition, transaction, "Message deleted successfully")
        missing = "Message not found"
        body = Deleted(False, partition, transaction, missing, error=missing)
        return json_response(plain(body), 404)

    @route("POST", f"{ONE}/retry", audit=Audited("message.retry"))
    async def retry(self, partition: str, transaction: str, args: GroupQuery) -> Retried:
        """Deliver a message again."""
        groups = await self._messages.retry(partition, transaction, args.consumer_group or None)
        return Retried(True, partition, transaction, groups)

    @route(
        "POST",
        f"{ONE}/dlq",
        audit=Audited("message.bury", body=("consumerGroup", "error")),
    )
    async def bury(
        self, partition: str, transaction: str, args: GroupQuery, body: BuryBody | None
    ) -> Buried:
        """Move a message to a group's dead letters."""
        body = body or BuryBody()
        group = args.consumer_group or body.consumer_group or QUEUE_MODE
        moved = await self._messages.bury(partition, transaction, group, body.error)
        return Buried(moved, partition, transaction, moved)

    @route("POST", "/api/v1/traces", tag="traces")
    async def add_trace(self, body: TraceBody) -> TraceAdded:
        """Attach a trace event to a message."""
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
        return TraceAdded(True, trace)

    @route("GET", "/api/v1/traces/{partition}/{transaction}", tag="traces")
    async def of_message(self, partition: str, transaction: str) -> TraceList:
        """The trace events of a message."""
        traces = await self._traces.of_message(partition, transaction)
        return TraceList([_trace(trace) for trace in traces])

    @route("GET", "/api/v1/traces/by-name/{name}", tag="traces")
    async def by_name(self, name: str, args: PageQuery) -> TracePage:
        """Trace events with a given trace name."""
        page = await self._traces.by_name(name, args.limit, args.offset)
        traces = [_trace(trace) for trace in page.traces]
        return TracePage(traces, page.total, Pagination(args.limit, args.offset))

    @route("GET", "/api/v1/traces/names", tag="traces")
    async def names(self, args: NamesQuery) -> TraceNames:
        """List trace names."""
        page = await self._traces.names(args.limit, args.offset)
        return TraceNames(page.names, page.total, Pagination(args.limit, args.offset))


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
        consumer_groups=groups,
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
