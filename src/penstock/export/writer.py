"""How blocks get into a send queue: numbered, put into memory, written to the chunks, one job after
the other.

Write-through: pushes compress side by side, then wait in line; one job writes, and perhaps syncs,
everything that came in while the last one was at work. Otherwise blocks go to memory at once, and a
spill writes all of it out when there is too much; pushes that are faster than the disk wait for a
spill to end, and the next one begins at once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.errors import Unavailable
from penstock.export.backlog import Backlog
from penstock.export.block import NO_POSITION, Block
from penstock.export.clock import Clock
from penstock.export.journal import STORAGE_ERRORS
from penstock.export.memory import MemoryLayer, bytes_of
from penstock.export.payload import NONE
from penstock.export.state import State
from penstock.export.store import Store

COALESCE = 32 << 20  # most bytes that one job takes
SPILL = 4096  # most blocks that one spill job takes


@dataclass(frozen=True, slots=True)
class Options:
    """Of a send queue's two layers."""

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


class Writer:
    """`store` None: everything stays in memory."""

    def __init__(
        self,
        options: Options,
        memory: MemoryLayer,
        backlog: Backlog,
        store: Store | None,
        clock: Clock,
        state: Callable[[], State],
        on_accepted: Callable[[int], None],
        on_event: Callable[[str, int], None],
    ) -> None:
        self._options, self._memory, self._backlog, self._store = options, memory, backlog, store
        self._clock, self._state, self._on_accepted, self._on_event = (
            clock,
            state,
            on_accepted,
            on_event,
        )
        self._pending: list[tuple[list[Block], asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self._spill_wanted = False
        self._spilled = asyncio.Event()  # set, and replaced, when a spill has ended
        self.closed = False

    async def put(self, blocks: list[Block]) -> None:
        """Take the blocks in, as durable as the policy says, or raise and have taken none of them."""
        if self._store is None or not self._options.write_through:
            self._put_in_memory(blocks)
            if (
                len(self._memory) > 2 * self._memory.limit
                and self._task is not None
                and not self._task.done()
            ):
                self._spill_wanted = (
                    True  # the disk is slower than the pushes: it goes on at once, they wait for it
                )
                await self._spilled.wait()
            return
        await self._store.compress(
            blocks
        )  # not the writer's work: pushes compress side by side while it writes
        if self.closed:
            raise Unavailable("the send queue is closed")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((blocks, waiter))
        self._kick()
        await waiter

    def _put_in_memory(self, blocks: list[Block]) -> None:
        if self.closed:
            raise Unavailable("the send queue is closed")
        self._number(blocks)
        self._memory.add(blocks, written=False)
        self._accepted(blocks)
        if self._store is not None:
            # what a kill loses is counted, and its numbers are not used again
            self._store.accepted()
            if self._memory.full:
                self.spill_soon()

    def _number(self, blocks: list[Block]) -> None:
        now, state = int(self._clock.steady() * 1e6), self._state()
        before, position = state.numbered, state.position
        for sequence, block in enumerate(blocks, state.next_sequence):
            block.sequence, block.before, block.enqueued = sequence, before, now
            before += block.records
            if block.position != NO_POSITION:
                position = block.position
            elif position >= 0:
                block.position = (
                    position  # the last block on disk always tells how far the source was read
                )

    def _accepted(self, blocks: list[Block]) -> None:
        self._on_accepted(len(blocks))
        self._state().advance(blocks[-1].sequence + 1, blocks[-1].through)

    def _kick(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._write())

    def spill_soon(self) -> None:
        self._spill_wanted = True
        self._kick()

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
            if size > COALESCE:
                break
        jobs, self._pending = self._pending[:taken], self._pending[taken:]
        blocks = [block for batch, _ in jobs for block in batch]
        self._number(blocks)
        try:
            await store.in_pool(lambda: store.append(blocks, sync=self._options.fsync == "always"))
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
        self._memory.add(blocks, written=True)
        self._accepted(blocks)
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
        """Leased blocks too. The blocks themselves stay untouched: a worker may be sending one of
        them.
        """
        if not self._memory.unwritten:
            return True
        blocks = list(self._memory.unwritten.values())
        at = 0
        try:
            while at < len(blocks):
                until, size = at, 0
                while until < len(blocks) and until - at < SPILL and size < COALESCE:
                    size += blocks[until].size
                    until += 1
                part = [
                    block for block in blocks[at:until] if block.sequence in self._memory.unwritten
                ]
                at = until
                if part:
                    copies = [replace(block) for block in part]
                    await store.compress(copies)
                    await store.in_pool(lambda copies=copies: store.append(copies, sync=False))
                    store.appended(copies[-1])
                    self._backlog.unread_back()
                    for block in self._memory.written(part, copies):
                        self._backlog.add(block)
        except STORAGE_ERRORS as error:
            store.failed(error)
            return False
        self._on_event("flush", 1)
        return True
