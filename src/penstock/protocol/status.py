"""One table from what went wrong to what each protocol says about it, and back.

A row is looked up by the error's class, then its bases, so the classes that users of the package
derive need no row; ours all have one. What is not in the table is a bug or a broken machine: HTTP
500, TCP INTERNAL, and a text that says nothing about our insides.

| TCP status byte   | value |
|-------------------|-------|
| SUCCESS           | 0x00  |
| TOPIC_NOT_FOUND   | 0x01  |
| INVALID_OFFSET    | 0x02  |
| SERIALIZATION     | 0x03  |
| PRODUCE_FAILED    | 0x04  |
| INTERNAL          | 0x05  |
| INVALID_REQUEST   | 0x06  |
| PAYLOAD_TOO_LARGE | 0x07  |
| UNKNOWN_COMMAND   | 0x08  |
| UNAUTHORIZED      | 0x09  |
| FORBIDDEN         | 0x0A  |

A status stands for several classes, so the class and its fields travel beside it as `Details`, the
same JSON in every protocol: members of the object beside `error` (HTTP) or `error_message`
(WebSocket), and over TCP an object behind the message, where aiq's clients do not look.
"""

from enum import IntEnum
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

import penstock.errors as errors
from penstock.errors import Damaged, InvalidRequest, PenstockError, Unavailable


class TcpStatus(IntEnum):
    SUCCESS = 0
    TOPIC_NOT_FOUND = 1
    INVALID_OFFSET = 2
    SERIALIZATION = 3
    PRODUCE_FAILED = 4
    INTERNAL = 5
    INVALID_REQUEST = 6
    PAYLOAD_TOO_LARGE = 7
    UNKNOWN_COMMAND = 8
    UNAUTHORIZED = 9
    FORBIDDEN = 10


# what msgspec raises for bytes that are no JSON, or JSON of another shape
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Malformed(InvalidRequest):
    """A TCP body that does not parse. The frame's borders are known, so the connection stays
    usable.
    """


class UnknownCommand(InvalidRequest):
    """A TCP command byte that this server does not have."""


class Status(NamedTuple):
    http: int
    tcp: TcpStatus


INTERNAL = Status(500, TcpStatus.INTERNAL)

# Of several classes with one status the first is what the status means by itself.
TABLE: dict[type[BaseException], Status] = {
    errors.InvalidRequest: Status(400, TcpStatus.INVALID_REQUEST),
    errors.ConfigError: Status(400, TcpStatus.INVALID_REQUEST),
    errors.Unauthorized: Status(401, TcpStatus.UNAUTHORIZED),
    errors.Forbidden: Status(403, TcpStatus.FORBIDDEN),
    errors.NotFound: Status(404, TcpStatus.TOPIC_NOT_FOUND),
    errors.InvalidOffset: Status(400, TcpStatus.INVALID_OFFSET),
    errors.Conflict: Status(409, TcpStatus.INVALID_REQUEST),
    errors.TooLarge: Status(413, TcpStatus.PAYLOAD_TOO_LARGE),
    errors.Full: Status(429, TcpStatus.PRODUCE_FAILED),
    errors.Unavailable: Status(503, TcpStatus.INTERNAL),
    errors.ConnectionLost: Status(503, TcpStatus.INTERNAL),
    errors.Busy: Status(503, TcpStatus.INTERNAL),
    errors.MissingKey: Status(503, TcpStatus.INTERNAL),
    errors.StorageFull: Status(507, TcpStatus.PRODUCE_FAILED),
    errors.StorageFailed: Status(503, TcpStatus.PRODUCE_FAILED),
    errors.StorageError: Status(503, TcpStatus.PRODUCE_FAILED),
    errors.Damaged: INTERNAL,
    errors.Locked: Status(503, TcpStatus.INTERNAL),
    errors.PenstockError: INTERNAL,
    Malformed: Status(400, TcpStatus.SERIALIZATION),
    UnknownCommand: Status(400, TcpStatus.UNKNOWN_COMMAND),
    msgspec.DecodeError: Status(400, TcpStatus.SERIALIZATION),
}
REASONS = {status.value: status.phrase for status in HTTPStatus}

