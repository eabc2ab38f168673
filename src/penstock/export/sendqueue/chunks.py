"""The disk half of a send queue: an endless byte stream of blocks, cut into chunk files.

A chunk is named after the place of its first byte in the stream, in 16 hex digits. The writer
appends to the last chunk through its own handle; readers have theirs (see `blocks`). A chunk is
deleted when all its blocks are completed.

A start reads little, even if the queue is long: the first block of each chunk. Only the last chunk
is scanned to find its end, from the last good place in the metadata.

Data that is written but not synced is also kept in memory (unless the policy is `never`). After a
failed fsync, its pages may be lost although a retry would succeed. So the chunk is closed at its
last synced byte, and the rest is written to a new chunk, at the same places of the stream.

All methods block and are called in a pool: one writer and one reader at a time, which may run
concurrently.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import StorageError, StorageFailed
from penstock.export.payload import NONE
from penstock.export.sendqueue.blocks import (
    HEADER_SIZE,
    NO_POSITION,
    READ_BYTES,
    Block,
    BlockFile,
    ChunkReader,
    chunk_files,
    decode_block,
    encode_header,
)
from penstock.io.fs import Bytes, File, Fs

log = logging.getLogger("penstock.export")
MAX_QUARANTINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """The options of a send queue's memory and chunks."""

    max_bytes: int = 1 << 30
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

    @property
    def syncs(self) -> bool:
        """Return whether data is ever synced while the queue runs."""
        return self.fsync != "never"


@dataclass(slots=True)
class Reading:
    """The result of a read: blocks in order, and the byte ranges without any."""

    blocks: list[Block]
    bad: list[tuple[int, int]]
    next_sequence: int  # blocks below it that are missing here are not on disk


@dataclass(slots=True)
class StreamEnd:
    """The end of the stream: first according to the metadata, then according to the chunks."""

    offset: int
    next_sequence: int
    through: int  # records accepted
    position: int = -1  # the last one of the source on disk
    cut: int = 0  # bytes of a torn tail


