"""Schedules."""

from datetime import datetime

from penstock.contract.noun import Noun


class ScheduleRun(Noun):
    """One run of a schedule: the message it pushed, or why it pushed none."""

    due_at: datetime
    fired_at: datetime
    transaction_id: str
    result: str  # queued, duplicate, skipped, full, refused
    manual: bool
    error: str | None
