"""Push messages over HTTP.

Payloads are sliced out of the body as bytes and are never decoded. A push goes through the buffer,
which stores messages in the database or in files.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import cast

import msgspec
from msgspec import UNSET

from penstock.buffer import Buffer
from penstock.buffer.qos0 import MAX_BUFFER_MS
from penstock.contract import operations
from penstock.contract.deliveries import (
    Item,
    ItemOutcome,
    Later,
    PushBody,
    PushItem,
)
from penstock.errors import InvalidRequest
from penstock.protocol import headers
from penstock.protocol.names import DEFAULT_PARTITION
from penstock.protocol.times import time_field
from penstock.queues.types import MAX_DELAY_SECONDS
from penstock.wire.http.api.items import SLICE, ItemLimit, slices
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Request, Response, error_response, json_response
from penstock.wire.http.routes import serves

_encode = msgspec.json.Encoder().encode
ENCODES_ITSELF = {"queued", "duplicate", "scheduled"}  # these outcomes are encoded as they are
read_push = body_decoder(PushBody, refuse_misspelled=True)


class NotQueued(msgspec.Struct, rename="camel", gc=False, omit_defaults=True):
    """The answer for an item that is in the buffer, or that was rejected."""

    index: int
    status: str
    queue: str
    partition: str
    transaction_id: str
    error: str = ""


class PushesApi:
    tag = "queues"

    def __init__(self, buffer: Buffer, max_items: int) -> None:
        self._buffer = buffer
        self._limit = ItemLimit(max_items)

    @serves(operations.PUSH)
    async def push(self, request: Request) -> Response:
        self._limit.check_body(request.body)
        body = read_push(request.body)
        if len(body.items) <= SLICE:
            items = received(body.items, request.subject)
        else:
            self._limit.check(len(body.items))
            items = []
            async for part in slices(body.items):
                items += received(part, request.subject)
        if body.buffer_ms is None and body.buffer_max is None:
            return push_answer(items, await self._buffer.push(items))
        return await push_later(self._buffer, body, items)


def received(items: Sequence[PushItem], producer: str | None = None) -> list[Item]:
    """Fill in defaults of the items in place. `producer` is the subject of the token."""
    if producer is not None:
        for item in items:
            item.producer = producer  # type: ignore[assignment]
    with_headers: list[PushItem] = []
    for item in items:
        if item.partition is None:
            item.partition = DEFAULT_PARTITION
        if item.delay is not None or item.deliver_at is not None:
            item.due = due_of(item.delay, item.deliver_at)  # type: ignore[assignment]
        if item.headers is UNSET:
            item.headers = None  # type: ignore[assignment]
        elif item.headers is not None:
            with_headers.append(item)
    if with_headers:
        texts = headers.checked([bytes(item.headers or b"") for item in with_headers])
        for item, text in zip(with_headers, texts, strict=True):
            item.headers = text  # type: ignore[assignment]
    return cast("list[Item]", items)


def due_of(delay: float | None, deliver_at: str | None) -> float | datetime | None:
    """Return when an item is due; None: now."""
    if delay is None:
        return None if deliver_at is None else time_field(deliver_at, "deliverAt")
    if deliver_at is not None:
        raise InvalidRequest("give delay or deliverAt, not both")
    if not 0 <= delay <= MAX_DELAY_SECONDS:
        raise InvalidRequest(f"delay must be between 0 and {MAX_DELAY_SECONDS} seconds")
    return delay or None


async def push_later(buffer: Buffer, body: PushBody, items: list[Item]) -> Response:
    """Push with QoS 0: answer as soon as all items are written to a file."""
    if body.buffer_ms is not None and not 0 <= body.buffer_ms <= MAX_BUFFER_MS:
        raise InvalidRequest(f"bufferMs must be between 0 and {MAX_BUFFER_MS}")
    if body.buffer_max is not None and body.buffer_max < 1:
        raise InvalidRequest("bufferMax must be at least 1")
    results = await buffer.push(items, body.buffer_ms, body.buffer_max)
    if any(result.status == "full" for result in results):
        return push_answer(items, results)  # the disk is full: they went to the database
    return json_response(Later(True, True, buffer.healthy), 201)


def push_answer(items: Sequence[Item], results: Sequence[ItemOutcome]) -> Response:
    """Return 201, or 429 with all results if a queue was full."""
    if {result.status for result in results} <= ENCODES_ITSELF:
        return Response(201, _encode(results))
    answers = push_answers(items, results)
    full = [result.index for result in results if result.status == "full"]
    if full:
        names = ", ".join(sorted({items[index].queue for index in full}))
        text = f"{len(full)} of {len(results)} messages do not fit, queue full (maxSize): {names}"
        return error_response(429, text, (("Retry-After", "1"),), full=full, results=answers)
    return Response(201, _encode(answers))


def push_answers(
    items: Sequence[Item], results: Sequence[ItemOutcome]
) -> list[ItemOutcome | NotQueued]:
    """Return the answer for each item."""
    return [_answer(item, result) for item, result in zip(items, results, strict=True)]


def _answer(item: Item, result: ItemOutcome) -> ItemOutcome | NotQueued:
    if result.status in ENCODES_ITSELF:
        return result
    full = result.status == "full"
    return NotQueued(
        result.index,
        "failed" if full else result.status,
        item.queue,
        item.partition,
        result.transaction_id,
        f"queue '{item.queue}' is full (maxSize)" if full else "",
    )
