"""The worker pool of a route: who takes blocks from the queue and when, and how many at a time.

Unified: each worker takes a block, prepares and sends it. Split: preparers take blocks and do the
CPU work, senders wait on the network, and between them is a bounded channel of prepared batches.
Everybody waits first: the gate is open (the route is not paused), the backoff is over, the breaker
admits. Only then is anything taken, so while a destination is down the workers wait on a timer or
an event, nothing is leased, and nothing spins.

Adaptive: once a second the number of workers follows the work there is (Little's law: arrivals
times latency, plus what it takes to drain the backlog in ten seconds), grows at most twofold, and
halves when the destination asks for less.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable
from typing import Any

from penstock.config.schema import SendQueue as Settings
from penstock.export.backoff import Backoff
from penstock.export.block import Block
from penstock.export.breaker import Breaker, Permit
from penstock.export.clock import Clock
from penstock.export.delivery import Delivery, Prepared
from penstock.export.gate import Gate
from penstock.export.sendqueue import SendQueue

log = logging.getLogger("penstock.export")
ADAPT_EVERY = 1.0
DRAIN_WITHIN = 10.0
CORES = os.cpu_count() or 1


def next_workers(
    now: int,
    least: int,
    most: int,
    *,
    backlog: int,
    arrivals: float,
    latency: float,
    throttled: bool,
) -> int:
    """How many workers to have next."""
    if throttled:
        wanted = now // 2
    else:
        needed = math.ceil((arrivals + backlog / DRAIN_WITHIN) * latency)
        wanted = min(max(needed, 1), now * 2) if needed > now else max(needed, now - 1)
    return max(least, min(most, wanted))


class Workers:
    def __init__(
        self,
        settings: Settings,
        queue: SendQueue,
        delivery: Delivery,
        gate: Gate,
        breaker: Breaker,
        backoff: Backoff,
        clock: Clock,
    ) -> None:
        self._queue, self._delivery, self._breaker, self._backoff = (
            queue,
            delivery,
            breaker,
            backoff,
        )
        self._gate, self._clock = gate, clock
        self._split = settings.pipeline_split
        self._adaptive = settings.adaptive_workers
        # Prepared batches; the last word says that it is the one to try with while the gate is
        # closed.
        self._channel: asyncio.Queue[tuple[Block, Prepared | None, bool]] = asyncio.Queue(
            self._split.channel_size or 1
        )
        self._holding = 0  # senders with a batch in hand that wait to send it
        self._prepared: dict[
            int, Block
        ] = {}  # leased and prepared (split), and nobody is sending them
        self.preparers = (self._split.preparer_count or CORES) if self._split.enabled else 0
        if self._split.enabled:
            self.target = (self._split.sender_count or 2 * CORES) * max(
                1, settings.max_concurrent_sends
            )
        else:
            self.target = settings.workers or 2 * CORES
        self._least = max(1, self._adaptive.min_workers)
        self._most = max(self._least, self._adaptive.max_workers or 4 * CORES)
        if self._adaptive.enabled:
            self.target = max(self._least, min(self._most, self.target))
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._helpers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._sending: set[asyncio.Task[Any]] = set()
        self.preparing = 0

    @property
    def active(self) -> int:
        return len(self._sending)

    @property
    def total(self) -> int:
        return len(self._tasks)

    @property
    def split(self) -> bool:
        return self._split.enabled

    def start(self) -> None:
        for _ in range(self.preparers):
            self._helpers.append(asyncio.create_task(self._prepare()))
        if self._adaptive.enabled:
            self._helpers.append(asyncio.create_task(self._adapt()))
        self._fill()

    def _fill(self) -> None:
        """Have a worker for every number below the target."""
        for number in range(self.target):
            if number not in self._tasks:
                self._tasks[number] = asyncio.create_task(self._run(number))

    def _dismiss(self) -> None:
        """Send those home who are above the target and have nothing in hand; the others leave when
        they are done.
        """
        for number, task in list(self._tasks.items()):
            if number >= self.target and task not in self._sending:
                task.cancel()

    def waiting(self) -> list[Block]:
        """Leased blocks that nobody is sending."""
        return list(self._prepared.values())

    async def stop(self, deadline: float) -> None:
        """Let what is being sent finish until `deadline` (monotonic), then return everything to the
        queue.
        """
        self._stopping = True
        self._queue.stop_taking()
        for helper in self._helpers:
            helper.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            if task not in self._sending:
                task.cancel()
        left = deadline - self._clock.monotonic()
        if self._sending and left > 0:
            await asyncio.wait(self._sending, timeout=left)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._helpers, return_exceptions=True)
        while not self._channel.empty():
            block, *_ = self._channel.get_nowait()
            self._prepared.pop(block.sequence, None)
            self._queue.give_back(block, attempted=False)

    async def _may_send(self, after_you: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the route is not paused and not backing off; True when it is paused and this
        is a try.
        """
        trying = await self._gate.wait(after_you)
        while self._backoff.remaining > 0:
            await self._backoff.over()
            trying = trying or await self._gate.wait(after_you)
        return trying

    async def _run(self, number: int) -> None:
        work = self._send_prepared if self._split.enabled else self._take_and_send
        try:
            while not self._stopping and number < self.target:
                await work()
        finally:
            self._tasks.pop(number, None)

    async def _take_and_send(self) -> None:
        if not await self._queue.available():
            return
        trying = await self._may_send()
        with await self._breaker.admit() as permit:
            if not trying and (self._gate.closed or self._backoff.remaining > 0):
                return  # closed while we waited for the breaker
            block = await self._queue.take()
            if block is None:
                return
            await self._deliver(block, permit, trying)

    async def _prepare(self) -> None:
        while not self._stopping:
            if not await self._queue.available():
                return
            trying = await self._may_send(after_you=lambda: self._holding > 0)
            await self._breaker.not_open()
            block = await self._queue.take()
            if block is None:
                continue
            self.preparing += 1
            try:
                # A block that was cut already, or cannot be prepared, is left to whoever sends it.
                prepared = await self._delivery.try_prepare(block) if block.todo is None else None
                self._prepared[block.sequence] = block
                await self._channel.put((block, prepared, trying))
            except BaseException:
                self._prepared.pop(block.sequence, None)
                self._queue.give_back(block, attempted=False)
                raise
            finally:
                self.preparing -= 1

    async def _send_prepared(self) -> None:
        block, prepared, trying = await self._channel.get()
        self._holding += 1
        try:
            trying = trying or await self._may_send()
            permit = await self._breaker.admit()
        except BaseException:
            self._queue.give_back(block, attempted=False)
            raise
        finally:
            self._holding -= 1
            self._prepared.pop(block.sequence, None)
        with permit:
            if self._queue.fast.is_leased(block):  # and was not purged while it waited
                await self._deliver(block, permit, trying, prepared)

    async def _deliver(
        self, block: Block, permit: Permit, trying: bool, prepared: Prepared | None = None
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._sending.add(task)
        try:
            if await self._delivery.deliver(block, permit, prepared) and trying:
                self._gate.answered()
        finally:
            self._sending.discard(task)

    async def _adapt(self) -> None:
        seen = self._delivery.throttled
        while True:
            await self._clock.sleep(ADAPT_EVERY)
            throttled, seen = self._delivery.throttled > seen, self._delivery.throttled
            self.target = next_workers(
                self.target,
                self._least,
                self._most,
                backlog=self._queue.fast.waiting,
                arrivals=self._queue.arrivals,
                latency=self._delivery.latency,
                throttled=throttled,
            )
            self._fill()
            self._dismiss()
