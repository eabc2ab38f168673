"""Stored messages: list with a status derived per group, detail, delete, retry, move to the dead
letters.
"""

from datetime import datetime, timedelta
from typing import Any

import msgspec

from penstock.contract.messages import (
    MessageGroup,
    MessageWithPayload,
    StoredMessage,
    StoredMessages,
)
from penstock.database import struct_of
from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.checks import check_group, check_text
from penstock.queues.context import QueueContext
from penstock.queues.options import options_of
from penstock.queues.schema import query
from penstock.queues.settling import AckBatch
from penstock.queues.types import Ack

IN_QUEUES = query("messages")
IN_PARTITION = query("partition_messages")
MAX_SIFTED = 10_000  # messages in one page that is asked for a status, which is in no index
START = (str((1 << 64) - 1), 1 << 62, 1 << 62)  # before everything

MESSAGE = query("message")
DELETE_LETTERS = query("message_dead_letters_purge")
MESSAGE_GROUPS = query("message_groups")


class MessageFilter(msgspec.Struct, kw_only=True):
    """Which messages are meant; what is None does not restrict."""

    queue: str | None = None
    partition: str | None = None
    namespace: str | None = None
    task: str | None = None
    state: str | None = None  # waiting, leased, completed, dead_letter
    since: datetime | None = None
    until: datetime | None = None


