"""Queues, namespaces and the broker's status, in Queen MQ's API.

Rows are not counted here: totals come from counters of the engine.
"""

import asyncio
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.contract import operations
from penstock.contract.queries import BUCKETS, GroupListQuery, Limit, Paged, RangeQuery
from penstock.errors import InvalidRequest
from penstock.queues.admin.dead_letters import Which
from penstock.queues.admin.messages import MessageFilter
from penstock.queues.admin.status import PartitionStatus, QueueFilter, QueueStatus, QueueStatusPage
from penstock.queues.admin.status import total as sum_of
from penstock.queues.background.presence import OperationCounts, Presence
from penstock.queues.engine import Queues
from penstock.wire.auth import Role
from penstock.wire.http.answers import plain
from penstock.wire.http.messages import Response, json_response
from penstock.wire.http.routes import route
from penstock.wire.queen.aliases import Json, counts, page, shape, time_range
from penstock.wire.queen.cluster import worker

STATUS_QUEUES = 200  # named in the summary of the broker
PARTITIONS = "read on with GET /api/v1/resources/partitions?queue=...&after=<id of the last one>"
_CURSOR = re.compile("[0-7]?[0-9a-f]{1,7}")

_queue = shape("id=uuid name namespace task createdAt")
_config = shape("leaseTime retryLimit retryDelay ttl deadLetterQueue maxQueueSize=max_size")
_times = shape("id name createdAt oldestMessage newestMessage")
_overview = shape("queues partitions namespaces tasks")
_rates = shape("ingestedPerSecond=pushed_per_second processedPerSecond=completed_per_second")
_leases = shape("active partitionsWithLeases=partitions totalBatchSize=taken totalAcked=acked")
_point = shape("timestamp=bucket ingested=pushed processed=completed failed deadLetter=dead")
_pushed = shape("timestamp=bucket messages=pushed")
_operation = shape("timestamp=bucket pushed done=completed failed dead")


class QueuesQuery(Paged, frozen=True):
    namespace: str | None = None
    task: str | None = None
    limit: Limit = 10_000
    cursor: str | None = None

    farther: ClassVar[str] = "read on with cursor=<next of the page before>"

    @property
    def wanted(self) -> QueueFilter:
        before = None if self.cursor is None else _queue_number(self.cursor)
        return QueueFilter(self.namespace or None, self.task or None, before=before)


