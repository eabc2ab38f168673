"""Streams: consumers whose state, output and acknowledgement are committed together.

The names and shapes are those of Queen MQ: snake_case, and `success` in every answer.
"""

from typing import ClassVar, Literal

import msgspec

from penstock.buffer import Buffer
from penstock.contract.deliveries import PushItem
from penstock.errors import InvalidRequest
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.engine import Queues
from penstock.queues.streams import Cycle, CycleAck
from penstock.wire.auth import Role
from penstock.wire.http.answers import microseconds
from penstock.wire.http.api.items import ItemLimit
from penstock.wire.http.api.pushes import push_answers, received
from penstock.wire.http.messages import Headers, HttpHead, Request, Response, json_response
from penstock.wire.http.routes import route
from penstock.wire.queen.aliases import Json


class QueryBody(msgspec.Struct):
    name: str
    source_queue: str
    config_hash: str
    sink_queue: str | None = None
    reset: bool | None = None

    texts: ClassVar = {
        "name": "name is required",
        "source_queue": "source_queue is required",
        "config_hash": "config_hash is required",
    }


class StateOperation(msgspec.Struct):
    type: Literal["upsert", "delete"]
    key: str
    value: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))


class StreamAck(msgspec.Struct, rename="camel"):
    transaction_id: str
    lease_id: str
    status: str | None = None
    count: int | None = None  # ignored: the transaction id determines the messages
    error: str | None = None


class CycleBody(msgspec.Struct):
    query_id: str
    partition_id: str
    consumer_group: str | None = None
    config_hash: str | None = None  # of the program that sends it; not in Queen MQ
    release_lease: bool | None = None
    state_ops: list[StateOperation] | None = None
    push_items: list[PushItem] | None = None
    ack: StreamAck | None = None

    texts: ClassVar = {
        "query_id": "query_id is required",
        "partition_id": "partition_id is required",
        "transactionId": "ack.transactionId is required",
        "leaseId": "ack.leaseId is required",
    }


class StateBody(msgspec.Struct):
    query_id: str
    partition_id: str
    keys: list[str] | None = None
    key_prefix: str | None = None
    ripe_at_or_before: int | None = None

    texts: ClassVar = {
        "query_id": "query_id is required",
        "partition_id": "partition_id is required",
    }


def write_error(_: HttpHead, status: int, text: str, headers: Headers) -> Response:
    return json_response({"success": False, "error": text}, status, headers)


class StreamsApi:
    tag = "queen"

    def __init__(self, queues: Queues, buffer: Buffer) -> None:
        self._streams = queues.streams
        self._buffer = buffer
        self._limit = ItemLimit(queues.settings.max_items)

    @route("POST", "/streams/v1/queries", write_error=write_error)
    async def register(self, body: QueryBody) -> Json:
        """Register a query, which keeps state beside the partitions of its source queue."""
        done = await self._streams.register(
            body.name,
            body.source_queue,
            body.sink_queue,
            body.config_hash,
            reset=body.reset or False,
        )
        return {
            "success": True,
            "query_id": done.query_id,
            "name": body.name,
            "config_hash": body.config_hash,
            "fresh": done.fresh,
            "reset": done.reset,
        }

    @route("POST", "/streams/v1/cycle", write_error=write_error)
    async def cycle(self, request: Request, body: CycleBody) -> Json:
        """Change state, push and acknowledge in one transaction: all of it or nothing."""
        operations = body.state_ops or []
        self._limit.check(len(operations) + len(body.push_items or ()))
        items = received(body.push_items or (), request.subject)
        if items:
            await self._buffer.wait_until_drained(items)
        done = await self._streams.commit(
            Cycle(
                query_id=body.query_id,
                partition_id=body.partition_id,
                group=body.consumer_group or QUEUE_MODE,
                config_hash=body.config_hash,
                # of several operations on a key, the last one counts
                state={
                    one.key: None if one.type == "delete" else bytes(one.value)
                    for one in operations
                },
                items=items,
                ack=None if body.ack is None else _ack(body.ack),
                release=body.release_lease is not False,
            )
        )
        acked = {
            "success": True,
            "count": done.acked,
            "lease_released": done.released,
            "dlq": done.dead,
        }
        return {
            "success": True,
            "query_id": body.query_id,
            "partition_id": body.partition_id,
            "state_ops_applied": len(operations),
            "push_results": push_answers(items, done.pushed),
            "ack_result": acked if body.ack else None,
        }

    @route("POST", "/streams/v1/state/get", role=Role.READ_ONLY, write_error=write_error)
    async def state(self, body: StateBody) -> Json:
        """Read the state of a query in a partition. Filters are combined with AND."""
        rows = await self._streams.state(
            body.query_id,
            body.partition_id,
            body.keys or [],
            body.key_prefix or "",
            body.ripe_at_or_before,
        )
        return {
            "success": True,
            "rows": [
                {
                    "key": row.key,
                    "value": msgspec.Raw(row.value),
                    "updated_at": microseconds(row.updated_at),
                }
                for row in rows
            ],
        }


def _ack(ack: StreamAck) -> CycleAck:
    if not ack.transaction_id or not ack.lease_id:
        raise InvalidRequest("ack needs transactionId and leaseId")
    return CycleAck(ack.transaction_id, ack.lease_id, ack.status or "completed", ack.error)
