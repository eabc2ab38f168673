"""Return time series for dashboards: figures per minute from the history of counters in PostgreSQL
and from the Spark job `rollup`.
"""

from datetime import UTC, datetime, timedelta

import msgspec

from penstock.contract import operations
from penstock.contract.inspection import AnalyticsPoint, Latency, Minutes, MinutesQuery
from penstock.contract.queries import BUCKETS
from penstock.protocol.analytics import Point
from penstock.protocol.latency import ERROR, PERCENTILES
from penstock.queues.engine import Queues
from penstock.wire.http.routes import route, serves


class RollupTotals(msgspec.Struct):
    upto: float | None  # milliseconds since 1970; null: nothing was rolled up yet
    times: list[float]
    series: dict[str, list[int | None]]


class AnalyticsApi:
    tag = "analytics"

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._status = queues.status

    @serves(operations.GET_ANALYTICS)
    async def minutes(self, args: MinutesQuery) -> Minutes:
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
                "completed": totals.delivered,
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
        completed=counts["acked"],
        dead_letters=dead,
        lag=point.lag,
        latency=Latency(point.latency.total, *percentiles) if point.latency.total else None,
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds * 1000:.4g}")
