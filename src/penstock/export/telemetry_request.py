"""A request of a telemetry exporter as one record of a send queue.

    {"signal":"traces","type":"application/x-protobuf","encoding":"gzip"}\\n
    the body of the request, byte for byte as it arrived

`signal` is traces, metrics or logs (OTLP/HTTP), or samples (Prometheus remote write). `type` is the
Content-Type, `encoding` the Content-Encoding ("": none). Only the outermost level of the body is
read, to refuse invalid requests, and to split a request that is too large for the backend. The rest
concerns only the exporter and the backend.
"""

from typing import Any

import msgspec

from penstock.errors import InvalidRequest
from penstock.export.payload import COMPRESSIONS, compress, decompress
from penstock.export.protobuf import NotProtobuf, fields

JSON, PROTOBUF = "application/json", "application/x-protobuf"
SIGNALS = ("traces", "metrics", "logs")  # of OTLP
SAMPLES = "samples"  # of remote write

_lists = msgspec.json.Decoder(dict[str, list[msgspec.Raw]])
_any_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


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
        """Split the request between elements of its outermost lists; [] if that is not possible."""
        coding = COMPRESSIONS[self.encoding or "none"]
        plain = decompress(self.body, coding)
        bodies = _json_halves(plain) if self.is_json else _protobuf_halves(plain)
        return [msgspec.structs.replace(self, body=compress(half, coding)) for half in bodies]


def media_type(content_type: str) -> str:
    """Return `application/json` for `Application/JSON; charset=utf-8`."""
    return content_type.partition(";")[0].strip().lower()


def _protobuf_halves(plain: bytes) -> list[bytes]:
    ends = [field.end for field in fields(plain)]
    if len(ends) < 2:
        return []
    # By bytes, not by number: one element may be most of the request.
    middle = min(ends[:-1], key=lambda end: abs(end - len(plain) // 2))
    return [plain[:middle], plain[middle:]]


def _json_halves(plain: bytes) -> list[bytes]:
    try:
        lists = _lists.decode(plain)
    except msgspec.DecodeError:
        return []
    elements = [(name, element) for name, values in lists.items() for element in values]
    if len(elements) < 2:
        return []
    middle = len(elements) // 2
    return [_json_object(elements[:middle]), _json_object(elements[middle:])]


def _json_object(elements: list[tuple[str, msgspec.Raw]]) -> bytes:
    lists: dict[str, list[Any]] = {}
    for name, element in elements:
        lists.setdefault(name, []).append(element)
    return msgspec.json.encode(lists)