class Chunks:
    def __init__(
        self,
        fs: Fs,
        directory: Path,
        options: ChunkOptions,
        count: Callable[..., None],
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._options = options
        self._keep_unsynced = options.syncs
        self._count = count  # increments the metric of a name
        self.chunks: list[BlockFile] = []
        self._file: File | None = None  # the writer's handle on the last chunk
        self._synced = 0  # bytes of the last chunk that are durable
        self._unsynced: list[Bytes] = []
        self._broken = False  # the last chunk accepts no more: the next write starts a new one
        self._new_names = False  # a chunk was created and its directory not synced yet
        self._reader = ChunkReader(fs)
        self._cursor = (0, 0)  # (sequence, place) where the last read stopped

    @property
    def disk_bytes(self) -> int:
        return sum(chunk.size for chunk in self.chunks)

    @property
    def unsynced_bytes(self) -> int:
        return self.chunks[-1].size - self._synced if self.chunks else 0

    @property
    def end(self) -> int:
        return self.chunks[-1].end if self.chunks else 0

    # Writing

    def append(self, blocks: list[Block], at_least: int = 0) -> None:
        """Write the blocks, all or none. `at_least`: where an empty stream continues."""
        chunks_before = len(self.chunks)
        last = self.chunks[-1] if self.chunks else None
        state = (last.size, last.stop) if last else None
        kept = len(self._unsynced)
        try:
            self._append(blocks, at_least)
            self._reader.readable = self.end
        except StorageError:
            for chunk in self.chunks[chunks_before:]:
                self._remove_quietly(chunk)
            rotated = len(self.chunks) > chunks_before
            del self.chunks[chunks_before:]
            if last is not None and state is not None:
                last.size, last.stop = state[0], state[1]
                last.index = [entry for entry in last.index if entry[1] < last.end]
            if rotated or last is None:
                self._close_writer()  # the rotation has synced `last`
                self._unsynced, self._broken = [], True
            else:
                del self._unsynced[kept:]
                self._cut(last)
            for block in blocks:
                block.offset = -1
            raise

    def _append(self, blocks: list[Block], at_least: int) -> None:
        parts: list[Bytes] = []
        waiting = 0
        chunk = self.chunks[-1] if self.chunks else None
        for block in blocks:
            size = HEADER_SIZE + len(block.body)
            full = chunk is not None and chunk.size and chunk.size + size > self._options.chunk_size
            if chunk is None or self._broken or full:
                self._write(parts)
                parts, waiting = [], 0
                chunk = self._rotate(block.sequence, at_least)
            block.offset = chunk.start + chunk.size
            if not waiting:
                chunk.append_mark(block.sequence, block.offset)
            parts.append(encode_header(block))
            parts.append(block.body)
            waiting += size
            chunk.size += size
            chunk.stop = block.sequence + 1
            if waiting >= self._options.write_buffer_size:
                self._write(parts)
                parts, waiting = [], 0
        self._write(parts)

    def _write(self, parts: list[Bytes]) -> None:
        if not parts:
            return
        if self._file is None:
            self._file = self._fs.open(self.chunks[-1].path)
        self._file.append(parts)
        if self._keep_unsynced:
            self._unsynced += parts

    def _cut(self, chunk: BlockFile) -> None:
        """Truncate the file to the chunk's size. If that fails, the chunk accepts no more data."""
        self._synced = min(self._synced, chunk.size)
        try:
            if self._file is None:
                self._file = self._fs.open(chunk.path)
            if self._file.size > chunk.size:
                self._file.truncate(chunk.size)
        except StorageError as error:
            log.warning("chunk %s is closed early: %s", chunk.path.name, error)
            self._broken = True

    def _rotate(self, sequence: int, at_least: int) -> BlockFile:
        if self.chunks:
            if self._keep_unsynced:
                self.sync()
            elif self._file is not None:
                try:
                    self._file.sync()
                except StorageError as error:
                    self._count("fastqueue_fsync_failed_total")
                    log.error("chunk %s could not be synced: %s", self.chunks[-1].path.name, error)
        self._close_writer()
        start = max(self.end, at_least)
        if self.chunks and self.chunks[-1].size == 0:
            start = max(start, self.chunks[-1].start + 1)  # an empty broken chunk keeps its name
        path = self._directory / f"{start:016x}"
        self._fs.remove(path)
        self._file = self._fs.open(path, create=True)
        self._synced, self._unsynced, self._broken, self._new_names = 0, [], False, True
        chunk = BlockFile(start, path, 0, sequence, sequence)
        self.chunks.append(chunk)
        self._count("fastqueue_chunk_rotations")
        return chunk

    def sync(self) -> None:
        """Make all appended data durable. After a failed fsync, write it again to a new chunk. If
        that fails too, raise; the next call tries it again.
        """
        if not self.chunks:
            return
        if self._file is not None and not self._broken:
            try:
                if self.chunks[-1].size > self._synced:
                    self._file.sync()
                if self._new_names:
                    self._fs.sync_dir(self._directory)
                    self._new_names = False
                self._synced, self._unsynced = self.chunks[-1].size, []
                return
            except StorageError as error:
                self._count("fastqueue_fsync_failed_total")
                name = self.chunks[-1].path.name
                log.error(
                    "chunk %s could not be synced, its tail is written again: %s", name, error
                )
                self._broken = True
        if self._keep_unsynced and self._unsynced:
            self._rewrite_tail()

    def _rewrite_tail(self) -> None:
        """Write the unsynced tail of the last chunk to a new chunk, at the same places."""
        old, parts = self.chunks[-1], self._unsynced
        start = old.start + self._synced
        path = self._directory / (f"{start:016x}" if self._synced else f"{start:016x}.again")
        self._fs.remove(path)
        file = self._fs.open(path, create=True)
        try:
            file.append(parts)
            file.sync()
            if not self._synced:
                self._fs.rename(path, self._directory / f"{start:016x}")
                path = self._directory / f"{start:016x}"
            self._fs.sync_dir(self._directory)
        except StorageError:
            file.close()
            raise
        self._close_writer()
        first = decode_block(bytes(parts[0]) + bytes(parts[1]), 0, start)
        new = BlockFile(start, path, old.end - start, first.sequence, old.stop)
        if self._synced:
            old.size, old.stop = self._synced, first.sequence
            old.index = [entry for entry in old.index if entry[1] < start]
            self.chunks.append(new)
        else:
            self.chunks[-1] = new
        self._file, self._synced, self._unsynced = file, new.size, []
        self._broken = self._new_names = False

    def _close_writer(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _remove_quietly(self, chunk: BlockFile) -> None:
        self._close_writer()
        try:
            self._fs.remove(chunk.path)
        except (OSError, StorageError) as error:
            log.warning("chunk %s stays although it is not needed: %s", chunk.path.name, error)

    # Reading

    def read(
        self, sequence: int, stop: int, max_bytes: int = READ_BYTES, max_blocks: int = 256
    ) -> Reading:
        """Return whole blocks from `sequence` (or the first after it) to below `stop`, from one
        chunk.

        `next_sequence` is how far it read: blocks missing below it are not on disk.
        """
        chunk = self._chunk_of(sequence)
        if chunk is None or chunk.base >= stop:
            return Reading([], [], stop)
        place = self._place(chunk, sequence)
        reading = Reading([], [], min(stop, chunk.stop))
        taken = 0
        for block in self._reader.walk(chunk, place, reading.bad):
            if block.sequence >= stop:
                break
            if block.sequence < sequence:
                continue
            reading.blocks.append(block)
            taken += block.size
            if taken >= max_bytes or len(reading.blocks) >= max_blocks:
                reading.next_sequence = block.sequence + 1
                break
        if reading.blocks:
            last = reading.blocks[-1]
            chunk.mark(last.sequence, last.offset)
            self._cursor = (last.sequence + 1, last.offset + last.size)
        return reading

    def peek(self, sequence: int) -> Block | None:
        """Return the block `sequence`. The next read starts there, without a search."""
        chunk = self._chunk_of(sequence)
        if chunk is None:
            return None
        place = self._place(chunk, sequence)
        block = self._reader.block_at(chunk, place)
        if block is None or block.sequence != sequence:
            return None
        self._cursor = (sequence, place)
        return block

    def hint(self, place: int) -> None:
        """Remember the block at `place`, if there is one, so that reads near it need not search."""
        chunk = next((chunk for chunk in self.chunks if chunk.start <= place < chunk.end), None)
        try:
            block = self._reader.block_at(chunk, place) if chunk is not None else None
        except (StorageFailed, OSError):
            return  # a real read gets the error again
        if chunk is not None and block is not None:
            chunk.mark(block.sequence, place)
            self._cursor = (block.sequence, place)

    def _chunk_of(self, sequence: int) -> BlockFile | None:
        """Return the chunk with the block `sequence`, else the first one behind it."""
        chunks = self.chunks
        at = bisect_right(chunks, sequence, key=lambda chunk: chunk.base) - 1
        if at >= 0 and sequence < chunks[at].stop:
            return chunks[at]
        return chunks[at + 1] if at + 1 < len(chunks) else None

    def _place(self, chunk: BlockFile, sequence: int) -> int:
        if self._cursor[0] == sequence and chunk.start <= self._cursor[1] <= chunk.end:
            return self._cursor[1]
        if sequence <= chunk.base:
            return chunk.start
        return self._reader.seek(chunk, sequence)

    def quarantine(self, start: int, end: int) -> None:
        """Copy damaged bytes, at most MAX_QUARANTINE_BYTES, to `quarantine/`."""
        chunk = next(chunk for chunk in self.chunks if chunk.start <= start < chunk.end)
        data = self._reader.read_at(chunk, start, min(end - start, MAX_QUARANTINE_BYTES))
        directory = self._directory / "quarantine"
        try:
            self._fs.make_dir(directory)
            self._fs.replace(directory / f"{start:016x}-{end - start}", data, sync=False)
        except StorageError as error:
            place = f"{start} to {end} of {chunk.path.name}"
            log.warning("no copy of the damaged bytes %s: %s", place, error)

    # Opening and removing

    def open(self, end: StreamEnd) -> None:
        """Find the chunks, cut a torn tail, and correct `end`, which comes from the metadata."""
        self.chunks = list(chunk_files(self._fs, self._directory))
        for chunk in self.chunks:
            first = self._reader.block_at(chunk, chunk.start) or next(
                self._reader.walk(chunk, chunk.start, []), None
            )
            chunk.base = first.sequence if first else 0
        self._find_end(end)
        self._synced = self.chunks[-1].size if self.chunks else 0
        self._reader.readable = self.end

    def _find_end(self, end: StreamEnd) -> None:
        while self.chunks:
            self._open_last(end, end.offset)
            if self.chunks[-1].size:
                break
            self._remove_quietly(self.chunks.pop())  # it has no whole block
        upper = end.next_sequence
        for chunk in reversed(self.chunks):
            chunk.stop = upper if chunk.stop == 0 else chunk.stop
            chunk.base = chunk.base or chunk.stop  # nothing readable in it
            upper = chunk.base

    def _open_last(self, end: StreamEnd, hint: int) -> None:
        """Scan the last chunk, from the `hint` on if a block may end there."""
        chunk = self.chunks[-1]
        end.position = -1
        trusted = chunk.start < hint <= chunk.end and chunk.base > 0
        start = hint if trusted else chunk.start
        place, last = self._reader.pass_over(chunk, start)
        block = self._reader.block_at(chunk, last) if last >= 0 else None
        if block is not None:
            end.next_sequence, end.through = block.sequence + 1, block.through
            end.position = block.position if block.position != NO_POSITION else -1
        bad: list[tuple[int, int]] = []
        for block in self._reader.walk(chunk, place, bad):  # behind the first damage
            if block.position != NO_POSITION:
                break  # the source still has these records: read them again from there
            end.next_sequence, end.through = block.sequence + 1, block.through
            place = block.offset + block.size
        if trusted and place == start and bad:
            self._open_last(end, 0)  # the hint is inside a block
            return
        if place < chunk.end:
            torn = chunk.end - place
            end.cut += torn
            log.warning("chunk %s: a torn tail of %d bytes is cut off", chunk.path.name, torn)
            self.quarantine(place, chunk.end)
            chunk.size = place - chunk.start
            self._cut(chunk)
        chunk.base = chunk.base or end.next_sequence
        chunk.stop = end.next_sequence

    def place_before(self, sequence: int) -> int | None:
        """Return where a block at or before `sequence` begins, without reading. None: no chunk has
        one.
        """
        if self._cursor[0] == sequence:
            return self._cursor[1]
        chunk = self._chunk_of(sequence)
        return None if chunk is None else chunk.near(sequence)

    def remove(self, chunk: BlockFile) -> None:
        """Delete a chunk whose blocks are all completed. The last chunk must be the only one."""
        self._reader.close()
        if len(self.chunks) == 1:
            self._close_writer()
            self._unsynced, self._synced, self._broken = [], 0, False
        self._fs.remove(chunk.path)
        self.chunks.remove(chunk)

    def close(self) -> None:
        self._close_writer()
        self._reader.close()
