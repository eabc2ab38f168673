"""Queues, partitions, namespaces and tasks, and the numbers an operator or a dashboard asks for.

Nothing here counts rows: totals come from counters the engine keeps.
"""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.queue_options import QueueOptions
from penstock.queues.dead import Which
from penstock.queues.engine import Queues
from penstock.queues.options import BY_NAME, OPTIONS
from penstock.queues.presence import Presence
from penstock.wire.auth import Role
from penstock.wire.http.api.bodies import Paged, answer, decoder, moment
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import Audited, route

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
        to = moment(self.to, "to") if self.to else datetime.now(UTC)
        return moment(self.from_, "from") if self.from_ else to - default, to


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
        options = (
            None
            if body.options is None
            else {name: _option(name, raw) for name, raw in body.options.items()}
        )
        return answer(await self._admin.configure(body.queue, options, body.namespace, body.task))

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
        options = {name: _option(name, raw) for name, raw in given.items()}
        return json_response(OptionsAnswer(queue, await self._admin.change(queue, options), ABOUT))

    @route(
        "GET",
        "/api/v1/resources/queues",
        query=QueuesQuery,
        answer=dict[str, Any],
        summary="All queues",
    )
    async def list_queues(self, request: Request) -> Response:
        args = request.args
        found = await self._status.queues(args.namespace or None, args.task or None)
        return answer(
            {"queues": [_summary(queue) for queue in found[args.offset : args.offset + args.limit]]}
        )

    @route(
        "GET",
        "/api/v1/status/queues",
        query=StatusQueuesQuery,
        answer=dict[str, Any],
        summary="Queues, page by page",
    )
    async def status_queues(self, request: Request) -> Response:
        args = request.args
        found = await self._status.queues(args.namespace or None, args.task or None)
        page = [_summary(queue) for queue in found[args.offset : args.offset + args.limit]]
        return answer(
            {
                "queues": page,
                "pagination": {"limit": args.limit, "offset": args.offset, "total": len(found)},
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
        found = await self._status.queue(
            request.params["queue"], request.args.limit, request.args.offset
        )
        names = ("id", "name", "createdAt", "stats", "oldestMessage", "newestMessage")
        partitions = [{name: row[name] for name in names} for row in found["partitions"]]
        about = {name: found[name] for name in ("id", "name", "namespace", "task", "createdAt")}
        return answer({**about, "partitions": partitions, "totals": _six(found["totals"])})

    @route(
        "GET",
        "/api/v1/status/queues/{queue}",
        query=PageQuery,
        answer=dict[str, Any],
        summary="A queue with options and partitions",
    )
    async def status_one(self, request: Request) -> Response:
        found = await self._status.queue(
            request.params["queue"], request.args.limit, request.args.offset
        )
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

    @route(
        "GET",
        "/api/v1/status/queues/{queue}/messages",
        query=MessagesQuery,
        answer=list[dict[str, Any]],
        summary="A queue's newest messages",
    )
    async def status_messages(self, request: Request) -> Response:
        await self._admin.describe(request.params["queue"])
        found = await self._queues.messages.listing(
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
        found = {
            "success": True,
            "queue": request.params["queue"],
            "partition": partition,
            "deleted": deleted,
        }
        return answer(found)

    @route(
        "GET",
        "/api/v1/resources/partitions",
        query=PartitionsQuery,
        answer=dict[str, Any],
        summary="Partitions",
    )
    async def partitions(self, request: Request) -> Response:
        args = request.args
        found = await self._admin.partitions(
            args.queue or None, args.limit, args.offset, args.after
        )
        return answer(
            {"partitions": found, "pagination": {"limit": args.limit, "offset": args.offset}}
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
        found = await self._status.overview()
        lags = await self._queues.groups.listing()
        found["messages"] = _six(found["messages"])
        found["lag"] = {
            "time": _spread([row["maxTimeLag"] for row in lags]),
            "offset": _spread([row["totalLag"] for row in lags]),
        }
        return answer({**found, "timestamp": datetime.now(UTC), "statsAge": 0})

    @route(
        "GET", "/api/v1/status", query=RangeQuery, answer=dict[str, Any], summary="What is going on"
    )
    async def status_all(self, request: Request) -> Response:
        args: RangeQuery = request.args
        since, until = args.range(timedelta(hours=1))
        minutes = max(1, round((until - since).total_seconds() / 60 / 60))
        wanted = (args.queue or None, args.namespace or None, args.task or None)
        points = await self._status.history(since, until, timedelta(minutes=minutes), *wanted)
        found = await self._status.queues(
            args.namespace or None, args.task or None, args.queue or None
        )
        messages = {name: sum(queue["messages"][name] for queue in found) for name in SIX}
        which = Which(queue=args.queue or None)
        dead = await self._queues.dead.listing(which, 0, 0)
        workers = await self._presence.members()
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
                "leases": await self._status.leases(),
                "deadLetterQueue": {
                    "totalMessages": dead["total"],
                    **await self._queues.dead.errors(which),
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
                    {"timestamp": point["bucket"], "messages": point["pushed"]} for point in points
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
        return answer(await self._status.refresh())


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
