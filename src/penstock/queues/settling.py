"""Group acknowledgements for `settle`, and remember the messages of each delivered lease.

Consecutive acknowledgements that differ only in their transaction id are a run. If all messages of
a run have the same outcome, `settle` returns one answer for the run. So a batch costs little more
than a message.

For recent leases, a broker remembers the messages and the version of their cursor. If a run
completes exactly these messages, `settle` gets the version and completes the lease without reading
a message. The memory is only a shortcut: if the cursor has changed since, its version differs, and
`settle` looks up the messages in the same call.
"""

import asyncio
from collections.abc import Sequence
from operator import attrgetter
from typing import Any
from uuid import UUID

import msgspec

from penstock.database.batching import SLICE
from penstock.errors import InvalidRequest
from penstock.protocol.queue_options import LARGEST
from penstock.queues.calls import Row, SettleArguments
from penstock.queues.catalog import QueueCatalog
from penstock.queues.checks import check_text
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
ERRORS = {"missing": NOT_FOUND, "lease": NO_LEASE}  # by outcome; other outcomes are successes


class AckRun(msgspec.Struct, gc=False):
    """Consecutive acknowledgements for `settle` that differ only in the transaction id."""

    partition: int
    group: str
    lease: UUID | None
    transactions: list[str]
    status: str | None = None  # None: completed
    error: str | None = None
    delay: float | None = None
    limit: int | None = None  # of attempts
    # For a remembered lease, that is, a run that completes all messages beyond the position:
    group_id: int | None = None
    version: int | None = None  # of the cursor
    last: int | None = None  # the last message's number
    times: list[float] | None = None  # parallel to `transactions`
    queue: str | None = None
    partition_name: str | None = None
    partition_id: str | None = None
    first: int = 0  # the index of its first acknowledgement


# Fields whose column is NULL if no run has a value
OPTIONAL = attrgetter("status", "error", "delay", "limit", "group_id", "version", "last")


class LeaseMemory:
    """The remembered leases, oldest first, up to MAX_REMEMBERED_MESSAGES."""

    def __init__(self) -> None:
        self._leases: dict[str, AckRun] = {}
        self.messages = 0  # of all leases

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, lease_id: str, lease: AckRun) -> None:
        self.messages += len(lease.transactions)
        self._leases[lease_id] = lease
        while self.messages > MAX_REMEMBERED_MESSAGES:
            self.forget(next(iter(self._leases)))

    def forget(self, lease_id: str) -> AckRun | None:
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self.messages -= len(lease.transactions)
        return lease

    def completed_by(self, ack: Ack, transactions: list[str]) -> AckRun | None:
        """Return the lease that acknowledgements like `ack` complete exactly, or None. The lease is
        forgotten in any case, because the acknowledgements change its cursor.
        """
        lease = self.forget(ack.lease_id) if ack.lease_id else None
        if (
            lease is not None
            and lease.transactions == transactions
            and lease.partition_id == ack.partition_id
            and lease.group == ack.group
            and STATUSES.get(ack.status) == "completed"
        ):
            return lease
        return None


