"""Consumer groups: who reads what, how far behind, and moving them."""

from datetime import datetime
from typing import Annotated, ClassVar

import msgspec

from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.times import time_field
from penstock.queues.engine import Queues
from penstock.queues.groups import GroupStatus, PartitionLag
from penstock.wire.auth import Role
from penstock.wire.http.api.answers import Body, answer, of
from penstock.wire.http.api.bodies import Paged, decoder
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


class Group(Body):
    """A consumer group on one queue."""

    name: str
    topics: list[str]  # the queue
    queue_name: str
    members: int
    partitions_with_lag: int
    total_lag: int
    max_time_lag: int  # seconds
    state: str
    subscription_mode: str | None
    subscription_timestamp: datetime | None
    subscription_created_at: datetime
    leased: int
    completed: int
    failed: int
    dead_letters: int
    dropped: int
    skipped: int
    discovering: bool


class LaggingPartition(Body, rename=None):
    consumer_group: str
    queue_name: str
    partition_name: str
    partition_id: str
    worker_id: str | None  # the lease that is live
    offset_lag: int
    time_lag_seconds: int
    lag_hours: float
    oldest_unconsumed_at: datetime | None
    last_consumed_at: datetime | None


class GroupPartition(Body):
    partition: str
    worker_id: str | None  # the lease that is live
    last_consumed_at: datetime | None
    total_consumed: int
    offset_lag: int
    time_lag_seconds: int
    lease_active: bool


class GroupPartitions(Body):
    partitions: list[GroupPartition]


class GroupDeleted(Body):
    success: bool
    consumer_group: str
    deleted_partitions: int
    metadata_deleted: bool
    queue_name: str | msgspec.UnsetType = msgspec.UNSET


class Subscribed(Body):
    success: bool
    consumer_group: str
    new_timestamp: datetime
    rows_updated: int


class Sought(Body):
    success: bool
    consumer_group: str
    queue_name: str
    seek_to_end: bool
    target_timestamp: datetime | None
    partitions_updated: int
    dry_run: bool | msgspec.UnsetType = msgspec.UNSET
    redelivered: int | msgspec.UnsetType = msgspec.UNSET  # of a dry run
    skipped: int | msgspec.UnsetType = msgspec.UNSET  # of a dry run


class PartitionSought(Body):
    success: bool
    consumer_group: str
    queue_name: str
    partition_name: str
    updated: bool
    cursor_moved_to: int | None


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
        answer=list[Group],
        summary="List the consumer groups of all queues",
    )
    async def list_all(self, _: Request) -> Response:
        return answer([_group(group) for group in await self._groups.listing()])

    @route(
        "GET",
        "/api/v1/consumer-groups/lagging",
        query=LaggingQuery,
        answer=list[LaggingPartition],
        summary="List partitions whose lag is at least `minLagSeconds`",
    )
    async def lagging(self, request: Request) -> Response:
        rows = await self._groups.lagging(request.args.min_lag_seconds)
        return answer([_lagging(row) for row in rows])

    @route(
        "GET",
        "/api/v1/consumer-groups/{group}",
        query=DescribeQuery,
        answer=dict[str, GroupPartitions],
        summary="Position and lag of a group in each of its partitions",
    )
    async def describe(self, request: Request) -> Response:
        group = request.params["group"]
        rows = await self._groups.describe(group, request.args.limit, request.args.offset)
        if not rows and not await self._groups.listing(group):
            raise NotFound(f"Consumer group not found: {group}")
        queues: dict[str, GroupPartitions] = {}
        for row in rows:
            queues.setdefault(row.queue, GroupPartitions([])).partitions.append(_partition(row))
        return answer(queues)

    @route(
        "DELETE",
        "/api/v1/consumer-groups/{group}",
        query=DeleteQuery,
        answer=GroupDeleted,
        summary="Delete a consumer group on all queues",
        role=Role.ADMIN,
        audit=DELETED,
    )
    @route(
        "DELETE",
        "/api/v1/consumer-groups/{group}/queues/{queue}",
        query=DeleteQuery,
        answer=GroupDeleted,
        summary="Delete a consumer group on one queue",
        role=Role.ADMIN,
        audit=DELETED,
    )
    async def delete(self, request: Request) -> Response:
        group, queue = request.params["group"], request.params.get("queue")
        metadata = request.args.delete_metadata
        deleted = await self._groups.delete(group, queue, metadata=metadata)
        return answer(
            GroupDeleted(
                success=True,
                consumer_group=group,
                deleted_partitions=deleted.partitions,
                metadata_deleted=metadata and deleted.existed,
                queue_name=msgspec.UNSET if queue is None else queue,
            )
        )

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/subscription",
        body=SubscriptionBody,
        decode=False,
        answer=Subscribed,
        summary="Set the time from which a group reads partitions that are new to it",
        audit=Audited("group.subscription", answer=("rowsUpdated",)),
    )
    async def subscribe(self, request: Request) -> Response:
        body = read_subscription(request.body)
        start = time_field(body.subscription_timestamp, "subscriptionTimestamp")
        group = request.params["group"]
        updated = await self._groups.subscription(group, start)
        return answer(Subscribed(True, group, start, updated))

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/queues/{queue}/seek",
        body=SeekBody,
        decode=False,
        answer=Sought,
        summary="Move a group to the end, the beginning or a time; with `dryRun`, only count the "
        "messages affected",
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
        sought = Sought(True, group, queue, body.to_end, at, partitions_updated=0)
        if body.dry_run:
            preview = await self._groups.preview(group, queue, moment=at, to=to)
            sought.dry_run = True
            sought.partitions_updated = preview.partitions
            sought.redelivered = preview.again
            sought.skipped = preview.skipped
        else:
            moved = await self._groups.seek(group, queue, moment=at, to=to)
            sought.partitions_updated = moved.partitions
        return answer(sought)

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek",
        answer=PartitionSought,
        summary="Move a group to the end of one partition",
        audit=Audited("group.seek"),
    )
    async def seek_partition(self, request: Request) -> Response:
        group, queue, partition = (request.params[name] for name in ("group", "queue", "partition"))
        moved = await self._groups.seek(group, queue, partition=partition)
        return answer(
            PartitionSought(True, group, queue, partition, bool(moved.partitions), moved.position)
        )


def _group(group: GroupStatus) -> Group:
    return of(
        Group,
        group,
        group.figures,
        topics=[group.queue],
        queue_name=group.queue,
        partitions_with_lag=group.backlog.partitions,
        total_lag=group.figures.waiting,
        max_time_lag=int(group.backlog.seconds or 0),
        subscription_mode=group.mode,
        subscription_timestamp=group.start_at,
        subscription_created_at=group.created_at,
    )


def _lagging(row: PartitionLag) -> LaggingPartition:
    return LaggingPartition(
        consumer_group=row.group,
        queue_name=row.queue,
        partition_name=row.partition,
        partition_id=row.partition_id,
        worker_id=row.lease_id,
        offset_lag=row.lag,
        time_lag_seconds=int(row.lag_seconds),
        lag_hours=round(row.lag_seconds / 3600, 2),
        oldest_unconsumed_at=row.oldest,
        last_consumed_at=row.consumed_at,
    )


def _partition(row: PartitionLag) -> GroupPartition:
    return GroupPartition(
        partition=row.partition,
        worker_id=row.lease_id,
        last_consumed_at=row.consumed_at,
        total_consumed=row.consumed,
        offset_lag=row.lag,
        time_lag_seconds=int(row.lag_seconds),
        lease_active=row.lease_id is not None,
    )
