"""The two layers of a send queue: blocks in memory, and the backlog on disk.

The backlog holds ranges of sequence numbers, not blocks, so one of millions costs nothing in
memory. Blocks are read ahead from its old end (`fifo`), from its new end (`newest_first`), or both
(`mixed`). Invariant, by sequence number: front < ranges < back.
"""

from collections import deque
from collections.abc import Iterable

from penstock.export.sendqueue.blocks import Block, bytes_of
from penstock.export.sendqueue.journal import Entry, Kind
from penstock.export.sendqueue.store import Store

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
        block = self._blocks.pop() if newest else self._blocks.popleft()
        self.bytes -= block.size
        return block

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
        gone = []
        while self._blocks and self._blocks[0].offset >= 0:  # the oldest are written first
            gone.append(self._blocks.popleft())
        self.bytes -= bytes_of(gone)
        return gone


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
        self._ranges = deque([start, stop] for start, stop in store.open_ranges())
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
                lambda: (store.records_in_front_of(start), store.records_before(stop))
            )
            store.book(
                Entry(Kind.DROPPED, reason, start, through, max(0, through - before), stop - start)
            )
            store.flush_soon()
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
            self._ranges = deque([start, stop] for start, stop in store.open_ranges())
