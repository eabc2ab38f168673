"""Encode and decode Kafka's record batch, version 2, which is also the format of data files of
topics with `format: kafka`. All integers are big-endian.

     0  base offset i64                   assigned by a broker; not covered by the checksum
     8  length i32                        of everything that follows
    12  leader epoch i32                  in our files: 0 = this batch begins a commit, 1 = it
                                          belongs to the commit of the previous batch
    16  magic i8                          2
    17  CRC32C u32                        of everything from `attributes` on
    21  attributes i16                    bits 0-2 codec (0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd),
                                          bit 3 log append time, bit 4 transactional, bit 5 control
    23  last offset delta i32             last offset - base offset
    27  base timestamp i64                milliseconds since 1970
    35  max timestamp i64
    43  producer id i64                   -1: none
    51  producer epoch i16
    53  base sequence i32
    57  records i32
    61  records, compressed together with the codec

A record (integers are zigzag varints, low 7 bits first, unless noted otherwise):

    length of what follows | attributes i8 | timestamp delta | offset delta
    | key length, -1: null | key | value length, -1: null | value | headers
    | per header: key length | key, UTF-8 | value length, -1: null | value

Our own producers have an id of 16 bytes and a sequence of 8 (`penstock.log.producers`), for which
the batch has no field. The first record of such a batch has the header `PRODUCER_HEADER` with these
24 bytes. Our readers remove it; Kafka's clients see it.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import lt
from struct import Struct
from typing import Any, NamedTuple

try:
    from crc32c import crc32c
except ImportError:  # a client without the server: the broker has verified what it decodes
    crc32c = None  # type: ignore[assignment]

from penstock.errors import Damaged, InvalidRequest

Bytes = bytes | bytearray | memoryview
Headers = Sequence[tuple[str, bytes | None]]

HEAD = Struct(">qiibIhiqqqhii")
HEAD_SIZE = HEAD.size  # 61
ASSIGNED = Struct(">qii")  # the fields that a broker assigns and no checksum covers
LENGTH_AT, MAGIC_AT, CRC_AT, ATTRIBUTES_AT = 8, 16, 17, 21
_CHECKED = Struct(">hiqqqhii")
_CRC = Struct(">I")
_LENGTH = Struct(">i")
_PRODUCER = Struct(">16sQ")
MAGIC = 2
MIN_LENGTH = HEAD_SIZE - 12
CODEC_MASK, LOG_APPEND_TIME, TRANSACTIONAL, CONTROL = 0x07, 0x08, 0x10, 0x20
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
NO_PRODUCER = (-1, -1, -1)
PRODUCER_HEADER = "penstock-producer"
MAX_DECOMPRESSED = 256 << 20
MAX_VARINT_BITS = 63  # of a number in a record: nine bytes
_NO_ROOM = "failed to write whole buffer"  # cramjam's error if the output buffer is too small
_XERIAL = b"\x82SNAPPY\x00"  # Java's framing of snappy; two versions and blocks with lengths follow


class BatchHead(NamedTuple):
    """The fixed part of a batch."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records: int

    @property
    def size(self) -> int:
        """Return the number of bytes of the whole batch."""
        return self.length + 12

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @classmethod
    def parse(cls, data: Bytes, at: int = 0) -> "BatchHead":
        return cls(*HEAD.unpack_from(data, at))


