"""Dead letters of queues."""

from datetime import datetime
from typing import Any

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
