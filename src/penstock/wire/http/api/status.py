"""How the queues are: their counts, their throughput, their dead letters and who serves them.

Nothing here counts rows: totals come from counters the engine keeps.
"""

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import ClassVar

from penstock.contract.noun import Noun, Pagination, TimeRange
from penstock.contract.queries import BUCKETS, Limit, Paged, RangeQuery
from penstock.contract.queues import PartitionCounts, QueueNames
from penstock.protocol.queue_options import QueueOptions
from penstock.queues.admin.dead_letters import ErrorCount, Which
from penstock.queues.admin.messages import MessageFilter
from penstock.queues.admin.status import QueueFilter, total
from penstock.queues.background.presence import OperationCounts, Presence
from penstock.queues.engine import Queues
from penstock.wire.auth import Role
from penstock.wire.http.answers import of, plain
from penstock.wire.http.api.cluster import Worker, worker_answer
from penstock.wire.http.api.resources import (
    PageQuery,
    QueueCounts,
    QueuePartition,
    QueuesQuery,
    QueueSummary,
    next_cursor,
    summaries,
)
from penstock.wire.http.api.stored import NewestMessage
from penstock.wire.http.messages import Response, json_response
from penstock.wire.http.routes import route

STATUS_QUEUES = 200  # named in the summary of the broker


class StatusQueuesQuery(QueuesQuery, frozen=True):
    limit: Limit = 100


class MessagesQuery(Paged, frozen=True):
    limit: Limit = 50

    farther: ClassVar[str] = (
        "read on with GET /api/v1/messages?queue=...&cursor=<next of the page before>"
    )


class QueuePage(Noun):
    queues: list[QueueSummary]
    pagination: Pagination
    next: str | None  # the cursor of the page behind; null: there is none


class QueueConfig(Noun):
    """Some options of a queue, named as Queen MQ names them; `options` has all."""

    lease_time: int
    retry_limit: int
    retry_delay: int
    ttl: int
    dead_letter_queue: bool
    max_queue_size: int


class ConfiguredQueue(QueueNames):
    priority: int
    options: QueueOptions
    config: QueueConfig


class Consumed(Noun):
    total_consumed: int
    batches_consumed: int


class PartitionStatus(QueuePartition):
    last_activity: datetime
    messages: PartitionCounts
    cursor: Consumed


class Totals(QueueCounts):
    messages: QueueCounts


class QueueDetails(Noun):
    queue: ConfiguredQueue
    partitions: list[PartitionStatus]
    partition_count: int
    totals: Totals


class Throughput(Noun):
    ingested_per_second: float
    processed_per_second: float


class Spread(Noun):
    avg: float = 0
    median: float = 0
    min: float = 0
    max: float = 0


class Lag(Noun):
    time: Spread  # seconds
    offset: Spread  # messages


class Overview(Noun):
    queues: int
    partitions: int
    namespaces: int
    tasks: int
    messages: QueueCounts
    throughput: Throughput
    lag: Lag
    timestamp: datetime
    stats_age: int  # always 0: counters are exact


class ThroughputPoint(Noun):
    timestamp: datetime
    ingested: int
    processed: int
    failed: int
    dead_letter: int
    ingested_per_second: float
    processed_per_second: float


class Operations(Noun):
    push: int
    pop: int
    ack: int


class BatchSizes(Noun):
    """Messages per request."""

    push: float
    pop: float
    ack: float


class StatusCounts(QueueCounts):
    requests: Operations
    batch_efficiency: BatchSizes


class LeaseCounts(Noun):
    active: int
    partitions_with_leases: int
    total_batch_size: int
    total_acked: int


class DeadLetterCounts(Noun):
    total_messages: int
    affected_partitions: int
    top_errors: list[ErrorCount]


class ErrorCounts(Noun):
    db_errors: int
    ack_failed: int
    dlq_messages: int


class StatusAnswer(Noun):
    time_range: TimeRange
    bucket_minutes: int
    point_count: int
    throughput: list[ThroughputPoint]
    queues: list[QueueSummary]  # the newest; GET /api/v1/status/queues has all, in pages
    queue_count: int  # of all
    messages: StatusCounts
    leases: LeaseCounts
    dead_letter_queue: DeadLetterCounts
    workers: list[Worker]
    errors: ErrorCounts
    stats_age: int  # always 0: counters are exact


class PushedPoint(Noun):
    timestamp: datetime
    messages: int


class Pushed(TimeRange):
    interval: str
    data_points: list[PushedPoint]


class Refreshed(Noun):
    folded: int | None  # rows of the counters' log
    skipped: bool  # another broker is at it


