"""Schedules: messages that are pushed at the times of a cron expression."""

from datetime import datetime
from typing import Any, ClassVar, Literal

import msgspec

from penstock.contract.noun import Noun
from penstock.protocol.names import DEFAULT_PARTITION


class ScheduleRun(Noun):
    """One run of a schedule: the message it pushed, or why it pushed none."""

    # Stored in the table `schedules` in this form: a field that is added needs a default.
    due_at: datetime
    fired_at: datetime
    transaction_id: str
    result: Literal["queued", "duplicate", "skipped", "full", "refused"]
    manual: bool = False
    error: str | None = None


class ScheduleDefinition(Noun):
    """What a user decides about a schedule."""

    cron: str
    queue: str
    timezone: str = "UTC"
    partition: str = DEFAULT_PARTITION
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    headers: dict[str, str] | None = None
    catch_up: Literal["none", "one", "all"] = "one"
    paused: bool = False

    texts: ClassVar = {
        "cron": "cron must be text such as '0 3 * * *'",
        "queue": "queue must be the name of the queue to push to",
        "catchUp": "catchUp must be none, one or all",
        "headers": "headers must be an object of strings",
    }


class Schedule(ScheduleDefinition, kw_only=True):
    """A schedule with its next and last runs."""

    payload: Any = None
    name: str
    created_at: datetime
    updated_at: datetime
    next_runs: list[datetime]
    last_runs: list[ScheduleRun]  # the newest first


class ScheduleList(Noun):
    schedules: list[Schedule]
