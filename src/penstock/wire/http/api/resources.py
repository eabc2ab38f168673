"""Queues, partitions, namespaces and tasks, and the numbers an operator or a dashboard asks for.

Nothing here counts rows: totals come from counters the engine keeps.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.queue_options import QueueOptions
from penstock.protocol.times import time_field
from penstock.queues.dead import Which
from penstock.queues.engine import Queues
from penstock.queues.messages import MessageFilter
from penstock.queues.options import BY_NAME, OPTIONS, parse
from penstock.queues.presence import Member, OperationCounts, Presence
from penstock.queues.status import Counts, PartitionStatus, QueueStatus, total
from penstock.queues.types import QueueInfo
from penstock.wire.auth import Role
from penstock.wire.http.api.bodies import Paged, answer, decoder, fields, plain
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import Audited, route

BUCKETS = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1), "day": timedelta(days=1)}
Limit = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
PARTITIONS = "read on with GET /api/v1/resources/partitions?queue=...&after=<id of the last one>"


class ConfigureBody(msgspec.Struct):
    queue: str
    namespace: str | None = None
    task: str | None = None
    options: dict[str, msgspec.Raw] | None = None  # decoded one by one: an error names the option


class Configure(ConfigureBody):
    """The body as documented."""

    options: QueueOptions | None = None  # type: ignore[assignment]


class AboutOption(msgspec.Struct):
    """What an option means."""

    name: str
    default: int | bool | str
    meaning: str


class OptionsAnswer(msgspec.Struct):
    queue: str
    options: QueueOptions
    about: list[AboutOption]


class QueuesQuery(Paged, frozen=True):
    namespace: str | None = None
    task: str | None = None
    limit: Limit = 10_000

    farther: ClassVar[str] = "name a namespace or a task"


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


class ClearQuery(msgspec.Struct, frozen=True):
    partition: str | None = None


class RangeQuery(msgspec.Struct, frozen=True):
    from_: str | None = msgspec.field(name="from", default=None)
    to: str | None = None
    queue: str | None = None
    namespace: str | None = None
    task: str | None = None
    interval: Literal["minute", "hour", "day"] = "hour"

    def range(self, default: timedelta) -> tuple[datetime, datetime]:
        to = time_field(self.to, "to") if self.to else datetime.now(UTC)
        return time_field(self.from_, "from") if self.from_ else to - default, to


class MessagesQuery(Paged, frozen=True):
    limit: Limit = 50

    farther: ClassVar[str] = (
        "read on with GET /api/v1/messages?queue=...&cursor=<next of the page before>"
    )


ABOUT = [AboutOption(option.name, option.default, option.meaning) for option in OPTIONS]
read_options = decoder(dict[str, msgspec.Raw], {})
read_configure = decoder(
    ConfigureBody, {"queue": "queue is required", "options": "options must be an object"}
)


class ResourcesApi:
    """Queues, their partitions and the numbers about them."""

    tag = "resources"

    def __init__(self, queues: Queues, presence: Presence) -> None:
        self._admin = queues.admin
        self._status = queues.status
        self._queues = queues
        self._presence = presence

    @route(
        "POST",
        "/api/v1/configure",
        body=Configure,
        decode=False,
        answer=dict[str, Any],
        summary="Create a queue or replace its options",
        audit=Audited("queue.configure", body=("queue", "namespace", "task", "options")),
    )
    async def configure(self, request: Request) -> Response:
        body = read_configure(request.body)
        if not body.queue:
            raise InvalidRequest("queue is required")
        misplaced = [
            name
            for name in msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
            if name in BY_NAME
        ]
        if misplaced:  # it would silently not be in force
            raise InvalidRequest(f"{', '.join(misplaced)} must be in options")
        options = parse({name: _option(name, raw) for name, raw in (body.options or {}).items()})
        configured = await self._admin.configure(body.queue, options, body.namespace, body.task)
        info = configured.queue
        return answer(
            {
                "configured": True,
                "queueId": info.uuid,
                "partitionId": configured.partition_id,
                "queue": info.name,
                "namespace": info.namespace,
                "task": info.task,
                "options": info.options,
            }
        )

    @route(
        "GET",
        "/api/v1/queues/{queue}/options",
        answer=OptionsAnswer,
        summary="The options of a queue, and what they mean",
    )
    async def options(self, request: Request) -> Response:
        info = await self._queues.catalog.queue(request.params["queue"])
        if info is None:
            raise NotFound(f"queue '{request.params['queue']}' does not exist")
        return json_response(OptionsAnswer(info.name, info.options, ABOUT))

    @route(
        "PATCH",
        "/api/v1/queues/{queue}/options",
        body=QueueOptions,
        decode=False,
        answer=OptionsAnswer,
        summary="Change some options of a queue; the others stay as they are",
        audit=Audited("queue.configure", body=tuple(BY_NAME)),
    )
    async def change(self, request: Request) -> Response:
        given = read_options(request.body)
        queue = request.params["queue"]
        values = {name: _option(name, raw) for name, raw in given.items()}
        options = parse(values)
        only = {BY_NAME[name].field for name, value in values.items() if value is not None}
        changed = await self._admin.change(queue, options, only)
        return json_response(OptionsAnswer(queue, changed, ABOUT))

    @route(
        "GET",
        "/api/v1/resources/queues",
        query=QueuesQuery,
        answer=dict[str, Any],
        summary="All queues",
    )
    async def list_queues(self, request: Request) -> Response:
        args = request.args
        statuses = await self._status.queues(args.namespace or None, args.task or None)
        page = statuses[args.offset : args.offset + args.limit]
        return answer({"queues": [_summary(status) for status in page]})

    @route(
        "GET",
        "/api/v1/status/queues",
        query=StatusQueuesQuery,
        answer=dict[str, Any],
        summary="Queues, page by page",
    )
    async def status_queues(self, request: Request) -> Response:
        args = request.args
        statuses = await self._status.queues(args.namespace or None, args.task or None)
        page = statuses[args.offset : args.offset + args.limit]
        return answer(
            {
                "queues": [_summary(status) for status in page],
                "pagination": {"limit": args.limit, "offset": args.offset, "total": len(statuses)},
            }
        )

    @route(
        "GET",
        "/api/v1/resources/queues/{queue}",
        query=PageQuery,
        answer=dict[str, Any],
        summary="A queue and its partitions",
    )
    async def one(self, request: Request) -> Response:
        status, partitions = await self._queue(request)
        rows = [
            fields(row, "id", "name", "created_at", "oldest_message", "newest_message")
            | {"stats": _six(row.counts)}
            for row in partitions
        ]
        return answer({**_about(status.info), "partitions": rows, "totals": _seven(status.counts)})

    @route(
        "GET",
        "/api/v1/status/queues/{queue}",
        query=PageQuery,
        answer=dict[str, Any],
        summary="A queue with options and partitions",
    )
    async def status_one(self, request: Request) -> Response:
        status, partitions = await self._queue(request)
        options = status.info.options
        config = ("lease_time", "retry_limit", "retry_delay", "ttl", "dead_letter_queue")
        names = ("id", "name", "created_at", "last_activity", "oldest_message", "newest_message")
        rows = [
            fields(row, *names)
            | {
                "messages": _six(row.counts),
                "stats": _six(row.counts),
                "cursor": {
                    "totalConsumed": row.counts.completed,
                    "batchesConsumed": row.batches,
                },
            }
            for row in partitions
        ]
        totals = _seven(status.counts)
        return answer(
            {
                "queue": _about(status.info)
                | {
                    "priority": options.priority,
                    "options": options,
                    "config": fields(options, *config) | {"maxQueueSize": options.max_size},
                },
                "partitions": rows,
                "partitionCount": status.partitions,
                "totals": {"messages": totals, **totals},
            }
        )

    async def _queue(self, request: Request) -> tuple[QueueStatus, list[PartitionStatus]]:
        """The queue of the path, and a page of its partitions."""
        status = await self._status.queue(request.params["queue"])
        args = request.args
        return status, await self._status.partitions(status, args.limit, args.offset)

    @route(
        "GET",
        "/api/v1/status/queues/{queue}/messages",
        query=MessagesQuery,
        answer=list[dict[str, Any]],
        summary="A queue's newest messages",
    )
    async def status_messages(self, request: Request) -> Response:
        await self._admin.describe(request.params["queue"])
        which = MessageFilter(queue=request.params["queue"], since=datetime(1970, 1, 2, tzinfo=UTC))
        page = await self._queues.messages.listing(which, request.args.limit, request.args.offset)
        names = ("id", "transaction_id", "partition_id", "queue", "partition", "status")
        return answer(
            [
                fields(row, *names, "created_at") | {"queuePath": f"{row.queue}/{row.partition}"}
                for row in page.messages
            ]
        )

    @route(
        "DELETE",
        "/api/v1/resources/queues/{queue}",
        answer=dict[str, Any],
        summary="Delete a queue with everything in it",
        role=Role.ADMIN,
        audit=Audited("queue.delete", answer=("existed",)),
    )
    async def delete(self, request: Request) -> Response:
        existed = await self._admin.delete(request.params["queue"])
        return answer({"deleted": True, "queue": request.params["queue"], "existed": existed})

    @route(
        "DELETE",
        "/api/v1/queues/{queue}/clear",
        query=ClearQuery,
        answer=dict[str, Any],
        summary="Delete the messages, keep the queue",
        role=Role.ADMIN,
        audit=Audited("queue.clear", answer=("deleted",)),
    )
    async def clear(self, request: Request) -> Response:
        partition = request.args.partition or None
        deleted = await self._admin.clear(request.params["queue"], partition)
        body = {
            "success": True,
            "queue": request.params["queue"],
            "partition": partition,
            "deleted": deleted,
        }
        return answer(body)

    @route(
        "GET",
        "/api/v1/resources/partitions",
        query=PartitionsQuery,
        answer=dict[str, Any],
        summary="Partitions",
    )
    async def partitions(self, request: Request) -> Response:
        args = request.args
        partitions = await self._admin.partitions(
            args.queue or None, args.limit, args.offset, args.after
        )
        return answer(
            {"partitions": partitions, "pagination": {"limit": args.limit, "offset": args.offset}}
        )

    @route("GET", "/api/v1/resources/namespaces", answer=dict[str, Any], summary="Namespaces")
    async def namespaces(self, _: Request) -> Response:
        return answer({"namespaces": _grouped(await self._status.queues(), "namespace")})

    @route("GET", "/api/v1/resources/tasks", answer=dict[str, Any], summary="Tasks")
    async def tasks(self, _: Request) -> Response:
        return answer({"tasks": _grouped(await self._status.queues(), "task")})

    @route(
        "GET", "/api/v1/resources/overview", answer=dict[str, Any], summary="Sums over all queues"
    )
    async def overview(self, _: Request) -> Response:
        overview = await self._status.overview()
        groups = await self._queues.groups.listing()
        return answer(
            {
                **fields(overview, "queues", "partitions", "namespaces", "tasks"),
                "messages": _seven(overview.messages),
                "throughput": {
                    "ingestedPerSecond": overview.pushed_per_second,
                    "processedPerSecond": overview.completed_per_second,
                },
                "lag": {
                    "time": _spread([int(group.backlog.seconds or 0) for group in groups]),
                    "offset": _spread([group.figures.waiting for group in groups]),
                },
                "timestamp": datetime.now(UTC),
                "statsAge": 0,
            }
        )

    @route(
        "GET", "/api/v1/status", query=RangeQuery, answer=dict[str, Any], summary="What is going on"
    )
    async def status_all(self, request: Request) -> Response:
        args: RangeQuery = request.args
        since, until = args.range(timedelta(hours=1))
        minutes = max(1, round((until - since).total_seconds() / 60 / 60))
        wanted = (args.queue or None, args.namespace or None, args.task or None)
        points = await self._status.history(since, until, timedelta(minutes=minutes), *wanted)
        statuses = await self._status.queues(
            args.namespace or None, args.task or None, args.queue or None
        )
        counts = total([status.counts for status in statuses])
        errors = await self._queues.dead.errors(Which(queue=args.queue or None))
        leases = await self._status.leases()
        workers = await self._presence.members()
        requests = _operations(worker.figures.requests for worker in workers)
        messages = _operations(worker.figures.messages for worker in workers)
        return answer(
            {
                "timeRange": {"from": since, "to": until},
                "bucketMinutes": minutes,
                "pointCount": len(points),
                "throughput": [
                    {
                        "timestamp": point.bucket,
                        "ingested": point.pushed,
                        "processed": point.completed,
                        "failed": point.failed,
                        "deadLetter": point.dead,
                        "ingestedPerSecond": point.pushed / minutes / 60,
                        "processedPerSecond": point.completed / minutes / 60,
                    }
                    for point in points
                ],
                "queues": [_summary(status) for status in statuses],
                "messages": {
                    **_seven(counts),
                    "requests": requests,
                    "batchEfficiency": {
                        kind: round(messages[kind] / max(1, requests[kind]), 2) for kind in requests
                    },
                },
                "leases": {
                    "active": leases.active,
                    "partitionsWithLeases": leases.partitions,
                    "totalBatchSize": leases.taken,
                    "totalAcked": leases.acked,
                },
                "deadLetterQueue": {
                    "totalMessages": counts.dead_letter,
                    "affectedPartitions": errors.affected_partitions,
                    "topErrors": errors.top_errors,
                },
                "workers": [
                    {
                        name: value
                        for name, value in worker_answer(worker).items()
                        if name not in ("parked", "consumers", "reports")
                    }
                    for worker in workers
                ],
                "errors": {
                    "dbErrors": sum(worker.figures.db_errors for worker in workers),
                    "ackFailed": counts.failed,
                    "dlqMessages": counts.dead_letter,
                },
                "statsAge": 0,
            }
        )

    @route(
        "GET",
        "/api/v1/status/analytics",
        query=RangeQuery,
        answer=dict[str, Any],
        summary="Messages pushed over time",
    )
    async def analytics(self, request: Request) -> Response:
        args: RangeQuery = request.args
        since, until = args.range(timedelta(hours=24))
        wanted = (args.queue or None, args.namespace or None, args.task or None)
        points = await self._status.history(since, until, BUCKETS[args.interval], *wanted)
        return answer(
            {
                "dataPoints": [
                    {"timestamp": point.bucket, "messages": point.pushed} for point in points
                ],
                "interval": args.interval,
                "from": since,
                "to": until,
            }
        )

    @route(
        "POST",
        "/api/v1/stats/refresh",
        answer=dict[str, Any],
        summary="Fold the counters now (they are exact without it)",
        role=Role.ADMIN,
    )
    async def refresh(self, _: Request) -> Response:
        folded = await self._status.refresh()
        return answer({"folded": folded, "skipped": folded is None})


def _option(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"option {name[:60]} is not understood: {error}") from None


def _about(info: QueueInfo) -> dict[str, Any]:
    return fields(info, "name", "namespace", "task", "created_at") | {"id": info.uuid}


def _summary(status: QueueStatus) -> dict[str, Any]:
    counts = {**_seven(status.counts), "dropped": status.counts.dropped}
    return _about(status.info) | {"partitions": status.partitions, "messages": counts}


def _six(counts: Counts) -> dict[str, Any]:
    """The dialect's six numbers."""
    return fields(counts, "total", "pending", "processing", "completed", "failed", "dead_letter")


