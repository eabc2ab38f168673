"""The line of one event in a buffer file, written from an item and read back into one.

| bytes                          | what                                                                          |
|--------------------------------|-------------------------------------------------------------------------------|
| `{"queue":` string             | the queue                                                                     |
| `,"partition":` string         | the partition                                                                 |
| `,"payload":` any JSON         | the payload's own bytes, never parsed and written anew                        |
| `,"transaction_id":` string    | always there: replay de-duplicates by it                                      |
| `,"trace_id":` string          | "" = none                                                                     |
| `,"namespace":""`, `,"task":""`| of the seed's format; they follow from the queue                              |
| `,"producer":` string          | only when the push was authenticated                                          |
| `}` newline (0x0A)             | an event without its newline was never acknowledged                           |

JSON may hold newlines between tokens. A payload that does is compacted (white space only: numbers and strings keep
their bytes), so that one line is one event for us, `wc -l`, `jq` and `grep` alike. Strings never hold a raw newline.
"""

from collections.abc import Iterable, Sequence

import msgspec

from penstock.errors import InvalidRequest
from penstock.queues.types import DEFAULT_PARTITION, Item

text = msgspec.json.encode


class Event(msgspec.Struct, kw_only=True):
    """A line as read. Unknown fields are ignored: other versions may write more."""

    queue: str
    payload: msgspec.Raw = msgspec.Raw(b"null")
    partition: str = DEFAULT_PARTITION
    transaction_id: str
    trace_id: str | None = None
    producer: str | None = None


_decoder = msgspec.json.Decoder(Event)


def encode(items: Iterable[Item]) -> list[bytes]:
    """A line per item. Every item must have its transaction id by now. InvalidRequest when a payload is no JSON."""
    lines = []
    for item in items:
        payload = item.payload
        if b"\n" in payload:
            try:
                payload = msgspec.json.format(payload, indent=-1)
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"the payload is not valid JSON: {error}") from None
        line = b'{"queue":%b,"partition":%b,"payload":%b,"transaction_id":%b,"trace_id":%b,"namespace":"","task":""' % (
            text(item.queue),
            text(item.partition),
            payload,
            text(item.transaction_id),
            text(item.trace_id or ""),
        )
        if item.producer is not None:
            line += b',"producer":' + text(item.producer)
        lines.append(line + b"}\n")
    try:  # cheap, and the only moment at which a line that cannot be read back can still be refused
        readable = len(_decoder.decode_lines(b"".join(lines))) == len(lines)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"a payload is not valid JSON: {error}") from None
    if not readable:
        raise InvalidRequest("a payload is not valid JSON")
    return lines


def decode(line: bytes) -> Item:
    """The item of one line; msgspec.DecodeError (or ValidationError, its subclass) when it is none."""
    return _item(_decoder.decode(line))


def decode_all(data: bytes) -> list[Item]:
    """The items of many lines at once; fails as a whole, and then `decode` finds which line it was."""
    return [_item(event) for event in _decoder.decode_lines(data)]


def _item(event: Event) -> Item:
    return Item(
        queue=event.queue,
        payload=bytes(event.payload),
        partition=event.partition,
        transaction_id=event.transaction_id,
        trace_id=event.trace_id or None,
        producer=event.producer,
    )


def size_of(lines: Sequence[bytes]) -> int:
    return sum(map(len, lines))
