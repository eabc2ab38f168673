"""Compute when a cron expression is due in a time zone, and decide about missed due times.

The expression is that of Debian's cron: minute, hour, day of month, month, day of week; with six
fields, the first one is seconds. Daylight saving works as in Debian, too. An entry with a fixed
hour and minute runs once a day: right after the gap if its time does not exist, and the first time
if it occurs twice. An entry with `*` in the hour or minute follows the local clock, so it runs in
both of two equal hours. cronsim implements this; this module adds time zones, the names of common
expressions, and errors in words.
"""

from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from penstock.errors import InvalidRequest

NAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
MAX_EXPRESSION = 200  # characters
MISSED_SECONDS = 60  # what is due for longer was missed
MAX_DUE = 500  # due times that are made up for at once
LOOK_BACK_SECONDS = (60, 3600, 86_400, 31 * 86_400, 366 * 86_400, 10 * 366 * 86_400)
CatchUp = Literal["none", "one", "all"]


class Cron:
    """A checked expression in a time zone."""

    def __init__(self, expression: str, timezone: str) -> None:
        self._zone = _zone(timezone)
        self._expression = NAMES.get(expression.strip().lower(), expression)
        if len(expression) > MAX_EXPRESSION:
            raise InvalidRequest(f"cron is longer than {MAX_EXPRESSION} characters")
        try:
            CronSim(self._expression, datetime(2000, 1, 1, tzinfo=self._zone))
        except CronSimError as error:
            raise InvalidRequest(
                f"cron {expression!r}: {error}. It has five fields (minute, hour, day of month, "
                "month, day of week), such as '0 3 * * *' for every day at 3:00, or is one of "
                f"{', '.join(NAMES)}"
            ) from None

    def after(self, moment: datetime) -> datetime | None:
        """Return the first due time after a moment, in UTC; None if there is none."""
        try:
            for due in CronSim(self._expression, moment.astimezone(self._zone)):
                # where an hour comes twice, it starts from the first one
                if due.astimezone(UTC) > moment:
                    return due.astimezone(UTC)
        except (CronSimError, OverflowError):
            pass
        return None

    def times(self, moment: datetime) -> Iterator[datetime]:
        """Yield the due times after a moment."""
        while (due := self.after(moment)) is not None:
            yield due
            moment = due


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        raise InvalidRequest(
            f"unknown time zone {name[:60]!r}: use a name such as Europe/Rome or UTC"
        ) from None


class Due(NamedTuple):
    times: list[datetime]  # to be pushed, in order
    skipped: list[datetime]  # the first and the last of those passed over
    next_at: datetime | None


def due_until(cron: Cron, catch_up: CatchUp, next_at: datetime, now: datetime) -> Due:
    """Decide what to do about the due times from `next_at` to `now`."""
    if catch_up == "all":
        following = takewhile(lambda due: due <= now, cron.times(next_at))
        times = [next_at, *islice(following, MAX_DUE - 1)]
        return Due(times, [], cron.after(times[-1]))
    last = _last_due(cron, next_at, now)
    missed = [next_at] if next_at < last else []
    if catch_up == "none" and (now - last).total_seconds() >= MISSED_SECONDS:
        return Due([], [*missed, last], cron.after(last))
    return Due([last], missed, cron.after(last))


def _last_due(cron: Cron, first: datetime, now: datetime) -> datetime:
    """Return the last due time up to now, at least `first`. A schedule of every second may have
    missed a million, so search from shortly before now, then from longer and longer before.
    """
    for seconds in LOOK_BACK_SECONDS:
        since = cron.times(max(first, now - timedelta(seconds=seconds)))
        if last := deque(takewhile(lambda due: due <= now, since), maxlen=1):
            return last[0]
    return first
