"""Push, pop, acknowledge: the messages that enter and leave queues.

They are msgspec structs because those are built in C: a message passes through several of them.
Payloads are JSON text, which is not parsed.
"""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET

from penstock.protocol.message_ids import sequence_of
from penstock.protocol.names import DEFAULT_PARTITION, QUEUE_MODE

NULL = msgspec.Raw(b"null")
EMPTY_OBJECT = msgspec.Raw(b"{}")
ABSENT = msgspec.Raw()
MAX_SOURCES = 1000  # of one pop; each is a call to the database
Status = Literal["queued", "scheduled", "duplicate", "full", "buffered"]


class Item(msgspec.Struct, rename="camel", gc=False):
    """A message to push. Without a transaction id it gets one of its own."""

    queue: str
    payload: bytes = b"null"
    partition: str = DEFAULT_PARTITION
    transaction_id: str | None = None
    trace_id: str | None = None
    producer: str | None = None
    # the transaction id is new: no stored message can have it
    fresh: bool = False
    # the payload and the headers are sealed with this key for a buffer file (crypto.py)
    key_id: str | None = None
    headers: bytes | None = None  # JSON text (protocol/headers.py)
    due: float | datetime | None = None  # for later: in so many seconds, or at this moment
    ordering: Literal["partition", "none"] | None = None  # of the queue, if this creates it


class Ack(msgspec.Struct, rename="camel", gc=False):
    transaction_id: str
    partition_id: str
    lease_id: str | None = None
    status: str = "completed"  # completed (success), failed, retry, dlq
    error: str | None = None
    group: str = QUEUE_MODE
    worker: str | None = None  # the consumer's name, shown in the life of a message that failed
    delay: float | None = None  # failed, retry: seconds before the message is delivered again
    max_attempts: int | None = None  # with `failed`, the limit for this message; None: the queue's


class ItemOutcome(msgspec.Struct, gc=False):
    """What became of an item; it encodes itself as the answer of a push. `scheduled`: it waits for
    its time, `deliver_at`. `full`: the queue is at its `maxSize`, the item was not stored.
    `buffered`: it is on disk and will be stored later (said by the buffer in front of the engine).
    """

    index: int  # in its request
    status: Status
    message_id: str | None
    transaction_id: str
    partition_id: str | msgspec.UnsetType = msgspec.UNSET  # not of a duplicate
    trace_id: str | msgspec.UnsetType | None = msgspec.UNSET  # not of a duplicate
    queue: str = msgspec.field(name="queueName", default="")
    deliver_at: datetime | msgspec.UnsetType = msgspec.field(
        name="deliverAt", default=msgspec.UNSET
    )


class Delivered(msgspec.Struct, rename="camel", gc=False):
    """A message that a pop took; it encodes itself as part of the pop's answer."""

    id: str
    transaction_id: str
    trace_id: str | None
    data: msgspec.Raw
    producer: str | None = msgspec.field(name="producerSub")
    created_at: datetime
    partition: str
    partition_id: str
    lease_id: str  # "" under auto-ack
    group: str = msgspec.field(name="consumerGroup")
    header_text: msgspec.Raw | msgspec.UnsetType = msgspec.field(name="headers", default=UNSET)
    attempt: int | msgspec.UnsetType = UNSET  # the number of this delivery, from the second on

    @property
    def payload(self) -> bytes:
        return bytes(self.data)

    @property
    def headers(self) -> bytes | None:
        """JSON text."""
        return None if self.header_text is UNSET else bytes(self.header_text)

    @property
    def seq(self) -> int:
        """The message's number in its partition."""
        return sequence_of(self.id)


# Left as text and checked with those of the whole request (`headers.checked`).
HeadersText = Annotated[
    msgspec.Raw | msgspec.UnsetType,
    msgspec.Meta(
        extra_json_schema={"type": ["object", "null"], "additionalProperties": {"type": "string"}}
    ),
]


BROKERS_OWN = ("producer", "fresh", "key_id", "due", "group")  # fields that requests cannot set
if TYPE_CHECKING:
    OrNull = str
else:
    OrNull = str | None  # null in a request stands for the default


def json_name(field: str) -> str:
    """camelCase; `_` before a name hides it from the API's description."""
    first, *others = field.split("_")
    return "_" * (field in BROKERS_OWN) + first + "".join(map(str.capitalize, others))


class PushItem(Item, rename=json_name, gc=False):
    """An item as a request carries it: the body decodes straight into the engine's struct, and
    `received` finishes it. The fields of the broker take nothing but null from a body.
    """

    payload: msgspec.Raw = msgspec.field(default_factory=lambda: NULL)
    partition: OrNull = DEFAULT_PARTITION
    headers: HeadersText = UNSET  # type: ignore[assignment]
    producer: None = None
    fresh: None = None  # type: ignore[assignment]
    key_id: None = None
    due: None = None
    delay: float | None = None
    deliver_at: str | None = None


class PushBody(msgspec.Struct, rename="camel"):
    items: list[PushItem]
    buffer_ms: int | None = None
    buffer_max: int | None = None

    texts: ClassVar = {
        "items": "items array is required",
        "queue": "Queue must be a string",
        "partition": "Partition must be a string",
        "transactionId": "TransactionId must be a string",
        "traceId": "TraceId must be a string",
        "delay": "delay must be a number of seconds",
        "deliverAt": "deliverAt must be an ISO 8601 time",
        "ordering": "ordering must be partition or none",
    }


