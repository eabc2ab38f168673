"""Pop, ack and leases: the routes consumers live on.

Payloads pass through as bytes: a pop splices them into the answer, nobody looks inside.
"""

import asyncio
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from penstock.contract import operations
from penstock.contract.deliveries import (
    AckBatchBody,
    Acked,
    AckItem,
    Delivered,
    ExchangeAnswer,
    ExtendAnswer,
    ExtendBody,
    PopAnswer,
    PopAnyAnswer,
    PopAnyBody,
    PopOptions,
    PopQuery,
)
from penstock.errors import InvalidRequest
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.engine import Queues
from penstock.queues.types import Ack, AckOutcome, Extended, PopOutcome, PopRequest
from penstock.wire.http.answers import milliseconds
from penstock.wire.http.api.items import SLICE, ItemLimit, slices
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Headers, Request, Response, error_response, json_response
from penstock.wire.http.routes import serves

_encode = msgspec.json.Encoder().encode
DEFAULT_EXTENSION = 60  # seconds
MAX_WAIT_MS = 1 << 31
LEASE_TIME = "Lease-Time"
MAX_ATTEMPTS = "Max-Attempts"
RETRY_DELAY = "Retry-Delay"  # seconds before the next attempt, if this one fails
# A pop of what does not exist is empty, as clients of Queen MQ expect; a header says why.
NO_QUEUE = (("Empty-Reason", "no such queue"),)
NO_PARTITION = (("Empty-Reason", "no such partition"),)


read_acks = body_decoder(AckBatchBody, refuse_misspelled=True)


def _timeout(milliseconds: int | None) -> float | None:
    """Return the seconds to wait. Negative numbers mean 0; very large ones are cut."""
    return None if milliseconds is None else min(max(0, milliseconds), MAX_WAIT_MS) / 1000


def _wanted(
    args: PopOptions, queue: str | None, partition: str | None, consumer: object
) -> PopRequest:
    return PopRequest(
        queue=queue,
        partition=partition,
        namespace=args.namespace or None,
        task=args.task or None,
        group=args.consumer_group or QUEUE_MODE,
        batch=None if args.batch is None else max(1, args.batch),
        partitions=None if args.partitions is None else max(1, args.partitions),
        autopilot=args.autopilot,
        auto_ack=args.auto_ack,
        subscription_mode=args.subscription_mode or None,
        subscription_from=args.subscription_from or None,
        consumer=consumer,
    )


def _fields(
    popped: PopOutcome,
) -> tuple[bool, str | None, str, str, str, str, int, list[Delivered]]:
    """Return the fields of a `PopAnswer`."""
    messages = popped.messages
    return (
        True,
        popped.queue,
        messages[0].partition if messages else "",
        messages[0].partition_id if messages else "",
        popped.lease_id,
        popped.group,
        popped.partitions_claimed,
        messages,
    )


