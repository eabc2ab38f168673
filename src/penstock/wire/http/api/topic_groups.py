"""Consumer groups on topics over HTTP: positions, lag, and leases of ranges."""

import time
from datetime import UTC, datetime

from msgspec import Struct, field

from penstock.contract import operations
from penstock.contract.noun import of
from penstock.contract.queries import TopicGroupListQuery
from penstock.contract.topics import (
    CommitBody,
    Committed,
    GroupDetails,
    GroupWithAge,
    LeaseBody,
    Leased,
    LeaseId,
    Reset,
    ResetTo,
    TopicGroupDeleted,
)
from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.times import epoch_seconds
from penstock.topics.groups import Groups
from penstock.topics.shared.groups import OffsetRange
from penstock.topics.store import AnyLog, TopicStore
from penstock.wire.http.routes import route, serves

MAX_WAIT_SECONDS = 60.0  # of a lease request


class GroupTimesQuery(Struct, frozen=True):
    from_: str = field(name="from")
    to: str


class GroupMinute(Struct):
    """A topic group in one minute. `penstock.protocol.latency` defines the buckets, which count the
    latency from append to commit.
    """

    time: str
    topic: str
    group: str
    acked: int
    retried: int
    lag: int | None
    buckets: list[int]
    counts: list[int]


class TopicGroupsApi:
    tag = "topics"

    def __init__(self, topics: TopicStore, groups: Groups) -> None:
        self._topics = topics
        self._groups = groups

    @serves(operations.LIST_ALL_TOPIC_GROUPS)
    async def everything(self, args: TopicGroupListQuery) -> list[GroupWithAge]:
        after = args.after_topic, args.after_group
        page = await self._groups.page(limit=args.limit, after=after)
        logs = {one.topic: self._topics.get(one.topic) for one in page}
        return [
            of(GroupWithAge, one, lag_seconds=log.age_at(one.committed))
            for one in page
            if (log := logs[one.topic]) is not None  # None: deleted meanwhile
        ]

    @serves(operations.LIST_TOPIC_GROUPS)
    async def on_topic(self, topic: str) -> list[GroupWithAge]:
        return await group_details(self._groups, self._topics.require(topic))

    @serves(operations.GET_TOPIC_GROUP)
    async def one(self, topic: str, group: str) -> GroupDetails:
        self._topics.require(topic)
        for details in await self._groups.page(topic, group):
            return details
        raise NotFound(f"group {group!r} does not exist on topic {topic!r}")

    @serves(operations.DELETE_TOPIC_GROUP)
    async def delete(self, topic: str, group: str) -> TopicGroupDeleted:
        self._topics.require(topic)
        await self._groups.delete(group, topic)
        return TopicGroupDeleted(group, topic)

    @serves(operations.COMMIT_TOPIC_GROUP)
    async def commit(self, topic: str, group: str, body: CommitBody) -> Committed:
        self._topics.require(topic)
        await self._groups.commit(group, topic, body.offset)
        return await self._committed(group, topic, body.offset)

    @serves(operations.RESET_TOPIC_GROUP)
    async def reset(self, topic: str, group: str, body: Reset) -> ResetTo:
        log = self._topics.require(topic)
        if (body.offset is not None) + (body.at is not None) + (body.to is not None) != 1:
            raise InvalidRequest("Name one of offset, at and to")
        if body.at is not None:
            at = epoch_seconds(body.at)
            target = await log.read_through(lambda: log.offset_at(at))
        elif body.to is not None:
            target = log.first_offset if body.to == "beginning" else log.next_offset
        else:
            target = min(body.offset or 0, log.next_offset)
        now = await self.one(topic, group)
        if not body.dry_run:
            await self._groups.commit(group, topic, target)
        return ResetTo(
            group=group,
            topic=topic,
            committed=target,
            lag=await log.read_through(lambda: log.records_from(target)),
            before=now.committed,
            lag_before=now.lag,
            dry_run=body.dry_run,
        )

    @serves(operations.LEASE_RECORDS)
    async def lease(self, topic: str, group: str, body: LeaseBody) -> Leased | None:
        seconds = min(body.wait_ms / 1000, MAX_WAIT_SECONDS)
        lease = await self._groups.lease_within(
            seconds, group, topic, body.member, body.max_records
        )
        return None if lease is None else _leased(lease)

    @serves(operations.COMPLETE_RECORDS)
    async def complete(self, topic: str, group: str, body: LeaseId) -> Committed:
        self._topics.require(topic)
        return await self._committed(group, topic, await self._groups.complete(body.lease, topic))

    @route("GET", "/api/v1/analytics/topic-groups", tag="internal")
    async def minutes(self, args: GroupTimesQuery) -> list[GroupMinute]:
        """Records, retries, lag and latency of topic groups per minute; used by the `rollup`
        pipeline.
        """
        start, end = epoch_seconds(args.from_), epoch_seconds(args.to)
        return [
            of(
                GroupMinute,
                minute,
                time=datetime.fromtimestamp(minute.at, UTC).isoformat(),
                buckets=sorted(minute.latency),
                counts=[minute.latency[bucket] for bucket in sorted(minute.latency)],
            )
            for minute in await self._groups.history.between(start, end)
        ]

    @serves(operations.RENEW_RECORDS)
    async def renew(self, topic: str, body: LeaseId) -> Leased:
        self._topics.require(topic)
        return _leased(await self._groups.renew_on(topic, body.lease))

    async def _committed(self, group: str, topic: str, offset: int) -> Committed:
        _, lag = await self._groups.resume(group, topic)
        return Committed(group, topic, offset, lag)


def _leased(lease: OffsetRange) -> Leased:
    seconds = round(max(0.0, lease.expires - time.monotonic()), 3)
    return Leased(lease.lease_id, lease.start, lease.end, seconds)


async def group_details(groups: Groups, topic: AnyLog) -> list[GroupWithAge]:
    return [
        of(GroupWithAge, details, lag_seconds=topic.age_at(details.committed))
        for details in await groups.page(topic.name)
    ]
