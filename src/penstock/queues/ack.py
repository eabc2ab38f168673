"""Acknowledge and extend. Each message is answered on its own; repeating an acknowledgement changes
nothing. How they get to the database together with pops is in `exchange`.
"""

import asyncio
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from penstock.errors import InvalidRequest, PenstockError
from penstock.metrics import Counter
from penstock.queues.catalog import Catalog, check_text
from penstock.queues.context import QueueContext
from penstock.queues.failures import Failures
from penstock.queues.merge import SLICE, Fetch, Merger, Pending
from penstock.queues.types import Ack, Acked, Extended

SQL = "SELECT * FROM queue_ack($1, $2, $3, $4, $5, $6, $7)"
STATUSES = {
    "completed": "completed",
    "success": "completed",
    "failed": "failed",
    "retry": "retry",
    "dlq": "dlq",
}
NOT_FOUND = "Message not found"
NO_LEASE = "Invalid or expired lease"
ERRORS = {"missing": NOT_FOUND, "lease": NO_LEASE}
MAX_ERROR_CHARS = 10_000


class Prepared:
    """Acknowledgements as `queue_ack` takes them, and their answers as far as they are there."""

    __slots__ = ("_acks", "_places", "answers", "arguments")

    def __init__(self, acks: list[Ack]) -> None:
        self._acks = acks
        self._places: list[int] = []  # of those that are sent
        self.answers: list[Any] = [None] * len(acks)
        self.arguments: tuple[Any, ...] | None = None  # None: there is nothing to send

    @classmethod
    async def of(cls, acks: list[Ack], catalog: Catalog) -> "Prepared":
        prepared = cls(acks)
        await prepared._prepare(catalog)
        return prepared

    async def _prepare(self, catalog: Catalog) -> None:
        starts: list[int] = []
        runs: list[tuple[int | None, str, UUID | None, str | None, str | None]] = []
        acks, answers, places = self._acks, self.answers, self._places
        last, error = None, None
        for place, ack in enumerate(acks):
            if place and not place % SLICE:
                await asyncio.sleep(0)
            key = ack.partition_id, ack.lease_id, ack.group, ack.status, ack.error
            if key != last:
                last = key
                status = STATUSES.get(ack.status)
                lease = uuid_of(ack.lease_id) if ack.lease_id else None
                partition = catalog.partition_id(ack.partition_id)
                error = (
                    f"Unknown status: {ack.status}" if status is None
                    else NO_LEASE if ack.lease_id and lease is None
                    else NOT_FOUND if partition is None
                    else None
                )  # fmt: skip
                if error is None:
                    starts.append(len(places))
                    text = ack.error and ack.error[:MAX_ERROR_CHARS]
                    runs.append((partition, ack.group, lease, status, text))
            if error is None:
                places.append(place)
            else:
                answers[place] = Acked(ack.transaction_id, False, error)
        if places:
            self.arguments = (
                starts,
                *zip(*runs, strict=True),
                [acks[place].transaction_id for place in places],
            )

    async def fill(self, row: Iterable[Any]) -> None:
        """Take over a row of the answer."""
        items, outcomes, queue, partition, released, dead, more = row
        acks, answers, places = self._acks, self.answers, self._places
        if len(items) > SLICE:
            await asyncio.sleep(0)
        if outcomes is None:
            for item in items:
                place = places[item - 1]
                transaction, free = acks[place].transaction_id, released[0]
                answers[place] = Acked(transaction, True, None, queue, partition, free, more=more)
            return
        for item, outcome, free, buried in zip(items, outcomes, released, dead, strict=True):
            place, error = places[item - 1], ERRORS.get(outcome)
            answers[place] = Acked(
                acks[place].transaction_id,
                error is None,
                error,
                queue,
                partition,
                free,
                buried,
                outcome == "ok",
            )


class Acknowledger:
    def __init__(self, context: QueueContext, failures: Failures, acked: Counter) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._signals = context.signals
        self._failures = failures
        self.acked = acked
        self._extender: Merger[tuple[UUID, int], Extended] = Merger(
            self._extend, limit=1000, slots=1
        )

    async def extend(self, lease_id: str, seconds: int) -> Extended:
        lease = uuid_of(lease_id)
        if lease is None:
            return Extended(lease_id, False, "Lease not found")
        if not 0 < seconds <= 31_536_000:
            raise InvalidRequest("seconds must be between 1 and 31536000")
        return await self._extender.submit(Pending((lease, seconds)))

    async def acknowledge(self, fetch: Fetch, acks: list[Ack]) -> list[Acked]:
        """Answer messages through `fetch` (of the pool or of a transaction)."""
        prepared = await Prepared.of(acks, self._catalog)
        if prepared.arguments is not None:
            for row in await fetch(SQL, *prepared.arguments):
                await prepared.fill(row)
        return prepared.answers

    def announce(self, acks: list[Ack], answers: list[Acked]) -> None:
        """Count, and wake pops that may take what became free."""
        freed: dict[tuple[str, str], set[str]] = {}
        counted: dict[tuple[str, str], int] = {}
        for ack, answer in zip(acks, answers, strict=True):
            if answer.success and answer.queue is not None:
                if answer.changed:
                    key = answer.queue, STATUSES[ack.status]
                    counted[key] = counted.get(key, 0) + 1
                    if key[1] != "completed":
                        self._failures.note(ack)
                if answer.more and (answer.lease_released or ack.status in ("failed", "retry")):
                    freed.setdefault((answer.queue, ack.group), set()).add(answer.partition or "")
        for (queue, status), count in counted.items():
            self.acked.add(count, queue, status)
        for (queue, group), partitions in freed.items():
            self._signals.available(queue, len(partitions), group)

    async def _extend(
        self, leases: list[tuple[UUID, int]], again: bool
    ) -> list[Extended | PenstockError]:
        del again  # extending twice extends once
        rows = await self._database.fetch(
            "SELECT * FROM queue_extend($1, $2)",
            [lease for lease, _ in leases],
            [seconds for _, seconds in leases],
        )
        errors = {"missing": "Lease not found", "expired": "Lease already expired"}
        return [
            Extended(
                str(lease), row["outcome"] == "ok", errors.get(row["outcome"]), row["expires_at"]
            )
            for (lease, _), row in zip(leases, sorted(rows), strict=True)
        ]


def check(ack: Ack) -> None:
    check_text("transactionId", ack.transaction_id)
    check_text("consumerGroup", ack.group)
    if ack.error:
        check_text("error", ack.error)


def uuid_of(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
