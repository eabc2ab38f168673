"""Queen MQ's names for the fields of our structs."""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from penstock.contract.queues import QueueCounts

Json = dict[str, Any]


def shape(names: str) -> Callable[[object], Json]:
    """Return a function that returns the fields of a struct under Queen's names:
    `"queueName=queue name"`. A name alone stands for the field of that name in snake_case.
    """
    fields = [_field(*one.split("=")) for one in names.split()]

    def shown(value: object) -> Json:
        return {name: getattr(value, field) for name, field in fields}

    return shown


def _field(name: str, field: str = "") -> tuple[str, str]:
    return name, field or re.sub("([A-Z])", r"_\1", name).lower()


_counts = shape("total=stored processing=leased completed failed deadLetter=dead_letters dropped")


def counts(one: QueueCounts) -> Json:
    waiting = max(0, one.waiting - one.leased)
    return {**_counts(one), "pending": waiting, "scheduled": one.scheduled}


def time_range(since: datetime, until: datetime) -> Json:
    return {"from": since, "to": until}


def page(limit: int, offset: int, **total: int) -> Json:
    return {"limit": limit, "offset": offset, **total}
