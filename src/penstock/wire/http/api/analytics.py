"""Time series for dashboards: what the counters' history and PostgreSQL say."""

from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.queues.engine import Queues
from penstock.wire.http.api.bodies import answer
from penstock.wire.http.api.resources import BUCKETS, RangeQuery
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import Route


def routes(queues: Queues) -> list[Route]:
    status = queues.status

    async def queue_ops(request: Request) -> Response:
        args: RangeQuery = request.args
        since, until = args.range(timedelta(hours=1))
        width = BUCKETS["minute"] if until - since <= timedelta(hours=6) else BUCKETS[args.interval]
        points = await status.history(since, until, width, args.queue or None)
        series = [{"timestamp": point.pop("bucket"), **point} for point in points]
        return answer({"timeRange": {"from": since, "to": until}, "series": series})

    async def queue_lag(request: Request) -> Response:
        wanted = request.args.queue or None
        groups = await queues.groups.listing(None, wanted)
        names = ("queueName", "name", "totalLag", "maxTimeLag", "partitionsWithLag", "state")
        return answer(
            {"timestamp": datetime.now(UTC), "groups": [{name: row[name] for name in names} for row in groups]}
        )

    async def postgres(_: Request) -> Response:
        return answer(await status.postgres())

    def route(name: str, handler: Any, summary: str, **more: Any) -> Route:
        path = f"/api/v1/analytics/{name}"
        return Route("GET", path, handler, summary=summary, tag="analytics", answer=dict[str, Any], **more)

    return [
        route("queue-ops", queue_ops, "Messages pushed, settled, failed and given up over time", query=RangeQuery),
        route("queue-lag", queue_lag, "How far behind every group is", query=RangeQuery),
        route("postgres-stats", postgres, "Size, sessions, dead rows, what holds vacuum back"),
    ]
