"""Put blocks into a send queue: number them, add them to memory and write them to the chunks. One
job runs at a time.

Write-through (fsync `always` and `interval`, and every route that reads a topic or queue): a block
is written to a chunk before it can be taken, so a killed process loses nothing. Pushes compress
their blocks concurrently and then wait. One job writes, and syncs if necessary, all blocks that
arrived during the previous job.

Otherwise (fsync `never`), blocks are added to memory at once. A spill writes all blocks that are in
memory only: if there are too many, if the oldest is `stale_flush` old, and at a stop. A kill loses
these blocks. Pushes that are faster than the disk wait for a spill. All blocks in memory only are
newer than those on disk, so a spill writes every one of them.
"""

import asyncio
from collections.abc import Iterable

from msgspec.structs import replace

from penstock.errors import StorageError, Unavailable
from penstock.export.context import Clock
from penstock.export.sendqueue.backlog import Backlog
from penstock.export.sendqueue.blocks import NO_POSITION, Block, bytes_of
from penstock.export.sendqueue.chunks import ChunkOptions
from penstock.export.sendqueue.journal import BlockEntry, Books, EntryKind
from penstock.export.sendqueue.memory import MemoryLayer
from penstock.export.sendqueue.store import MIN_POOL_BYTES, Store

MAX_WRITE_BYTES = 32 << 20  # of one job
# Of one part of a spill: small, so that one part is compressed while another is written.
MAX_SPILL_BYTES = 4 << 20


class ChunkWriter:
    """The writer. Without a `store`, all blocks stay in memory."""

    def __init__(
        self,
        options: ChunkOptions,
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
        self._pending: list[tuple[list[Block], asyncio.Future[None]]] = []  # waiting to be written
        self._task: asyncio.Task[None] | None = None  # the job
        self._spill_wanted = False
        self._spilled = asyncio.Event()  # set, and replaced, when a spill has ended
        self.closed = False

    async def put(self, blocks: list[Block]) -> None:
        """Store all blocks with the durability of the policy, or raise and store none."""
        if not blocks:
            return
        if self._store is None or not self._options.write_through:
            self._put_in_memory(blocks)
            if (
                len(self._memory) > 2 * self._memory.limit
                and self._task is not None
                and not self._task.done()
            ):
                self._spill_wanted = True  # the disk is slower than the pushes, so they wait
                await self._spilled.wait()
            return
        # Pushes compress concurrently while the writer writes.
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
            # so that blocks lost in a kill are counted, and their numbers are not reused
            self._store.book(BlockEntry(EntryKind.ACCEPTED, 0, last.sequence + 1, last.through))
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
                block.position = position  # the last block must have the position of the source

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._write())

    def spill_soon(self) -> None:
        self._spill_wanted = True
        self._start()

    async def wait_until_idle(self) -> None:
        """Wait until there is nothing to write, or the disk refuses writes."""
        if self._task is not None:
            await self._task

    async def _write(self) -> None:
        """Run one job after the other, each for all blocks that have arrived meanwhile."""
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
            self._backlog.add(self._memory.evict())
        for _, waiter in jobs:
            if not waiter.done():
                waiter.set_result(None)

    def make_room(self) -> None:
        """Shrink the memory layer to its limit."""
        if self._store is None or not self._memory.full:
            return
        if self._options.write_through:
            self._backlog.add(self._memory.evict())
        else:
            self.spill_soon()

    async def spill(self) -> bool:
        """Write all blocks that are in memory only. Return False if the disk refuses."""
        if self._store is None:
            return True
        async with self._store.writing:
            return await self._spill(self._store)

    async def _spill(self, store: Store) -> bool:
        """Write all blocks that are in memory only, including leased ones with their present body.

        A part is compressed while the previous part is written.
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
                    self._backlog.add(self._memory.written(part, copies))
        except StorageError as error:
            store.failed(error)
            return False
        finally:
            compressing.cancel()
        self._books.count("fastqueue_inmemory_flushes")
        return True

    @staticmethod
    def _parts(blocks: Iterable[Block]) -> list[list[Block]]:
        """Cut the blocks into the parts that a spill writes one after the other."""
        parts: list[list[Block]] = []
        size = MAX_SPILL_BYTES
        for block in blocks:
            if size >= MAX_SPILL_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(block)
            size += block.size
        return parts

    async def _compressed(self, store: Store, part: list[Block]) -> tuple[list[Block], list[Block]]:
        """Return the blocks of `part` that are still open, and compressed copies of them."""
        part = [block for block in part if block.sequence in self._memory.unwritten]
        copies = [replace(block) for block in part]
        await store.compress(copies)
        return part, copies
