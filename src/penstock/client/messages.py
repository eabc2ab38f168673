"""The types of the queue client: addresses, messages, and exceptions that a consumer may raise."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import msgspec

from penstock.contract.deliveries import Acked
from penstock.errors import InvalidRequest
from penstock.net.addresses import resource
from penstock.protocol.names import QUEUE_MODE

AckStatus = Literal["completed", "failed", "retry", "dlq"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where messages are pushed to or taken from: `orders`, `orders/c-1`, `orders@billing` or
    `orders/c-1@billing` (queue, partition, consumer group).

    If the name of a queue contains a slash or an at sign, create an `Address` instead of passing a
    string.
    """

    queue: str
    partition: str | None = None
    group: str | None = None

    @classmethod
    def parse(cls, text: "str | Address") -> "Address":
        """Parse an address. Raises `InvalidRequest` if it is malformed."""
        if isinstance(text, Address):
            return text
        place, at, group = text.partition("@")
        queue, slash, partition = place.partition("/")
        if not queue or (slash and not partition) or (at and not group):
            raise InvalidRequest(
                f"not an address: {text!r} (expected queue, queue/partition or queue@group)"
            )
        return cls(queue, partition or None, group or None)

    def __str__(self) -> str:
        partition = f"/{self.partition}" if self.partition else ""
        return f"{self.queue}{partition}{f'@{self.group}' if self.group else ''}"

    @property
    def pop_path(self) -> str:
        """The HTTP path to pop from this address."""
        partition = ("partition", self.partition) if self.partition else ()
        return resource("/api/v1/pop/queue", self.queue, *partition)


class Received(msgspec.Struct, rename="camel", eq=False, kw_only=True, dict=True, weakref=True):
    """A received message. `data` is the payload, decoded on first access; `raw` its JSON text."""

    id: str
    transaction_id: str
    trace_id: str | None = None
    raw: msgspec.Raw = msgspec.field(name="data", default=msgspec.Raw(b"null"))
    headers: dict[str, str] = {}
    producer_sub: str | None = None
    created_at: datetime
    partition: str
    partition_id: str
    lease_id: str = ""  # empty with auto_ack
    consumer_group: str = QUEUE_MODE
    queue: str = ""
    attempt: int = 1  # the number of this delivery to the group; releases do not count
    max_attempts: int = 0  # before the message becomes a dead letter; 0: not known
    retry_delay: float | None = None  # seconds before the next attempt of the queue; None: unknown

    @cached_property
    def data(self) -> Any:
        try:
            return msgspec.json.decode(self.raw)
        except msgspec.DecodeError:  # a number that msgspec does not support, such as 1e999
            return json.loads(bytes(self.raw))

    @property
    def first_pushed_at(self) -> datetime:
        """When the message was pushed; a delayed message: when it became due."""
        return self.created_at

    def answered_elsewhere(self) -> None:
        """Mark the message as acknowledged in a database transaction of your own (`penstock.outbox`
        does this). Its lease is still extended, and no warning is logged when the lease ends.
        """
        if (kept := self.__dict__.get("kept")) is not None:
            kept.elsewhere.add(self.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.queue}/{self.partition} {self.transaction_id}>"


class Message(Received):
    """A message received through `Client`. Answer it with one of its methods."""

    async def ack(self) -> None:
        """Acknowledge the message. Raises `AckRefused` if the lease was lost; the message is then
        delivered again.
        """
        await client_of(self).ack(self)

    async def retry(self, reason: str | None = None, *, delay: float = 0.0) -> None:
        """Have the message delivered again after `delay` seconds, without counting an attempt. In
        strict order, its partition waits as well.
        """
        await client_of(self).ack(self, "retry", error=reason, delay=delay)

    async def dead_letter(self, reason: str) -> None:
        """Move the message to the dead letters."""
        await client_of(self).ack(self, "dlq", error=reason)

    async def extend(self, seconds: int = 60) -> bool:
        """Lease the message for `seconds` from now. Returns False if the lease is lost."""
        return bool(await client_of(self).extend(self, seconds))


def bind(messages: Iterable[Received], client: object) -> None:
    """Set the client through which the messages are answered."""
    for message in messages:
        message.__dict__["client"] = client


def client_of(message: Received) -> Any:
    """Return the client that popped the message: a `Client` or a `SyncClient`."""
    try:
        return message.__dict__["client"]
    except KeyError:
        raise InvalidRequest(
            "the message was not popped by a client and cannot be answered"
        ) from None


M = TypeVar("M", bound=Received)


class Popped(msgspec.Struct, Generic[M]):
    """The result of a pop: messages of one queue."""

    messages: list[M] = []
    queue: str = ""
    source: int = 0  # which of the sources of a pop over several queues
    acknowledged: list[Acked] = []  # the results of the acks that came with the pop


class Retry(Exception):
    """Raise it in a consumer to have the message delivered again after `delay` seconds, without
    counting an attempt.
    """

    def __init__(self, reason: str = "", *, delay: float = 0.0) -> None:
        super().__init__(reason)
        self.delay = delay


class DeadLetter(Exception):
    """Raise it in a consumer to move the message to the dead letters at once."""
