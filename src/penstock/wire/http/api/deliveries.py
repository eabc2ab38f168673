"""Pop, ack and leases: the routes consumers live on.

Payloads pass through as bytes: a pop splices them into the answer, nobody looks inside.
"""

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import msgspec

from penstock.errors import InvalidRequest
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.engine import Queues
from penstock.queues.types import Ack, AckOutcome, Delivered, Extended, PopOutcome, PopRequest
from penstock.wire.auth import Role
from penstock.wire.http.answers import milliseconds
from penstock.wire.http.api.items import SLICE, ItemLimit, slices
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Headers, Request, Response, error_response, json_response
from penstock.wire.http.routes import route

_encode = msgspec.json.Encoder().encode
DEFAULT_EXTENSION = 60  # seconds
MAX_WAIT_MS = 1 << 31
LEASE_TIME = "Lease-Time"
MAX_ATTEMPTS = "Max-Attempts"
# A pop of what does not exist is empty, as the dialect wants it; why, is said in a header.
NO_QUEUE = (("Empty-Reason", "no such queue"),)
NO_PARTITION = (("Empty-Reason", "no such partition"),)


class PopQuery(msgspec.Struct, rename="camel", frozen=True):
    batch: int | None = None
    wait: bool = False
    timeout: int | None = None
    consumer_group: str | None = None
    auto_ack: bool = False
    partitions: int | None = None
    subscription_mode: str | None = None
    subscription_from: str | None = None
    namespace: str | None = None
    task: str | None = None
    autopilot: bool = False

    refuse_misspelled: ClassVar = True  # a pop without its group takes messages of another one


class AckItem(msgspec.Struct, rename="camel", gc=False):
    transaction_id: str
    partition_id: str
    lease_id: str | None = None
    status: str | None = None
    error: str | None = None
    worker: str | None = None  # the consumer's name, shown in the life of a message that failed
    delay: float | None = None  # failed, retry: seconds before the message is delivered again
    max_attempts: int | None = None  # failed: of this message; default: the queue's


class AckBody(AckItem, rename="camel"):
    consumer_group: str | None = None

    texts: ClassVar = {
        "transactionId": "transactionId is required",
        "partitionId": "partitionId is required to ensure message uniqueness",
    }


class AckBatchBody(msgspec.Struct, rename="camel"):
    acknowledgments: list[AckItem]
    consumer_group: str | None = None

    texts: ClassVar = {
        "acknowledgments": "acknowledgments array is required",
        "transactionId": "Each acknowledgment must have a valid transactionId string",
        "partitionId": "Each acknowledgment must have a valid partitionId string "
        "to ensure message uniqueness",
    }


class ExtendBody(msgspec.Struct):
    seconds: int | None = None

    texts: ClassVar = {"seconds": "seconds must be a whole number"}


class StrictAckItem(AckItem, gc=False, forbid_unknown_fields=True):
    """An acknowledgement without other fields."""


class StrictAckBody(AckBody, forbid_unknown_fields=True):
    """A body without other fields."""


class StrictAckBatchBody(AckBatchBody, forbid_unknown_fields=True):
    """A body without other fields."""

    acknowledgments: list[StrictAckItem]  # type: ignore[assignment]


read_ack = body_decoder(AckBody, strict=StrictAckBody)
read_acks = body_decoder(AckBatchBody, strict=StrictAckBatchBody)


def _seconds(milliseconds: int) -> float:
    """How long to wait: not less than not at all, and a number of any length is just long."""
    return min(max(0, milliseconds), MAX_WAIT_MS) / 1000


class PopAnswer(msgspec.Struct, rename="camel"):
    success: bool
    queue: str | None
    partition: str
    partition_id: str
    lease_id: str
    consumer_group: str
    partitions_claimed: int
    messages: list[Delivered]


class AckAnswer(msgspec.Struct, rename="camel", gc=False):
    index: int
    transaction_id: str
    success: bool
    error: str | None
    queue_name: str | None
    partition_name: str | None
    lease_released: bool | None
    dlq: bool


