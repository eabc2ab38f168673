"""Acknowledgements on their way to `settle`, and the memory of what was delivered under a lease.

Acknowledgements that follow each other and differ in their transaction id only are a run; a run is
answered as one where everything is as usual, which is why a batch costs little more than a message.

The leases that a broker delivered are remembered, as long as there is room: which messages, and the
version that their cursor had then. A run that completes exactly these messages says so, and
`settle` completes the lease by that version, without reading a message. The memory is a shortcut
and never an authority: a cursor that changed since, for any reason, has another version and its
messages are looked up, in the same call.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from penstock.database.batching import SLICE
from penstock.errors import InvalidRequest
from penstock.protocol.queue_options import LARGEST
from penstock.queues.calls import Row, SettleArguments
from penstock.queues.catalog import QueueCatalog, check_text
from penstock.queues.types import MAX_DELAY_SECONDS, Ack, AckOutcome

MAX_REMEMBERED_MESSAGES = 50_000  # of all leases together: about 10 MB
MAX_ERROR_CHARS = 10_000
STATUSES = {
    "completed": "completed",
    "success": "completed",
    "failed": "failed",
    "retry": "retry",
    "dlq": "dlq",
}
NOT_FOUND = "Message not found"
NO_LEASE = "Invalid or expired lease"
ERRORS = {"missing": NOT_FOUND, "lease": NO_LEASE}  # by outcome; the others are a success


class RememberedLease(msgspec.Struct, gc=False):
    """What was delivered under a lease that is all its cursor has beyond its position."""

    queue: str
    group: str
    group_id: int
    partition: int
    partition_name: str
    partition_id: str
    version: int  # of the cursor
    lease: UUID
    last: int  # the last message's number
    transactions: list[str]
    times: list[datetime]


class LeaseMemory:
    """The leases that are remembered, the oldest first; of limited size."""

    def __init__(self) -> None:
        self._leases: dict[str, RememberedLease] = {}
        self.messages = 0  # of all of them

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, lease_id: str, lease: RememberedLease) -> None:
        self.messages += len(lease.transactions)
        self._leases[lease_id] = lease
        while self.messages > MAX_REMEMBERED_MESSAGES:
            self.forget(next(iter(self._leases)))

    def forget(self, lease_id: str) -> RememberedLease | None:
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self.messages -= len(lease.transactions)
        return lease

    def completed_by(self, acks: Sequence[Ack], first: int) -> RememberedLease | None:
        """The lease whose messages are exactly those that `acks` complete from index `first` on. It
        is forgotten: whatever comes of these acknowledgements, its cursor changes.
        """
        lease_id = acks[first].lease_id
        lease = self.forget(lease_id) if lease_id else None
        if lease is None or first + len(lease.transactions) > len(acks):
            return None
        for index, transaction in enumerate(lease.transactions, first):
            ack = acks[index]
            if (
                ack.transaction_id != transaction
                or ack.lease_id != lease_id
                or ack.partition_id != lease.partition_id
                or ack.group != lease.group
                or STATUSES.get(ack.status) != "completed"
            ):
                return None
        return lease


class AckRun(msgspec.Struct, gc=False):
    """Acknowledgements that follow each other and have all but the transaction id in common."""

    first: int  # the index of the first one
    count: int
    partition: int
    group: str
    lease: UUID | None
    status: str
    error: str | None
    delay: float | None = None
    max_attempts: int | None = None
    remembered: RememberedLease | None = None  # that it completes as a whole


class AckBatch:
    """The acknowledgements of one call of `settle`, and their answers."""

    def __init__(self, acks: list[Ack]) -> None:
        self.acks = acks
        self.answers: list[Any] = [None] * len(acks)  # of type Acked once it is filled
        self._runs: list[AckRun] = []  # in the order in which they are sent

    async def arguments(
        self, catalog: QueueCatalog, memory: LeaseMemory | None = None
    ) -> SettleArguments | None:
        """What to send; None: all are answered already, or there are none."""
        acks, runs = self.acks, self._runs
        index, key, rested = 0, None, 0
        refusal: str | None = None  # of the run that `key` stands for
        while index < len(acks):
            if index - rested >= SLICE:
                rested = index
                await asyncio.sleep(0)
            ack = acks[index]
            if memory and ack.lease_id and (lease := memory.completed_by(acks, index)):
                count, key = len(lease.transactions), None
                run = AckRun(
                    index,
                    count,
                    lease.partition,
                    lease.group,
                    lease.lease,
                    "completed",
                    None,
                    remembered=lease,
                )
                runs.append(run)
                index += count
                continue
            before = key
            key = (
                *(ack.partition_id, ack.lease_id, ack.group),
                *(ack.status, ack.error, ack.delay, ack.max_attempts),
            )
            if key != before:
                refusal = self._begin_run(index, ack, catalog)
            elif refusal is None:
                runs[-1].count += 1
            if refusal is not None:
                self.answers[index] = AckOutcome(ack.transaction_id, False, refusal)
            index += 1
        if not runs:
            return None
        remembered = any(run.remembered for run in runs)
        if remembered:  # `settle` locks these cursors in the order in which they are sent
            runs.sort(
                key=lambda run: (run.partition, run.remembered.group_id if run.remembered else 0)
            )
        starts: list[int] = []
        transactions: list[str] = []
        times: list[datetime | None] = []
        for run in runs:
            starts.append(len(transactions))
            if run.remembered is not None:
                transactions += run.remembered.transactions
                times += run.remembered.times
            else:
                some = acks[run.first : run.first + run.count]
                transactions += [ack.transaction_id for ack in some]
                times += [None] * run.count
        leases = [run.remembered for run in runs]
        completed_only = all(run.status == "completed" and run.error is None for run in runs)
        return SettleArguments(
            starts=starts,
            partitions=[run.partition for run in runs],
            groups=[run.group for run in runs],
            leases=[run.lease for run in runs],
            statuses=None if completed_only else [run.status for run in runs],
            errors=None if completed_only else [run.error for run in runs],
            transactions=transactions,
            group_ids=[lease.group_id if lease else None for lease in leases]
            if remembered
            else None,
            versions=[lease.version if lease else None for lease in leases] if remembered else None,
            lasts=[lease.last if lease else None for lease in leases] if remembered else None,
            times=times if remembered else None,
            delays=None if completed_only else [run.delay for run in runs],
            limits=None if completed_only else [run.max_attempts for run in runs],
        )

    def _begin_run(self, index: int, ack: Ack, catalog: QueueCatalog) -> str | None:
        """Begin a run with this one; why not, if it cannot be sent."""
        status = STATUSES.get(ack.status)
        if status is None:
            return f"Unknown status: {ack.status}"
        lease = uuid_of(ack.lease_id) if ack.lease_id else None
        if ack.lease_id and lease is None:
            return NO_LEASE
        partition = catalog.partition_id(ack.partition_id)
        if partition is None:
            return NOT_FOUND
        error = ack.error and ack.error[:MAX_ERROR_CHARS]
        self._runs.append(
            AckRun(
                index, 1, partition, ack.group, lease, status, error, ack.delay, ack.max_attempts
            )
        )
        return None

    async def fill(self, rows: list[Row]) -> list[AckOutcome]:
        """The answers, from the rows of `settle`."""
        filled = 0
        for row in rows:
            for number, more in zip(row["runs"], row["more"], strict=True):
                run = self._runs[number - 1]
                if row["outcomes"] is None:
                    self._fill_whole(run, row, more)
                else:
                    self._fill_each(run, row)
                filled += run.count
                if filled >= SLICE:
                    filled = 0
                    await asyncio.sleep(0)
        return self.answers

    def _fill_whole(self, run: AckRun, row: Row, more: bool) -> None:
        """All are ok."""
        queue, partition = row["queue"], row["partition"]
        if queue is None and run.remembered is not None:
            queue, partition = run.remembered.queue, run.remembered.partition_name
        for index in range(run.first, run.first + run.count):
            transaction = self.acks[index].transaction_id
            self.answers[index] = AckOutcome(
                transaction, True, None, queue, partition, True, more=more
            )

    def _fill_each(self, run: AckRun, row: Row) -> None:
        indexes = range(run.first, run.first + run.count)
        columns = row["outcomes"], row["released"], row["dead"]
        for index, outcome, released, dead in zip(indexes, *columns, strict=True):
            self.answers[index] = AckOutcome(
                self.acks[index].transaction_id,
                outcome not in ERRORS,
                ERRORS.get(outcome),
                row["queue"],
                row["partition"],
                released,
                dead,
                outcome == "ok",
            )


def check_ack(ack: Ack) -> None:
    """Refuse what PostgreSQL cannot store."""
    check_text("transactionId", ack.transaction_id)
    check_text("consumerGroup", ack.group)
    if ack.error:
        check_text("error", ack.error)
    if ack.delay is not None and not (
        0 <= ack.delay <= MAX_DELAY_SECONDS and ack.status in ("failed", "retry")
    ):
        raise InvalidRequest(
            f"delay is 0 to {MAX_DELAY_SECONDS} seconds, with the status failed or retry"
        )
    if ack.max_attempts is not None and not 1 <= ack.max_attempts <= LARGEST:
        raise InvalidRequest("maxAttempts is 1 or more")


def uuid_of(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
