"""Messages in Queen MQ's API: acknowledge one, bury one, and traces, with names in snake_case."""

from typing import ClassVar

import msgspec

from penstock.contract import operations
from penstock.contract.deliveries import Acked, AckItem, json_name
from penstock.contract.messages import MessageBuried, TraceAdded, TraceBody
from penstock.contract.operation import Audited
from penstock.contract.queries import GroupQuery, Limit, Paged
from penstock.errors import InvalidRequest
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.admin.traces import Trace
from penstock.queues.engine import Queues
from penstock.wire.http.api.deliveries import ack_answers
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import route, serves
from penstock.wire.queen.aliases import Json, page, shape

_entry = shape(
    "id event_type data consumer_group=group worker_id=worker created_at trace_names=names"
)
_about = shape(
    "transaction_id partition_id queue_name=queue partition_name=partition message_payload=payload"
)


class AckBody(AckItem, rename=json_name):
    consumer_group: str | None = None

    texts: ClassVar = {
        "transactionId": "transactionId is required",
        "partitionId": "partitionId is required to ensure message uniqueness",
    }


class BuryBody(msgspec.Struct, rename="camel"):
    consumer_group: str | None = None
    error: str | None = None

    texts: ClassVar[dict[str, str]] = {}


read_ack = body_decoder(AckBody, refuse_misspelled=True)


class TracesQuery(Paged, frozen=True):
    limit: Limit = 100

    farther: ClassVar[str] = "use more than one name for so many traces"


class TraceNamesQuery(Paged, frozen=True):
    limit: Limit = 50

    farther: ClassVar[str] = "ask for the traces of a name or of a message"


class QueenMessagesApi:
    tag = "queen"

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._messages = queues.messages
        self._traces = queues.traces

    @route("POST", "/api/v1/ack", body=AckBody, answer=list[Acked])
    async def ack(self, request: Request) -> Response:
        """Acknowledge one message: completed, failed, retry or dlq."""
        body = read_ack(request.body)
        ack = body.complete(body.consumer_group or QUEUE_MODE, request.who)
        return json_response(ack_answers(await self._queues.ack([ack])))

    @route(
        "POST",
        "/api/v1/messages/{partition}/{transaction}/dlq",
        audit=Audited("message.bury", body=("consumerGroup", "error")),
    )
    async def bury(
        self, partition: str, transaction: str, args: GroupQuery, body: BuryBody | None
    ) -> MessageBuried:
        """Move a message to a group's dead letters."""
        body = body or BuryBody()
        group = args.consumer_group or body.consumer_group or QUEUE_MODE
        moved = await self._messages.move_to_dead_letters(partition, transaction, group, body.error)
        return MessageBuried(partition, transaction, moved)

    @serves(operations.ADD_TRACE)
    async def add_trace(self, body: TraceBody) -> TraceAdded:
        if not body.transaction_id or not body.partition_id:
            raise InvalidRequest("transactionId and partitionId are required")
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
        return TraceAdded(trace)

    @route("GET", "/api/v1/traces/{partition}/{transaction}")
    async def traces(self, partition: str, transaction: str) -> Json:
        """List the trace events of a message."""
        traces = await self._traces.of_message(partition, transaction)
        return {"traces": [_trace(trace) for trace in traces]}

    @route("GET", "/api/v1/traces/by-name/{name}")
    async def by_name(self, name: str, args: TracesQuery) -> Json:
        """Trace events with a given trace name."""
        listing = await self._traces.by_name(name, args.limit, args.offset)
        return {
            "traces": [_trace(trace) for trace in listing.traces],
            "total": listing.total,
            "pagination": page(args.limit, args.offset),
        }

    @route("GET", "/api/v1/traces/names")
    async def names(self, args: TraceNamesQuery) -> Json:
        """List trace names."""
        listing = await self._traces.names(args.limit, args.offset)
        return {
            "trace_names": listing.names,
            "total": listing.total,
            "pagination": page(args.limit, args.offset),
        }


def _trace(trace: Trace) -> Json:
    shown = _entry(trace)
    return shown if trace.message is None else {**shown, **_about(trace.message)}
