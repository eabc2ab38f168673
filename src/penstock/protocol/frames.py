"""Encode and decode the frames of the binary protocol, for the server and the client.

All integers are big-endian. A request is `[command u8][length u32][body]`, an answer is `[command
u8][status u8][length u32][body]`. `length` counts the body only. `name` is `[length u16][UTF-8
bytes]`.

    0x01 PRODUCE        [topic name][length u32][payload]
         0x81           [offset u64]
    0x02 CONSUME        [topic name][start offset u64][max records u32]
         0x82           [count u32] count x ([offset u64][length u32][payload])
    0x03 NEXT_OFFSET    [topic name]
         0x83           [next offset u64]
    0x04 CREATE_TOPIC   [topic name]
         0x84           empty
    0x05 LIST_TOPICS    empty
         0x85           [count u32] count x [topic name]
    0x06 PRODUCE_BATCH  [topic name][flags u8]; flags bit 0: [producer id 16][sequence u64];
                        [count u32][lengths u32 x count][payloads, one after another]
         0x86           [first offset u64][count u32]
    0x07 FETCH          [topic name][start offset u64][max bytes u32][wait ms u32],
                        optionally [flags u8]
         0x87           [incarnation 16][first offset u64][next offset u64][log end u64][count u32]
                        flags bit 2: [format u8], 0 = raw log, 1 = record batches;
                        flags bit 0: [lengths u32 x count];
                        flags bit 1: [runs u32][records u32 x runs][append time i64 x runs],
                        in microseconds since 1970;
                        raw log, little-endian: count x ([offset u64][length u32][payload]);
                        record batches: Kafka's (`penstock.protocol.kafka_batch`), whole,
                        without lengths and times
    0x08 OFFSET_AT      [topic name][milliseconds since 1970 i64]
         0x88           [offset u64]
    0x09 TOPIC_INFO     [topic name]
         0x89           [incarnation 16][first offset u64][next offset u64][bytes u64][segments u32]
                        [records u64][archived offset u64, all ones: none][policy u8]
                        [damaged places u32][partitions u32][format u8], 0 = aiq, 1 = kafka
    0x0A DELETE_TOPIC   [topic name]
         0x8A           empty
    0x0B PRODUCE_RECORDS [topic name][flags u8]; flags bit 0: [producer id 16][sequence u64];
                        [count u32] count x ([milliseconds since 1970 i64, lowest: time of the
                        append][key][value][headers u16] headers x ([name][value])),
                        key and values: [length i32, -1: null][bytes]
         0x8B           [first offset u64][count u32]
    0x0C CREATE_PARTITIONED [topic name][format name, empty: the configured one][partitions u32]
         0x8C           empty
    0x10 AUTH           [token], the whole body; the first request if authentication is on
         0x90           empty
    0x20 GROUP_LEASE    [topic name][group name][member name][max records u32][wait ms u32]
         0xA0           [lease 16][start u64][end u64][expires in ms u32];
                        start = end: nothing to read now
    0x21 GROUP_COMPLETE [topic name][group name][lease 16]
         0xA1           [committed offset u64]
    0x22 GROUP_COMMIT   [topic name][group name][offset u64]
         0xA2           empty
    0x23 GROUP_FETCH    [topic name][group name]
         0xA3           [committed offset u64][lag u64]
    0x24 GROUP_LEAVE    [topic name][group name][member name]
         0xA4           [released leases u32]
    0x25 GROUP_RENEW    [topic name][group name][lease 16]
         0xA5           [expires in ms u32]
    0x30 SINK_CLAIM     [JSON: a Claim of penstock.protocol.sink_claims], the whole body
         0xB0           [JSON: Claimed]
    0x31 SINK_COMMIT    [JSON: Commit], the whole body
         0xB1           empty

    any failure: 0xFF with the status and [length u32][message UTF-8], optionally
                 [JSON: Details of penstock.protocol.status]

The first five commands are aiq's. aiq has fewer statuses than `penstock.errors` has classes, so the
class and its fields follow the message where the status is not enough.

The raw log of FETCH is the file, byte for byte. `next offset` is where the next read starts and
`log end` is the offset of the next append; a reader is at the end when both are equal. `lengths`
repeats the lengths in the raw log, so that a reader splits it with numpy. A batch whose producer id
and sequence are in the topic already is not stored again and gets its first answer. From
PRODUCE_BATCH on, `orders/3` is partition 3 of the topic `orders`, and `orders` is its partition 0.
"""

