"""Records as JSON, the same over HTTP, SSE and WebSocket: `{"offset": 7, "topic": "orders",
"payload": "text"}`.

A payload that is not valid UTF-8 travels as base64 and says so: `"payload": "/w==", "encoding":
"base64"`, both ways.
"""

from base64 import b64decode, b64encode
from binascii import Error

from msgspec import UNSET, Struct, UnsetType

from penstock.errors import InvalidRequest

BASE64 = "base64"


class Message(Struct, gc=False):
    offset: int
    topic: str
    payload: str
    encoding: str | UnsetType = UNSET


def message(topic: str, offset: int, payload: bytes | memoryview) -> Message:
    try:
        return Message(offset, topic, str(payload, "utf-8"))
    except UnicodeDecodeError:
        return Message(offset, topic, b64encode(payload).decode(), BASE64)


def payload_bytes(payload: str, encoding: str | UnsetType | None = UNSET) -> bytes:
    """The bytes a client means."""
    if encoding is UNSET or encoding is None:
        return payload.encode()
    if encoding != BASE64:
        raise InvalidRequest(
            f"unknown encoding {encoding!r}: leave it out for text, or use {BASE64!r}"
        )
    try:
        return b64decode(payload, validate=True)
    except (Error, ValueError):
        raise InvalidRequest("the payload is not valid base64") from None
