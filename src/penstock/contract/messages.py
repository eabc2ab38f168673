"""Messages of queues, as operators see them."""

from datetime import datetime
from typing import Any, ClassVar

import msgspec

from penstock.contract.noun import Noun
from penstock.protocol.queue_options import QueueOptions


class ScheduledMessage(Noun, kw_only=True):
    """A delayed message that is not due yet."""

    transaction_id: str
    queue: str
    partition: str
    partition_id: str
    deliver_at: datetime
    pushed_at: datetime
    trace_id: str | None = None
    producer: str | None = None
    encrypted: bool = False
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    payload: Any = msgspec.UNSET  # not in a list


class ScheduledMessages(Noun):
    """A page of delayed messages, next due first. Pass `next` as `cursor` to get the following
    page.
    """

    messages: list[ScheduledMessage]
    next: str | None = None


class MessagePlace(Noun, kw_only=True):
    """A message's id, place and state."""

    id: str
    transaction_id: str
    partition_id: str
    queue: str
    partition: str
    namespace: str
    task: str
    state: str  # waiting, leased, completed or dead_letter
    trace_id: str | None
    producer: str | None
    created_at: datetime
    headers: dict[str, str]


class StoredMessage(MessagePlace, kw_only=True):
    """A stored message without its payload, with its state."""

    queue_state: str = "none"  # of consumers without a group; none: there are none
    groups_done: int = 0  # groups that have finished it
    groups: int = 0
    priority: int = 0
    lease_expires_at: datetime | None = None


class StoredMessages(Noun, kw_only=True):
    """A page of stored messages, newest first."""

    messages: list[StoredMessage]
    queue_mode: bool  # consumers without a group read their queues
    groups: int  # groups that read their queues
    next: str | None  # the cursor of the next page
    behind_seconds: float | None = None  # how old the data may be; None: read from the primary


class MessageGroup(Noun):
    """The state of a message in a group."""

    name: str
    consumed: bool
    lease_expires_at: datetime | None


class MessageWithPayload(MessagePlace, kw_only=True):
    """A stored message with its payload and its state in each group."""

    payload: Any
    encrypted: bool
    error: str | None
    attempts: int
    groups: list[MessageGroup]
    options: QueueOptions  # of its queue


class MessageDeleted(Noun):
    """A message that was deleted."""

    partition_id: str
    transaction_id: str


class MessageRetried(MessageDeleted):
    """A message that is delivered again."""

    groups: int


class MessageBuried(MessageDeleted):
    """A message that was moved to the dead letters of a group, or that the group has finished."""

    moved: bool


class TraceBody(msgspec.Struct, rename="camel"):
    transaction_id: str | None = None
    partition_id: str | None = None
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    consumer_group: str | None = None
    event_type: str | None = None
    trace_names: str | list[str] | None = None

    texts: ClassVar = {
        "transactionId": "transactionId and partitionId are required",
        "partitionId": "transactionId and partitionId are required",
    }


class TraceAdded(Noun):
    """The trace event that was attached to a message."""

    trace_id: str
