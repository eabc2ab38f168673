"""Read the figures per minute that `penstock pipeline run rollup` wrote, summed to any interval."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from penstock.database import Database
from penstock.errors import InvalidRequest
from penstock.protocol.analytics import Point, point_of

MAX_SPAN = timedelta(days=366)
ALL_KINDS = ["queue", "group", "topic"]

SQL = "SELECT * FROM analytics_points($1, $2, $3, $4, $5, $6, $7)"
TOTALS = """
SELECT minute, (sum(pushed) FILTER (WHERE kind = 'queue'))::bigint AS pushed,
       (sum(acked) FILTER (WHERE kind = 'group'))::bigint AS delivered,
       (sum(pushed) FILTER (WHERE kind = 'topic' AND group_name = ''))::bigint AS produced
  FROM analytics WHERE minute >= $1 GROUP BY 1 ORDER BY 1"""
UPTO = "SELECT max(upto) FROM rollups"


@dataclass(slots=True)
class Points:
    points: list[Point]
    truncated: bool
    next: datetime | None  # start of the next page, if truncated


@dataclass(slots=True)
class Totals:
    """Messages and records per minute over all queues and topics; None: not rolled up."""

    upto: datetime | None  # end of the last rollup; None: none has run
    minutes: list[datetime]
    pushed: list[int | None]
    delivered: list[int | None]
    produced: list[int | None]


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
        """Return points by time, kind and name. A page ends between two intervals if it can."""
        if not since < until:
            raise InvalidRequest("`from` must be before `to`")
        if until - since > MAX_SPAN:
            raise InvalidRequest(f"`from` and `to` may be at most {MAX_SPAN.days} days apart")
        if topic and queue:
            raise InvalidRequest("give `topic` or `queue`, and a `group` of it")
        # the groups of a topic have the kind "topic" as well
        kinds = ["topic"] if topic else ["queue", "group"] if queue else ALL_KINDS
        rows = await self._database.browse(
            SQL, since, until, interval.total_seconds(), kinds, topic or queue, group, limit + 1
        )
        following: datetime | None = None
        truncated = len(rows) > limit
        if truncated:
            following = rows[limit]["at"]
            whole = [row for row in rows if row["at"] < following]
            rows, following = (whole, following) if whole else (rows[:limit], None)
        return Points([point_of(row) for row in rows], truncated, following)

    async def totals(self, since: datetime) -> Totals:
        (upto,) = await self._database.browse(UPTO)
        rows = await self._database.browse(TOTALS, since) if upto[0] else []
        figures = ([row[name] for row in rows] for name in ("pushed", "delivered", "produced"))
        return Totals(upto[0], [row["minute"] for row in rows], *figures)
