"""The built-in jobs: each a function here, each a command (`penstock pipeline run <job> ...`)."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from penstock.errors import InvalidRequest
from penstock.pipeline.options import DURATION, duration
from penstock.protocol.times import utc_time

MINUTE = timedelta(minutes=1)
Say = Callable[[str], None]  # reports a job's progress


def quiet(_: str) -> None:
    """Ignore the progress."""


def moment(text: str | datetime, now: datetime, what: str) -> datetime:
    """Parse `2026-01-31T12:00Z` (UTC without a zone), or `90m`, `24h`, `7d` before `now`."""
    if isinstance(text, datetime):
        return text.replace(tzinfo=text.tzinfo or UTC)
    try:
        if DURATION.fullmatch(text.strip().lower()):
            return now - timedelta(seconds=duration(text))
        return utc_time(text)
    except ValueError:
        raise InvalidRequest(
            f"{what} is a time such as 2026-01-31T12:00:00Z, or 90m, 24h, 7d, not {text!r}"
        ) from None


def minute_of(at: datetime) -> datetime:
    """Return the minute of a time, in UTC."""
    return at.astimezone(UTC).replace(second=0, microsecond=0)
