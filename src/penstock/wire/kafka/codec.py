"""Kafka's requests as objects, and plain values as answers.

The schemas are those of `kio`, which generates them from Kafka's own: a class per message and
version. Requests are read by its native reader; the records of a batch stay bytes. Answers are
written here, straight from a mapping: a handler names the fields of every version once, and what a
version does not have is left out. (kio's writer wants an object of the version's own class, with
`timedelta` and `datetime` in it; building and writing an answer to Produce that way takes 14 us,
this takes 5.)

    frame       length i32 | header | body
    header of a request    API key i16 | version i16 | correlation id i32 | client id | (tags)
    header of an answer    correlation id i32 | (tags; never in the answer to ApiVersions)
"""

import dataclasses
import struct
import types
from collections.abc import Callable, Mapping
from functools import cache
from struct import Struct
from typing import Any, NamedTuple, get_args, get_origin
from uuid import UUID

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader
from kio.serial.errors import SerialError

from penstock.io.fs import Bytes
from penstock.protocol.status import Malformed

API_VERSIONS = 18
HEAD = Struct(">hhi")
LENGTH = Struct(">i")
LARGE = 4096  # a value of so many bytes is sent from where it lies

# What kio's reader raises for bytes that are not what they should be: a time that Python cannot
# represent, a number out of its range.
NOT_A_REQUEST = (SerialError, ValueError, OverflowError, TypeError, IndexError, struct.error)

Values = Mapping[str, Any]
Writer = Callable[[list[Bytes], Any], None]


class Head(NamedTuple):
    """How a request begins."""

    key: int
    version: int
    correlation: int

    @classmethod
    def parse(cls, frame: Bytes) -> "Head":
        try:
            return cls(*HEAD.unpack_from(frame))
        except struct.error:
            raise Malformed("a request is shorter than its header") from None


def read_request(head: Head, frame: Bytes) -> tuple[str, Any]:
    """The client's id, and the request as an object of kio."""
    schema: Any = load_request_schema(head.key, head.version)
    try:
        header, size = entity_reader(schema.__header_schema__)(frame, 0)
        body, _ = entity_reader(schema)(frame, size)
    except NOT_A_REQUEST as error:
        raise Malformed(f"a request cannot be read: {error}") from None
    return header.client_id or "", body


def encode_answer(head: Head, values: Values) -> list[Bytes]:
    """The answer to a request, as a frame."""
    schema: Any = load_response_schema(head.key, head.version)
    parts: list[Bytes] = [LENGTH.pack(head.correlation)]
    if schema.__flexible__ and head.key != API_VERSIONS:
        parts.append(b"\0")
    _writer(schema)(parts, values)
    return _pieces(parts)


def _pieces(parts: list[Bytes]) -> list[Bytes]:
    """Large values by themselves, what is between them joined, and the length before all."""
    pieces: list[Bytes] = []
    small: list[Bytes] = [LENGTH.pack(sum(map(len, parts)))]
    for part in parts:
        if len(part) >= LARGE:
            pieces += (b"".join(small), part)
            small = []
        else:
            small.append(part)
    if small:
        pieces.append(b"".join(small))
    return pieces


@cache
def _writer(schema: type[Any]) -> Writer:
    """Writes a mapping as this schema says; fields that it does not name get their defaults."""
    named: list[tuple[str, Any, Writer]] = []
    for field in dataclasses.fields(schema):
        if "tag" in field.metadata:
            continue  # all of them may be left out
        kind, array, optional = _kind(field)
        write = (
            _writer(kind)
            if "kafka_type" not in field.metadata  # it has fields of its own
            else _primitive(
                field.metadata["kafka_type"], schema.__flexible__, optional and not array
            )
        )
        if array:
            write = _array(write, schema.__flexible__)
        named.append((field.name, _default(field, array), write))
    flexible: bool = schema.__flexible__

    def write_fields(out: list[Bytes], values: Values) -> None:
        for name, default, write in named:
            write(out, values.get(name, default))
        if flexible:
            out.append(b"\0")

    return write_fields


def _kind(field: "dataclasses.Field[Any]") -> tuple[Any, bool, bool]:
    """The type of a field's items, whether it is an array, and whether it may be null."""
    kind: Any = field.type
    optional = array = False
    if isinstance(kind, types.UnionType):
        optional = True
        (kind,) = (one for one in get_args(kind) if one is not types.NoneType)
    if get_origin(kind) is tuple:
        array, kind = True, get_args(kind)[0]
    return kind, array, optional


def _default(field: "dataclasses.Field[Any]", array: bool) -> Any:
    kafka_type = field.metadata.get("kafka_type", "")
    if kafka_type.startswith(("timedelta", "datetime")):
        return -1 if kafka_type.startswith("datetime") else 0
    if field.default is not dataclasses.MISSING:
        return field.default
    if array:
        return ()
    return {"string": "", "bytes": b"", "records": b""}.get(kafka_type, 0)


def _array(write: Writer, flexible: bool) -> Writer:
    def write_items(out: list[Bytes], items: Any) -> None:
        if items is None:
            out.append(b"\0" if flexible else b"\xff\xff\xff\xff")
            return
        out.append(_unsigned(len(items) + 1) if flexible else LENGTH.pack(len(items)))
        for item in items:
            write(out, item)

    return write_items


_NUMBERS = {
    "int8": ">b",
    "int16": ">h",
    "error_code": ">h",
    "int32": ">i",
    "timedelta_i32": ">i",
    "int64": ">q",
    "timedelta_i64": ">q",
    "datetime_i64": ">q",
    "bool": ">?",
}
_SHORT = Struct(">h")


@cache
def _primitive(kafka_type: str, flexible: bool, optional: bool) -> Writer:
    if kafka_type in _NUMBERS:
        pack = Struct(_NUMBERS[kafka_type]).pack
        return lambda out, value: out.append(pack(value))
    if kafka_type == "uuid":
        return lambda out, value: out.append(value.bytes if isinstance(value, UUID) else bytes(16))
    text = kafka_type == "string"
    pack = _SHORT.pack if text else LENGTH.pack
    null = b"\0" if flexible else pack(-1)

    def write(out: list[Bytes], value: Any) -> None:
        if value is None:
            if not optional:
                raise TypeError(f"a field of type {kafka_type} cannot be null")
            out.append(null)
            return
        data = value.encode() if text else value
        out.append(_unsigned(len(data) + 1) if flexible else pack(len(data)))
        out.append(data)

    return write


def _unsigned(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
