"""What a user of the queue client holds in hand: addresses, messages, and the answers to push and
ack.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from penstock.errors import Conflict, Full, InvalidRequest
from penstock.protocol.names import QUEUE_MODE

AckStatus = Literal["completed", "failed", "retry", "dlq"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where messages come from or go to: `orders`, `orders/c-1`, `orders@billing`,
    `orders/c-1@billing`.

    A queue whose own name holds a slash or an at sign is addressed by an `Address` made by hand.
    """

    queue: str
    partition: str | None = None
    group: str | None = None

    @classmethod
    def parse(cls, text: "str | Address") -> "Address":
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
        """The path of the HTTP API that pops from it."""
        path = f"/api/v1/pop/queue/{quote(self.queue, safe='')}"
        return f"{path}/partition/{quote(self.partition, safe='')}" if self.partition else path


class Received(msgspec.Struct, rename="camel", eq=False, kw_only=True, dict=True):
    """A message as a consumer sees it. `data` is the payload, decoded when first asked for; `raw`
    its JSON text.
    """

    id: str
    transaction_id: str
    trace_id: str | None = None
    raw: msgspec.Raw = msgspec.field(name="data", default=msgspec.Raw(b"null"))
    headers: dict[str, str] = {}
    producer_sub: str | None = None
    created_at: datetime
    partition: str
    partition_id: str
    lease_id: str = ""  # empty under auto-ack
    consumer_group: str = QUEUE_MODE
    queue: str = ""

    @cached_property
    def data(self) -> Any:
        try:
            return msgspec.json.decode(self.raw)
        except (
            msgspec.DecodeError
        ):  # valid JSON with a number beyond what msgspec takes, such as 1e999
            return json.loads(bytes(self.raw))

    def answered_elsewhere(self) -> None:
        """A transaction of the application answers it (`penstock.outbox`). Its lease is extended as
        before, and when it has ended nobody is warned.
        """
        if (kept := self.__dict__.get("kept")) is not None:
            kept.elsewhere.add(self.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.queue}/{self.partition} {self.transaction_id}>"


class Message(Received):
    """A message taken by `Client`, to be answered by one of its methods."""

    async def ack(self) -> None:
        """The work is done; `AckRefused` when the lease was lost and the message comes again."""
        await client_of(self).ack(self)

    async def retry(self, *, delay: float = 0.0) -> None:
        """Deliver it again after `delay` seconds; no attempt is counted."""
        await client_of(self).ack(self, "retry", delay=delay)

    async def dead_letter(self, reason: str) -> None:
        """Put it aside for a person to look at: it cannot succeed."""
        await client_of(self).ack(self, "dlq", error=reason)

    async def extend(self, seconds: int = 60) -> bool:
        """Lease it for `seconds` from now; False when the lease is lost."""
        return bool(await client_of(self).extend(self, seconds))


def bind(messages: Iterable[Received], client: object) -> None:
    """Have the messages answered through `client`."""
    for message in messages:
        message.__dict__["client"] = client


def client_of(message: Received) -> Any:
    """The client a message was taken by: a `Client`, or for plain code a `SyncClient`."""
    try:
        return message.__dict__["client"]
    except KeyError:
        raise InvalidRequest("this message was not taken by a client: nobody to answer") from None


class Popped(msgspec.Struct, rename="camel"):
    """The body of a pop's answer."""

    messages: list[Message] = []
    queue: str = ""


class Pushed(msgspec.Struct, eq=False):
    """What became of one message: `queued`, `duplicate` (known by its transaction id), `buffered`
    or `failed`.
    """

    status: str
    index: int = 0
    transaction_id: str = ""
    message_id: str | None = None
    partition_id: str | None = None
    trace_id: str | None = None
    error: str | None = None


class Acked(msgspec.Struct, rename="camel", eq=False):
    """What became of one acknowledgement; `error` says why when it was no success."""

    transaction_id: str
    success: bool
    index: int = 0
    error: str | None = None
    queue_name: str | None = None
    partition_name: str | None = None
    lease_released: bool | None = None
    dlq: bool = False


class QueueFull(Full):
    """Some messages of a push did not fit (`maxSize`): `results` says which. The others are
    stored.
    """

    def __init__(self, text: str, results: list[Pushed]) -> None:
        super().__init__(text)
        self.results = results


class AckRefused(Conflict):
    """The broker did not take some acks, for lack of a live lease or of the message; `results` says
    which.
    """

    def __init__(self, text: str, results: list[Acked]) -> None:
        super().__init__(text)
        self.results = results


class Retry(Exception):
    """Raised by a consumer's handler: deliver the message again, after `delay` seconds, without
    counting an attempt.
    """

    def __init__(self, reason: str = "", *, delay: float = 0.0) -> None:
        super().__init__(reason)
        self.delay = delay


class DeadLetter(Exception):
    """Raised by a consumer's handler: this message can never succeed, put it aside at once."""
