"""A request of a telemetry exporter as one record of a send queue.

    {"signal":"traces","type":"application/x-protobuf","encoding":"gzip"}\\n
    the body of the request, byte for byte as it arrived

`signal` is traces, metrics or logs (OTLP/HTTP), or samples (Prometheus remote write). `type` is the
Content-Type, `encoding` the Content-Encoding ("": none). Of a request that arrives, only the
outermost level is read, to refuse an invalid one. A request that is too large for the backend is
split between its resources or series. If it has one resource, as the requests of an SDK, it is
split between the scopes, or between the spans, metrics or log records of its only scope.
"""

from itertools import accumulate
from typing import Any

import msgspec

from penstock.errors import InvalidRequest
from penstock.export.payload import COMPRESSIONS, compress, decompress
from penstock.export.protobuf import NotProtobuf, bytes_field, fields

JSON, PROTOBUF = "application/json", "application/x-protobuf"
SIGNALS = ("traces", "metrics", "logs")  # of OTLP
SAMPLES = "samples"  # of remote write
# The lists in a resource and in a scope. In protobuf, both have the field number 2.
_INNER_LISTS = {
    "traces": ("scopeSpans", "spans"),
    "metrics": ("scopeMetrics", "metrics"),
    "logs": ("scopeLogs", "logRecords"),
    SAMPLES: (),
}
_INNER_NUMBER = 2

_lists = msgspec.json.Decoder(dict[str, list[msgspec.Raw]])
_any_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_values = msgspec.json.Decoder(list[msgspec.Raw])


class TelemetryRequest(msgspec.Struct, frozen=True):
    signal: str
    type: str
    encoding: str
    body: bytes

    def record(self) -> bytes:
        head = {"signal": self.signal, "type": self.type, "encoding": self.encoding}
        return msgspec.json.encode(head) + b"\n" + self.body

    @classmethod
    def from_record(cls, record: bytes) -> "TelemetryRequest":
        head, _, body = record.partition(b"\n")
        try:
            return msgspec.convert({**msgspec.json.decode(head), "body": body}, cls)
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
            raise InvalidRequest(f"the record is not a telemetry request: {error}") from None

    @property
    def is_json(self) -> bool:
        return media_type(self.type) == JSON

    def is_empty(self, plain: bytes) -> bool:
        """Check `plain`, the body without its encoding. Return whether it is empty. Raises
        InvalidRequest.
        """
        try:
            if self.is_json:
                return not _any_object.decode(plain)
            return not list(fields(plain))
        except NotProtobuf as error:
            raise InvalidRequest(f"The body is not protobuf: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"The body is not a JSON object: {error}") from None

    def halves(self) -> list["TelemetryRequest"]:
        """Split the request in two; [] if that is not possible."""
        coding = COMPRESSIONS[self.encoding or "none"]
        plain = decompress(self.body, coding)
        names = _INNER_LISTS[self.signal]
        try:
            bodies = (
                _json_halves(plain, names) if self.is_json else _protobuf_halves(plain, len(names))
            )
        except (NotProtobuf, msgspec.DecodeError, UnicodeDecodeError):
            return []  # further inside it is not what it seemed to be
        return [msgspec.structs.replace(self, body=compress(half, coding)) for half in bodies]


def media_type(content_type: str) -> str:
    """Return `application/json` for `Application/JSON; charset=utf-8`."""
    return content_type.partition(";")[0].strip().lower()


def _protobuf_halves(message: bytes, levels: int, number: int | None = None) -> list[bytes]:
    """Split a message between the elements of the field `number` (None: all of its fields), or
    inside its only element, which has so many levels. Both halves get its other fields.
    """
    elements, others = [], b""
    for field in fields(message):
        if number in (None, field.number):
            elements.append(field)
        else:
            others += message[field.start : field.end]
    encoded = [message[one.start : one.end] for one in elements]
    if len(encoded) > 1:
        # By bytes, not by number: one element may be most of the request.
        ends = list(accumulate(map(len, encoded)))
        middle = 1 + min(range(len(ends) - 1), key=lambda at: abs(ends[at] - ends[-1] // 2))
        halves = [b"".join(encoded[:middle]), b"".join(encoded[middle:])]
    elif elements and levels and isinstance(elements[0].value, bytes):
        inner = _protobuf_halves(elements[0].value, levels - 1, _INNER_NUMBER)
        halves = [bytes_field(elements[0].number, half) for half in inner]
    else:
        return []
    return [half + others for half in halves]


def _json_halves(plain: bytes, names: tuple[str, ...]) -> list[bytes]:
    lists = _lists.decode(plain)
    elements = [(name, element) for name, values in lists.items() for element in values]
    if len(elements) == 1:
        name, element = elements[0]
        return [_json_object([(name, half)]) for half in _object_halves(element, names)]
    middle = len(elements) // 2
    return [_json_object(elements[:middle]), _json_object(elements[middle:])] if middle else []


def _object_halves(element: msgspec.Raw, names: tuple[str, ...]) -> list[msgspec.Raw]:
    """Split an object between the elements of its list `names[0]`, or inside the only one."""
    if not names:
        return []
    name, *inner = names
    members = _any_object.decode(element)
    values = _values.decode(members.get(name, b"[]"))
    middle = len(values) // 2
    parts = [values[:middle], values[middle:]] if middle else []
    if len(values) == 1:
        parts = [[half] for half in _object_halves(values[0], tuple(inner))]
    return [msgspec.Raw(msgspec.json.encode({**members, name: part})) for part in parts]


def _json_object(elements: list[tuple[str, msgspec.Raw]]) -> bytes:
    lists: dict[str, list[Any]] = {}
    for name, element in elements:
        lists.setdefault(name, []).append(element)
    return msgspec.json.encode(lists)