class DeliveriesApi:
    tag = "queues"

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._limit = ItemLimit(queues.settings.max_items)

    @serves(operations.POP, gzip=False)
    async def pop(self, request: Request) -> Response:
        return await self._pop(request)

    @serves(operations.ACK_AND_POP, gzip=False)
    async def exchange(self, request: Request) -> Response:
        self._limit.check_body(request.body)
        body = read_acks(request.body)
        group = body.consumer_group or request.args.consumer_group or QUEUE_MODE
        return await self._pop(request, await self._acks(body.acknowledgments, group, request.who))

    async def _pop(self, request: Request, acks: list[Ack] | None = None) -> Response:
        args: PopQuery = request.args
        if "queue" not in request.params and not (args.namespace or args.task):
            raise InvalidRequest("Name a queue in the path, or a namespace or task")
        task = asyncio.current_task()
        assert task is not None
        request.on_disconnect(task.cancel)  # gives back what is taken for it
        params = request.params
        wanted = _wanted(args, params.get("queue"), params.get("partition"), request.peer)
        wanted.wait, wanted.timeout = args.wait, _timeout(args.timeout)
        popped = await self._queues.pop(wanted, acks or ())
        headers = self._headers(popped)
        if acks is not None:
            answer: PopAnswer = ExchangeAnswer(*_fields(popped), ack_answers(popped.acked))
        elif popped.messages:
            answer = PopAnswer(*_fields(popped))
        else:
            return Response(204, headers=headers)
        return Response(200, _encode(answer), headers=headers)

    @serves(operations.POP_ANY, gzip=False)
    async def pop_any(self, request: Request, body: PopAnyBody) -> Response:
        if not all(one.queue or one.namespace or one.task for one in body.sources):
            raise InvalidRequest("Each source names a queue, a namespace or a task")
        task = asyncio.current_task()
        assert task is not None
        request.on_disconnect(task.cancel)  # gives back what is taken for it
        wanted = [_wanted(one, one.queue, one.partition, request.peer) for one in body.sources]
        wanted[0].wait, wanted[0].timeout = body.wait, _timeout(body.timeout)
        popped = await self._queues.pop_any(wanted)
        if not popped.messages:
            return Response(204)
        answer = PopAnyAnswer(*_fields(popped), popped.source)
        return Response(200, _encode(answer), headers=self._headers(popped))

    async def _acks(self, items: list[AckItem], group: str, who: str) -> list[Ack]:
        """Complete acknowledgements; others get a turn between slices of them."""
        if len(items) <= SLICE:
            return [item.complete(group, who) for item in items]
        self._limit.check(len(items))
        return [item.complete(group, who) async for part in slices(items) for item in part]

    def _headers(self, popped: PopOutcome) -> Headers:
        """Return headers: how long the lease lasts, how many attempts a message has, and how long
        the next one waits; or what does not exist.
        """
        info = self._queues.catalog.queues.get(popped.queue or "")
        if popped.reason == "unknown":
            return NO_QUEUE if info is None else NO_PARTITION
        if info is None or not popped.lease_id:
            return ()
        options = info.options
        return _lease_headers(options.lease_time, options.retry_limit, options.retry_delay)

    @serves(operations.ACK)
    async def acks(self, request: Request) -> Response:
        self._limit.check_body(request.body)
        body = read_acks(request.body)
        group = body.consumer_group or QUEUE_MODE
        acks = await self._acks(body.acknowledgments, group, request.who)
        acked = await self._queues.ack(acks)
        answers: list[Acked] = []
        for begin in range(0, len(acked), SLICE):
            if begin:
                await asyncio.sleep(0)
            answers += ack_answers(acked[begin : begin + SLICE], begin)
        return Response(200, _encode(answers))

    @serves(operations.EXTEND_LEASE)
    async def extend(self, lease: str, body: ExtendBody | None) -> Response:
        seconds = DEFAULT_EXTENSION if body is None or body.seconds is None else body.seconds
        return extend_answer(await self._queues.extend(lease, seconds), alone=body is None)


@lru_cache(maxsize=256)
def _lease_headers(lease_time: int, retry_limit: int, retry_delay: int) -> Headers:
    attempts = ((MAX_ATTEMPTS, str(retry_limit + 1)), (RETRY_DELAY, f"{retry_delay / 1000:g}"))
    return ((LEASE_TIME, str(lease_time)), *attempts) if lease_time else attempts


def ack_answers(results: Sequence[AckOutcome], first: int = 0) -> list[Acked]:
    return [
        Acked(
            result.transaction_id,
            result.success,
            index,
            result.error,
            result.queue,
            result.partition,
            result.lease_released,
            result.dlq,
        )
        for index, result in enumerate(results, first)
    ]


def extend_answer(extended: Extended, *, alone: bool) -> Response:
    """Return the answer: an array with one object. A request without a body, which Queen MQ
    refuses, gets a plain object: the one published client that sends no body reads `newExpiresAt`
    from an object.
    """
    expires = milliseconds(extended.expires_at)
    answer = ExtendAnswer(0, extended.lease_id, extended.success, extended.error, expires)
    if not alone:
        return json_response([answer])
    if not extended.success:
        return error_response(
            404 if extended.error == "Lease not found" else 409, str(extended.error)
        )
    return json_response({**msgspec.to_builtins(answer), "newExpiresAt": expires})
