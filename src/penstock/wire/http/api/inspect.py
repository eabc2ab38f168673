"""Answer the Console's queries over HTTP: partitions by lag, the history of a message, messages by
their payload, dead letters by error, rates over days.
"""

from typing import Annotated

import msgspec

from penstock.contract import operations
from penstock.contract.queries import QueuePartitionsQuery, TimesQuery
from penstock.contract.queues import QueuePartitions
from penstock.monitor.inspection import (
    BUCKETS,
    SEARCHED,
    ErrorGroups,
    Hits,
    Inspection,
    LifelineEvent,
    Series,
    bucket_seconds,
)
from penstock.queues.admin.dead_letters import Which
from penstock.queues.engine import Queues
from penstock.wire.http.routes import route, serves


class Lifeline(msgspec.Struct):
    events: list[LifelineEvent]


class SearchQuery(TimesQuery, rename="camel", frozen=True):
    search: str = ""  # text, or a path and a value: order.id=7
    transaction_id: str = ""
    partition: str | None = None
    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=SEARCHED)] = SEARCHED  # messages to look at


class ErrorsQuery(msgspec.Struct, rename="camel", frozen=True):
    queue: str = ""
    consumer_group: str = ""
    filter: str = ""  # part of the error


class HistoryQuery(msgspec.Struct, frozen=True):
    range: str = "24h"
    queue: str | None = None


class InspectApi:
    tag = "internal"

    def __init__(self, queues: Queues) -> None:
        self._inspection = Inspection(queues)
        self._dead = queues.dead

    @serves(operations.LIST_QUEUE_PARTITIONS)
    async def partitions(self, queue: str, args: QueuePartitionsQuery) -> QueuePartitions:
        partitions, total = await self._inspection.partitions(
            queue, args.group, args.filter, args.limit, args.offset
        )
        return QueuePartitions(partitions, total)

    @route("GET", "/api/v1/messages/{partition}/{transaction}/lifeline")
    async def lifeline(self, partition: str, transaction: str) -> Lifeline:
        """The history of a message, oldest event first."""
        return Lifeline(await self._inspection.lifeline(partition, transaction))

    @route("GET", "/api/v1/queues/{queue}/messages")
    async def search(self, queue: str, args: SearchQuery) -> Hits:
        """Find messages by transaction id or by a value in the payload; a request searches a
        limited number of messages, newest first.
        """
        if args.transaction_id:
            return await self._inspection.by_transaction(queue, args.transaction_id)
        return await self._inspection.search(
            queue,
            args.search,
            args.partition or None,
            args.since,
            args.until,
            args.cursor,
            args.limit,
        )

    @route("GET", "/api/v1/dlq/errors")
    async def errors(self, args: ErrorsQuery) -> ErrorGroups:
        """Dead letters grouped by error, with counts over time."""
        groups = await self._inspection.errors(args.queue, args.consumer_group, args.filter)
        which = Which(
            queue=args.queue or None, group=args.consumer_group or None, error=args.filter or None
        )
        begin = min((group.first for group in groups), default=0.0)
        width = bucket_seconds(begin / 1000) * 1000
        times = [begin + width * number for number in range(BUCKETS)] if groups else []
        return ErrorGroups(groups, await self._dead.count(which), times)

    @route("GET", "/api/v1/history")
    async def history(self, args: HistoryQuery) -> Series:
        """Messages per second over the last hour, day or week, for all queues or one."""
        return await self._inspection.history(args.range, args.queue or None)