def _seven(counts: Counts) -> dict[str, Any]:
    """Those, and the messages for later."""
    return _six(counts) | {"scheduled": counts.scheduled}


def _operations(counts: Iterable[OperationCounts]) -> dict[str, int]:
    kinds = ("push", "pop", "ack")
    sums = dict.fromkeys(kinds, 0)
    for one in counts:
        for kind in kinds:
            sums[kind] += getattr(one, kind)
    return sums


def _grouped(queues: list[QueueStatus], name: str) -> list[dict[str, Any]]:
    """Namespaces or tasks, with the sums over their queues."""
    rows: dict[str, dict[str, Any]] = {}
    for queue in queues:
        if value := getattr(queue.info, name):
            messages = {"total": 0, "pending": 0}
            empty = {name: value, "queues": 0, "partitions": 0, "messages": messages}
            row = rows.setdefault(value, empty)
            row["queues"] += 1
            row["partitions"] += queue.partitions
            row["messages"]["total"] += queue.counts.total
            row["messages"]["pending"] += queue.counts.pending
    return sorted(rows.values(), key=lambda row: str(row[name]))


def _spread(values: list[Any]) -> dict[str, Any]:
    if not values:
        return {"avg": 0, "median": 0, "min": 0, "max": 0}
    ordered = sorted(values)
    return {
        "avg": sum(ordered) / len(ordered),
        "median": ordered[len(ordered) // 2],
        "min": ordered[0],
        "max": ordered[-1],
    }


def worker_answer(one: Member) -> dict[str, Any]:
    """A process with its figures, in one object."""
    about = fields(one, "id", "hostname", "pid", "server", "started_at", "last_seen")
    return {**about, "workerId": one.worker, **plain(one.figures)}
