"""Push, the route producers live on.

Payloads pass through as bytes: a push slices them out of the body and nobody looks inside. It goes
through the buffer, which stands in front of the database.
"""

from collections.abc import Awaitable, Sequence
from datetime import datetime
from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET

from penstock.buffer import Buffer
from penstock.errors import InvalidRequest
from penstock.protocol import headers
from penstock.protocol.names import DEFAULT_PARTITION
from penstock.protocol.times import time_field
from penstock.queues.push import named
from penstock.queues.types import Item, Pushed
from penstock.wire.http.answers import microseconds
from penstock.wire.http.api.items import SLICE, ItemLimit, slices
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Request, Response, error_response, json_response
from penstock.wire.http.routes import route

NULL = msgspec.Raw(b"null")
# milliseconds: who asks for more has mistaken the unit, and would wait for years
MAX_BUFFER_MS = 3_600_000
MAX_DELAY_SECONDS = 315_360_000  # ten years
_encode = msgspec.json.Encoder().encode
# Left as text and checked with those of the whole request (`headers.checked`).
HeadersText = Annotated[
    msgspec.Raw | msgspec.UnsetType,
    msgspec.Meta(
        extra_json_schema={"type": ["object", "null"], "additionalProperties": {"type": "string"}}
    ),
]


class PushItem(msgspec.Struct, rename="camel", gc=False):
    queue: str
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: NULL)
    partition: str | None = None
    transaction_id: str | None = None
    trace_id: str | None = None
    headers: HeadersText = UNSET
    delay: float | None = None
    deliver_at: str | None = None


class PushBody(msgspec.Struct, rename="camel"):
    items: list[PushItem]
    buffer_ms: int | None = None
    buffer_max: int | None = None

    texts: ClassVar = {
        "items": "items array is required",
        "queue": "Queue must be a string",
        "partition": "Partition must be a string",
        "transactionId": "TransactionId must be a string",
        "traceId": "TraceId must be a string",
        "delay": "delay must be a number of seconds",
        "deliverAt": "deliverAt must be an ISO 8601 time",
    }


class StrictPushItem(PushItem, gc=False, forbid_unknown_fields=True):
    """An item without other fields."""


class StrictPushBody(PushBody, forbid_unknown_fields=True):
    """A body without other fields."""

    items: list[StrictPushItem]  # type: ignore[assignment]


read_push = body_decoder(PushBody, strict=StrictPushBody)


class Queued(msgspec.Struct, gc=False):
    index: int
    status: str
    message_id: str | None
    transaction_id: str
    partition_id: str
    trace_id: str | None
    queue_name: str = msgspec.field(name="queueName")


class Scheduled(Queued, gc=False):
    """An item that waits for its time."""

    deliver_at: str = msgspec.field(name="deliverAt")


class Duplicate(msgspec.Struct, gc=False):
    index: int
    status: str
    message_id: str | None
    transaction_id: str
    queue_name: str = msgspec.field(name="queueName")


class NotQueued(msgspec.Struct, rename="camel", gc=False, omit_defaults=True):
    """An item that waits in the buffer, or was not taken at all."""

    index: int
    status: str
    queue: str
    partition: str
    transaction_id: str
    error: str = ""


PushedItem = Queued | Duplicate | NotQueued


class Later(msgspec.Struct, rename="camel"):
    """The answer of a push with `bufferMs` or `bufferMax`."""

    pushed: bool
    qos0: bool
    db_healthy: bool


class PushAnswer(msgspec.Struct, omit_defaults=True):
    """The result of one pushed item; which fields it has depends on `status`."""

    index: int
    status: str
    message_id: str = ""
    transaction_id: str = ""
    partition_id: str = ""
    trace_id: str | None = None
    queue_name: str = msgspec.field(name="queueName", default="")
    deliver_at: str = msgspec.field(name="deliverAt", default="")


class PushesApi:
    tag = "queues"

    def __init__(self, buffer: Buffer, max_items: int) -> None:
        self._buffer = buffer
        self._limit = ItemLimit(max_items)

    @route("POST", "/api/v1/push", body=PushBody, answer=list[PushAnswer] | Later, status=201)
    def push(self, request: Request) -> Awaitable[Response]:
        """Push messages to one or more queues."""
        self._limit.check_body(request.body)
        body = read_push(request.body)
        if len(body.items) > SLICE:
            self._limit.check(len(body.items))
            return push_many(self._buffer, body, request.subject)
        items = items_of(body.items, request.subject)
        if body.buffer_ms is not None or body.buffer_max is not None:
            return push_later(self._buffer, body, items)
        return self._buffer.push(items).then(push_answer)


