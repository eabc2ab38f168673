"""Operations on consumer groups that only Queen MQ has."""

from typing import Any, ClassVar

import msgspec

from penstock.contract.operation import Audited
from penstock.contract.queries import LaggingQuery
from penstock.protocol.times import time_field
from penstock.queues.engine import Queues
from penstock.wire.http.routes import route


class SubscriptionBody(msgspec.Struct, rename="camel"):
    subscription_timestamp: str

    texts: ClassVar = {"subscriptionTimestamp": "Missing subscriptionTimestamp in request body"}


class QueenGroupsApi:
    tag = "queen"

    def __init__(self, queues: Queues) -> None:
        self._groups = queues.groups

    @route("GET", "/api/v1/consumer-groups/lagging")
    async def lagging(self, args: LaggingQuery) -> list[dict[str, Any]]:
        """List partitions whose lag is at least `minLagSeconds`."""
        return [
            {
                "consumer_group": one.group,
                "queue_name": one.queue,
                "partition_name": one.partition,
                "partition_id": one.partition_id,
                "worker_id": one.lease_id,
                "offset_lag": one.waiting,
                "time_lag_seconds": int(one.lag_seconds),
                "lag_hours": round(one.lag_seconds / 3600, 2),
                "oldest_unconsumed_at": one.oldest,
                "last_consumed_at": one.consumed_at,
            }
            for one in await self._groups.lagging(args.min_lag_seconds)
        ]

    @route(
        "POST",
        "/api/v1/consumer-groups/{group}/subscription",
        audit=Audited("group.subscription", answer=("rowsUpdated",)),
    )
    async def subscribe(self, group: str, body: SubscriptionBody) -> dict[str, Any]:
        """Set the time from which a group reads partitions that are new to it."""
        start = time_field(body.subscription_timestamp, "subscriptionTimestamp")
        return {
            "success": True,
            "consumerGroup": group,
            "newTimestamp": start,
            "rowsUpdated": await self._groups.subscription(group, start),
        }
