"""Time series for dashboards: what the counters' history and PostgreSQL say, and the minutes that
the Spark job `rollup` has written down.
"""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

import msgspec

from penstock.contract.noun import Noun, TimeRange
from penstock.contract.queries import BUCKETS, TimesQuery
from penstock.protocol.analytics import Point
from penstock.protocol.latency import ERROR, PERCENTILES
from penstock.queues.engine import Queues
from penstock.wire.http.routes import route


class MinutesQuery(TimesQuery, frozen=True):
    queue: str | None = None
    topic: str | None = None
    group: str | None = None
    interval: Literal["minute", "hour", "day"] = "minute"
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


class Latency(Noun):
    """Milliseconds from push to ack, with a relative error of at most `latencyError`."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None


class AnalyticsPoint(Noun, kw_only=True):
    """Figures of a queue, a topic or a consumer group in one interval."""

    time: datetime
    kind: Literal["queue", "group", "topic"]
    queue: str | None
    group: str | None
    topic: str | None
    pushed: int
    bytes: int
    acked: int
    failed: int
    retried: int
    dead_letters: int
    dropped: int
    lag: int | None  # at the end of the interval
    latency: Latency | None


class Minutes(TimeRange):
    interval: str
    latency_error: float
    points: list[AnalyticsPoint]
    truncated: bool  # there is more: ask again from `next`, or for a longer interval
    next: datetime | None


class RollupTotals(msgspec.Struct):
    upto: float | None  # milliseconds since 1970; null: nothing was rolled up yet
    times: list[float]
    series: dict[str, list[int | None]]


class AnalyticsApi:
    tag = "analytics"

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._status = queues.status

    @route("GET", "/api/v1/analytics")
    async def minutes(self, args: MinutesQuery) -> Minutes:
        """Messages, bytes, latency, retries, dead letters and lag per interval, from the last
        rollup.
        """
        since, until = args.range(timedelta(hours=1))
        points = await self._queues.analytics.points(
            since,
            until,
            BUCKETS[args.interval],
            queue=args.queue or None,
            topic=args.topic or None,
            group=args.group or None,
            limit=args.limit,
        )
        return Minutes(
            since,
            until,
            interval=args.interval,
            latency_error=round(ERROR, 4),
            points=[_minute(point) for point in points.points],
            truncated=points.truncated,
            next=points.next,
        )

    @route("GET", "/api/v1/analytics/rollup", tag="internal")
    async def rolled_up(self) -> RollupTotals:
        """Messages and records per minute in the last hour, from the last rollup."""
        totals = await self._queues.analytics.totals(datetime.now(UTC) - timedelta(hours=1))
        return RollupTotals(
            None if totals.upto is None else totals.upto.timestamp() * 1000,
            [minute.timestamp() * 1000 for minute in totals.minutes],
            {
                "pushed": totals.pushed,
                "delivered": totals.delivered,
                "produced": totals.produced,
            },
        )


def _minute(point: Point) -> AnalyticsPoint:
    of_queue = point.kind != "topic"
    counts = dict(point.counts)
    dead = counts.pop("dead")
    percentiles = (_milliseconds(point.latency.percentile(percent)) for percent in PERCENTILES)
    return AnalyticsPoint(
        time=point.at,
        kind="group" if point.group else "queue" if of_queue else "topic",
        queue=point.name if of_queue else None,
        group=point.group or None,
        topic=None if of_queue else point.name,
        **counts,
        dead_letters=dead,
        lag=point.lag,
        latency=Latency(point.latency.total, *percentiles) if point.latency.total else None,
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds * 1000:.4g}")
