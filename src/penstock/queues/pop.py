"""Pop: take messages under a lease, wait for them when asked to, complete them at once
under auto-ack.

A pop that finds nothing parks until a push, an acknowledgement or the database's own clock (a lease
that expires, a message that becomes due) may have changed that; the clock is only ever read in the
database, which answers "look again in n seconds". A caller that goes away while its pop is under
way gets its lease returned, uncounted.

Auto-ack is a lease that we complete ourselves before answering. One call would be faster, but if
the connection broke after its commit nobody would know which messages went missing; the outcome of
each of the two can be found out.

A pop may bring acknowledgements along: they are applied first, in the same call and commit, so that
a consumer's loop is one request and one commit per batch. They stay applied whatever becomes of the
pop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.errors import InvalidRequest, PenstockError
from penstock.metrics import Counter
from penstock.protocol.names import DEFAULT_PARTITION, QUEUE_MODE
from penstock.protocol.times import time_field
from penstock.queues.ack import check
from penstock.queues.catalog import check_group, check_name, remember
from penstock.queues.context import QueueContext
from penstock.queues.exchange import SEQS, Exchange, Exchanged, Exchanger, Take, Target
from penstock.queues.merge import SLICE, Pending
from penstock.queues.signals import Waiter
from penstock.queues.types import Ack, Acked, Message, Popped, PopRequest

# What lets a pop wait for long: it may answer None instead, when pops are closed meanwhile.
Patience = Callable[[Awaitable[Popped]], Awaitable[Popped | None]]

AUTOPILOT_BATCH = 100
AUTOPILOT_PARTITIONS = 10
SOON_SECONDS = 0.005  # another call holds what we want: look again after this


@dataclass(slots=True)
class Looked:
    """A first look, for which no task was needed."""

    exchanged: Exchanged
    target: Target
    changes: int  # what `Signals` said before it
    generation: int


class Popper:
    def __init__(self, context: QueueContext, exchanger: Exchanger, popped: Counter) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._keys, self._signals = context.keys, context.signals
        self._settings = context.settings
        self._exchanger = exchanger
        self._popped = popped
        self._stopping = False

    def answer_waiting(self) -> None:
        self._stopping = True
        self._signals.wake_all()

    def begin(
        self, request: PopRequest, acks: Sequence[Ack], patience: Patience
    ) -> "Pending[Exchange, Any] | None":
        """`pop` for the usual request, without a task unless it has to wait; None: it is not usual.
        Cancelling the future returns what was taken for it.
        """
        group_id = self._catalog.groups.get((request.queue or "", request.group, 0))
        batch, partitions = self._sizes(request)
        if (
            group_id is None
            or request.queue is None
            or request.partition is not None
            or request.auto_ack
            or request.subscription_mode
            or request.subscription_from
            or batch > SLICE
        ):
            return None
        for ack in acks:
            check(ack)
        target = Target(request.queue, request.group, group_id, None)
        take = Take(target, batch, partitions, request.holder)
        signals = self._signals
        changes, generation = signals.changes, signals.generation.get(request.queue, 0)
        began = time.monotonic()
        pending = self._exchanger.merger.submit(Exchange(acks, take))

        def taken(pending: Pending[Exchange, Any], outcome: Exchanged | BaseException) -> bool:
            if isinstance(outcome, BaseException):
                return False
            if not outcome.rows:
                looked = Looked(outcome, target, changes, generation)
                pending.run(self._resume(request, looked, began, patience))
                return True
            messages: list[Message] = []
            lease = take.lease_text()
            try:
                for row in outcome.rows:
                    messages += self._messages(take, lease, row, 0, SLICE)
            except PenstockError as error:
                self._exchanger.orphaned(outcome)
                pending.complete(error)
                return True
            pending.complete(self._answered(request, outcome, lease, messages, batch))
            return True

        pending.intercept = taken
        return pending

    async def _resume(
        self, request: PopRequest, looked: Looked, began: float, patience: Patience
    ) -> Popped:
        popped = await patience(self.pop(request, (), began, looked))
        acked = list(looked.exchanged.acked)
        if popped is None:
            return Popped(request.group, request.queue, reason="empty", acked=acked)
        popped.acked = acked
        return popped

    async def pop(
        self,
        request: PopRequest,
        acks: Sequence[Ack],
        began: float | None = None,
        looked: Looked | None = None,
    ) -> Popped:
        """Look until there is something or the time is over; `looked` is a first look, if done."""
        for ack in acks:
            check(ack)
        acked: Sequence[Acked] = ()
        batch, partitions = self._sizes(request)
        start = subscription_of(request, self._settings.default_subscription_mode)
        timeout = (
            self._settings.default_timeout_ms / 1000 if request.timeout is None else request.timeout
        )
        began = time.monotonic() if began is None else began
        deadline = began + (timeout if request.wait else 0)
        names = [request.queue] if request.queue is not None else []
        while True:
            changes, generation = self._signals.changes, self._signals.generation
            seen = [generation.get(name, 0) for name in names]
            if looked is not None:
                changes, seen, targets = looked.changes, [looked.generation], [looked.target]
            else:
                targets = await self._targets(request, start)
                if request.queue is None:
                    names = [target.queue for target in targets]
                    seen = [generation.get(name, 0) for name in names]
            wait: float | None = None
            reason = "empty" if targets else "unknown"
            if acks and not targets:
                acked, acks = await self._exchanger.ack(list(acks)), ()
            for target in targets:
                if looked is not None:
                    exchanged, looked = looked.exchanged, None
                else:
                    take = Take(target, batch, partitions, request.holder)
                    exchanged = await self._exchanger.take(Exchange(acks, take))
                if acks:
                    acked, acks = exchanged.acked, ()
                if exchanged.rows:
                    popped = await self._answer(request, exchanged, batch)
                    popped.acked = list(acked)
                    return popped
                if exchanged.note in ("gone", "unknown"):
                    self._catalog.groups.pop(
                        (target.queue, target.group, target.partition or 0), None
                    )
                    wait = 0.0
                elif exchanged.note in ("more", "discovering", "locked"):
                    wait = 0.0 if exchanged.note == "more" else SOON_SECONDS
                elif exchanged.wait is not None:
                    wait = exchanged.wait if wait is None else min(wait, exchanged.wait)
                    reason = exchanged.note
            again = wait == 0.0 or (wait == SOON_SECONDS and not request.wait)
            remaining = deadline - time.monotonic()
            if self._stopping or (remaining <= 0 and not again) or (again and remaining < -2):
                return Popped(
                    group=request.group, queue=request.queue, reason=reason, acked=list(acked)
                )
            if again:
                await asyncio.sleep(wait or 0)
            elif self._signals.changes == changes and seen == [
                generation.get(name, 0) for name in names
            ]:
                pause = min(
                    remaining,
                    self._settings.poll_interval,
                    max(wait, SOON_SECONDS) if wait is not None else remaining,
                )
                handed = await self._park(request, targets, names, max(pause, 0))
                if handed is not None:
                    popped = await self._answer(request, handed, batch)
                    popped.acked = list(acked)
                    return popped

    async def _park(
        self, request: PopRequest, targets: list[Target], names: list[str], pause: float
    ) -> Exchanged | None:
        """Wait until there may be something; what a push took for us, if it did."""
        partition = targets[0].partition if request.partition is not None and targets else None
        waiter = Waiter(partition, self._wanted(request, targets))
        for name in names:
            self._signals.park(name, request.group, waiter)
        try:
            await waiter.wait(pause)
        except asyncio.CancelledError:
            if waiter.exchanged is not None:
                self._exchanger.orphaned(waiter.exchanged)
            raise
        finally:
            waiter.gone = True
            for name in names:
                self._signals.leave(name, request.group, waiter)
        exchanged: Exchanged | None = waiter.exchanged
        return exchanged

    def _wanted(
        self, request: PopRequest, targets: list[Target]
    ) -> tuple[Target, int, int, int | None] | None:
        """The `Take` that a push may make for a parked pop: the usual, from any one partition."""
        batch, partitions = self._sizes(request)
        if (
            request.queue is None
            or request.partition is not None
            or request.auto_ack
            or partitions != 1
            or len(targets) != 1
            or batch > SLICE
            or self._catalog.shares(request.queue)
        ):
            return None
        return targets[0], batch, 1, request.holder

    def _sizes(self, request: PopRequest) -> tuple[int, int]:
        batch, partitions = request.batch, request.partitions
        if batch is None:
            batch = AUTOPILOT_BATCH if request.autopilot else self._settings.default_batch
        if partitions is None:
            partitions = AUTOPILOT_PARTITIONS if request.autopilot else 1
        return max(1, min(batch, self._settings.max_batch)), max(1, min(partitions, 10_000))

    async def _targets(
        self, request: PopRequest, start: tuple[str, datetime | None]
    ) -> list[Target]:
        if request.queue is None:
            targets = []
            for info in await self._catalog.matching(request.namespace, request.task):
                targets += await self._target(info.name, None, request.group, start)
            return targets
        check_name("queue", request.queue)
        return await self._target(request.queue, request.partition, request.group, start)

    async def _target(
        self, queue: str, partition: str | None, group: str, start: tuple[str, datetime | None]
    ) -> list[Target]:
        number = None
        if partition is not None:
            number = await self._catalog.partition(queue, partition)
            if number is None:
                return []
        group_id = self._catalog.groups.get((queue, group, number or 0))
        if group_id is None:
            check_group(group)
            info = await self._catalog.queue(queue)
            if info is None:
                if start[0] == "all":
                    return []
                # a place to remember where the group starts
                await self._catalog.ensure([(queue, DEFAULT_PARTITION)])
                info = await self._catalog.queue(queue)
                if info is None:
                    return []
            rows = await self._database.read(
                "SELECT queue_subscribe($1, $2, $3, $4, $5)", info.id, group, number, *start
            )
            group_id = rows[0][0]
            if group_id is None:
                self._catalog.forget()
                return []
            remember(self._catalog.groups, (queue, group, number or 0), group_id)
        return [Target(queue, group, group_id, number)]

    async def _answer(self, request: PopRequest, exchanged: Exchanged, batch: int) -> Popped:
        take = exchanged.take
        assert take is not None
        lease = "" if request.auto_ack else take.lease_text()
        messages: list[Message] = []
        try:
            if request.auto_ack:
                await self._exchanger.complete(take)
            for row in exchanged.rows:
                for begin in range(0, len(row[SEQS]), SLICE):
                    if begin:
                        await asyncio.sleep(0)
                    messages += self._messages(take, lease, row, begin, begin + SLICE)
        except (PenstockError, asyncio.CancelledError):
            self._exchanger.orphaned(exchanged)
            raise
        if request.auto_ack:
            self._exchanger.acked.add(len(messages), take.target.queue, "completed")
        return self._answered(request, exchanged, lease, messages, batch)

    def _answered(
        self,
        request: PopRequest,
        exchanged: Exchanged,
        lease: str,
        messages: list[Message],
        batch: int,
    ) -> Popped:
        take = exchanged.take
        assert take is not None
        queue = take.target.queue
        self._popped.add(len(messages), queue)
        if len(messages) >= batch and self._catalog.shares(queue):  # and there may be more
            self._signals.available(queue, 1, take.target.group, announce=False)
        count = len(exchanged.rows)
        return Popped(request.group, queue, lease, messages, count, "", list(exchanged.acked))

    def _messages(self, take: Take, lease: str, row: Any, begin: int, end: int) -> list[Message]:
        """Some of the messages of a row."""
        _, partition, name, *columns = row[:11]
        nothing = (None,) * len(columns[0])
        partition_id, uuid = self._catalog.partition_uuid(partition), self._catalog.message_uuid
        queue, group = take.target.queue, take.target.group
        return [
            Message(
                uuid(partition, seq),
                transaction,
                None if trace is None else str(trace),
                payload if key is None else self._keys.open(partition, key, payload),
                producer,
                at,
                queue,
                name,
                partition_id,
                lease,
                group,
                seq,
                header
                if key is None or header is None
                else self._keys.open_headers(partition, key, header),
            )
            for seq, transaction, trace, at, producer, key, payload, header in zip(
                *((column or nothing)[begin:end] for column in columns), strict=True
            )
        ]


def subscription_of(request: PopRequest, default_mode: str) -> tuple[str, datetime | None]:
    """Where a new group starts: the mode to remember, and the moment for `timestamp`."""
    origin, mode = request.subscription_from or "", request.subscription_mode or default_mode
    start = time_field(origin, "subscriptionFrom") if origin and origin != "now" else None
    if request.group == QUEUE_MODE:
        return "all", None
    if start is not None:
        return "timestamp", start
    if origin == "now" or mode in ("new", "new-only"):
        return "new", None
    if mode not in ("", "all", "from_beginning"):
        raise InvalidRequest(f"subscriptionMode '{mode}' is none of: all, new, new-only")
    return "all", None
