"""What goes into the queues and what comes out, as plain values. Payloads are JSON text as bytes,
never parsed here.

They are msgspec structs because those are built in C: a message passes through several of them.
"""

from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from penstock.protocol.message_ids import sequence_of
from penstock.protocol.names import DEFAULT_PARTITION, QUEUE_MODE
from penstock.protocol.queue_options import QueueOptions

MAX_DELAY_SECONDS = 315_360_000  # ten years, of a push or a retry


class Item(msgspec.Struct, rename="camel", gc=False):
    """A message to push. Without a transaction id it gets one of its own."""

    queue: str
    payload: bytes = b"null"
    partition: str = DEFAULT_PARTITION
    transaction_id: str | None = None
    trace_id: str | None = None
    producer: str | None = None
    # the transaction id was made for this very push: no stored message can have it
    fresh: bool = False
    # the payload and the headers are sealed with this key for a buffer file (crypto.py)
    key_id: str | None = None
    headers: bytes | None = None  # JSON text (protocol/headers.py)
    due: float | datetime | None = None  # for later: in so many seconds, or at this moment
    ordering: Literal["partition", "none"] | None = None  # of the queue, if this creates it


Status = Literal["queued", "scheduled", "duplicate", "full", "buffered"]


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


class PopRequest(msgspec.Struct):
    """Take messages of one queue, or of all queues of a namespace and/or task."""

    queue: str | None = None
    partition: str | None = None
    namespace: str | None = None
    task: str | None = None
    group: str = QUEUE_MODE
    batch: int | None = None  # None: the default, or what the engine picks under `autopilot`
    partitions: int | None = None
    autopilot: bool = False
    wait: bool = False
    timeout: float | None = None  # seconds; None = the default
    auto_ack: bool = False
    subscription_mode: str | None = None
    subscription_from: str | None = None
    holder: int | None = None  # 48 bits that mark its leases, for `Queues.release`
    consumer: Any = None  # the connection that pops (`penstock.queues.consumers.Consumer`)


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


class PopOutcome(msgspec.Struct):
    """The answer of a pop; without messages `reason` says why: empty, busy (leased or not due),
    unknown (no such queue or partition)."""

    group: str
    queue: str | None = None
    lease_id: str = ""
    messages: list[Delivered] = []
    partitions_claimed: int = 0
    reason: str = ""
    acked: "list[AckOutcome]" = []  # of the acknowledgements that came with the request


class Ack(msgspec.Struct, gc=False):
    transaction_id: str
    partition_id: str
    lease_id: str | None = None
    status: str = "completed"  # completed (success), failed, retry, dlq
    error: str | None = None
    group: str = QUEUE_MODE
    worker: str | None = None  # who answers, where that is known
    delay: float | None = None  # seconds before the message is delivered again; failed, retry
    max_attempts: int | None = None  # before it is a dead letter; None: as the queue says; failed


class AckOutcome(msgspec.Struct, gc=False):
    transaction_id: str
    success: bool
    # "Message not found", "Invalid or expired lease", "Unknown status: ..."
    error: str | None = None
    queue: str | None = None
    partition: str | None = None
    lease_released: bool | None = None
    dlq: bool = False
    changed: bool = True  # False: it had been answered before, and this changed nothing
    more: bool = True  # false: nothing is left for the group in the partition; nobody has to look


class Extended(msgspec.Struct):
    lease_id: str
    success: bool
    error: str | None = None  # "Lease not found", "Lease already expired"
    expires_at: datetime | None = None


class TransactionResult(msgspec.Struct):
    transaction_id: str
    success: bool
    error: str | None = None
    results: list[ItemOutcome | AckOutcome] = []  # in the order of the operations


class QueueInfo(msgspec.Struct):
    """A queue as configured."""

    id: int
    uuid: str
    name: str
    namespace: str
    task: str
    created_at: datetime
    options: QueueOptions
