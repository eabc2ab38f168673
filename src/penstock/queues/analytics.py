"""Figures per minute as `penstock pipeline run rollup` wrote them down, added up to longer intervals when asked for."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from penstock.database import Database
from penstock.errors import InvalidRequest
from penstock.latency import Latencies

LONGEST = timedelta(days=366)

SQL = "SELECT * FROM analytics_points($1, $2, $3, $4, $5, $6, $7)"


@dataclass(slots=True)
class Point:
    """One queue, topic or group of a queue in one interval."""

    at: datetime
    kind: str
    name: str
    group: str
    counts: dict[str, int]
    lag: int | None
    latency: Latencies


@dataclass(slots=True)
class Points:
    points: list[Point]
    truncated: bool
    next: datetime | None  # ask on from here, when there was more than fits


class Analytics:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def points(
        self,
        since: datetime,
        until: datetime,
        interval: timedelta,
        *,
        queue: str | None = None,
        topic: str | None = None,
        group: str | None = None,
        limit: int = 1000,
    ) -> Points:
        """In order of time, then kind and name. An answer that does not fit ends with a whole interval where it can."""
        if not since < until:
            raise InvalidRequest("`from` must be before `to`")
        if until - since > LONGEST:
            raise InvalidRequest(f"`from` and `to` may be at most {LONGEST.days} days apart")
        if topic and (queue or group):
            raise InvalidRequest("give `topic`, or `queue` and `group`")
        kinds = ["topic"] if topic else ["group"] if group else ["queue", "group"] if queue else _ALL
        rows = await self._database.read(
            SQL, since, until, interval.total_seconds(), kinds, topic or queue, group, limit + 1
        )
        following: datetime | None = None
        truncated = len(rows) > limit
        if truncated:
            following = rows[limit]["at"]
            whole = [row for row in rows if row["at"] < following]
            rows, following = (whole, following) if whole else (rows[:limit], None)
        return Points([_point(row) for row in rows], truncated, following)


_ALL = ["queue", "group", "topic"]
_COUNTS = ("pushed", "bytes", "acked", "failed", "retried", "dead", "dropped")


def _point(row: Any) -> Point:
    counts = {name: row[name] for name in _COUNTS}
    latency = Latencies(row["buckets"], row["counts"])
    return Point(row["at"], row["kind"], row["name"], row["group_name"], counts, row["lag"], latency)
