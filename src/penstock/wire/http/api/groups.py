"""Consumer groups: who reads what, how far behind, and moving them."""

from typing import Annotated, Any, ClassVar

import msgspec

from penstock.errors import InvalidRequest, NotFound
from penstock.queues.engine import Queues
from penstock.wire.auth import Role
from penstock.wire.http.api.bodies import Paged, answer, decoder, moment
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import Audited, route

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


DELETED = Audited("group.delete", answer=("deletedPartitions",))


class GroupsApi:
    """Consumer groups of queues."""

    tag = "groups"

    def __init__(self, queues: Queues) -> None:
        self._groups = queues.groups

    @route(
        "GET",
        "/api/v1/consumer-groups",
        answer=list[dict[str, Any]],
        summary="Every group of every queue",
    )
    async def list_all(self, _: Request) -> Response:
        return answer(await self._groups.listing())

    @route(
        "GET",
        "/api/v1/consumer-groups/lagging",
        query=LaggingQuery,
        answer=list[dict[str, Any]],
        summary="Partitions that are far behind",
    )
    async def lagging(self, request: Request) -> Response:
        return answer(await self._groups.lagging(request.args.min_lag_seconds))

    @route(
        "GET",
        "/api/v1/consumer-groups/{group}",
        query=DescribeQuery,
        answer=dict[str, Any],
        summary="A group's partitions",
    )
    async def describe(self, request: Request) -> Response:
        found = await self._groups.describe(
            request.params["group"], request.args.limit, request.args.offset
        )
        if not found and not await self._groups.listing(request.params["group"]):
            raise NotFound(f"Consumer group not found: {request.params['group']}")
        return answer(found)

    @route(
        "DELETE",
        "/api/v1/consumer-groups/{group}",
        query=DeleteQuery,
        answer=dict[str, Any],
        summary="Forget a group",
        role=Role.ADMIN,
        audit=DELETED,
    )
    @route(
        "DELETE",
        "/api/v1/consumer-groups/{group}/queues/{queue}",
        query=DeleteQuery,
        answer=dict[str, Any],
        summary="Forget a group of one queue",
        role=Role.ADMIN,
        audit=DELETED,
    )
    async def delete(self, request: Request) -> Response:
        metadata = request.args.delete_metadata
        return answer(
            await self._groups.delete(
                request.params["group"], request.params.get("queue"), metadata=metadata
            )
        )

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/subscription",
        body=SubscriptionBody,
        decode=False,
        answer=dict[str, Any],
        summary="Where a group starts in partitions new to it",
        audit=Audited("group.subscription", answer=("rowsUpdated",)),
    )
    async def subscribe(self, request: Request) -> Response:
        body = read_subscription(request.body)
        start = moment(body.subscription_timestamp, "subscriptionTimestamp")
        return answer(await self._groups.subscription(request.params["group"], start))

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/queues/{queue}/seek",
        body=SeekBody,
        decode=False,
        answer=dict[str, Any],
        summary="Move a group to the end, the beginning or a time; dryRun only counts",
        audit=Audited(
            "group.seek",
            body=("toEnd", "toBeginning", "timestamp"),
            answer=("dryRun", "partitionsUpdated"),
        ),
    )
    async def seek(self, request: Request) -> Response:
        body = read_seek(request.body)
        if body.to_end + body.to_beginning + (body.timestamp is not None) != 1:
            raise InvalidRequest("Name one of toEnd, toBeginning and timestamp")
        where = {
            "moment": moment(body.timestamp, "timestamp") if body.timestamp is not None else None,
            "to": "beginning" if body.to_beginning else "end",
        }
        group, queue = request.params["group"], request.params["queue"]
        move: Any = self._groups.preview if body.dry_run else self._groups.seek
        found = await move(group, queue, **where)
        for name in ("partitionName", "cursorMovedTo"):
            found.pop(name, None)
        return answer(found)

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek",
        answer=dict[str, Any],
        summary="Move a group to the end of one partition",
        audit=Audited("group.seek"),
    )
    async def seek_partition(self, request: Request) -> Response:
        group, queue, partition = (request.params[name] for name in ("group", "queue", "partition"))
        found = await self._groups.seek(group, queue, partition=partition)
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
