"""FastQueue: a persistent queue of blocks in two layers, memory and disk, with leases.

`take` leases a block, `ack` completes it, and `give_back` counts the attempt and returns the block
to its place in front of all younger ones. Leases end with the process: the next start finds its
open blocks again.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from penstock.contract.routes import Repaired
from penstock.errors import StorageError, StorageFailed
from penstock.export.context import Clock
from penstock.export.sendqueue.backlog import Backlog
from penstock.export.sendqueue.blocks import Block, records_of
from penstock.export.sendqueue.chunks import ChunkOptions
from penstock.export.sendqueue.journal import BlockEntry, Books, EntryKind
from penstock.export.sendqueue.memory import MemoryLayer
from penstock.export.sendqueue.store import Store
from penstock.export.sendqueue.writer import ChunkWriter
from penstock.io.fs import DISK, Fs


class FastQueue:
    """The queue. Without a `directory`, blocks are in memory only and end with the process."""

    def __init__(
        self,
        fs: Fs,
        directory: Path | None,
        options: ChunkOptions,
        pool: Executor,
        clock: Clock | None = None,
        count: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.options = options
        self.books = Books(count=count)
        self.memory = MemoryLayer(options.inmemory_blocks, options.inmemory_bytes)
        self._clock = clock or Clock()
        self._returned: list[tuple[int, Block]] = []  # a heap by sequence number
        self.leased: dict[int, Block] = {}  # by sequence number
        self._fresh_credit = 0.0
        self.store: Store | None = None
        if directory is not None:
            self.store = Store(fs, directory, pool, options, self.books, self._hints)
        newest_first = options.drain_order == "newest_first"
        self._backlog = Backlog(self.store, newest_first=newest_first)
        self._writer = ChunkWriter(
            options, self.books, self.memory, self._backlog, self.store, self._clock
        )

    async def open(self) -> None:
        if self.store is not None:
            await self.store.open()
            await self._backlog.open()

    async def put(self, blocks: list[Block]) -> None:
        """Store all blocks with the durability of the policy, or raise and store none."""
        await self._writer.put(blocks)

    # Status

    @property
    def count(self) -> int:
        """Return the number of blocks that are not completed, leased ones included."""
        return self.books.open_blocks

    @property
    def waiting(self) -> int:
        """Return the number of blocks without a lease."""
        return self.count - len(self.leased)

    @property
    def disk_bytes(self) -> int:
        return self.store.bytes if self.store is not None else 0

    @property
    def bytes(self) -> int:
        """Return the bytes in use: files on disk, and blocks that are in memory only."""
        return self.disk_bytes + self.memory.unwritten_bytes

    @property
    def backlog(self) -> bool:
        """Return whether blocks wait on disk and no returned block is due before them."""
        return bool(self._backlog) and not self._returned

    def oldest_age(self) -> float:
        """Return the approximate age in seconds of the oldest open block; 0 if there is none."""
        times = [block.enqueued for block in self.leased.values()]
        times += [self._returned[0][1].enqueued] if self._returned else []
        if (waiting := self._backlog.oldest_enqueued) is not None:
            times.append(waiting)
        elif self.memory.oldest is not None:
            times.append(self.memory.oldest.enqueued)
        return max(0.0, self._clock.steady() - min(times) / 1e6) if times else 0.0

    # Taking

    async def take(self) -> Block | None:
        """Lease the next block in drain order. Return None if there is none.

        Completions are written to the page cache first, so after a kill only leased blocks are
        delivered again.
        """
        if self.store is not None:
            self.store.flush()
        block = None
        if self._returned:
            block = heapq.heappop(self._returned)[1]
        else:
            newest = self._wants_newest()
            if self._backlog and not (newest and self.memory):
                block = await self._backlog.take()
            if block is None and self.memory:
                block = self.memory.take(newest=newest)
        if block is not None:
            self.leased[block.sequence] = block
        return block

    def _wants_newest(self) -> bool:
        """Return whether the newest block in memory is next. `mixed` applies `fresh_share`."""
        order = self.options.drain_order
        if order != "mixed" or not self._backlog:
            return order == "newest_first"
        self._fresh_credit += self.options.fresh_share
        newest = self._fresh_credit >= 1.0
        self._fresh_credit -= newest
        return newest

    # Completing

    def ack(self, block: Block, dead: int = 0) -> None:
        """Complete a leased block as delivered, except for `dead` records in the dead letters."""
        through, delivered = block.through, block.records - dead
        self._complete(
            block, BlockEntry(EntryKind.DELIVERED, 0, block.sequence, through, delivered, dead)
        )

    def drop(self, block: Block, reason: int) -> None:
        entry = BlockEntry(
            EntryKind.DROPPED, reason, block.sequence, block.through, block.records, 1
        )
        self._complete(block, entry)

    def _book(self, entry: BlockEntry) -> None:
        if self.store is None:
            self.books.apply(entry)
        else:
            self.store.book(entry)

    def _complete(self, block: Block, entry: BlockEntry) -> None:
        self.leased.pop(block.sequence, None)
        self._book(entry)
        self.memory.completed(block)

    def give_back(self, block: Block, *, attempted: bool = True) -> None:
        """Return a leased block to its place; `attempted` counts the attempt, durably."""
        if self.leased.pop(block.sequence, None) is None:
            return
        if attempted:
            block.attempts += 1
            self._book(BlockEntry(EntryKind.ATTEMPT, sequence=block.sequence, a=block.attempts))
        heapq.heappush(self._returned, (block.sequence, block))

    def refuse(self, records: int, reason: int, blocks: int = 0) -> None:
        """Book records that were dropped before their blocks got sequence numbers."""
        self._book(BlockEntry(EntryKind.REFUSED, reason, a=records, b=blocks))

    async def pass_over(self, records: int, reason: int, position: int) -> None:
        """Book records of the source as dropped, and the source as read up to `position`."""
        if self.store is not None:
            # Otherwise power loss could keep the position and lose blocks before it.
            await self.store.sync()
        self.refuse(records, reason)
        self._book(BlockEntry(EntryKind.POSITION, value=position))

    # Making room

    async def drop_oldest(self, blocks: int, reason: int) -> tuple[int, int]:
        """Drop up to `blocks` of the oldest blocks without a lease. Return blocks and records."""
        dropped, records = 0, 0
        while dropped < blocks and (self._returned or self._backlog or self.memory):
            block = self._oldest_returned() or self._backlog.pop_read()
            if block is None and self._backlog:
                more_blocks, more_records = await self._backlog.drop(blocks - dropped, reason)
            else:
                block = block or self.memory.take(newest=False)
                self.drop(block, reason)
                more_blocks, more_records = 1, block.records
            dropped += more_blocks
            records += more_records
        return dropped, records

    def _oldest_returned(self) -> Block | None:
        """Pop the first returned block, if it is the oldest of all."""
        if not self._returned:
            return None
        first = self._backlog.first_sequence
        if first is None and self.memory.oldest is not None:
            first = self.memory.oldest.sequence
        if first is not None and first < self._returned[0][0]:
            return None
        return heapq.heappop(self._returned)[1]

    def oldest_chunk_blocks(self) -> int:
        """Return how many blocks to drop to free the oldest chunk without a lease; 0: none."""
        if self.store is None:
            return 0
        chunks = self.store.chunks.chunks
        for chunk in chunks[:-1] if len(chunks) > 1 else chunks:
            if not any(chunk.base <= sequence < chunk.stop for sequence in self.leased):
                gaps = self.books.completed.gaps(1, chunk.stop)
                leased = sum(sequence < chunk.stop for sequence in self.leased)
                return sum(stop - start for start, stop in gaps) - leased
        return 0

    def limit_memory(self, blocks: int) -> None:
        """Shrink or grow the memory layer (adaptive sizing)."""
        self.memory.limit = max(1, min(blocks, self.options.inmemory_blocks))
        self._writer.make_room()

    # Upkeep

    async def tick(self) -> None:
        """Flush stale blocks, sync, and maintain journal, chunks and metadata. Called about once a
        second. If the disk fails, the next call repeats the work.
        """
        store = self.store
        if store is None or self._writer.closed:
            return
        try:
            oldest = next(iter(self.memory.unwritten.values()), None)
            if oldest is not None and (
                store.failing is not None
                or self.memory.full
                or self._clock.steady() - oldest.enqueued / 1e6 >= self.options.stale_flush
            ):
                self._writer.spill_soon()
                await self._writer.wait_until_idle()
            await store.tick()
            if not self.memory.unwritten:
                store.failing = None
        except StorageError as error:
            store.failed(error)

    def _hints(self) -> dict[str, int]:
        """Return hints for the metadata. All blocks on disk before `reader_offset` are completed.
        Without it, all blocks are.
        """
        assert self.store is not None
        hints = {"entry_count": self.count, "total_bytes": self.bytes}
        low = self.books.first_open()
        candidates = [self.leased.get(low), self._backlog.first, self.memory.oldest]
        candidates += [self._returned[0][1]] if self._returned else []
        offsets = [block.offset for block in candidates if block and block.sequence == low]
        place = offsets[0] if offsets else self.store.chunks.place_before(low)
        return hints if place is None or place < 0 else {**hints, "reader_offset": place}

    async def write_out(self) -> int:
        """Write memory to the chunks, if the disk allows it. Return the end of the stream."""
        if self.store is None:
            return 0
        self.store.flush()
        await self._writer.spill()
        return self.store.chunks.end

    async def close(self) -> None:
        """Write out memory, sync, save metadata, unlock."""
        if self._writer.closed:
            return
        await self._writer.wait_until_idle()
        self._writer.closed = True
        store = self.store
        if store is None:
            return
        if not await self._writer.spill():
            count = records_of(list(self.memory.unwritten.values()))
            store.abandon()
            raise StorageFailed(
                f"{count} records in memory could not be written out: {store.failing}"
            )
        await store.close()

    def abandon(self) -> None:
        """Close everything without writing, as a kill would."""
        self._writer.closed = True
        if self.store is not None:
            self.store.abandon()


async def repair(directory: Path) -> Repaired:
    """Repair a stopped queue: read every block, quarantine damaged bytes, book their records as
    dropped and shorten the journal. Return the new books.
    """
    events: Counter[str] = Counter()

    def count(name: str, amount: int = 1, *_: str) -> None:
        events[name] += amount

    with ThreadPoolExecutor(1) as pool:
        queue = FastQueue(DISK, directory, ChunkOptions(inmemory_blocks=1), pool, count=count)
        await queue.open()
        while await queue._backlog.take() is not None:
            pass  # reading books the damage
        await queue.close()
    return Repaired(queue.books.accounting(), queue.count, events)
