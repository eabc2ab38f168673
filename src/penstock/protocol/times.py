"""Parse times in ISO 8601. Times without a zone are in UTC."""

from datetime import UTC, datetime

from penstock.errors import InvalidRequest


def utc_time(text: str) -> datetime:
    """Parse an ISO 8601 time. Raises ValueError if it is not valid.

    A space instead of the plus of a zone is accepted: query strings decode a plus as a space.
    """
    text = text.strip()
    time = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
    try:
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except OverflowError:
        raise ValueError(f"{text!r} is outside of the years 1 to 9999") from None


def time_field(text: str, name: str) -> datetime:
    """Parse the time in the field `name` of a request."""
    try:
        return utc_time(text)
    except ValueError:
        raise InvalidRequest(f"{name} must be an ISO 8601 time, not {text[:60]!r}") from None


def epoch_millis(at: datetime) -> float:
    """Return the milliseconds since 1970, for JavaScript."""
    return at.timestamp() * 1000


def epoch_seconds(text: str) -> float:
    """Parse an ISO 8601 time, or milliseconds since 1970. Return seconds since 1970."""
    try:
        return int(text) / 1000 if text.isdecimal() else utc_time(text).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{text!r} is not a time: write 2026-01-31T12:00:00Z, or milliseconds since 1970"
        ) from None
