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
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any
from uuid import UUID

from penstock.config.schema import Queues as Settings
from penstock.database import Database
from penstock.errors import Busy, InvalidRequest, PenstockError, Unavailable
from penstock.metrics import Counter
from penstock.protocol.ids import uuid7
from penstock.protocol.message_ids import lease_of, leases_of
from penstock.protocol.names import DEFAULT_PARTITION, QUEUE_MODE
from penstock.protocol.times import time_field
from penstock.queues.ack import Acknowledger, Prepared, check
from penstock.queues.catalog import Catalog, check_group, check_name
from penstock.queues.crypto import Keys
from penstock.queues.merge import Merger
from penstock.queues.push import SLICE
from penstock.queues.signals import Signals, Waiter
from penstock.queues.types import Ack, Acked, Message, Popped, PopRequest

SQL = "SELECT * FROM queue_pop($1, $2, $3, $4, $5, $6, $7, $8)"
EXCHANGE = "SELECT * FROM queue_exchange(" + ", ".join(f"${n}" for n in range(1, 16)) + ")"
AUTOPILOT_BATCH = 100
AUTOPILOT_PARTITIONS = 10
SOON_SECONDS = 0.005  # another call holds what we want: look again after this
SLACK = timedelta(seconds=0.25)  # how far back cursors are looked at, beyond the last one seen due
LOOK_BACK = timedelta(seconds=2)  # and how much further before a pop says "empty"
RETRY_SECONDS = 1.0  # between tries to return leases
LINGERING_SECONDS = 5.0  # after which a call cut off in the middle has ended one way or the other
FULL_LOOK_SECONDS = 1.0  # between looks without that shortcut, at least
FULL_LOOK_SHARE, MAX_FULL_LOOK_SECONDS = (
    20,
    10.0,
)  # and 20 times what the last one took, but at most 10 s


@dataclass(slots=True)
class Target:
    """A group of one queue, and the one partition wanted, if any."""

    queue: str
    group: str
    group_id: int
    partition: int | None


@dataclass(slots=True)
class Take:
    """One claim in a merged call."""

    target: Target
    batch: int
    partitions: int
    lease: UUID
    holder: int | None = None
    acks: Sequence[Ack] = ()  # applied before it, in the same call


@dataclass(slots=True)
class Taken:
    take: Take
    rows: list[Any]
    note: str
    wait: float | None
    acked: Sequence[Acked] = ()


