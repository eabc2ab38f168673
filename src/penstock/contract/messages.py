"""Messages of queues, as operators see them."""

from datetime import datetime
from typing import Any

import msgspec

from penstock.contract.noun import Noun


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