class ExchangeAnswer(PopAnswer, rename="camel"):
    acknowledged: list[AckAnswer]


class ExtendAnswer(msgspec.Struct, rename="camel"):
    index: int
    lease_id: str
    success: bool
    error: str | None
    expires_at: str | None


_POP: dict[str, Any] = {
    "query": PopQuery,
    "answer": PopAnswer,
    "role": Role.READ_WRITE,
    "gzip": False,
    "may_be_empty": True,
}
_EXCHANGE: dict[str, Any] = {
    "query": PopQuery,
    "body": AckBatchBody,
    "answer": ExchangeAnswer,
    "role": Role.READ_WRITE,
    "gzip": False,
}


class DeliveriesApi:
    tag = "queues"

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._limit = ItemLimit(queues.settings.max_items)

    @route(
        "GET", "/api/v1/pop", summary="Pop messages from any queue of a namespace or task", **_POP
    )
    @route(
        "GET",
        "/api/v1/pop/queue/{queue}",
        summary="Pop messages from any partition of a queue",
        **_POP,
    )
    @route(
        "GET",
        "/api/v1/pop/queue/{queue}/partition/{partition}",
        summary="Pop messages from one partition",
        **_POP,
    )
    async def pop(self, request: Request) -> Response:
        return await self._pop(request)

    @route(
        "POST",
        "/api/v1/pop",
        summary="Acknowledge messages, then pop from any queue of a namespace or task",
        **_EXCHANGE,
    )
    @route(
        "POST",
        "/api/v1/pop/queue/{queue}",
        summary="Acknowledge messages, then pop the next ones from any partition of a queue",
        **_EXCHANGE,
    )
    @route(
        "POST",
        "/api/v1/pop/queue/{queue}/partition/{partition}",
        summary="Acknowledge messages, then pop the next ones from one partition",
        **_EXCHANGE,
    )
    async def exchange(self, request: Request) -> Response:
        self._limit.check_body(request.body)
        body = read_acks(request.body)
        group = body.consumer_group or request.args.consumer_group or QUEUE_MODE
        who, items = request.who, body.acknowledgments
        acks = (
            [_ack(item, group, who) for item in items]
            if len(items) <= SLICE
            else await self._many_acks(items, group, who)
        )
        return await self._pop(request, acks)

    async def _pop(self, request: Request, acks: list[Ack] | None = None) -> Response:
        args: PopQuery = request.args
        if "queue" not in request.params and not (args.namespace or args.task):
            raise InvalidRequest("Name a queue in the path, or a namespace or task")
        task = asyncio.current_task()
        assert task is not None
        request.on_disconnect(task.cancel)  # gives back what is taken for it
        popped = await self._queues.pop(self._wanted(request), acks or ())
        messages = popped.messages
        headers = self._headers(popped)
        if not messages and acks is None:
            return Response(204, headers=headers)
        fields = (
            True,
            popped.queue,
            messages[0].partition if messages else "",
            messages[0].partition_id if messages else "",
            popped.lease_id,
            popped.group,
            popped.partitions_claimed,
            messages,
        )
        answer = (
            PopAnswer(*fields)
            if acks is None
            else ExchangeAnswer(*fields, ack_answers(popped.acked))
        )
        return Response(200, _encode(answer), headers=headers)

    async def _many_acks(self, items: list[AckItem], group: str, who: str) -> list[Ack]:
        """The engine's acknowledgements; others get a turn between slices of them."""
        self._limit.check(len(items))
        return [_ack(item, group, who) async for part in slices(items) for item in part]

    def _headers(self, popped: PopOutcome) -> Headers:
        """How long the lease lasts and how many attempts a message has; or what does not exist."""
        info = self._queues.catalog.queues.get(popped.queue or "")
        if popped.reason == "unknown":
            return NO_QUEUE if info is None else NO_PARTITION
        if info is None or not popped.lease_id:
            return ()
        return _lease_headers(info.options.lease_time, info.options.retry_limit)

    def _wanted(self, request: Request) -> PopRequest:
        args: PopQuery = request.args
        timeout = args.timeout
        return PopRequest(
            queue=request.params.get("queue"),
            partition=request.params.get("partition"),
            namespace=args.namespace or None,
            task=args.task or None,
            group=args.consumer_group or QUEUE_MODE,
            batch=None if args.batch is None else max(1, args.batch),
            partitions=None if args.partitions is None else max(1, args.partitions),
            autopilot=args.autopilot,
            wait=args.wait,
            timeout=None if timeout is None else _seconds(timeout),
            auto_ack=args.auto_ack,
            subscription_mode=args.subscription_mode or None,
            subscription_from=args.subscription_from or None,
            consumer=request.peer,
        )

    @route("POST", "/api/v1/ack", body=AckBody, answer=list[AckAnswer])
    async def ack(self, request: Request) -> Response:
        """Acknowledge one message: completed, failed, retry or dlq."""
        body = read_ack(request.body)
        group = body.consumer_group or QUEUE_MODE
        acked = await self._queues.ack([_ack(body, group, request.who)])
        return Response(200, _encode(ack_answers(acked)))

    @route("POST", "/api/v1/ack/batch", body=AckBatchBody, answer=list[AckAnswer])
    async def acks(self, request: Request) -> Response:
        """Acknowledge several messages, each with its own status."""
        self._limit.check_body(request.body)
        body = read_acks(request.body)
        group = body.consumer_group or QUEUE_MODE
        acked = await self._queues.ack(
            await self._many_acks(body.acknowledgments, group, request.who)
        )
        answers: list[AckAnswer] = []
        for begin in range(0, len(acked), SLICE):
            if begin:
                await asyncio.sleep(0)
            answers += ack_answers(acked[begin : begin + SLICE], begin)
        return Response(200, _encode(answers))

    @route("POST", "/api/v1/lease/{lease}/extend", answer=list[ExtendAnswer])
    async def extend(self, lease: str, body: ExtendBody | None) -> Response:
        """Extend a lease."""
        seconds = DEFAULT_EXTENSION if body is None or body.seconds is None else body.seconds
        return extend_answer(await self._queues.extend(lease, seconds), alone=body is None)


