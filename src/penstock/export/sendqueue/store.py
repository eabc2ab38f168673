"""The durable part of a send queue: chunks (accepted blocks), journal (outcomes), metadata (hints).

`fastqueue.meta` is JSON with the fields of metrics-governor and ours: `next_sequence`, `records`
and `position`. With it, the next start scans only what was written to the last chunk since. Every
hint is checked. If the file is missing, old or damaged, the last chunk is scanned whole. Data is
always written before the metadata that describes it.

Blocks are numbered without gaps. A number that is neither completed nor on disk was lost (by
damage, or by a kill before memory was written). It is booked as dropped, with its exact number of
records, because every block and every completed range has the number of records before it.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import StorageError, StorageFull
from penstock.export.payload import NONE, compress
from penstock.export.sendqueue.blocks import NO_POSITION, Block, BlockFile, bytes_of
from penstock.export.sendqueue.chunks import ChunkOptions, Chunks, Reading, StreamEnd
from penstock.export.sendqueue.journal import (
    CRASH,
    DAMAGED,
    REASONS,
    BlockEntry,
    Books,
    EntryKind,
    Journal,
)
from penstock.io.fs import Fs
from penstock.io.lock import DirectoryLock

log = logging.getLogger("penstock.export")
META, VERSION = "fastqueue.meta", 2
MAX_JOURNAL_BYTES = 1 << 20  # a larger journal is restarted
MAX_UNSYNCED_BYTES = 32 << 20  # kept in memory until they are synced
MIN_POOL_BYTES = 64 << 10  # more bytes are compressed outside the writer
MIN_PARALLEL_BYTES = 1 << 20  # more bytes are compressed in several threads
COMPRESSORS = os.cpu_count() or 1
MIN_LAST_CHUNK_BYTES = 1 << 20  # a smaller last chunk is kept for new blocks when completed


class Meta(msgspec.Struct):
    """The hints of `fastqueue.meta`, before any is checked."""

    version: int = 0
    reader_offset: int = 0
    writer_offset: int = 0
    next_sequence: int = 0
    records: int = 0
    position: int = -1


class Store:
    """The files of a queue. Blocking calls run in the pool under `writing` or `reading`. Entries
    are booked on the event loop.
    """

    def __init__(
        self,
        fs: Fs,
        directory: Path,
        pool: Executor,
        options: ChunkOptions,
        books: Books,
        hints: Callable[[], dict[str, int]],
    ) -> None:
        self.books = books
        self._hints = hints  # of the FastQueue, for the metadata
        self.directory = directory
        self.failing: str | None = None  # why the disk refuses writes; None: it does not
        self.writing = asyncio.Lock()
        self.reading = asyncio.Lock()
        self._fs = fs
        self._pool = pool
        self._sync_wanted = options.syncs
        self._compression = options.compression
        self._lock = DirectoryLock(directory, "send queue")
        self._journal = Journal(fs, directory)
        self.chunks = Chunks(fs, directory, options, books.count)
        self._stream_end = 0  # where the stream continues, even after all chunks are deleted
        self._stop = 1  # the next sequence number on disk,
        self._through = 0  # and the records before it
        self._flush_scheduled = True  # until it is open
        self._dirty = False  # the metadata is behind

    @property
    def bytes(self) -> int:
        """Return the real bytes on disk."""
        return self.chunks.disk_bytes + self._journal.size

    # Opening

    async def open(self) -> None:
        self._fs.make_dir(self.directory)
        self._lock.acquire()
        try:
            await self.in_pool(self._recover)
        except BaseException:
            self._lock.release()
            raise
        self.flush()

    def _recover(self) -> None:
        books = self.books
        damaged = books.replay(self._journal.load())
        if damaged:
            text = "%s: %d damaged journal entries; their blocks are delivered again"
            log.warning(text, self.directory, damaged)
            books.count("fastqueue_quarantined_total", damaged)
        meta = self._load_meta()
        end = StreamEnd(meta.writer_offset, meta.next_sequence, meta.records)
        books.advance(end.next_sequence, end.through)
        self.chunks.open(end)
        if end.cut:
            books.count("fastqueue_torn_bytes_total", end.cut)
        books.advance(end.next_sequence, end.through)
        if meta.writer_offset <= self.chunks.end:  # else power loss kept it and lost blocks
            end.position = max(end.position, meta.position)
        books.position = max(books.position, end.position)
        self._stream_end = max(self.chunks.end, meta.writer_offset)
        chunks = self.chunks.chunks
        first = chunks[0].base if chunks else books.next_sequence
        last = chunks[-1].stop if chunks else books.next_sequence
        unreadable = [chunk for chunk in chunks if chunk.base == chunk.stop]
        for chunk in unreadable:
            self.chunks.quarantine(chunk.start, chunk.end)
            books.count("fastqueue_quarantined_total")
        gaps = books.completed.gaps
        before = DAMAGED if unreadable and unreadable[0] is chunks[0] else CRASH
        lost = [(gap, before) for gap in gaps(1, first)]
        lost += [(gap, CRASH) for gap in gaps(last, books.next_sequence)]
        for (start, stop), reason in lost:
            self._lose(start, stop, self.records_before(start), self.records_before(stop), reason)
        self._stop, self._through = books.next_sequence, books.numbered
        self.chunks.hint(meta.reader_offset)
        self._dirty = True

    def open_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of blocks on disk that are still to be delivered, after opening."""
        chunks = self.chunks.chunks
        return self.books.completed.gaps(chunks[0].base, chunks[-1].stop) if chunks else []

    def _load_meta(self) -> Meta:
        """Return the hints; empty if the file is missing, damaged or of another version."""
        try:
            meta = msgspec.json.decode(self._fs.read(self.directory / META), type=Meta)
            if meta.version == VERSION:
                return meta
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            text = "%s: %s is not usable, the chunks are scanned: %s"
            log.warning(text, self.directory, META, error)
        return Meta()

    def records_before(self, sequence: int) -> int:
        """Return the records accepted before a block. The block or its predecessor must be
        completed or on disk, or the block must be the next one.
        """
        if sequence <= 1:
            return 0
        edge = self.books.completed.records_at(sequence)
        if edge is not None:
            return edge
        at, stop = sequence - 1, self.books.next_sequence
        while at < stop:
            reading = self.chunks.read(at, stop, max_blocks=1)
            for block in reading.blocks:
                return block.through if block.sequence < sequence else block.before
            at = reading.next_sequence  # the chunk has no more
        return self.books.numbered

    # Data

    def append(self, blocks: list[Block], *, sync: bool) -> None:
        """Compress, write and perhaps sync blocks. Runs in the pool."""
        compress_blocks(blocks, self._compression)
        self.chunks.append(blocks, self._stream_end)
        if sync or (self._sync_wanted and self.chunks.unsynced_bytes > MAX_UNSYNCED_BYTES):
            self.chunks.sync()

    async def compress(self, blocks: list[Block], min_bytes: int = 1) -> None:
        """Compress blocks, in several threads if it is worth it. Fewer than `min_bytes` are left to
        `append`.
        """
        if self._compression == NONE:
            return
        blocks = [block for block in blocks if not block.raw_length]
        size = bytes_of(blocks)
        if size < min_bytes:
            return
        threads = COMPRESSORS if size > MIN_PARALLEL_BYTES else 1
        shares = [blocks[at::threads] for at in range(threads)]
        await asyncio.gather(
            *(self.in_pool(compress_blocks, share, self._compression) for share in shares if share)
        )

    def appended(self, last: Block) -> None:
        """Record, on the event loop, that all blocks up to `last` are in the chunks."""
        self._stream_end = self.chunks.end
        self._stop, self._through = last.sequence + 1, last.through
        if last.position != NO_POSITION:
            self.books.position = max(self.books.position, last.position)
        self._dirty = True
        self.failing = None

    def check(self, reading: Reading, start: int) -> None:
        """Book blocks that are missing in a read from `start` as lost."""
        for bad_start, bad_end in reading.bad:
            self.chunks.quarantine(bad_start, bad_end)
            self.books.count("fastqueue_quarantined_total")
        expected = start
        before = (
            self.records_before(start)
            if not reading.blocks or reading.blocks[0].sequence != start
            else 0
        )
        for block in reading.blocks:
            if expected < block.sequence:
                self._lose(expected, block.sequence, before, block.before, DAMAGED)
            expected, before = block.sequence + 1, block.through
        if expected < reading.next_sequence:
            following = self.records_before(reading.next_sequence)
            self._lose(expected, reading.next_sequence, before, following, DAMAGED)

    def _lose(self, start: int, stop: int, before: int, through: int, reason: int) -> None:
        records, why = max(0, through - before), REASONS[reason]
        blocks = f"blocks {start} to {stop - 1} ({records} records)"
        log.error("%s: %s are lost: %s", self.directory, blocks, why)
        self.book(BlockEntry(EntryKind.DROPPED, reason, start, through, records, stop - start))
        self.books.count("fastqueue_lost_blocks_total", stop - start)

    def failed(self, error: StorageError) -> None:
        if self.failing is None:
            log.error("%s: the disk refuses writes, trying again: %s", self.directory, error)
        self.failing = str(error)
        if isinstance(error, StorageFull):
            self.books.count("queue_disk_full_total")

    # Books

    def book(self, entry: BlockEntry) -> None:
        """Book an entry. It is in the page cache at the end of this tick of the event loop."""
        if self.books.apply(entry):
            self._journal.add(entry)
            self._dirty = True
            if not self._flush_scheduled:
                self._flush_scheduled = True
                asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Write booked entries to the page cache now."""
        if self._flush_scheduled:
            self._flush_scheduled = False
            try:
                self._journal.flush()
            except StorageError as error:
                self.failed(error)  # the entries stay pending; the next tick writes them

    async def tick(self) -> None:
        """Sync, shorten the journal, remove completed chunks, write metadata; or raise."""
        async with self.writing:
            if self._journal.broken or self._journal.size > MAX_JOURNAL_BYTES:
                await self._journal.restart(self.books.snapshot(), self.in_pool)
            self._journal.flush()
            if self._sync_wanted:
                await self.in_pool(self._sync)
        removed = await self.remove_completed_chunks()
        if self._dirty or removed:
            await self._write_meta()

    async def sync(self) -> None:
        """Make everything that was appended durable. Raises storage errors."""
        async with self.writing:
            if self._sync_wanted:
                await self.in_pool(self._sync)

    def _sync(self) -> None:
        if self.chunks.unsynced_bytes:
            self.chunks.sync()
        self._journal.sync()

    async def _write_meta(self, *, sync: bool = False) -> None:
        self._dirty = False
        data: dict[str, Any] = {
            "name": "fastqueue",
            "version": VERSION,
            "reader_offset": self._stream_end,
            **self._hints(),
            "writer_offset": self._stream_end,
            "next_sequence": self._stop,
            "records": self._through,
            "position": self.books.position,
        }
        text = json.dumps(data, indent=2).encode()
        await self.in_pool(lambda: self._fs.replace(self.directory / META, text, sync=sync))
        self.books.count("fastqueue_meta_sync_total")

    async def remove_completed_chunks(self, *, whole: bool = False) -> int:
        """Delete chunks whose blocks are all completed, oldest first. With `whole`, also a small
        last one. A chunk with an open block does not keep the chunks after it: sending one batch
        may take minutes.
        """
        removed = 0
        while self._removable(whole) is not None:
            async with self.writing, self.reading:
                chunk = self._removable(whole)
                if chunk is None:
                    break  # blocks were appended while this call waited
                # Power loss must not keep these entries and forget their blocks.
                if self._sync_wanted:
                    await self.in_pool(self.chunks.sync)
                for entry in self.books.progress():
                    self._journal.add(entry)
                self._journal.flush()
                await self.in_pool(self._remove, chunk)
                removed += 1
        return removed

    def _removable(self, whole: bool) -> BlockFile | None:
        """Return the oldest chunk that can be deleted; the last one only if it is the only one."""
        chunks = self.chunks.chunks
        for chunk in chunks[:-1] if len(chunks) > 1 else chunks:
            if self.books.completed.covers(chunk.base, chunk.stop):
                least = 0 if len(chunks) > 1 else 1 if whole else MIN_LAST_CHUNK_BYTES
                return chunk if chunk.size >= least else None
        return None

    def _remove(self, chunk: BlockFile) -> None:
        if self._sync_wanted:
            self._journal.sync()  # otherwise its blocks would count as lost after a power failure
        self.chunks.remove(chunk)

    async def close(self) -> None:
        """Sync, and write the metadata. Unlocks in any case."""
        try:
            async with self.writing, self.reading:
                await self.in_pool(self.chunks.sync)
                await self._journal.restart(self.books.snapshot(), self.in_pool)
                await self._write_meta(sync=True)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close files and release the lock without writing, as a kill would."""
        self._flush_scheduled = False
        self.chunks.close()
        self._journal.close()
        self._lock.release()

    async def in_pool(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call in the pool. A cancelled caller still waits for the thread, which relies on the
        caller's lock.
        """
        job = asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            await asyncio.wait([job])
            raise


def compress_blocks(blocks: list[Block], compression: int) -> None:
    """Compress bodies in place, unless they are compressed or would not become smaller."""
    for block in blocks:
        if not block.raw_length and block.compression == NONE:
            block.raw_length = len(block.body)
            if compression != NONE:
                smaller = compress(block.body, compression)
                if len(smaller) < len(block.body):
                    block.body, block.compression = smaller, compression
