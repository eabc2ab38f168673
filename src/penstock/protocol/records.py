"""Convert records to JSON and back, for HTTP, SSE and WebSocket: `{"offset": 7, "topic": "orders",
"payload": "text"}`.

A payload that is not valid UTF-8 is sent as base64, in both directions: `"payload": "/w==",
"encoding": "base64"`.

Records of topics with `format: kafka` may also have `key`, `headers` and `timestamp` (milliseconds
since 1970). Headers are a list of `[name, value]`, since names may repeat. A key or a header's
value is text, or `{"base64": "/w=="}` if it is not valid UTF-8. A header's value may be null. A
payload of null is a tombstone.
"""

from base64 import b64decode, b64encode
from binascii import Error

from msgspec import UNSET, Struct, UnsetType

from penstock.errors import InvalidRequest
from penstock.protocol.kafka_batch import KafkaRecord, NewRecord

BASE64 = "base64"


class Base64(Struct, frozen=True):
    """Bytes that are not valid UTF-8."""

    base64: str


Text = str | Base64


class RecordMessage(Struct, gc=False):
    offset: int
    topic: str
    payload: str | None
    encoding: str | UnsetType = UNSET
    key: Text | UnsetType = UNSET
    headers: list[tuple[str, Text | None]] | UnsetType = UNSET
    timestamp: int | UnsetType = UNSET  # milliseconds since 1970


class MessageFields(Struct):
    """The fields that a client may give a record beside its payload."""

    key: Text | None = None
    headers: list[tuple[str, Text | None]] = []
    timestamp: int | None = None

    @property
    def plain(self) -> bool:
        return self.key is None and not self.headers and self.timestamp is None

    def record(self, payload: bytes | None) -> NewRecord:
        """Return the record to append."""
        headers = [(name, _bytes_of(value)) for name, value in self.headers]
        return NewRecord(payload, _bytes_of(self.key), headers, self.timestamp)


def message(topic: str, offset: int, payload: bytes | memoryview) -> RecordMessage:
    try:
        return RecordMessage(offset, topic, str(payload, "utf-8"))
    except UnicodeDecodeError:
        return RecordMessage(offset, topic, b64encode(payload).decode(), BASE64)


def record_message(topic: str, record: KafkaRecord) -> RecordMessage:
    """Return the message of a record with key, headers and timestamp."""
    shown = message(topic, record.offset, record.value or b"")
    if record.value is None:
        shown.payload = None
    if record.key is not None:
        shown.key = _text_of(record.key)
    if record.headers:
        shown.headers = [
            (name, None if value is None else _text_of(value)) for name, value in record.headers
        ]
    shown.timestamp = record.timestamp
    return shown


def record_of(shown: RecordMessage) -> NewRecord:
    """Convert the result of `record_message` back to a record, to append it elsewhere."""
    payload = None if shown.payload is None else payload_bytes(shown.payload, shown.encoding)
    return MessageFields(
        None if shown.key is UNSET else shown.key,
        [] if shown.headers is UNSET else shown.headers,
        None if shown.timestamp is UNSET else shown.timestamp,
    ).record(payload)


def _text_of(data: bytes) -> Text:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Base64(b64encode(data).decode())


def _bytes_of(text: Text | None) -> bytes | None:
    if isinstance(text, Base64):
        return payload_bytes(text.base64, BASE64)
    return None if text is None else text.encode()


def payload_bytes(payload: str, encoding: str | UnsetType | None = UNSET) -> bytes:
    """Decode the payload of a message."""
    if encoding is UNSET or encoding is None:
        return payload.encode()
    if encoding != BASE64:
        raise InvalidRequest(
            f"unknown encoding {encoding!r}: leave it out for text, or use {BASE64!r}"
        )
    try:
        return b64decode(payload, validate=True)
    except (Error, ValueError):
        raise InvalidRequest("the payload is not valid base64") from None
