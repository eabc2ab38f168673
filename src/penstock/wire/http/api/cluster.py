"""The processes that serve the queues: how they are, what waits where, what upkeep deleted, and
waking them.
"""

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.queues.consumers import ALIVE_SECONDS
from penstock.queues.engine import Queues
from penstock.queues.presence import BEAT_SECONDS, Presence
from penstock.queues.status import Removal
from penstock.wire.auth import Role
from penstock.wire.http.api.bodies import answer, decoder, fields
from penstock.wire.http.api.resources import RangeQuery, worker_answer
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import route

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


class ClusterApi:
    """The processes that serve these queues."""

    tag = "analytics"

    def __init__(self, queues: Queues, presence: Presence) -> None:
        self._queues = queues
        self._presence = presence
        self._signals = queues.signals

    @route(
        "GET",
        "/api/v1/analytics/system-metrics",
        query=MachineQuery,
        answer=dict[str, Any],
        summary="Processor and memory of every process",
    )
    @route(
        "GET",
        "/api/v1/analytics/worker-metrics",
        query=MachineQuery,
        answer=dict[str, Any],
        summary="The same, under another name",
    )
    async def machines(self, request: Request) -> Response:
        args: MachineQuery = request.args
        since, until, minutes, about = _frame(args)
        series = await self._presence.series(
            since, until, timedelta(minutes=minutes), args.hostname or None, args.worker_id
        )
        workers = [
            worker_answer(one)
            for one in await self._presence.members()
            if (not args.hostname or one.hostname == args.hostname)
            and (args.worker_id is None or one.worker == args.worker_id)
        ]
        return answer(
            {
                **about,
                "timestamp": datetime.now(UTC),
                "workers": workers,
                "series": [
                    fields(point, "bucket", "hostname", "cpu", "memory_bytes", "waiting_pops")
                    | {"workerId": point.worker}
                    for point in series
                ],
            }
        )

    @route(
        "GET",
        "/api/v1/analytics/queue-parked-replicas",
        query=RangeQuery,
        answer=dict[str, Any],
        summary="Waiting pops per queue and process",
    )
    async def parked(self, request: Request) -> Response:
        args: RangeQuery = request.args
        since, until, minutes, about = _frame(args)
        series = await self._presence.parked(
            since, until, timedelta(minutes=minutes), args.queue or None
        )
        replicas = sorted({(point.hostname, point.worker) for point in series})
        return answer(
            {
                **about,
                "series": [
                    {
                        "bucket": point.bucket,
                        "queueName": point.queue,
                        "hostname": point.hostname,
                        "workerId": point.worker,
                        "parkedCount": point.parked,
                    }
                    for point in series
                ],
                "replicas": [{"hostname": host, "workerId": worker} for host, worker in replicas],
            }
        )

    @route(
        "GET",
        "/api/v1/analytics/retention",
        query=RetentionQuery,
        answer=dict[str, Any],
        summary="Messages deleted by retention, eviction and ttl",
    )
    async def retention(self, request: Request) -> Response:
        args: RetentionQuery = request.args
        since, until, minutes, about = _frame(args)
        rows = await self._queues.status.removals(
            since, until, timedelta(minutes=minutes), args.queue or None
        )
        series: dict[datetime, dict[str, Any]] = {}
        groups: dict[str, tuple[set[str], dict[str, Any]]] = {}
        totals = _none()
        for row in rows:
            _count(totals, row)
            _count(series.setdefault(row.bucket, {"bucket": row.bucket, **_none()}), row)
            if args.group_by and row.queue is not None:  # of a queue that still exists
                names, counts = groups.setdefault(getattr(row, args.group_by), (set(), _none()))
                names.add(row.queue)
                _count(counts, row)
        body: dict[str, Any] = {**about, "series": list(series.values()), "totals": totals}
        if args.group_by:
            ordered = sorted(groups.items(), key=lambda item: (-item[1][1]["totalMsgs"], item[0]))
            body["rows"] = [
                {"key": key, "queues": len(names), "totals": counts}
                for key, (names, counts) in ordered
            ]
        return answer(body)

    @route(
        "GET",
        "/api/v1/system/shared-state",
        answer=dict[str, Any],
        summary="What this process knows of the others",
        tag="internal",
        role=Role.ADMIN,
    )
    @route(
        "GET",
        "/internal/api/shared-state/stats",
        answer=dict[str, Any],
        summary="The same, under another name",
        tag="internal",
        role=Role.ADMIN,
    )
    async def shared_state(self, _: Request) -> Response:
        members = await self._presence.members()
        return answer(
            {
                "enabled": True,
                "running": True,
                "serverId": self._presence.member,
                "transport": "postgresql",
                "serverHealth": {
                    "serversAlive": len(members),
                    "beatSeconds": BEAT_SECONDS,
                    "deadAfterSeconds": ALIVE_SECONDS,
                    "servers": [
                        fields(one, "id", "hostname", "pid", "started_at", "last_seen")
                        | {"workerId": one.worker}
                        for one in members
                    ],
                },
                "queueConfigCache": {
                    "queues": self._queues.catalog.known,
                    "changes": self._signals.changes,
                },
                "consumerPresence": {
                    "waitingPops": self._signals.waiting,
                    "queues": self._signals.parked(100),
                },
            }
        )

    @route(
        "GET",
        "/internal/api/inter-instance/stats",
        answer=dict[str, Any],
        summary="Wake-ups between processes",
        tag="internal",
        role=Role.ADMIN,
    )
    async def inter_instance(self, _: Request) -> Response:
        members = await self._presence.members()
        return answer(
            {
                "enabled": True,
                "transport": "postgresql",
                "serverId": self._presence.member,
                "peers": [one.id for one in members if one.id != self._presence.member],
                "sent": self._signals.sent,
                "received": self._signals.heard,
            }
        )

    @route(
        "POST",
        "/internal/api/notify",
        body=NotifyBody,
        decode=False,
        answer=dict[str, Any],
        summary="Wake the pops that wait for a queue, in every process",
        tag="internal",
        role=Role.ADMIN,
    )
    def notify(self, request: Request) -> Response:
        body = read_notify(request.body)
        if not body.queue:
            raise InvalidRequest("queue is required")
        self._signals.available(body.queue, 1)
        return answer({"status": "ok"})


def _frame(args: RangeQuery) -> tuple[datetime, datetime, int, dict[str, Any]]:
    since, until = args.range(timedelta(hours=1))
    minutes = width_of(since, until)
    return (
        since,
        until,
        minutes,
        {"timeRange": {"from": since, "to": until}, "bucketMinutes": minutes},
    )


def _none() -> dict[str, Any]:
    return {**dict.fromkeys(REASONS.values(), 0), "totalMsgs": 0, "eventCount": 0}


def _count(counts: dict[str, Any], row: Removal) -> None:
    counts[REASONS[row.reason]] += row.messages
    counts["totalMsgs"] += row.messages
    counts["eventCount"] += row.steps
