"""What consumers ask of the database: settle messages, then take the next ones. Requests that
arrive together, of whichever consumer, share one call and one commit, and each gets its own answer.

A lease belongs to a client only when the client gets the messages. Until then it is ours to return,
and no attempt is counted: when the outcome of a call is unknown (it is released before the call is
repeated, and again when the call has surely ended), when anything fails after the call, and when
the client went away meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from penstock.database.batching import SLICE, Batcher
from penstock.database.retry import BACKGROUND_SECONDS
from penstock.errors import Busy, PenstockError, Unavailable
from penstock.metrics import Counter
from penstock.protocol.ids import uuid7
from penstock.protocol.message_ids import lease_of, leases_of
from penstock.queues.calls import AppendArguments, AppendedRow, Row, TakeArguments
from penstock.queues.catalog import remember
from penstock.queues.context import QueueContext
from penstock.queues.failures import Failures
from penstock.queues.settling import STATUSES, AckBatch, AckRun, LeaseMemory
from penstock.queues.types import Ack, AckOutcome, Item

R = TypeVar("R")
Served = dict[tuple[str, str], int]  # queue, group -> waiting pops that a push took for

TAKE_WEIGHT = 4  # what a pop adds to the size of a call; an acknowledgement adds 1
MAX_TAKES = 256  # in a call
LINGERING_SECONDS = 5.0  # after which a call cut off in the middle has ended one way or the other
# Cursors that were due long ago and are not any more leave dead index entries, which vacuum cannot
# remove while something holds an old snapshot. A scan begins shortly before the last cursor that
# was due; at most once a second, and for at most a twentieth of the time, it goes through all of
# them.
SLACK = timedelta(seconds=0.25)
FULL_SCAN_SECONDS, MAX_FULL_SCAN_SECONDS, FULL_SCAN_SHARE = 1.0, 10.0, 20


@dataclass(slots=True)
class Take:
    """Messages that a group of a queue wants under one lease."""

    queue: str
    group: str
    group_id: int
    partition: int | None  # the one that it wants; None: any
    batch: int  # how many messages at most
    partitions: int  # from how many at most
    holder: int | None
    from_any_partition: bool = field(init=False)  # and from one only
    lease: UUID = field(init=False)
    lease_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.from_any_partition = self.partition is None and self.partitions == 1
        self.renew_lease()

    def renew_lease(self) -> None:
        """Get a lease, another one each time."""
        self.lease = uuid7() if self.holder is None else lease_of(self.holder)
        self.lease_id = str(self.lease)


@dataclass(slots=True)
class TakenBatch:
    """What a take got. Without rows `outcome` says why, and `wait` when to poll again."""

    take: Take
    rows: Sequence[Row]  # of type `taken`, with messages
    outcome: str
    wait: float | None = None


@dataclass(slots=True)
class Exchange:
    """What one request wants of a call: settle, then take, or one of the two."""

    acks: Sequence[Ack]
    take: Take | None = None


Exchanged = tuple[Sequence[AckOutcome], TakenBatch | None]  # what the request gets


@dataclass(slots=True)
class DueHint:
    """Where the scan for due cursors of a group begins."""

    since: datetime | None = None  # no cursor that was due before is due now
    full_scan_at: float = 0.0  # (monotonic)


class Exchanges:
    def __init__(self, context: QueueContext, failures: Failures, acked: Counter) -> None:
        self._database, self._calls = context.database, context.calls
        self._catalog, self._waiting = context.catalog, context.waiting
        self._max_bytes = context.settings.max_batch_bytes
        self._failures = failures
        self.acked = acked
        self.memory = LeaseMemory()
        self.batcher: Batcher[Exchange, Exchanged] = Batcher(
            self._exchange,
            size=lambda one: len(one.acks) + (TAKE_WEIGHT if one.take else 0),
            limit=max(context.settings.merge_max, MAX_TAKES * TAKE_WEIGHT),
            slots=2,
            unclaimed=lambda exchanged: self.give_back(exchanged[1]),
        )
        self._completions: Batcher[UUID, None] = Batcher(self._complete, limit=1000, slots=2)
        self._hints: dict[int, DueHint] = {}  # by group; of limited number
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        await self.batcher.drain()
        await self._completions.drain()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=0.5)
        for task in tuple(self._tasks):
            task.cancel()

    async def exchange(self, acks: Sequence[Ack], take: Take | None = None) -> Exchanged:
        """Record outcomes, then take. Repeating the acknowledgements changes nothing. Cancelling it
        gives back what was taken.
        """
        return await self.batcher.ask(Exchange(acks, take))

    async def complete(self, take: Take) -> None:
        """Complete all that was taken (auto-ack)."""
        self.memory.forget(take.lease_id)
        await self._completions.submit(take.lease)

    async def _complete(self, leases: list[UUID], again: bool) -> list[PenstockError | None]:
        del again  # a lease that has ended stays so
        await self._calls.complete(leases)
        return [None] * len(leases)

    async def _exchange(
        self, requests: list[Exchange], again: bool
    ) -> list[Exchanged | PenstockError]:
        takes = [request.take for request in requests if request.take is not None]
        if again and takes:  # it may have been committed, or be about to; nobody has its leases
            lost = [take.lease for take in takes]
            for take in takes:
                take.renew_lease()
            await self._calls.release(lost)
        batch = AckBatch([ack for request in requests for ack in request.acks])
        runs = await batch.arguments(self._catalog, self.memory)

        async def call(wanted: TakeArguments | None) -> tuple[list[AckOutcome], list[Row]]:
            settled, taken = await self._calls.settle_and_take(runs, wanted)
            return await batch.fill(settled), taken

        if takes:
            acked, deliveries = await self._take(takes, call)
        else:
            (acked, _), deliveries = await call(None), {}
        self.announce(batch.acks, acked)
        results: list[Exchanged | PenstockError] = []
        begin = 0
        for request in requests:
            end = begin + len(request.acks)
            results.append((acked[begin:end], deliveries.get(id(request.take))))
            begin = end
        return results

    def announce(self, acks: Sequence[Ack], answers: Sequence[AckOutcome]) -> None:
        """Count, and wake pops that may take what became free."""
        freed: dict[tuple[str, str], set[str]] = {}
        counted: dict[tuple[str, str], int] = {}
        for ack, answer in zip(acks, answers, strict=True):
            if answer.success and answer.queue is not None:
                if answer.changed:
                    key = answer.queue, STATUSES[ack.status]
                    counted[key] = counted.get(key, 0) + 1
                    if key[1] != "completed":
                        self._failures.note(ack)
                if answer.more and (answer.lease_released or ack.status in ("failed", "retry")):
                    freed.setdefault((answer.queue, ack.group), set()).add(answer.partition or "")
        for (queue, status), count in counted.items():
            self.acked.add(count, queue, status)
        for (queue, group), partitions in freed.items():
            self._waiting.available(queue, len(partitions), group)

    async def append_and_hand_off(
        self, arguments: AppendArguments, items: Iterable[Item], served: Served
    ) -> AppendedRow:
        """Store the items of a push and take for the pops that wait for them, in one commit. Count
        these in `served`. A pop that gets nothing is woken, and what was taken for a pop that has
        ended is released.

        When the outcome is unknown the leases are released: the push is repeated without this.
        """
        pops = self._waiting.claim(items)
        if not pops:
            return await self._calls.append(arguments)
        takes: list[Take] = [pop.take for pop in pops]
        try:
            call = partial(self._calls.append_and_take, arguments)
            appended, deliveries = await self._take(takes, call, hand_over=True)
            for pop, take in zip(pops, takes, strict=True):
                taken = deliveries.get(id(take))
                if pop.claimed:  # else it has ended, or begun another poll
                    key = take.queue, take.group
                    served[key] = served.get(key, 0) + 1
                if taken is not None and not (pop.claimed and pop.hand_over(taken)):
                    self.give_back(taken)
        finally:
            for pop in pops:
                if pop.claimed:
                    pop.wake()
        return appended

    # Takes

    async def _take(
        self,
        takes: list[Take],
        call: Callable[[TakeArguments], Awaitable[tuple[R, list[Row]]]],
        *,
        hand_over: bool = False,
    ) -> tuple[R, dict[int, TakenBatch]]:
        """Make a call that takes, among other things. What else it returned, and what each take
        got, by its identity. When the outcome is unknown the leases are released.
        """
        takes = sorted(takes, key=lambda take: (not take.from_any_partition, take.group_id))
        simple = all(take.from_any_partition for take in takes)
        sent, began = self._database.healthy, time.monotonic()
        since = {group: self._since(group, began) for group in {take.group_id for take in takes}}
        wanted = TakeArguments(
            groups=[take.group_id for take in takes],
            batches=[take.batch for take in takes],
            leases=[take.lease for take in takes],
            since=[since[take.group_id] for take in takes],
            partitions=None if simple else [take.partition for take in takes],
            spans=None if simple else [take.partitions for take in takes],
            max_bytes=self._max_bytes,
            hand_over=hand_over,
        )
        try:
            result, rows = await call(wanted)
            return result, self._taken(takes, wanted, rows, began)
        except Busy:
            raise  # rolled back
        except BaseException:
            if sent:
                self._spawn(self._release_twice([take.lease for take in takes]))
            raise

    def _taken(
        self, takes: list[Take], sent: TakeArguments, rows: list[Row], began: float
    ) -> dict[int, TakenBatch]:
        """What each take got. Its rows are together, and the last has an outcome."""
        cost = FULL_SCAN_SHARE * (time.monotonic() - began)
        if cost > FULL_SCAN_SECONDS:
            for group, since in zip(sent.groups, sent.since, strict=True):
                hint = self._hints.get(group)
                if since is None and hint is not None:
                    hint.full_scan_at = began + min(cost, MAX_FULL_SCAN_SECONDS)
        deliveries: dict[int, TakenBatch] = {}
        begin = 0
        for end, row in enumerate(rows, 1):
            if row["outcome"] is None:
                continue
            take = takes[row["request"] - 1]
            messages = [one for one in rows[begin:end] if one["partition_id"] is not None]
            deliveries[id(take)] = TakenBatch(take, messages, row["outcome"], row["wait"])
            begin = end
            if take.partition is None and row["due_at"] is not None:
                floor, since = row["due_at"] - SLACK, sent.since[row["request"] - 1]
                hint = self._hints.get(take.group_id)
                if hint is not None:
                    hint.since = floor if since is None else max(floor, since)
            if row["version"] is not None and len(row["seqs"]) <= SLICE:
                partition = row["partition_id"]
                lease = AckRun(
                    partition,
                    take.group,
                    take.lease,
                    row["transactions"],
                    group_id=take.group_id,
                    version=row["version"],
                    last=row["seqs"][-1],
                    times=row["times"],
                    queue=take.queue,
                    partition_name=row["partition"],
                    partition_id=self._catalog.partition_uuid(partition),
                )
                self.memory.add(take.lease_id, lease)
        return deliveries

    def _since(self, group: int, now: float) -> datetime | None:
        """From which due time on to scan the cursors of a group; None: all of them."""
        hint = self._hints.get(group)
        if hint is None:
            hint = DueHint()
            remember(self._hints, group, hint)
        if now < hint.full_scan_at:
            return hint.since
        hint.full_scan_at = now + FULL_SCAN_SECONDS
        return None

    # Leases that no client has

    def give_back(self, delivery: TakenBatch | None) -> None:
        """Release what was taken for a pop that has ended, or whose messages were deleted."""
        if delivery is not None and (delivery.rows or delivery.outcome == "ok"):
            self._spawn(self._give_back(delivery.take))

    async def _give_back(self, take: Take) -> None:
        self.memory.forget(take.lease_id)
        await self._release([take.lease])
        self._waiting.available(take.queue, 1, take.group)

    async def _release_twice(self, leases: list[UUID]) -> None:
        """End the leases of a call that was cut off, once the database is back. The call may still
        be running there: end them again when it surely is not.
        """
        await self._release(leases)
        await asyncio.sleep(LINGERING_SECONDS)
        await self._release(leases)

    async def _release(self, leases: list[UUID]) -> None:
        while True:
            await self._database.recovered()
            try:
                await self._calls.release(leases)
            except Unavailable:
                await asyncio.sleep(BACKGROUND_SECONDS)
            else:
                return

    async def release_holder(self, queue: str, group: str, holder: int) -> int:
        """End the leases of a holder whose process died: what it had is free again at once."""
        ended = await self._calls.release(await self._calls.leases_between(*leases_of(holder)))
        if ended:
            self._waiting.available(queue, ended, group)
        return ended

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
