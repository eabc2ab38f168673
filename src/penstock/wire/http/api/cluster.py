"""The processes that serve the queues: how they are, what waits where, what upkeep deleted, and
waking them.
"""

from datetime import UTC, datetime, timedelta
from typing import ClassVar, Literal, TypeVar

import msgspec

from penstock.contract.consumers import ConsumerHealth
from penstock.contract.noun import Noun, TimeRange
from penstock.contract.queries import RangeQuery
from penstock.errors import InvalidRequest
from penstock.queues.admin.status import Removal
from penstock.queues.background.presence import (
    BEAT_SECONDS,
    BrokerPresence,
    OperationCounts,
    PoolFigures,
    Presence,
    RequestCounts,
)
from penstock.queues.consumers import ALIVE_SECONDS
from penstock.queues.engine import Queues
from penstock.wire.auth import Role
from penstock.wire.http.answers import of
from penstock.wire.http.routes import route

WIDTHS = (1, 5, 15, 60, 360, 1440)  # minutes
MAX_POINTS = 120
REASONS = {  # why messages were deleted, and its field of `RemovalCounts`
    "retention": "retention_msgs",
    "completed": "completed_retention_msgs",
    "eviction": "eviction_msgs",
    "ttl": "ttl_msgs",
}
W = TypeVar("W", bound="Worker")


class MachineQuery(RangeQuery, rename={"worker_id": "workerId"}, frozen=True):
    hostname: str | None = None
    worker_id: int | None = None


class RetentionQuery(RangeQuery, rename={"group_by": "groupBy"}, frozen=True):
    group_by: Literal["", "namespace", "task", "queue"] = ""


class NotifyBody(msgspec.Struct):
    queue: str
    partition: str | None = None

    texts: ClassVar = {"queue": "queue is required", "partition": "partition must be a string"}


class Replica(Noun):
    hostname: str
    worker_id: int


class ServerSeen(Replica):
    id: str
    pid: int
    started_at: datetime
    last_seen: datetime


class Worker(ServerSeen):
    """A process that is alive, with its figures."""

    server: str
    version: str
    cpu: float  # cores in use
    cpu_user_seconds: float
    cpu_system_seconds: float
    memory_bytes: int
    load_average: float
    waiting_pops: int
    requests: RequestCounts
    messages: OperationCounts
    db_errors: int
    pool: PoolFigures


class WorkerDetails(Worker):
    parked: dict[str, int]  # queue -> pops that wait for it
    consumers: list[tuple[str, str, int]]  # queue, group, connections that pop
    reports: list[ConsumerHealth]


class LoadPoint(Replica):
    bucket: datetime
    cpu: float
    memory_bytes: int
    waiting_pops: float


class Series(Noun):
    """What answers about a range of time begin with."""

    time_range: TimeRange
    bucket_minutes: int


class Machines(Series):
    timestamp: datetime
    workers: list[WorkerDetails]
    series: list[LoadPoint]


class ParkedPoint(Replica):
    bucket: datetime
    queue_name: str
    parked_count: float


class Parked(Series):
    series: list[ParkedPoint]
    replicas: list[Replica]


class RemovalCounts(Noun):
    """Messages that were deleted, by reason."""

    retention_msgs: int = 0
    completed_retention_msgs: int = 0
    eviction_msgs: int = 0
    ttl_msgs: int = 0
    total_msgs: int = 0
    event_count: int = 0

    def add(self, row: Removal) -> None:
        reason = REASONS[row.reason]
        setattr(self, reason, getattr(self, reason) + row.messages)
        self.total_msgs += row.messages
        self.event_count += row.steps


class RemovalPoint(RemovalCounts, kw_only=True):
    bucket: datetime


class RemovalRow(Noun):
    key: str | None  # namespace, task or queue
    queues: int
    totals: RemovalCounts


class Removals(Series):
    series: list[RemovalPoint]
    totals: RemovalCounts
    rows: list[RemovalRow] | msgspec.UnsetType = msgspec.UNSET  # when groupBy is given


class ServerHealth(Noun):
    servers_alive: int
    beat_seconds: float
    dead_after_seconds: float
    servers: list[ServerSeen]


class QueueConfigCache(Noun):
    queues: int
    changes: int


class ConsumerPresence(Noun):
    waiting_pops: int
    queues: dict[str, int]


class SharedState(Noun):
    enabled: bool
    running: bool
    server_id: str
    transport: str
    server_health: ServerHealth
    queue_config_cache: QueueConfigCache
    consumer_presence: ConsumerPresence


class InterInstance(Noun):
    enabled: bool
    transport: str
    server_id: str
    peers: list[str]
    sent: int
    received: int


class Notified(Noun):
    status: str = "ok"


