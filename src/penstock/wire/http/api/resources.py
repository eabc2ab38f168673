"""Queues, partitions, namespaces and tasks, and the numbers an operator or a dashboard asks for.

Nothing here counts rows: totals come from counters the engine keeps.
"""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.queues.dead import Which
from penstock.queues.engine import Queues
from penstock.queues.options import BY_NAME, QueueOptions
from penstock.queues.presence import Presence
from penstock.wire.auth import Role
from penstock.wire.http.api.bodies import Paged, answer, decoder, moment
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import Route

SIX = ("total", "pending", "processing", "completed", "failed", "deadLetter")
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
        to = moment(self.to, "to") if self.to else datetime.now(UTC)
        return moment(self.from_, "from") if self.from_ else to - default, to


class MessagesQuery(Paged, frozen=True):
    limit: Limit = 50

    farther: ClassVar[str] = (
        "read on with GET /api/v1/messages?queue=...&cursor=<next of the page before>"
    )


read_configure = decoder(
    ConfigureBody, {"queue": "queue is required", "options": "options must be an object"}
)


def routes(queues: Queues, presence: Presence) -> list[Route]:
    admin, status = queues.admin, queues.status

    async def configure(request: Request) -> Response:
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
        options = (
            None
            if body.options is None
            else {name: _option(name, raw) for name, raw in body.options.items()}
        )
        return answer(await admin.configure(body.queue, options, body.namespace, body.task))

    async def list_queues(request: Request) -> Response:
        args = request.args
        found = await status.queues(args.namespace or None, args.task or None)
        return answer(
            {"queues": [_summary(queue) for queue in found[args.offset : args.offset + args.limit]]}
        )

    async def status_queues(request: Request) -> Response:
        args = request.args
        found = await status.queues(args.namespace or None, args.task or None)
        page = [_summary(queue) for queue in found[args.offset : args.offset + args.limit]]
        return answer(
            {
                "queues": page,
                "pagination": {"limit": args.limit, "offset": args.offset, "total": len(found)},
            }
        )

    async def one(request: Request) -> Response:
        found = await status.queue(request.params["queue"], request.args.limit, request.args.offset)
        names = ("id", "name", "createdAt", "stats", "oldestMessage", "newestMessage")
        partitions = [{name: row[name] for name in names} for row in found["partitions"]]
        about = {name: found[name] for name in ("id", "name", "namespace", "task", "createdAt")}
        return answer({**about, "partitions": partitions, "totals": _six(found["totals"])})

    async def status_one(request: Request) -> Response:
        found = await status.queue(request.params["queue"], request.args.limit, request.args.offset)
        options = msgspec.to_builtins(found["options"])
        about: dict[str, Any] = {name: found[name] for name in ("id", "name", "namespace", "task")}
        about |= {"priority": options["priority"], "createdAt": found["createdAt"]}
        about["options"] = options
        about["config"] = {**options, "maxQueueSize": options["maxSize"]}  # the dialect's name
        names = (
            "id",
            "name",
            "createdAt",
            "stats",
            "cursor",
            "lastActivity",
            "oldestMessage",
            "newestMessage",
        )
        partitions = [
            {name: row[name] for name in names} | {"messages": row["stats"]}
            for row in found["partitions"]
        ]
        totals = _six(found["totals"])
        return answer(
            {
                "queue": about,
                "partitions": partitions,
                "partitionCount": found["partitionCount"],
                "totals": {"messages": totals, **totals},
            }
        )

    async def status_messages(request: Request) -> Response:
        await admin.describe(request.params["queue"])
        found = await queues.messages.listing(
            queue=request.params["queue"],
            since=datetime(1970, 1, 2, tzinfo=UTC),
            limit=request.args.limit,
            offset=request.args.offset,
        )
        names = (
            "id",
            "transactionId",
            "partitionId",
            "queuePath",
            "queue",
            "partition",
            "status",
            "createdAt",
        )
        return answer([{name: row[name] for name in names} for row in found["messages"]])

    async def delete(request: Request) -> Response:
        existed = await admin.delete(request.params["queue"])
        return answer({"deleted": True, "queue": request.params["queue"], "existed": existed})

    async def clear(request: Request) -> Response:
        partition = request.args.partition or None
        deleted = await admin.clear(request.params["queue"], partition)
        found = {
            "success": True,
            "queue": request.params["queue"],
            "partition": partition,
            "deleted": deleted,
        }
        return answer(found)

    async def partitions(request: Request) -> Response:
        args = request.args
        found = await admin.partitions(args.queue or None, args.limit, args.offset, args.after)
        return answer(
            {"partitions": found, "pagination": {"limit": args.limit, "offset": args.offset}}
        )

    async def namespaces(_: Request) -> Response:
        return answer({"namespaces": _grouped(await status.queues(), "namespace")})

    async def tasks(_: Request) -> Response:
        return answer({"tasks": _grouped(await status.queues(), "task")})

    async def overview(_: Request) -> Response:
        found = await status.overview()
        lags = await queues.groups.listing()
        found["messages"] = _six(found["messages"])
        found["lag"] = {
            "time": _spread([row["maxTimeLag"] for row in lags]),
            "offset": _spread([row["totalLag"] for row in lags]),
        }
        return answer({**found, "timestamp": datetime.now(UTC), "statsAge": 0})

    async def status_all(request: Request) -> Response:
        args: RangeQuery = request.args
        since, until = args.range(timedelta(hours=1))
        minutes = max(1, round((until - since).total_seconds() / 60 / 60))
        wanted = (args.queue or None, args.namespace or None, args.task or None)
        points = await status.history(since, until, timedelta(minutes=minutes), *wanted)
        found = await status.queues(args.namespace or None, args.task or None, args.queue or None)
        messages = {name: sum(queue["messages"][name] for queue in found) for name in SIX}
        which = Which(queue=args.queue or None)
        dead = await queues.dead.listing(which, 0, 0)
        workers = await presence.members()
        sums = [
            {kind: sum(worker[name][kind] for worker in workers) for kind in ("push", "pop", "ack")}
            for name in ("requests", "messages")
        ]
        return answer(
            {
                "timeRange": {"from": since, "to": until},
                "bucketMinutes": minutes,
                "pointCount": len(points),
                "throughput": [
                    {
                        "timestamp": point["bucket"],
                        "ingested": point["pushed"],
                        "processed": point["done"],
                        "failed": point["failed"],
                        "deadLetter": point["dead"],
                        "ingestedPerSecond": point["pushed"] / minutes / 60,
                        "processedPerSecond": point["done"] / minutes / 60,
                    }
                    for point in points
                ],
                "queues": [_summary(queue) for queue in found],
                "messages": {
                    **messages,
                    "requests": sums[0],
                    "batchEfficiency": {
                        kind: round(sums[1][kind] / max(1, sums[0][kind]), 2) for kind in sums[0]
                    },
                },
                "leases": await status.leases(),
                "deadLetterQueue": {
                    "totalMessages": dead["total"],
                    **await queues.dead.errors(which),
                },
                "workers": [
                    {name: one[name] for name in one if name != "parked"} for one in workers
                ],
                "errors": {
                    "dbErrors": sum(worker["dbErrors"] for worker in workers),
                    "ackFailed": messages["failed"],
                    "dlqMessages": dead["total"],
                },
                "statsAge": 0,
            }
        )

    async def analytics(request: Request) -> Response:
        args: RangeQuery = request.args
        since, until = args.range(timedelta(hours=24))
        wanted = (args.queue or None, args.namespace or None, args.task or None)
        points = await status.history(since, until, BUCKETS[args.interval], *wanted)
        return answer(
            {
                "dataPoints": [
                    {"timestamp": point["bucket"], "messages": point["pushed"]} for point in points
                ],
                "interval": args.interval,
                "from": since,
                "to": until,
            }
        )

    async def refresh(_: Request) -> Response:
        return answer(await status.refresh())

    def route(method: str, path: str, handler: Any, summary: str, **more: Any) -> Route:
        more = {"answer": dict[str, Any], **more}
        return Route(method, f"/api/v1/{path}", handler, summary=summary, tag="resources", **more)

    return [
        route(
            "POST",
            "configure",
            configure,
            "Create a queue or replace its options",
            body=Configure,
            decode=False,
        ),
        route("GET", "resources/queues", list_queues, "All queues", query=QueuesQuery),
        route(
            "GET", "resources/queues/{queue}", one, "A queue and its partitions", query=PageQuery
        ),
        route(
            "DELETE",
            "resources/queues/{queue}",
            delete,
            "Delete a queue with everything in it",
            role=Role.ADMIN,
        ),
        route("GET", "resources/partitions", partitions, "Partitions", query=PartitionsQuery),
        route("GET", "resources/namespaces", namespaces, "Namespaces"),
        route("GET", "resources/tasks", tasks, "Tasks"),
        route("GET", "resources/overview", overview, "Sums over all queues"),
        route(
            "DELETE",
            "queues/{queue}/clear",
            clear,
            "Delete the messages, keep the queue",
            query=ClearQuery,
            role=Role.ADMIN,
        ),
        route("GET", "status", status_all, "What is going on", query=RangeQuery),
        route(
            "GET", "status/queues", status_queues, "Queues, page by page", query=StatusQueuesQuery
        ),
        route(
            "GET",
            "status/queues/{queue}",
            status_one,
            "A queue with options and partitions",
            query=PageQuery,
        ),
        route(
            "GET",
            "status/queues/{queue}/messages",
            status_messages,
            "A queue's newest messages",
            query=MessagesQuery,
            answer=list[dict[str, Any]],
        ),
        route("GET", "status/analytics", analytics, "Messages pushed over time", query=RangeQuery),
        route(
            "POST",
            "stats/refresh",
            refresh,
            "Fold the counters now (they are exact without it)",
            role=Role.ADMIN,
        ),
    ]


def _option(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"option {name[:60]} is not understood: {error}") from None


def _summary(queue: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in queue.items() if name != "options"}


def _six(counts: dict[str, Any]) -> dict[str, Any]:
    return {name: counts[name] for name in SIX}


def _grouped(queues: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for queue in queues:
        if queue[name]:
            empty = {
                name: queue[name],
                "queues": 0,
                "partitions": 0,
                "messages": {"total": 0, "pending": 0},
            }
            row = found.setdefault(queue[name], empty)
            row["queues"] += 1
            row["partitions"] += queue["partitions"]
            for count in row["messages"]:
                row["messages"][count] += queue["messages"][count]
    return sorted(found.values(), key=lambda row: str(row[name]))


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
