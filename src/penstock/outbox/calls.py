"""The calls of the outbox as plain values: which SQL function, with which arguments.

Every argument travels as text and is cast in the statement, so that all drivers send the same.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.errors import InvalidRequest
from penstock.protocol.headers import encode
from penstock.protocol.payload import check_payload

Argument = tuple[str, str | None]  # the type in SQL, and the value as text


class LeasedMessage(Protocol):
    """The fields of a message that an acknowledgement needs; `penstock.Message` has them."""

    @property
    def transaction_id(self) -> str: ...
    @property
    def partition_id(self) -> str: ...
    @property
    def lease_id(self) -> str: ...
    @property
    def consumer_group(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Call:
    function: str
    arguments: tuple[Argument, ...]


class Extras(NamedTuple):
    """What most messages do without."""

    headers: Mapping[str, str] | None
    delay: float | None
    deliver_at: datetime | None
    trace_id: str | None


def push(
    queue: str, payload: Any, partition: str, transaction_id: str | None, extras: Extras
) -> Call:
    if extras.delay is not None and extras.deliver_at is not None:
        raise InvalidRequest("give delay or deliver_at, not both")
    if extras.deliver_at is not None and extras.deliver_at.tzinfo is None:
        raise InvalidRequest("deliver_at needs a time zone, such as datetime.now(UTC) has")
    return Call(
        "outbox_push",
        (
            ("text", queue),
            ("json", _json(payload)),
            ("text", partition),
            ("text", transaction_id),
            ("jsonb", _headers(extras.headers)),
            ("double precision", None if extras.delay is None else repr(float(extras.delay))),
            ("timestamptz", extras.deliver_at.isoformat() if extras.deliver_at else None),
            ("uuid", extras.trace_id),
        ),
    )


def push_many(
    queue: str, payloads: Iterable[Any], partition: str, headers: Mapping[str, str] | None
) -> Call:
    array = f"[{','.join(map(_json, payloads))}]"
    return Call(
        "outbox_push_many",
        (("text", queue), ("json", array), ("text", partition), ("jsonb", _headers(headers))),
    )


def ack(message: LeasedMessage, status: str, error: str | None = None) -> Call:
    if not message.lease_id:
        raise InvalidRequest("this message has no lease: it was taken with auto_ack")
    return Call(
        "outbox_ack",
        (
            ("uuid", message.partition_id),
            ("text", message.transaction_id),
            ("uuid", message.lease_id),
            ("text", message.consumer_group),
            ("text", status),
            ("text", error),
        ),
    )


def staged(message: LeasedMessage) -> None:
    """Tell whoever extends the message's lease that it may end."""
    notify = getattr(message, "answered_elsewhere", None)
    if notify is not None:
        notify()


def _json(payload: Any) -> str:
    check_payload(payload)
    return msgspec.json.encode(payload).decode()


def _headers(headers: Mapping[str, str] | None) -> str | None:
    encoded = encode(headers) if headers else None
    return None if encoded is None else encoded.decode()
