"""The processes that serve the queues: how they are, what waits where, what upkeep deleted, and
waking them.
"""

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.queues.engine import Queues
from penstock.queues.presence import ALIVE, BEAT, Presence
from penstock.wire.auth import Role
from penstock.wire.http.api.bodies import answer, decoder
from penstock.wire.http.api.resources import RangeQuery
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import Route

WIDTHS = (1, 5, 15, 60, 360, 1440)  # minutes
MOST_POINTS = 120
REASONS = {
    "retention": "retentionMsgs",
    "completed": "completedRetentionMsgs",
    "eviction": "evictionMsgs",
    "ttl": "ttlMsgs",
}


class MachineQuery(RangeQuery, rename={"worker_id": "workerId"}, frozen=True):
    hostname: str | None = None
    worker_id: int | None = None


class RetentionQuery(RangeQuery, rename={"group_by": "groupBy"}, frozen=True):
    group_by: Literal["", "namespace", "task", "queue"] = ""


class NotifyBody(msgspec.Struct):
    queue: str
    partition: str | None = None


read_notify = decoder(
    NotifyBody, {"queue": "queue is required", "partition": "partition must be a string"}
)


def width_of(since: datetime, until: datetime) -> int:
    """Minutes per point, so that a range has a readable number of them."""
    minutes = (until - since).total_seconds() / 60
    return next((width for width in WIDTHS if minutes / width <= MOST_POINTS), WIDTHS[-1])


def routes(queues: Queues, presence: Presence) -> list[Route]:
    signals = queues.signals

    def frame(args: RangeQuery) -> tuple[datetime, datetime, int, dict[str, Any]]:
        since, until = args.range(timedelta(hours=1))
        minutes = width_of(since, until)
        return (
            since,
            until,
            minutes,
            {"timeRange": {"from": since, "to": until}, "bucketMinutes": minutes},
        )

    async def machines(request: Request) -> Response:
        args: MachineQuery = request.args
        since, until, minutes, about = frame(args)
        series = await presence.series(
            since, until, timedelta(minutes=minutes), args.hostname or None, args.worker_id
        )
        found = await presence.members()
        workers = [
            one
            for one in found
            if (not args.hostname or one["hostname"] == args.hostname)
            and (args.worker_id is None or one["workerId"] == args.worker_id)
        ]
        return answer(
            {**about, "timestamp": datetime.now(UTC), "workers": workers, "series": series}
        )

    async def parked(request: Request) -> Response:
        args: RangeQuery = request.args
        since, until, minutes, about = frame(args)
        series = await presence.parked(since, until, timedelta(minutes=minutes), args.queue or None)
        replicas = sorted({(row["hostname"], row["workerId"]) for row in series})
        return answer(
            {
                **about,
                "series": series,
                "replicas": [{"hostname": host, "workerId": worker} for host, worker in replicas],
            }
        )

    async def retention(request: Request) -> Response:
        args: RetentionQuery = request.args
        since, until, minutes, about = frame(args)
        rows = await queues.status.removals(
            since, until, timedelta(minutes=minutes), args.queue or None
        )
        series: dict[datetime, dict[str, Any]] = {}
        groups: dict[str, tuple[set[str], dict[str, Any]]] = {}
        totals = _none()
        for row in rows:
            _count(totals, row)
            _count(series.setdefault(row["bucket"], {"bucket": row["bucket"], **_none()}), row)
            if args.group_by and row["name"] is not None:  # of a queue that still exists
                key = row["name"] if args.group_by == "queue" else row[args.group_by]
                names, counts = groups.setdefault(key, (set(), _none()))
                names.add(row["name"])
                _count(counts, row)
        found: dict[str, Any] = {**about, "series": list(series.values()), "totals": totals}
        if args.group_by:
            ordered = sorted(groups.items(), key=lambda item: (-item[1][1]["totalMsgs"], item[0]))
            found["rows"] = [
                {"key": key, "queues": len(names), "totals": counts}
                for key, (names, counts) in ordered
            ]
        return answer(found)

    async def shared_state(_: Request) -> Response:
        members = await presence.members()
        return answer(
            {
                "enabled": True,
                "running": True,
                "serverId": presence.member,
                "transport": "postgresql",
                "serverHealth": {
                    "serversAlive": len(members),
                    "beatSeconds": BEAT,
                    "deadAfterSeconds": ALIVE,
                    "servers": [
                        {
                            name: one[name]
                            for name in (
                                "id",
                                "hostname",
                                "workerId",
                                "pid",
                                "startedAt",
                                "lastSeen",
                            )
                        }
                        for one in members
                    ],
                },
                "queueConfigCache": {"queues": queues.catalog.known, "changes": signals.changes},
                "consumerPresence": {"waitingPops": signals.waiting, "queues": signals.parked(100)},
            }
        )

    async def inter_instance(_: Request) -> Response:
        members = await presence.members()
        return answer(
            {
                "enabled": True,
                "transport": "postgresql",
                "serverId": presence.member,
                "peers": [one["id"] for one in members if one["id"] != presence.member],
                "sent": signals.sent,
                "received": signals.heard,
            }
        )

    def notify(request: Request) -> Response:
        body = read_notify(request.body)
        if not body.queue:
            raise InvalidRequest("queue is required")
        signals.available(body.queue, 1)
        return answer({"status": "ok"})

    def route(path: str, handler: Any, summary: str, **more: Any) -> Route:
        more = {"method": "GET", "answer": dict[str, Any], "tag": "analytics", **more}
        return Route(path=path, handler=handler, summary=summary, **more)

    inside: dict[str, Any] = {"role": Role.ADMIN, "tag": "internal"}
    base = "/api/v1/analytics"
    return [
        route(
            f"{base}/system-metrics",
            machines,
            "Processor and memory of every process",
            query=MachineQuery,
        ),
        route(
            f"{base}/worker-metrics", machines, "The same, under another name", query=MachineQuery
        ),
        route(
            f"{base}/queue-parked-replicas",
            parked,
            "Waiting pops per queue and process",
            query=RangeQuery,
        ),
        route(
            f"{base}/retention",
            retention,
            "Messages deleted by retention, eviction and ttl",
            query=RetentionQuery,
        ),
        route(
            "/api/v1/system/shared-state",
            shared_state,
            "What this process knows of the others",
            **inside,
        ),
        route(
            "/internal/api/shared-state/stats",
            shared_state,
            "The same, under another name",
            **inside,
        ),
        route(
            "/internal/api/inter-instance/stats",
            inter_instance,
            "Wake-ups between processes",
            **inside,
        ),
        route(
            "/internal/api/notify",
            notify,
            "Wake the pops that wait for a queue, in every process",
            method="POST",
            body=NotifyBody,
            decode=False,
            **inside,
        ),
    ]


def _none() -> dict[str, Any]:
    return {**dict.fromkeys(REASONS.values(), 0), "totalMsgs": 0, "eventCount": 0}


def _count(counts: dict[str, Any], row: dict[str, Any]) -> None:
    counts[REASONS[row["reason"]]] += row["messages"]
    counts["totalMsgs"] += row["messages"]
    counts["eventCount"] += row["steps"]
