"""Queues on PostgreSQL: the parts put together behind one object.

    queues = Queues(database, settings, metrics)
    await queues.start()
    await queues.push([Item("orders", b'{"n":1}', partition="c-1")])
    popped = await queues.pop(PopRequest(queue="orders", group="billing", batch=10, wait=True))
    await queues.ack([Ack(m.transaction_id, m.partition_id, m.lease_id, group="billing")
                      for m in popped.messages])

All state is in the database: any number of brokers may do this on the same one.
See docs/reference/queues.md for the promises.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.config.schema import QueuesSettings as Settings
from penstock.database import Database
from penstock.errors import InvalidRequest
from penstock.metrics import Metrics
from penstock.queues.admin.analytics import Analytics
from penstock.queues.admin.configuration import QueueAdmin
from penstock.queues.admin.dead_letters import DeadLetterStore
from penstock.queues.admin.figures import Figures
from penstock.queues.admin.groups import QueueGroups
from penstock.queues.admin.messages import Messages
from penstock.queues.admin.scheduled import DelayedMessages
from penstock.queues.admin.sinks import Sinks
from penstock.queues.admin.status import QueueStatusReader
from penstock.queues.admin.traces import Traces
from penstock.queues.background.delayed import Delayed
from penstock.queues.background.schedules import Scheduler
from penstock.queues.background.upkeep import QueueUpkeep
from penstock.queues.calls import Calls
from penstock.queues.catalog import QueueCatalog
from penstock.queues.consumers import ConsumerConnections
from penstock.queues.context import QueueContext
from penstock.queues.crypto import EncryptionKeys
from penstock.queues.deliver import Pops
from penstock.queues.exchanges import Exchanges
from penstock.queues.failures import Failures
from penstock.queues.push import Pusher, with_ids
from penstock.queues.settling import check_acks, uuid_of
from penstock.queues.streams import Streams
from penstock.queues.transaction import Transactions
from penstock.queues.types import (
    Ack,
    AckOutcome,
    Extended,
    Item,
    ItemOutcome,
    PopOutcome,
    PopRequest,
    TransactionResult,
)
from penstock.queues.waiting import WaitingPops

# A message counts as one more per so many bytes, so that large messages do not make a huge call.
HEAVY_BYTES = 1 << 15
MAX_EXTENSION_SECONDS = 31_536_000  # a year
EXTENSION_ERRORS = {"missing": "Lease not found", "expired": "Lease already expired"}


class Queues:
    """The queue engine of one broker. Parts: `admin`, `groups`, `dead`, `messages`, `traces`,
    `scheduled`, `schedules`, `status`, `analytics`, `sinks`, `streams`, `delayed`, `upkeep`."""

    def __init__(self, database: Database, settings: Settings, metrics: Metrics) -> None:
        self.database, self.settings = database, settings
        self.catalog = QueueCatalog(database)
        self.keys = EncryptionKeys(settings)
        self.waiting = WaitingPops(database, self._changed)
        self._calls = Calls(database)
        self.figures = Figures(database)
        self.consumers = ConsumerConnections(database)
        pushed = metrics.counter(
            "penstock_queue_pushed_total", "Messages stored by pushes to this broker", "queue"
        )
        popped = metrics.counter(
            "penstock_queue_popped_total", "Messages delivered, including redeliveries", "queue"
        )
        acked = metrics.counter(
            "penstock_queue_acked_total",
            "Acknowledgements by status; a repeated one counts once",
            "queue",
            "status",
        )
        context = QueueContext(
            database, settings, self.catalog, self.keys, self.waiting, self._calls
        )
        self.delayed = Delayed(context, pushed)
        self._failures = Failures(context)
        self._exchanges = Exchanges(context, self._failures, acked)
        self._pops = Pops(context, self._exchanges, self.consumers, popped)
        self._pusher = Pusher(context, self._exchanges, pushed, self.delayed.stored)
        self._transactions = Transactions(context, self._pusher, self._exchanges)
        self.streams = Streams(context, self._transactions)
        self.scheduled = DelayedMessages(context)
        self.admin = QueueAdmin(context, self.scheduled)
        self.schedules = Scheduler(context, self._transactions)
        self.groups = QueueGroups(context, self.figures, self.consumers)
        self.dead = DeadLetterStore(context)
        self.messages = Messages(context)
        self.traces = Traces(context)
        self.status = QueueStatusReader(context, self.figures)
        self.analytics = Analytics(database)
        self.sinks = Sinks(context, self._transactions)
        self.upkeep = QueueUpkeep(database, settings, metrics)
        metrics.gauge(
            "penstock_queue_waiting_pops",
            "Long-polling pops that wait for messages",
            read=lambda: self.waiting.parked,
        )
        metrics.gauge(
            "penstock_queue_merging",
            "Requests waiting to be combined into one SQL call",
            "kind",
            read=lambda: self._merging(),
        )

    async def start(self) -> None:
        self.database.on_change(self._database_changed)
        await self.waiting.start()
        self.delayed.start()
        await self.upkeep.start()
        self.schedules.start()

    async def stop(self) -> None:
        await self.schedules.stop()
        self._pops.answer_waiting()
        await self._exchanges.stop()
        await self._failures.stop()
        await self._pusher.batcher.drain()
        await self.delayed.stop()
        await self.upkeep.stop()
        await self.waiting.stop()

    def answer_waiting(self) -> None:
        """Have waiting pops answered and let none wait any more: listeners are about to close."""
        self._pops.answer_waiting()

    async def push(self, items: list[Item]) -> list[ItemOutcome]:
        """Store messages; done when durable. Safe to repeat when transaction ids are given."""
        return await self.append(with_ids(items, self.catalog.partitions)) if items else []

    def append(self, items: list[Item]) -> "asyncio.Future[list[ItemOutcome]]":
        """Push items that `name_items` has checked. Pushes that wait together share one call."""
        size = sum([1 + len(item.payload) // HEAVY_BYTES for item in items])
        return self._pusher.batcher.submit(items, size)

    async def load_and_check_keys(self, items: list[Item]) -> None:
        """Raise `MissingKey` when one of their queues asks for encryption and we have no key."""
        if self.keys.current is None:
            for queue in {item.queue for item in items}:
                await self.catalog.queue(queue)
            self.check_keys(items)

    def check_keys(self, items: list[Item]) -> None:
        """Check like `load_and_check_keys`, but only queues that are in the cache."""
        if self.keys.current is None and any(self.catalog.encrypted(item.queue) for item in items):
            raise self.keys.missing

    def at_rest(self, item: Item) -> Item:
        """Return the item as a file stores it: with a due time instead of a delay, which begins
        now, and encrypted unless its queue is known to be unencrypted or we have no key.
        """
        if isinstance(item.due, float):
            item.due = self.delayed.moment(item.due)
        if (
            item.key_id is not None
            or self.keys.current is None
            or self.catalog.encrypted(item.queue) is False
        ):
            return item
        return self.keys.encrypt_item(item)

    def decrypted(self, items: list[Item]) -> list[Item]:
        """Return the items with decrypted payloads, or raise MissingKey or Damaged."""
        return [self.keys.decrypt_item(item) for item in items]

    async def pop(self, request: PopRequest, acks: Sequence[Ack] = ()) -> PopOutcome:
        """Take messages under a lease, after settling those of `acks`, in one commit. Cancelling it
        returns whatever was taken for it; what it acknowledged stays so.
        """
        return await self._pops.pop([request], acks)

    async def pop_any(self, requests: Sequence[PopRequest]) -> PopOutcome:
        """Take messages for the first of the requests that can be served. How long to wait for one
        of them is what the first request says. Cancelling it is as with `pop`.
        """
        return await self._pops.pop(requests)

    def pause_pops(self, paused: bool) -> None:
        """Let pops find nothing: those that wait are answered, and those that come wait until pops
        are resumed.
        """
        self._pops.pause(paused)

    async def ack(self, acks: list[Ack]) -> list[AckOutcome]:
        """Settle messages, each on its own. Repeating an acknowledgement changes nothing."""
        check_acks(acks)
        return list((await self._exchanges.exchange(acks))[0]) if acks else []

    async def release(self, queue: str, group: str, holder: int) -> int:
        """End the leases of pops with this `PopRequest.holder`, uncounted; how many there were."""
        return await self._exchanges.release_holder(queue, group, holder)

    async def extend(self, lease_id: str, seconds: int = 60) -> Extended:
        """Let a lease live for at least so many seconds from now."""
        lease = uuid_of(lease_id)
        if lease is None:
            return Extended(lease_id, False, EXTENSION_ERRORS["missing"])
        if not 0 < seconds <= MAX_EXTENSION_SECONDS:
            raise InvalidRequest(f"seconds must be between 1 and {MAX_EXTENSION_SECONDS}")
        self._exchanges.memory.forget(lease_id)  # its cursor changes
        row = await self._calls.extend(lease, seconds)
        outcome = row["outcome"]
        return Extended(
            str(lease), outcome == "ok", EXTENSION_ERRORS.get(outcome), row["expires_at"]
        )

    async def transaction(
        self, operations: list[Item | Ack], required_leases: list[str] | None = None
    ) -> TransactionResult:
        """Push and acknowledge, all or nothing."""
        return await self._transactions.run(operations, required_leases or [])

    def _changed(self) -> None:
        """Forget what is remembered: something was configured, here or elsewhere."""
        self.catalog.forget()
        self.schedules.wake()

    def _database_changed(self, healthy: bool) -> None:
        if healthy:
            self.waiting.changed(announce=False)

    def _merging(self) -> dict[tuple[str, ...], Any]:
        requests = self._exchanges.batcher.waiting
        pops = sum(request.take is not None for request in requests)
        return {
            ("push",): len(self._pusher.batcher.waiting),
            ("pop",): pops,
            ("ack",): len(requests) - pops,
        }
