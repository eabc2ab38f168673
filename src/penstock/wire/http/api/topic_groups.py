"""Consumer groups on topics over HTTP: positions, lag, and leases of ranges."""

import time
from datetime import UTC, datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from penstock.contract.operation import Audited
from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.times import epoch_seconds
from penstock.topics.groups import GroupDetails, Groups, OffsetRange
from penstock.topics.shared.groups import SharedLease
from penstock.topics.store import AnyLog, TopicStore
from penstock.wire.auth import Role
from penstock.wire.http.answers import of
from penstock.wire.http.routes import route

MAX_WAIT_SECONDS = 60.0  # of a lease request
GROUP = "/topics/{topic}/groups/{group}"


class CommitBody(Struct):
    offset: Annotated[int, Meta(ge=0)]


class Committed(Struct):
    group: str
    topic: str
    committed: int  # the next offset that it reads
    lag: int  # records from there on


class Reset(Struct, rename="camel"):
    """Where a group continues: an offset, a time, or the beginning or end of the topic."""

    offset: Annotated[int, Meta(ge=0)] | None = None
    at: str | None = None  # a time
    to: Literal["beginning", "end"] | None = None
    dry_run: bool = False  # only say what would come


class ResetTo(Committed, rename="camel"):
    before: int  # where it was
    lag_before: int
    dry_run: bool


class LeaseBody(Struct):
    member: str
    max_records: Annotated[int, Meta(ge=1)] = 1000
    wait_ms: Annotated[int, Meta(ge=0)] = 0


class LeaseId(Struct):
    lease: str


class Leased(Struct):
    lease: str
    start: int
    end: int
    expires_in: float


class GroupWithAge(GroupDetails):
    lag_seconds: float | None  # age of the record that it reads next


class TopicGroupDeleted(Struct):
    group: str
    topic: str
    status: str = "deleted"


class GroupTimesQuery(Struct, frozen=True):
    from_: str = field(name="from")
    to: str


class GroupMinute(Struct):
    """A topic group in one minute. Latency, from append to commit, is counted in the buckets of
    `penstock.protocol.latency`.
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

    @route("GET", "/topics/{topic}/groups")
    async def everything(self, topic: str) -> list[GroupWithAge]:
        """List the consumer groups of a topic."""
        return await group_details(self._groups, self._topics.require(topic))

    @route("GET", GROUP)
    async def one(self, topic: str, group: str) -> GroupDetails:
        """Committed offset, lag and leases of a group."""
        self._topics.require(topic)
        for details in await self._groups.all_details(group):
            if details.topic == topic:
                return details
        raise NotFound(f"group {group!r} does not exist on topic {topic!r}")

    @route("DELETE", GROUP, role=Role.ADMIN, audit=Audited("topic-group.delete"))
    async def delete(self, topic: str, group: str) -> TopicGroupDeleted:
        """Delete a consumer group of a topic."""
        self._topics.require(topic)
        await self._groups.delete(group, topic)
        return TopicGroupDeleted(group, topic)

    @route("POST", f"{GROUP}/commit")
    async def commit(self, topic: str, group: str, body: CommitBody) -> Committed:
        """Set a group's committed offset."""
        self._topics.require(topic)
        await self._groups.commit(group, topic, body.offset)
        return await self._committed(group, topic, body.offset)

    @route(
        "POST",
        f"{GROUP}/reset",
        audit=Audited("topic-group.reset", answer=("dryRun", "before", "committed", "lag")),
    )
    async def reset(self, topic: str, group: str, body: Reset) -> ResetTo:
        """Move a group to an offset, a time, or the beginning or end of the topic; with `dryRun`,
        only count the records affected.
        """
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

    @route("POST", f"{GROUP}/lease")
    async def lease(self, topic: str, group: str, body: LeaseBody) -> Leased | None:
        """Lease a range of records to a member of the group."""
        seconds = min(body.wait_ms / 1000, MAX_WAIT_SECONDS)
        lease = await self._groups.lease_within(
            seconds, group, topic, body.member, body.max_records
        )
        return None if lease is None else _leased(lease)

    @route("POST", f"{GROUP}/complete")
    async def complete(self, topic: str, group: str, body: LeaseId) -> Committed:
        """Complete a leased range of records."""
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

    @route("POST", f"{GROUP}/renew")
    async def renew(self, topic: str, body: LeaseId) -> Leased:
        """Renew the lease on a range of records."""
        self._topics.require(topic)
        return _leased(await self._groups.renew_on(topic, body.lease))

    async def _committed(self, group: str, topic: str, offset: int) -> Committed:
        _, lag = await self._groups.resume(group, topic)
        return Committed(group, topic, offset, lag)


def _leased(lease: OffsetRange | SharedLease) -> Leased:
    seconds = round(max(0.0, lease.expires - time.monotonic()), 3)
    return Leased(lease.lease_id, lease.start, lease.end, seconds)


async def group_details(groups: Groups, topic: AnyLog) -> list[GroupWithAge]:
    names = await groups.all_names(topic.name)
    return [
        of(GroupWithAge, details, lag_seconds=topic.age_at(details.committed))
        for name in names
        for details in await groups.all_details(name)
        if details.topic == topic.name
    ]