from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum, unique
from struct import Struct, error, pack
from sys import byteorder
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    import numpy as np
except ImportError:  # a client without the server does not need it
    np = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import numpy.typing as npt

from penstock.errors import InvalidRequest
from penstock.protocol.kafka_batch import NewRecord
from penstock.protocol.roles import Role
from penstock.protocol.status import Malformed, TcpStatus

Bytes = bytes | bytearray | memoryview

MAX_FRAME = 64 << 20

REQUEST = Struct(">BI")
ANSWER = Struct(">BBI")
U16 = Struct(">H")
U32 = Struct(">I")
U64 = Struct(">Q")
BATCH_ANSWER = Struct(">QI")
FETCH_REQUEST = Struct(">QII")
FETCH_ANSWER = Struct(">16sQQQI")
CONSUME_REQUEST = Struct(">QI")
RECORD = Struct(">QI")
TIMESTAMP = Struct(">q")
INFO_ANSWER = Struct(">16sQQQI")
# Records, archived offset (all ones: none), policy (0 delete, 1 compact).
INFO_MORE = Struct(">QQB")
PRODUCER = Struct(">16sQ")
LEASE_REQUEST = Struct(">II")
LEASE_ANSWER = Struct(">16sQQI")
FETCHED_ANSWER = Struct(">QQ")
LENGTH = Struct(">i")  # -1: null
INFO_PARTITIONS = Struct(">IB")  # partitions, format

IDEMPOTENT = 0x01  # flags of PRODUCE_BATCH
LENGTHS, TIMES, FORMAT = 0x01, 0x02, 0x04  # flags of FETCH
UNKNOWN_FLAGS = "unknown flags"  # start of the error for unknown flags
RAW_LOG, RECORD_BATCHES = 0, 1  # formats of a FETCH answer
POLICIES = ("delete", "compact")  # of a topic, in TOPIC_INFO
FORMATS = ("aiq", "kafka")  # of a topic, in TOPIC_INFO
NO_TIME = -1 << 63  # the record gets the time of its append
NO_OFFSET = (1 << 64) - 1
SPARSE = 1 << 63  # sequences from here on may leave gaps, but must grow


@unique
class Command(IntEnum):
    """All commands, with their codes and the role that a token needs for each.

    The handler is the method of the same name in `penstock.wire.tcp.commands`.
    """

    role: Role

    def __new__(cls, code: int, role: Role) -> "Command":
        command = int.__new__(cls, code)
        command._value_ = code
        command.role = role
        return command

    PRODUCE = 0x01, Role.READ_WRITE
    CONSUME = 0x02, Role.READ_ONLY
    NEXT_OFFSET = 0x03, Role.READ_ONLY
    CREATE_TOPIC = 0x04, Role.READ_WRITE
    LIST_TOPICS = 0x05, Role.READ_ONLY
    PRODUCE_BATCH = 0x06, Role.READ_WRITE
    FETCH = 0x07, Role.READ_ONLY
    OFFSET_AT = 0x08, Role.READ_ONLY
    TOPIC_INFO = 0x09, Role.READ_ONLY
    DELETE_TOPIC = 0x0A, Role.ADMIN
    PRODUCE_RECORDS = 0x0B, Role.READ_WRITE
    CREATE_PARTITIONED = 0x0C, Role.READ_WRITE
    AUTH = 0x10, Role.PUBLIC
    GROUP_LEASE = 0x20, Role.READ_WRITE
    GROUP_COMPLETE = 0x21, Role.READ_WRITE
    GROUP_COMMIT = 0x22, Role.READ_WRITE
    GROUP_FETCH = 0x23, Role.READ_ONLY
    GROUP_LEAVE = 0x24, Role.READ_WRITE
    GROUP_RENEW = 0x25, Role.READ_WRITE
    SINK_CLAIM = 0x30, Role.READ_WRITE
    SINK_COMMIT = 0x31, Role.READ_WRITE


