"""Times as people and programs write them: ISO 8601, UTC unless they say otherwise."""

from datetime import UTC, datetime

from penstock.errors import InvalidRequest


def utc_time(text: str) -> datetime:
    """The time that ISO 8601 `text` names; ValueError when it names none."""
    time = datetime.fromisoformat(text.strip())
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def epoch_seconds(text: str) -> float:
    """Seconds since 1970 of an ISO 8601 time, or of milliseconds since 1970."""
    try:
        return int(text) / 1000 if text.isdecimal() else utc_time(text).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{text!r} is no time: write 2026-01-31T12:00:00Z, or milliseconds since 1970"
        ) from None
