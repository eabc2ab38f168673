"""Consumer groups: who reads what, how far behind, and moving them."""

from typing import Annotated, Any, ClassVar

import msgspec

from penstock.errors import InvalidRequest, NotFound
from penstock.queues.engine import Queues
from penstock.wire.auth import Role
from penstock.wire.http.api.bodies import Paged, answer, decoder, moment
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import Route

BASE = "/api/v1/consumer-groups"


class LaggingQuery(msgspec.Struct, rename="camel", frozen=True):
    min_lag_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 3600.0


class DescribeQuery(Paged, frozen=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 10_000

    farther: ClassVar[str] = (
        "partitions that are behind are listed by GET /api/v1/consumer-groups/lagging"
    )


class DeleteQuery(msgspec.Struct, rename="camel", frozen=True):
    delete_metadata: bool = True


class SubscriptionBody(msgspec.Struct, rename="camel"):
    subscription_timestamp: str


class SeekBody(msgspec.Struct, rename="camel"):
    to_end: bool = False
    to_beginning: bool = False
    timestamp: str | None = None
    dry_run: bool = False


read_subscription = decoder(
    SubscriptionBody, {"subscriptionTimestamp": "Missing subscriptionTimestamp in request body"}
)
read_seek = decoder(SeekBody, {}, empty=SeekBody())


def routes(queues: Queues) -> list[Route]:
    groups = queues.groups

    async def list_all(_: Request) -> Response:
        return answer(await groups.listing())

    async def lagging(request: Request) -> Response:
        return answer(await groups.lagging(request.args.min_lag_seconds))

    async def describe(request: Request) -> Response:
        found = await groups.describe(
            request.params["group"], request.args.limit, request.args.offset
        )
        if not found and not await groups.listing(request.params["group"]):
            raise NotFound(f"Consumer group not found: {request.params['group']}")
        return answer(found)

    async def delete(request: Request) -> Response:
        metadata = request.args.delete_metadata
        return answer(
            await groups.delete(
                request.params["group"], request.params.get("queue"), metadata=metadata
            )
        )

    async def subscribe(request: Request) -> Response:
        body = read_subscription(request.body)
        start = moment(body.subscription_timestamp, "subscriptionTimestamp")
        return answer(await groups.subscription(request.params["group"], start))

    async def seek(request: Request) -> Response:
        body = read_seek(request.body)
        if body.to_end + body.to_beginning + (body.timestamp is not None) != 1:
            raise InvalidRequest("Name one of toEnd, toBeginning and timestamp")
        where = {
            "moment": moment(body.timestamp, "timestamp") if body.timestamp is not None else None,
            "to": "beginning" if body.to_beginning else "end",
        }
        group, queue = request.params["group"], request.params["queue"]
        move: Any = groups.preview if body.dry_run else groups.seek
        found = await move(group, queue, **where)
        for name in ("partitionName", "cursorMovedTo"):
            found.pop(name, None)
        return answer(found)

    async def seek_partition(request: Request) -> Response:
        group, queue, partition = (request.params[name] for name in ("group", "queue", "partition"))
        found = await groups.seek(group, queue, partition=partition)
        return answer(
            {
                "success": True,
                "consumerGroup": group,
                "queueName": queue,
                "partitionName": partition,
                "updated": bool(found["partitionsUpdated"]),
                "cursorMovedTo": found["cursorMovedTo"],
            }
        )

    def route(
        method: str,
        path: str,
        handler: Any,
        summary: str,
        answer: Any = dict[str, Any],
        **more: Any,
    ) -> Route:
        return Route(
            method, f"{BASE}{path}", handler, summary=summary, answer=answer, tag="groups", **more
        )

    rows = list[dict[str, Any]]
    return [
        route("GET", "", list_all, "Every group of every queue", rows),
        route(
            "GET", "/lagging", lagging, "Partitions that are far behind", rows, query=LaggingQuery
        ),
        route("GET", "/{group}", describe, "A group's partitions", query=DescribeQuery),
        route("DELETE", "/{group}", delete, "Forget a group", query=DeleteQuery, role=Role.ADMIN),
        route(
            "DELETE",
            "/{group}/queues/{queue}",
            delete,
            "Forget a group of one queue",
            query=DeleteQuery,
            role=Role.ADMIN,
        ),
        route(
            "POST",
            "/{group}/subscription",
            subscribe,
            "Where a group starts in partitions new to it",
            body=SubscriptionBody,
            decode=False,
        ),
        route(
            "POST",
            "/{group}/queues/{queue}/seek",
            seek,
            "Move a group to the end, the beginning or a time; dryRun only counts",
            body=SeekBody,
            decode=False,
        ),
        route(
            "POST",
            "/{group}/queues/{queue}/partitions/{partition}/seek",
            seek_partition,
            "Move a group to the end of one partition",
        ),
    ]
