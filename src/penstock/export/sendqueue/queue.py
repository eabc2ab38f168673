"""The send queue of one route: a FastQueue with limits, their policies, and waiting.

The limits apply to batches that are not completed, and to all bytes in files or in memory only,
including headers, the journal and consumed parts of chunks. A reserve on the disk ensures that
completions can still be written. At a limit the policy decides:

    drop_oldest  the oldest batches without a lease are dropped and counted; to free bytes, a whole
                 chunk at a time, because nothing less frees bytes
    drop_newest  the push is dropped and counted, and the answer reports it
    block        the push waits up to block_timeout for room, then raises Full; nothing is accepted

If the disk refuses a write (ENOSPC, EIO), the caller of a write-through queue gets StorageFull or
StorageFailed. A queue with fsync `never` continues in memory up to the failover limits, then raises
too. No accepted record is lost, and the next tick tries the disk again.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.config.schema import SendQueueSettings as Settings
from penstock.contract.routes import SendQueueStatus
from penstock.errors import Full, StorageError, StorageFull, TooLarge, Unavailable
from penstock.export.context import RouteContext
from penstock.export.memory import memory_limit, memory_used
from penstock.export.payload import COMPRESSIONS
from penstock.export.sendqueue.blocks import Block, bytes_of, records_of
from penstock.export.sendqueue.chunks import ChunkOptions
from penstock.export.sendqueue.fastqueue import FastQueue
from penstock.export.sendqueue.journal import DISK_FULL, NEWEST, OLDEST, PURGED, REASONS
from penstock.export.telemetry import Rate, RouteMetrics
from penstock.io.tasks import RETRY_SECONDS, cancelled, supervised

log = logging.getLogger("penstock.export")
ROOM_POLL_SECONDS = 1.0  # between two checks of the disk while a push waits for room
PUSH_POLL_SECONDS = 5.0
DEFAULT_SHARE = 0.10  # of memory, for the memory layer, if memory_percent is not set
CHUNKS_PER_QUEUE = 8  # dropping the oldest chunk must not drop most of the queue


def options_of(settings: Settings, limit: int, source: str = "") -> ChunkOptions:
    """Return the options of a queue; `memory_percent` is a share of our part of `limit`."""
    share = settings.memory_percent
    ours = limit * settings.memory_limit_ratio
    max_bytes = int(ours * share) if share else settings.max_bytes
    fsync = settings.fsync
    if source == "topic" and fsync == "always":
        fsync = "interval"  # the topic still has the records
    return ChunkOptions(
        fsync=fsync,
        write_through=bool(source) or fsync != "never",
        max_bytes=max_bytes,
        inmemory_blocks=settings.inmemory_blocks,
        inmemory_bytes=min(max_bytes, int(ours * (share or DEFAULT_SHARE))),
        chunk_size=max(4096, min(settings.chunk_size, max_bytes // CHUNKS_PER_QUEUE)),
        write_buffer_size=settings.write_buffer_size,
        compression=COMPRESSIONS[settings.compression],
        stale_flush=settings.stale_flush,
        drain_order=settings.drain_order,
        fresh_share=min(1.0, max(0.0, settings.fresh_share)),
    )


def adapt(blocks: int, used: int, target: float) -> int:
    """Return how many blocks to keep in memory: half when it is short, else a quarter more."""
    if used > target:
        return blocks // 2
    return blocks + max(1, blocks // 4) if used < 0.9 * target else blocks


@dataclass(frozen=True, slots=True)
class PushedBlocks:
    """The outcome of a push, in records."""

    accepted: int
    dropped: int  # by drop_newest; without the older records that drop_oldest dropped


class SendQueue:
    """The queue of a route. `source` is "topic" or "queue" if the route reads one."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        directory: Path,
        context: RouteContext,
        metrics: RouteMetrics,
        *,
        source: str = "",
        limit: int | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self._fs = context.fs
        self._clock = context.clock
        self._context_metrics = context.metrics
        self._metrics = metrics
        self._directory = directory
        self._memory_bytes_limit = memory_limit() if limit is None else limit
        options = options_of(settings, self._memory_bytes_limit, source)
        self.max_bytes = options.max_bytes
        self.in_memory = settings.type == "memory"  # it has no files
        self._fast = FastQueue(
            context.fs,
            None if self.in_memory else directory,
            options,
            context.pool,
            context.clock,
            metrics.add,
        )
        self.books = self._fast.books  # accepted records and their outcomes
        self._takers: deque[asyncio.Future[None]] = deque()
        self._room = asyncio.Event()
        self._arriving = 0  # blocks that are pushed and not yet in the queue,
        self._arriving_bytes = 0  # and their bytes
        self._free_bytes = 0
        self._stopping = False
        self._ticker: asyncio.Task[None] | None = None
        self._next_backlog_take = 0.0
        self._in = Rate(context.clock)
        self._out = Rate(context.clock)
        self._purged_before = 0  # blocks with a lower number are dropped when they are returned
        self._purged = 0  # records of such blocks
        for reason in filter(None, REASONS):
            metrics.add("queue_dropped_records_total", 0, reason)  # so that the series exists
            metrics.add("queue_dropped_total", 0, reason)

    async def start(self) -> None:
        await self._fast.open()
        self._update_free_bytes()
        self._in = Rate(self._clock, self.books.next_sequence)
        self._out = Rate(self._clock, self.books.completed.total)
        self._ticker = supervised(f"upkeep of route {self.name}", self._tick, self._context_metrics)

    async def stop(self) -> None:
        """Stop. Undelivered records are on disk afterwards."""
        self.stop_taking()
        await cancelled(self._ticker)
        await self._fast.close()

    def stop_taking(self) -> None:
        """Make takers return None from now on."""
        self._stopping = True
        self._wake(len(self._takers))
        self._room.set()

    # Pushing

    async def push(self, blocks: list[Block], *, wait: bool = False) -> PushedBlocks:
        """Accept blocks. With `wait`, the policy `block` waits without a limit, for sources."""
        count, size, records = len(blocks), bytes_of(blocks), records_of(blocks)
        if size > self.max_bytes or count > self.settings.max_size:
            raise TooLarge(
                f"{count} batches of {size} bytes do not fit into the send queue of route "
                f"{self.name} ({self.settings.max_size} batches, {self.max_bytes} bytes)"
            )
        if not await self._make_room(count, size, records, wait):
            return PushedBlocks(0, records)
        self._arriving += count
        self._arriving_bytes += size
        try:
            await self._fast.put(blocks)
        finally:
            self._arriving -= count
            self._arriving_bytes -= size
        self._metrics.add("queue_push_total", count)
        self._metrics.add("queue_accepted_records_total", records)
        self._wake(count)
        return PushedBlocks(records, 0)

    async def _make_room(self, count: int, size: int, records: int, wait: bool) -> bool:
        """Return True if the blocks fit, False if they were dropped instead."""
        full_behavior = self.settings.full_behavior
        timeout = math.inf if wait else self.settings.block_timeout
        deadline = self._clock.monotonic() + timeout
        while True:
            if self._stopping:
                raise Unavailable(f"route {self.name} is stopping")
            if self._fits(count, size):
                self._check_disk(size)
                return True
            if full_behavior == "block":
                remaining = deadline - self._clock.monotonic()
                if remaining <= 0:
                    raise Full(f"the send queue of route {self.name} is full")
                self._room.clear()
                await self._clock.wait(self._room, PUSH_POLL_SECONDS if wait else remaining)
            elif full_behavior == "drop_newest" or not await self._drop_for(count, size):
                self.refuse(records, NEWEST, count)
                return False

    def refuse(self, records: int, reason: int, blocks: int) -> None:
        """Book records that were dropped before their blocks got sequence numbers."""
        self._fast.refuse(records, reason, blocks)

    async def pass_over(self, records: int, reason: int, position: int) -> None:
        """Book records of the source as dropped, and that it was read up to `position`."""
        await self._fast.pass_over(records, reason, position)

    async def write_out(self) -> int:
        """Write memory to the chunks, if the disk allows it. Return the end of the stream."""
        return await self._fast.write_out()

    async def wait_for_room(self, size: int) -> None:
        """Wait until about `size` bytes fit. Sources use it before they take leases that expire."""
        while not self._stopping and not (self._fits(1, size) and self._disk_takes(size)):
            self._room.clear()
            await self._clock.wait(self._room, ROOM_POLL_SECONDS)

    def _disk_takes(self, size: int) -> bool:
        """Return whether the disk has so many bytes beside the reserve for completions."""
        reserve = self.settings.free_space_reserve
        if self._free_bytes - size < reserve:
            self._update_free_bytes()  # the old value, less accepted bytes, is too small
        return self.in_memory or self._free_bytes - size >= reserve

    def _fits(self, count: int, size: int) -> bool:
        return (
            self._fast.count + self._arriving + count <= self.settings.max_size
            and self._fast.bytes + self._arriving_bytes + size <= self.max_bytes
        )

    async def _drop_for(self, count: int, size: int) -> bool:
        """Drop old blocks for new ones. Return False if there was nothing to drop."""
        over = self._fast.count + self._arriving + count - self.settings.max_size
        dropped, _ = await self._fast.drop_oldest(over, OLDEST)
        if self._fast.bytes + self._arriving_bytes + size > self.max_bytes:
            on_disk = self._fast.oldest_chunk_blocks()
            one = bool(self._fast.memory.unwritten)  # in memory, a single block frees its bytes
            more, _ = await self._fast.drop_oldest(on_disk or one, OLDEST)
            dropped += more
            if self._fast.store is not None:
                dropped += await self._fast.store.remove_completed_chunks(whole=True)
        return dropped > 0

    def _check_disk(self, size: int) -> None:
        """Raise StorageFull before the disk is full."""
        store = self._fast.store
        if store is None:
            return
        if not self._disk_takes(size):
            self._metrics.add("queue_disk_full_total")
            raise StorageFull(
                f"route {self.name} accepts no more: the disk has {self._free_bytes} bytes "
                f"free, of which {self.settings.free_space_reserve} are kept in reserve"
            )
        self._free_bytes -= size
        memory = self._fast.memory
        most = self.settings.inmemory_blocks + self.settings.failover_max_size
        most_bytes = self._fast.options.inmemory_bytes + self.settings.failover_max_bytes
        if store.failing is not None and (
            len(memory.unwritten) > most or memory.unwritten_bytes > most_bytes
        ):
            raise StorageFull(f"route {self.name} accepts no more: {store.failing}")

    def _update_free_bytes(self) -> None:
        if self._fast.store is not None:
            self._free_bytes = self._fs.free_bytes(self._directory)

    # Taking

    async def wait_for_block(self) -> bool:
        """Wait until there is a block to take, or the queue is stopping (False). Takes nothing."""
        while not self._stopping:
            if self._fast.waiting:
                now = self._clock.monotonic()
                if (
                    self.settings.catchup_rate <= 0
                    or not self._fast.backlog
                    or now >= self._next_backlog_take
                ):
                    return True
                await self._clock.sleep(self._next_backlog_take - now)
                continue
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._takers.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake(1)  # pass the wake-up to another taker
                raise
        return False

    async def take(self) -> Block | None:
        """Lease the next block. Return None if another worker was faster, or when stopping."""
        if self._stopping:
            return None
        if self.settings.catchup_rate > 0 and self._fast.backlog:
            now = self._clock.monotonic()
            if now < self._next_backlog_take:
                return None
            self._next_backlog_take = now + 1 / self.settings.catchup_rate
        try:
            block = await self._fast.take()
        except (StorageError, OSError) as error:
            log.error("route %s: the send queue cannot be read, trying again: %s", self.name, error)
            await self._clock.sleep(RETRY_SECONDS)
            return None
        if block is not None and self._stopping:
            self._fast.give_back(block, attempted=False)
            return None
        return block

    def _wake(self, count: int) -> None:
        while count > 0 and self._takers:
            waiter = self._takers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def ack(self, block: Block, dead: int = 0) -> None:
        self._fast.ack(block, dead)
        self._room.set()

    def give_back(self, block: Block, *, attempted: bool = True) -> None:
        if block.sequence < self._purged_before and self.is_leased(block):
            self._drop_purged(block)
            return
        self._fast.give_back(block, attempted=attempted)
        self._wake(1)

    async def purge(self, waiting: Iterable[Block] = (), timeout: float = 0.0) -> int:
        """Drop all records accepted so far. Return their number.

        `waiting` are leased blocks that are not being sent. Blocks that are being sent have
        `timeout` seconds to be delivered. Otherwise they are dropped, even if the send ends later.
        """
        self._purged_before = self.books.next_sequence
        before = self._purged
        _, records = await self._fast.drop_oldest(1 << 62, PURGED)
        for block in waiting:
            if self.is_leased(block):
                self._drop_purged(block)
        deadline = self._clock.monotonic() + timeout
        while (remaining := deadline - self._clock.monotonic()) > 0 and any(
            sequence < self._purged_before for sequence in self._fast.leased
        ):
            self._room.clear()
            await self._clock.wait(self._room, remaining)
        self._room.set()
        if self._fast.store is not None:
            await self._fast.store.remove_completed_chunks(whole=True)
        return records + self._purged - before

    def _drop_purged(self, block: Block) -> None:
        """Drop a leased block that was purged. It counts whole, even if parts of it were sent."""
        self._purged += block.records
        self._fast.drop(block, PURGED)
        self._room.set()

    # Upkeep

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(self.settings.meta_sync_interval)
            await self.tick()

    async def tick(self) -> None:
        settings, fast = self.settings, self._fast
        await fast.tick()
        self._update_free_bytes()
        if fast.store is not None:
            if settings.full_behavior == "drop_oldest" and not self._disk_takes(0):
                blocks = fast.oldest_chunk_blocks()
                if blocks and len(fast.store.chunks.chunks) > 1:
                    await fast.drop_oldest(blocks, DISK_FULL)
                    await fast.store.remove_completed_chunks()
            if settings.adaptive_enabled:
                target = settings.target_utilization * self._memory_bytes_limit
                fast.limit_memory(adapt(fast.memory.limit, memory_used(), target))
        self._in.update(self.books.next_sequence)
        self._out.update(self.books.completed.total)
        if self._fits(1, 0):
            self._room.set()

    # Status

    @property
    def count(self) -> int:
        """Return the number of batches that are not completed, leased ones included."""
        return self._fast.count

    @property
    def waiting(self) -> int:
        """Return the number of batches without a lease."""
        return self._fast.waiting

    @property
    def leased(self) -> int:
        return len(self._fast.leased)

    def is_leased(self, block: Block) -> bool:
        return block.sequence in self._fast.leased

    @property
    def _failing(self) -> str | None:
        return self._fast.store.failing if self._fast.store is not None else None

    @property
    def arrivals(self) -> float:
        """Return the batches that arrive per second."""
        return self._in.value

    def status(self) -> SendQueueStatus:
        fast = self._fast
        return SendQueueStatus(
            accounting=self.books.accounting(),
            batches=fast.count,
            records=self.books.queued,
            leased=self.leased,
            bytes=fast.bytes,
            disk_bytes=fast.disk_bytes,
            memory_blocks=len(fast.memory),
            oldest_age_seconds=round(fast.oldest_age(), 3),
            batches_in_per_second=round(self._in.value, 3),
            batches_out_per_second=round(self._out.value, 3),
            drain_eta_seconds=self.drain_eta(),
            time_to_full_seconds=self.time_to_full(),
            storage_failing=self._failing,
        )

    def time_to_full(self) -> float:
        growth = self._in.value - self._out.value
        if growth <= 1e-6:
            return -1.0
        used, fast = max(1, self._fast.count), self._fast
        by_bytes = (self.max_bytes - fast.bytes) / max(1.0, fast.bytes / used)
        return round(max(0.0, min(self.settings.max_size - fast.count, by_bytes) / growth), 1)

    def drain_eta(self) -> float:
        if not self._fast.count:
            return 0.0
        shrinking = self._out.value - self._in.value
        return round(self._fast.count / shrinking, 1) if shrinking > 1e-6 else -1.0

    def gauges(self) -> dict[str, float]:
        fast, settings = self._fast, self.settings
        return {
            "queue_size": fast.count,
            "queue_bytes": fast.bytes,
            "queue_max_size": settings.max_size,
            "queue_max_bytes": self.max_bytes,
            "queue_utilization_ratio": max(
                fast.count / max(1, settings.max_size), fast.bytes / max(1, self.max_bytes)
            ),
            "queue_effective_max_size": fast.memory.limit,
            "queue_disk_available_bytes": self._free_bytes,
            "queue_oldest_age_seconds": fast.oldest_age(),
            "queue_time_to_full_seconds": self.time_to_full(),
            "queue_drain_eta_seconds": self.drain_eta(),
            "queue_records": self.books.queued,
            "fastqueue_inmemory_blocks": len(fast.memory),
            "fastqueue_disk_bytes": fast.disk_bytes,
            "storage_failing": float(self._failing is not None),
        }
