"""The two layers of a send queue, blocks in memory and the backlog on disk, and the one job that
writes from the one to the other.

The backlog holds ranges of sequence numbers, not blocks, so one of millions costs nothing in
memory. Blocks are read ahead from its old end (`fifo`), from its new end (`newest_first`), or both
(`mixed`). Invariant, by sequence number: front < ranges < back.
"""

import asyncio
from collections import deque
from collections.abc import Iterable

from msgspec.structs import replace

from penstock.errors import StorageError, Unavailable
from penstock.export.clock import Clock
from penstock.export.sendqueue.blocks import NO_POSITION, Block, bytes_of
from penstock.export.sendqueue.chunks import Options
from penstock.export.sendqueue.journal import Books, Entry, Kind
from penstock.export.sendqueue.store import MIN_POOL_BYTES, Store

MAX_WRITE_BYTES = 32 << 20  # that one job takes
MAX_SPILL_BLOCKS = 4096  # that one part of a spill has
MAX_SPILL_BYTES = 4 << 20  # small, so that one part is compressed while another is written
READ_BACK_BLOCKS = 64  # read at once from the new end
READ_AHEAD_BYTES = 1 << 20


class MemoryLayer:
    """The newest blocks, ready to be taken without a read.

    A block in it is on disk too (then memory is a cache, and forgetting it costs a read) or in
    memory only ("unwritten"). Unwritten blocks stay listed here while somebody holds a lease on
    them, because a spill writes those too.
    """

    def __init__(self, max_blocks: int, max_bytes: int) -> None:
        self.limit = max_blocks  # adaptive sizing lowers it
        self._max_bytes = max_bytes
        self._blocks: deque[Block] = deque()  # oldest first
        self.bytes = 0
        self.unwritten: dict[int, Block] = {}  # open blocks that are only here, oldest first
        self.unwritten_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def full(self) -> bool:
        return len(self._blocks) > self.limit or self.bytes > self._max_bytes

    @property
    def oldest(self) -> Block | None:
        return self._blocks[0] if self._blocks else None

    def add(self, blocks: list[Block], *, written: bool) -> None:
        """Numbered blocks, younger than all that are here."""
        size = bytes_of(blocks)
        self._blocks.extend(blocks)
        self.bytes += size
        if not written:
            self.unwritten.update(
                zip(range(blocks[0].sequence, blocks[-1].sequence + 1), blocks, strict=True)
            )
            self.unwritten_bytes += size

    def take(self, *, newest: bool) -> Block:
        """Remove the newest or oldest block. Its body does not change any more: the key under which
        a destination sees it contains the body's checksum, before and after a restart."""
        block = self._blocks.pop() if newest else self._blocks.popleft()
        self.bytes -= block.size
        block.raw_length = block.raw_length or len(block.body)  # a spill does not compress it
        return block

    def replace_bodies(self, blocks: list[Block], copies: list[Block]) -> None:
        """Use the compressed bodies of the copies; a block that was taken meanwhile keeps its own,
        and so does its copy."""
        saved = 0
        for block, copy in zip(blocks, copies, strict=True):
            if block.raw_length:
                copy.body, copy.compression = block.body, block.compression
            else:
                saved += len(block.body) - len(copy.body)
                block.body, block.compression = copy.body, copy.compression
                block.raw_length = copy.raw_length
        self.bytes -= saved
        self.unwritten_bytes -= saved

    def completed(self, block: Block) -> None:
        if self.unwritten.pop(block.sequence, None) is not None:
            self.unwritten_bytes -= block.size

    def evict(self) -> Iterable[Block]:
        """Forget the oldest blocks, which are on disk, until there is room."""
        while self._blocks and self.full:
            yield self.take(newest=False)

    def written(self, blocks: list[Block], copies: list[Block]) -> list[Block]:
        """`blocks` are on disk, as `copies`; those that nobody took leave memory: these."""
        for block, stored in zip(blocks, copies, strict=True):
            block.offset = stored.offset
            self.completed(block)
        evicted = []
        while self._blocks and self._blocks[0].offset >= 0:  # the oldest are written first
            evicted.append(self._blocks.popleft())
        self.bytes -= bytes_of(evicted)
        return evicted


