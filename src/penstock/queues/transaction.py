"""Push and acknowledge in one database transaction: all of it or nothing.

All locks are taken first, in the order everybody follows. When the connection breaks around the
commit, the database itself is asked what became of the transaction, so the answer is never a guess.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.database.retry import ATTEMPTS, UNDONE, UNDONE_SECONDS
from penstock.errors import Conflict, PenstockError, Unavailable
from penstock.protocol.ids import uuid7
from penstock.queues.calls import Calls
from penstock.queues.catalog import Locations, QueueCatalog
from penstock.queues.context import QueueContext
from penstock.queues.crypto import EncryptionKeys
from penstock.queues.exchanges import Exchanges
from penstock.queues.push import AppendBatch, Pusher, with_ids
from penstock.queues.settling import STATUSES, AckBatch, check_acks, uuid_of
from penstock.queues.types import Ack, AckOutcome, Item, ItemOutcome, TransactionResult

# transactions take at most one connection in so many: they hold theirs while others only pass
# through
CONNECTIONS_PER_TRANSACTION = 2
T = TypeVar("T")


class Stale(Exception):
    """A queue has changed since it was looked up."""


@dataclass(slots=True)
class QueueTransaction:
    """An open database transaction that pushes and settles.

    Its queues and partitions were looked up before it began. A look-up inside would need a second
    connection. That connection could wait for a session that waits for our locks. There may also be
    none left, when all are in transactions.
    """

    connection: Any
    locations: Locations  # of all partitions that it may push to
    catalog: QueueCatalog
    calls: Calls
    keys: EncryptionKeys

    async def lock(self, acked: Sequence[tuple[str, str]]) -> None:
        """Lock everything that the transaction will change: the partitions of its pushes, and the
        cursors of what it acknowledges, as pairs of a partition's id and a group.
        """
        await self.calls.lock(
            self.connection.fetch,
            sorted(location.partition for location in self.locations.values()),
            [self.catalog.partition_id(partition) for partition, _ in acked],
            [group for _, group in acked],
        )

    async def append(self, items: list[Item]) -> list[ItemOutcome]:
        """Push items that have transaction ids. Raises if one of them cannot be stored."""
        batch = AppendBatch(items, self.catalog, self.keys)
        arguments = await batch.arguments(self.locations)
        if arguments is not None:
            await batch.fill(await self.calls.append(arguments, self.connection.fetch))
        pushed: list[ItemOutcome] = []
        for answer in batch.answers:
            if isinstance(answer, PenstockError):
                raise answer
            if answer is None:
                raise Stale
            pushed.append(answer)
        return pushed

    async def append_all(self, items: list[Item]) -> list[ItemOutcome]:
        """Push like `append`. Raise `Conflict` if a queue is full."""
        pushed = await self.append(items)
        for answer in pushed:
            if answer.status == "full":
                raise Conflict(f"PUSH operation failed: queue {answer.queue} is full")
        return pushed

    async def settle(self, acks: list[Ack]) -> list[AckOutcome]:
        """Record the outcomes. Raises when one of them is refused."""
        batch = AckBatch(acks)
        runs = await batch.arguments(self.catalog)
        rows = [] if runs is None else await self.calls.settle(runs, self.connection.fetch)
        acked = await batch.results(rows)
        for outcome in acked:
            if not outcome.success:
                raise Conflict(f"ACK operation failed: {outcome.error}")
        return acked


Work = Callable[[QueueTransaction], Awaitable[T]]


class Transactions:
    def __init__(self, context: QueueContext, pusher: Pusher, exchanges: Exchanges) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._calls, self._keys = context.calls, context.keys
        self._pusher, self._exchanges = pusher, exchanges
        connections = self._database.settings.pool_size // CONNECTIONS_PER_TRANSACTION
        self._room = asyncio.Semaphore(max(1, connections))

    async def run(
        self, operations: list[Item | Ack], required_leases: list[str]
    ) -> TransactionResult:
        name = str(uuid7())
        items = with_ids([one for one in operations if isinstance(one, Item)])
        acks = [operation for operation in operations if isinstance(operation, Ack)]
        check_acks(acks)
        for ack in acks:
            if ack.status not in STATUSES:
                return TransactionResult(
                    name, False, f"ACK operation failed: Unknown status: {ack.status}"
                )

        async def work(transaction: QueueTransaction) -> tuple[list[ItemOutcome], list[AckOutcome]]:
            await transaction.lock([(ack.partition_id, ack.group) for ack in acks])
            await self._require(transaction.connection, required_leases)
            pushed = await transaction.append_all(items)
            for answer in pushed:
                if answer.status == "duplicate":
                    raise Conflict(
                        f"PUSH operation failed: duplicate transactionId {answer.transaction_id}"
                    )
            return pushed, await transaction.settle(acks)

        try:
            pushed, acked = await self.attempt(items, work)
        except Conflict as error:
            return TransactionResult(name, False, str(error))
        self.count_and_wake(pushed, acks, acked)
        pushes, answers = iter(pushed), iter(acked)
        results: list[ItemOutcome | AckOutcome] = [
            next(pushes) if isinstance(operation, Item) else next(answers)
            for operation in operations
        ]
        return TransactionResult(name, True, None, results)

    async def attempt(self, items: Collection[Item], work: Work[T]) -> T:
        """Run `work` in a database transaction, which may push to the partitions of these items.
        Run it again if the database undid the transaction or a queue has changed. `work` raises an
        error to undo its changes. If it locks more than one row, it calls `lock` first.
        """
        for turn in range(ATTEMPTS):
            try:
                async with self._room:
                    return await self._attempt(await self._catalog.locate(items), work)
            except UNDONE:
                await asyncio.sleep(UNDONE_SECONDS * turn)
            except Stale:
                self._catalog.forget()
        raise Unavailable("the database is too busy, or these queues keep changing; try again")

    async def _attempt(self, locations: Locations, work: Work[T]) -> T:
        xid: Any = None
        done: list[T] = []  # one when all is done but the commit
        try:
            async with self._database.connection() as connection, connection.transaction():
                xid = await connection.fetchval("SELECT pg_current_xact_id()::text")
                transaction = QueueTransaction(
                    connection, locations, self._catalog, self._calls, self._keys
                )
                done.append(await work(transaction))
        except Unavailable:
            if not done or not await self._committed(xid):
                raise
        return done[0]

    def count_and_wake(
        self, pushed: list[ItemOutcome], acks: Sequence[Ack] = (), acked: Sequence[AckOutcome] = ()
    ) -> None:
        """Count what was committed, and wake the pops that it is for."""
        self._pusher.count_and_wake(pushed)
        self._exchanges.count_and_wake(acks, acked)

    async def _require(self, connection: Any, leases: list[str]) -> None:
        if not leases:
            return
        wanted = {lease: uuid_of(lease) for lease in leases}
        live = await self._calls.live_leases(
            connection.fetch, [lease for lease in wanted.values() if lease is not None]
        )
        for text, lease in wanted.items():
            if lease not in live:
                raise Conflict(f"required lease {text} is not held: Invalid or expired lease")

    async def _committed(self, xid: str) -> bool:
        """Find out whether a transaction whose connection broke was committed."""
        for _ in range(100):
            rows = await self._database.fetch("SELECT pg_xact_status($1::text::xid8)", xid)
            if rows[0][0] != "in progress":
                return bool(rows[0][0] == "committed")
            await asyncio.sleep(0.05)
        raise Unavailable("the outcome of the transaction is not known yet")
