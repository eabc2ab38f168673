"""The calls that take messages, and the leases that no client has.

A consumer's call settles messages, then takes the next ones. Requests that arrive together, of all
consumers, share one call and one commit, and each gets its own answer. A push takes in its own call
for the pops that are parked here (`append_and_hand_off`).

A lease belongs to a client only when the client gets the messages. Until then it is ours to return,
and no attempt is counted: when the outcome of a call is unknown (it is released before the call is
repeated, and again when the call has surely ended), when anything fails after the call, and when
the client went away meanwhile.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from penstock.database.batching import Batcher
from penstock.database.retry import BACKGROUND_SECONDS
from penstock.errors import Busy, PenstockError, Unavailable
from penstock.metrics import Counter
from penstock.protocol.message_ids import leases_of
from penstock.queues.calls import AppendArguments, AppendedRow
from penstock.queues.context import QueueContext
from penstock.queues.failures import Failures
from penstock.queues.settling import STATUSES, AckBatch, LeaseMemory
from penstock.queues.taking import DueHint, Take, TakeBatch, Taken
from penstock.queues.types import Ack, AckOutcome, Item

Served = dict[tuple[str, str], int]  # queue, group -> waiting pops that a push took for

TAKE_WEIGHT = 4  # what a pop adds to the size of a call; an acknowledgement adds 1
MAX_TAKES = 256  # in a call
LINGERING_SECONDS = 5.0  # after which a call cut off in the middle has ended one way or the other


@dataclass(slots=True)
class Exchange:
    """What one request wants of a call: settle, then take, or one of the two."""

    acks: Sequence[Ack]
    take: Take | None = None


Exchanged = tuple[Sequence[AckOutcome], Taken | None]  # what the request gets


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
            limit=max(context.settings.merge_max, MAX_TAKES * TAKE_WEIGHT),
            slots=2,
            give_back=lambda exchanged: self.give_back(exchanged[1]),
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
        size = len(acks) + (TAKE_WEIGHT if take else 0)
        return await self.batcher.ask(Exchange(acks, take), size)

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
        wanted = [request.take for request in requests if request.take is not None]
        if again and wanted:  # it may have been committed, or be about to; nobody has its leases
            lost = [take.lease for take in wanted]
            for take in wanted:
                take.renew_lease()
            await self._calls.release(lost)
        takes = TakeBatch(wanted, self._hints, self.memory)
        acks = AckBatch([ack for request in requests for ack in request.acks])
        runs = await acks.arguments(self._catalog, self.memory)
        with self._released_unless_taken(takes):
            arguments = takes.arguments(self._max_bytes) if wanted else None
            settled, rows = await self._calls.settle_and_take(runs, arguments)
            acked = await acks.results(settled)
            taken = takes.results(rows, self._catalog)
        self.count_and_wake(acks.acks, acked)
        results: list[Exchanged | PenstockError] = []
        begin = 0
        for request in requests:
            end = begin + len(request.acks)
            results.append((acked[begin:end], taken.get(id(request.take))))
            begin = end
        return results

    def count_and_wake(self, acks: Sequence[Ack], answers: Sequence[AckOutcome]) -> None:
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
            self._waiting.wake(queue, len(partitions), group)

    async def append_and_hand_off(
        self, arguments: AppendArguments, items: Iterable[Item]
    ) -> tuple[AppendedRow, Served]:
        """Store the items of a push and take for the pops that wait for them, in one commit. Return
        also how many pops of each queue and group it served. A pop that gets nothing is woken, and
        what was taken for a pop that has ended is released.

        When the outcome is unknown the leases are released: the push is repeated without this.
        """
        pops = {id(pop.take): pop for pop in self._waiting.claim(items)}
        if not pops:
            return await self._calls.append(arguments), {}
        served: Served = {}
        wanted = [pop.take for pop in pops.values() if pop.take is not None]
        takes = TakeBatch(wanted, self._hints, self.memory)
        try:
            with self._released_unless_taken(takes):
                appended, rows = await self._calls.append_and_take(
                    arguments, takes.arguments(self._max_bytes, hand_off=True)
                )
                taken = takes.results(rows, self._catalog)
            for take in takes.takes:
                pop, result = pops[id(take)], taken.get(id(take))
                if pop.claimed:  # else it has ended, or begun another poll
                    key = take.queue, take.group
                    served[key] = served.get(key, 0) + 1
                if result is not None and not (pop.claimed and pop.hand_off(result)):
                    self.give_back(result)
        finally:
            for pop in pops.values():
                if pop.claimed:
                    pop.wake()
        return appended, served

    @contextmanager
    def _released_unless_taken(self, takes: TakeBatch) -> Iterator[None]:
        """Release the leases of a call whose outcome is unknown."""
        sent = self._database.healthy
        try:
            yield
        except Busy:
            raise  # rolled back
        except BaseException:
            if sent and takes.takes:
                self._spawn(self._release_twice([take.lease for take in takes.takes]))
            raise

    # Leases that no client has

    def give_back(self, taken: Taken | None) -> None:
        """Release what was taken for a pop that has ended, or whose messages were deleted."""
        if taken is not None and (taken.rows or taken.outcome == "ok"):
            self._spawn(self._give_back(taken.take))

    async def _give_back(self, take: Take) -> None:
        self.memory.forget(take.lease_id)
        await self._release([take.lease])
        self._waiting.wake(take.queue, 1, take.group)

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
            self._waiting.wake(queue, ended, group)
        return ended

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
