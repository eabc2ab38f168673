"""Acknowledge and extend. Each message is settled on its own; repeating an acknowledgement changes nothing."""

from uuid import UUID

from penstock.database import Database
from penstock.errors import InvalidRequest, PenstockError
from penstock.metrics import Counter
from penstock.queues.catalog import Catalog, check_text
from penstock.queues.merge import Merger
from penstock.queues.push import Fetch
from penstock.queues.signals import Signals
from penstock.queues.types import Ack, Acked, Extended

SQL = "SELECT * FROM queue_ack($1, $2, $3, $4, $5, $6)"
STATUSES = {"completed": "completed", "success": "completed", "failed": "failed", "retry": "retry", "dlq": "dlq"}
NOT_FOUND = "Message not found"
NO_LEASE = "Invalid or expired lease"
ERRORS = {"missing": NOT_FOUND, "lease": NO_LEASE}
LONGEST_ERROR = 10_000


class Acknowledger:
    def __init__(self, database: Database, catalog: Catalog, signals: Signals, acked: Counter, merge_max: int) -> None:
        self._database, self._catalog, self._signals, self._acked = database, catalog, signals, acked
        self.merger: Merger[list[Ack], list[Acked]] = Merger(self._run, size=len, limit=merge_max, slots=2, enough=200)
        self._extender: Merger[tuple[UUID, int], Extended] = Merger(self._extend, size=_one, limit=1000, slots=1)

    async def ack(self, acks: list[Ack]) -> list[Acked]:
        if not acks:
            return []
        for ack in acks:
            check(ack)
        return await self.merger.submit(acks)

    async def extend(self, lease_id: str, seconds: int) -> Extended:
        lease = uuid_of(lease_id)
        if lease is None:
            return Extended(lease_id, False, "Lease not found")
        if not 0 < seconds <= 31_536_000:
            raise InvalidRequest("seconds must be between 1 and 31536000")
        return await self._extender.submit((lease, seconds))

    async def _run(self, requests: list[list[Ack]], again: bool) -> list[list[Acked] | PenstockError]:
        del again
        acks = [ack for request in requests for ack in request]
        answers = await self.settle(self._database.fetch, acks)
        self.announce(acks, answers)
        results: list[list[Acked] | PenstockError] = []
        begin = 0
        for request in requests:
            results.append(answers[begin : begin + len(request)])
            begin += len(request)
        return results

    async def settle(self, fetch: Fetch, acks: list[Ack]) -> list[Acked]:
        """Settle through `fetch` (of the pool or of a transaction)."""
        answers: list[Acked] = [Acked(ack.transaction_id, False, NOT_FOUND) for ack in acks]
        partitions, leases, places = [], [], []
        numbers: dict[str, int | None] = {}  # a batch repeats a few ids many times
        uuids: dict[str | None, UUID | None] = {None: None, "": None}
        for place, ack in enumerate(acks):
            status = STATUSES.get(ack.status)
            if ack.partition_id not in numbers:
                numbers[ack.partition_id] = self._catalog.partition_id(ack.partition_id)
            if ack.lease_id not in uuids:
                uuids[ack.lease_id] = uuid_of(ack.lease_id or "")
            partition, lease = numbers[ack.partition_id], uuids[ack.lease_id]
            if status is None:
                answers[place].error = f"Unknown status: {ack.status}"
            elif ack.lease_id and lease is None:
                answers[place].error = NO_LEASE
            elif partition is not None:
                partitions.append(partition)
                leases.append(lease)
                places.append(place)
        if places:
            chosen = [acks[place] for place in places]
            rows = await fetch(
                SQL,
                partitions,
                [ack.group for ack in chosen],
                [ack.transaction_id for ack in chosen],
                leases,
                [STATUSES[ack.status] for ack in chosen],
                [ack.error[:LONGEST_ERROR] if ack.error else None for ack in chosen],
            )
            for items, outcomes, queue, partition, released, dead in rows:
                if outcomes is None:
                    for item in items:
                        place = places[item - 1]
                        answers[place] = Acked(acks[place].transaction_id, True, None, queue, partition, released[0])
                    continue
                for item, outcome, free, buried in zip(items, outcomes, released, dead, strict=True):
                    place, error = places[item - 1], ERRORS.get(outcome)
                    answers[place] = Acked(
                        acks[place].transaction_id, error is None, error, queue, partition, free, buried
                    )
        return answers

    def announce(self, acks: list[Ack], answers: list[Acked]) -> None:
        """Count, and wake pops that may take what became free."""
        freed: dict[tuple[str, str], set[str]] = {}
        counted: dict[tuple[str, str], int] = {}
        for ack, answer in zip(acks, answers, strict=True):
            if answer.success and answer.queue is not None:
                key = answer.queue, STATUSES[ack.status]
                counted[key] = counted.get(key, 0) + 1
                if answer.lease_released or ack.status in ("failed", "retry"):
                    freed.setdefault((answer.queue, ack.group), set()).add(answer.partition or "")
        for (queue, status), count in counted.items():
            self._acked.add(count, queue, status)
        for (queue, group), partitions in freed.items():
            self._signals.available(queue, len(partitions), group)

    async def _extend(self, leases: list[tuple[UUID, int]], again: bool) -> list[Extended | PenstockError]:
        del again  # extending twice extends once
        rows = await self._database.fetch(
            "SELECT * FROM queue_extend($1, $2)", [lease for lease, _ in leases], [seconds for _, seconds in leases]
        )
        errors = {"missing": "Lease not found", "expired": "Lease already expired"}
        return [
            Extended(str(lease), row["outcome"] == "ok", errors.get(row["outcome"]), row["expires_at"])
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


def _one(_: object) -> int:
    return 1
