"""Encode and decode the lines of buffer files, for brokers and for `recover`.

| bytes                          | what                                                          |
|--------------------------------|---------------------------------------------------------------|
| `{"queue":` string             | the queue                                                     |
| `,"partition":` string         | the partition                                                 |
| `,"payload":` any JSON         | the payload's own bytes; sealed: base64 of nonce, cipher, tag |
| `,"transaction_id":` string    | always present: replay de-duplicates by it                    |
| `,"trace_id":` string          | "" = none                                                     |
| `,"namespace":""`, `,"task":""`| part of Queen MQ's format; always empty                       |
| `,"producer":` string          | only if the push was authenticated                            |
| `,"sealed":` string            | only if the payload is sealed: the id of the key              |
| `,"headers":` object           | only if the message has headers; sealed: base64               |
| `,"deliver_at":` string        | only of a delayed message: when it is due, RFC 3339 in UTC    |
| `,"unordered":true`            | only if the push named no partition and asks for no order     |
| `,"crc32c":"` 8 hex digits `"` | CRC-32C of all bytes before this field                        |
| `}` newline (0x0A)             | an event without its newline was never acknowledged           |

Lines without a checksum (Queen MQ's, and those of older releases) are accepted. A line that does
not match its checksum is damaged; its content is not used.

Events of Queen MQ with camelCase keys (`transactionId`, `traceId`, `producerSub`) are read too. An
event without a transaction id gets an id that is derived from its place in its file, so that it is
stored once, however often the file is replayed.
"""

from datetime import datetime
from uuid import UUID, uuid5

import msgspec
from crc32c import crc32c

from penstock.protocol.names import DEFAULT_PARTITION

_MARK = b',"crc32c":"'
_DIGITS = slice(-10, -2)
_TAIL = len(_MARK) + len('01234567"}')

text = msgspec.json.encode


class Event(msgspec.Struct, kw_only=True):
    """A decoded line. Unknown fields are ignored: other versions may write more."""

    queue: str
    payload: msgspec.Raw = msgspec.Raw(b"null")
    partition: str = DEFAULT_PARTITION
    transaction_id: str
    trace_id: str | None = None
    producer: str | None = None
    sealed: str | None = None  # the id of the key; if set, payload and headers are strings
    headers: msgspec.Raw = msgspec.Raw()  # empty = none
    deliver_at: datetime | None = None
    unordered: bool = False  # if this event creates the queue, consumers may share partitions


class QueenEvent(msgspec.Struct, rename="camel"):
    """An event as Queen MQ writes it."""

    queue: str
    payload: msgspec.Raw = msgspec.Raw(b"null")
    partition: str | None = None
    transaction_id: str | None = None
    trace_id: str | None = None
    producer_sub: str | None = None
    our_id: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="transaction_id")


class DamagedLine(msgspec.DecodeError):
    """The line does not match its checksum."""


_decoder = msgspec.json.Decoder(Event)
_queen_decoder = msgspec.json.Decoder(QueenEvent)
_PLACES = UUID("0f3b7a52-6d1e-5c84-9a37-2b6d1c0e4f95")  # namespace of ids derived from places


def encode(event: Event) -> bytes:
    """Return the event's line with checksum and newline. The payload must not contain a newline."""
    line = (
        b'{"queue":%b,"partition":%b,"payload":%b,"transaction_id":%b,"trace_id":%b,"namespace":"","task":""'
        % (
            text(event.queue),
            text(event.partition),
            event.payload,
            text(event.transaction_id),
            text(event.trace_id or ""),
        )
    )
    if event.producer is not None:
        line += b',"producer":' + text(event.producer)
    if event.sealed is not None:
        line += b',"sealed":' + text(event.sealed)
    if event.headers:
        line += b',"headers":' + event.headers
    if event.deliver_at is not None:
        line += b',"deliver_at":' + text(event.deliver_at)
    if event.unordered:
        line += b',"unordered":true'
    return b'%b%b%08x"}\n' % (line, _MARK, crc32c(line))


def decode(line: bytes, place: str = "") -> Event:
    """Decode a line, with or without its newline. Raises msgspec.DecodeError if it is not valid.

    `place` identifies the line. Without it, an event must have a transaction id.
    """
    check(line.rstrip(b"\n"))
    try:
        event = _decoder.decode(line)
    except msgspec.ValidationError:
        queen_event = _queen_decoder.decode(line)
        if queen_event.our_id:  # not Queen MQ's: report the error of our own format
            raise
        event = _from_queen(queen_event)
    if not event.transaction_id:
        if not place:
            raise msgspec.ValidationError("the event has no transaction id")
        event.transaction_id = str(uuid5(_PLACES, place))
    return event


def _from_queen(event: QueenEvent) -> Event:
    return Event(
        queue=event.queue,
        payload=event.payload,
        partition=event.partition or DEFAULT_PARTITION,
        transaction_id=event.transaction_id or "",
        trace_id=event.trace_id,
        producer=event.producer_sub or None,
    )


def decode_all(data: bytes) -> list[Event]:
    """Decode many lines at once. If one is invalid, all fail; then call `decode` for each line."""
    for line in data.split(b"\n"):
        check(line)
    return parse(data)


def parse(data: bytes) -> list[Event]:
    """Decode many lines without verifying their checksums, for lines that were just encoded."""
    events = _decoder.decode_lines(data)
    if not all(event.transaction_id for event in events):
        raise msgspec.ValidationError("an event has no transaction id")
    return events


def has_checksum(line: bytes) -> bool:
    """Return whether the line (without its newline) ends with a checksum."""
    return line[-_TAIL : -_TAIL + len(_MARK)] == _MARK


def check(line: bytes) -> None:
    """Raise DamagedLine if the line (without its newline) does not match its checksum."""
    if has_checksum(line):
        try:
            stored = int(line[_DIGITS], 16)
        except ValueError:
            stored = -1
        if stored != crc32c(line[:-_TAIL]):
            raise DamagedLine("the line does not match its checksum")