class KafkaRecord(NamedTuple):
    """A decoded record. `timestamp` is in milliseconds. Without a `value`, it is a tombstone."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class NewRecord(NamedTuple):
    """A record to append. Without a timestamp, it gets the time of the append."""

    value: Bytes | None
    key: Bytes | None = None
    headers: Headers = ()
    timestamp: int | None = None


# Encoding


@lru_cache(maxsize=4096)
def varint(value: int) -> bytes:
    """Encode a zigzag varint."""
    value = value << 1 if value >= 0 else (-value << 1) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@lru_cache(maxsize=1 << 14)
def plain_prefix(delta: int, size: int) -> bytes:
    """Return the bytes before the value, for a record that has only a value of this size."""
    fields = b"\0\0" + varint(delta) + b"\1" + varint(size)
    return varint(len(fields) + size + 1) + fields


def encode_record(delta: int, record: NewRecord, timestamp_delta: int) -> bytes:
    parts: list[Bytes] = [b"\0", varint(timestamp_delta), varint(delta)]
    for part in (record.key, record.value):
        parts += (b"\1",) if part is None else (varint(len(part)), part)
    parts.append(varint(len(record.headers)))
    for name, value in record.headers:
        encoded = name.encode()
        parts += (varint(len(encoded)), encoded)
        parts += (b"\1",) if value is None else (varint(len(value)), value)
    body = b"".join(parts)
    return varint(len(body)) + body


def encode_head(
    records: Sequence[Bytes],
    count: int,
    *,
    base_offset: int = 0,
    timestamps: tuple[int, int],  # base and max
    leader_epoch: int = 0,
    last_offset_delta: int | None = None,
    attributes: int = 0,
    producer: tuple[int, int, int] = NO_PRODUCER,
) -> bytes:
    """Return the 61 bytes before the encoded records, which may come in parts."""
    last = count - 1 if last_offset_delta is None else last_offset_delta
    checked = (attributes, last, *timestamps, *producer, count)
    crc, length = crc32c(_CHECKED.pack(*checked)), MIN_LENGTH
    for part in records:
        crc = crc32c(part, crc)
        length += len(part)
    return HEAD.pack(base_offset, length, leader_epoch, MAGIC, crc, *checked)


def encode_records(records: Sequence[NewRecord], timestamps: Sequence[int]) -> bytes:
    """Encode the records of a batch, whose base timestamp is the first one."""
    base = timestamps[0]
    return b"".join(
        encode_record(delta, record, at - base)
        for delta, (record, at) in enumerate(zip(records, timestamps, strict=True))
    )


def producer_header(producer: bytes, sequence: int) -> tuple[str, bytes]:
    return PRODUCER_HEADER, _PRODUCER.pack(producer, sequence)


# Checking


def is_whole(data: Bytes, at: int = 0) -> bool:
    """Return whether an intact batch begins at this position of `data`."""
    if len(data) - at < HEAD_SIZE or data[at + MAGIC_AT] != MAGIC:
        return False
    (length,) = _LENGTH.unpack_from(data, at + LENGTH_AT)
    end = at + 12 + length
    if length < MIN_LENGTH or end > len(data):
        return False
    (crc,) = _CRC.unpack_from(data, at + CRC_AT)
    return bool(crc32c(memoryview(data)[at + ATTRIBUTES_AT : end]) == crc)


def assigned(data: Bytes, base: int, timeline: int) -> bytes:
    """Return the batch with its first offset, and this timeline as its leader epoch.

    If `data` has several batches, they have both already.
    """
    if BatchHead.parse(data).size < len(data):
        return bytes(data)
    return ASSIGNED.pack(base, len(data) - 12, timeline) + memoryview(data)[ASSIGNED.size :]


def batches_in(data: Bytes) -> Iterator[tuple[int, BatchHead]]:
    """Yield the position and the head of each batch."""
    at = 0
    while at + HEAD_SIZE <= len(data):
        head = BatchHead.parse(data, at)
        yield at, head
        at += head.size


def checked(data: bytes, base: int, end: int) -> bytes:
    """Return these batches; raise `Damaged` if one is not whole or has other offsets."""
    at, following = 0, base
    while at < len(data):
        if not is_whole(data, at):
            raise Damaged(
                f"the batches of offsets {base} to {end - 1} do not match their checksums", end
            )
        head = BatchHead.parse(data, at)
        if not following <= head.base_offset < head.next_offset <= end:
            raise Damaged(f"offsets {base} to {end - 1} contain a batch of other offsets", end)
        at, following = at + head.size, head.next_offset
    return data


def split_batches(data: Bytes) -> list[tuple[BatchHead, memoryview]]:
    """Return the batches that a producer sent; verify the checksum of each."""
    batches, at, view = [], 0, memoryview(data)
    while at < len(view):
        if not is_whole(view, at):
            raise Damaged(f"the record batch at byte {at} does not match its checksum")
        head = BatchHead.parse(view, at)
        if head.records < 1 or head.last_offset_delta != head.records - 1:
            raise InvalidRequest(
                f"a record batch with {head.records} records has last offset delta "
                f"{head.last_offset_delta}"
            )
        batches.append((head, view[at : at + head.size]))
        at += head.size
    return batches


# Decoding


def records_bytes(data: Bytes, head: BatchHead, at: int = 0) -> Bytes:
    """Return the encoded records of the batch at this position, decompressed."""
    view = memoryview(data)[at + HEAD_SIZE : at + head.size]
    return view if not head.codec else decompress(head.codec, view)


def decompress(codec: int, data: memoryview) -> bytes:
    """Decompress the records of a batch. Raises Damaged if they exceed `MAX_DECOMPRESSED` bytes."""
    try:
        import cramjam  # optional: only clients that read compressed batches need it
    except ImportError:
        raise InvalidRequest("a compressed record batch needs the package cramjam") from None
    if codec >= len(CODECS):
        raise Damaged(f"a record batch has the unknown codec {codec}")
    name = CODECS[codec]
    try:
        if name == "snappy":
            return _unsnap(cramjam.snappy, data)
        into = getattr(cramjam, name).decompress_into
        room = min(max(4 * len(data), 4096), MAX_DECOMPRESSED)
        while True:
            unpacked = bytearray(room)
            try:
                return bytes(unpacked[: into(data, unpacked)])
            except cramjam.DecompressionError as error:
                if _NO_ROOM not in str(error) or room >= MAX_DECOMPRESSED:
                    raise
                room = min(4 * room, MAX_DECOMPRESSED)
    except (cramjam.DecompressionError, struct.error) as error:
        raise Damaged(f"a record batch cannot be decompressed ({name}): {error}") from None


def _snappy_blocks(data: memoryview) -> Iterator[memoryview]:
    if bytes(data[: len(_XERIAL)]) != _XERIAL:
        yield data
        return
    at = 16
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        yield data[at + 4 : at + 4 + max(0, length)]
        at += 4 + max(0, length)


def _unsnap(snappy: Any, data: memoryview) -> bytes:
    parts, size = [], 0
    for block in _snappy_blocks(data):
        size += snappy.decompress_raw_len(block)
        if size > MAX_DECOMPRESSED:
            raise Damaged(f"a record batch has more than {MAX_DECOMPRESSED} bytes")
        parts.append(bytes(snappy.decompress_raw(block)))
    return b"".join(parts)


def undecodable(head: BatchHead, why: Damaged) -> Damaged:
    """Return the error for records that cannot be decoded. Brokers store the batches of Kafka's
    clients without decoding them.
    """
    offsets = f"{head.base_offset} to {head.next_offset - 1}"
    return Damaged(f"the records of offsets {offsets} cannot be decoded: {why}", head.next_offset)


class Fields(NamedTuple):
    """The positions of the parts of records within the encoded records. A length of -1 is null."""

    offset_deltas: list[int]
    timestamp_deltas: list[int]
    key_starts: list[int]
    key_lengths: list[int]
    value_starts: list[int]
    value_lengths: list[int]
    header_starts: list[int]  # of the number of headers


def find_fields(data: Bytes, count: int, last: int) -> Fields:
    """Find the parts of all encoded records. `last` is the batch's last offset delta. Raises
    Damaged if the lengths or the offsets do not fit.
    """
    fields = Fields([], [], [], [], [], [], [])
    data = bytes(data)  # indexing is twice as fast as with a memoryview
    at, size = 0, len(data)
    try:
        for _ in range(count):
            length, at = _varint_at(data, at)
            end = at + length
            timestamp, at = _varint_at(data, at + 1)
            offset, at = _varint_at(data, at)
            fields.timestamp_deltas.append(timestamp)
            fields.offset_deltas.append(offset)
            length, at = _varint_at(data, at)
            fields.key_starts.append(at)
            fields.key_lengths.append(length)
            length, at = _varint_at(data, at + length if length > 0 else at)
            fields.value_starts.append(at)
            fields.value_lengths.append(length)
            at = at + length if length > 0 else at
            fields.header_starts.append(at)
            if not at < end <= size:
                raise IndexError
            at = end
    except IndexError:
        raise Damaged("the records of a batch do not fit their lengths") from None
    if at != size:
        raise Damaged(f"{size - at} bytes follow the records of a batch")
    deltas = fields.offset_deltas
    if not deltas or deltas[0] < 0 or deltas[-1] > last or not all(map(lt, deltas, deltas[1:])):
        raise Damaged("the offsets of a batch are not in order")
    return fields


def _varint_at(data: Bytes, at: int) -> tuple[int, int]:
    """Return the zigzag varint at this position, and the position after it."""
    value = data[at]
    at += 1
    if value > 0x7F:
        value &= 0x7F
        for shift in range(7, MAX_VARINT_BITS, 7):
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        else:
            raise IndexError
    return (value >> 1) ^ -(value & 1), at


def find_records(data: bytes, count: int) -> list[int]:
    """Return where each encoded record begins, after its length. The last entry is the end."""
    starts, at, size = [], 0, len(data)
    try:
        for _ in range(count):
            first = data[at]
            if first < 0x80:  # most lengths have one byte or two
                length, at = first >> 1, at + 1
            elif (second := data[at + 1]) < 0x80:
                length, at = (first & 0x7F | second << 7) >> 1, at + 2
            else:
                length, at = _varint_at(data, at)
            starts.append(at)
            at += length
    except IndexError:
        raise Damaged("the records of a batch do not fit their lengths") from None
    if at != size:
        raise Damaged(f"the records of a batch have {at} bytes by their lengths, but {size} in all")
    starts.append(at)
    return starts


def read_headers(data: Bytes, at: int) -> tuple[tuple[str, bytes | None], ...]:
    """Return the headers; none if they cannot be decoded. `at` is the position of their count in
    the encoded records.
    """
    headers: list[tuple[str, bytes | None]] = []
    try:
        count, at = _varint_at(data, at)
        for _ in range(count):
            length, at = _varint_at(data, at)
            name = bytes(data[at : at + length]).decode("utf-8", "replace")
            length, at = _varint_at(data, at + length)
            value = None if length < 0 else bytes(data[at : at + length])
            at += max(0, length)
            headers.append((name, value))
    except IndexError:
        return ()
    return tuple(headers)


def without_ours(headers: Headers) -> tuple[tuple[str, bytes | None], ...]:
    return tuple(header for header in headers if header[0] != PRODUCER_HEADER)


def our_producer(data: Bytes, head: BatchHead, at: int = 0) -> tuple[bytes, int] | None:
    """Return id and sequence if one of our producers appended the batch at this position."""
    if head.producer_id != -1 or head.codec or not head.records:
        return None
    records = memoryview(data)[at + HEAD_SIZE : at + head.size]
    try:
        length, start = _varint_at(records, 0)
        fields = find_fields(records[: start + length], 1, 0)
        headers = read_headers(records, fields.header_starts[0])
    except (IndexError, Damaged):  # the records cannot be decoded
        return None
    for name, value in headers:
        if name == PRODUCER_HEADER and value is not None and len(value) == _PRODUCER.size:
            producer, sequence = _PRODUCER.unpack(value)
            return producer, sequence
    return None


def decode_batch(data: Bytes, at: int = 0) -> list[KafkaRecord]:
    """Return the records of the batch at this position, without our own header."""
    head = BatchHead.parse(data, at)
    appended = head.max_timestamp if head.attributes & LOG_APPEND_TIME else None
    try:
        records = records_bytes(data, head, at)
        fields = find_fields(records, head.records, head.last_offset_delta)
    except Damaged as error:
        raise undecodable(head, error) from None
    return [
        KafkaRecord(
            head.base_offset + offset,
            head.base_timestamp + time if appended is None else appended,
            bytes(records[key : key + key_length]) if key_length >= 0 else None,
            bytes(records[value : value + value_length]) if value_length >= 0 else None,
            without_ours(read_headers(records, headers)) if records[headers] else (),
        )
        for offset, time, key, key_length, value, value_length, headers in zip(*fields, strict=True)
    ]
