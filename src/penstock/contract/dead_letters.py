"""Dead letters of queues, and the background tasks on them."""

from datetime import datetime
from typing import Any, Literal

import msgspec

from penstock.contract.noun import Noun, Pagination


class DeadLetterMessage(Noun, kw_only=True):
    """A dead letter: a message that failed for good, with the reason."""

    number: int  # by which it is requeued or deleted alone
    message_id: str
    transaction_id: str
    partition_id: str
    queue: str
    partition: str
    group: str | None  # None: the group was deleted
    error: str
    attempts: int
    data: Any = None  # the payload
    data_omitted: bool = False  # the page is too large: use a smaller limit
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    producer: str | None = None
    created_at: datetime  # when the message was pushed
    failed_at: datetime


class DeadLetters(Noun, kw_only=True):
    """A page of dead letters, newest first. `total` counts all that match."""

    messages: list[DeadLetterMessage]
    total: int
    pagination: Pagination | None = None


class Requeued(Noun):
    """How many dead letters were requeued."""

    requeued: int


class Purged(Noun):
    """How many dead letters were deleted."""

    deleted: int


TaskKind = Literal["requeue", "purge"]
TaskState = Literal["running", "finished", "failed", "cancelled"]


class BackgroundTask(msgspec.Struct, rename="camel"):
    id: str
    kind: TaskKind
    what: str  # the dead letters it is about, in words
    who: str
    total: int  # when it began
    exact: bool  # False: there were at least `total`
    started_at: float  # milliseconds since 1970
    done: int = 0
    state: TaskState = "running"
    error: str | None = None
    ended_at: float | None = None


class TaskList(msgspec.Struct):
    """Background tasks of all brokers on one database, newest first."""

    tasks: list[BackgroundTask]