class AckBatch:
    """The acknowledgements of one call of `settle`, and their answers."""

    def __init__(self, acks: list[Ack]) -> None:
        self.acks = acks
        self.answers: list[Any] = [None] * len(acks)  # AckOutcome; None: not yet
        self._runs: list[AckRun] = []  # in the order in which they are sent

    async def arguments(
        self, catalog: QueueCatalog, memory: LeaseMemory | None = None
    ) -> SettleArguments | None:
        """Return the arguments for `settle`; None if no acknowledgement needs the call."""
        runs, remembered = self._runs, False
        for first, ack, ids in await self._similar():
            run = memory.completed_by(ack, ids) if memory else None
            if run is not None:
                remembered = True
            else:
                made = _run_of(ack, ids, catalog)
                if isinstance(made, str):
                    for index, transaction in enumerate(ids, first):
                        self.answers[index] = AckOutcome(transaction, False, made)
                    continue
                run = made
            run.first = first
            runs.append(run)
        if not runs:
            return None
        if remembered:  # `settle` locks these cursors in the order in which they are sent
            runs.sort(key=lambda run: (run.partition, run.group_id or 0))
        starts: list[int] = []
        transactions: list[str] = []
        times: list[float | None] = []
        for run in runs:
            starts.append(len(transactions))
            transactions += run.transactions
            if remembered:
                times += run.times or [None] * len(run.transactions)
        statuses, errors, delays, limits, group_ids, versions, lasts = (
            None if column.count(None) == len(runs) else column
            for column in zip(*map(OPTIONAL, runs), strict=True)
        )
        return SettleArguments(
            starts=starts,
            partitions=[run.partition for run in runs],
            groups=[run.group for run in runs],
            leases=[run.lease for run in runs],
            statuses=statuses,
            errors=errors,
            transactions=transactions,
            group_ids=group_ids,
            versions=versions,
            lasts=lasts,
            times=times if remembered else None,
            delays=delays,
            limits=limits,
        )

    async def _similar(self) -> list[tuple[int, Ack, list[str]]]:
        """Return the runs: index of the first acknowledgement, the acknowledgement, all ids."""
        runs: list[tuple[int, Ack, list[str]]] = []
        key: object = None
        transactions: list[str] = []
        for index, ack in enumerate(self.acks, 1):
            before = key
            key = (
                *(ack.partition_id, ack.lease_id, ack.group),
                *(ack.status, ack.error, ack.delay, ack.max_attempts),
            )
            if key != before:
                transactions = []
                runs.append((index - 1, ack, transactions))
            transactions.append(ack.transaction_id)
            if not index % SLICE:
                await asyncio.sleep(0)
        return runs

    async def results(self, rows: list[Row]) -> list[AckOutcome]:
        """Return the answers, from the rows of `settle`."""
        filled = 0
        for row in rows:
            for number, more in zip(row["runs"], row["more"], strict=True):
                run = self._runs[number - 1]
                if row["outcomes"] is None:  # all are ok
                    queue = row["queue"] or run.queue
                    partition = row["partition"] or run.partition_name
                    for index, transaction in enumerate(run.transactions, run.first):
                        self.answers[index] = AckOutcome(
                            transaction, True, None, queue, partition, True, more=more
                        )
                else:
                    self._answer_each(run, row)
                filled += len(run.transactions)
                if filled >= SLICE:
                    filled = 0
                    await asyncio.sleep(0)
        return self.answers

    def _answer_each(self, run: AckRun, row: Row) -> None:
        columns = run.transactions, row["outcomes"], row["released"], row["dead"]
        for index, (transaction, outcome, released, dead) in enumerate(
            zip(*columns, strict=True), run.first
        ):
            self.answers[index] = AckOutcome(
                transaction,
                outcome not in ERRORS,
                ERRORS.get(outcome),
                row["queue"],
                row["partition"],
                released,
                dead,
                outcome == "ok",
            )


def _run_of(ack: Ack, transactions: list[str], catalog: QueueCatalog) -> AckRun | str:
    """Return the run of acknowledgements like this one, or the reason why it cannot be sent."""
    status = STATUSES.get(ack.status)
    if status is None:
        return f"Unknown status: {ack.status}"
    lease = uuid_of(ack.lease_id) if ack.lease_id else None
    if ack.lease_id and lease is None:
        return NO_LEASE
    partition = catalog.partition_id(ack.partition_id)
    if partition is None:
        return NOT_FOUND
    return AckRun(
        partition,
        ack.group,
        lease,
        transactions,
        None if status == "completed" else status,
        ack.error and ack.error[:MAX_ERROR_CHARS],
        ack.delay,
        ack.max_attempts,
    )


def check_acks(acks: Sequence[Ack]) -> None:
    """Raise InvalidRequest if PostgreSQL cannot store one of the acknowledgements."""
    check_text("transactionId", "".join([ack.transaction_id for ack in acks]))
    for group in {ack.group for ack in acks}:
        check_text("consumerGroup", group)
    for ack in acks:
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
