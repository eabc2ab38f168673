"""A block: one batch of records in a send queue, in memory or in a chunk file.

On disk a block is framed as in metrics-governor (an 8-byte head: length, bit 63 = snappy). Our own
fields come first inside the frame, then the body. All numbers are little-endian.

    offset size
    0      8    bits 0-61: length of everything after this field; bit 63: the body is snappy
    8      4    magic "PSB1": lets a reader find the next block after a damaged one
    12     4    CRC32C of bytes 16 to the end of the block; its initial value is the block's place
                in the stream modulo 2^32
    16     1    encoding of the body (see `payload`): 0 frames, 1 ndjson, 2 json, 3 raw
    17     1    compression of the body: 0 none, 1 snappy (raw format), 2 zstd, 3 gzip
    18     2    0
    20     8    sequence number, from 1, never used twice in a queue
    28     8    enqueue time, microseconds since 1970
    36     8    records accepted by this queue before this block
    44     8    position in the source after this block; 2^64-1 = none
    52     4    records in the body
    56     4    attempts made before it was written (later ones are in the journal)
    60     4    length of the body when decompressed
    64          body

The field "records accepted before" keeps the accounting exact if blocks are destroyed: the next
good block shows how many records they had. The place in the checksum makes a block valid only where
it was written, so a record that contains a piece of a chunk file is never mistaken for a block.

A `ChunkReader` opens its own file handles and passes every position explicitly, so it shares none
with the writer. It never reads past `readable`, where the writer may be writing. It reads blocks in
order (`walk`), reads one block (`block_at`), or skips blocks without decoding them (`pass_over`),
so that millions of blocks can be scanned at the start. It skips bytes that are not a block, and
reports them to the caller.
"""

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import crc32c
import msgspec

from penstock.errors import Damaged
from penstock.io.fs import File, Fs

HEAD = struct.Struct("<Q4sI")
FIELDS = struct.Struct("<BBHQQQQIII")
HEADER_SIZE = HEAD.size + FIELDS.size  # 64
MAGIC = b"PSB1"
_SCAN = struct.Struct("<Q4sI4xQ")  # the head and the sequence number
_PLACE = (1 << 32) - 1
NO_POSITION = (1 << 64) - 1
NO_SEQUENCE = 1 << 64
LENGTH_MASK = (1 << 62) - 1
SNAPPY_BIT = 1 << 63
SNAPPY = 1
READ_BYTES = 1 << 20  # read at a time
STREAM_END = 1 << 62  # greater than every place
INDEX_STEP_BYTES = 256 << 10  # between two entries of a chunk's index, at least
_CHUNK_NAME = re.compile("[0-9a-f]{16}")
_body, _records = attrgetter("body"), attrgetter("records")


class Block(msgspec.Struct, gc=False):
    """A batch of records. `offset` is its place in the queue's endless byte stream, or -1 if the
    block is only in memory.

    A queue has many blocks, so they are C structs. The garbage collector does not track them: they
    refer only to bytes and numbers.
    """

    body: bytes
    records: int
    encoding: int = 3
    compression: int = 0
    raw_length: int = 0
    position: int = NO_POSITION
    sequence: int = 0
    enqueued: int = 0
    before: int = 0
    attempts: int = 0
    offset: int = -1
    # Ranges of records still to be sent, last range first; None = all, in one range.
    remaining: list[tuple[int, int]] | None = None
    dead: int = 0  # records of this block already in the dead letters

    @property
    def size(self) -> int:
        return HEADER_SIZE + len(self.body)

    @property
    def through(self) -> int:
        return self.before + self.records


def bytes_of(blocks: Sequence[Block]) -> int:
    """Return the size of the blocks, headers included."""
    return HEADER_SIZE * len(blocks) + sum(map(len, map(_body, blocks)))


def records_of(blocks: Sequence[Block]) -> int:
    return sum(map(_records, blocks))


