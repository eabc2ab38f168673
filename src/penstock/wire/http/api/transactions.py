"""Transactions: pushes and acks that happen together or not at all."""

from typing import Any

import msgspec

from penstock.buffer import Buffer
from penstock.contract import operations
from penstock.contract.deliveries import (
    ABSENT,
    EMPTY_OBJECT,
    AckResult,
    PushResult,
    TransactionAnswer,
    TransactionBody,
    TransactionOperation,
)
from penstock.errors import InvalidRequest
from penstock.protocol import headers
from penstock.protocol.names import DEFAULT_PARTITION, QUEUE_MODE
from penstock.queues.engine import Queues
from penstock.queues.types import Ack, AckOutcome, Item, ItemOutcome
from penstock.wire.http.answers import microseconds
from penstock.wire.http.api.items import ItemLimit, slices
from penstock.wire.http.api.pushes import due_of, received
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import serves

read_transaction = body_decoder(TransactionBody)


class TransactionsApi:
    tag = "queues"

    def __init__(self, queues: Queues, buffer: Buffer) -> None:
        self._queues = queues
        self._buffer = buffer
        self._limit = ItemLimit(queues.settings.max_items)

    @serves(operations.COMMIT_TRANSACTION)
    async def transaction(self, request: Request) -> Response:
        self._limit.check_body(request.body)
        body = read_transaction(request.body)
        self._limit.check(
            len(body.operations) + sum(len(operation.items or ()) for operation in body.operations)
        )
        steps: list[Item | Ack] = []
        index = 0
        async for part in slices(body.operations):
            for operation in part:
                steps += _operations(index, operation, request.subject)
                index += 1
        if not steps:
            raise InvalidRequest("operations array cannot be empty")
        items = [operation for operation in steps if isinstance(operation, Item)]
        if items:
            await self._buffer.wait_until_drained(items)
        done = await self._queues.transaction(steps, body.required_leases)
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
            (raw for raw in (operation.payload, operation.data) if raw is not ABSENT), EMPTY_OBJECT
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
