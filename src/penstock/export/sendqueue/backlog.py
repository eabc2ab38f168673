"""The backlog of a send queue: the blocks on disk that are not taken yet.

It consists of ranges of sequence numbers, not blocks, so millions of blocks need no memory. Blocks
are read ahead at the end from which the queue takes them: the oldest, or with `newest_first` the
newest. Blocks that were read ahead are not in the ranges, but before or after them.
"""

from collections import deque
from collections.abc import Iterable

from penstock.export.sendqueue.blocks import Block
from penstock.export.sendqueue.journal import BlockEntry, EntryKind
from penstock.export.sendqueue.store import Store

READ_BACK_BLOCKS = 64  # read at once from the new end
READ_AHEAD_BYTES = 1 << 20


class Backlog:
    """The backlog. Without a `store` (a queue in memory), it is always empty."""

    def __init__(self, store: Store | None, *, newest_first: bool) -> None:
        self._disk = store
        self._newest_first = newest_first
        self._ranges: deque[list[int]] = deque()  # [start, stop)
        self._ahead: deque[Block] = deque()  # blocks that were read ahead, oldest first
        self._oldest_hint = 0  # approximate enqueue time of the oldest block in the ranges

    async def open(self) -> None:
        """Read the ranges of blocks that the opened store still has to deliver."""
        store = self._store
        self._ranges = deque(map(list, store.open_ranges()))
        if self._ranges:
            first = await store.in_pool(store.chunks.peek, self._ranges[0][0])
            self._oldest_hint = first.enqueued if first is not None else 0

    @property
    def _store(self) -> Store:
        assert self._disk is not None
        return self._disk

    def __bool__(self) -> bool:
        return bool(self._ahead or self._ranges)

    @property
    def first(self) -> Block | None:
        """Return the oldest block, if it was read already."""
        return self._ahead[0] if self._ahead and not (self._newest_first and self._ranges) else None

    @property
    def first_sequence(self) -> int | None:
        """Return the number of the oldest block."""
        if self.first is not None:
            return self.first.sequence
        return self._ranges[0][0] if self._ranges else None

    @property
    def oldest_enqueued(self) -> int | None:
        if self.first is not None:
            return self.first.enqueued
        return self._oldest_hint if self._ranges else None

    def add(self, blocks: Iterable[Block]) -> None:
        """Add blocks that are on disk and younger than all others here."""
        if self._newest_first:  # the blocks that were read ahead are no longer the newest
            blocks, self._ahead = [*self._ahead, *blocks], deque()
        for block in blocks:
            if self._ranges and self._ranges[-1][1] == block.sequence:
                self._ranges[-1][1] += 1
            else:
                if not self._ranges:
                    self._oldest_hint = block.enqueued
                self._ranges.append([block.sequence, block.sequence + 1])

    async def take(self) -> Block | None:
        """Return the next block in drain order. Blocks that are lost before it are booked."""
        while not self._ahead and self._ranges:
            await self._read_ahead()
        if not self._ahead:
            return None
        return self._ahead.pop() if self._newest_first else self._ahead.popleft()

    async def _read_ahead(self) -> None:
        """Read from disk, off the event loop."""
        store, newest = self._store, self._newest_first
        async with store.reading:
            if self._ahead or not self._ranges:
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
                return  # newer blocks were added during the read: start with them
            store.check(reading, start)
            attempts = store.books.attempts
            for block in reading.blocks:
                block.attempts = max(block.attempts, attempts.get(block.sequence, 0))
            self._ahead.extend(reading.blocks)
            if newest:
                span[1] = start
            else:
                span[0] = reading.next_sequence
                if reading.blocks:
                    self._oldest_hint = reading.blocks[-1].enqueued
            if span[0] >= span[1]:
                self._ranges.remove(span)

    def pop_read(self) -> Block | None:
        """Return the oldest block if it was read already; else None."""
        return self._ahead.popleft() if self.first is not None else None

    async def drop(self, blocks: int, reason: int) -> tuple[int, int]:
        """Drop blocks of the oldest range; return the number of blocks and records."""
        store = self._store
        async with store.reading:
            if not self._ranges:
                return 0, 0
            span = self._ranges[0]
            start, stop = span[0], min(span[1], span[0] + blocks)
            before, through = await store.in_pool(
                lambda: (store.records_before(start), store.records_before(stop))
            )
            store.book(
                BlockEntry(
                    EntryKind.DROPPED,
                    reason,
                    start,
                    through,
                    max(0, through - before),
                    stop - start,
                )
            )
            span[0] = stop
            if span[0] >= span[1]:
                self._ranges.popleft()
            return stop - start, max(0, through - before)
