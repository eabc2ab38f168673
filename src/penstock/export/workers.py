"""The worker pool of a route: take blocks from the queue and send them.

Unified: each worker takes a block, prepares and sends it. Split: preparers take blocks and do the
CPU work, senders wait on the network, and between them is a bounded channel of prepared batches.
A worker waits until the route is not paused, the backoff is over and the breaker admits. Only then
it takes a block. So while a destination is down, workers wait on a timer or an event and hold no
lease.

Adaptive: once a second, the number of workers is adjusted to the work (Little's law: arrivals times
latency, plus the workers that drain the backlog in ten seconds). It at most doubles, and halves
when the destination asks for fewer requests.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from penstock.errors import StorageError
from penstock.export.context import RouteContext
from penstock.export.delivery import BatchDelivery, Prepared
from penstock.export.destinations import Denied, RetryLater
from penstock.export.health import Breaker, Pause, RouteBackoff
from penstock.export.sendqueue import Block, SendQueue
from penstock.io.tasks import supervised

log = logging.getLogger("penstock.export")
ADAPT_SECONDS = 1.0
DRAIN_SECONDS = 10.0
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
    """Return the next number of workers."""
    if throttled:
        wanted = now // 2
    else:
        needed = math.ceil((arrivals + backlog / DRAIN_SECONDS) * latency)
        wanted = min(max(needed, 1), now * 2) if needed > now else max(needed, now - 1)
    return max(least, min(most, wanted))


class SendWorkers:
    def __init__(
        self,
        queue: SendQueue,
        delivery: BatchDelivery,
        pause: Pause,
        breaker: Breaker,
        backoff: RouteBackoff,
        context: RouteContext,
        *,
        on_denied: Callable[[str], None],
    ) -> None:
        settings = queue.settings
        self._queue = queue
        self._delivery = delivery
        self._pause = pause
        self._breaker = breaker
        self._backoff = backoff
        self._clock = context.clock
        self._metrics = context.metrics
        self._on_denied = on_denied
        self._split = settings.pipeline_split
        self._adaptive = settings.adaptive_workers
        # Prepared batches; the last item is True for the probe of a paused route.
        self._channel: asyncio.Queue[tuple[Block, Prepared | None, bool]] = asyncio.Queue(
            self._split.channel_size or 1
        )
        self._holding = 0  # senders that have a batch and wait to send it
        self._prepared: dict[int, Block] = {}  # leased blocks (split) that are not being sent
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

    def start(self) -> None:
        for _ in range(self.preparers):
            self._helpers.append(self._supervised(self._prepare))
        if self._adaptive.enabled:
            self._helpers.append(self._supervised(self._adapt))
        self._grow()

    def _supervised(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        return supervised(f"workers of route {self._queue.name}", loop, self._metrics)

    def _grow(self) -> None:
        """Start missing workers, so that there is one for every number below the target."""
        for number in range(self.target):
            if number not in self._tasks:
                self._tasks[number] = task = self._supervised(partial(self._run, number))
                task.add_done_callback(partial(self._ended, number))

    def _ended(self, number: int, _: asyncio.Task[None]) -> None:
        del self._tasks[number]

    def _shrink(self) -> None:
        """End idle workers above the target. Others end when they have finished their send."""
        for number, task in list(self._tasks.items()):
            if number >= self.target and task not in self._sending:
                task.cancel()

    def waiting(self) -> list[Block]:
        """Return leased blocks that no worker is sending."""
        return list(self._prepared.values())

    async def stop(self, deadline: float) -> None:
        """Let sends end until `deadline` (monotonic), then return the rest to the queue."""
        self._stopping = True
        self._queue.stop_taking()
        for helper in self._helpers:
            helper.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            if task not in self._sending:
                task.cancel()
        remaining = deadline - self._clock.monotonic()
        if self._sending and remaining > 0:
            await asyncio.wait(self._sending, timeout=remaining)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._helpers, return_exceptions=True)
        while not self._channel.empty():
            block, *_ = self._channel.get_nowait()
            self._prepared.pop(block.sequence, None)
            self._queue.give_back(block, attempted=False)

    async def _may_send(self, leave_probe: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the route is neither paused nor backing off. Return True for the probe."""
        probing = await self._pause.wait(leave_probe)
        while self._backoff.remaining > 0:
            await self._backoff.wait()
            probing = probing or await self._pause.wait(leave_probe)
        return probing

    async def _run(self, number: int) -> None:
        work = self._send_prepared if self._split.enabled else self._take_and_send
        while not self._stopping and number < self.target:
            await work()

    async def _take_and_send(self) -> None:
        if not await self._queue.wait_for_block():
            return
        probing = await self._may_send()
        permit = await self._breaker.admit()
        try:
            if not probing and (self._pause.reason is not None or self._backoff.remaining > 0):
                return  # the route was paused during the wait for the breaker
            block = await self._queue.take()
            if block is not None:
                await self._deliver(block, permit, probing)
        finally:
            self._breaker.release(permit)

    async def _prepare(self) -> None:
        while not self._stopping:
            if not await self._queue.wait_for_block():
                return
            probing = await self._may_send(leave_probe=lambda: self._holding > 0)
            await self._breaker.wait_while_open()
            block = await self._queue.take()
            if block is None:
                continue
            self.preparing += 1
            try:
                # The sender prepares a block that was cut before, or that cannot be prepared here.
                prepared = (
                    await self._delivery.try_prepare(block) if block.remaining is None else None
                )
                self._prepared[block.sequence] = block
                await self._channel.put((block, prepared, probing))
            except BaseException:
                self._prepared.pop(block.sequence, None)
                self._queue.give_back(block, attempted=False)
                raise
            finally:
                self.preparing -= 1

    async def _send_prepared(self) -> None:
        block, prepared, probing = await self._channel.get()
        self._holding += 1
        try:
            probing = probing or await self._may_send()
            permit = await self._breaker.admit()
        except BaseException:
            self._queue.give_back(block, attempted=False)
            raise
        finally:
            self._holding -= 1
            self._prepared.pop(block.sequence, None)
        try:
            if self._queue.is_leased(block):  # it was not purged during the wait
                await self._deliver(block, permit, probing, prepared)
        finally:
            self._breaker.release(permit)

    async def _deliver(
        self, block: Block, permit: int, probing: bool, prepared: Prepared | None = None
    ) -> None:
        """Deliver the block, and report the outcome to breaker, backoff and pause."""
        task = asyncio.current_task()
        assert task is not None
        self._sending.add(task)
        try:
            await self._delivery.deliver(block, prepared)
            self._breaker.succeeded(permit)
            self._backoff.succeeded()
        except Denied as error:
            self._on_denied(str(error))
            return
        except RetryLater as error:
            self._breaker.failed(permit)
            self._backoff.failed(error.retry_after)
        except StorageError:  # a fault of our disk, not of the destination
            self._backoff.failed()
        finally:
            self._sending.discard(task)
        if probing:
            self._pause.probe_succeeded()

    async def _adapt(self) -> None:
        throttled_before = self._delivery.throttled
        while True:
            await self._clock.sleep(ADAPT_SECONDS)
            throttled = self._delivery.throttled > throttled_before
            throttled_before = self._delivery.throttled
            self.target = next_workers(
                self.target,
                self._least,
                self._most,
                backlog=self._queue.waiting,
                arrivals=self._queue.arrivals,
                latency=self._delivery.latency,
                throttled=throttled,
            )
            self._grow()
            self._shrink()
