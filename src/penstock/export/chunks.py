"""The disk half of a send queue: an endless byte stream of blocks, cut into chunk files.

A chunk is named by the place of its first byte in the stream, in 16 hex digits. The writer appends to the last chunk
through its own handle; readers open their own and name every position, so the two never share one. A chunk goes when
all its blocks are settled.

What is written but not yet synced is also kept in memory (unless the policy is never to sync): when an fsync fails
those pages may be gone although a retry would succeed, so the chunk is closed for good at its last synced byte and the
rest is written again into a new chunk, at the same places of the stream.

The calls here block and are made from a pool: one writer at a time, one reader at a time, beside each other.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import Damaged, StorageFailed, StorageFull
from penstock.export.block import HEADER_SIZE, MAGIC, NO_POSITION, Block, block_length, decode_block, encode_header
from penstock.storage.fs import Bytes, File, Fs

log = logging.getLogger("penstock.export")
WINDOW = 1 << 20
QUARANTINE = 64 << 20
SPARSE = 64  # blocks per entry of a chunk's index


@dataclass(slots=True)
class Chunk:
    start: int  # place of the first byte in the stream
    path: Path
    size: int  # bytes that count; a chunk whose fsync failed may hold more
    base: int  # lowest sequence number in it
    stop: int  # sequence number after its last block
    index: list[tuple[int, int]] = field(default_factory=list)  # some (sequence, place), in order

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(slots=True)
class Reading:
    """What a read found: blocks in order, and the byte ranges that are no blocks."""

    blocks: list[Block]
    bad: list[tuple[int, int]]
    next_sequence: int  # everything below it, from where the read began, was found or is gone


class Chunks:
    def __init__(
        self,
        fs: Fs,
        directory: Path,
        *,
        chunk_size: int,
        write_buffer: int,
        keep_unsynced: bool,
        on_event: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._chunk_size = chunk_size
        self._write_buffer = write_buffer
        self._keep_unsynced = keep_unsynced
        self._on_event = on_event  # "rotation", "fsync_failed"
        self.chunks: list[Chunk] = []
        self._file: File | None = None  # the writer's handle on the last chunk
        self._synced = 0  # bytes of the last chunk that are durable
        self._unsynced: list[Bytes] = []
        self._broken = False  # the last chunk takes no more: the next write starts a new one
        self._new_names = False  # a chunk was created and its directory not synced yet
        self._reader: tuple[Chunk, File] | None = None
        self._readable = 1 << 62  # the stream up to here is written: a reader never looks at what is being written
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
        """Write the blocks, all or none, and set their offsets. `at_least`: where an empty stream goes on."""
        chunks_before = len(self.chunks)
        last = self.chunks[-1] if self.chunks else None
        state = (last.size, last.stop, len(last.index)) if last else None
        kept = len(self._unsynced)
        try:
            self._append(blocks, at_least)
            self._readable = self.end
        except (StorageFull, StorageFailed):
            for chunk in self.chunks[chunks_before:]:
                self._remove_quietly(chunk)
            rotated = len(self.chunks) > chunks_before
            del self.chunks[chunks_before:]
            if last is not None and state is not None:
                last.size, last.stop = state[0], state[1]
                del last.index[state[2] :]
            if rotated or last is None:
                self._close_writer()  # what was in `last` is synced: rotation saw to it
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
        for block in blocks:
            size = HEADER_SIZE + len(block.body)
            chunk = self.chunks[-1] if self.chunks else None
            if chunk is None or self._broken or (chunk.size and chunk.size + size > self._chunk_size):
                self._write(parts)
                parts, waiting = [], 0
                chunk = self._rotate(block.sequence, at_least)
            block.offset = chunk.end
            if not chunk.index or block.sequence - chunk.index[-1][0] >= SPARSE:
                chunk.index.append((block.sequence, block.offset))
            parts.append(encode_header(block))
            parts.append(block.body)
            waiting += size
            chunk.size += size
            chunk.stop = block.sequence + 1
            if waiting >= self._write_buffer:
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

    def _cut(self, chunk: Chunk) -> None:
        """The file ends where the chunk does, or nothing is ever written behind the difference."""
        self._synced = min(self._synced, chunk.size)
        try:
            if self._file is None:
                self._file = self._fs.open(chunk.path)
            if self._file.size > chunk.size:
                self._file.truncate(chunk.size)
        except (StorageFull, StorageFailed) as error:
            log.warning("chunk %s is closed early: %s", chunk.path.name, error)
            self._broken = True

    def _rotate(self, sequence: int, at_least: int) -> Chunk:
        if self.chunks:
            if self._keep_unsynced:
                self.sync()
            elif self._file is not None:
                try:
                    self._file.sync()
                except (StorageFull, StorageFailed) as error:
                    self._on_event("fsync_failed")
                    log.error("chunk %s could not be synced: %s", self.chunks[-1].path.name, error)
        self._close_writer()
        start = max(self.end, at_least)
        if self.chunks and self.chunks[-1].size == 0:
            start = max(start, self.chunks[-1].start + 1)  # an empty broken chunk keeps its name
        path = self._directory / f"{start:016x}"
        self._fs.remove(path)
        self._file = self._fs.open(path, create=True)
        self._synced, self._unsynced, self._broken, self._new_names = 0, [], False, True
        chunk = Chunk(start, path, 0, sequence, sequence)
        self.chunks.append(chunk)
        self._on_event("rotation")
        return chunk

    def sync(self) -> None:
        """Make all that was appended durable. After a failed fsync it is written again elsewhere; raises if that
        fails too, and tries again at the next call."""
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
            except (StorageFull, StorageFailed) as error:
                self._on_event("fsync_failed")
                log.error(
                    "chunk %s could not be synced, its tail is written anew: %s", self.chunks[-1].path.name, error
                )
                self._broken = True
        if self._keep_unsynced and self._unsynced:
            self._write_anew()

    def _write_anew(self) -> None:
        """Put the unsynced tail of the last chunk into a chunk of its own, at the same places of the stream."""
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
        except (StorageFull, StorageFailed):
            file.close()
            raise
        self._close_writer()
        first = decode_block(bytes(parts[0]) + bytes(parts[1]), 0, start)
        new = Chunk(start, path, old.end - start, first.sequence, old.stop)
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

    def _remove_quietly(self, chunk: Chunk) -> None:
        self._close_writer()
        try:
            self._fs.remove(chunk.path)
        except (OSError, StorageFull, StorageFailed) as error:
            log.warning("chunk %s stays although it is not needed: %s", chunk.path.name, error)

    # Reading

    def read(self, sequence: int, stop: int, max_bytes: int = WINDOW, max_blocks: int = 256) -> Reading:
        """Whole blocks from `sequence` (or the first one there is after it) to below `stop`, from one chunk.

        `next_sequence` tells how far the reading got: what is missing below it is not on disk.
        """
        chunk = self._chunk_of(sequence)
        if chunk is None or chunk.base >= stop:
            return Reading([], [], stop)
        place = self._place(chunk, sequence)
        found = Reading([], [], min(stop, chunk.stop))
        taken = 0
        for block in self.walk(chunk, place, found.bad):
            if block.sequence >= stop:
                break
            if block.sequence < sequence:
                continue
            found.blocks.append(block)
            taken += block.size
            if taken >= max_bytes or len(found.blocks) >= max_blocks:
                found.next_sequence = block.sequence + 1
                break
        if found.blocks:
            last = found.blocks[-1]
            self._cursor = (last.sequence + 1, last.offset + last.size)
        return found

    def peek(self, sequence: int) -> Block | None:
        """The block `sequence`, without moving to behind it: the next read starts here and need not look for it."""
        found = self.read(sequence, sequence + 1)
        if not found.blocks:
            return None
        self._cursor = (sequence, found.blocks[0].offset)
        return found.blocks[0]

    def block_at(self, place: int, sequence: int) -> bool:
        """Whether the block with this number stands at this place: makes a hint usable."""
        chunk = self._chunk_of(sequence)
        if chunk is None or not chunk.start <= place < chunk.end:
            return False
        try:
            block = next(self.walk(chunk, place, []), None)
        except (StorageFailed, OSError):
            return False
        if block is None or block.sequence != sequence or block.offset != place:
            return False
        self._cursor = (sequence, place)
        return True

    def _chunk_of(self, sequence: int) -> Chunk | None:
        """The chunk that holds `sequence`, else the first one behind it."""
        chunks = self.chunks
        at = bisect_right(chunks, sequence, key=lambda chunk: chunk.base) - 1
        if at >= 0 and sequence < chunks[at].stop:
            return chunks[at]
        return chunks[at + 1] if at + 1 < len(chunks) else None

    def _place(self, chunk: Chunk, sequence: int) -> int:
        if self._cursor[0] == sequence and chunk.start <= self._cursor[1] <= chunk.end:
            return self._cursor[1]
        if sequence <= chunk.base:
            return chunk.start
        if not chunk.index:
            for block in self.walk(chunk, chunk.start, [], with_body=False):
                if not chunk.index or block.sequence - chunk.index[-1][0] >= SPARSE:
                    chunk.index.append((block.sequence, block.offset))
        at = bisect_right(chunk.index, sequence, key=lambda entry: entry[0]) - 1
        return chunk.index[at][1] if at >= 0 else chunk.start

    def walk(self, chunk: Chunk, place: int, bad: list[tuple[int, int]], *, with_body: bool = True) -> Iterator[Block]:
        """Blocks from `place` to the chunk's end; `bad` collects the byte ranges that hold none."""
        file = self._reader_of(chunk)
        end = min(chunk.end, self._readable)
        data, data_at = b"", place  # `data` is the stream from `data_at`
        while place < end:
            at = place - data_at
            if len(data) - at < HEADER_SIZE:
                data, data_at, at = file.read_at(place - chunk.start, min(WINDOW, end - place)), place, 0
            try:
                length = block_length(data, at) if len(data) - at >= HEADER_SIZE else 0
                if not HEADER_SIZE <= length <= end - place:
                    raise Damaged("the length leads out of the chunk")
                if len(data) - at < length:
                    data, data_at, at = (
                        file.read_at(place - chunk.start, max(length, min(WINDOW, end - place))),
                        place,
                        0,
                    )
                block = decode_block(data, at, place, with_body=with_body)
            except Damaged:
                following = self._find_block(file, chunk, place + 1, end)
                bad.append((place, following))
                place = following
                continue
            yield block
            place += length

    def _find_block(self, file: File, chunk: Chunk, place: int, end: int) -> int:
        """Where the next whole block begins, or the chunk's end."""
        while place < end:
            data = file.read_at(place - chunk.start, WINDOW)
            at = data.find(MAGIC)
            while at >= 0:
                candidate = place + at - 8
                head = file.read_at(candidate - chunk.start, HEADER_SIZE) if candidate >= chunk.start else b""
                try:
                    length = block_length(head, 0) if len(head) == HEADER_SIZE else 0
                    if candidate >= place - 8 and HEADER_SIZE <= length <= end - candidate:
                        decode_block(file.read_at(candidate - chunk.start, length), 0, candidate)
                        return candidate
                except Damaged:
                    pass
                at = data.find(MAGIC, at + 1)
            place += max(1, len(data) - len(MAGIC) + 1)
        return end

    def _reader_of(self, chunk: Chunk) -> File:
        if self._reader is None or self._reader[0] is not chunk:
            self._drop_reader()
            self._reader = (chunk, self._fs.open(chunk.path, write=False))
        return self._reader[1]

    def _drop_reader(self) -> None:
        if self._reader is not None:
            self._reader[1].close()
            self._reader = None

    def quarantine(self, start: int, end: int) -> None:
        """Keep a copy of damaged bytes (at most QUARANTINE of them) where a person can look at them."""
        chunk = next(chunk for chunk in self.chunks if chunk.start <= start < chunk.end)
        data = self._reader_of(chunk).read_at(start - chunk.start, min(end - start, QUARANTINE))
        directory = self._directory / "quarantine"
        try:
            self._fs.make_dir(directory)
            self._fs.replace(directory / f"{start:016x}-{end - start}", data, sync=False)
        except (StorageFull, StorageFailed) as error:
            log.warning("no copy of the damaged bytes %d to %d of %s: %s", start, end, chunk.path.name, error)

    # Opening and removing

    def open(self, writer_offset: int, next_sequence: int, through: int, *, clean: bool) -> tuple[int, int, int, int]:
        """Find the chunks, cut a torn tail. The hints come from the metadata and are not trusted further than they fit.

        Returns the next sequence number, the records accepted, the last source position on disk (or -1), bytes cut.
        """
        names = [name for name in self._fs.list_dir(self._directory) if is_chunk_name(name)]
        for name in names:
            path = self._directory / name
            self.chunks.append(Chunk(int(name, 16), path, self._fs.size(path), 0, 0))
        for chunk, following in zip(self.chunks, self.chunks[1:], strict=False):
            chunk.size = min(chunk.size, following.start - chunk.start)
        for chunk in self.chunks[:-1]:
            first = next(self.walk(chunk, chunk.start, []), None)
            chunk.base = first.sequence if first else 0
        position, cut = -1, 0
        while self.chunks:
            next_sequence, through, position, torn = self._open_last(writer_offset, next_sequence, through, clean)
            cut += torn
            if self.chunks[-1].size:
                break
            self._remove_quietly(self.chunks.pop())  # no whole block in it: the one before it was the last
        upper = next_sequence
        for chunk in reversed(self.chunks):
            chunk.stop = upper if chunk.stop == 0 else chunk.stop
            chunk.base = chunk.base or chunk.stop  # nothing readable in it
            upper = chunk.base
        self._synced = self.chunks[-1].size if self.chunks else 0
        self._readable = self.end
        return next_sequence, through, position, cut

    def _open_last(
        self, writer_offset: int, next_sequence: int, through: int, clean: bool
    ) -> tuple[int, int, int, int]:
        chunk = self.chunks[-1]
        position, cut = -1, 0
        first = next(self.walk(chunk, chunk.start, []), None)
        trusted = chunk.start < writer_offset <= chunk.end and first is not None
        place = writer_offset if trusted else chunk.start
        if clean and trusted and writer_offset == chunk.end:
            chunk.base, chunk.stop = first.sequence if first else next_sequence, next_sequence
            return next_sequence, through, position, 0
        end = place
        bad: list[tuple[int, int]] = []
        for block in self.walk(chunk, place, bad):
            if block.position != NO_POSITION:
                if bad:
                    break  # the source has what is missing and what follows: read it again from there
                position = max(position, block.position)
            next_sequence, through = block.sequence + 1, block.through
            end = block.offset + block.size
        if trusted and end == place and bad:
            return self._open_last(0, next_sequence, through, False)  # the hint points into the middle of a block
        if end < chunk.end:
            cut = chunk.end - end
            log.warning("chunk %s: a torn tail of %d bytes is cut off", chunk.path.name, cut)
            self.quarantine(end, chunk.end)
            chunk.size = end - chunk.start
            self._cut(chunk)
        chunk.base = first.sequence if first else next_sequence
        chunk.stop = next_sequence
        return next_sequence, through, position, cut

    def cursor_of(self, sequence: int) -> int:
        """The place of the block `sequence` if it is where the last read stopped, else 0."""
        return self._cursor[1] if self._cursor[0] == sequence else 0

    def last_position(self) -> int:
        """The source position of the last block on disk, or -1."""
        if not self.chunks:
            return -1
        chunk = self.chunks[-1]
        found = self.read(max(chunk.base, chunk.stop - 1), chunk.stop)
        return found.blocks[-1].position if found.blocks and found.blocks[-1].position != NO_POSITION else -1

    def remove_first(self) -> Chunk:
        """Delete the oldest chunk; the caller knows that all its blocks are settled, durably."""
        chunk = self.chunks[0]
        if self._reader is not None and self._reader[0] is chunk:
            self._drop_reader()
        if len(self.chunks) == 1:
            self._close_writer()
            self._unsynced, self._synced, self._broken = [], 0, False
        self._fs.remove(chunk.path)
        self.chunks.pop(0)
        return chunk

    def close(self) -> None:
        self._close_writer()
        self._drop_reader()


def is_chunk_name(name: str) -> bool:
    return len(name) == 16 and all(letter in "0123456789abcdef" for letter in name)
