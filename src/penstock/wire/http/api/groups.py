"""Consumer groups: who reads what, how far behind, and moving them."""

from typing import Annotated, Any, ClassVar

import msgspec

from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.times import time_field
from penstock.queues.engine import Queues
from penstock.queues.groups import GroupStatus, PartitionLag
from penstock.wire.auth import Role
from penstock.wire.http.api.bodies import Paged, answer, decoder
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
        return answer([_group(group) for group in await self._groups.listing()])

    @route(
        "GET",
        "/api/v1/consumer-groups/lagging",
        query=LaggingQuery,
        answer=list[dict[str, Any]],
        summary="Partitions that are far behind",
    )
    async def lagging(self, request: Request) -> Response:
        rows = await self._groups.lagging(request.args.min_lag_seconds)
        return answer([_lagging(row) for row in rows])

    @route(
        "GET",
        "/api/v1/consumer-groups/{group}",
        query=DescribeQuery,
        answer=dict[str, Any],
        summary="A group's partitions",
    )
    async def describe(self, request: Request) -> Response:
        group = request.params["group"]
        rows = await self._groups.describe(group, request.args.limit, request.args.offset)
        if not rows and not await self._groups.listing(group):
            raise NotFound(f"Consumer group not found: {group}")
        queues: dict[str, Any] = {}
        for row in rows:
            queues.setdefault(row.queue, {"partitions": []})["partitions"].append(_partition(row))
        return answer(queues)

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
        group, queue = request.params["group"], request.params.get("queue")
        metadata = request.args.delete_metadata
        deleted = await self._groups.delete(group, queue, metadata=metadata)
        body = {
            "success": True,
            "consumerGroup": group,
            "deletedPartitions": deleted.partitions,
            "metadataDeleted": metadata and deleted.existed,
        }
        return answer(body | ({"queueName": queue} if queue is not None else {}))

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
        start = time_field(body.subscription_timestamp, "subscriptionTimestamp")
        group = request.params["group"]
        updated = await self._groups.subscription(group, start)
        return answer(
            {
                "success": True,
                "consumerGroup": group,
                "newTimestamp": start,
                "rowsUpdated": updated,
            }
        )

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
        at = time_field(body.timestamp, "timestamp") if body.timestamp is not None else None
        to = "beginning" if body.to_beginning else "end"
        group, queue = request.params["group"], request.params["queue"]
        about = {
            "success": True,
            "consumerGroup": group,
            "queueName": queue,
            "seekToEnd": body.to_end,
            "targetTimestamp": at,
        }
        if body.dry_run:
            preview = await self._groups.preview(group, queue, moment=at, to=to)
            return answer(
                about
                | {
                    "dryRun": True,
                    "partitionsUpdated": preview.partitions,
                    "redelivered": preview.again,
                    "skipped": preview.skipped,
                }
            )
        moved = await self._groups.seek(group, queue, moment=at, to=to)
        return answer(about | {"partitionsUpdated": moved.partitions})

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek",
        answer=dict[str, Any],
        summary="Move a group to the end of one partition",
        audit=Audited("group.seek"),
    )
    async def seek_partition(self, request: Request) -> Response:
        group, queue, partition = (request.params[name] for name in ("group", "queue", "partition"))
        moved = await self._groups.seek(group, queue, partition=partition)
        return answer(
            {
                "success": True,
                "consumerGroup": group,
                "queueName": queue,
                "partitionName": partition,
                "updated": bool(moved.partitions),
                "cursorMovedTo": moved.position,
            }
        )


def _group(group: GroupStatus) -> dict[str, Any]:
    figures = group.figures
    return {
        "name": group.name,
        "topics": [group.queue],
        "queueName": group.queue,
        "members": group.members,
        "partitionsWithLag": group.backlog.partitions,
        "totalLag": figures.waiting,
        "maxTimeLag": int(group.backlog.seconds or 0),
        "state": group.state,
        "subscriptionMode": group.mode,
        "subscriptionTimestamp": group.start_at,
        "subscriptionCreatedAt": group.created_at,
        "leased": figures.leased,
        "completed": figures.completed,
        "failed": figures.failed,
        "deadLetters": figures.dead_letters,
        "dropped": figures.dropped,
        "skipped": figures.skipped,
        "discovering": group.discovering,
    }


def _lagging(row: PartitionLag) -> dict[str, Any]:
    return {
        "consumer_group": row.group,
        "queue_name": row.queue,
        "partition_name": row.partition,
        "partition_id": row.partition_id,
        "worker_id": row.lease_id,
        "offset_lag": row.lag,
        "time_lag_seconds": int(row.lag_seconds),
        "lag_hours": round(row.lag_seconds / 3600, 2),
        "oldest_unconsumed_at": row.oldest,
        "last_consumed_at": row.consumed_at,
    }


def _partition(row: PartitionLag) -> dict[str, Any]:
    return {
        "partition": row.partition,
        "workerId": row.lease_id,
        "lastConsumedAt": row.consumed_at,
        "totalConsumed": row.consumed,
        "offsetLag": row.lag,
        "timeLagSeconds": int(row.lag_seconds),
        "leaseActive": row.lease_id is not None,
    }
