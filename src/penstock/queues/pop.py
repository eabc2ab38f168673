"""Pop: take messages under a lease, wait for them when asked to, complete them at once
under auto-ack.

A pop is one object from its request to its answer (`Poll`), which needs no task for what is usual.
It looks, in a call that it shares with others. When there is nothing it parks until a push, an
acknowledgement or the database's own clock (a lease that expires, a message that becomes due) may
have changed that; the clock is only ever read in the database, which answers "look again in n
seconds". A push may take for a parked pop (handover.py). A caller that goes away while its pop is
under way gets its lease returned, uncounted.

Auto-ack is a lease that we complete ourselves before answering. One call would be faster, but if
the connection broke after its commit nobody would know which messages went missing; the outcome of
each of the two can be found out.

A pop may bring acknowledgements along: they are applied first, in the same call and commit, so that
a consumer's loop is one request and one commit per batch. They stay applied whatever becomes of the
pop.
"""

import asyncio
import time
from collections.abc import Generator, Sequence
from datetime import datetime
from typing import Any

from penstock.errors import InvalidRequest, PenstockError
from penstock.metrics import Counter
from penstock.protocol.names import DEFAULT_PARTITION, QUEUE_MODE
from penstock.protocol.times import time_field
from penstock.queues.ack import check
from penstock.queues.catalog import check_group, check_name, remember
from penstock.queues.consumers import Consumers
from penstock.queues.context import QueueContext
from penstock.queues.exchange import SEQS, Exchange, Exchanged, Exchanger, Take, Target
from penstock.queues.merge import SLICE, Pending
from penstock.queues.types import Ack, Acked, Message, Popped, PopRequest

AUTOPILOT_BATCH = 100
AUTOPILOT_PARTITIONS = 10
SOON_SECONDS = 0.005  # another call holds what we want: look again after this
AGAIN_SECONDS = 2.0  # for how long a pop whose time is over looks again where it has to