ERROR = 0xFF  # the command byte of every unsuccessful answer
REPLY = 0x80  # added to the request's command byte in a successful answer
NOT_OURS = "it does not speak Penstock's TCP protocol: is this the broker's TCP port?"


class Fetched(NamedTuple):
    """A FETCH answer. `lengths` and `times` are empty unless the request asked for them."""

    incarnation: bytes
    first_offset: int
    next_offset: int
    log_end: int
    records: int
    lengths: "npt.NDArray[np.uint32]"  # an array.array where numpy is not installed
    times: "npt.NDArray[np.int64]"
    raw: memoryview
    format: int = RAW_LOG  # of `raw`


class Info(NamedTuple):
    incarnation: bytes
    first_offset: int
    next_offset: int
    bytes: int
    segments: int
    records: int
    archived: int | None
    policy: str
    damaged: int = 0  # damaged places of recovery and scrub
    partitions: int = 1
    format: str = "aiq"


class Lease(NamedTuple):
    id: bytes
    start: int
    end: int
    expires_in: float


class BatchRequest(NamedTuple):
    """A decoded PRODUCE_BATCH body. `payloads` is a view of the request's bytes."""

    topic: str
    producer: tuple[bytes, int] | None
    lengths: "npt.NDArray[np.int64]"
    payloads: memoryview


class RecordsRequest(NamedTuple):
    """A decoded PRODUCE_RECORDS body."""

    topic: str
    producer: tuple[bytes, int] | None
    records: list[NewRecord]


# Decoding


