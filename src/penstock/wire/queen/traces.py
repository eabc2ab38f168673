"""Traces of messages, in Queen MQ's API, with names in snake_case."""

from typing import ClassVar

from penstock.contract.queries import Limit, Paged
from penstock.queues.admin.traces import Trace
from penstock.queues.engine import Queues
from penstock.wire.http.routes import route
from penstock.wire.queen.shapes import Json, page, shape

_entry = shape(
    "id event_type data consumer_group=group worker_id=worker created_at trace_names=names"
)
_about = shape(
    "transaction_id partition_id queue_name=queue partition_name=partition message_payload=payload"
)


class TracesQuery(Paged, frozen=True):
    limit: Limit = 100

    farther: ClassVar[str] = "use more than one name for so many traces"


class TraceNamesQuery(Paged, frozen=True):
    limit: Limit = 50

    farther: ClassVar[str] = "ask for the traces of a name or of a message"


class TracesApi:
    tag = "queen"

    def __init__(self, queues: Queues) -> None:
        self._traces = queues.traces

    @route("GET", "/api/v1/traces/{partition}/{transaction}")
    async def of_message(self, partition: str, transaction: str) -> Json:
        """The trace events of a message."""
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
