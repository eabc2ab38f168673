"""Exactly-once sinks of pipelines: a task claims its place, pushes its rows, and the batch is
committed.
"""

import msgspec

from penstock.buffer import Buffer
from penstock.contract.deliveries import PushItem
from penstock.protocol.sink_claims import Batch, Claim, Claimed, Commit, Row, Task, Text
from penstock.queues.admin.sinks import Sinks
from penstock.queues.types import Item
from penstock.wire.http.api.items import ItemLimit, slices
from penstock.wire.http.api.pushes import received
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import route


class SinkPush(msgspec.Struct):
    """Rows of a task that has claimed its place."""

    target: Text
    app: Text
    batch: Batch
    task: Task
    row: Row  # the number of the first one
    items: list[PushItem]
    last: bool = False  # the task has no more rows


class SinkPushed(msgspec.Struct):
    """How many of the task's rows are stored now."""

    rows: int


read_sink_push = body_decoder(SinkPush)


class SinksApi:
    tag = "internal"

    def __init__(self, sinks: Sinks, buffer: Buffer, max_items: int) -> None:
        self._sinks = sinks
        self._buffer = buffer
        self._limit = ItemLimit(max_items)

    @route("POST", "/api/v1/sinks/claim")
    async def claim(self, body: Claim) -> Claimed:
        """Ask whether a task of an exactly-once sink may write its rows; used by pipelines."""
        return await self._sinks.claim(body)

    @route("POST", "/api/v1/sinks/push", body=SinkPush, answer=SinkPushed)
    async def push(self, request: Request) -> Response:
        """Push rows of a task of an exactly-once sink, once; used by pipelines."""
        self._limit.check_body(request.body)
        body = read_sink_push(request.body)
        self._limit.check(len(body.items))
        items: list[Item] = []
        async for part in slices(body.items):
            items += received(part, request.subject)
        await self._buffer.wait_until_drained(items)
        place = Commit(body.target, body.app, body.batch, body.task)
        rows = await self._sinks.push(place, body.row, items, last=body.last)
        return json_response(SinkPushed(rows))

    @route("POST", "/api/v1/sinks/commit")
    async def commit(self, body: Commit) -> None:
        """Mark a sink's batch as complete: other rows of it are rejected; used by pipelines."""
        await self._sinks.commit(body)