class Pushed(msgspec.Struct, eq=False):
    """The result of pushing one message. `status` is `queued`, `scheduled` (until
    `deliver_at`), `duplicate` (its transaction id is already stored), `buffered` or `failed`.
    """

    status: str
    index: int = 0
    transaction_id: str = ""
    message_id: str | None = None
    partition_id: str | None = None
    trace_id: str | None = None
    error: str | None = None
    queue_name: str | None = msgspec.field(name="queueName", default=None)
    deliver_at: datetime | None = msgspec.field(name="deliverAt", default=None)


class Later(msgspec.Struct, rename="camel"):
    """The answer of a push with `bufferMs` or `bufferMax`."""

    pushed: bool
    qos0: bool
    db_healthy: bool


PushAnswer: Any = list[Pushed] | Later


class Acked(msgspec.Struct, rename="camel", eq=False, gc=False):
    """The result of one acknowledgement. If it did not succeed, `error` has the reason."""

    transaction_id: str
    success: bool
    index: int = 0
    error: str | None = None
    queue_name: str | None = None
    partition_name: str | None = None
    lease_released: bool | None = None
    dlq: bool = False


class PopOptions(msgspec.Struct, rename="camel", frozen=True):
    batch: int | None = None
    consumer_group: str | None = None
    auto_ack: bool = False
    partitions: int | None = None
    subscription_mode: str | None = None
    subscription_from: str | None = None
    namespace: str | None = None
    task: str | None = None
    autopilot: bool = False


class PopQuery(PopOptions, frozen=True):
    wait: bool = False
    timeout: int | None = None  # milliseconds

    refuse_misspelled: ClassVar = True  # a pop without its group takes messages of another one


class PopSource(PopOptions, frozen=True, forbid_unknown_fields=True):
    queue: str | None = None
    partition: str | None = None


class PopAnyBody(msgspec.Struct, forbid_unknown_fields=True):
    sources: Annotated[list[PopSource], msgspec.Meta(min_length=1, max_length=MAX_SOURCES)]
    wait: bool = False
    timeout: int | None = None  # milliseconds


class AckItem(Ack, rename=json_name, gc=False):
    """An acknowledgement as a request carries it; `complete` finishes it."""

    status: OrNull = "completed"
    group: None = None  # type: ignore[assignment]

    def complete(self, group: str, who: str) -> Ack:
        """Fill in the fields that the request left out. `who` sent the request."""
        self.group = group  # type: ignore[assignment]
        self.lease_id = self.lease_id or None
        self.status = self.status or "completed"
        self.worker = self.worker or who
        return self


class AckBatchBody(msgspec.Struct, rename="camel"):
    acknowledgments: list[AckItem]
    consumer_group: str | None = None

    texts: ClassVar = {
        "acknowledgments": "acknowledgments array is required",
        "transactionId": "Each acknowledgment must have a valid transactionId string",
        "partitionId": "Each acknowledgment must have a valid partitionId string "
        "to ensure message uniqueness",
    }


class ExtendBody(msgspec.Struct):
    seconds: int | None = None

    texts: ClassVar = {"seconds": "seconds must be a whole number"}


class PopAnswer(msgspec.Struct, rename="camel"):
    success: bool
    queue: str | None
    partition: str
    partition_id: str
    lease_id: str
    consumer_group: str
    partitions_claimed: int
    messages: list[Delivered]


class PopAnyAnswer(PopAnswer, rename="camel"):
    source: int  # which of the sources the messages are from, from 0


class ExchangeAnswer(PopAnswer, rename="camel"):
    acknowledged: list[Acked]


class ExtendAnswer(msgspec.Struct, rename="camel"):
    index: int
    lease_id: str
    success: bool
    error: str | None
    expires_at: str | None


class TransactionItem(PushItem):
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: EMPTY_OBJECT)


class TransactionOperation(msgspec.Struct, rename="camel"):
    """A push of `items` or of the one message that the fields describe, or an ack."""

    type: str
    items: list[TransactionItem] | None = None
    queue: str | None = None
    partition: str | None = None
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: ABSENT)
    data: msgspec.Raw = msgspec.field(default_factory=lambda: ABSENT)
    transaction_id: str | None = None
    trace_id: str | None = None
    headers: dict[str, str] | None = None
    delay: float | None = None
    deliver_at: str | None = None
    partition_id: str | None = None
    lease_id: str | None = None
    status: str | None = None
    consumer_group: str | None = None
    error: str | None = None


class TransactionBody(msgspec.Struct, rename="camel"):
    operations: list[TransactionOperation]
    required_leases: list[str] | None = None

    texts: ClassVar = {"operations": "operations array required"}


class PushResult(msgspec.Struct, rename="camel", tag_field="type", tag="push"):
    index: int
    success: bool
    transaction_id: str
    message_id: str | None
    partition_id: str
    queue_name: str
    deliver_at: str | msgspec.UnsetType = msgspec.UNSET  # of a message for later


class AckResult(msgspec.Struct, rename="camel", tag_field="type", tag="ack"):
    index: int
    success: bool
    transaction_id: str
    error: str | None
    dlq: bool


class TransactionAnswer(msgspec.Struct, rename="camel", omit_defaults=True):
    transaction_id: str
    success: bool
    results: list[PushResult | AckResult]
    error: str | None = None
