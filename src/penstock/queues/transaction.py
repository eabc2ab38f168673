"""Push and acknowledge in one database transaction: all of it or nothing.

All locks are taken first, in the order everybody follows. When the connection breaks around the
commit, the database itself is asked what became of the transaction, so the answer is never a guess.
"""

import asyncio
from typing import Any

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

    async def ensure(self, wanted: list[tuple[str, str]]) -> None:
        if not self.partitions.keys() >= set(wanted):
            raise Stale

    async def queue(self, name: str) -> QueueInfo | None:
        return self._queues.get(name)


async def snapshot_of(catalog: Catalog, wanted: set[tuple[str, str]]) -> Snapshot:
    """These queues and partitions, made if missing; `Stale` when they change meanwhile."""
    await catalog.ensure(list(wanted))
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
        items = prepare(copies([one for one in operations if isinstance(one, Item)]))
        acks = [operation for operation in operations if isinstance(operation, Ack)]
        for ack in acks:
            check_ack(ack)
            if ack.status not in STATUSES:
                return TransactionResult(
                    name, False, f"ACK operation failed: Unknown status: {ack.status}"
                )
        for turn in range(MAX_ATTEMPTS):
            try:
                async with self._room:
                    pushed, acked = await self._apply(items, acks, required_leases)
                break
            except Conflict as error:
                return TransactionResult(name, False, str(error))
            except UNDONE:
                await asyncio.sleep(0.02 * turn)
            except Stale:
                self._catalog.forget()
        else:
            raise Unavailable("the database is too busy, or these queues keep changing; try again")
        self._pusher.announce(pushed)
        self._deliveries.announce(acks, acked)
        pushes, answers = iter(pushed), iter(acked)
        results: list[Pushed | Acked] = [
            next(pushes) if isinstance(operation, Item) else next(answers)
            for operation in operations
        ]
        return TransactionResult(name, True, None, results)

    async def _apply(
        self, items: list[Item], acks: list[Ack], required_leases: list[str]
    ) -> tuple[list[Pushed], list[Acked]]:
        snapshot = await snapshot_of(
            self._catalog, {(item.queue, item.partition) for item in items}
        )
        xid: Any = None
        done: tuple[list[Pushed], list[Acked]] | None = None
        try:
            async with self._database.connection() as connection, connection.transaction():
                xid = await connection.fetchval("SELECT pg_current_xact_id()::text")
                done = await self._inside(connection, snapshot, items, acks, required_leases)
        except Unavailable:
            if done is None or not await self._committed(xid):
                raise
        assert done is not None
        return done

    async def _inside(
        self,
        connection: Any,
        snapshot: Snapshot,
        items: list[Item],
        acks: list[Ack],
        required_leases: list[str],
    ) -> tuple[list[Pushed], list[Acked]]:
        acked_in = [self._catalog.partition_id(ack.partition_id) for ack in acks]
        pushed_to = sorted(snapshot.partitions.values())
        groups = [ack.group for ack in acks]
        await self._calls.lock(connection.fetch, pushed_to, acked_in, groups)
        await self._require(connection, required_leases)
        pushed: list[Pushed] = []
        for answer in await self._pusher.store(items, snapshot, connection.fetch):
            if not isinstance(answer, Pushed):
                raise answer
            if answer.status == "duplicate":
                raise Conflict(
                    f"PUSH operation failed: duplicate transactionId {answer.transaction_id}"
                )
            if answer.status == "full":
                raise Conflict(f"PUSH operation failed: queue {answer.queue} is full")
            pushed.append(answer)
        batch = AckBatch(acks)
        runs = await batch.arguments(self._catalog)
        rows = [] if runs is None else await self._calls.settle(runs, connection.fetch)
        acked = await batch.fill(rows)
        for outcome in acked:
            if not outcome.success:
                raise Conflict(f"ACK operation failed: {outcome.error}")
        return pushed, acked

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
