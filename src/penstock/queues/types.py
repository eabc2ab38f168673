"""What goes into the queues and what comes out, as plain values. Payloads are JSON text as bytes,
never parsed here.

They are msgspec structs because those are built in C: a message passes through several of them.
"""

from datetime import datetime
from typing import Any

import msgspec

from penstock.contract.deliveries import Ack as Ack
from penstock.contract.deliveries import Delivered as Delivered
from penstock.contract.deliveries import Item as Item
from penstock.contract.deliveries import ItemOutcome as ItemOutcome
from penstock.contract.deliveries import Status as Status
from penstock.protocol.names import QUEUE_MODE
from penstock.protocol.queue_options import QueueOptions

MAX_DELAY_SECONDS = 315_360_000  # ten years, of a push or a retry


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
    consumer: Any = None  # the connection that pops (`consumers.ConsumerConnection`)


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
    source: int = 0  # which of the requests got the messages


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
    more: bool = True  # false: nothing is left for the group in the partition; no pop has to poll


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
