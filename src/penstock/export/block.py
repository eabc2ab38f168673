"""A block: one batch of records as it lies in a send queue, in memory and on disk.

On disk a block is framed as in the seed (an 8-byte head: length, bit 63 = snappy), and what the
seed lacks stands inside it, in front of the body. All numbers are little-endian.

    offset size
    0      8    bits 0-61: length of everything after this field; bit 63: the body is snappy; bit 62: 0
    8      4    magic "PSB1": lets a reader find the next block behind a damaged one
    12     4    CRC32C of bytes 16 to the end of the block, begun with the block's place in the stream modulo 2^32
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

`before` is what keeps the accounting exact when blocks between two good ones are destroyed: their
records can be counted although nobody can read them any more. The place in the checksum makes a
block valid where it was written and nowhere else: a record that is itself a piece of a chunk file
is never taken for one of our blocks.
"""

import struct

import crc32c
import msgspec

from penstock.errors import Damaged

HEAD = struct.Struct("<Q4sI")
FIELDS = struct.Struct("<BBHQQQQIII")
HEADER_SIZE = HEAD.size + FIELDS.size  # 64
MAGIC = b"PSB1"
_SCAN = struct.Struct("<Q4sI4xQ")  # the head, and the sequence number behind it
_PLACE = (1 << 32) - 1
NO_POSITION = (1 << 64) - 1
NO_SEQUENCE = 1 << 64
LENGTH_MASK = (1 << 62) - 1
SNAPPY_BIT = 1 << 63
SNAPPY = 1


class Block(msgspec.Struct, gc=False):
    """`offset` is the place in the queue's endless byte stream; -1 while the block is in memory
    only.

    A struct made in C, and none the garbage collector looks at: a queue holds many, and they refer
    to nothing but bytes and numbers.
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
    todo: list[tuple[int, int]] | None = (
        None  # ranges of records still to be sent, last one first; None = all as one
    )
    dead: int = 0  # records of this block already in the dead letters

    @property
    def size(self) -> int:
        return HEADER_SIZE + len(self.body)

    @property
    def through(self) -> int:
        return self.before + self.records


def encode_header(block: Block) -> bytes:
    """The 64 bytes in front of the body of a block that stands at its `offset`."""
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
    return HEAD.pack(length, MAGIC, _checksum(block, fields)) + fields


def _checksum(block: Block, fields: bytes) -> int:
    return crc32c.crc32c(block.body, crc32c.crc32c(fields, block.offset & _PLACE))


def block_length(data: bytes | memoryview, at: int) -> int:
    """The whole length of the block whose header is at `at`; raises when it cannot be one."""
    length, magic, _ = HEAD.unpack_from(data, at)
    length &= LENGTH_MASK
    if magic != MAGIC or length < HEADER_SIZE - 8:
        raise Damaged("no block header")
    return int(length) + 8


def decode_block(data: bytes, at: int, offset: int, *, with_body: bool = True) -> Block:
    """The block that starts at `at` in `data` and at `offset` in the stream, its checksum verified."""
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
    return Block(
        body,
        records,
        encoding,
        compression,
        raw,
        position,
        sequence,
        enqueued,
        before,
        attempts,
        offset,
    )


def pass_blocks(data: bytes, at: int, place: int, below: int = NO_SEQUENCE) -> tuple[int, int, int]:
    """Pass whole, undamaged blocks below the sequence number `below`, quickly: only looked at, not
    made.

    `at` in `data` is `place` in the stream. Returns where it ended, and sequence number and start
    of the last block it passed (-1, -1 when there was none).
    """
    view, size, shift = memoryview(data), len(data), place - at
    checksum_of, unpack = crc32c.crc32c, _SCAN.unpack_from
    last, last_at = -1, -1
    while at + HEADER_SIZE <= size:
        length, magic, checksum, sequence = unpack(data, at)
        stop = at + (length & LENGTH_MASK) + 8
        if (
            magic != MAGIC
            or not at + HEADER_SIZE <= stop <= size
            or sequence >= below
            or checksum_of(view[at + 16 : stop], at + shift & _PLACE) != checksum
        ):
            break
        last, last_at, at = sequence, at, stop
    return at, last, last_at
