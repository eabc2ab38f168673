"""Encode what a producer sends: records, and the numbers by which the broker stores a batch once.

The broker refuses a batch while it does not have the one before it, so that a retried batch is not
overtaken. A batch that is refused for good, or whose outcome is unknown, is not sent again: the
broker would wait for its number forever. The following batches get a new id, and the broker accepts
any first number of an id that it does not know.
"""

import asyncio
import os
from collections.abc import Sequence
from datetime import datetime
from typing import TypedDict

from penstock.errors import InvalidRequest
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


BYTES = (bytes, bytearray, memoryview)
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
    """Return the size of a record in bytes. Raises InvalidRequest for a field of a wrong type:
    later, it would fail the whole batch.
    """
    if isinstance(record, BYTES):
        return len(record)
    if not isinstance(record, NewRecord):
        raise _wrong("a payload", record)
    size = 0
    for name, text in record.headers:
        if not isinstance(name, str):
            raise InvalidRequest(f"the name of a header is text, not {type(name).__name__}")
        size += len(name) + _size("the value of a header", text)
    at = record.timestamp
    if at is not None and not (isinstance(at, int) and abs(at) < 1 << 63):
        raise InvalidRequest(f"a timestamp is a time or milliseconds since 1970, not {at!r}")
    return size + _size("a payload", record.value) + _size("a key", record.key)


def _size(what: str, part: Bytes | None) -> int:
    if part is None:
        return 0
    if not isinstance(part, BYTES):
        raise _wrong(what, part)
    return len(part)


def _wrong(what: str, part: object) -> InvalidRequest:
    return InvalidRequest(f"{what} is bytes, not {type(part).__name__}: encode it first")


def produce_frame(
    label: str, records: Sequence[Outgoing], producer: tuple[bytes, int] | None
) -> list[Bytes]:
    """Return a PRODUCE_BATCH for bare payloads, otherwise a PRODUCE_RECORDS."""
    payloads = [one for one in records if not isinstance(one, NewRecord)]
    if len(payloads) == len(records):
        return frames.produce_batch(label, payloads, producer)
    whole = [one if isinstance(one, NewRecord) else NewRecord(one) for one in records]
    return frames.produce_records(label, whole, producer)


class BatchNumbers:
    """The id of a producer and the numbers of its batches for one partition."""

    __slots__ = ("_following", "id", "turn")

    def __init__(self) -> None:
        self.id = os.urandom(16)
        self._following = 0
        self.turn = asyncio.Lock()  # for a producer that sends one batch at a time

    def take(self) -> int:
        """Return the number of the next batch."""
        self._following += 1
        return self._following - 1

    def renew_id(self) -> None:
        """Start again under a new id: a batch under the current one is not sent any more."""
        self.id = os.urandom(16)
