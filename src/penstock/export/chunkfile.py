"""One chunk file of a send queue, and the reading of such files.

The reader opens its own handles and names every position, so it never shares one with the writer,
and it never looks behind `readable`, where the writer may be at work. It reads blocks whole
(`walk`), one by its place (`block_at`), or passes over them without making them (`pass_over`),
which is how a start finds its way through millions of blocks. What is no block is stepped over,
byte by byte if need be, and told to whoever asked.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import Damaged
from penstock.export.block import (
    HEADER_SIZE,
    MAGIC,
    NO_SEQUENCE,
    Block,
    block_length,
    decode_block,
    pass_blocks,
)
from penstock.log.fs import File, Fs

WINDOW = 1 << 20
SPARSE = 256 << 10  # bytes between two entries of a chunk's index, at least


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

    def append_mark(self, sequence: int, place: int) -> None:
        """The writer's: a place behind all the others. A reader may be marking at the same time."""
        if not self.index or place - self.index[-1][1] >= SPARSE:
            self.index.append((sequence, place))

    def mark(self, sequence: int, place: int) -> None:
        """The reader's: remember where the block is, unless a place close by is known."""
        at = bisect_right(self.index, (sequence, place))
        if at == 0 or place - self.index[at - 1][1] >= SPARSE:
            self.index.insert(at, (sequence, place))

    def near(self, sequence: int) -> int:
        """A known place of a block at or in front of `sequence`."""
        at = bisect_right(self.index, sequence, key=lambda entry: entry[0]) - 1
        return self.index[at][1] if at >= 0 else self.start


def is_chunk_name(name: str) -> bool:
    return len(name) == 16 and all(letter in "0123456789abcdef" for letter in name)


class ChunkReader:
    """One at a time may use it."""

    def __init__(self, fs: Fs) -> None:
        self._fs = fs
        self._open: tuple[Chunk, File] | None = None
        self.readable = 1 << 62  # the stream up to here is written

    def read_at(self, chunk: Chunk, place: int, length: int) -> bytes:
        """Bytes of the stream, from one chunk."""
        if self._open is None or self._open[0] is not chunk:
            self.close()
            self._open = (chunk, self._fs.open(chunk.path, write=False))
        return self._open[1].read_at(place - chunk.start, length)

    def _end(self, chunk: Chunk) -> int:
        return min(chunk.end, self.readable)

    def walk(
        self, chunk: Chunk, place: int, bad: list[tuple[int, int]], *, with_body: bool = True
    ) -> Iterator[Block]:
        """Blocks from `place` to the chunk's end; `bad` collects the byte ranges that hold none."""
        end = self._end(chunk)
        data, data_at = b"", place  # `data` is the stream from `data_at`
        while place < end:
            at = place - data_at
            if len(data) - at < HEADER_SIZE:
                data, data_at, at = self.read_at(chunk, place, min(WINDOW, end - place)), place, 0
            try:
                length = block_length(data, at) if len(data) - at >= HEADER_SIZE else 0
                if not HEADER_SIZE <= length <= end - place:
                    raise Damaged("the length leads out of the chunk")
                if len(data) - at < length:
                    size = max(length, min(WINDOW, end - place))
                    data, data_at, at = self.read_at(chunk, place, size), place, 0
                block = decode_block(data, at, place, with_body=with_body)
            except Damaged:
                following = self.find_block(chunk, place + 1)
                bad.append((place, following))
                place = following
                continue
            yield block
            place += length

    def block_at(self, chunk: Chunk, place: int) -> Block | None:
        """The block that begins at `place`, if one does. Reads no more than it."""
        end = self._end(chunk)
        if not chunk.start <= place <= end - HEADER_SIZE:
            return None
        try:
            length = block_length(self.read_at(chunk, place, HEADER_SIZE), 0)
            if length > end - place:
                return None
            return decode_block(self.read_at(chunk, place, length), 0, place)
        except Damaged:
            return None

    def pass_over(self, chunk: Chunk, place: int, below: int = NO_SEQUENCE) -> tuple[int, int]:
        """Pass whole blocks from `place` on, up to the first that is damaged or not below the
        sequence number `below`.

        Returns where it stopped and where the last block it passed begins (-1: it passed none).
        Marks places on its way in the chunk's index.
        """
        end, last = self._end(chunk), -1
        while place < end:
            data = self.read_at(chunk, place, min(WINDOW, end - place))
            passed, sequence, last_at = pass_blocks(data, 0, place, below)
            if not passed:
                try:  # perhaps a block longer than the window
                    length = block_length(data, 0) if len(data) >= HEADER_SIZE else 0
                except Damaged:
                    break
                if not len(data) < length <= end - place:
                    break
                data = self.read_at(chunk, place, length)
                passed, sequence, last_at = pass_blocks(data, 0, place, below)
                if not passed:
                    break
            last = place + last_at
            chunk.mark(sequence, last)
            place += passed
        return place, last

    def seek(self, chunk: Chunk, sequence: int) -> int:
        """Where the first block not below `sequence` begins, or the chunk's end; passes over
        damage.
        """
        end = self._end(chunk)
        place, _ = self.pass_over(chunk, chunk.near(sequence), sequence)
        while place < end and self.block_at(chunk, place) is None:
            place, _ = self.pass_over(chunk, self.find_block(chunk, place + 1), sequence)
        return place

    def find_block(self, chunk: Chunk, place: int) -> int:
        """Where the next whole block begins, or the chunk's end."""
        end = self._end(chunk)
        while place < end:
            data = self.read_at(chunk, place, min(WINDOW, end - place))
            at = data.find(MAGIC)
            while at >= 0:
                candidate = place + at - 8
                if candidate >= place - 8 and self.block_at(chunk, candidate) is not None:
                    return candidate
                at = data.find(MAGIC, at + 1)
            place += max(1, len(data) - len(MAGIC) + 1)
        return end

    def close_if(self, chunk: Chunk) -> None:
        """Let go of the file if it is this chunk's."""
        if self._open is not None and self._open[0] is chunk:
            self.close()

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None
