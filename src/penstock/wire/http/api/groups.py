"""Consumer groups: who reads what, how far behind, and moving them."""

from datetime import datetime
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.answers import Body, GroupLag, GroupPosition, GroupSummary
from penstock.protocol.times import time_field
from penstock.queues.admin.groups import GroupStatus, PartitionLag
from penstock.queues.engine import Queues
from penstock.wire.auth import Role
from penstock.wire.http.answers import of
from penstock.wire.http.api.queries import Paged
from penstock.wire.http.routes import Audited, route

G = TypeVar("G", bound=GroupLag)


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

    texts: ClassVar = {"subscriptionTimestamp": "Missing subscriptionTimestamp in request body"}


class SeekBody(msgspec.Struct, rename="camel"):
    to_end: bool = False
    to_beginning: bool = False
    timestamp: str | None = None
    dry_run: bool = False

    texts: ClassVar[dict[str, str]] = {}


class Group(GroupSummary):
    """A consumer group on one queue."""

    topics: list[str]  # the queue
    subscription_created_at: datetime
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


class GroupPartitions(Body):
    partitions: list[GroupPosition]


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


DELETED = Audited("group.delete", answer=("deletedPartitions",))


class GroupsApi:
    tag = "groups"

    def __init__(self, queues: Queues) -> None:
        self._groups = queues.groups

    @route("GET", "/api/v1/consumer-groups")
    async def list_all(self) -> list[Group]:
        """List the consumer groups of all queues."""
        return [
            group_answer(
                Group,
                group,
                topics=[group.queue],
                subscription_mode=group.mode,
                subscription_timestamp=group.start_at,
                subscription_created_at=group.created_at,
            )
            for group in await self._groups.listing()
        ]

    @route("GET", "/api/v1/consumer-groups/lagging")
    async def lagging(self, args: LaggingQuery) -> list[LaggingPartition]:
        """List partitions whose lag is at least `minLagSeconds`."""
        rows = await self._groups.lagging(args.min_lag_seconds)
        return [_lagging(row) for row in rows]

    @route("GET", "/api/v1/consumer-groups/{group}")
    async def describe(self, group: str, args: DescribeQuery) -> dict[str, GroupPartitions]:
        """Position and lag of a group in each of its partitions."""
        rows = await self._groups.describe(group, args.limit, args.offset)
        if not rows and not await self._groups.listing(group):
            raise NotFound(f"Consumer group not found: {group}")
        queues: dict[str, GroupPartitions] = {}
        for row in rows:
            queues.setdefault(row.queue, GroupPartitions([])).partitions.append(_partition(row))
        return queues

    @route(
        "DELETE",
        "/api/v1/consumer-groups/{group}",
        summary="Delete a consumer group on all queues",
        role=Role.ADMIN,
        audit=DELETED,
    )
    @route(
        "DELETE",
        "/api/v1/consumer-groups/{group}/queues/{queue}",
        summary="Delete a consumer group on one queue",
        role=Role.ADMIN,
        audit=DELETED,
    )
    async def delete(self, group: str, queue: str | None, args: DeleteQuery) -> GroupDeleted:
        metadata = args.delete_metadata
        deleted = await self._groups.delete(group, queue, metadata=metadata)
        return GroupDeleted(
            success=True,
            consumer_group=group,
            deleted_partitions=deleted.partitions,
            metadata_deleted=metadata and deleted.existed,
            queue_name=msgspec.UNSET if queue is None else queue,
        )

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/subscription",
        audit=Audited("group.subscription", answer=("rowsUpdated",)),
    )
    async def subscribe(self, group: str, body: SubscriptionBody) -> Subscribed:
        """Set the time from which a group reads partitions that are new to it."""
        start = time_field(body.subscription_timestamp, "subscriptionTimestamp")
        updated = await self._groups.subscription(group, start)
        return Subscribed(True, group, start, updated)

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/queues/{queue}/seek",
        audit=Audited(
            "group.seek",
            body=("toEnd", "toBeginning", "timestamp"),
            answer=("dryRun", "partitionsUpdated"),
        ),
    )
    async def seek(self, group: str, queue: str, body: SeekBody | None) -> Sought:
        """Move a group to the end, the beginning or a time; with `dryRun`, only count the messages
        affected.
        """
        body = body or SeekBody()
        if body.to_end + body.to_beginning + (body.timestamp is not None) != 1:
            raise InvalidRequest("Name one of toEnd, toBeginning and timestamp")
        at = time_field(body.timestamp, "timestamp") if body.timestamp is not None else None
        to = "beginning" if body.to_beginning else "end"
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
        return sought

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek",
        audit=Audited("group.seek"),
    )
    async def seek_partition(self, group: str, queue: str, partition: str) -> PartitionSought:
        """Move a group to the end of one partition."""
        moved = await self._groups.seek(group, queue, partition=partition)
        return PartitionSought(
            True, group, queue, partition, bool(moved.partitions), moved.position
        )


def group_answer(kind: type[G], group: GroupStatus, **more: Any) -> G:
    return of(
        kind,
        group,
        group.figures,
        queue_name=group.queue,
        total_lag=group.figures.waiting,
        max_time_lag=int(group.backlog.seconds or 0),
        partitions_with_lag=group.backlog.partitions,
        **more,
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


def _partition(row: PartitionLag) -> GroupPosition:
    return GroupPosition(
        partition=row.partition,
        worker_id=row.lease_id,
        last_consumed_at=row.consumed_at,
        total_consumed=row.consumed,
        offset_lag=row.lag,
        time_lag_seconds=int(row.lag_seconds),
        lease_active=row.lease_id is not None,
    )
