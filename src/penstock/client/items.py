"""Messages and acks as the HTTP API writes them: what push, the buffer and transactions share."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, TypedDict

from penstock.client.messages import Address, Received
from penstock.errors import InvalidRequest
from penstock.protocol.headers import check as check_headers
from penstock.protocol.ids import uuid7
from penstock.protocol.names import DEFAULT_PARTITION
from penstock.protocol.payload import encode_payload

Item = dict[str, Any]


class MessageOptions(TypedDict, total=False):
    """The options of messages that are pushed together: those of `Client.push_many`."""

    partition: str | None  # default: the address's, or "Default"
    headers: Mapping[str, str] | None  # they travel with the message
    delay: float | timedelta | None  # deliver it after so many seconds, or a timedelta
    deliver_at: datetime | None  # deliver it at this time, which has a time zone


class PushOptions(MessageOptions, total=False):
    """The options of a message: those of `Client.push`."""

    transaction_id: str | None  # a second message with this id is a duplicate; default: a new one
    trace_id: str | None  # a UUID that belongs to the message


class TakeOptions(TypedDict, total=False):
    """The options by which messages are fetched: those of `pop`, `take` and consumers."""

    batch: int  # messages per fetch; default 1
    auto_ack: bool  # acknowledge on delivery: at most once
    partitions: int  # the most partitions to take one batch from; default 1
    subscription_mode: str | None  # where a new group starts: "all" or "new"
    subscription_from: datetime | str | None  # where a new group starts: a time, or "now"


def check_names(options: Mapping[str, Any], known: Any) -> None:
    """Raise `TypeError` for an option that the TypedDict `known` does not have."""
    for name in options.keys() - known.__optional_keys__:
        raise TypeError(f"got an unexpected keyword argument {name!r}")


def new_item(
    address: str | Address,
    payload: Any,
    *,
    partition: str | None = None,
    headers: Mapping[str, str] | None = None,
    delay: float | timedelta | None = None,
    deliver_at: datetime | None = None,
    transaction_id: str | None = None,
    trace_id: str | None = None,
) -> Item:
    where = Address.parse(address)
    if where.group is not None:
        raise InvalidRequest(
            f"a push has no group, and {str(where)!r} names {where.group!r}: "
            f"every group gets what is pushed to {where.queue!r}. "
            "For a queue with an @ in its name use Address(queue=...)"
        )
    if partition and where.partition and partition != where.partition:
        raise InvalidRequest(
            f"the address names the partition {where.partition!r} and the argument {partition!r}"
        )
    item: Item = {
        "queue": where.queue,
        "partition": partition or where.partition or DEFAULT_PARTITION,
        "payload": encode_payload(payload),
        "transactionId": transaction_id or str(uuid7()),
    }
    if not (partition or where.partition):
        item["ordering"] = "none"  # if this push creates the queue
    if trace_id is not None:
        item["traceId"] = trace_id
    if headers:
        check_headers(headers)
        item["headers"] = dict(headers)
    if delay is not None and deliver_at is not None:
        raise InvalidRequest("give delay or deliver_at, not both")
    if deliver_at is not None:
        item["deliverAt"] = _moment(deliver_at)
    elif delay is not None and (seconds := _seconds(delay)):
        # Sent as a delay, which starts when the broker takes the message, by the database's clock.
        item["delay"] = seconds
    return item


def _moment(at: datetime) -> str:
    if not isinstance(at, datetime):
        raise InvalidRequest(f"deliver_at is a datetime, not {at!r}")
    if at.tzinfo is None:
        raise InvalidRequest(
            "deliver_at has no time zone: datetime.now(UTC) + ..., or .astimezone()"
        )
    return at.isoformat()


def _seconds(delay: float | timedelta) -> float:
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise InvalidRequest(f"a delay is 0 or more seconds, not {seconds!r}")
    return seconds


def ack_item(message: Received) -> Item:
    item: Item = {"transactionId": message.transaction_id, "partitionId": message.partition_id}
    if message.lease_id:
        item["leaseId"] = message.lease_id
    return item


def storable(error: str) -> str:
    """Return an exception's text without the characters that a broker cannot store."""
    return error.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
