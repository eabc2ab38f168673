"""Dead letters: list, put back, purge. A dead letter keeps its own copy of the message, so
retention does not lose it.

Putting one back makes exactly that message available again to exactly the group that gave it up. If
retention has deleted the message meanwhile, a copy is appended to the partition, which then all
groups see.
"""

from collections.abc import AsyncIterator
from dataclasses import astuple, dataclass
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from penstock.contract.dead_letters import DeadLetterMessage, DeadLetters
from penstock.database import struct_of
from penstock.errors import Conflict
from penstock.queues.context import QueueContext
from penstock.queues.schema import query

LISTING = query("dead_letters")
ERRORS = query("dead_letter_errors")
COUNT = query("dead_letter_count")
PURGE = query("dead_letter_purge")
NEXT = query("dead_letter_step")
REQUEUED = query("dead_letter_requeued")
LETTERS_PER_STEP = 500
COUNTED = 100_000  # letters that are counted exactly (dead_letter_count.sql)
MAX_PAGE_BYTES = 16 << 20  # payloads in one page; those beyond are left out and say so


@dataclass(slots=True)
class Which:
    """Which dead letters are meant; what is None does not restrict."""

    queue: str | None = None
    group: str | None = None
    partition: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    id: int | None = None
    error: str | None = None  # a part of it, in upper or lower case


class ErrorCount(msgspec.Struct, rename="camel"):
    error: str
    count: int
    last_seen: datetime


class DeadLetterErrors(msgspec.Struct):
    affected_partitions: int
    top_errors: list[ErrorCount]


class DeadLetterStore:
    def __init__(self, context: QueueContext) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._keys, self._waiting = context.keys, context.waiting

    async def listing(
        self, which: Which, limit: int = 100, offset: int = 0, before: int | None = None
    ) -> DeadLetters:
        """List dead letters, the newest failure first, with payloads up to MAX_PAGE_BYTES in all.
        `before` is the last letter of the previous page.
        """
        rows = await self._database.browse(
            LISTING, *astuple(which), limit, offset, MAX_PAGE_BYTES, before
        )
        return DeadLetters(
            messages=[self._entry(row) for row in rows], total=await self.count(which)
        )

    async def count(self, which: Which) -> int:
        """Return how many match; exact up to `COUNTED`."""
        rows = await self._database.browse(COUNT, *astuple(which))
        return int(rows[0][0])

    async def errors(self, which: Which, most: int = 10) -> DeadLetterErrors:
        """Return the errors of the newest 1000 letters, the most frequent first."""
        rows = await self._database.browse(ERRORS, *astuple(which), most)
        partitions = rows[0]["partitions"] if rows else 0
        return DeadLetterErrors(partitions, [struct_of(ErrorCount, row) for row in rows])

    async def requeue(self, which: Which) -> int:
        """Put dead letters back, as many as match; answers how many. One that cannot be put back
        (its queue is full, its group was deleted) stays a dead letter."""
        return sum([count async for count in self.requeue_steps(which)])

    async def requeue_steps(self, which: Which) -> AsyncIterator[int]:
        """Requeue like `requeue`, and yield after each step how many letters it requeued."""
        after = 0
        while True:
            read, back, after = await self._database.transact(partial(self._step, which, after))
            if which.id is not None and read and not back:
                raise Conflict(
                    "the dead letter cannot be put back: its queue is full, "
                    "or its group was deleted"
                )
            for queue, group in {(row["queue"], row["group_name"]) for row in back}:
                self._waiting.wake(queue, LETTERS_PER_STEP, group)
            yield len(back)
            if read < LETTERS_PER_STEP:
                return

    async def purge(self, which: Which) -> int:
        """Delete dead letters, as many as match; answers how many."""
        return sum([count async for count in self.purge_steps(which)])

    async def purge_steps(self, which: Which) -> AsyncIterator[int]:
        """Delete like `purge`, and yield after each step how many letters it deleted."""
        while True:
            ((removed,),) = await self._database.fetch(PURGE, *astuple(which), LETTERS_PER_STEP)
            yield removed
            if removed < LETTERS_PER_STEP:
                return

    async def _step(self, which: Which, after: int, connection: Any) -> tuple[int, list[Any], int]:
        """Put back letters behind `after`: how many it read, those put back, the last."""
        rows = await connection.fetch(NEXT, *astuple(which), after, LETTERS_PER_STEP)
        await connection.execute(
            "SELECT 1 FROM partitions WHERE id = ANY ($1) ORDER BY id FOR NO KEY UPDATE",
            [row["partition_id"] for row in rows],
        )
        locked = await connection.fetch(
            "SELECT id FROM dead_letters WHERE id = ANY ($1) FOR UPDATE",
            [row["id"] for row in rows],
        )
        present = {row["id"] for row in locked}
        wanted: dict[tuple[int, int], list[Any]] = {}
        for row in rows:
            if row["id"] in present and row["group_name"] is not None:
                wanted.setdefault((row["partition_id"], row["group_id"]), []).append(row)
        back: list[Any] = []
        for (partition, group), letters in sorted(wanted.items()):
            numbers = [letter["seq"] for letter in letters]
            seqs = await connection.fetchval(
                "SELECT queue_unsettle($1, $2, $3)", partition, group, numbers
            )
            back += [
                letter
                for letter in letters
                if letter["seq"] in seqs or await self._append(connection, partition, letter)
            ]
        ids = [letter["id"] for letter in back]
        await connection.execute(REQUEUED, ids)
        await connection.execute("DELETE FROM dead_letters WHERE id = ANY ($1)", ids)
        return len(rows), back, rows[-1]["id"] if rows else after

    async def _append(self, connection: Any, partition: int, letter: Any) -> bool:
        """Store a letter's copy at the end of its partition, unless the message is there and the
        group will get it anyway. False: it does not fit, or its queue is encrypted now and the
        letter is not."""
        sql = "SELECT true FROM messages WHERE partition_id = $1 AND seq = $2"
        if await connection.fetchval(sql, partition, letter["seq"]):
            return True
        row = await connection.fetchrow(
            """SELECT p.* FROM dead_letters d CROSS JOIN LATERAL append(
                 p_ids => ARRAY[d.partition_id], p_starts => ARRAY[0],
                 p_transactions => ARRAY[d.transaction_id], p_checked => true,
                 p_traces => ARRAY[d.trace_id], p_producers => ARRAY[d.producer],
                 p_keys => ARRAY[d.key_id],
                 p_payloads => d.payload, p_payload_bounds => ARRAY[1, 1 + octet_length(d.payload)],
                 p_headers => d.headers, p_header_bounds => ARRAY[1, 1 + octet_length(d.headers)]) p
                WHERE d.id = $1""",
            letter["id"],
        )
        return row["statuses"] is None or row["statuses"][0] in ("queued", "duplicate")

    def _entry(self, row: Any) -> DeadLetterMessage:
        payload = self._keys.payload_of(row)
        return struct_of(
            DeadLetterMessage,
            row,
            message_id=self._catalog.message_uuid(row["partition_id"], row["seq"]),
            partition_id=self._catalog.partition_uuid(row["partition_id"]),
            data=payload,
            data_omitted=payload is None,
            headers=self._keys.headers_of(row) or {},
        )