class StatusApi:
    tag = "resources"

    def __init__(self, queues: Queues, presence: Presence) -> None:
        self._queues = queues
        self._status = queues.status
        self._presence = presence

    @route("GET", "/api/v1/status/queues")
    async def queues(self, args: StatusQueuesQuery) -> QueuePage | Response:
        """List queues, in pages."""
        page = await self._status.page(args.wanted, args.limit, args.offset)
        total = await self._status.count(args.wanted)
        pagination = Pagination(args.limit, args.offset, total)
        answer = QueuePage(await summaries(page), pagination, next_cursor(page))
        return await asyncio.to_thread(lambda: json_response(plain(answer)))

    @route("GET", "/api/v1/status/queues/{queue}")
    async def queue(self, queue: str, args: PageQuery) -> QueueDetails:
        """A queue with its options and partitions."""
        status = await self._status.queue(queue)
        rows = await self._status.partitions(status, args.limit, args.offset)
        options = status.info.options
        totals = of(QueueCounts, status.counts)
        return QueueDetails(
            queue=of(
                ConfiguredQueue,
                status.info,
                id=status.info.uuid,
                priority=options.priority,
                config=of(QueueConfig, options, max_queue_size=options.max_size),
            ),
            partitions=[
                of(
                    PartitionStatus,
                    row,
                    messages=of(PartitionCounts, row.counts),
                    stats=of(PartitionCounts, row.counts),
                    cursor=Consumed(row.counts.completed, row.batches),
                )
                for row in rows
            ],
            partition_count=status.partitions,
            totals=of(Totals, status.counts, messages=totals),
        )

    @route("GET", "/api/v1/status/queues/{queue}/messages")
    async def newest(self, queue: str, args: MessagesQuery) -> list[NewestMessage]:
        """A queue's newest messages."""
        await self._queues.admin.describe(queue)
        which = MessageFilter(queue=queue, since=datetime(1970, 1, 2, tzinfo=UTC))
        page = await self._queues.messages.listing(which, args.limit, args.offset)
        return [
            of(NewestMessage, row, queue_path=f"{row.queue}/{row.partition}")
            for row in page.messages
        ]

    @route("GET", "/api/v1/resources/overview")
    async def overview(self) -> Overview:
        """Totals over all queues."""
        sums = await self._status.overview()
        groups = await self._queues.groups.listing()
        return of(
            Overview,
            sums,
            messages=of(QueueCounts, sums.messages),
            throughput=Throughput(sums.pushed_per_second, sums.completed_per_second),
            lag=Lag(
                _spread([group.lag_seconds for group in groups]),
                _spread([group.waiting for group in groups]),
            ),
            timestamp=datetime.now(UTC),
            stats_age=0,
        )

    @route("GET", "/api/v1/status")
    async def status(self, args: RangeQuery) -> StatusAnswer:
        """Summary of the broker: throughput, queues, backlog, dead letters and workers."""
        since, until = args.range(timedelta(hours=1))
        minutes = max(1, round((until - since).total_seconds() / 60 / 60))
        wanted = (args.queue or None, args.namespace or None, args.task or None)
        points = await self._status.history(since, until, timedelta(minutes=minutes), *wanted)
        which = QueueFilter(args.namespace or None, args.task or None, args.queue or None)
        page = await self._status.page(which, STATUS_QUEUES)
        sums = await self._status.totals(which, lambda _: "")
        counts = total([one.counts for one in sums])
        errors = await self._queues.dead.errors(Which(queue=args.queue or None))
        leases = await self._status.leases()
        workers = await self._presence.members()
        requests = _operations(worker.figures.requests for worker in workers)
        messages = _operations(worker.figures.messages for worker in workers)
        return StatusAnswer(
            time_range=TimeRange(since, until),
            bucket_minutes=minutes,
            point_count=len(points),
            throughput=[
                ThroughputPoint(
                    timestamp=point.bucket,
                    ingested=point.pushed,
                    processed=point.completed,
                    failed=point.failed,
                    dead_letter=point.dead,
                    ingested_per_second=point.pushed / minutes / 60,
                    processed_per_second=point.completed / minutes / 60,
                )
                for point in points
            ],
            queues=await summaries(page),
            queue_count=sum(one.queues for one in sums),
            messages=of(
                StatusCounts,
                counts,
                requests=requests,
                batch_efficiency=BatchSizes(
                    _ratio(messages.push, requests.push),
                    _ratio(messages.pop, requests.pop),
                    _ratio(messages.ack, requests.ack),
                ),
            ),
            leases=LeaseCounts(leases.active, leases.partitions, leases.taken, leases.acked),
            dead_letter_queue=DeadLetterCounts(
                total_messages=counts.dead_letter,
                affected_partitions=errors.affected_partitions,
                top_errors=errors.top_errors,
            ),
            workers=[worker_answer(Worker, worker) for worker in workers],
            errors=ErrorCounts(
                db_errors=sum(worker.figures.db_errors for worker in workers),
                ack_failed=counts.failed or 0,
                dlq_messages=counts.dead_letter,
            ),
            stats_age=0,
        )

    @route("GET", "/api/v1/status/analytics")
    async def analytics(self, args: RangeQuery) -> Pushed:
        """Messages pushed over time."""
        since, until = args.range(timedelta(hours=24))
        wanted = (args.queue or None, args.namespace or None, args.task or None)
        points = await self._status.history(since, until, BUCKETS[args.interval], *wanted)
        pushed = [PushedPoint(point.bucket, point.pushed) for point in points]
        return Pushed(since, until, args.interval, pushed)

    @route("POST", "/api/v1/stats/refresh", role=Role.ADMIN)
    async def refresh(self) -> Refreshed:
        """Compact the internal log of counters now; counts are exact without it."""
        folded = await self._status.refresh()
        return Refreshed(folded, skipped=folded is None)


def _operations(counts: Iterable[OperationCounts]) -> Operations:
    ones = list(counts)
    return Operations(
        sum(one.push for one in ones), sum(one.pop for one in ones), sum(one.ack for one in ones)
    )


def _ratio(messages: int, requests: int) -> float:
    return round(messages / max(1, requests), 2)


def _spread(values: list[int]) -> Spread:
    if not values:
        return Spread()
    ordered = sorted(values)
    return Spread(sum(ordered) / len(ordered), ordered[len(ordered) // 2], ordered[0], ordered[-1])