class Messages:
    def __init__(self, context: QueueContext) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._keys, self._waiting = context.keys, context.waiting
        self._calls = context.calls

    async def listing(
        self,
        which: MessageFilter,
        limit: int = 200,
        offset: int = 0,
        cursor: str | None = None,
    ) -> StoredMessages:
        """List messages, the newest first, without payloads. Without a time, look back one hour.
        `cursor` is the `next` of the previous page; it is None at the end.
        """
        after = page_start(cursor)
        number = None
        if which.partition is not None and which.queue is not None:
            number = await self._catalog.partition(which.queue, which.partition) or 0
        now = (await self._database.browse("SELECT clock_timestamp()"))[0][0]
        until = which.until or now + timedelta(minutes=1)
        since = which.since or now - timedelta(hours=1)
        entries: list[StoredMessage] = []
        sifted = which.state is not None or (which.partition is not None and number is None)
        most = offset + (MAX_SIFTED if sifted else limit)
        source: tuple[str, Any] = (
            (IN_QUEUES, which.queue) if number is None else (IN_PARTITION, number)
        )
        rows, behind = await self._database.browse_standby(
            *source, which.namespace, which.task, since, until, most, QUEUE_MODE, *after
        )
        last, more = None, len(rows) >= most
        for row in rows:
            if len(entries) == offset + limit:
                more = True
                break
            last = f"{row['xid']}.{row['seq']}.{row['partition_id']}"
            if which.partition is not None and row["partition"] != which.partition:
                continue
            entry = self._entry(row)
            if which.state is None or entry.state == which.state:
                entries.append(entry)
        return StoredMessages(
            messages=entries[offset:],
            queue_mode=any(row["has_queue_mode"] for row in rows),
            groups=max((row["groups"] for row in rows), default=0),
            next=last if more else None,
            behind_seconds=behind,
        )

    async def detail(self, partition_id: str, transaction_id: str) -> MessageWithPayload:
        """Return a message with its payload and its state in each group."""
        row = await self._find(partition_id, transaction_id)
        key = row["partition_id"], row["seq"]
        stored = await self._database.browse(MESSAGE, *key, QUEUE_MODE)
        if not stored:
            raise NotFound("Message not found")
        message = stored[0]
        number = message["queue_id"]
        (queue,) = await self._database.browse("SELECT * FROM queues WHERE id = $1", number)
        groups = await self._database.browse(MESSAGE_GROUPS, *key, number)
        dead = next((group for group in groups if group["error"] is not None), None)
        return struct_of(
            MessageWithPayload,
            message,
            **self._ids(message),
            queue=queue["name"],
            namespace=queue["namespace"],
            task=queue["task"],
            options=options_of(queue),
            state=_state(message),
            payload=self._keys.payload_of(message),
            encrypted=message["key_id"] is not None,
            error=dead["error"]
            if dead
            else next((g["attempt_error"] for g in groups if g["attempts"]), None),
            attempts=max((g["dead_attempts"] or g["attempts"] or 0 for g in groups), default=0),
            groups=[
                MessageGroup(
                    group["name"],
                    bool(group["consumed"]),
                    group["next_expiry"] if group["leased"] else None,
                )
                for group in groups
            ],
        )

    async def delete(self, partition_id: str, transaction_id: str) -> bool:
        try:
            row = await self._find(partition_id, transaction_id)
        except NotFound:
            return False
        await self._database.fetch(DELETE_LETTERS, row["partition_id"], row["seq"])
        rows = await self._database.fetch(
            "SELECT queue_remove(ARRAY[$1::bigint], ARRAY[$2::bigint], ARRAY[$2::bigint], false)",
            row["partition_id"],
            row["seq"],
        )
        return bool(rows[0][0])

    async def retry(self, partition_id: str, transaction_id: str, group: str | None = None) -> int:
        """Make a message available again to groups (or one) that finished with it; how many."""
        row = await self._find(partition_id, transaction_id)
        done = 0
        for one in await self._groups(row, group):
            key = row["partition_id"], one["id"], row["seq"]
            ((seqs,),) = await self._database.fetch(
                "SELECT queue_unsettle($1, $2, ARRAY[$3::bigint])", *key
            )
            if seqs:
                done += 1
                await self._database.fetch(
                    """DELETE FROM dead_letters
                        WHERE partition_id = $1 AND group_id = $2 AND seq = $3""",
                    *key,
                )
        self._waiting.wake(row["queue"], 1)
        return done

    async def move_to_dead_letters(
        self,
        partition_id: str,
        transaction_id: str,
        group: str = QUEUE_MODE,
        error: str | None = None,
    ) -> bool:
        """Move a message to a group's dead letters; false when the group has finished with it."""
        row = await self._find(partition_id, transaction_id)
        number = row["partition_id"]
        check_group(group)
        check_text("error", error or "")
        if group != QUEUE_MODE and not await self._groups(row, group):
            raise NotFound(f"queue '{row['queue']}' has no group '{group}'")
        await self._database.fetch(
            "SELECT queue_subscribe($1, $2, $3, 'all', NULL)", row["queue_id"], group, number
        )
        reason = error or "Moved to the dead-letter queue by hand"
        ack = Ack(transaction_id, partition_id, None, "dlq", reason, group)
        batch = AckBatch([ack])
        runs = await batch.arguments(self._catalog)
        assert runs is not None  # the message was there a moment ago
        [acked] = await batch.results(await self._calls.settle(runs))
        self._waiting.wake(row["queue"], 1, group)
        return acked.dlq

    async def _groups(self, row: Any, group: str | None) -> list[Any]:
        return await self._database.read(
            """SELECT id FROM groups
                WHERE queue_id = $1 AND ($2::text IS NULL OR name = $2) ORDER BY id""",
            *(row["queue_id"], group),
        )

    async def _find(self, partition_id: str, transaction_id: str) -> Any:
        partition = self._catalog.partition_id(partition_id)
        rows = await self._database.read(
            """SELECT m.partition_id, m.seq, m.queue_id, q.name AS queue
                 FROM message_named($1, $2) m JOIN queues q ON q.id = m.queue_id
                WHERE q.deleted_at IS NULL""",
            partition,
            transaction_id,
        )
        if not rows:
            raise NotFound("Message not found")
        return rows[0]

    def _entry(self, row: Any) -> StoredMessage:
        queue_state = "none"
        if row["has_queue_mode"]:
            queue_state = _progress(row["queue_done"], row["queue_leased"])
        return struct_of(
            StoredMessage,
            row,
            **self._ids(row),
            state=_state(row),
            queue_state=queue_state,
            lease_expires_at=row["lease_expires_at"] if row["any_leased"] else None,
        )

    def _ids(self, row: Any) -> dict[str, Any]:
        """Return the fields of a message that are not shown as they are stored."""
        return {
            "id": self._catalog.message_uuid(row["partition_id"], row["seq"]),
            "partition_id": self._catalog.partition_uuid(row["partition_id"]),
            "trace_id": row["trace_id"] and str(row["trace_id"]),
            "headers": self._keys.headers_of(row) or {},
        }


def page_start(cursor: str | None) -> tuple[str, int, int]:
    """Return the key that the messages of a page come after, from the cursor of the request."""
    if not cursor:
        return START
    try:
        xid, seq, partition = map(int, cursor.split("."))
        if not (0 <= xid < 1 << 64 and 0 <= seq < 1 << 62 and 0 <= partition < 1 << 62):
            raise ValueError(cursor)
    except ValueError:
        raise InvalidRequest("cursor must be the `next` of the page before") from None
    return str(xid), seq, partition


def _state(row: Any) -> str:
    """Return the state of a message, from the result of `message_progress`."""
    if row["dead"]:
        return "dead_letter"
    all_done = 0 < row["groups"] == row["groups_done"]
    return _progress(row["queue_done"] if row["has_queue_mode"] else all_done, row["any_leased"])


def _progress(done: bool | None, leased: bool | None) -> str:
    return "completed" if done else "leased" if leased else "waiting"