class Backlog:
    """The blocks on disk that nobody took yet. `store` None: there is no disk, and never one."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._ranges: deque[list[int]] = deque()  # [start, stop)
        self._front: deque[Block] = deque()  # read ahead from the old end
        self._back: deque[Block] = deque()  # read ahead from the new end, newest last
        self._oldest_hint = 0  # enqueue time of about the oldest block in the ranges

    async def open(self) -> None:
        """After the store."""
        store = self._need_store()
        self._ranges = deque(map(list, store.open_ranges()))
        if self._ranges:
            first = await store.in_pool(store.chunks.peek, self._ranges[0][0])
            self._oldest_hint = first.enqueued if first is not None else 0

    def _need_store(self) -> Store:
        assert self._store is not None
        return self._store

    def __bool__(self) -> bool:
        return bool(self._front or self._ranges or self._back)

    @property
    def has_old(self) -> bool:
        """Whether the next block in order is here."""
        return bool(self._front or self._ranges)

    @property
    def first(self) -> Block | None:
        """The oldest block, if it was read already."""
        return self._front[0] if self._front else None

    @property
    def first_sequence(self) -> int | None:
        """The number of the oldest block."""
        if self._front:
            return self._front[0].sequence
        if self._ranges:
            return self._ranges[0][0]
        return self._back[0].sequence if self._back else None

    @property
    def oldest_enqueued(self) -> int | None:
        if self._front:
            return self._front[0].enqueued
        return self._oldest_hint if self._ranges else None

    def add(self, block: Block) -> None:
        """A block that is on disk and younger than all that are here."""
        if self._ranges and self._ranges[-1][1] == block.sequence:
            self._ranges[-1][1] += 1
        else:
            if not self._ranges:
                self._oldest_hint = block.enqueued
            self._ranges.append([block.sequence, block.sequence + 1])

    def unread_back(self) -> None:
        """What was read ahead from the new end is older than what joins it: not first any more."""
        for block in self._back:
            self.add(block)
        self._back.clear()

    async def take(self, *, newest: bool) -> Block | None:
        """The oldest or newest block; what is lost on the way to it is booked."""
        ahead = self._back if newest else self._front
        while not ahead and self._ranges:
            await self._read_ahead(newest=newest)
        if newest:
            ahead = self._back or self._front
            return ahead.pop() if ahead else None
        ahead = self._front or self._back
        return ahead.popleft() if ahead else None

    async def _read_ahead(self, *, newest: bool) -> None:
        """Read from disk, off the event loop."""
        store = self._need_store()
        async with store.reading:
            if (self._back if newest else self._front) or not self._ranges:
                return  # another worker did it while we waited
            span = self._ranges[-1 if newest else 0]
            start, stop = span[0], span[1]
            if newest:
                start = max(start, stop - READ_BACK_BLOCKS)
            reading = await store.in_pool(store.chunks.read, start, stop, READ_AHEAD_BYTES)
            while newest and reading.next_sequence < stop:  # the newest must be among them
                start = stop - max(1, (stop - start) // 4)
                reading = await store.in_pool(store.chunks.read, start, stop, READ_AHEAD_BYTES)
            if newest and (self._ranges[-1] is not span or span[1] != stop):
                return  # younger ones joined while we read: begin with them
            store.check(reading, start)
            attempts = store.books.attempts
            for block in reading.blocks:
                block.attempts = max(block.attempts, attempts.get(block.sequence, 0))
            if newest:
                span[1] = start
                self._back.extend(reading.blocks)
            else:
                span[0] = reading.next_sequence
                self._front.extend(reading.blocks)
                if reading.blocks:
                    self._oldest_hint = reading.blocks[-1].enqueued
            if span[0] >= span[1]:
                self._ranges.remove(span)

    def pop_read(self) -> Block | None:
        """The oldest block if no disk has to be asked for it; else None."""
        if self._front:
            return self._front.popleft()
        return self._back.popleft() if self._back and not self._ranges else None

    async def drop(self, blocks: int, reason: int) -> tuple[int, int]:
        """Drop from the oldest range, reading only its two ends; how many blocks and records."""
        store = self._need_store()
        async with store.reading:
            if not self._ranges:
                return 0, 0
            span = self._ranges[0]
            start, stop = span[0], min(span[1], span[0] + blocks)
            before, through = await store.in_pool(
                lambda: (store.records_before(start), store.records_before(stop))
            )
            store.book(
                Entry(Kind.DROPPED, reason, start, through, max(0, through - before), stop - start)
            )
            span[0] = stop
            if span[0] >= span[1]:
                self._ranges.popleft()
            return stop - start, max(0, through - before)

    async def scrub(self) -> None:
        """Read every block there is, right after opening, and book what is damaged."""
        store = self._need_store()
        async with store.reading:
            for start, stop in list(self._ranges):
                while start < stop:
                    reading = await store.in_pool(store.chunks.read, start, stop)
                    store.check(reading, start)
                    start = reading.next_sequence
            self._ranges = deque(map(list, store.open_ranges()))


class Writer:
    """How blocks get in: numbered, put into memory, written to the chunks, one job after the other.

    Write-through: pushes compress side by side, then wait in line; one job writes, and perhaps
    syncs, everything that came in while the last one was at work. Otherwise blocks go to memory at
    once, and a spill writes all of it out when there is too much; pushes that are faster than the
    disk wait for a spill to end, and the next one begins at once. `store` None: everything stays in
    memory.
    """

    def __init__(
        self,
        options: Options,
        books: Books,
        memory: MemoryLayer,
        backlog: Backlog,
        store: Store | None,
        clock: Clock,
    ) -> None:
        self._options = options
        self._books = books
        self._memory = memory
        self._backlog = backlog
        self._store = store
        self._clock = clock
        self._pending: list[tuple[list[Block], asyncio.Future[None]]] = []  # in line to be written
        self._task: asyncio.Task[None] | None = None  # the one job there is
        self._spill_wanted = False
        self._spilled = asyncio.Event()  # set, and replaced, when a spill has ended
        self.closed = False

    async def put(self, blocks: list[Block]) -> None:
        """Take the blocks in, as durable as the policy says, or raise and take none of them."""
        if not blocks:
            return
        if self._store is None or not self._options.write_through:
            self._put_in_memory(blocks)
            if (
                len(self._memory) > 2 * self._memory.limit
                and self._task is not None
                and not self._task.done()
            ):
                self._spill_wanted = True  # the disk is slower than the pushes: they wait for it
                await self._spilled.wait()
            return
        # Pushes do this side by side while the writer writes.
        await self._store.compress(blocks, MIN_POOL_BYTES)
        if self.closed:
            raise Unavailable("the send queue is closed")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((blocks, waiter))
        self._start()
        await waiter

    def _put_in_memory(self, blocks: list[Block]) -> None:
        if self.closed:
            raise Unavailable("the send queue is closed")
        self._number(blocks)
        self._memory.add(blocks, written=False)
        last = blocks[-1]
        if self._store is None:
            self._books.advance(last.sequence + 1, last.through)
        else:
            # what a kill loses is counted, and its numbers are not used again
            self._store.book(Entry(Kind.ACCEPTED, 0, last.sequence + 1, last.through))
            if self._memory.full:
                self.spill_soon()

    def _number(self, blocks: list[Block]) -> None:
        now, books = int(self._clock.steady() * 1e6), self._books
        before, position = books.numbered, books.position
        for sequence, block in enumerate(blocks, books.next_sequence):
            block.sequence, block.before, block.enqueued = sequence, before, now
            before += block.records
            if block.position != NO_POSITION:
                position = block.position
            elif position >= 0:
                block.position = position  # the last block says how far the source was read

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._write())

    def spill_soon(self) -> None:
        self._spill_wanted = True
        self._start()

    async def idle(self) -> None:
        """Wait until there is nothing to write, or the disk takes nothing."""
        if self._task is not None:
            await self._task

    async def _write(self) -> None:
        """One job after the other, each with everything that came in meanwhile."""
        assert self._store is not None
        while self._pending or self._spill_wanted:
            async with self._store.writing:
                if self._spill_wanted:
                    self._spill_wanted = False
                    try:
                        if not await self._spill(self._store):
                            return  # the next tick tries again
                    finally:
                        self._spilled.set()
                        self._spilled = asyncio.Event()
                else:
                    await self._write_pending(self._store)

    async def _write_pending(self, store: Store) -> None:
        taken, size = 0, 0
        for blocks, _ in self._pending:
            taken += 1
            size += bytes_of(blocks)
            if size > MAX_WRITE_BYTES:
                break
        jobs, self._pending = self._pending[:taken], self._pending[taken:]
        blocks = [block for batch, _ in jobs for block in batch]
        self._number(blocks)
        try:
            await store.in_pool(lambda: store.append(blocks, sync=self._options.fsync == "always"))
        except BaseException as error:
            if isinstance(error, StorageError):
                store.failed(error)
            for _, waiter in jobs:
                if not waiter.done():
                    waiter.set_exception(error)
            if isinstance(error, StorageError):
                return
            raise
        store.appended(blocks[-1])
        self._memory.add(blocks, written=True)
        self._books.advance(blocks[-1].sequence + 1, blocks[-1].through)
        if self._memory.full:
            self._evict()
        for _, waiter in jobs:
            if not waiter.done():
                waiter.set_result(None)

    def _evict(self) -> None:
        """Forget the oldest cached blocks: they are on disk."""
        self._backlog.unread_back()
        for block in self._memory.evict():
            self._backlog.add(block)

    def make_room(self) -> None:
        """The memory layer may hold less than it does."""
        if self._store is None or not self._memory.full:
            return
        if self._options.write_through:
            self._evict()
        else:
            self.spill_soon()

    async def spill(self) -> bool:
        """Write out everything that is in memory only; False when the disk refused."""
        if self._store is None:
            return True
        async with self._store.writing:
            return await self._spill(self._store)

    async def _spill(self, store: Store) -> bool:
        """Leased blocks too, with the body that a worker may be sending.

        A part is compressed while the part before it is written.
        """
        parts = self._parts(self._memory.unwritten.values())
        if not parts:
            return True
        compressing = asyncio.ensure_future(self._compressed(store, parts[0]))
        try:
            for following in [*parts[1:], []]:
                part, copies = await compressing
                compressing = asyncio.ensure_future(self._compressed(store, following))
                if part:
                    self._memory.replace_bodies(part, copies)
                    await store.in_pool(lambda copies=copies: store.append(copies, sync=False))
                    store.appended(copies[-1])
                    self._backlog.unread_back()
                    for block in self._memory.written(part, copies):
                        self._backlog.add(block)
        except StorageError as error:
            store.failed(error)
            return False
        finally:
            compressing.cancel()
        self._books.on_event("flush", 1)
        return True

    @staticmethod
    def _parts(blocks: Iterable[Block]) -> list[list[Block]]:
        """What one job of a spill takes, one after the other."""
        parts: list[list[Block]] = []
        size = MAX_SPILL_BYTES
        for block in blocks:
            if size >= MAX_SPILL_BYTES or len(parts[-1]) >= MAX_SPILL_BLOCKS:
                parts.append([])
                size = 0
            parts[-1].append(block)
            size += block.size
        return parts

    async def _compressed(self, store: Store, part: list[Block]) -> tuple[list[Block], list[Block]]:
        """Those of `part` that are still open, and compressed copies of them."""
        part = [block for block in part if block.sequence in self._memory.unwritten]
        copies = [replace(block) for block in part]
        await store.compress(copies)
        return part, copies
