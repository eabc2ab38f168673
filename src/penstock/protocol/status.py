"""Translate errors to the status codes of each protocol and back, with one table.

A row is looked up by the error's class, then its bases. Each of our classes has a row; derived
classes of users need none. An error outside the table is a bug or a broken machine: it becomes HTTP
500 or TCP INTERNAL, with a text that reveals no internals.

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

A status stands for several classes, so answers also carry the class and its fields as `Details`,
the same JSON in every protocol. HTTP and WebSocket put them beside `error` and `error_message`. TCP
sends an object after the message, where aiq's clients do not read it.
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


# Raised by msgspec for invalid JSON or JSON of another shape.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Malformed(InvalidRequest):
    """A TCP body that does not parse. The connection stays open: framing is still intact."""


class UnknownCommand(InvalidRequest):
    """A TCP command byte that this server does not have."""


class Status(NamedTuple):
    http: int
    tcp: TcpStatus


INTERNAL = Status(500, TcpStatus.INTERNAL)

# A status without a class means the first class with this status.
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

# Errors to retry until the caller's deadline.
MAY_PASS = (errors.Unavailable, errors.StorageError, errors.Locked)

# The classes sent over the wire, by name. Any other class is sent as its nearest base among these.
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
# Sent without a class by a proxy, or by a broker after an unexpected error.
_BY_HTTP[500] = _BY_TCP[TcpStatus.PRODUCE_FAILED] = Unavailable
_MAY_PASS_4XX = (408, 425)


class Details(msgspec.Struct, rename="camel"):
    """The class of an error and its fields, sent along with its text."""

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
    """Return whether the error's text is meant for clients. Others are logged, and their answer has
    no details.
    """
    return isinstance(error, PenstockError | msgspec.DecodeError)


def details_of(error: BaseException) -> Details:
    """Return the details with which clients raise the same error; empty for an unexpected one."""
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
    """Return the bytes after the message; none if `status` is sufficient."""
    details = details_of(error)
    plain = _BY_TCP.get(status)
    return b"" if plain is not None and details == Details(plain.__name__) else _encode(details)


def error_from(
    text: str, details: Details, otherwise: type[PenstockError] = Unavailable
) -> PenstockError:
    """Return the error of an answer, of class `otherwise` if the answer names no known class."""
    error = CLASSES.get(details.code or "", otherwise)(text)
    if isinstance(error, Unavailable) and details.retry_after is not UNSET:
        error.retry_after = details.retry_after
    if isinstance(error, Damaged) and details.resume is not UNSET:
        error.resume = details.resume
    return error


def error_from_http(status: int, body: bytes) -> PenstockError:
    """Return the error of an HTTP answer from a broker or a proxy."""
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
    """Return the error of a TCP answer; `details` are the bytes after its message."""
    try:
        said = _read_details(details) if details else Details()
    except NOT_JSON:
        said = Details()
    return error_from(text, said, _BY_TCP.get(status, Unavailable))
