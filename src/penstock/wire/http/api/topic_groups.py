"""Consumer groups on topics over HTTP: positions, lag, and leases of ranges."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.times import epoch_seconds
from penstock.topics.groups import GroupDetails, Groups, Range
from penstock.topics.store import TopicStore
from penstock.topics.topic import Topic
from penstock.wire.auth import Role
from penstock.wire.http.api.answers import of
from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.routes import Audited, route

MAX_WAIT_SECONDS = 60.0  # of a lease request
GROUP = "/topics/{topic}/groups/{group}"


class Commit(Struct):
    offset: Annotated[int, Meta(ge=0)]


class Committed(Struct):
    group: str
    topic: str
    committed: int
    lag: int


class Reset(Struct, rename="camel"):
    """Where a group continues: an offset, a time, or the beginning or end of the topic."""

    offset: Annotated[int, Meta(ge=0)] | None = None
    at: str | None = None  # a time
    to: Literal["beginning", "end"] | None = None
    dry_run: bool = False  # only say what would come


class ResetTo(Struct, rename="camel"):
    group: str
    topic: str
    committed: int  # the next offset that it reads
    lag: int  # records from there on
    before: int  # where it was
    lag_before: int
    dry_run: bool


class Lease(Struct):
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


class GroupDeleted(Struct):
    group: str
    topic: str
    status: str = "deleted"


class TimesQuery(Struct, frozen=True):
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

    @route(
        "GET",
        "/topics/{topic}/groups",
        answer=list[GroupWithAge],
        summary="List the consumer groups of a topic",
    )
    def everything(self, request: Request) -> Response:
        topic = self._topics.require(request.params["topic"])
        return json_response(group_details(self._groups, topic))

    @route("GET", GROUP, answer=GroupDetails, summary="Committed offset, lag and leases of a group")
    def one(self, request: Request) -> Response:
        return json_response(self._details(*self._named(request)))

    def _details(self, topic: Topic, group: str) -> GroupDetails:
        for details in self._groups.details(group):
            if details.topic == topic.name:
                return details
        raise NotFound(f"group {group!r} does not exist on topic {topic.name!r}")

    @route(
        "DELETE",
        GROUP,
        answer=GroupDeleted,
        summary="Delete a consumer group of a topic",
        role=Role.ADMIN,
        audit=Audited("topic-group.delete"),
    )
    async def delete(self, request: Request) -> Response:
        topic, group = self._named(request)
        await self._groups.delete(group, topic.name)
        return json_response(GroupDeleted(group, topic.name))

    @route(
        "POST",
        f"{GROUP}/commit",
        body=Commit,
        answer=Committed,
        summary="Set a group's committed offset",
    )
    async def commit(self, request: Request) -> Response:
        topic, group = self._named(request)
        body: Commit = request.data
        await self._groups.commit(group, topic.name, body.offset)
        return self._committed(group, topic, body.offset)

    @route(
        "POST",
        f"{GROUP}/reset",
        body=Reset,
        answer=ResetTo,
        summary="Move a group to an offset, a time, or the beginning or end of the topic; with "
        "`dryRun`, only count the records affected",
        audit=Audited("topic-group.reset", answer=("dryRun", "before", "committed", "lag")),
    )
    async def reset(self, request: Request) -> Response:
        topic, group = self._named(request)
        body: Reset = request.data
        if (body.offset is not None) + (body.at is not None) + (body.to is not None) != 1:
            raise InvalidRequest("Name one of offset, at and to")
        if body.at is not None:
            at = epoch_seconds(body.at)
            target = await topic.read_through(lambda: topic.offset_at(at))
        elif body.to is not None:
            target = topic.first_offset if body.to == "beginning" else topic.next_offset
        else:
            target = min(body.offset or 0, topic.next_offset)
        now = self._details(topic, group)
        if not body.dry_run:
            await self._groups.commit(group, topic.name, target)
        answer = ResetTo(
            group=group,
            topic=topic.name,
            committed=target,
            lag=await topic.read_through(lambda: topic.records_from(target)),
            before=now.committed,
            lag_before=now.lag,
            dry_run=body.dry_run,
        )
        return json_response(answer)

    @route(
        "POST",
        f"{GROUP}/lease",
        body=Lease,
        answer=Leased,
        may_be_empty=True,
        summary="Lease a range of records to a member of the group",
    )
    async def lease(self, request: Request) -> Response:
        topic, group = self._named(request)
        body: Lease = request.data
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(body.wait_ms / 1000, MAX_WAIT_SECONDS)
        while True:
            lease = self._groups.lease(group, topic.name, body.member, body.max_records)
            if lease is not None:
                return _leased(lease)
            if loop.time() >= deadline:
                return EMPTY
            await topic.wait_for(topic.next_offset, min(1.0, deadline - loop.time()))

    @route(
        "POST",
        f"{GROUP}/complete",
        body=LeaseId,
        answer=Committed,
        summary="Complete a leased range of records",
    )
    async def complete(self, request: Request) -> Response:
        topic, group = self._named(request)
        body: LeaseId = request.data
        return self._committed(group, topic, await self._groups.complete(body.lease))

    @route(
        "GET",
        "/api/v1/analytics/topic-groups",
        query=TimesQuery,
        answer=list[GroupMinute],
        summary="Records, retries, lag and latency of topic groups per minute; used by the `rollup`"
        " pipeline",
    )
    async def minutes(self, request: Request) -> Response:
        query: TimesQuery = request.args
        start, end = epoch_seconds(query.from_), epoch_seconds(query.to)
        rows = []
        for minute in await self._groups.history.between(start, end):
            buckets = sorted(minute.latency)
            row = GroupMinute(
                time=datetime.fromtimestamp(minute.at, UTC).isoformat(),
                topic=minute.topic,
                group=minute.group,
                acked=minute.acked,
                retried=minute.retried,
                lag=minute.lag,
                buckets=buckets,
                counts=[minute.latency[bucket] for bucket in buckets],
            )
            rows.append(row)
        return json_response(rows)

    @route(
        "POST",
        f"{GROUP}/renew",
        body=LeaseId,
        answer=Leased,
        summary="Renew the lease on a range of records",
    )
    def renew(self, request: Request) -> Response:
        self._topics.require(request.params["topic"])
        body: LeaseId = request.data
        return _leased(self._groups.renew(body.lease))

    def _named(self, request: Request) -> tuple[Topic, str]:
        return self._topics.require(request.params["topic"]), request.params["group"]

    def _committed(self, group: str, topic: Topic, offset: int) -> Response:
        lag = self._groups.lag(group, topic.name)
        return json_response(Committed(group, topic.name, offset, lag))


def _leased(lease: Range) -> Response:
    seconds = round(max(0.0, lease.expires - time.monotonic()), 3)
    return json_response(Leased(lease.lease_id, lease.start, lease.end, seconds))


def group_details(groups: Groups, topic: Topic) -> list[GroupWithAge]:
    every = (details for name in groups.names(topic.name) for details in groups.details(name))
    return [
        of(GroupWithAge, details, lag_seconds=topic.age_at(details.committed))
        for details in every
        if details.topic == topic.name
    ]