def width_of(since: datetime, until: datetime) -> int:
    """Minutes per point, so that a range has a readable number of them."""
    minutes = (until - since).total_seconds() / 60
    return next((width for width in WIDTHS if minutes / width <= MAX_POINTS), WIDTHS[-1])


class ClusterApi:
    tag = "analytics"

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
    async def machines(self, args: MachineQuery) -> Machines:
        """CPU and memory of every broker process."""
        since, until, minutes = _frame(args)
        series = await self._presence.series(
            since, until, timedelta(minutes=minutes), args.hostname or None, args.worker_id
        )
        workers = [
            worker_answer(WorkerDetails, one)
            for one in await self._presence.members()
            if (not args.hostname or one.hostname == args.hostname)
            and (args.worker_id is None or one.worker == args.worker_id)
        ]
        points = [of(LoadPoint, point, worker_id=point.worker) for point in series]
        now = datetime.now(UTC)
        return Machines(TimeRange(since, until), minutes, now, workers, points)

    @route("GET", "/api/v1/analytics/queue-parked-replicas")
    async def parked(self, args: RangeQuery) -> Parked:
        """Pops waiting for messages, per queue and process."""
        since, until, minutes = _frame(args)
        series = await self._presence.parked(
            since, until, timedelta(minutes=minutes), args.queue or None
        )
        points = [
            ParkedPoint(point.hostname, point.worker, point.bucket, point.queue, point.parked)
            for point in series
        ]
        replicas = sorted({(point.hostname, point.worker) for point in series})
        return Parked(TimeRange(since, until), minutes, points, [Replica(*one) for one in replicas])

    @route("GET", "/api/v1/analytics/retention")
    async def retention(self, args: RetentionQuery) -> Removals:
        """Messages deleted by retention, eviction and TTL."""
        since, until, minutes = _frame(args)
        rows = await self._queues.status.removals(
            since, until, timedelta(minutes=minutes), args.queue or None
        )
        series: dict[datetime, RemovalPoint] = {}
        groups: dict[str, tuple[set[str], RemovalCounts]] = {}
        totals = RemovalCounts()
        for row in rows:
            totals.add(row)
            series.setdefault(row.bucket, RemovalPoint(bucket=row.bucket)).add(row)
            if args.group_by and row.queue is not None:  # of a queue that still exists
                key = getattr(row, args.group_by)
                names, counts = groups.setdefault(key, (set(), RemovalCounts()))
                names.add(row.queue)
                counts.add(row)
        body = Removals(TimeRange(since, until), minutes, list(series.values()), totals)
        if args.group_by:
            ordered = sorted(groups.items(), key=lambda item: (-item[1][1].total_msgs, item[0]))
            body.rows = [RemovalRow(key, len(names), counts) for key, (names, counts) in ordered]
        return body

    @route("GET", "/api/v1/system/shared-state", tag="internal", role=Role.ADMIN)
    @route(
        "GET",
        "/internal/api/shared-state/stats",
        summary="Same as `/api/v1/system/shared-state`",
        tag="internal",
        role=Role.ADMIN,
    )
    async def shared_state(self) -> SharedState:
        """Broker processes on this database, as this process sees them."""
        members = await self._presence.members()
        servers = [of(ServerSeen, one, worker_id=one.worker) for one in members]
        return SharedState(
            enabled=True,
            running=True,
            server_id=self._presence.member,
            transport="postgresql",
            server_health=ServerHealth(len(members), BEAT_SECONDS, ALIVE_SECONDS, servers),
            queue_config_cache=QueueConfigCache(
                self._queues.catalog.cached_queues, self._waiting.changes
            ),
            consumer_presence=ConsumerPresence(
                self._waiting.parked, self._waiting.parked_by_queue(100)
            ),
        )

    @route("GET", "/internal/api/inter-instance/stats", tag="internal", role=Role.ADMIN)
    async def inter_instance(self) -> InterInstance:
        """Counts of notifications sent to and received from the other processes."""
        members = await self._presence.members()
        return InterInstance(
            enabled=True,
            transport="postgresql",
            server_id=self._presence.member,
            peers=[one.id for one in members if one.id != self._presence.member],
            sent=self._waiting.sent,
            received=self._waiting.heard,
        )

    @route("POST", "/internal/api/notify", tag="internal", role=Role.ADMIN)
    def notify(self, body: NotifyBody) -> Notified:
        """Wake up the pops that wait for a queue, in every process."""
        if not body.queue:
            raise InvalidRequest("queue is required")
        self._waiting.available(body.queue, 1)
        return Notified()


def _frame(args: RangeQuery) -> tuple[datetime, datetime, int]:
    since, until = args.range(timedelta(hours=1))
    return since, until, width_of(since, until)


def worker_answer(kind: type[W], one: BrokerPresence) -> W:
    """A process with its figures, in one object."""
    return of(kind, one, one.figures, worker_id=one.worker)
