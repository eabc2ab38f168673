"""Streams: consumers whose state, output and acknowledgement are committed together.

A query has a name and the hash of the program that computes its state. State belongs to a query, a
partition of its source queue and a key; it is JSON in the table `stream_state`. A cycle changes
state, pushes and acknowledges the first messages of a batch in one transaction, so the state is
always the result of exactly the messages that are acknowledged.

A cycle that acknowledges is accepted only under a live lease of the partition. There is one such
lease at a time, so a consumer that lost its lease cannot overwrite the state of the one that has it
now, and a cycle that is sent twice is applied once.
"""

from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from penstock.errors import Conflict, InvalidRequest, NotFound, PenstockError
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.checks import check_group, check_name, check_text
from penstock.queues.context import QueueContext
from penstock.queues.push import with_ids
from penstock.queues.schema import query
from penstock.queues.settling import MAX_ERROR_CHARS, NO_LEASE, uuid_of
from penstock.queues.transaction import QueueTransaction, Transactions
from penstock.queues.types import Ack, AckOutcome, Item, ItemOutcome

READ = query("stream_state")
STATUSES = {"completed": "completed", "success": "completed", "failed": "dlq", "dlq": "dlq"}
# what stream_begin reports
PROBLEMS: dict[str, tuple[type[PenstockError], str]] = {
    "query": (NotFound, "query_id names no registered query"),
    "hash": (Conflict, "config_hash mismatch: another version has reset the query"),
    "partition": (NotFound, "partition_id names no partition"),
    "lease": (Conflict, NO_LEASE),
    "shared": (
        Conflict,
        "the source queue has ordering none: state needs one consumer per partition",
    ),
    "message": (Conflict, "Message not found under this lease"),
}


class Registered(msgspec.Struct):
    query_id: str
    fresh: bool  # it was created now
    reset: bool  # its state was deleted


class StateRow(msgspec.Struct):
    key: str
    value: bytes  # JSON text
    updated_at: datetime


class CycleAck(msgspec.Struct):
    """Acknowledges the messages of a lease up to `transaction_id`, which gets `status`; those
    before it are completed.
    """

    transaction_id: str
    lease_id: str
    status: str = "completed"
    error: str | None = None


class Cycle(msgspec.Struct, kw_only=True):
    query_id: str
    partition_id: str  # of the source
    group: str = QUEUE_MODE
    config_hash: str | None = None  # None: not checked
    state: dict[str, bytes | None]  # JSON text by key; None deletes it
    items: list[Item]
    ack: CycleAck | None = None
    release: bool = True  # end the lease; False: it stays with the messages behind those of `ack`


class CommittedCycle(msgspec.Struct):
    pushed: list[ItemOutcome]
    acked: int  # messages
    released: bool
    dead: bool  # the last message became a dead letter


