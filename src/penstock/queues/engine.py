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

from collections.abc import Sequence
from typing import Any

from penstock.config.schema import Queues as Settings
from penstock.database import Database
from penstock.metrics import Metrics
from penstock.queues.ack import Acknowledger
from penstock.queues.admin import Admin
from penstock.queues.analytics import Analytics
from penstock.queues.catalog import Catalog
from penstock.queues.consumers import Consumers
from penstock.queues.context import QueueContext
from penstock.queues.crypto import Keys
from penstock.queues.dead import DeadLetters
from penstock.queues.exchange import Exchanger
from penstock.queues.failures import Failures
from penstock.queues.figures import Figures
from penstock.queues.groups import Groups
from penstock.queues.later import Later
from penstock.queues.merge import Pending, completed
from penstock.queues.messages import Messages
from penstock.queues.pop import Popper
from penstock.queues.push import Pusher
from penstock.queues.scheduled import Scheduled
from penstock.queues.schedules import Schedules
from penstock.queues.signals import Signals
from penstock.queues.sinks import Sinks
from penstock.queues.status import Status
from penstock.queues.streams import Streams
from penstock.queues.traces import Traces
from penstock.queues.transaction import Transactions
from penstock.queues.types import (
    Ack,
    Acked,
    Extended,
    Item,
    Popped,
    PopRequest,
    Pushed,
    TransactionResult,
)
from penstock.queues.upkeep import Upkeep


class Queues:
    """The queue engine of one broker. Parts: `admin`, `groups`, `dead`, `messages`, `traces`,
    `scheduled`, `schedules`, `status`, `analytics`, `sinks`, `streams`, `later`, `upkeep`."""

    def __init__(self, database: Database, settings: Settings, metrics: Metrics) -> None:
        self.database, self.settings = database, settings
        self.catalog = Catalog(database)
        self.keys = Keys(settings)
        self.signals = Signals(database, self._changed)
        self.figures = Figures(database)
        self.consumers = Consumers(database)
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
        context = QueueContext(database, settings, self.catalog, self.keys, self.signals)
        self.later = Later(context, pushed)
        self._failures = Failures(context)
        self._acknowledger = Acknowledger(context, self._failures, acked)
        self._exchanger = Exchanger(context, self._acknowledger)
        self._pusher = Pusher(context, self._exchanger, self.later, pushed)
        self._popper = Popper(context, self._exchanger, self.consumers, popped)
        self._transactions = Transactions(context, self._pusher, self._acknowledger)
        self.streams = Streams(context, self._transactions)
        self.scheduled = Scheduled(context)
        self.admin = Admin(context, self.scheduled)
        self.schedules = Schedules(context, self._pusher)
        self.groups = Groups(context, self.figures, self.consumers)
        self.dead = DeadLetters(context)
        self.messages = Messages(context)
        self.traces = Traces(context)
        self.status = Status(context, self.figures)
        self.analytics = Analytics(database)
        self.sinks = Sinks(database)
        self.upkeep = Upkeep(database, settings, metrics)
        metrics.gauge(
            "penstock_queue_waiting_pops",
            "Long-polling pops that wait for messages",
            read=lambda: self.signals.waiting,
        )
        metrics.gauge(
            "penstock_queue_merging",
            "Requests waiting to be combined into one SQL call",
            "kind",
            read=lambda: self._merging(),
        )

    async def start(self) -> None:
        self.database.on_change(self._database_changed)
        await self.signals.start()
        self.later.start()
        await self.upkeep.start()
        self.schedules.start()

    async def stop(self) -> None:
        await self.schedules.stop()
        self._popper.answer_waiting()
        await self._exchanger.stop()
        await self._failures.stop()
        await self._pusher.merger.drain()
        await self.later.stop()
        await self.upkeep.stop()
        await self.signals.stop()

    def answer_waiting(self) -> None:
        """Have waiting pops answered and let none wait any more: listeners are about to close."""
        self._popper.answer_waiting()

    def push(self, items: list[Item]) -> Pending[list[Item], list[Pushed]]:
        """Store messages; done when durable. Safe to repeat when transaction ids are given."""
        pusher = self._pusher
        return pusher.merger.submit(Pending(pusher.named(items))) if items else completed(items, [])

    async def sealable(self, items: list[Item]) -> None:
        """Raise `MissingKey` when one of their queues asks for encryption and we have no key."""
        if self.keys.current is None:
            for queue in {item.queue for item in items}:
                await self.catalog.queue(queue)
            self.check_keys(items)

    def check_keys(self, items: list[Item]) -> None:
        """`sealable` as far as we remember the queues, for when the database cannot be asked."""
        if self.keys.current is None and any(self.catalog.encrypted(item.queue) for item in items):
            raise self.keys.missing

    def at_rest(self, item: Item) -> Item:
        """The item as it may lie in a file: with the moment it is due instead of a delay, which
        begins now; and sealed, unless its queue is known to be kept in clear or we have no key.
        """
        if isinstance(item.due, float):
            item.due = self.later.moment(item.due)
        if (
            item.key_id is not None
            or self.keys.current is None
            or self.catalog.encrypted(item.queue) is False
        ):
            return item
        return self.keys.seal_item(item)

    def opened(self, items: list[Item]) -> list[Item]:
        """The items with their payloads in clear. MissingKey or Damaged when one does not open."""
        return [self.keys.open_item(item) for item in items]

    def pop(self, request: PopRequest, acks: Sequence[Ack] = ()) -> Pending[Any, Popped]:
        """Take messages under a lease, after answering those of `acks`, in one commit. Cancelling
        it returns whatever was taken for it; what it acknowledged stays so.
        """
        return self._popper.pop(request, acks)

    def close_pops(self, closed: bool) -> None:
        """Let pops find nothing: those that wait are answered, and those that come wait until pops
        are open again.
        """
        self._popper.close(closed)

    def ack(self, acks: list[Ack]) -> Pending[Any, list[Acked]]:
        """Answer messages, each on its own. Repeating an acknowledgement changes nothing."""
        return self._exchanger.ack(acks) if acks else completed(acks, [])

    async def release(self, queue: str, group: str, holder: int) -> int:
        """End the leases of pops with this `PopRequest.holder`, uncounted; how many there were."""
        return await self._exchanger.release(queue, group, holder)

    async def extend(self, lease_id: str, seconds: int = 60) -> Extended:
        self._exchanger.held.forget(lease_id)  # its cursor changes
        return await self._acknowledger.extend(lease_id, seconds)

    async def transaction(
        self, operations: list[Item | Ack], required_leases: list[str] | None = None
    ) -> TransactionResult:
        """Push and acknowledge, all or nothing."""
        return await self._transactions.run(operations, required_leases or [])

    def _changed(self) -> None:
        """Something was configured, here or elsewhere."""
        self.catalog.forget()
        self.schedules.look()

    def _database_changed(self, healthy: bool) -> None:
        if healthy:
            self.signals.changed(announce=False)

    def _merging(self) -> dict[tuple[str, ...], Any]:
        requests = self._exchanger.merger.requests
        pops = sum(request.take is not None for request in requests)
        return {
            ("push",): self._pusher.merger.waiting,
            ("pop",): pops,
            ("ack",): len(requests) - pops,
        }
