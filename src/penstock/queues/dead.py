"""Dead letters: list, put back, purge. A dead letter keeps its own copy of the message, so
retention does not lose it.

Putting one back makes exactly that message available again to exactly the group that gave it up. If
retention has deleted the original meanwhile, a copy is appended to the partition, which then all
groups see.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from penstock.database import Database
from penstock.errors import Conflict
from penstock.queues.catalog import Catalog
from penstock.queues.crypto import Keys, opened_headers
from penstock.queues.schema import query
from penstock.queues.signals import Signals

LISTING = query("dead_letters")
ERRORS = query("dead_letter_errors")
COUNT = query("dead_letter_count")
PURGE = query("dead_letter_purge")
NEXT = query("dead_letter_step")
REQUEUED = query("dead_letter_requeued")
STEP = 500  # letters
COUNTED = 100_000  # letters that are counted exactly (dead_letter_count.sql)
MOST_BYTES = 16 << 20  # payloads in one page; those beyond are left out and say so


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

    def args(self) -> tuple[Any, ...]:
        return self.queue, self.group, self.partition, self.since, self.until, self.id


class DeadLetter(msgspec.Struct):
    number: int  # by which it is put back or purged alone
    message_id: str
    transaction_id: str
    partition_id: str
    queue: str
    partition: str
    group: str | None  # None: it was deleted
    error: str
    attempts: int
    payload: bytes | None  # None: the page has enough already
    producer: str | None
    created_at: datetime  # when the message was pushed
    failed_at: datetime
    headers: dict[str, str] | None


class DeadLetterPage(msgspec.Struct):
    letters: list[DeadLetter]
    total: int  # that match


class ErrorCount(msgspec.Struct):
    error: str
    count: int
    last_seen: datetime


class DeadLetterErrors(msgspec.Struct):
    affected_partitions: int
    top_errors: list[ErrorCount]


class DeadLetters:
    def __init__(self, database: Database, catalog: Catalog, keys: Keys, signals: Signals) -> None:
        self._database, self._catalog, self._keys, self._signals = database, catalog, keys, signals

    async def listing(
        self, which: Which, limit: int = 100, offset: int = 0, before: int | None = None
    ) -> DeadLetterPage:
        """The newest failure first, with payloads up to MOST_BYTES of them. `before`: those older
        than this letter, for the next page."""
        await self._catalog.load_installation()
        rows = await self._database.browse(
            LISTING,
            *which.args(),
            limit,
            offset,
            MOST_BYTES,
            before,
            which.error,
        )
        return DeadLetterPage([self._entry(row) for row in rows], await self.count(which))

    async def count(self, which: Which) -> int:
        """How many match, exact up to `COUNTED`."""
        rows = await self._database.browse(COUNT, *which.args(), which.error)
        return int(rows[0][0])

    async def errors(self, which: Which, most: int = 10) -> DeadLetterErrors:
        """What the newest letters died of, the most frequent first, and in how many partitions; of
        1000 letters.
        """
        rows = await self._database.browse(
            ERRORS,
            *which.args(),
            most,
            which.error,
        )
        return DeadLetterErrors(
            rows[0]["partitions"] if rows else 0,
            [ErrorCount(row["error"], row["n"], row["last"]) for row in rows],
        )

    async def requeue(self, which: Which) -> int:
        """Put dead letters back, as many as match; answers how many. One that cannot be put back
        (its queue is full, its group was deleted) stays a dead letter."""
        return sum([count async for count in self.requeue_steps(which)])

    async def requeue_steps(self, which: Which) -> AsyncIterator[int]:
        """As `requeue`; says after each step how many it put back."""
        after = 0
        while True:
            looked, back, after = await self._database.transact(partial(self._step, which, after))
            if which.id is not None and looked and not back:
                raise Conflict(
                    "the dead letter cannot be put back: its queue is full, "
                    "or its group was deleted"
                )
            for queue, group in {(row["queue"], row["group_name"]) for row in back}:
                self._signals.available(queue, STEP, group)
            yield len(back)
            if looked < STEP:
                return

    async def purge(self, which: Which) -> int:
        """Delete dead letters, as many as match; answers how many."""
        return sum([count async for count in self.purge_steps(which)])

    async def purge_steps(self, which: Which) -> AsyncIterator[int]:
        """As `purge`; says after each step how many it deleted."""
        while True:
            rows = await self._database.fetch(PURGE, *which.args(), STEP, which.error)
            yield rows[0][0]
            if rows[0][0] < STEP:
                return

    async def _step(self, which: Which, after: int, connection: Any) -> tuple[int, list[Any], int]:
        """Put back the next ones behind the letter `after`: how many were looked at, those put
        back, the last of them.
        """
        rows = await connection.fetch(
            NEXT,
            *which.args(),
            after,
            STEP,
            which.error,
        )
        numbers = sorted({row["partition_id"] for row in rows})
        await connection.execute(
            "SELECT 1 FROM partitions WHERE id = ANY ($1) ORDER BY id FOR NO KEY UPDATE", numbers
        )
        present = {
            row["id"]
            for row in await connection.fetch(
                "SELECT id FROM dead_letters WHERE id = ANY ($1) FOR UPDATE",
                [row["id"] for row in rows],
            )
        }
        wanted: dict[tuple[int, int], list[Any]] = {}
        for row in rows:
            if row["id"] in present and row["group_name"] is not None:
                wanted.setdefault((row["partition_id"], row["group_id"]), []).append(row)
        back: list[Any] = []
        for (partition, group), letters in sorted(wanted.items()):
            seqs = await connection.fetchval(
                "SELECT queue_unsettle($1, $2, $3)",
                partition,
                group,
                [letter["seq"] for letter in letters],
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
        if await connection.fetchval(
            "SELECT true FROM messages WHERE partition_id = $1 AND seq = $2",
            partition,
            letter["seq"],
        ):
            return True
        row = await connection.fetchrow(
            """SELECT p.* FROM dead_letters d CROSS JOIN LATERAL queue_push(
                 ARRAY[d.partition_id], ARRAY[0], ARRAY[d.transaction_id], ARRAY[true],
                 ARRAY[d.trace_id], ARRAY[d.producer], ARRAY[d.key_id],
                 d.payload, ARRAY[1, 1 + octet_length(d.payload)],
                 d.headers, ARRAY[1, 1 + octet_length(d.headers)]) p
                WHERE d.id = $1""",
            letter["id"],
        )
        number = row["heads"][0] if row["heads"] is not None else row["answers"][0]
        return bool(
            number
        )  # queued, or there is one with this transaction id already; not 0 (full) or NULL

    def _entry(self, row: Any) -> DeadLetter:
        payload: bytes = row["payload"]
        if row["key_id"] is not None and not row["omitted"]:
            payload = self._keys.open(row["partition_id"], row["key_id"], payload)
        return DeadLetter(
            number=row["id"],
            message_id=self._catalog.message_uuid(row["partition_id"], row["seq"]),
            transaction_id=row["transaction_id"],
            partition_id=self._catalog.partition_uuid(row["partition_id"]),
            queue=row["queue"],
            partition=row["partition"],
            group=row["group_name"],
            error=row["error"],
            attempts=row["attempts"],
            payload=None if row["omitted"] else payload,
            producer=row["producer"],
            created_at=row["created_at"],
            failed_at=row["failed_at"],
            headers=opened_headers(self._keys, row),
        )
