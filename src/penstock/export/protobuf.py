"""Read the top-level fields of a protobuf message.

Telemetry requests are not decoded. The fields are enough to reject bytes that are not protobuf, to
split a request that is too large between two elements of a repeated field, and to read an answer.
"""

from collections.abc import Iterator
from typing import NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_MAX_VARINT_BITS = 64


class NotProtobuf(ValueError):
    """The bytes are not a protobuf message."""


class Field(NamedTuple):
    number: int
    value: int | bytes  # an int for a varint
    start: int  # of the field with its tag, in the message
    end: int


def fields(message: bytes) -> Iterator[Field]:
    """Yield the fields of a message in order. Raises NotProtobuf."""
    at = 0
    while at < len(message):
        start = at
        tag, at = _varint(message, at)
        number, wire_type = tag >> 3, tag & 7
        if number == 0:
            raise NotProtobuf(f"field number 0 at byte {start}")
        if wire_type == VARINT:
            value, end = _varint(message, at)
            yield Field(number, value, start, end)
            at = end
            continue
        if wire_type == BYTES:
            size, at = _varint(message, at)
        elif wire_type in (FIXED64, FIXED32):
            size = 8 if wire_type == FIXED64 else 4
        else:
            raise NotProtobuf(f"unknown wire type {wire_type} at byte {start}")
        end = at + size
        if end > len(message):
            raise NotProtobuf(f"the field at byte {start} exceeds the message")
        yield Field(number, message[at:end], start, end)
        at = end


def bytes_field(number: int, data: bytes) -> bytes:
    """Encode a field of type bytes, string or message."""
    return _encode_varint(number << 3 | BYTES) + _encode_varint(len(data)) + data


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, _MAX_VARINT_BITS, 7):
        if at >= len(message):
            raise NotProtobuf("a number exceeds the message")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise NotProtobuf(f"the number before byte {at} is too long")


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
