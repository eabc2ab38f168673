"""Records on their way to a topic: payloads alone, or with keys, headers and timestamps."""

from collections.abc import Sequence
from datetime import datetime
from typing import TypedDict

from penstock.protocol import frames
from penstock.protocol.frames import Bytes
from penstock.protocol.kafka_batch import Headers, NewRecord


class RecordFields(TypedDict, total=False):
    """The fields of a record besides its payload. Keys, headers and timestamps need a topic with
    the format `kafka`.
    """

    key: bytes | None
    headers: Headers  # pairs of name and value; names may be repeated
    timestamp: datetime | int | None  # or milliseconds since 1970; default: when it is appended
    partition: int | None  # default: as the key's hash says, or one after another


# A payload alone, or a record with a key, headers, a timestamp or no value.
Outgoing = Bytes | NewRecord


def outgoing(payload: Bytes | None, fields: RecordFields) -> Outgoing:
    """Return a payload with its fields, if there are any."""
    timestamp = fields.get("timestamp")
    if isinstance(timestamp, datetime):
        timestamp = round(timestamp.timestamp() * 1000)
    key, headers = fields.get("key"), fields.get("headers", ())
    if payload is None or key is not None or headers or timestamp is not None:
        return NewRecord(payload, key, headers, timestamp)
    return payload


def size_of(record: Outgoing) -> int:
    """Return the size of a record in bytes."""
    if not isinstance(record, NewRecord):
        return len(record)
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.value or b"") + len(record.key or b"") + headers


def produce_frame(
    label: str, records: Sequence[Outgoing], producer: tuple[bytes, int] | None
) -> list[Bytes]:
    """Return a PRODUCE_BATCH for bare payloads, otherwise a PRODUCE_RECORDS."""
    payloads = [one for one in records if not isinstance(one, NewRecord)]
    if len(payloads) == len(records):
        return frames.produce_batch(label, payloads, producer)
    whole = [one if isinstance(one, NewRecord) else NewRecord(one) for one in records]
    return frames.produce_records(label, whole, producer)