class Streams:
    def __init__(self, context: QueueContext, transactions: Transactions) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._transactions = transactions

    async def register(
        self, name: str, source: str, sink: str | None, config_hash: str, *, reset: bool = False
    ) -> Registered:
        """Register a query, or find the one of that name. Raises `Conflict` when it has another
        hash; with `reset` its state is deleted instead.
        """
        for kind, text in ("name", name), ("source_queue", source), ("config_hash", config_hash):
            check_name(kind, text)
        check_text("sink_queue", sink or "")
        [row] = await self._database.read(
            "SELECT * FROM stream_register($1, $2, $3, $4, $5)",
            *(name, source, sink or None, config_hash, reset),
        )
        if row["id"] is None:
            raise Conflict(
                f"config_hash mismatch: query '{name}' keeps state of another version. Register it "
                "with reset to delete that state, or use another name"
            )
        return Registered(str(row["id"]), row["fresh"], row["reset"])

    async def state(
        self,
        query_id: str,
        partition_id: str,
        keys: list[str],
        prefix: str = "",
        ended_by: int | None = None,
    ) -> list[StateRow]:
        """Read the state of a query in a partition, by key. Filters are combined with AND."""
        number, partition = self._numbers(query_id, partition_id)
        rows = await self._database.read(READ, number, partition, keys, prefix, ended_by)
        return [StateRow(row["key"], row["value"].encode(), row["updated_at"]) for row in rows]

    async def commit(self, cycle: Cycle) -> CommittedCycle:
        """Apply a cycle: all of it or nothing. Raises `Conflict` when it cannot be applied."""
        number, partition = self._numbers(cycle.query_id, cycle.partition_id)
        check_group(cycle.group)
        for key in cycle.state:
            check_name("key", key)
        ack = cycle.ack
        lease = None
        if ack is not None:
            check_text("transactionId", ack.transaction_id)
            check_text("error", ack.error or "")
            if ack.status not in STATUSES:
                raise InvalidRequest(f"Unknown ack.status: {ack.status[:60]}")
            lease = uuid_of(ack.lease_id)
            if lease is None:
                raise Conflict(NO_LEASE)
        items = with_ids(cycle.items)

        async def work(
            transaction: QueueTransaction,
        ) -> tuple[list[ItemOutcome], list[Ack], list[AckOutcome]]:
            await transaction.lock([] if ack is None else [(cycle.partition_id, cycle.group)])
            [row] = await transaction.connection.fetch(
                "SELECT * FROM stream_begin($1, $2, $3, $4, $5, $6)",
                *(number, cycle.config_hash, partition, cycle.group, lease),
                ack and ack.transaction_id,
            )
            if row["problem"] is not None:
                raise _error(row["problem"])
            acks = [] if ack is None else _acks(cycle, ack, row["covered"], row["rest"])
            pushed = await transaction.append_all(items)
            acked = await transaction.settle(acks)
            await _change(transaction.connection, cycle, (number, partition), lease)
            return pushed, acks, acked

        pushed, acks, acked = await self._transactions.attempt(items, work)
        self._transactions.count_and_wake(pushed, acks, acked)
        return CommittedCycle(
            pushed,
            sum(one.status != "retry" for one in acks),
            any(one.lease_released for one in acked),
            any(one.dlq for one in acked),
        )

    def _numbers(self, query_id: str, partition_id: str) -> tuple[UUID, int]:
        number, partition = uuid_of(query_id), self._catalog.partition_id(partition_id)
        if number is None:
            raise _error("query")
        if partition is None:
            raise _error("partition")
        return number, partition


async def _change(connection: Any, cycle: Cycle, key: tuple[UUID, int], lease: UUID | None) -> None:
    """Change the state of a cycle, and extend its lease unless it is released."""
    kept = None if cycle.release else lease
    if not cycle.state and kept is None:
        return
    values = [value and value.decode() for value in cycle.state.values()]
    try:
        await connection.execute(
            "SELECT stream_apply($1, $2, $3, $4, $5)", *key, list(cycle.state), values, kept
        )
    except asyncpg.DataError as error:  # JSON that PostgreSQL does not store, such as "\u0000"
        raise InvalidRequest(f"a value of state_ops cannot be stored: {error}") from None


def _error(problem: str) -> PenstockError:
    kind, text = PROBLEMS[problem]
    return kind(text)


def _acks(cycle: Cycle, ack: CycleAck, covered: list[str], rest: list[str]) -> list[Ack]:
    """Return the outcomes of a lease's messages: the covered ones, and on release the rest."""
    lease = (cycle.partition_id, ack.lease_id)
    status = STATUSES[ack.status]
    error = (ack.error or "a stream reported a failure")[:MAX_ERROR_CHARS]
    *before, last = covered
    acks = [Ack(one, *lease, group=cycle.group) for one in before]
    acks.append(Ack(last, *lease, status, error if status == "dlq" else None, cycle.group))
    if cycle.release or status == "dlq":
        acks += [Ack(one, *lease, "retry", group=cycle.group) for one in rest]
    return acks
