"""Operations on consumer groups that only Queen MQ has."""

from typing import ClassVar

import msgspec

from penstock.contract import operations
from penstock.contract.groups import Seek
from penstock.contract.operation import Audited
from penstock.contract.queries import LaggingQuery
from penstock.protocol.times import time_field
from penstock.queues.engine import Queues
from penstock.wire.http.routes import route
from penstock.wire.queen.aliases import Json, shape

_lagging = shape(
    "consumer_group=group queue_name=queue partition_name=partition partition_id "
    "worker_id=lease_id offset_lag=waiting oldest_unconsumed_at=oldest last_consumed_at=consumed_at"
)


class SubscriptionBody(msgspec.Struct, rename="camel"):
    subscription_timestamp: str

    texts: ClassVar = {"subscriptionTimestamp": "Missing subscriptionTimestamp in request body"}


class QueenGroupsApi:
    tag = "queen"

    def __init__(self, queues: Queues) -> None:
        self._groups = queues.groups

    @route("GET", "/api/v1/consumer-groups/lagging")
    async def lagging(self, args: LaggingQuery) -> list[Json]:
        """List partitions whose lag is at least `minLagSeconds`."""
        return [
            {
                **_lagging(one),
                "time_lag_seconds": int(one.lag_seconds),
                "lag_hours": round(one.lag_seconds / 3600, 2),
            }
            for one in await self._groups.lagging(args.min_lag_seconds)
        ]

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/subscription",
        audit=Audited("group.subscription", answer=("rowsUpdated",)),
    )
    async def subscribe(self, group: str, body: SubscriptionBody) -> Json:
        """Set the time from which a group reads partitions that are new to it."""
        start = time_field(body.subscription_timestamp, "subscriptionTimestamp")
        return {
            "success": True,
            "consumerGroup": group,
            "newTimestamp": start,
            "rowsUpdated": await self._groups.subscription(group, start),
        }

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek",
        audit=operations.SEEK.audit,
    )
    async def seek_partition(self, group: str, queue: str, partition: str) -> Seek:
        """Move a group to the end of one partition."""
        return await self._groups.seek(group, queue, partition=partition)