def encode_header(block: Block) -> bytes:
    """Return the 64-byte header of a block at its `offset`."""
    fields = FIELDS.pack(
        block.encoding,
        block.compression,
        0,
        block.sequence,
        block.enqueued,
        block.before,
        block.position,
        block.records,
        block.attempts,
        block.raw_length,
    )
    length = HEADER_SIZE - 8 + len(block.body)
    if block.compression == SNAPPY:
        length |= SNAPPY_BIT
    checksum = crc32c.crc32c(block.body, crc32c.crc32c(fields, block.offset & _PLACE))
    return HEAD.pack(length, MAGIC, checksum) + fields


def block_length(data: bytes | memoryview, at: int) -> int:
    """Return the total length of the block at `at`. Raise Damaged if the header is invalid."""
    if len(data) - at < HEADER_SIZE:
        raise Damaged("no whole block header")
    length, magic, _ = HEAD.unpack_from(data, at)
    length &= LENGTH_MASK
    if magic != MAGIC or length < HEADER_SIZE - 8:
        raise Damaged("no block header")
    return int(length) + 8


def decode_block(data: bytes, at: int, offset: int, *, with_body: bool = True) -> Block:
    """Decode and verify the block at `at` in `data`, which is at `offset` in the stream."""
    length = block_length(data, at)
    _, _, checksum = HEAD.unpack_from(data, at)
    view = memoryview(data)
    if (
        len(data) - at < length
        or crc32c.crc32c(view[at + HEAD.size : at + length], offset & _PLACE) != checksum
    ):
        raise Damaged("the checksum does not match")
    encoding, compression, _, sequence, enqueued, before, position, records, attempts, raw = (
        FIELDS.unpack_from(data, at + HEAD.size)
    )
    body = data[at + HEADER_SIZE : at + length] if with_body else b""
    source = encoding, compression, raw, position
    return Block(body, records, *source, sequence, enqueued, before, attempts, offset)


def pass_blocks(data: bytes, place: int, below: int = NO_SEQUENCE) -> tuple[int, int, int]:
    """Pass undamaged blocks below the sequence number `below` quickly, without decoding them.

    `data` begins at `place` of the stream. Returns where it stopped, and the sequence number and
    start of the last block that it skipped (-1, -1 if there was none).
    """
    view, size = memoryview(data), len(data)
    checksum_of, unpack = crc32c.crc32c, _SCAN.unpack_from
    at, last, last_at = 0, -1, -1
    while at + HEADER_SIZE <= size:
        length, magic, checksum, sequence = unpack(data, at)
        stop = at + (length & LENGTH_MASK) + 8
        if (
            magic != MAGIC
            or not at + HEADER_SIZE <= stop <= size
            or sequence >= below
            or checksum_of(view[at + 16 : stop], at + place & _PLACE) != checksum
        ):
            break
        last, last_at, at = sequence, at, stop
    return at, last, last_at


@dataclass(slots=True)
class BlockFile:
    start: int  # place of the first byte in the stream
    path: Path
    size: int  # valid bytes; after a failed fsync, the file may be longer
    base: int  # lowest sequence number in it
    stop: int  # sequence number after its last block
    index: list[tuple[int, int]] = field(default_factory=list)  # some (sequence, place), in order

    @property
    def end(self) -> int:
        return self.start + self.size

    def append_mark(self, sequence: int, place: int) -> None:
        """Add a place after all others (writer). A reader may call `mark` at the same time."""
        if not self.index or place - self.index[-1][1] >= INDEX_STEP_BYTES:
            self.index.append((sequence, place))

    def mark(self, sequence: int, place: int) -> None:
        """Add the place of a block (reader), unless the index has a place close by."""
        at = bisect_right(self.index, (sequence, place))
        if at == 0 or place - self.index[at - 1][1] >= INDEX_STEP_BYTES:
            self.index.insert(at, (sequence, place))

    def near(self, sequence: int) -> int:
        """Return the place of a block at or before `sequence`."""
        at = bisect_right(self.index, sequence, key=lambda entry: entry[0]) - 1
        return self.index[at][1] if at >= 0 else self.start


