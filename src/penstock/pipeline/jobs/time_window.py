"""The stretch of time a job looks at: given as times, or as how long ago."""

import re
from datetime import UTC, datetime, timedelta

from penstock.errors import InvalidRequest
from penstock.protocol.times import utc_time

AGO = re.compile(r"(\d+)\s*([smhdw])")
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
MINUTE = timedelta(minutes=1)


def moment(text: str | datetime, now: datetime, what: str) -> datetime:
    """`2026-01-31T12:00Z` (UTC when it names no zone), or `90m`, `24h`, `7d` before `now`."""
    if isinstance(text, datetime):
        return text.replace(tzinfo=text.tzinfo or UTC)
    if ago := AGO.fullmatch(text.strip()):
        return now - timedelta(**{UNITS[ago[2]]: int(ago[1])})
    try:
        return utc_time(text)
    except ValueError:
        raise InvalidRequest(
            f"{what} is a time such as 2026-01-31T12:00:00Z, or 90m, 24h, 7d, not {text!r}"
        ) from None


def minute_of(at: datetime) -> datetime:
    """The minute in which it was, in UTC."""
    return at.astimezone(UTC).replace(second=0, microsecond=0)
