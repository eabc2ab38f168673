"""Stored messages one by one, and their traces: what an operator looks at and mends."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.protocol.names import QUEUE_MODE
from penstock.protocol.times import time_field
from penstock.queues.engine import Queues
from penstock.queues.messages import MessageDetail, MessageFilter, StoredMessage
from penstock.queues.traces import Trace
from penstock.wire.http.api.bodies import Paged, answer, decoder, fields, headers_of
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import Audited, route

ONE = "/api/v1/messages/{partition}/{transaction}"
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
        answer=dict[str, Any],
        summary="Messages, newest first",
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
            {
                "messages": [_message(message) for message in page.messages],
                "mode": _mode(page.queue_mode, page.groups),
                "next": page.next,
                **({} if page.behind_seconds is None else {"behindSeconds": page.behind_seconds}),
            }
        )

    @route(
        "GET",
        "/api/v1/messages/{partition}/{transaction}",
        answer=dict[str, Any],
        summary="A message with its payload and what groups did with it",
    )
    async def detail(self, request: Request) -> Response:
        return answer(_detail(await self._messages.detail(*_ids(request))))

    @route(
        "DELETE",
        "/api/v1/messages/{partition}/{transaction}",
        answer=dict[str, Any],
        summary="Delete a message",
        audit=Audited("message.delete"),
    )
    async def delete(self, request: Request) -> Response:
        partition, transaction = _ids(request)
        deleted = await self._messages.delete(partition, transaction)
        body = {"success": deleted, "partitionId": partition, "transactionId": transaction}
        if deleted:
            return answer(body | {"message": "Message deleted successfully"})
        return answer(body | {"message": "Message not found", "error": "Message not found"}, 404)

    @route(
        "POST",
        "/api/v1/messages/{partition}/{transaction}/retry",
        query=GroupQuery,
        answer=dict[str, Any],
        summary="Deliver a message again",
        audit=Audited("message.retry"),
    )
    async def retry(self, request: Request) -> Response:
        partition, transaction = _ids(request)
        groups = await self._messages.retry(
            partition, transaction, request.args.consumer_group or None
        )
        return answer(
            {
                "success": True,
                "partitionId": partition,
                "transactionId": transaction,
                "groups": groups,
            }
        )

    @route(
        "POST",
        "/api/v1/messages/{partition}/{transaction}/dlq",
        query=GroupQuery,
        answer=dict[str, Any],
        summary="Move a message to a group's dead letters",
        audit=Audited("message.bury", body=("consumerGroup", "error")),
    )
    async def bury(self, request: Request) -> Response:
        partition, transaction = _ids(request)
        body = read_bury(request.body)
        group = request.args.consumer_group or body.consumer_group or QUEUE_MODE
        moved = await self._messages.bury(partition, transaction, group, body.error)
        return answer(
            {"success": moved, "partitionId": partition, "transactionId": transaction, "dlq": moved}
        )

    @route(
        "POST",
        "/api/v1/traces",
        body=TraceBody,
        decode=False,
        answer=dict[str, Any],
        summary="Note about a message",
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
        return answer({"success": True, "traceId": trace})

    @route(
        "GET",
        "/api/v1/traces/{partition}/{transaction}",
        answer=dict[str, Any],
        summary="A message's traces",
        tag="traces",
    )
    async def of_message(self, request: Request) -> Response:
        traces = await self._traces.of_message(*_ids(request))
        return answer({"traces": [_trace(trace) for trace in traces]})

    @route(
        "GET",
        "/api/v1/traces/by-name/{name}",
        query=PageQuery,
        answer=dict[str, Any],
        summary="Traces by name",
        tag="traces",
    )
    async def by_name(self, request: Request) -> Response:
        args = request.args
        page = await self._traces.by_name(request.params["name"], args.limit, args.offset)
        return answer(
            {
                "traces": [_trace(trace) for trace in page.traces],
                "total": page.total,
                "pagination": {"limit": args.limit, "offset": args.offset},
            }
        )

    @route(
        "GET",
        "/api/v1/traces/names",
        query=NamesQuery,
        answer=dict[str, Any],
        summary="Names of traces",
        tag="traces",
    )
    async def names(self, request: Request) -> Response:
        args = request.args
        page = await self._traces.names(args.limit, args.offset)
        return answer(
            {
                "trace_names": [msgspec.structs.asdict(name) for name in page.names],
                "total": page.total,
                "pagination": {"limit": args.limit, "offset": args.offset},
            }
        )


def _ids(request: Request) -> tuple[str, str]:
    return request.params["partition"], request.params["transaction"]


def _message(message: StoredMessage) -> dict[str, Any]:
    names = (
        "id",
        "transaction_id",
        "partition_id",
        "queue",
        "partition",
        "namespace",
        "task",
        "status",
        "queue_status",
        "trace_id",
        "created_at",
        "lease_expires_at",
    )
    return {
        **fields(message, *names),
        **headers_of(message.headers),
        "queuePath": f"{message.queue}/{message.partition}",
        "busStatus": {"consumedBy": message.groups_done, "totalGroups": message.groups},
        "producerSub": message.producer,
        "queuePriority": message.priority,
    }


def _detail(message: MessageDetail) -> dict[str, Any]:
    names = ("id", "transaction_id", "partition_id", "partition", "status", "trace_id")
    groups, queue = message.groups, message.queue
    buses = [group for group in groups if group.name != QUEUE_MODE]
    return {
        **fields(message, *names, "created_at", "payload"),
        **headers_of(message.headers),
        "queuePath": f"{queue.name}/{message.partition}",
        "queue": queue.name,
        "namespace": queue.namespace,
        "task": queue.task,
        "producerSub": message.producer,
        "isEncrypted": message.encrypted,
        "errorMessage": message.error,
        "retryCount": message.attempts,
        "queueConfig": fields(
            queue.options, "lease_time", "retry_limit", "retry_delay", "ttl", "priority"
        ),
        "mode": _mode(len(buses) < len(groups), len(buses))
        | {"consumedByGroups": sum(group.consumed for group in groups)},
        "consumerGroups": groups,
    }


def _mode(queue_mode: bool, buses: int) -> dict[str, Any]:
    kind = (
        "hybrid" if queue_mode and buses else "queue" if queue_mode else "bus" if buses else "none"
    )
    return {"hasQueueMode": queue_mode, "busGroupsCount": buses, "type": kind}


def _trace(trace: Trace) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": trace.id,
        "event_type": trace.event_type,
        "data": trace.data,
        "consumer_group": trace.group,
        "worker_id": trace.worker,
        "created_at": trace.created_at,
        "trace_names": trace.names,
    }
    if trace.message is not None:
        entry |= {
            "transaction_id": trace.message.transaction_id,
            "partition_id": trace.message.partition_id,
            "queue_name": trace.message.queue,
            "partition_name": trace.message.partition,
            "message_payload": trace.message.payload,
        }
    return entry
