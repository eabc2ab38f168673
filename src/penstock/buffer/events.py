"""Convert items to lines of a buffer file and back (penstock.protocol.buffer_lines has the format).

JSON may have newlines between tokens. Such a payload is compacted, so that one line is one event
for us, `wc -l`, `jq` and `grep` alike. That removes only white space: numbers and strings keep
their bytes. A JSON string never contains a raw newline.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable
from uuid import UUID

import msgspec

from penstock.errors import InvalidRequest
from penstock.protocol import buffer_lines
from penstock.protocol.buffer_lines import Event
from penstock.protocol.headers import decode as decode_headers
from penstock.queues.types import Item


def encode(items: Iterable[Item]) -> list[bytes]:
    """Return a line per item. Raise InvalidRequest if a payload is not JSON."""
    lines = [buffer_lines.encode(_event(item)) for item in items]
    try:  # a cheap check, and the last chance to reject an unreadable line
        readable = len(buffer_lines.parse(b"".join(lines))) == len(lines)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"a payload is not valid JSON: {error}") from None
    if not readable:
        raise InvalidRequest("a payload is not valid JSON")
    return lines


def _event(item: Item) -> Event:
    payload, headers = bytes(item.payload), item.headers
    assert not isinstance(item.due, float), "Queues.at_rest turns a delay into a time"
    if item.key_id is not None:
        payload = b'"%b"' % b64encode(payload)
        if headers is not None:
            headers = b'"%b"' % b64encode(headers)
    elif b"\n" in payload:
        try:
            payload = msgspec.json.format(payload, indent=-1)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"the payload is not valid JSON: {error}") from None
    return Event(
        queue=item.queue,
        payload=msgspec.Raw(payload),
        partition=item.partition,
        transaction_id=item.transaction_id or "",
        trace_id=item.trace_id,
        producer=item.producer,
        sealed=item.key_id,
        headers=msgspec.Raw(headers or b""),
        deliver_at=item.due,
        unordered=item.ordering == "none",
    )


def decode(line: bytes, place: str = "") -> Item:
    """Return the item of a line. Raise msgspec.DecodeError if the line is not an event."""
    return item_of(buffer_lines.decode(line, place))


def decode_all(data: bytes) -> list[Item]:
    """Return the items of many lines, or raise msgspec.DecodeError for the whole."""
    return [item_of(event) for event in buffer_lines.decode_all(data)]


def item_of(event: Event) -> Item:
    """Return the item of an event. Raise msgspec.DecodeError if its fields are invalid."""
    payload = bytes(event.payload)
    headers = bytes(event.headers) or None
    if event.sealed is not None:
        payload = _unquoted(payload)
        headers = None if headers is None else _unquoted(headers)
    elif headers is not None:
        decode_headers(headers)  # a file may come from anywhere
    return Item(
        queue=event.queue,
        payload=payload,
        partition=event.partition,
        transaction_id=event.transaction_id,
        trace_id=event.trace_id if event.trace_id and _is_uuid(event.trace_id) else None,
        producer=event.producer,
        key_id=event.sealed,
        headers=headers,
        due=event.deliver_at,
        ordering="none" if event.unordered else None,
    )


def _is_uuid(text: str) -> bool:
    """Return whether the text is a UUID. Queen MQ accepts any text as a trace id."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _unquoted(text: bytes) -> bytes:
    try:
        return b64decode(msgspec.json.decode(text, type=str), validate=True)
    except ValueError as error:  # includes binascii.Error and ValidationError
        raise msgspec.DecodeError(f"the encrypted payload is not base64: {error}") from None