@lru_cache(maxsize=256)
def _lease_headers(lease_time: int, retry_limit: int) -> Headers:
    attempts = (MAX_ATTEMPTS, str(retry_limit + 1))
    return ((LEASE_TIME, str(lease_time)), attempts) if lease_time else (attempts,)


def _ack(item: AckItem, group: str, who: str) -> Ack:
    return Ack(
        item.transaction_id,
        item.partition_id,
        item.lease_id or None,
        item.status or "completed",
        item.error,
        group,
        item.worker or who,
        item.delay,
        item.max_attempts,
    )


def ack_answers(results: Sequence[AckOutcome], first: int = 0) -> list[AckAnswer]:
    return [
        AckAnswer(
            index,
            result.transaction_id,
            result.success,
            result.error,
            result.queue,
            result.partition,
            result.lease_released,
            result.dlq,
        )
        for index, result in enumerate(results, first)
    ]


def extend_answer(extended: Extended, *, alone: bool) -> Response:
    """An array of one. To a request without a body, which Queen MQ refuses, a plain object: the
    one published client that sends none reads `newExpiresAt` out of an object."""
    expires = milliseconds(extended.expires_at)
    answer = ExtendAnswer(0, extended.lease_id, extended.success, extended.error, expires)
    if not alone:
        return json_response([answer])
    if not extended.success:
        return error_response(
            404 if extended.error == "Lease not found" else 409, str(extended.error)
        )
    return json_response({**msgspec.to_builtins(answer), "newExpiresAt": expires})
