"""Parts that several answers of Queen MQ's dialect have."""

from datetime import datetime
from typing import Any

from penstock.contract.queues import QueueCounts

Json = dict[str, Any]


def counts(one: QueueCounts) -> Json:
    return {
        "total": one.stored,
        "pending": max(0, one.waiting - one.leased),
        "processing": one.leased,
        "completed": one.completed,
        "failed": one.failed,
        "deadLetter": one.dead_letters,
        "dropped": one.dropped,
        "scheduled": one.scheduled,
    }


def time_range(since: datetime, until: datetime) -> Json:
    return {"from": since, "to": until}


def page(limit: int, offset: int, **total: int) -> Json:
    return {"limit": limit, "offset": offset, **total}
