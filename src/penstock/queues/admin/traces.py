"""Traces: notes of consumers about messages, listed by message or by name."""

from datetime import datetime
from typing import Any

import msgspec

from penstock.database import struct_of
from penstock.errors import NotFound
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.checks import check_name, check_text
from penstock.queues.context import QueueContext
from penstock.queues.schema import query

# payloads in one page; those beyond are null, as are those of deleted messages
MAX_PAGE_BYTES = 16 << 20

ADD = query("trace_add")
OF_MESSAGE = query("message_traces")
BY_NAME = query("traces_by_name")
NAMES = query("trace_names")


class TracedMessage(msgspec.Struct):
    """The message a trace is about."""

    transaction_id: str | None  # None, like the payload: it was deleted
    partition_id: str
    queue: str
    partition: str
    payload: bytes | None


class Trace(msgspec.Struct):
    id: str
    event_type: str
    data: bytes
    group: str
    worker: str | None
    created_at: datetime
    names: list[str]
    message: TracedMessage | None  # where traces of many messages are listed


class TracePage(msgspec.Struct):
    traces: list[Trace]
    total: int


class TraceName(msgspec.Struct):
    trace_name: str
    trace_count: int
    message_count: int
    last_seen: datetime


class TraceNames(msgspec.Struct):
    names: list[TraceName]
    total: int


class Traces:
    def __init__(self, context: QueueContext) -> None:
        self._database, self._catalog, self._keys = context.database, context.catalog, context.keys

    async def add(
        self,
        partition_id: str,
        transaction_id: str,
        data: bytes,
        *,
        group: str = QUEUE_MODE,
        event_type: str = "info",
        names: list[str] | None = None,
        worker: str | None = None,
    ) -> str:
        """Note something about a message; answers the trace's id."""
        for text in (group, event_type):
            check_text("trace", text)
        for name in names or ():
            check_name("trace name", name)
        rows = await self._database.fetch(
            ADD,
            self._catalog.partition_id(partition_id),
            transaction_id,
            group,
            event_type,
            worker,
            data,
            names or [],
        )
        if not rows:
            raise NotFound("Message not found")
        return str(rows[0]["id"])

    async def of_message(self, partition_id: str, transaction_id: str) -> list[Trace]:
        """Return the traces of a message, the oldest first."""
        number = self._catalog.partition_id(partition_id)
        rows = await self._database.browse(OF_MESSAGE, number, transaction_id)
        return [_entry(row) for row in rows]

    async def by_name(self, name: str, limit: int = 100, offset: int = 0) -> TracePage:
        rows = await self._database.browse(BY_NAME, name, limit, offset, MAX_PAGE_BYTES)
        total = await self._database.browse(
            "SELECT count(*) FROM trace_names WHERE name = $1", name
        )
        return TracePage([self._with_message(row) for row in rows], total[0][0])

    def _with_message(self, row: Any) -> Trace:
        partition = self._catalog.partition_uuid(row["partition_id"])
        payload = self._keys.payload_of(row)
        return _entry(row, struct_of(TracedMessage, row, partition_id=partition, payload=payload))

    async def names(self, limit: int = 50, offset: int = 0) -> TraceNames:
        rows = await self._database.browse(NAMES, limit, offset)
        total = rows[0]["total"] if rows else 0
        return TraceNames([struct_of(TraceName, row) for row in rows], total)


def _entry(row: Any, message: TracedMessage | None = None) -> Trace:
    return struct_of(
        Trace,
        row,
        id=str(row["id"]),
        group=row["group_name"],
        created_at=row["at"],
        names=row["names"] or [],
        message=message,
    )
