"""Kafka's requests as objects, and plain values as answers.

The schemas are those of `kio`, which generates them from Kafka's own: a class per message and
version. Reading and writing is done here, by what the schemas say:

- kio's native reader reserves memory for as many items as an array claims to have: 42 bytes that
  claim two thousand million of them abort the process. Here an array has at most as many items as
  bytes follow.
- kio's writer wants an object of the version's own class, with `timedelta` and `datetime` in it.
  Here an answer is a mapping: a handler names the fields of every version once, and what a version
  does not have is left out. That takes half of the time.

A request is a namespace; times are milliseconds. The records of a batch stay bytes where they lie.
No served version has a UUID.

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

from kio.index import load_request_schema, load_response_schema

from penstock.io.fs import Bytes
from penstock.protocol.status import Malformed

API_VERSIONS = 18
HEAD = Struct(">hhi")
LENGTH = Struct(">i")
LARGE = 4096  # a value of so many bytes is sent from where it lies

Values = Mapping[str, Any]
Writer = Callable[[list[Bytes], Any], None]
Reader = Callable[[memoryview, int], tuple[Any, int]]  # the value, and where it ends


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
_TIMES = ("timedelta_i32", "timedelta_i64", "datetime_i64")
_DEFAULTS = {"datetime_i64": -1, "string": "", "bytes": b"", "records": b""}


class KafkaHead(NamedTuple):
    """How a request begins."""

    key: int
    version: int
    correlation: int

    @classmethod
    def parse(cls, frame: Bytes) -> "KafkaHead":
        try:
            return cls(*HEAD.unpack_from(frame))
        except struct.error:
            raise Malformed("a request is shorter than its header") from None


def read_request(head: KafkaHead, frame: memoryview) -> tuple[str, Any]:
    """Return the client's id, and the request with its fields as attributes."""
    has_tags, read = _request_reader(head.key, head.version)
    try:
        client, at = _read_client(frame, HEAD.size)
        if has_tags:
            at = _read_tags(frame, at, {}, {})
        # What follows is ignored, as by Kafka: librdkafka asks for all topics with a byte more.
        body, _ = read(frame, at)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise Malformed(f"a request cannot be read: {error}") from None
    return client or "", body


@cache
def _request_reader(key: int, version: int) -> tuple[bool, Reader]:
    """Return whether the header has tags, and the reader of the body."""
    schema: Any = load_request_schema(key, version)
    return schema.__header_schema__.__flexible__, _reader(schema)


class SchemaField(NamedTuple):
    """A field of a message, as `kio` describes it."""

    name: str
    kind: Any  # Kafka's name of the type, or the class of a field with fields of its own
    array: bool
    optional: bool  # may be null
    tag: int | None
    default: Any


@cache
def _fields(schema: Any) -> list[SchemaField]:
    fields = []
    for field in dataclasses.fields(schema):
        python: Any = field.type
        optional = array = False
        if isinstance(python, types.UnionType):
            optional = True
            (python,) = (one for one in get_args(python) if one is not types.NoneType)
        if get_origin(python) is tuple:
            array, python = True, get_args(python)[0]
        kind = field.metadata.get("kafka_type", python)
        if kind in _TIMES or field.default is dataclasses.MISSING:
            null = optional and kind == "string"
            default = () if array else None if null else _DEFAULTS.get(kind, 0)
        else:
            default = field.default
        tag = field.metadata.get("tag")
        fields.append(SchemaField(field.name, kind, array, optional, tag, default))
    return fields


@cache
def _reader(schema: Any) -> Reader:
    named: list[tuple[str, Reader]] = []
    tagged: dict[int, tuple[str, Reader]] = {}
    defaults: dict[str, Any] = {}
    flexible: bool = schema.__flexible__
    for field in _fields(schema):
        # That a text may be null is checked where it matters: few are used.
        primitive = isinstance(field.kind, str)
        read = _primitive_reader(field.kind, flexible) if primitive else _reader(field.kind)
        if field.array:
            read = _array_reader(read, flexible)
        if field.tag is None:
            named.append((field.name, read if field.optional else _required(read)))
        else:
            tagged[field.tag] = field.name, read
            defaults[field.name] = field.default

    def read_fields(data: memoryview, at: int) -> tuple[Any, int]:
        values = dict(defaults)
        for name, read in named:
            values[name], at = read(data, at)
        if flexible:
            at = _read_tags(data, at, tagged, values)
        return types.SimpleNamespace(**values), at

    return read_fields


