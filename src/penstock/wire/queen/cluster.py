"""The processes that serve the queues, and the deletions of retention, in Queen MQ's API."""

from datetime import UTC, datetime, timedelta
from typing import ClassVar, Literal

import msgspec

from penstock.contract.queries import RangeQuery
from penstock.errors import InvalidRequest
from penstock.queues.admin.status import Removal
from penstock.queues.background.presence import BEAT_SECONDS, BrokerPresence, Presence
from penstock.queues.consumers import ALIVE_SECONDS
from penstock.queues.engine import Queues
from penstock.wire.auth import Role
from penstock.wire.http.answers import plain
from penstock.wire.http.routes import route
from penstock.wire.queen.aliases import Json, shape, time_range

WIDTHS = (1, 5, 15, 60, 360, 1440)  # minutes
MAX_POINTS = 120
REASONS = {  # why messages were deleted, and Queen's name for it
    "retention": "retentionMsgs",
    "completed": "completedRetentionMsgs",
    "eviction": "evictionMsgs",
    "ttl": "ttlMsgs",
}
_server = shape("hostname workerId=worker id pid startedAt lastSeen")
_load = shape("hostname workerId=worker bucket cpu memoryBytes waitingPops")
_parked = shape("hostname workerId=worker bucket queueName=queue parkedCount=parked")
LONG_FIGURES = ("parked", "consumers", "reports")  # only in the metrics of the processes


class MachineQuery(RangeQuery, rename={"worker_id": "workerId"}, frozen=True):
    hostname: str | None = None
    worker_id: int | None = None


class RetentionQuery(RangeQuery, rename={"group_by": "groupBy"}, frozen=True):
    group_by: Literal["", "namespace", "task", "queue"] = ""


class NotifyBody(msgspec.Struct):
    queue: str
    partition: str | None = None

    texts: ClassVar = {"queue": "queue is required", "partition": "partition must be a string"}


class ClusterApi:
    tag = "queen"

    def __init__(self, queues: Queues, presence: Presence) -> None:
        self._queues = queues
        self._presence = presence
        self._waiting = queues.waiting

    @route("GET", "/api/v1/analytics/system-metrics")
    @route(
        "GET",
        "/api/v1/analytics/worker-metrics",
        summary="Same as `/api/v1/analytics/system-metrics`",
    )
    async def machines(self, args: MachineQuery) -> Json:
        """CPU and memory of every broker process."""
        since, until, minutes = _frame(args)
        series = await self._presence.series(
            since, until, timedelta(minutes=minutes), args.hostname or None, args.worker_id
        )
        return {
            "timeRange": time_range(since, until),
            "bucketMinutes": minutes,
            "timestamp": datetime.now(UTC),
            "workers": [
                {**worker(one), **plain(one.figures)}
                for one in await self._presence.members()
                if (not args.hostname or one.hostname == args.hostname)
                and (args.worker_id is None or one.worker == args.worker_id)
            ],
            "series": [_load(point) for point in series],
        }

    @route("GET", "/api/v1/analytics/queue-parked-replicas")
    async def parked(self, args: RangeQuery) -> Json:
        """Pops waiting for messages, per queue and process."""
        since, until, minutes = _frame(args)
        series = await self._presence.parked(
            since, until, timedelta(minutes=minutes), args.queue or None
        )
        replicas = sorted({(point.hostname, point.worker) for point in series})
        return {
            "timeRange": time_range(since, until),
            "bucketMinutes": minutes,
            "series": [_parked(point) for point in series],
            "replicas": [{"hostname": host, "workerId": number} for host, number in replicas],
        }

    @route("GET", "/api/v1/analytics/retention")
    async def retention(self, args: RetentionQuery) -> Json:
        """Messages deleted by retention, eviction and TTL."""
        since, until, minutes = _frame(args)
        rows = await self._queues.status.removals(
            since, until, timedelta(minutes=minutes), args.queue or None
        )
        buckets: dict[datetime, list[Removal]] = {}
        groups: dict[str, list[Removal]] = {}
        for row in rows:
            buckets.setdefault(row.bucket, []).append(row)
            if args.group_by and row.queue is not None:  # of a queue that still exists
                groups.setdefault(getattr(row, args.group_by), []).append(row)
        answer: Json = {
            "timeRange": time_range(since, until),
            "bucketMinutes": minutes,
            "series": [{"bucket": bucket, **_removed(some)} for bucket, some in buckets.items()],
            "totals": _removed(rows),
        }
        if args.group_by:
            removed = [
                {"key": key, "queues": len({row.queue for row in some}), "totals": _removed(some)}
                for key, some in sorted(groups.items())
            ]
            answer["rows"] = sorted(removed, key=lambda one: -one["totals"]["totalMsgs"])
        return answer

    @route("GET", "/api/v1/system/shared-state", role=Role.ADMIN)
    @route(
        "GET",
        "/internal/api/shared-state/stats",
        summary="Same as `/api/v1/system/shared-state`",
        role=Role.ADMIN,
    )
    async def shared_state(self) -> Json:
        """Broker processes on this database, as this process sees them."""
        members = await self._presence.members()
        return {
            "enabled": True,
            "running": True,
            "serverId": self._presence.member,
            "transport": "postgresql",
            "serverHealth": {
                "serversAlive": len(members),
                "beatSeconds": BEAT_SECONDS,
                "deadAfterSeconds": ALIVE_SECONDS,
                "servers": [_server(one) for one in members],
            },
            "queueConfigCache": {
                "queues": len(self._queues.catalog.queues),
                "changes": self._waiting.changes,
            },
            "consumerPresence": {
                "waitingPops": self._waiting.parked,
                "queues": self._waiting.parked_by_queue(100),
            },
        }

    @route("GET", "/internal/api/inter-instance/stats", role=Role.ADMIN)
    async def inter_instance(self) -> Json:
        """Counts of notifications sent to and received from the other processes."""
        members = await self._presence.members()
        return {
            "enabled": True,
            "transport": "postgresql",
            "serverId": self._presence.member,
            "peers": [one.id for one in members if one.id != self._presence.member],
            "sent": self._waiting.sent,
            "received": self._waiting.heard,
        }

    @route("POST", "/internal/api/notify", role=Role.ADMIN)
    def notify(self, body: NotifyBody) -> Json:
        """Wake up the pops that wait for a queue, in every process."""
        if not body.queue:
            raise InvalidRequest("queue is required")
        self._waiting.wake(body.queue, 1)
        return {"status": "ok"}


def width_of(since: datetime, until: datetime) -> int:
    """Return the minutes per point, so that a range has at most MAX_POINTS."""
    minutes = (until - since).total_seconds() / 60
    return next((width for width in WIDTHS if minutes / width <= MAX_POINTS), WIDTHS[-1])


def _frame(args: RangeQuery) -> tuple[datetime, datetime, int]:
    since, until = args.range(timedelta(hours=1))
    return since, until, width_of(since, until)


def _removed(rows: list[Removal]) -> Json:
    """Return the number of deleted messages by reason."""
    by_reason = {
        name: sum(row.messages for row in rows if row.reason == reason)
        for reason, name in REASONS.items()
    }
    steps = sum(row.steps for row in rows)
    return {**by_reason, "totalMsgs": sum(by_reason.values()), "eventCount": steps}


def worker(one: BrokerPresence) -> Json:
    """Return a live process with its figures."""
    figures = plain(one.figures)
    brief = {name: figures[name] for name in figures if name not in LONG_FIGURES}
    return {**_server(one), "server": one.server, **brief}