class Body:
    """Reads a body from left to right. Raises `Malformed` if a field does not fit."""

    __slots__ = ("at", "view")

    def __init__(self, view: memoryview) -> None:
        self.view, self.at = view, 0

    def take(self, layout: Struct) -> tuple[Any, ...]:
        try:
            fields = layout.unpack_from(self.view, self.at)
        except error:
            raise Malformed(
                f"the body ends at byte {len(self.view)}, inside a field at byte {self.at}"
            ) from None
        self.at += layout.size
        return fields

    def name(self, what: str = "topic") -> str:
        (length,) = self.take(U16)
        raw = self.bytes(length, what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise InvalidRequest(f"the {what} name is not valid UTF-8") from None

    def bytes(self, length: int, what: str) -> memoryview:
        end = self.at + length
        if end > len(self.view):
            raise Malformed(
                f"the {what} of {length} bytes at byte {self.at} "
                f"runs past the body's {len(self.view)} bytes"
            )
        part = self.view[self.at : end]
        self.at = end
        return part

    def nullable(self, what: str) -> memoryview | None:
        (length,) = self.take(LENGTH)
        return self.bytes(length, what) if length >= 0 else None

    def rest(self) -> memoryview:
        part = self.view[self.at :]
        self.at = len(self.view)
        return part

    def more(self) -> bool:
        return self.at < len(self.view)

    def end(self) -> None:
        if self.at != len(self.view):
            raise Malformed(f"{len(self.view) - self.at} extra bytes at the end of the body")


def read_info(view: memoryview) -> Info:
    """Decode a TOPIC_INFO answer. Older brokers leave out the last fields."""
    body = Body(view)
    incarnation, first, following, size, segments = body.take(INFO_ANSWER)
    records, archived, policy = (
        body.take(INFO_MORE) if body.more() else (following - first, NO_OFFSET, 0)
    )
    (damaged,) = body.take(U32) if body.more() else (0,)
    partitions, form = body.take(INFO_PARTITIONS) if body.more() else (1, 0)
    return Info(
        incarnation,
        first,
        following,
        size,
        segments,
        records,
        None if archived == NO_OFFSET else archived,
        POLICIES[policy],
        damaged,
        partitions,
        FORMATS[form],
    )


def read_batch(view: memoryview) -> BatchRequest:
    body = Body(view)
    topic, producer, count = _batch_head(body, Command.PRODUCE_BATCH)
    lengths = np.frombuffer(body.bytes(4 * count, "lengths"), ">u4").astype(np.int64)
    payloads = body.rest()
    if int(lengths.sum()) != len(payloads):
        raise Malformed(
            f"the lengths add up to {int(lengths.sum())} bytes, the payloads have {len(payloads)}"
        )
    return BatchRequest(topic, producer, lengths, payloads)


def read_records(view: memoryview) -> RecordsRequest:
    body = Body(view)
    topic, producer, count = _batch_head(body, Command.PRODUCE_RECORDS)
    records = []
    for _ in range(count):
        (timestamp,) = body.take(TIMESTAMP)
        key, value = _whole(body.nullable("key")), _whole(body.nullable("value"))
        (headers,) = body.take(U16)
        named = [(body.name("header"), _whole(body.nullable("header"))) for _ in range(headers)]
        records.append(NewRecord(value, key, named, None if timestamp == NO_TIME else timestamp))
    body.end()
    return RecordsRequest(topic, producer, records)


def _whole(part: memoryview | None) -> bytes | None:
    return None if part is None else bytes(part)


def _batch_head(body: Body, command: Command) -> tuple[str, tuple[bytes, int] | None, int]:
    """Return the topic, the producer and the number of records."""
    topic = body.name()
    if not body.more():
        raise Malformed("the body ends before the flags")
    flags = body.view[body.at]
    body.at += 1
    if flags & ~IDEMPOTENT:
        raise Malformed(f"{UNKNOWN_FLAGS} {flags:#04x} in {command.name}")
    producer = None
    if flags & IDEMPOTENT:
        producer_id, sequence = body.take(PRODUCER)
        producer = (bytes(producer_id), sequence)
    (count,) = body.take(U32)
    return topic, producer, count


def read_fetched(view: memoryview, flags: int) -> Fetched:
    """Decode a FETCH answer; `flags` are those of the request."""
    body = Body(view)
    incarnation, first, following, end, count = body.take(FETCH_ANSWER)
    form = body.bytes(1, "format")[0] if flags & FORMAT else RAW_LOG
    if form == RECORD_BATCHES:
        none: Any = () if np is None else np.empty(0, np.int64)
        batches = body.rest()
        return Fetched(incarnation, first, following, end, count, none, none, batches, form)
    if np is None and not flags & TIMES:
        plain = _plain_lengths(body.bytes(4 * count, "lengths"))
        return Fetched(incarnation, first, following, end, count, plain, plain[:0], body.rest())
    lengths: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
    times: npt.NDArray[np.int64] = np.empty(0, np.int64)
    if flags & LENGTHS:
        lengths = np.frombuffer(body.bytes(4 * count, "lengths"), ">u4")
    if flags & TIMES:
        (runs,) = body.take(U32)
        records = np.frombuffer(body.bytes(4 * runs, "runs"), ">u4")
        times = np.repeat(
            np.frombuffer(body.bytes(8 * runs, "times"), ">i8").astype(np.int64), records
        )
        if len(times) != count:
            raise Malformed(f"times of {len(times)} records, but {count} were sent")
    return Fetched(incarnation, first, following, end, count, lengths, times, body.rest())


def _plain_lengths(view: memoryview) -> Any:
    lengths = array("I", bytes(view))
    if byteorder == "little":
        lengths.byteswap()
    return lengths


def read_consumed(view: memoryview) -> list[tuple[int, bytes]]:
    body = Body(view)
    (count,) = body.take(U32)
    records = []
    for _ in range(count):
        offset, length = body.take(RECORD)
        records.append((offset, bytes(body.bytes(length, "payload"))))
    body.end()
    return records


def read_names(view: memoryview) -> list[str]:
    body = Body(view)
    (count,) = body.take(U32)
    names = [body.name() for _ in range(count)]
    body.end()
    return names


def read_error(view: memoryview) -> tuple[str, memoryview]:
    """Return the message of a failure and its details."""
    body = Body(view)
    (length,) = body.take(U32)
    return str(body.bytes(length, "message"), "utf-8", "replace"), body.rest()


# Encoding


def name(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > 0xFFFF:
        raise InvalidRequest(f"a name of {len(raw)} bytes is too long")
    return U16.pack(len(raw)) + raw


def request(command: Command, *parts: Bytes) -> bytes:
    body = b"".join(parts)
    return REQUEST.pack(command, len(body)) + body


def produce(topic: str, payload: Bytes) -> bytes:
    return request(Command.PRODUCE, name(topic), U32.pack(len(payload)), payload)


def produce_batch(
    topic: str, payloads: Sequence[Bytes], producer: tuple[bytes, int] | None = None
) -> list[Bytes]:
    """Return a frame in pieces, for `writelines`: payloads are copied at most once."""
    if np is None:
        sizes = list(map(len, payloads))
        lengths = pack(f">{len(sizes)}I", *sizes)
        return _produce(topic, len(sizes), sum(sizes), lengths, payloads, producer)
    return produce_arrays(
        topic, np.fromiter(map(len, payloads), ">u4", len(payloads)), payloads, producer
    )


def produce_arrays(
    topic: str,
    lengths: "npt.NDArray[Any]",
    payloads: Sequence[Bytes],
    producer: tuple[bytes, int] | None = None,
) -> list[Bytes]:
    """Encode PRODUCE_BATCH for payloads that are already joined, in one piece or several."""
    lengths = lengths.astype(">u4", copy=False)
    total = int(lengths.sum(dtype=np.int64))
    return _produce(topic, len(lengths), total, lengths.tobytes(), payloads, producer)


def _produce(
    topic: str,
    count: int,
    total: int,
    lengths: bytes,
    payloads: Sequence[Bytes],
    producer: tuple[bytes, int] | None,
) -> list[Bytes]:
    head = _produce_head(topic, producer, count)
    size = len(head) + len(lengths) + total
    return [REQUEST.pack(Command.PRODUCE_BATCH, size) + head, lengths, *payloads]


def produce_records(
    topic: str, records: Sequence[NewRecord], producer: tuple[bytes, int] | None = None
) -> list[Bytes]:
    """Encode PRODUCE_RECORDS: records with keys, headers and timestamps."""
    parts: list[Bytes] = [_produce_head(topic, producer, len(records))]
    for record in records:
        parts.append(TIMESTAMP.pack(NO_TIME if record.timestamp is None else record.timestamp))
        parts += (*_nullable(record.key), *_nullable(record.value), U16.pack(len(record.headers)))
        for header, value in record.headers:
            parts += (name(header), *_nullable(value))
    return [REQUEST.pack(Command.PRODUCE_RECORDS, sum(map(len, parts))), *parts]


def _produce_head(topic: str, producer: tuple[bytes, int] | None, count: int) -> bytes:
    known = bytes((IDEMPOTENT,)) + PRODUCER.pack(*producer) if producer else b"\0"
    return name(topic) + known + U32.pack(count)


def _nullable(data: Bytes | None) -> tuple[Bytes, ...]:
    return (LENGTH.pack(-1),) if data is None else (LENGTH.pack(len(data)), data)


def create_partitioned(topic: str, form: str, partitions: int) -> bytes:
    tail = U32.pack(partitions)
    return request(Command.CREATE_PARTITIONED, name(topic), name(form), tail)


def consume(topic: str, start: int, max_records: int) -> bytes:
    return request(Command.CONSUME, name(topic), CONSUME_REQUEST.pack(start, max_records))


def fetch(topic: str, start: int, max_bytes: int, wait_ms: int = 0, flags: int = 0) -> bytes:
    tail = bytes((flags,)) if flags else b""
    return request(Command.FETCH, name(topic), FETCH_REQUEST.pack(start, max_bytes, wait_ms), tail)


def times(stamps: "npt.NDArray[np.int64]") -> bytes:
    """Encode append times as FETCH sends them: equal neighbours are one run."""
    begins = np.flatnonzero(np.diff(stamps, prepend=stamps[:1] - 1))
    records = np.diff(begins, append=len(stamps))
    return (
        U32.pack(len(begins))
        + records.astype(">u4").tobytes()
        + stamps[begins].astype(">i8").tobytes()
    )


def answer(command: int, *parts: Bytes) -> bytes:
    body = b"".join(parts)
    return ANSWER.pack(command | REPLY, TcpStatus.SUCCESS, len(body)) + body


def failure(status: TcpStatus, message: str, details: bytes = b"") -> bytes:
    raw = message.encode("utf-8", "replace")
    return (
        ANSWER.pack(ERROR, status, 4 + len(raw) + len(details)) + U32.pack(len(raw)) + raw + details
    )


_PRODUCED_HEAD = ANSWER.pack(Command.PRODUCE | REPLY, TcpStatus.SUCCESS, U64.size)


def produced(first: int, count: int) -> Bytes:
    """Encode the answers to `count` PRODUCEs whose records have the offsets from `first` on."""
    if count == 1:
        return _PRODUCED_HEAD + U64.pack(first)
    answers = bytearray((_PRODUCED_HEAD + bytes(U64.size)) * count)
    size, at = len(_PRODUCED_HEAD) + U64.size, len(_PRODUCED_HEAD)
    np.ndarray(count, ">u8", answers, at, (size,))[:] = np.arange(first, first + count)
    return answers


def consumed(offsets: Iterable[int], payloads: Sequence[Bytes]) -> bytes:
    parts: list[Bytes] = [U32.pack(len(payloads))]
    pack = RECORD.pack
    for offset, payload in zip(offsets, payloads, strict=True):
        parts += (pack(offset, len(payload)), payload)
    return answer(Command.CONSUME, *parts)


if np is not None:
    _IN_RECORD = np.arange(RECORD.size)
    _RECORDS = np.dtype([("offset", ">u8"), ("length", ">u4")])


def consumed_log(
    log: Bytes,
    offsets: "npt.NDArray[np.int64]",
    starts: "npt.NDArray[np.int64]",
    ends: "npt.NDArray[np.int64]",
) -> bytearray:
    """Encode a CONSUME answer from the log's bytes; `starts` and `ends` are those of the payloads.

    The log has the same layout, except that its record headers are little-endian.
    """
    count, size, first = len(offsets), int(ends[-1]), ANSWER.size + U32.size
    out = bytearray(first + size)
    ANSWER.pack_into(out, 0, Command.CONSUME | REPLY, TcpStatus.SUCCESS, U32.size + size)
    U32.pack_into(out, ANSWER.size, count)
    out[first:] = memoryview(log)[:size]
    lengths = ends - starts
    step = RECORD.size + int(lengths[0])
    if size == count * step and (lengths == lengths[0]).all():
        np.ndarray(count, ">u8", out, first, (step,))[:] = offsets
        np.ndarray(count, ">u4", out, first + 8, (step,))[:] = lengths
        return out
    heads = np.empty(count, _RECORDS)
    heads["offset"] = offsets
    heads["length"] = lengths
    places = (starts + (first - RECORD.size))[:, None] + _IN_RECORD
    np.frombuffer(out, np.uint8)[places] = heads.view(np.uint8).reshape(count, RECORD.size)
    return out


def names(topics: Iterable[str]) -> bytes:
    listed = [name(text) for text in topics]
    return answer(Command.LIST_TOPICS, U32.pack(len(listed)), *listed)