# Worth asking again, until the caller's time is over.
MAY_PASS = (errors.Unavailable, errors.StorageError, errors.Locked)

# The classes that cross the wire, by name. A narrower one crosses as its nearest base among them.
CLASSES: dict[str, type[PenstockError]] = {
    kind.__name__: kind
    for kind in TABLE
    if issubclass(kind, PenstockError) and kind.__module__ == errors.__name__
}
_BY_HTTP: dict[int, type[PenstockError]] = {
    TABLE[kind].http: kind for kind in reversed(CLASSES.values())
}
_BY_TCP: dict[int, type[PenstockError]] = {
    **{TABLE[kind].tcp: kind for kind in reversed(CLASSES.values())},
    TcpStatus.SERIALIZATION: InvalidRequest,
    TcpStatus.UNKNOWN_COMMAND: InvalidRequest,
}
# Said without a class by a broker that does not know what went wrong itself, or by a proxy.
_BY_HTTP[500] = _BY_TCP[TcpStatus.PRODUCE_FAILED] = Unavailable
_MAY_PASS_4XX = (408, 425)


class Details(msgspec.Struct, rename="camel"):
    """What an answer says about an error beside its text: the class, and the class's fields."""

    code: str | UnsetType = UNSET
    retry_after: float | UnsetType = UNSET
    resume: int | UnsetType = UNSET


class _HttpBody(Details):
    error: str = ""


_encode = msgspec.json.Encoder().encode
_read_http = msgspec.json.Decoder(_HttpBody).decode
_read_details = msgspec.json.Decoder(Details).decode


def status_of(error: BaseException) -> Status:
    for kind in type(error).__mro__:
        if kind in TABLE:
            return TABLE[kind]
    return INTERNAL


def is_expected(error: BaseException) -> bool:
    """Whether the error's text was written for a client; anything else is logged and answered
    without details.
    """
    return isinstance(error, PenstockError | msgspec.DecodeError)


def details_of(error: BaseException) -> Details:
    """What our clients need to raise the same error again; empty for an unexpected one."""
    if isinstance(error, msgspec.DecodeError):
        return Details(InvalidRequest.__name__)
    mro = type(error).__mro__
    code = next((kind.__name__ for kind in mro if CLASSES.get(kind.__name__) is kind), UNSET)
    details = Details(code)
    if isinstance(error, Unavailable):
        details.retry_after = error.retry_after
    if isinstance(error, Damaged) and error.resume is not None:
        details.resume = error.resume
    return details


def tcp_details(error: BaseException, status: TcpStatus) -> bytes:
    """The bytes behind the message; none when `status` says it all."""
    details = details_of(error)
    plain = _BY_TCP.get(status)
    return b"" if plain is not None and details == Details(plain.__name__) else _encode(details)


def error_from(
    text: str, details: Details, otherwise: type[PenstockError] = Unavailable
) -> PenstockError:
    """The error that an answer stands for; of class `otherwise` when the answer names none that we
    have.
    """
    error = CLASSES.get(details.code or "", otherwise)(text)
    if isinstance(error, Unavailable) and details.retry_after is not UNSET:
        error.retry_after = details.retry_after
    if isinstance(error, Damaged) and details.resume is not UNSET:
        error.resume = details.resume
    return error


def error_from_http(status: int, body: bytes) -> PenstockError:
    """The error that an HTTP answer stands for, a broker's or that of a proxy before it."""
    try:
        answer = _read_http(body)
    except NOT_JSON:
        answer = _HttpBody()
    text = answer.error or body[:200].decode("utf-8", "replace") or f"HTTP status {status}"
    refused = 400 <= status < 500 and status not in _MAY_PASS_4XX
    return error_from(
        text, answer, _BY_HTTP.get(status, InvalidRequest if refused else Unavailable)
    )


def error_from_tcp(status: int, text: str, details: bytes | memoryview) -> PenstockError:
    """The error that a TCP answer stands for; `details` is what came behind its message."""
    try:
        said = _read_details(details) if details else Details()
    except NOT_JSON:
        said = Details()
    return error_from(text, said, _BY_TCP.get(status, Unavailable))
