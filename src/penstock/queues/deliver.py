"""Pop: take messages under a lease, wait for them when asked to, complete them at once under
auto-ack.

A pop polls the database, in a call that it shares with others. If it gets nothing it parks until a
push, an acknowledgement or the database's clock may have changed that: a lease expires, a message
becomes due. The clock is only ever read in the database, which answers "poll again in n seconds".

A push takes for pops that are parked here, in the call that stores the message
(`Exchanges.append_and_hand_off`): the lease is committed with the message, and the consumer has it
after one commit instead of two. Order and leases are those of any pop, because it is the same
function under the same locks. A pop that the push could not serve is woken and takes by itself.

Auto-ack is a lease that is completed before the answer. One call would be faster, but if the
connection broke after its commit, the messages it took would be unknown. The outcome of each of two
calls can be asked for.

A pop over several queues polls them one after the other, in the order of its requests, and takes
from the first that has messages. While it waits it is registered under each of them, and begins
with the one that woke it: that queue may have woken nobody else.

A pop may bring acknowledgements along: they are settled first, in the same commit, so that a
consumer's loop is one request and one commit per batch. They stay so whatever becomes of the pop.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice

import msgspec
from msgspec import UNSET, Raw

from penstock.database.batching import SLICE
from penstock.errors import InvalidRequest
from penstock.metrics import Counter
from penstock.protocol.names import DEFAULT_PARTITION, QUEUE_MODE
from penstock.protocol.times import time_field
from penstock.queues.calls import Row
from penstock.queues.catalog import remember
from penstock.queues.checks import check_group, check_name
from penstock.queues.consumers import ConsumerConnections
from penstock.queues.context import QueueContext
from penstock.queues.exchanges import Exchanges
from penstock.queues.settling import check_acks
from penstock.queues.taking import Take, Taken
from penstock.queues.types import Ack, AckOutcome, Delivered, PopOutcome, PopRequest
from penstock.queues.waiting import WaitingPop

AUTOPILOT_BATCH = 100
AUTOPILOT_PARTITIONS = 10
MAX_PARTITIONS = 10_000  # of one pop
SOON_SECONDS = 0.005  # another call has what we want locked: poll again after this
OVERTIME_SECONDS = 2.0  # after its time, a pop that must poll again does so for this long
MESSAGE_COLUMNS = (
    "transactions",
    "traces",
    "times",
    "producers",
    "keys",
    "payloads",
    "headers",
    "attempts",
)
ATTEMPT_HEADER = "penstock-attempt"


class Pops:
    def __init__(
        self,
        context: QueueContext,
        exchanges: Exchanges,
        consumers: ConsumerConnections,
        popped: Counter,
    ) -> None:
        self._catalog, self._waiting = context.catalog, context.waiting
        self._calls, self._keys = context.calls, context.keys
        self._settings = context.settings
        self._exchanges = exchanges
        self._consumers = consumers
        self._popped = popped
        self._paused = False  # pops find nothing (maintenance)
        self._resumed = asyncio.Event()  # or everything stops
        self._stopping = False

    def pause(self, paused: bool) -> None:
        """Let pops find nothing, or resume them."""
        self._paused = paused
        self._resumed.clear() if paused else self._resumed.set()
        self._waiting.wake_all()

    def answer_waiting(self) -> None:
        """Answer all that wait, and let none wait any more."""
        self._stopping = True
        self._resumed.set()
        self._waiting.wake_all()

    async def pop(self, wanted: Sequence[PopRequest], acks: Sequence[Ack] = ()) -> PopOutcome:
        """Poll until one of the requests gets messages or the time is over; `wait` and `timeout`
        of the first count. Cancelling it returns what was taken for it.
        """
        check_acks(acks)
        for one in wanted:
            self._consumers.seen(one.queue, one.group, one.consumer)
        deadline = time.monotonic() + self._patience(wanted[0])
        if self._paused and wanted[0].wait and not self._stopping:
            await self._wait_until_resumed(deadline)
        pop = WaitingPop()
        try:
            return await self._poll_until(deadline, pop, wanted, acks)
        finally:
            self._waiting.leave(pop)

    async def _poll_until(
        self,
        deadline: float,
        pop: WaitingPop,
        wanted: Sequence[PopRequest],
        acks: Sequence[Ack],
    ) -> PopOutcome:
        acked: Sequence[AckOutcome] = ()
        reason, first = "empty", wanted[0]
        while not self._paused:
            pop.begin_poll()
            takes = [
                take for source, one in enumerate(wanted) for take in await self._takes(one, source)
            ]
            if first.wait:
                self._register(pop, wanted, takes)
            if len(wanted) > 1 and pop.woken_by is not None:
                takes.sort(key=lambda take: take.queue != pop.woken_by)
            wait: float | None = None  # until the next poll, as far as the database knows
            reason = "empty" if takes else "unknown"
            for take in takes:
                settled, taken = await self._exchanges.exchange(acks, take)
                assert taken is not None
                acked, acks = (settled or acked), ()
                if taken.rows:
                    return await self._answer(wanted, taken, acked)
                if taken.outcome == "ok":  # its messages were deleted at the same time
                    self._exchanges.give_back(taken)
                    wait = 0.0
                elif taken.outcome == "gone":
                    self._catalog.groups.pop((take.queue, take.group, take.partition or 0), None)
                    wait = 0.0
                elif taken.outcome == "more":
                    wait = 0.0
                elif taken.outcome == "locked":
                    wait = SOON_SECONDS
                elif taken.wait is not None:
                    wait = taken.wait if wait is None else min(wait, taken.wait)
                    reason = taken.outcome
            # A waiting pop parks for SOON_SECONDS instead, so that a push can serve it meanwhile.
            again = wait == 0.0 or (wait == SOON_SECONDS and not first.wait)
            remaining = deadline - time.monotonic()
            if self._stopping or remaining <= (-OVERTIME_SECONDS if again else 0):
                break
            if again:
                await asyncio.sleep(wait or 0)
                continue
            pause = remaining if wait is None else min(remaining, max(wait, SOON_SECONDS))
            handed = await pop.park(
                min(pause, self._settings.poll_interval), self._exchanges.give_back
            )
            if handed is not None:
                return await self._answer(wanted, handed, acked)
        if acks:
            acked, _ = await self._exchanges.exchange(acks)
        return PopOutcome(first.group, first.queue, reason=reason, acked=list(acked))

    def _register(self, pop: WaitingPop, wanted: Sequence[PopRequest], takes: list[Take]) -> None:
        """Register the pop for the queues that it wants. A push may take for a pop that takes from
        any one partition of one queue, if consumers do not share its partitions.
        """
        groups = [(one.queue, one.group) for one in wanted if one.queue is not None]
        groups += [(take.queue, take.group) for take in takes if wanted[take.source].queue is None]
        self._waiting.register(pop, list(dict.fromkeys(groups)))
        pop.partition = next((take.partition for take in takes if take.partition), None)
        pop.take = None
        if len(wanted) == 1 and wanted[0].queue is not None and takes:
            [take] = takes
            if (
                take.from_any_partition
                and take.batch <= SLICE
                and not self._catalog.is_unordered(take.queue)
            ):
                pop.take = take

    async def _wait_until_resumed(self, deadline: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._resumed.wait()
        except TimeoutError:
            pass

    def _patience(self, wanted: PopRequest) -> float:
        """Return for how many seconds the pop waits."""
        if not wanted.wait:
            return 0.0
        default = self._settings.default_timeout
        return default if wanted.timeout is None else wanted.timeout

    # What to take from

    async def _takes(self, wanted: PopRequest, source: int) -> list[Take]:
        """Return a take for each queue that it wants, the most important first."""
        start = subscription_of(wanted, self._settings.default_subscription_mode)
        if wanted.queue is not None:
            check_name("queue", wanted.queue)
            names = [wanted.queue]
        else:
            matching = await self._catalog.matching(wanted.namespace, wanted.task)
            names = [info.name for info in matching]
        takes: list[Take] = []
        for name in names:
            number = None
            if wanted.partition is not None:
                number = await self._catalog.partition(name, wanted.partition)
                if number is None:
                    continue
            group_id = await self._group(name, wanted.group, number, start)
            if group_id is not None:
                takes.append(self._take(wanted, source, name, group_id, number))
        return takes

    async def _group(
        self, queue: str, group: str, partition: int | None, start: tuple[str, datetime | None]
    ) -> int | None:
        """Return the id of a group, created if needed; None: there is no such queue."""
        info = await self._catalog.queue(queue)
        group_id = self._catalog.groups.get((queue, group, partition or 0))
        if group_id is not None:
            return group_id
        check_group(group)
        if info is None and start[0] != "all":
            # the queue has to remember where the group starts
            await self._catalog.ensure([(queue, DEFAULT_PARTITION)])
            info = await self._catalog.queue(queue)
        if info is None:
            return None
        group_id = await self._calls.subscribe(info.id, group, partition, *start)
        if group_id is None:
            self._catalog.forget()
        else:
            remember(self._catalog.groups, (queue, group, partition or 0), group_id)
        return group_id

    def _take(
        self, wanted: PopRequest, source: int, queue: str, group_id: int, partition: int | None
    ) -> Take:
        batch, partitions = wanted.batch, wanted.partitions
        if batch is None:
            batch = AUTOPILOT_BATCH if wanted.autopilot else self._settings.default_batch
        if partitions is None:
            partitions = AUTOPILOT_PARTITIONS if wanted.autopilot else 1
        return Take(
            source,
            queue,
            wanted.group,
            group_id,
            partition,
            max(1, min(batch, self._settings.max_batch)),
            max(1, min(partitions, MAX_PARTITIONS)),
            wanted.holder,
        )

    # Messages

    async def _answer(
        self,
        wanted: Sequence[PopRequest],
        taken: Taken,
        acked: Sequence[AckOutcome],
    ) -> PopOutcome:
        """Return the messages for the client. If that fails, release their lease."""
        take = taken.take
        request, queue, group = wanted[take.source], take.queue, take.group
        auto_ack = request.auto_ack
        lease_id = "" if auto_ack else take.lease_id
        messages: list[Delivered] = []
        try:
            if auto_ack:
                await self._exchanges.complete(take)
            for row in taken.rows:
                delivered = self._delivered(row, group, lease_id)
                while some := list(islice(delivered, SLICE)):
                    messages += some
                    if len(some) == SLICE:
                        await asyncio.sleep(0)
        except BaseException:
            self._exchanges.give_back(taken)
            raise
        count = len(messages)
        if auto_ack:
            self._exchanges.acked.add(count, queue, "completed")
        self._popped.add(count, queue)
        if request.queue is None:
            self._consumers.seen(queue, group, request.consumer)
        if count >= take.batch and self._catalog.is_unordered(queue):  # and there may be more
            self._waiting.wake(queue, 1, group, announce=False)
        claimed = len({row["partition_id"] for row in taken.rows})
        return PopOutcome(group, queue, lease_id, messages, claimed, "", list(acked), take.source)

    def _delivered(self, row: Row, group: str, lease_id: str) -> Iterator[Delivered]:
        """Yield the messages of a row."""
        partition, name, keys = row["partition_id"], row["partition"], self._keys
        partition_id, ids = self._catalog.uuids(partition, row["seqs"])
        nothing = (None,) * len(ids)
        columns = [row[column] or nothing for column in MESSAGE_COLUMNS]
        last, created_at = None, datetime.now(UTC)
        for id_, transaction, trace, at, producer, key, payload, headers, failed in zip(
            ids, *columns, strict=True
        ):
            if at != last:  # what was pushed together has one time
                last, created_at = at, datetime.fromtimestamp(at, UTC)
            if key is not None:
                payload = keys.decrypt(partition, key, payload)
                headers = headers and keys.decrypt_headers(partition, key, headers)
            if failed:
                headers = _with_attempt(headers, failed + 1)
            yield Delivered(
                id_,
                transaction,
                None if trace is None else str(trace),
                Raw(payload),
                producer,
                created_at,
                name,
                partition_id,
                lease_id,
                group,
                UNSET if headers is None else Raw(headers),
                failed + 1 if failed else UNSET,
            )


def _with_attempt(headers: bytes | None, attempt: int) -> bytes:
    """Add the number of the attempt to the headers, for clients without the field `attempt`."""
    others = msgspec.json.decode(headers, type=dict[str, str]) if headers else {}
    return msgspec.json.encode(others | {ATTEMPT_HEADER: str(attempt)})


def subscription_of(wanted: PopRequest, default_mode: str) -> tuple[str, datetime | None]:
    """Return where a new group starts: the mode to remember, and the time for `timestamp`."""
    origin, mode = wanted.subscription_from or "", wanted.subscription_mode or default_mode
    start = time_field(origin, "subscriptionFrom") if origin and origin != "now" else None
    if wanted.group == QUEUE_MODE:
        return "all", None
    if start is not None:
        return "timestamp", start
    if origin == "now" or mode in ("new", "new-only"):
        return "new", None
    if mode not in ("", "all", "from_beginning"):
        raise InvalidRequest(f"subscriptionMode '{mode}' is none of: all, new, new-only")
    return "all", None
