"""Push and acknowledge in one database transaction: all of it or nothing.

All locks are taken first, in the order everybody follows. When the connection breaks around the
commit, the database itself is asked what became of the transaction, so the answer is never a guess.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from penstock.database import UNDONE
from penstock.errors import Conflict, Unavailable
from penstock.protocol.ids import uuid7
from penstock.queues.catalog import Catalog
from penstock.queues.context import QueueContext
from penstock.queues.push import Pusher, copies, prepare
from penstock.queues.settling import STATUSES, AckBatch, check_ack, uuid_of
from penstock.queues.taking import Deliveries
from penstock.queues.types import Ack, Acked, Item, Pushed, QueueInfo, TransactionResult

MAX_ATTEMPTS = 6
# transactions take at most one connection in so many: they hold theirs while others only pass
# through
CONNECTIONS_PER_TRANSACTION = 2
T = TypeVar("T")


class Stale(Exception):
    """What we knew of a queue is no longer so."""


class Snapshot(Catalog):
    """What a transaction needs to know, read before it began. Looking something up within
    would be on another connection, which may have to wait for somebody who waits for our locks; and
    with all connections in transactions there would be none to be had."""

    def __init__(
        self, catalog: Catalog, partitions: dict[tuple[str, str], int], queues: list[QueueInfo]
    ) -> None:
        super().__init__(catalog._database)
        self.partitions = partitions
        self._queues = {info.name: info for info in queues}

    def forget(self) -> None:
        raise Stale

    async def ensure(self, wanted: list[tuple[str, str]], unordered: Iterable[str] = ()) -> None:
        del unordered  # they exist
        if not self.partitions.keys() >= set(wanted):
            raise Stale

    async def queue(self, name: str) -> QueueInfo | None:
        return self._queues.get(name)


async def snapshot_of(
    catalog: Catalog, wanted: set[tuple[str, str]], unordered: Iterable[str] = ()
) -> Snapshot:
    """These queues and partitions, made if missing; `Stale` when they change meanwhile."""
    await catalog.ensure(list(wanted), unordered)
    partitions = {
        key: number for key in wanted if (number := catalog.partitions.get(key)) is not None
    }
    queues = [await catalog.queue(queue) for queue in {queue for queue, _ in wanted}]
    if len(partitions) < len(wanted) or None in queues:
        raise Stale
    return Snapshot(catalog, partitions, [info for info in queues if info is not None])


class Transactions:
    def __init__(self, context: QueueContext, pusher: Pusher, deliveries: Deliveries) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._calls = context.calls
        self._pusher, self._deliveries = pusher, deliveries
        connections = self._database.settings.pool_size // CONNECTIONS_PER_TRANSACTION
        self._room = asyncio.Semaphore(max(1, connections))

    async def run(
        self, operations: list[Item | Ack], required_leases: list[str]
    ) -> TransactionResult:
        name = str(uuid7())
        items = self.prepare([one for one in operations if isinstance(one, Item)])
        acks = [operation for operation in operations if isinstance(operation, Ack)]
        for ack in acks:
            check_ack(ack)
            if ack.status not in STATUSES:
                return TransactionResult(
                    name, False, f"ACK operation failed: Unknown status: {ack.status}"
                )

        async def work(connection: Any, snapshot: Snapshot) -> tuple[list[Pushed], list[Acked]]:
            await self.lock(connection, snapshot, [(ack.partition_id, ack.group) for ack in acks])
            await self._require(connection, required_leases)
            pushed = await self.store(connection, snapshot, items)
            for answer in pushed:
                if answer.status == "duplicate":
                    raise Conflict(
                        f"PUSH operation failed: duplicate transactionId {answer.transaction_id}"
                    )
            return pushed, await self.settle(connection, acks)

        try:
            pushed, acked = await self.attempt(items, work)
        except Conflict as error:
            return TransactionResult(name, False, str(error))
        self.announce(pushed, acks, acked)
        pushes, answers = iter(pushed), iter(acked)
        results: list[Pushed | Acked] = [
            next(pushes) if isinstance(operation, Item) else next(answers)
            for operation in operations
        ]
        return TransactionResult(name, True, None, results)

    def prepare(self, items: list[Item]) -> list[Item]:
        """The items, checked and each with a transaction id."""
        return prepare(copies(items))

    async def attempt(self, items: list[Item], work: Callable[[Any, Snapshot], Awaitable[T]]) -> T:
        """Run `work(connection, snapshot)` in a database transaction, again from the start when the
        database undid it or what we knew of the items' queues was stale. `work` calls `lock` before
        anything else, and raises to undo what it did.
        """
        for turn in range(MAX_ATTEMPTS):
            try:
                async with self._room:
                    return await self._apply(items, work)
            except UNDONE:
                await asyncio.sleep(0.02 * turn)
            except Stale:
                self._catalog.forget()
        raise Unavailable("the database is too busy, or these queues keep changing; try again")

    async def _apply(self, items: list[Item], work: Callable[[Any, Snapshot], Awaitable[T]]) -> T:
        snapshot = await snapshot_of(
            self._catalog,
            {(item.queue, item.partition) for item in items},
            {item.queue for item in items if item.unordered},
        )
        xid: Any = None
        done: list[T] = []  # one when all is done but the commit
        try:
            async with self._database.connection() as connection, connection.transaction():
                xid = await connection.fetchval("SELECT pg_current_xact_id()::text")
                done.append(await work(connection, snapshot))
        except Unavailable:
            if not done or not await self._committed(xid):
                raise
        return done[0]

    async def lock(self, connection: Any, snapshot: Snapshot, acked: list[tuple[str, str]]) -> None:
        """Lock everything that a transaction will change: the partitions of its pushes, and the
        cursors of what it acknowledges, as pairs of a partition's id and a group.
        """
        await self._calls.lock(
            connection.fetch,
            sorted(snapshot.partitions.values()),
            [self._catalog.partition_id(partition) for partition, _ in acked],
            [group for _, group in acked],
        )

    async def store(self, connection: Any, snapshot: Snapshot, items: list[Item]) -> list[Pushed]:
        """Push the items, which have their ids. Raises when one of them cannot be stored."""
        pushed: list[Pushed] = []
        for answer in await self._pusher.store(items, snapshot, connection.fetch):
            if not isinstance(answer, Pushed):
                raise answer
            if answer.status == "full":
                raise Conflict(f"PUSH operation failed: queue {answer.queue} is full")
            pushed.append(answer)
        return pushed

    async def settle(self, connection: Any, acks: list[Ack]) -> list[Acked]:
        """Record the outcomes. Raises when one of them is refused."""
        batch = AckBatch(acks)
        runs = await batch.arguments(self._catalog)
        rows = [] if runs is None else await self._calls.settle(runs, connection.fetch)
        acked = await batch.fill(rows)
        for outcome in acked:
            if not outcome.success:
                raise Conflict(f"ACK operation failed: {outcome.error}")
        return acked

    def announce(self, pushed: list[Pushed], acks: list[Ack], acked: list[Acked]) -> None:
        """Count what was committed, and wake the pops that it is for."""
        self._pusher.announce(pushed)
        self._deliveries.announce(acks, acked)

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
        """What became of a transaction whose connection broke, or `Unavailable`."""
        for _ in range(100):
            rows = await self._database.fetch("SELECT pg_xact_status($1::text::xid8)", xid)
            if rows[0][0] != "in progress":
                return bool(rows[0][0] == "committed")
            await asyncio.sleep(0.05)
        raise Unavailable("the outcome of the transaction is not known yet")
