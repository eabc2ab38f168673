"""One table from what went wrong to what each protocol says about it.

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
"""

from enum import IntEnum
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from penstock import errors


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


class Status(NamedTuple):
    http: int
    tcp: TcpStatus


INTERNAL = Status(500, TcpStatus.INTERNAL)

TABLE: dict[type[BaseException], Status] = {
    errors.ConfigError: Status(400, TcpStatus.INVALID_REQUEST),
    errors.InvalidRequest: Status(400, TcpStatus.INVALID_REQUEST),
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
    errors.Damaged: Status(500, TcpStatus.INTERNAL),
    errors.Locked: Status(503, TcpStatus.INTERNAL),
    errors.PenstockError: INTERNAL,
    msgspec.DecodeError: Status(400, TcpStatus.SERIALIZATION),
}

REASONS = {status.value: status.phrase for status in HTTPStatus}


def status_of(error: BaseException) -> Status:
    for kind in type(error).__mro__:
        if kind in TABLE:
            return TABLE[kind]
    return INTERNAL


def is_expected(error: BaseException) -> bool:
    """Whether the error's text was written for a client; anything else is logged and answered
    without details.
    """
    return isinstance(error, errors.PenstockError | msgspec.DecodeError)


# The class that a TCP status says by itself. Other errors with that status put their class before
# the message.
PLAIN: dict[TcpStatus, type[errors.PenstockError]] = {
    TcpStatus.TOPIC_NOT_FOUND: errors.NotFound,
    TcpStatus.INVALID_OFFSET: errors.InvalidOffset,
    TcpStatus.SERIALIZATION: errors.InvalidRequest,
    TcpStatus.PRODUCE_FAILED: errors.Unavailable,
    TcpStatus.INTERNAL: errors.Unavailable,
    TcpStatus.INVALID_REQUEST: errors.InvalidRequest,
    TcpStatus.PAYLOAD_TOO_LARGE: errors.TooLarge,
    TcpStatus.UNKNOWN_COMMAND: errors.InvalidRequest,
    TcpStatus.UNAUTHORIZED: errors.Unauthorized,
    TcpStatus.FORBIDDEN: errors.Forbidden,
}
NAMES = {kind.__name__ for kind in TABLE if kind.__module__ == errors.__name__} - {"PenstockError"}


def tcp_message(error: BaseException, status: TcpStatus) -> str:
    """The text of an answer, with the error's class before it when the status does not tell that."""
    kind = next((kind for kind in type(error).__mro__ if kind.__name__ in NAMES), None)
    plain = kind is None or kind is PLAIN.get(status) or status == TcpStatus.UNKNOWN_COMMAND
    return str(error) if plain or kind is None else f"{kind.__name__}: {error}"


def read_message(text: str) -> tuple[str, str]:
    """The name of the class (empty: as the status says) and the message."""
    name, colon, rest = text.partition(": ")
    return (name, rest) if colon and name in NAMES else ("", text)