def chunk_files(fs: Fs, directory: Path, end: int = STREAM_END) -> Iterator[BlockFile]:
    """Yield the chunks up to the place `end` of the stream, without reading them."""
    starts = [int(name, 16) for name in fs.list_dir(directory) if _CHUNK_NAME.fullmatch(name)]
    for start, following in pairwise([*(start for start in starts if start < end), end]):
        path = directory / f"{start:016x}"
        yield BlockFile(start, path, min(fs.size(path), following - start), 0, 0)


class ChunkReader:
    """Read blocks of chunk files. Not thread-safe."""

    def __init__(self, fs: Fs) -> None:
        self._fs = fs
        self._open: tuple[BlockFile, File] | None = None
        self.readable = STREAM_END  # the stream up to here is written

    def read_at(self, chunk: BlockFile, place: int, length: int) -> bytes:
        if self._open is None or self._open[0] is not chunk:
            self.close()
            self._open = (chunk, self._fs.open(chunk.path, write=False))
        return self._open[1].read_at(place - chunk.start, length)

    def _end(self, chunk: BlockFile) -> int:
        return min(chunk.end, self.readable)

    def walk(
        self, chunk: BlockFile, place: int, bad: list[tuple[int, int]], *, with_body: bool = True
    ) -> Iterator[Block]:
        """Yield blocks from `place` to the chunk's end. `bad` collects the ranges between them."""
        end = self._end(chunk)
        data, data_at = b"", place  # `data` is the stream from `data_at`
        while place < end:
            at = place - data_at
            if len(data) - at < HEADER_SIZE:
                data, data_at, at = (
                    self.read_at(chunk, place, min(READ_BYTES, end - place)),
                    place,
                    0,
                )
            try:
                length = block_length(data, at)
                if length > end - place:
                    raise Damaged("the length exceeds the chunk")
                if len(data) - at < length:
                    size = max(length, min(READ_BYTES, end - place))
                    data, data_at, at = self.read_at(chunk, place, size), place, 0
                block = decode_block(data, at, place, with_body=with_body)
            except Damaged:
                following = self.find_block(chunk, place + 1)
                bad.append((place, following))
                place = following
                continue
            yield block
            place += length

    def block_at(self, chunk: BlockFile, place: int) -> Block | None:
        """Return the block that begins at `place`, if there is one, and read nothing else."""
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

    def pass_over(self, chunk: BlockFile, place: int, below: int = NO_SEQUENCE) -> tuple[int, int]:
        """Skip whole blocks from `place` to the first that is damaged or not below the sequence
        number `below`, and mark places in the chunk's index.

        Returns where it stopped and where the last skipped block begins (-1: none).
        """
        end, last, window = self._end(chunk), -1, READ_BYTES
        while place < end:
            data = self.read_at(chunk, place, min(window, end - place))
            passed, sequence, last_at = pass_blocks(data, place, below)
            if passed:
                last = place + last_at
                chunk.mark(sequence, last)
                place, window = place + passed, READ_BYTES
                continue
            try:  # perhaps a block longer than the window
                window = block_length(data, 0)
            except Damaged:
                break
            if not len(data) < window <= end - place:
                break
        return place, last

    def seek(self, chunk: BlockFile, sequence: int) -> int:
        """Return where the first block not below `sequence` begins, or the end. Skip damage."""
        end = self._end(chunk)
        place, _ = self.pass_over(chunk, chunk.near(sequence), sequence)
        while place < end and self.block_at(chunk, place) is None:
            place, _ = self.pass_over(chunk, self.find_block(chunk, place + 1), sequence)
        return place

    def find_block(self, chunk: BlockFile, place: int) -> int:
        """Return where the next whole block begins, or the chunk's end."""
        end = self._end(chunk)
        while place < end:
            data = self.read_at(chunk, place, min(READ_BYTES, end - place))
            at = data.find(MAGIC)
            while at >= 0:
                candidate = place + at - 8
                if candidate >= place - 8 and self.block_at(chunk, candidate) is not None:
                    return candidate
                at = data.find(MAGIC, at + 1)
            place += max(1, len(data) - len(MAGIC) + 1)
        return end

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None