def _required(read: Reader) -> Reader:
    def read_value(data: memoryview, at: int) -> tuple[Any, int]:
        value, at = read(data, at)
        if value is None:
            raise IndexError("a field is null")
        return value, at

    return read_value


def _read_tags(
    data: memoryview, at: int, tagged: Mapping[int, tuple[str, Reader]], values: dict[str, Any]
) -> int:
    count, at = _read_unsigned(data, at)
    for _ in range(count):
        tag, at = _read_unsigned(data, at)
        size, at = _read_unsigned(data, at)
        if at + size > len(data):
            raise IndexError("a tagged field ends behind the request")
        if tag in tagged:
            name, read = tagged[tag]
            values[name], _ = read(data[: at + size], at)
        at += size
    return at


def _array_reader(read: Reader, flexible: bool) -> Reader:
    def read_items(data: memoryview, at: int) -> tuple[Any, int]:
        count, at = _read_count(data, at) if flexible else _read_length(data, at)
        if count < 0:
            return None, at
        if count > len(data) - at:
            raise IndexError(f"an array of {count} items ends behind the request")
        items = []
        for _ in range(count):
            item, at = read(data, at)
            items.append(item)
        return items, at

    return read_items


@cache
def _primitive_reader(kafka_type: str, flexible: bool) -> Reader:
    if kafka_type in _NUMBERS:
        number = Struct(_NUMBERS[kafka_type])
        return lambda data, at: (number.unpack_from(data, at)[0], at + number.size)
    text = kafka_type == "string"
    size = _read_count if flexible else _read_short if text else _read_length

    def read_bytes(data: memoryview, at: int) -> tuple[Any, int]:
        length, at = size(data, at)
        if length < 0:
            return None, at
        if length > len(data) - at:
            raise IndexError(f"a value of {length} bytes ends behind the request")
        content = data[at : at + length]
        if kafka_type != "records":
            return str(content, "utf-8") if text else bytes(content), at + length
        return content, at + length

    return read_bytes


def _read_short(data: memoryview, at: int) -> tuple[int, int]:
    return _SHORT.unpack_from(data, at)[0], at + _SHORT.size


def _read_length(data: memoryview, at: int) -> tuple[int, int]:
    return LENGTH.unpack_from(data, at)[0], at + LENGTH.size


def _read_count(data: memoryview, at: int) -> tuple[int, int]:
    value, at = _read_unsigned(data, at)
    return value - 1, at


def _read_unsigned(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 28:
            raise IndexError("a number has more than five bytes")


_read_client = _primitive_reader("string", False)  # never compact


def encode_answer(head: KafkaHead, values: Values) -> list[Bytes]:
    """Encode the answer to a request as a frame."""
    has_tags, write = _answer_writer(head.key, head.version)
    parts: list[Bytes] = [LENGTH.pack(head.correlation)]
    if has_tags:
        parts.append(b"\0")
    write(parts, values)
    return _pieces(parts)


def _pieces(parts: list[Bytes]) -> list[Bytes]:
    """Return large values by themselves and the others joined, with the length of all first."""
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
def _answer_writer(key: int, version: int) -> tuple[bool, Writer]:
    """Return whether the header has tags, and the writer of the body."""
    schema: Any = load_response_schema(key, version)
    return schema.__flexible__ and key != API_VERSIONS, _writer(schema)


@cache
def _writer(schema: Any) -> Writer:
    """Return a writer of mappings with this schema; missing fields get their defaults."""
    named: list[tuple[str, Any, Writer]] = []
    flexible: bool = schema.__flexible__
    for field in _fields(schema):
        if field.tag is not None:
            continue  # all of them may be left out
        if isinstance(field.kind, str):
            write = _primitive(field.kind, flexible, field.optional and not field.array)
        else:
            write = _writer(field.kind)
        if field.array:
            write = _array(write, flexible)
        named.append((field.name, field.default, write))

    def write_fields(out: list[Bytes], values: Values) -> None:
        for name, default, write in named:
            write(out, values.get(name, default))
        if flexible:
            out.append(b"\0")

    return write_fields


def _array(write: Writer, flexible: bool) -> Writer:
    def write_items(out: list[Bytes], items: Any) -> None:
        if items is None:
            out.append(b"\0" if flexible else b"\xff\xff\xff\xff")
            return
        out.append(_unsigned(len(items) + 1) if flexible else LENGTH.pack(len(items)))
        for item in items:
            write(out, item)

    return write_items


@cache
def _primitive(kafka_type: str, flexible: bool, optional: bool) -> Writer:
    if kafka_type in _NUMBERS:
        pack = Struct(_NUMBERS[kafka_type]).pack
        return lambda out, value: out.append(pack(value))
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
