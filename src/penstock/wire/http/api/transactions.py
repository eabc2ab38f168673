"""Transactions: pushes and acks that happen together or not at all."""

from typing import Any, ClassVar

import msgspec

from penstock.buffer import Buffer
from penstock.errors import InvalidRequest
from penstock.protocol import headers
from penstock.protocol.names import DEFAULT_PARTITION, QUEUE_MODE
from penstock.queues.engine import Queues
from penstock.queues.types import Ack, AckOutcome, Item, ItemOutcome
from penstock.wire.http.answers import microseconds
from penstock.wire.http.api.items import ItemLimit, slices
from penstock.wire.http.api.pushes import PushItem, due_of, received
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import route

_EMPTY = msgspec.Raw(b"{}")
ABSENT = msgspec.Raw()


class TransactionItem(PushItem):
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: _EMPTY)


class TransactionOperation(msgspec.Struct, rename="camel"):
    """A push of `items` or of the one message that the fields describe, or an ack."""

    type: str
    items: list[TransactionItem] | None = None
    queue: str | None = None
    partition: str | None = None
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: ABSENT)
    data: msgspec.Raw = msgspec.field(default_factory=lambda: ABSENT)
    transaction_id: str | None = None
    trace_id: str | None = None
    headers: dict[str, str] | None = None
    delay: float | None = None
    deliver_at: str | None = None
    partition_id: str | None = None
    lease_id: str | None = None
    status: str | None = None
    consumer_group: str | None = None
    error: str | None = None


class TransactionBody(msgspec.Struct, rename="camel"):
    operations: list[TransactionOperation]
    required_leases: list[str] | None = None

    texts: ClassVar = {"operations": "operations array required"}


class PushResult(msgspec.Struct, rename="camel", tag_field="type", tag="push"):
    index: int
    success: bool
    transaction_id: str
    message_id: str | None
    partition_id: str
    queue_name: str
    deliver_at: str | msgspec.UnsetType = msgspec.UNSET  # of a message for later


class AckResult(msgspec.Struct, rename="camel", tag_field="type", tag="ack"):
    index: int
    success: bool
    transaction_id: str
    error: str | None
    dlq: bool


class TransactionAnswer(msgspec.Struct, rename="camel", omit_defaults=True):
    transaction_id: str
    success: bool
    results: list[PushResult | AckResult]
    error: str | None = None


read_transaction = body_decoder(TransactionBody)


class TransactionsApi:
    tag = "queues"

    def __init__(self, queues: Queues, buffer: Buffer) -> None:
        self._queues = queues
        self._buffer = buffer
        self._limit = ItemLimit(queues.settings.max_items)

    @route("POST", "/api/v1/transaction", body=TransactionBody, answer=TransactionAnswer)
    async def transaction(self, request: Request) -> Response:
        """Push and acknowledge messages in one transaction: all of it or nothing."""
        self._limit.check_body(request.body)
        body = read_transaction(request.body)
        self._limit.check(
            len(body.operations) + sum(len(operation.items or ()) for operation in body.operations)
        )
        operations: list[Item | Ack] = []
        index = 0
        async for part in slices(body.operations):
            for operation in part:
                operations += _operations(index, operation, request.subject)
                index += 1
        if not operations:
            raise InvalidRequest("operations array cannot be empty")
        items = [operation for operation in operations if isinstance(operation, Item)]
        if items:
            await self._buffer.wait_until_drained(items)
        done = await self._queues.transaction(operations, body.required_leases)
        results = [_result(index, result) for index, result in enumerate(done.results)]
        answer = TransactionAnswer(done.transaction_id, done.success, results, done.error)
        return json_response(answer, 200 if done.success else 409)


def _operations(index: int, operation: TransactionOperation, producer: str | None) -> list[Any]:
    if operation.type == "push":
        if operation.items is not None:
            return received(operation.items, producer)
        if operation.queue is None:
            raise InvalidRequest(f"operations[{index}]: a push names a queue")
        payload = next(
            (raw for raw in (operation.payload, operation.data) if raw is not ABSENT), _EMPTY
        )
        partition = DEFAULT_PARTITION if operation.partition is None else operation.partition
        ids = operation.transaction_id, operation.trace_id
        return [
            Item(
                operation.queue,
                bytes(payload),
                partition,
                *ids,
                producer,
                headers=headers.encode(operation.headers) if operation.headers else None,
                due=due_of(operation.delay, operation.deliver_at),
            )
        ]
    if operation.type == "ack":
        if not operation.transaction_id or not operation.partition_id:
            raise InvalidRequest(f"operations[{index}]: an ack needs transactionId and partitionId")
        return [
            Ack(
                operation.transaction_id,
                operation.partition_id,
                operation.lease_id or None,
                operation.status or "completed",
                operation.error,
                operation.consumer_group or QUEUE_MODE,
            )
        ]
    raise InvalidRequest(f"Unknown operation type: {operation.type[:60]}")


def _result(index: int, result: ItemOutcome | AckOutcome) -> PushResult | AckResult:
    if isinstance(result, ItemOutcome):
        stored = result.status in ("queued", "scheduled")
        return PushResult(
            index,
            stored,
            result.transaction_id,
            result.message_id,
            result.partition_id or "",
            result.queue,
            microseconds(result.deliver_at) if result.deliver_at else msgspec.UNSET,
        )
    return AckResult(index, result.success, result.transaction_id, result.error, result.dlq)