class LabelsQuery(msgspec.Struct, frozen=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10_000
    cursor: str = ""


class StatusQueuesQuery(QueuesQuery, frozen=True):
    limit: Limit = 100


class PageQuery(Paged, frozen=True):
    limit: Limit = 1000

    farther: ClassVar[str] = PARTITIONS


class PartitionsQuery(Paged, frozen=True):
    queue: str | None = None
    limit: Limit = 100
    after: str | None = None

    farther: ClassVar[str] = PARTITIONS


class DepthQuery(msgspec.Struct, frozen=True):
    group: str | None = None
    limit: Limit = 10_000


class NewestQuery(Paged, frozen=True):
    limit: Limit = 50

    farther: ClassVar[str] = (
        "read on with GET /api/v1/messages?queue=...&cursor=<next of the page before>"
    )


class QueenQueuesApi:
    tag = "queen"

    def __init__(self, queues: Queues, presence: Presence) -> None:
        self._queues = queues
        self._status = queues.status
        self._presence = presence

    @route("GET", "/api/v1/resources/queues", answer=dict[str, Any])
    async def list_queues(self, args: QueuesQuery) -> Response:
        """List queues, the newest first. Without `limit`, the newest 10,000."""
        listing = await self._status.page(args.wanted, args.limit, args.offset)
        return await _page(listing)

    @route("GET", "/api/v1/status/queues", answer=dict[str, Any])
    async def status_queues(self, args: StatusQueuesQuery) -> Response:
        """List queues, in pages."""
        listing = await self._status.page(args.wanted, args.limit, args.offset)
        total = await self._status.count(args.wanted)
        return await _page(listing, pagination=page(args.limit, args.offset, total=total))

    @route("GET", "/api/v1/resources/queues/{queue}")
    async def one(self, queue: str, args: PageQuery) -> Json:
        """Get a queue and its partitions."""
        status = await self._status.queue(queue)
        rows = await self._status.partitions(status, args.limit, args.offset)
        return {
            **_names(status),
            "partitions": [_partition(row) for row in rows],
            "totals": counts(status.counts),
        }

    @route("GET", "/api/v1/status/queues/{queue}")
    async def queue(self, queue: str, args: PageQuery) -> Json:
        """Get a queue with its options and partitions."""
        status = await self._status.queue(queue)
        rows = await self._status.partitions(status, args.limit, args.offset)
        options, totals = status.info.options, counts(status.counts)
        return {
            "queue": {
                **_names(status),
                "priority": options.priority,
                "options": options,
                "config": _config(options),
            },
            "partitions": [
                {
                    **_partition(row),
                    "messages": counts(row.counts),
                    "lastActivity": row.last_activity,
                    "cursor": {
                        "totalConsumed": row.counts.completed,
                        "batchesConsumed": row.batches,
                    },
                }
                for row in rows
            ],
            "partitionCount": status.partitions,
            "totals": {**totals, "messages": totals},
        }

    @route(
        "DELETE",
        "/api/v1/resources/queues/{queue}",
        role=Role.ADMIN,
        audit=operations.DELETE_QUEUE.audit,
    )
    async def delete(self, queue: str) -> Json:
        """Delete a queue with all its messages."""
        existed = await self._queues.admin.delete(queue)
        return {"deleted": True, "queue": queue, "existed": existed}

    @route("GET", "/api/v1/resources/queues/{queue}/depth")
    async def depth(self, queue: str, args: DepthQuery) -> Json:
        """Count the messages that a group has not finished, in the queue and in its partitions.
        Without `group`, those of the group with the largest lag, or of queue mode if it is used.
        """
        status = await self._status.queue(queue)
        group = status.figures.seen_by(args.group)
        waiting = group.waiting if group else status.figures.stored
        leased = group.leased if group else 0
        rows = await self._status.partitions(status, args.limit, group=args.group)
        partitions = [
            {"partition": row.name, **_depth(row.counts.waiting, row.counts.leased)} for row in rows
        ]
        return {
            "queue": queue,
            "group": args.group,
            **_depth(waiting, leased),
            "partitionsPending": sum(one["pending"] > 0 for one in partitions),
            "partitionsReady": sum(one["ready"] > 0 for one in partitions),
            "partitions": partitions,
        }

    @route("GET", "/api/v1/resources/partitions")
    async def partitions(self, args: PartitionsQuery) -> Json:
        """List partitions."""
        partitions = await self._queues.admin.partitions(
            args.queue or None, args.limit, args.offset, args.after
        )
        return {"partitions": partitions, "pagination": page(args.limit, args.offset)}

    @route("GET", "/api/v1/resources/namespaces", answer=dict[str, Any])
    async def namespaces(self, args: LabelsQuery) -> Response:
        """List namespaces with their totals, by name. Without `limit`, the first 10,000."""
        return await self._labels("namespace", args)

    @route("GET", "/api/v1/resources/tasks", answer=dict[str, Any])
    async def tasks(self, args: LabelsQuery) -> Response:
        """List tasks (labels of queues) with their totals, by name. Without `limit`, the first
        10,000.
        """
        return await self._labels("task", args)

    async def _labels(self, label: Literal["namespace", "task"], args: LabelsQuery) -> Response:
        sums = await self._status.labels(label, args.limit, args.cursor)
        following = sums[-1].name if len(sums) == args.limit else None
        return await asyncio.to_thread(
            lambda: json_response(
                plain({f"{label}s": [_sums(label, one) for one in sums], "next": following})
            )
        )

    @route("GET", "/api/v1/status/queues/{queue}/messages")
    async def newest(self, queue: str, args: NewestQuery) -> list[Json]:
        """List a queue's newest messages."""
        await self._queues.admin.describe(queue)
        which = MessageFilter(queue=queue, since=datetime(1970, 1, 2, tzinfo=UTC))
        listing = await self._queues.messages.listing(which, args.limit, args.offset)
        return [plain(message) for message in listing.messages]

    @route("GET", "/api/v1/resources/overview")
    async def overview(self) -> Json:
        """Totals over all queues."""
        sums = await self._status.overview()
        groups = await self._queues.groups.listing()
        return {
            **_overview(sums),
            "messages": counts(sums.messages),
            "throughput": _rates(sums),
            "lag": {
                "time": _spread([group.lag_seconds for group in groups]),
                "offset": _spread([group.waiting for group in groups]),
            },
            "timestamp": datetime.now(UTC),
            "statsAge": 0,  # counters are exact
        }

    @route("GET", "/api/v1/status")
    async def status(self, args: RangeQuery) -> Json:
        """Summary of the broker: throughput, queues, backlog, dead letters and workers."""
        since, until = args.range(timedelta(hours=1))
        minutes = max(1, round((until - since).total_seconds() / 60 / 60))
        points = await self._history(args, since, until, timedelta(minutes=minutes))
        which = QueueFilter(args.namespace or None, args.task or None, args.queue or None)
        listing = await self._status.page(which, STATUS_QUEUES)
        sums = await self._status.totals(which, lambda _: "")
        totals = sum_of([one.counts for one in sums])
        errors = await self._queues.dead.errors(Which(queue=args.queue or None))
        leases = await self._status.leases()
        workers = await self._presence.members()
        requests = _operations(one.figures.requests for one in workers)
        messages = _operations(one.figures.messages for one in workers)
        return {
            "timeRange": time_range(since, until),
            "bucketMinutes": minutes,
            "pointCount": len(points),
            "throughput": [
                {
                    **_point(point),
                    "ingestedPerSecond": point.pushed / minutes / 60,
                    "processedPerSecond": point.completed / minutes / 60,
                }
                for point in points
            ],
            "queues": await asyncio.to_thread(lambda: [_summary(one) for one in listing.queues]),
            "queueCount": sum(one.queues for one in sums),
            "messages": {
                **counts(totals),
                "requests": requests,
                "batchEfficiency": {  # messages per request
                    kind: round(messages[kind] / max(1, requests[kind]), 2) for kind in requests
                },
            },
            "leases": _leases(leases),
            "deadLetterQueue": {
                "totalMessages": totals.dead_letters,
                "affectedPartitions": errors.affected_partitions,
                "topErrors": errors.top_errors,
            },
            "workers": [worker(one) for one in workers],
            "errors": {
                "dbErrors": sum(one.figures.db_errors for one in workers),
                "ackFailed": totals.failed or 0,
                "dlqMessages": totals.dead_letters,
            },
            "statsAge": 0,
        }

    @route("GET", "/api/v1/status/analytics")
    async def pushed(self, args: RangeQuery) -> Json:
        """Messages pushed over time."""
        since, until = args.range(timedelta(hours=24))
        points = await self._history(args, since, until, BUCKETS[args.interval])
        return {
            **time_range(since, until),
            "interval": args.interval,
            "dataPoints": [_pushed(point) for point in points],
        }

    @route("GET", "/api/v1/analytics/queue-ops")
    async def queue_ops(self, args: RangeQuery) -> Json:
        """Messages pushed, completed, failed and dead-lettered over time."""
        since, until = args.range(timedelta(hours=1))
        width = BUCKETS["minute"] if until - since <= timedelta(hours=6) else BUCKETS[args.interval]
        points = await self._status.history(since, until, width, args.queue or None)
        return {
            "timeRange": time_range(since, until),
            "series": [_operation(point) for point in points],
        }

    @route("GET", "/api/v1/analytics/queue-lag")
    async def queue_lag(self, args: GroupListQuery) -> Json:
        """Lag of consumer groups, by queue."""
        groups = await self._queues.groups.listing(
            None, args.queue or None, args.limit, (args.after_queue, args.after_group)
        )
        return {"timestamp": datetime.now(UTC), "groups": groups}

    @route("GET", "/api/v1/analytics/postgres-stats")
    async def postgres(self) -> Json:
        """PostgreSQL: database and table sizes, dead rows, and the oldest transaction, which
        blocks vacuum.
        """
        return shape("database oldestTransaction tables")(await self._status.postgres())

    @route("POST", "/api/v1/stats/refresh", role=Role.ADMIN)
    async def refresh(self) -> Json:
        """Compact the internal log of counters now; counts are exact without it."""
        folded = await self._status.refresh()
        return {"folded": folded, "skipped": folded is None}

    async def _history(
        self, args: RangeQuery, since: datetime, until: datetime, width: timedelta
    ) -> list[Any]:
        wanted = (args.queue or None, args.namespace or None, args.task or None)
        return await self._status.history(since, until, width, *wanted)


async def _page(listing: QueueStatusPage, **more: Json) -> Response:
    """Return a page of queues. It is encoded in a thread, since there may be many."""
    following = None if listing.next is None else f"{listing.next:x}"

    def write() -> Response:
        queues = [_summary(one) for one in listing.queues]
        return json_response(plain({"queues": queues, "next": following, **more}))

    return await asyncio.to_thread(write)


def _names(status: QueueStatus) -> Json:
    return _queue(status.info)


def _summary(status: QueueStatus) -> Json:
    return {**_names(status), "partitions": status.partitions, "messages": counts(status.counts)}


def _partition(row: PartitionStatus) -> Json:
    return {**_times(row), "stats": counts(row.counts)}


def _depth(waiting: int, leased: int) -> Json:
    return {"pending": waiting, "processing": leased, "ready": max(0, waiting - leased)}


def _queue_number(cursor: str) -> int:
    """Return the number in a cursor."""
    if not _CURSOR.fullmatch(cursor):
        raise InvalidRequest(f"{cursor[:20]!r} is not the `next` of a page of queues")
    return int(cursor, 16)


def _sums(kind: str, one: Any) -> Json:
    waiting = max(0, one.counts.waiting - one.counts.leased)
    return {
        kind: one.name,
        "queues": one.queues,
        "partitions": one.partitions,
        "messages": {"total": one.counts.stored, "pending": waiting},
    }


def _operations(figures: Iterable[OperationCounts]) -> dict[str, int]:
    ones = list(figures)
    return {kind: sum(getattr(one, kind) for one in ones) for kind in ("push", "pop", "ack")}


def _spread(values: list[int]) -> Json:
    ordered = sorted(values) or [0]
    return {
        "avg": sum(ordered) / len(ordered),
        "median": ordered[len(ordered) // 2],
        "min": ordered[0],
        "max": ordered[-1],
    }
