"""List, show and cancel delayed messages. `background/delayed.py` delivers them."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.contract.messages import ScheduledMessage, ScheduledMessages
from penstock.database import struct_of
from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.times import utc_time
from penstock.queues.checks import check_text
from penstock.queues.context import QueueContext
from penstock.queues.schema import query

LISTING = query("scheduled")
START = (datetime(1, 1, 1, tzinfo=UTC), 0)
ROWS_PER_STEP = 5000


class DelayedMessages:
    def __init__(self, context: QueueContext) -> None:
        self._database, self._catalog, self._keys = context.database, context.catalog, context.keys

    async def listing(
        self,
        queue: str | None = None,
        partition: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> ScheduledMessages:
        """List delayed messages, the next due first, without payloads. `cursor` is the `next` of
        the previous page.
        """
        after = _page_start(cursor)
        rows = await self._database.browse(LISTING, queue, partition, limit, *after)
        last = rows[-1] if len(rows) == limit else None
        return ScheduledMessages(
            [self._waiting(row) for row in rows],
            None if last is None else f"{last['due_at'].isoformat()}_{last['id']}",
        )

    async def detail(self, queue: str, partition: str, transaction_id: str) -> ScheduledMessage:
        """Return a delayed message with its payload."""
        number = await self._partition(queue, partition, transaction_id)
        rows = await self._database.browse(
            """SELECT s.*, $3::text AS queue, $4::text AS partition FROM scheduled_messages s
                WHERE s.partition_id = $1 AND s.transaction_id = $2
                  AND hashtextextended(s.transaction_id, 0) = hashtextextended($2, 0)""",
            *(number, transaction_id, queue, partition),
        )
        if not rows:
            raise _missing(queue, partition, transaction_id)
        return self._waiting(rows[0], self._keys.payload_of(rows[0]))

    async def cancel(self, queue: str, partition: str, transaction_id: str) -> None:
        """Remove one before it is due; NotFound when it does not wait (any more)."""
        number = await self._partition(queue, partition, transaction_id)
        rows = await self._database.fetch(
            "SELECT queue_cancel(ARRAY[$1::bigint], $2, 1)", number, transaction_id
        )
        if not rows[0][0]:
            raise _missing(queue, partition, transaction_id)

    async def clear(self, queue: int, partition: int | None) -> int:
        """Remove all that waits for a queue or a partition of it; how many."""
        done = 0
        while True:
            numbers = [partition]
            if partition is None:
                rows = await self._database.fetch(
                    """SELECT DISTINCT s.partition_id FROM (
                         SELECT s.partition_id FROM scheduled_messages s WHERE s.queue_id = $1
                          ORDER BY s.due_at LIMIT $2) s ORDER BY 1""",
                    queue,
                    ROWS_PER_STEP,
                )
                numbers = [row[0] for row in rows]
            rows = await self._database.fetch(
                "SELECT queue_cancel($1, NULL, $2)", numbers, ROWS_PER_STEP
            )
            if not rows[0][0]:
                return done
            done += rows[0][0]

    async def _partition(self, queue: str, partition: str, transaction_id: str) -> int:
        for kind, text in (
            ("queue", queue),
            ("partition", partition),
            ("transactionId", transaction_id),
        ):
            check_text(kind, text)
        number = await self._catalog.partition(queue, partition)
        if number is None:
            raise _missing(queue, partition, transaction_id)
        return number

    def _waiting(
        self, row: Any, payload: bytes | msgspec.UnsetType = msgspec.UNSET
    ) -> ScheduledMessage:
        return struct_of(
            ScheduledMessage,
            row,
            partition_id=self._catalog.partition_uuid(row["partition_id"]),
            deliver_at=row["due_at"],
            trace_id=row["trace_id"] and str(row["trace_id"]),
            encrypted=row["key_id"] is not None,
            headers=self._keys.headers_of(row) or {},
            payload=payload,
        )


def _missing(queue: str, partition: str, transaction_id: str) -> NotFound:
    return NotFound(
        f"no message '{transaction_id}' waits for its time in partition '{partition}' of queue "
        f"'{queue}': it was delivered or cancelled, or never pushed"
    )


def _page_start(cursor: str | None) -> tuple[datetime, int]:
    if not cursor:
        return START
    moment, _, number = cursor.rpartition("_")
    try:
        due, last = utc_time(moment), int(number)
        if not 0 <= last < 1 << 62:
            raise ValueError(cursor)
    except ValueError:
        raise InvalidRequest("cursor must be the `next` of the page before") from None
    return due, last
