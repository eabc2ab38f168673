"""FastQueue: a persistent queue of blocks in two layers, from which blocks are leased, not popped.

Layers. New blocks go to memory; disk chunks hold what does not fit, and everything that must survive. With
`write_through` (fsync `always` and `interval`, and every route that reads a topic or queue) a block is written to a
chunk before anyone can take it, and memory is a cache of the newest ones: a killed process loses nothing and hands out
the same sequence numbers again. Without it (fsync `never`) memory is written out when it is full, when its oldest block
is `stale_flush` old, and at a stop; a kill loses what is in memory.

Leases. `take` leases a block; `ack` settles it; `give_back` returns it to its place in front of everything younger, its
attempt counted. Leases are this process's: if it dies, its unsettled blocks are simply still there at the next start.

Invariants, by sequence number: ready ranges (on disk) < blocks in memory. A leased, returned or prefetched block is in
neither. Blocks that are in memory only are all younger than those on disk, so a spill takes every one of them.

What must survive, and the order in which it reaches the disk, is the `Store`'s affair.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import StorageFailed, Unavailable
from penstock.export.block import HEADER_SIZE, NO_POSITION, Block
from penstock.export.clock import Clock
from penstock.export.journal import STORAGE_ERRORS, Entry, Kind
from penstock.export.payload import NONE
from penstock.export.state import State
from penstock.export.store import Store
from penstock.storage.fs import Fs

COALESCE = 32 << 20  # most bytes that one writer job takes
SPILL = 4096  # most blocks that one spill job takes
READ_BACK = 64  # blocks read at once from the new end
PREFETCH = 1 << 20


@dataclass(frozen=True, slots=True)
class Options:
    fsync: str = "always"  # always | interval | never
    write_through: bool = True
    inmemory_blocks: int = 2048
    inmemory_bytes: int = 64 << 20
    chunk_size: int = 512 << 20
    write_buffer_size: int = 256 << 10
    compression: int = NONE
    stale_flush: float = 30.0
    drain_order: str = "fifo"  # fifo | newest_first | mixed
    fresh_share: float = 0.5  # of `mixed`


def ignore_event(_name: str, _amount: int) -> None:
    """The default for whoever keeps no metrics."""


class FastQueue:
    """`directory` None: memory only, nothing survives."""

    def __init__(
        self,
        fs: Fs,
        directory: Path | None,
        options: Options,
        pool: Executor,
        clock: Clock | None = None,
        on_event: Callable[[str, int], None] = ignore_event,
    ) -> None:
        self.options = options
        self._on_event = on_event
        self._clock = clock or Clock()
        self._memory: deque[Block] = deque()
        self._memory_bytes = 0
        self._memory_limit = options.inmemory_blocks
        self._unwritten: dict[int, Block] = {}  # unsettled blocks that are in memory only, oldest first
        self._unwritten_bytes = 0
        self._ready: deque[list[int]] = deque()  # [start, stop) ranges on disk that nobody took
        self._front: deque[Block] = deque()  # read ahead from the old end
        self._back: deque[Block] = deque()  # read ahead from the new end, newest last
        self._returned: list[tuple[int, Block]] = []  # a heap by sequence number
        self._leased: dict[int, Block] = {}
        self._count = 0  # blocks not settled
        self._fresh_credit = 0.0
        self._oldest_hint = 0  # enqueue time of about the oldest block on disk
        self._pending: list[tuple[list[Block], asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._spill_wanted = False
        self._closed = False
        self._memory_state = State()
        self.store: Store | None = None
        if directory is not None:
            self.store = Store(
                fs,
                directory,
                pool,
                chunk_size=options.chunk_size,
                write_buffer=options.write_buffer_size,
                sync=options.fsync != "never",
                compression=options.compression,
                on_event=on_event,
            )

    async def open(self) -> None:
        if self.store is None:
            return
        await self.store.open()
        self._ready = deque([start, stop] for start, stop in self.store.unsettled())
        self._count = sum(stop - start for start, stop in self._ready)
        if self._ready:
            first = await self.store.in_pool(self.store.chunks.peek, self._ready[0][0])
            self._oldest_hint = first.enqueued if first is not None else 0

    # What there is

    @property
    def state(self) -> State:
        return self.store.state if self.store is not None else self._memory_state

    @property
    def count(self) -> int:
        """Blocks not settled, leased ones included."""
        return self._count

    @property
    def waiting(self) -> int:
        """Blocks nobody holds a lease on."""
        return self._count - len(self._leased)

    @property
    def leased(self) -> int:
        return len(self._leased)

    @property
    def disk_bytes(self) -> int:
        return self.store.bytes if self.store is not None else 0

    @property
    def bytes(self) -> int:
        """Real bytes: files on disk, and blocks that are in memory only."""
        return self.disk_bytes + self._unwritten_bytes

    @property
    def memory_blocks(self) -> int:
        return len(self._memory)

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    @property
    def memory_limit(self) -> int:
        return self._memory_limit

    @property
    def unwritten(self) -> tuple[int, int]:
        """Blocks that are in memory only, and their bytes."""
        return len(self._unwritten), self._unwritten_bytes

    @property
    def backlog(self) -> bool:
        """Whether the next block in order comes from disk."""
        return bool(self._front or self._ready) and not self._returned

    def oldest_age(self) -> float:
        """Seconds since about the oldest unsettled block was accepted; 0 when there is none."""
        held = [block.enqueued for block in self._leased.values()]
        held += [self._returned[0][1].enqueued] if self._returned else []
        if self._front:
            held.append(self._front[0].enqueued)
        elif self._ready:
            held.append(self._oldest_hint)
        elif self._memory:
            held.append(self._memory[0].enqueued)
        return max(0.0, self._clock.steady() - min(held) / 1e6) if held else 0.0

    # Putting

    async def put(self, blocks: list[Block]) -> None:
        """Take the blocks in, as durable as the policy says, or raise and have taken none of them."""
        if not blocks:
            return
        if self.store is None or not self.options.write_through:
            self.put_nowait(blocks)
            if len(self._memory) > 2 * self._memory_limit and self._writer is not None:
                await asyncio.wait([self._writer])  # the disk is slower than the pushes: they wait for it
            return
        if self._closed:
            raise Unavailable("the send queue is closed")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((blocks, waiter))
        self._kick()
        await waiter

    def put_nowait(self, blocks: list[Block]) -> None:
        """Into memory only; spilled later."""
        if self._closed:
            raise Unavailable("the send queue is closed")
        self._number(blocks)
        unwritten = self._unwritten
        size = 0
        for block in blocks:
            unwritten[block.sequence] = block
            size += HEADER_SIZE + len(block.body)
        self._unwritten_bytes += size
        self._memory_bytes += size
        self._memory.extend(blocks)
        self._count += len(blocks)
        self.state.advance(blocks[-1].sequence + 1, blocks[-1].through)
        if self.store is not None and self._memory_is_full():
            self._spill_wanted = True
            self._kick()

    def _memory_is_full(self) -> bool:
        return len(self._memory) > self._memory_limit or self._memory_bytes > self.options.inmemory_bytes

    def _number(self, blocks: list[Block]) -> None:
        now = int(self._clock.steady() * 1e6)
        sequence, before, position = self.state.next_sequence, self.state.numbered, self.state.position
        for block in blocks:
            block.sequence, block.before, block.enqueued = sequence, before, now
            sequence += 1
            before += block.records
            if block.position != NO_POSITION:
                position = block.position
            elif position >= 0:
                block.position = position  # the last block on disk always tells how far the source was read

    def _kick(self) -> None:
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        """One writer job after the other, each with everything that came in meanwhile."""
        assert self.store is not None
        while self._pending or self._spill_wanted:
            async with self.store.writing:
                if self._spill_wanted:
                    self._spill_wanted = False
                    if not await self._spill():
                        return  # the next tick tries again
                else:
                    await self._write_pending(self.store)

    async def _write_pending(self, store: Store) -> None:
        taken, size = 0, 0
        for blocks, _ in self._pending:
            taken += 1
            size += sum(len(block.body) for block in blocks)
            if size > COALESCE:
                break
        jobs, self._pending = self._pending[:taken], self._pending[taken:]
        blocks = [block for batch, _ in jobs for block in batch]
        self._number(blocks)
        try:
            await store.in_pool(lambda: store.append(blocks, sync=self.options.fsync == "always"))
        except BaseException as error:
            if isinstance(error, STORAGE_ERRORS):
                store.failed(error)
            for _, waiter in jobs:
                if not waiter.done():
                    waiter.set_exception(error)
            if isinstance(error, STORAGE_ERRORS):
                return
            raise
        store.appended(blocks[-1])
        self._memory.extend(blocks)
        self._memory_bytes += sum(block.size for block in blocks)
        self._count += len(blocks)
        self.state.advance(blocks[-1].sequence + 1, blocks[-1].through)
        if self._memory_is_full():
            self._evict()
        for _, waiter in jobs:
            if not waiter.done():
                waiter.set_result(None)

    def _evict(self) -> None:
        """Forget the oldest cached blocks: they are on disk."""
        self._unread_back()
        while self._memory and self._memory_is_full():
            block = self._memory.popleft()
            self._memory_bytes -= block.size
            self._add_ready(block)

    def _unread_back(self) -> None:
        """What was read ahead from the new end is older than what joins it now, and must not be taken first."""
        for block in self._back:
            self._add_ready(block)
        self._back.clear()

    def _add_ready(self, block: Block) -> None:
        if self._ready and self._ready[-1][1] == block.sequence:
            self._ready[-1][1] += 1
        else:
            if not self._ready:
                self._oldest_hint = block.enqueued
            self._ready.append([block.sequence, block.sequence + 1])

    async def _spill(self) -> bool:
        """Write out everything that is in memory only, leased blocks too. The blocks themselves stay untouched: a
        worker may be sending one of them."""
        store = self.store
        if store is None or not self._unwritten:
            return True
        blocks = list(self._unwritten.values())
        try:
            for at in range(0, len(blocks), SPILL):
                part = [block for block in blocks[at : at + SPILL] if block.sequence in self._unwritten]
                if part:
                    copies = [replace(block) for block in part]
                    await store.compress(copies)
                    await store.in_pool(lambda copies=copies: store.append(copies, sync=False))
                    self._spilled(store, part, copies)
        except STORAGE_ERRORS as error:
            store.failed(error)
            return False
        self._on_event("flush", 1)
        return True

    def _spilled(self, store: Store, blocks: list[Block], copies: list[Block]) -> None:
        store.appended(copies[-1])
        for block, copy in zip(blocks, copies, strict=True):
            block.offset = copy.offset
            if self._unwritten.pop(block.sequence, None) is not None:
                self._unwritten_bytes -= block.size
        self._unread_back()
        kept: deque[Block] = deque()
        for block in self._memory:
            if block.offset >= 0:
                self._add_ready(block)
            else:
                kept.append(block)
        self._memory = kept
        self._memory_bytes = sum(block.size for block in kept)

    # Taking

    async def take(self) -> Block | None:
        """Lease the next block in drain order; None when there is none to be had.

        What was settled before is in the page cache first: a kill then repeats what was leased, and nothing else.
        """
        if self.store is not None:
            self.store.flush()
        block = await self._next()
        if block is not None:
            self._leased[block.sequence] = block
        return block

    async def _next(self) -> Block | None:
        if self._returned:
            return heapq.heappop(self._returned)[1]
        newest = self._wants_newest()
        while True:
            if newest and self._memory:
                return self._take_memory(newest=True)
            if newest and self._back:
                return self._back.pop()
            if not newest and self._front:
                return self._front.popleft()
            if self._ready:
                await self._fill(newest=newest)
            elif newest:
                return self._front.pop() if self._front else None
            elif self._back:
                return self._back.popleft()
            else:
                return self._take_memory(newest=False) if self._memory else None

    def _wants_newest(self) -> bool:
        order = self.options.drain_order
        if order != "mixed":
            return order == "newest_first"
        if not (self._front or self._ready):
            return False
        self._fresh_credit += self.options.fresh_share
        if self._fresh_credit >= 1.0:
            self._fresh_credit -= 1.0
            return True
        return False

    def _take_memory(self, *, newest: bool) -> Block:
        block = self._memory.pop() if newest else self._memory.popleft()
        self._memory_bytes -= block.size
        return block

    async def _fill(self, *, newest: bool) -> None:
        """Read ahead from disk, off the event loop."""
        store = self.store
        assert store is not None
        async with store.reading:
            if (self._back if newest else self._front) or not self._ready:
                return  # another worker did it while we waited
            span = self._ready[-1 if newest else 0]
            start, stop = span[0], span[1]
            if newest:
                start = max(start, stop - READ_BACK)
            reading = await store.in_pool(store.chunks.read, start, stop, PREFETCH)
            while newest and reading.next_sequence < stop:  # the newest must be among them
                start = stop - max(1, (stop - start) // 4)
                reading = await store.in_pool(store.chunks.read, start, stop, PREFETCH)
            lost = store.check(reading, start)
            if lost:
                self._count -= lost
                store.flush_soon()
            for block in reading.blocks:
                block.attempts = max(block.attempts, self.state.attempts.get(block.sequence, 0))
            if newest:
                span[1] = start
                self._back.extend(reading.blocks)
            else:
                span[0] = reading.next_sequence
                self._front.extend(reading.blocks)
                if reading.blocks:
                    self._oldest_hint = reading.blocks[-1].enqueued
            if span[0] >= span[1]:
                self._ready.remove(span)

    # Settling

    def ack(self, block: Block, dead: int = 0) -> None:
        """The leased block is done: delivered, but for `dead` records that are in the dead letters."""
        self._settle(block, Entry(Kind.DELIVERED, 0, block.sequence, block.through, block.records - dead, dead))

    def drop(self, block: Block, reason: int) -> None:
        self._settle(block, Entry(Kind.DROPPED, reason, block.sequence, block.through, block.records, 1))

    def _settle(self, block: Block, entry: Entry) -> None:
        self._leased.pop(block.sequence, None)
        if self._book(entry):
            self._count -= 1
        if self._unwritten.pop(block.sequence, None) is not None:
            self._unwritten_bytes -= block.size

    def give_back(self, block: Block, *, attempted: bool = True) -> None:
        """Return a leased block to its place; `attempted` counts the attempt, durably."""
        if self._leased.pop(block.sequence, None) is None:
            return
        if attempted:
            block.attempts += 1
            self._book(Entry(Kind.ATTEMPT, sequence=block.sequence, a=block.attempts))
        heapq.heappush(self._returned, (block.sequence, block))

    def refuse(self, records: int, reason: int) -> None:
        """Book records that were dropped before they got a sequence number."""
        self._book(Entry(Kind.REFUSED, reason, a=records))

    def _book(self, entry: Entry) -> bool:
        if self.store is None:
            return self._memory_state.apply(entry)
        booked = self.store.book(entry)
        self.store.flush_soon()
        return booked

    # Making room

    async def drop_oldest(self, blocks: int, reason: int) -> tuple[int, int]:
        """Drop up to `blocks` of the oldest blocks nobody holds; how many blocks and records went."""
        gone, records = 0, 0
        while gone < blocks and (self._front or self._ready or self._back or self._memory):
            if not self._front and self._ready:
                more_blocks, more_records = await self._drop_ready(blocks - gone, reason)
            else:
                for held in (self._front, self._back):
                    if held:
                        block = held.popleft()
                        break
                else:
                    block = self._take_memory(newest=False)
                self.drop(block, reason)
                more_blocks, more_records = 1, block.records
            gone += more_blocks
            records += more_records
        return gone, records

    async def _drop_ready(self, blocks: int, reason: int) -> tuple[int, int]:
        """Drop from the oldest range on disk without reading more than its two ends."""
        store = self.store
        assert store is not None
        async with store.reading:
            if not self._ready:
                return 0, 0
            span = self._ready[0]
            start, stop = span[0], min(span[1], span[0] + blocks)
            before, through = await store.in_pool(
                lambda: (store.records_in_front_of(start), store.records_before(stop))
            )
            self._book(Entry(Kind.DROPPED, reason, start, through, max(0, through - before), stop - start))
            self._count -= stop - start
            span[0] = stop
            if span[0] >= span[1]:
                self._ready.popleft()
            return stop - start, max(0, through - before)

    def oldest_chunk_blocks(self) -> int:
        """Blocks to drop so that the oldest chunk can go; 0 when there is no chunk, or a lease holds it."""
        if self.store is None or not self.store.chunks.chunks:
            return 0
        chunk = self.store.chunks.chunks[0]
        held = [*self._leased, *(sequence for sequence, _ in self._returned)]
        if any(chunk.base <= sequence < chunk.stop for sequence in held):
            return 0
        return sum(stop - start for start, stop in self.state.settled.gaps(chunk.base, chunk.stop))

    def limit_memory(self, blocks: int) -> None:
        """Shrink or grow the memory layer (adaptive sizing)."""
        self._memory_limit = max(1, min(blocks, self.options.inmemory_blocks))
        if self.store is None or not self._memory_is_full():
            return
        if self.options.write_through:
            self._evict()
        else:
            self._spill_wanted = True
            self._kick()

    async def scrub(self) -> int:
        """Read every block there is, right after opening, and book what is damaged; how many blocks that were."""
        store, lost = self.store, 0
        if store is None:
            return 0
        async with store.reading:
            for start, stop in list(self._ready):
                while start < stop:
                    reading = await store.in_pool(store.chunks.read, start, stop)
                    lost += store.check(reading, start)
                    start = reading.next_sequence
            self._ready = deque([start, stop] for start, stop in store.unsettled())
            self._count -= lost
        return lost

    # Upkeep

    async def tick(self) -> None:
        """Call about once a second: stale flush, fsync, journal, chunks, metadata. The disk may refuse: what failed is
        tried again at the next call."""
        store = self.store
        if store is None or self._closed:
            return
        try:
            oldest = next(iter(self._unwritten.values()), None)
            if oldest is not None and (
                store.failing is not None
                or self._memory_is_full()
                or self._clock.steady() - oldest.enqueued / 1e6 >= self.options.stale_flush
            ):
                self._spill_wanted = True
                self._kick()
                if self._writer is not None:
                    await self._writer
            await store.tick(reader_offset=self._reader_offset(store), count=self._count, size=self.bytes)
            if not self._unwritten:
                store.failing = None
        except STORAGE_ERRORS as error:
            store.failed(error)

    def _reader_offset(self, store: Store) -> int:
        """Where the lowest unsettled block begins, if that is known without looking; else 0."""
        low = self.state.first_unsettled()
        candidates = [self._leased.get(low)]
        candidates += [self._returned[0][1]] if self._returned else []
        candidates += [blocks[0] for blocks in (self._front, self._memory) if blocks]
        for block in candidates:
            if block is not None and block.sequence == low:
                return max(0, block.offset)
        return store.chunks.cursor_of(low)

    async def close(self) -> None:
        """Write out what is in memory, sync, leave metadata that spares the next start a scan, let the lock go."""
        if self._closed:
            return
        if self._writer is not None:
            await self._writer
        self._closed = True
        store = self.store
        if store is None:
            return
        async with store.writing:
            spilled = await self._spill()
        if not spilled:
            count = sum(block.records for block in self._unwritten.values())
            why, store_failing = f"{count} records in memory could not be written out", store.failing
            store.abandon()
            raise StorageFailed(f"{why}: {store_failing}")
        await store.close(reader_offset=self._reader_offset(store), count=self._count, size=self.bytes)

    def abandon(self) -> None:
        """Let go of everything without writing: what a kill would leave behind."""
        self._closed = True
        if self.store is not None:
            self.store.abandon()