def items_of(items: Sequence[PushItem], producer: str | None = None) -> list[Item]:
    """`producer` is who the token says, whatever the body says."""
    result = [
        Item(
            item.queue,
            bytes(item.payload),
            DEFAULT_PARTITION if item.partition is None else item.partition,
            item.transaction_id,
            item.trace_id,
            producer,
            due=None
            if item.delay is None and item.deliver_at is None
            else due_of(item.delay, item.deliver_at),
        )
        for item in items
    ]
    given = [(place, item.headers) for place, item in enumerate(items) if item.headers is not UNSET]
    if given:
        texts = headers.checked([bytes(text) for _, text in given])
        for (place, _), text in zip(given, texts, strict=True):
            result[place].headers = text
    return result


def due_of(delay: float | None, deliver_at: str | None) -> float | datetime | None:
    """When an item is due, if not now."""
    if delay is None:
        return None if deliver_at is None else time_field(deliver_at, "deliverAt")
    if deliver_at is not None:
        raise InvalidRequest("give delay or deliverAt, not both")
    if not 0 <= delay <= MAX_DELAY_SECONDS:
        raise InvalidRequest(f"delay must be between 0 and {MAX_DELAY_SECONDS} seconds")
    return delay or None


async def push_many(buffer: Buffer, body: PushBody, producer: str | None) -> Response:
    """A push of so many items that others get a turn between slices of it."""
    items: list[Item] = []
    async for part in slices(body.items):
        items += named(items_of(part, producer))
    if body.buffer_ms is not None or body.buffer_max is not None:
        return await push_later(buffer, body, items)
    results = await buffer.push(items)
    answers: list[PushedItem] = []
    async for some in slices(results):
        answers += push_answers(some, len(answers))
    return push_answer(results, answers)


async def push_later(buffer: Buffer, body: PushBody, items: list[Item]) -> Response:
    """QoS 0: one answer for all, as soon as they are written to a file."""
    if body.buffer_ms is not None and not 0 <= body.buffer_ms <= MAX_BUFFER_MS:
        raise InvalidRequest(f"bufferMs must be between 0 and {MAX_BUFFER_MS}")
    if body.buffer_max is not None and body.buffer_max < 1:
        raise InvalidRequest("bufferMax must be at least 1")
    results = await buffer.push(items, body.buffer_ms, body.buffer_max)
    if any(result.status == "full" for result in results):
        return push_answer(results)  # the disk has no room, so it went to the database at once
    return json_response(Later(True, True, buffer.healthy), 201)


def push_answer(results: Sequence[Pushed], answers: Sequence[PushedItem] | None = None) -> Response:
    """201, or 429 when something did not fit: then the results stand beside the error."""
    if answers is None:
        answers = push_answers(results)
    full = [answer.index for answer in answers if answer.status == "failed"]
    if full:
        names = ", ".join(sorted({results[index].queue for index in full}))
        text = f"{len(full)} of {len(results)} messages do not fit, queue full (maxSize): {names}"
        return error_response(429, text, (("Retry-After", "1"),), full=full, results=answers)
    return Response(201, _encode(answers))


def push_answers(results: Sequence[Pushed], first: int = 0) -> list[PushedItem]:
    """What each item gets; `first` is the number of the first one."""
    answers: list[PushedItem] = []
    for index, result in enumerate(results, first):
        status, queue, transaction = result.status, result.queue, result.transaction_id
        partition, trace = result.partition_id, result.trace_id
        if status == "queued":
            answers.append(
                Queued(index, status, result.message_id, transaction, partition, trace, queue)
            )
        elif status == "scheduled" and result.deliver_at is not None:
            at = microseconds(result.deliver_at)
            answers.append(Scheduled(index, status, None, transaction, partition, trace, queue, at))
        elif status == "duplicate":
            answers.append(Duplicate(index, status, result.message_id, transaction, queue))
        elif status == "buffered":
            answers.append(NotQueued(index, status, queue, result.partition, transaction))
        else:
            text = f"queue '{queue}' is full (maxSize)"
            answers.append(NotQueued(index, "failed", queue, result.partition, transaction, text))
    return answers
