"""Wrap a message of a queue, or a record of a topic, with its metadata in one JSON record.

    {"transactionId":"...","partition":"...","createdAt":"2026-01-31T12:00:00.123456Z",
     "headers":{...},"payload":...}

Payload and headers are copied as they are. `headers` is present even if it is empty. The send queue
stores this record, so dead letters and batches of every format keep the headers. A destination that
sends each message alone can unwrap it (`http` with `header_prefix`). A queue always does: messages
that a route moves from queue to queue keep their headers, even without `envelope`.

A record with key, headers and timestamp, for destinations that store them (`topic`, `kafka`):

    {"$record":{"offset":7,"topic":"orders","payload":"...","key":"...","headers":[...],
     "timestamp":1767182400000}}

`$record` has the JSON form of a record (`penstock.protocol.records`).
"""

from urllib.parse import quote

import msgspec

from penstock.errors import InvalidRequest
from penstock.protocol import headers
from penstock.protocol.kafka_batch import KafkaRecord, NewRecord
from penstock.protocol.records import RecordMessage as RecordMessage
from penstock.protocol.records import message, record_message, record_of
from penstock.queues.types import Delivered

# As in CloudEvents over HTTP: printable ASCII stays, except space, quote and percent.
_PLAIN = "!#$&'()*+,/:;<=>?@[\\]^`{|}"
_OPENING = b'{"transactionId":'
_RECORD = b'{"$record":'
_text = msgspec.json.Encoder().encode


class MessageEnvelope(msgspec.Struct, rename="camel"):
    transaction_id: str
    partition: str
    payload: msgspec.Raw
    headers: dict[str, str]


class RecordEnvelope(msgspec.Struct):
    record: RecordMessage = msgspec.field(name="$record")


_decode = msgspec.json.Decoder(MessageEnvelope).decode
_decode_record = msgspec.json.Decoder(RecordEnvelope).decode


def wrap(message: Delivered) -> bytes:
    return b'{"transactionId":%b,"partition":%b,"createdAt":%b,"headers":%b,"payload":%b}' % (
        _text(message.transaction_id),
        _text(message.partition),
        _text(message.created_at),
        message.headers or b"{}",
        message.payload,
    )


def with_headers(message: Delivered) -> bytes:
    """Return the payload alone, or the envelope if there are headers or if the payload looks like
    an envelope.
    """
    if message.headers is None and not message.payload.startswith(_OPENING):
        return message.payload
    return wrap(message)


def parts(record: bytes) -> tuple[bytes, bytes | None]:
    """Return payload and headers of a record from `wrap` or `with_headers`. Any other record is a
    payload: it was pushed to the route, or queued by a release without headers.
    """
    envelope = unwrap(record) if record.startswith(_OPENING) else None
    if envelope is None:
        return record, None
    try:
        return bytes(envelope.payload), headers.encode(envelope.headers)
    except InvalidRequest:
        return record, None


def unwrap(record: bytes) -> MessageEnvelope | None:
    """Return the parts of a record; None if it has no envelope, as from older releases."""
    try:
        return _decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def http_headers(envelope: MessageEnvelope, prefix: str) -> list[tuple[str, str]]:
    """Return the headers as those of a request, with values percent-encoded where HTTP needs it."""
    return [(prefix + name, quote(value, safe=_PLAIN)) for name, value in envelope.headers.items()]


def wrap_record(topic: str, record: KafkaRecord) -> bytes:
    return b"%b%b}" % (_RECORD, _text(record_message(topic, record)))


def wrap_payload(topic: str, offset: int, payload: bytes) -> bytes:
    """Return the payload alone, unless it looks like an envelope."""
    if not payload.startswith(_RECORD):
        return payload
    return b"%b%b}" % (_RECORD, _text(message(topic, offset, payload)))


def unwrap_record(record: bytes) -> NewRecord:
    """Return the record in an envelope. Without an envelope, it is a payload."""
    if record.startswith(_RECORD):
        try:
            return record_of(_decode_record(record).record)
        except (msgspec.DecodeError, UnicodeDecodeError, InvalidRequest):
            pass
    return NewRecord(record)