class Popper:
    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        keys: Keys,
        signals: Signals,
        acknowledger: Acknowledger,
        settings: Settings,
        popped: Counter,
    ) -> None:
        self._database, self._catalog, self._keys, self._signals = database, catalog, keys, signals
        self._acknowledger = acknowledger
        self._settings = settings
        self._popped = popped
        self.merger: Merger[Take, Taken] = Merger(
            self._run, size=_weight, limit=256, slots=2, orphan=self._orphaned
        )
        self._auto_acks: Merger[UUID, None] = Merger(self._complete, size=_one, limit=1000, slots=2)
        self._floors: dict[
            int, datetime
        ] = {}  # group -> cursors due before this were looked at already
        self._full_look: dict[int, float] = {}  # group -> when all of them are looked at next
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def answer_waiting(self) -> None:
        self._stopping = True
        self._signals.wake_all()

    async def stop(self) -> None:
        self.answer_waiting()
        await self.merger.drain()
        await self._auto_acks.drain()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=0.5)
        for task in tuple(self._tasks):
            task.cancel()

    async def pop(self, request: PopRequest, acks: Sequence[Ack] = ()) -> Popped:
        for ack in acks:
            check(ack)
        acked: Sequence[Acked] = ()
        batch, partitions = self._sizes(request)
        start = subscription_of(request, self._settings.default_subscription_mode)
        timeout = (
            self._settings.default_timeout_ms / 1000 if request.timeout is None else request.timeout
        )
        deadline = time.monotonic() + (timeout if request.wait else 0)
        names = [request.queue] if request.queue is not None else []
        while True:
            changes, generation = self._signals.changes, self._signals.generation
            seen = [generation.get(name, 0) for name in names]
            targets = await self._targets(request, start)
            if request.queue is None:
                names = [target.queue for target in targets]
                seen = [generation.get(name, 0) for name in names]
            wait: float | None = None
            reason = "empty" if targets else "unknown"
            if acks and not targets:
                acked, acks = await self._acknowledger.ack(list(acks)), ()
            for target in targets:
                lease = _new_lease(request.holder)
                taken = await self._take(
                    Take(target, batch, partitions, lease, request.holder, acks)
                )
                if acks:
                    acked, acks = taken.acked, ()
                if taken.rows:
                    popped = await self._answer(request, taken)
                    popped.acked = list(acked)
                    if len(popped.messages) >= batch and self._catalog.shares(
                        target.queue
                    ):  # and there may be more
                        self._signals.available(target.queue, 1, target.group, announce=False)
                    return popped
                if taken.note in ("gone", "unknown"):
                    self._catalog.groups.pop(
                        (target.queue, target.group, target.partition or 0), None
                    )
                    wait = 0.0
                elif taken.note in ("more", "discovering", "locked"):
                    wait = 0.0 if taken.note == "more" else SOON_SECONDS
                elif taken.wait is not None:
                    wait = taken.wait if wait is None else min(wait, taken.wait)
                    reason = taken.note
            again = wait == 0.0 or (wait == SOON_SECONDS and not request.wait)
            left = deadline - time.monotonic()
            if self._stopping or (left <= 0 and not again) or (again and left < -2):
                return Popped(
                    group=request.group, queue=request.queue, reason=reason, acked=list(acked)
                )
            if again:
                await asyncio.sleep(wait or 0)
            elif self._signals.changes == changes and seen == [
                generation.get(name, 0) for name in names
            ]:
                pause = min(
                    left,
                    self._settings.poll_interval,
                    max(wait, SOON_SECONDS) if wait is not None else left,
                )
                await self._park(request, targets, names, max(pause, 0))

    async def _park(
        self, request: PopRequest, targets: list[Target], names: list[str], pause: float
    ) -> None:
        waiter = Waiter(targets[0].partition if request.partition is not None and targets else None)
        for name in names:
            self._signals.park(name, request.group, waiter)
        try:
            await asyncio.wait_for(waiter.event.wait(), pause)
        except TimeoutError:
            pass
        finally:
            for name in names:
                self._signals.leave(name, request.group, waiter)

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
            number = self._catalog.partitions.get(
                (queue, partition)
            ) or await self._catalog.partition(queue, partition)
            if number is None:
                return []
        group_id = self._catalog.groups.get((queue, group, number or 0))
        if group_id is None:
            check_group(group)
            info = await self._catalog.queue(queue)
            if info is None:
                if start[0] == "all":
                    return []
                await self._catalog.ensure(
                    [(queue, DEFAULT_PARTITION)]
                )  # a place to remember where the group starts
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
            self._catalog.remember_group(queue, group, number, group_id)
        return [Target(queue, group, group_id, number)]

    async def _take(self, take: Take) -> Taken:
        pending = self.merger.submit(take)
        try:
            return await pending
        except asyncio.CancelledError:
            if pending.done() and not pending.cancelled() and pending.exception() is None:
                self._orphaned(pending.result())  # in the very turn the caller was cancelled
            raise

    async def _run(self, takes: list[Take], again: bool) -> list[Taken | PenstockError]:
        if (
            again
        ):  # the call may have been committed, or be about to: what it took was seen by nobody
            lost = [take.lease for take in takes]
            for take in takes:
                take.lease = _new_lease(take.holder)
            await self._database.fetch("SELECT queue_release($1, false)", lost)
        takes_in_order = sorted(range(len(takes)), key=lambda index: takes[index].target.group_id)
        now = time.monotonic()
        since = [self._since(takes[index].target.group_id, now) for index in takes_in_order]
        ordered = [takes[index] for index in takes_in_order]
        leases = [take.lease for take in ordered]
        acks = [ack for take in ordered for ack in take.acks]
        prepared = await Prepared.of(acks, self._catalog)
        sent = self._database.healthy
        try:
            rows = await self._database.fetch(
                SQL if prepared.arguments is None else EXCHANGE,
                *(prepared.arguments or ()),
                [take.target.group_id for take in ordered],
                [take.target.partition for take in ordered],
                [take.batch for take in ordered],
                [take.partitions for take in ordered],
                leases,
                since,
                [start and start - LOOK_BACK for start in since],
                self._settings.max_batch_bytes,
            )
        except Busy:
            raise  # rolled back
        except Unavailable:
            if sent:  # cut off: it may be committed, now or later, and nobody has its leases
                self._spawn(self._release_later(leases))
            raise
        if (cost := FULL_LOOK_SHARE * (time.monotonic() - now)) > FULL_LOOK_SECONDS:
            for take, start in zip(ordered, since, strict=True):
                if start is None:
                    self._full_look[take.target.group_id] = now + min(cost, MAX_FULL_LOOK_SECONDS)
        results: list[Taken | PenstockError] = [Unavailable("no answer")] * len(takes)
        begin = 0
        if prepared.arguments is not None:
            begin = await self._fill(prepared, rows)
        if acks:
            self._acknowledger.announce(acks, prepared.answers)
        acked = iter(prepared.answers)
        answers = [list(islice(acked, len(take.acks))) for take in ordered]
        for end, row in enumerate(rows[begin:], begin + 1):
            if (note := row["note"]) is not None:
                position = row["request"] - 1
                take = ordered[position]
                results[takes_in_order[position]] = Taken(
                    take,
                    [one for one in rows[begin:end] if one["seqs"] is not None],
                    note,
                    row["wait"],
                    answers[position],
                )
                self._remember(take, row, since[position])
                begin = end
        return results

    async def _fill(self, prepared: Prepared, rows: list[Any]) -> int:
        """Take over the rows that answer acknowledgements, which come first; how many they are."""
        for count, row in enumerate(rows):
            if row["items"] is None:
                return count
            names = "items", "outcomes", "queue", "partition", "released", "dead", "more"
            await prepared.fill(row[name] for name in names)
        return len(rows)

    def _since(self, group_id: int, now: float) -> datetime | None:
        """Cursors that were due long ago and are not any more leave dead index entries; do not wade
        through them.
        """
        if now >= self._full_look.get(group_id, 0):
            self._full_look[group_id] = now + FULL_LOOK_SECONDS
            return None
        return self._floors.get(group_id)

    def _remember(self, take: Take, row: Any, since: datetime | None) -> None:
        if take.target.partition is None and row["due"] is not None:
            self._floors[take.target.group_id] = max(
                row["due"] - SLACK, since or row["due"] - SLACK
            )

    async def _answer(self, request: PopRequest, taken: Taken) -> Popped:
        take, catalog = taken.take, self._catalog
        lease = "" if request.auto_ack else str(take.lease)
        try:
            if request.auto_ack:
                await self._auto_acks.submit(take.lease)
            messages: list[Message] = []
            queue, group = take.target.queue, take.target.group
            for (
                _,
                partition,
                name,
                seqs,
                transactions,
                traces,
                times,
                producers,
                keys,
                payloads,
                headers,
                *_,
            ) in taken.rows:
                partition_id, uuid = catalog.partition_uuid(partition), catalog.message_uuid
                nothing = [None] * len(seqs)
                columns = (
                    seqs,
                    transactions,
                    traces or nothing,
                    payloads,
                    producers or nothing,
                    times,
                    keys or nothing,
                    headers or nothing,
                )
                for begin in range(0, len(seqs), SLICE):
                    if begin:
                        await asyncio.sleep(0)
                    messages += [
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
                        for seq, transaction, trace, payload, producer, at, key, header in zip(
                            *(column[begin : begin + SLICE] for column in columns), strict=True
                        )
                    ]
        except (PenstockError, asyncio.CancelledError):
            self._orphaned(taken)
            raise
        self._popped.add(len(messages), queue)
        if request.auto_ack:
            self._acknowledger.acked.add(len(messages), queue, "completed")
        return Popped(request.group, queue, lease, messages, len(taken.rows))

    async def _complete(self, leases: list[UUID], again: bool) -> list[PenstockError | None]:
        rows = await self._database.fetch("SELECT * FROM queue_release($1, true)", leases)
        del rows, again
        return [None] * len(leases)

    def _orphaned(self, taken: Taken) -> None:
        """Nobody is there to receive this: give it back."""
        if taken.rows:
            self._spawn(self._return(taken.take))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release_later(self, leases: list[UUID]) -> None:
        """End the leases of calls that were cut off, once the database is back. Such a call may
        still be running there: end them again when it surely is not."""
        await self._release(leases)
        await asyncio.sleep(LINGERING_SECONDS)
        await self._release(leases)

    async def _release(self, leases: list[UUID]) -> None:
        while True:
            await self._database.recovered()
            try:
                await self._database.fetch("SELECT queue_release($1, false)", leases)
            except Unavailable:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def release(self, queue: str, group: str, holder: int) -> int:
        """End the leases of a holder that has none in use (its process died): what it held is free
        again at once.
        """
        rows = await self._database.fetch(
            """SELECT queue_release((SELECT coalesce(array_agg(DISTINCT l.lease_id), '{}')
                                       FROM leases l WHERE l.lease_id BETWEEN $1 AND $2), false)""",
            *leases_of(holder),
        )
        if rows:
            self._signals.available(queue, len(rows), group)
        return len(rows)

    async def _return(self, take: Take) -> None:
        await self._release([take.lease])
        self._signals.available(take.target.queue, 1, take.target.group)


def _one(_: object) -> int:
    return 1


def _weight(take: Take) -> int:
    return 1 + len(take.acks)


def _new_lease(holder: int | None) -> UUID:
    return uuid7() if holder is None else lease_of(holder)


def subscription_of(request: PopRequest, default_mode: str) -> tuple[str, datetime | None]:
    """Where a group that is not known yet starts: the mode to remember, and the moment for
    `timestamp`.
    """
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