class Poll(Pending[Exchange, Popped]):
    """A pop on its way, and the future of its answer."""

    __slots__ = (
        "_acks",
        "_changes",
        "_deadline",
        "_delivered",
        "_nth",
        "_popper",
        "_reason",
        "_seen",
        "_targets",
        "_timer",
        "_wait",
        "acked",
        "batch",
        "claimed",
        "partitions",
        "queues",
        "wanted",
    )

    def __init__(self, popper: "Popper", request: PopRequest, acks: Sequence[Ack]) -> None:
        super().__init__(Exchange(()))
        self._popper = popper
        self.wanted = request
        self.batch, self.partitions = popper.sizes(request)
        self._deadline = time.monotonic() + popper.patience(request)
        self._acks = acks  # that go along with the next look
        self.acked: Sequence[Acked] = ()
        self.queues = [] if request.queue is None else [request.queue]  # that it waits for
        self._targets: list[Target] = []
        self._nth = 0  # target is looked at next
        self._changes = 0  # what `Signals` said before the look
        self._seen: list[int] = []  # and of each of the queues
        self._wait: float | None = None  # until the next look, as far as the database knows
        self._reason = ""  # why there is nothing
        self._timer: asyncio.Handle | None = None  # while it is parked
        self.claimed = False  # parked, and a push takes for it
        self._delivered: Exchanged | None = None

    @property
    def partition(self) -> int | None:
        """The only one that it waits for."""
        return self._targets[0].partition if self._targets else None

    def wake(self) -> None:
        """Look at everything, again if need be."""
        self._unpark()
        if self.done():
            return
        popper, signals = self._popper, self._popper.signals
        if popper.closed:
            if self._reason or not self.wanted.wait or popper.stopping:
                self._rest()
            else:
                popper.shut_out.add(self)
                remaining = self._deadline - time.monotonic()
                self._timer = asyncio.get_running_loop().call_later(remaining, self._rest)
            return
        self._changes = signals.changes
        self._seen = signals.generations(self.queues)
        target = popper.known(self.wanted)
        if target is None:
            self.run(popper.targets(self.wanted), self._look)
        else:
            self._look([target])

    def take(self) -> Take | None:
        """What a push may take for it while it is parked: the usual, from any one partition."""
        if (
            self.wanted.queue is None
            or self.wanted.partition is not None
            or self.partitions != 1
            or len(self._targets) != 1
            or self.batch > SLICE
            or self._popper.catalog.shares(self.wanted.queue)
        ):
            return None
        return Take(self._targets[0], self.batch, 1, self.wanted.holder)

    def deliver(self, exchanged: Exchanged) -> None:
        """Complete this with what was taken for it."""
        self._unpark()
        self._delivered = exchanged
        if self.wanted.auto_ack or self.batch > SLICE:
            self.run(self._popper.answer_in_turns(self, exchanged))
            return
        take = exchanged.take
        assert take is not None
        try:
            messages: list[Message] = []
            for row in exchanged.rows:
                messages += self._popper.messages(take, take.lease_text, row, 0, SLICE)
        except PenstockError as error:
            self._popper.exchanger.orphaned(exchanged)
            super().complete(error)
        else:
            super().complete(self._popper.answer(self, exchanged, take.lease_text, messages))

    def complete(self, outcome: Any) -> None:
        """A look has an outcome."""
        if isinstance(outcome, BaseException):
            super().complete(outcome)
            return
        if self.request.acks:
            self.acked = outcome.acked
        if outcome.rows:
            self.deliver(outcome)
            return
        note = outcome.note
        if note in ("gone", "unknown"):
            target = outcome.take.target
            key = target.queue, target.group, target.partition or 0
            self._popper.catalog.groups.pop(key, None)
            self._wait = 0.0
        elif note in ("more", "discovering", "locked"):
            self._wait = 0.0 if note == "more" else SOON_SECONDS
        elif outcome.wait is not None:
            self._wait = outcome.wait if self._wait is None else min(self._wait, outcome.wait)
            self._reason = note
        self._look_at_next()

    def cancel(self, msg: Any = None) -> bool:
        self._unpark()
        return super().cancel(msg)

    def __await__(self) -> Generator[Any, None, Popped]:
        try:
            return (yield from super().__await__())
        except asyncio.CancelledError:
            if not self.cancelled() and self._delivered is not None:
                # in the very turn in which the caller was cancelled
                self._popper.exchanger.orphaned(self._delivered)
            raise

    def _look(self, targets: list[Target]) -> None:
        self._targets, self._nth = targets, 0
        self._wait, self._reason = None, "empty" if targets else "unknown"
        if self.wanted.queue is None:
            self.queues = [target.queue for target in targets]
            self._seen = self._popper.signals.generations(self.queues)
        self._look_at_next()

    def _look_at_next(self) -> None:
        take = None
        if self._nth < len(self._targets):
            target = self._targets[self._nth]
            self._nth += 1
            take = Take(target, self.batch, self.partitions, self.wanted.holder)
        elif not self._acks:
            self._rest()
            return
        self.request, self._acks = Exchange(self._acks, take), ()
        self._popper.exchanger.merger.submit(self)

    def _rest(self) -> None:
        """There was nothing anywhere: say so, look again, or park."""
        popper, signals, wait = self._popper, self._popper.signals, self._wait
        again = wait == 0.0 or (wait == SOON_SECONDS and not self.wanted.wait)
        remaining = self._deadline - time.monotonic()
        if (
            popper.closed
            or popper.stopping
            or (remaining <= 0 and not again)
            or (again and remaining < -AGAIN_SECONDS)
        ):
            self._unpark()
            if self._acks:
                self._targets = []
                self._look_at_next()
                return
            popped = Popped(self.wanted.group, self.wanted.queue, reason=self._reason or "empty")
            popped.acked = list(self.acked)
            super().complete(popped)
            return
        loop = asyncio.get_running_loop()
        if again:
            self._timer = loop.call_later(wait or 0, self.wake)
        elif signals.changes != self._changes or signals.generations(self.queues) != self._seen:
            self.wake()
        else:
            pause = remaining if wait is None else min(remaining, max(wait, SOON_SECONDS))
            pause = max(0, min(pause, popper.poll_interval))
            self._timer = loop.call_later(pause, self.wake)
            signals.park(self)

    def _unpark(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.claimed = False
            self._popper.signals.leave(self)
            self._popper.shut_out.discard(self)


class Popper:
    def __init__(
        self, context: QueueContext, exchanger: Exchanger, consumers: Consumers, popped: Counter
    ) -> None:
        self.catalog, self.signals = context.catalog, context.signals
        self._database, self._keys = context.database, context.keys
        self._settings = context.settings
        self.poll_interval = context.settings.poll_interval
        self.exchanger = exchanger
        self._consumers = consumers
        self._popped = popped
        self.closed = False  # pops find nothing
        self.shut_out: set[Poll] = set()  # that came while they were closed
        self.stopping = False

    def pop(self, request: PopRequest, acks: Sequence[Ack]) -> Poll:
        """Look until there is something or the time is over. Cancelling it returns what was taken
        for it.
        """
        for ack in acks:
            check(ack)
        self._consumers.seen(request.queue, request.group, request.consumer)
        poll = Poll(self, request, acks)
        poll.wake()
        return poll

    def close(self, closed: bool) -> None:
        """Let pops find nothing, or open them again."""
        self.closed = closed
        self._wake_all()

    def answer_waiting(self) -> None:
        """Answer all that wait, and let none wait any more."""
        self.stopping = True
        self._wake_all()

    def _wake_all(self) -> None:
        self.signals.wake_all()
        for poll in tuple(self.shut_out):
            poll.wake()

    def sizes(self, request: PopRequest) -> tuple[int, int]:
        batch, partitions = request.batch, request.partitions
        if batch is None:
            batch = AUTOPILOT_BATCH if request.autopilot else self._settings.default_batch
        if partitions is None:
            partitions = AUTOPILOT_PARTITIONS if request.autopilot else 1
        return max(1, min(batch, self._settings.max_batch)), max(1, min(partitions, 10_000))

    def patience(self, request: PopRequest) -> float:
        """How many seconds it waits."""
        if not request.wait:
            return 0.0
        default = self._settings.default_timeout_ms / 1000
        return default if request.timeout is None else request.timeout

    def known(self, request: PopRequest) -> Target | None:
        """The one group to take for, if nothing has to be asked of the database."""
        queue, number = request.queue, None
        if queue is None or request.subscription_mode or request.subscription_from:
            return None
        if request.partition is not None:
            number = self.catalog.partitions.get((queue, request.partition))
            if number is None:
                return None
        group_id = self.catalog.groups.get((queue, request.group, number or 0))
        if group_id is None or self.catalog.lease_time(queue) is None:
            return None
        return Target(queue, request.group, group_id, number)

    async def targets(self, request: PopRequest) -> list[Target]:
        """All that it takes for, the most important first."""
        start = subscription_of(request, self._settings.default_subscription_mode)
        if request.queue is not None:
            check_name("queue", request.queue)
            names = [request.queue]
        else:
            matching = await self.catalog.matching(request.namespace, request.task)
            names = [info.name for info in matching]
        targets = [await self._target(name, request, start) for name in names]
        return [target for target in targets if target is not None]

    async def _target(
        self, queue: str, request: PopRequest, start: tuple[str, datetime | None]
    ) -> Target | None:
        info, group, number = await self.catalog.queue(queue), request.group, None
        if request.partition is not None:
            number = await self.catalog.partition(queue, request.partition)
            if number is None:
                return None
        group_id = self.catalog.groups.get((queue, group, number or 0))
        if group_id is None:
            check_group(group)
            if info is None and start[0] != "all":
                # a place to remember where the group starts
                await self.catalog.ensure([(queue, DEFAULT_PARTITION)])
                info = await self.catalog.queue(queue)
            if info is None:
                return None
            rows = await self._database.read(
                "SELECT queue_subscribe($1, $2, $3, $4, $5)", info.id, group, number, *start
            )
            group_id = rows[0][0]
            if group_id is None:
                self.catalog.forget()
                return None
            remember(self.catalog.groups, (queue, group, number or 0), group_id)
        return Target(queue, group, group_id, number)

    async def answer_in_turns(self, poll: Poll, exchanged: Exchanged) -> Popped:
        """The answer of a pop that completes its messages, or has many: others get a turn."""
        take, auto_ack = exchanged.take, poll.wanted.auto_ack
        assert take is not None
        lease = "" if auto_ack else take.lease_text
        messages: list[Message] = []
        try:
            if auto_ack:
                await self.exchanger.complete(take)
            for row in exchanged.rows:
                for begin in range(0, len(row[SEQS]), SLICE):
                    if begin:
                        await asyncio.sleep(0)
                    messages += self.messages(take, lease, row, begin, begin + SLICE)
        except (PenstockError, asyncio.CancelledError):
            self.exchanger.orphaned(exchanged)
            raise
        if auto_ack:
            self.exchanger.acked.add(len(messages), take.target.queue, "completed")
        return self.answer(poll, exchanged, lease, messages)

    def answer(
        self, poll: Poll, exchanged: Exchanged, lease: str, messages: list[Message]
    ) -> Popped:
        assert exchanged.take is not None
        queue, group, count = exchanged.take.target.queue, poll.wanted.group, len(messages)
        self._popped.add(count, queue)
        if poll.wanted.queue is None:
            self._consumers.seen(queue, group, poll.wanted.consumer)
        if count >= poll.batch and self.catalog.shares(queue):  # and there may be more
            self.signals.available(queue, 1, group, announce=False)
        partitions, acked = len(exchanged.rows), list(poll.acked)
        return Popped(group, queue, lease, messages, partitions, "", acked)

    def messages(self, take: Take, lease: str, row: Any, begin: int, end: int) -> list[Message]:
        """Some of the messages of a row."""
        _, partition, name, *columns = row[:11]
        nothing = (None,) * len(columns[0])
        partition_id, uuid = self.catalog.partition_uuid(partition), self.catalog.message_uuid
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
