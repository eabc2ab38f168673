"""Topics over HTTP: the original's endpoints to the letter, and what was added beside them.

GET    /topics                           names
POST   /topics/{topic}                   create, 201
GET    /topics/{topic}                   offsets, sizes, segments, groups with their lag
DELETE /topics/{topic}                   delete with all records
POST   /topics/{topic}/produce           {"payload"}, {"payloads": [...]}, or application/octet-stream; 201
GET    /topics/{topic}/consume           ?offset= &max_messages= or ?at=
GET    /topics/{topic}/next_offset
GET    /topics/{topic}/offset            ?at=: the first record appended at or after that time
GET    /topics/{topic}/stream            server-sent events from ?offset= (or latest), ?at=, Last-Event-ID
    GET    /topics/{topic}/groups            positions, lag, leases; .../groups/{group} for one
    DELETE /topics/{topic}/groups/{group}    forget it
    POST   /topics/{topic}/groups/{group}/commit    {"offset"}
    POST   /topics/{topic}/groups/{group}/lease     {"member", "max_records", "wait_ms"}; 204 when there is nothing
    POST   /topics/{topic}/groups/{group}/complete  {"lease"}, and .../renew {"lease"}
    GET    /api/v1/scrub                     how far the check of sealed segments is; POST: begin one now
"""

import asyncio
import time
from collections.abc import Awaitable
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.errors import InvalidRequest, NotFound, TooLarge
from penstock.protocol.names import check_name
from penstock.protocol.records import Message, messages, payload_bytes
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.topics.topic import Appended, Topic
from penstock.wire.auth import Role
from penstock.wire.feed import Feeds
from penstock.wire.http.messages import EMPTY, Request, Response, StreamResponse, json_response
from penstock.wire.http.routes import Route
from penstock.wire.keepalive import KeepAlive
from penstock.wire.sse import stream_response

CONSUME_BYTES = 16 << 20  # an answer holds at most this much payload, and at least one record
MAX_MESSAGES = 1000
MAX_PAYLOADS = 100_000  # of one produce: more would keep other requests waiting
MAX_WAIT = 60.0  # seconds a lease request may wait
OCTETS = "application/octet-stream"
GROUP = "/topics/{topic}/groups/{group}"

Offset = Annotated[int, Meta(ge=0)]


class ConsumeQuery(Struct, frozen=True):
    offset: Offset = 0
    max_messages: Annotated[int, Meta(ge=0)] = 100
    at: str | None = None


class StreamQuery(Struct, frozen=True):
    offset: str | None = None
    at: str | None = None


class AtQuery(Struct, frozen=True):
    at: str


class Produce(Struct):
    payload: str | UnsetType = UNSET
    payloads: list[str] | UnsetType = UNSET
    encoding: str | UnsetType = UNSET


class Produced(Struct):
    topic: str
    offset: int


class ProducedMany(Struct):
    topic: str
    first_offset: int
    count: int


class Created(Struct):
    topic: str
    status: str = "created_or_exists"


class NextOffset(Struct):
    topic: str
    next_offset: int


class Commit(Struct):
    offset: Offset


class Committed(Struct):
    group: str
    topic: str
    committed: int
    lag: int


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


class TimesQuery(Struct, frozen=True):
    from_: str = msgspec.field(name="from")
    to: str


class GroupMinute(Struct):
    """A group on a topic in a minute; buckets are those of `penstock.protocol.latency`, from append
    to commit.
    """

    time: str
    topic: str
    group: str
    acked: int
    retried: int
    lag: int | None
    buckets: list[int]
    counts: list[int]


class OffsetAt(Struct):
    topic: str
    offset: int


_encode = msgspec.json.Encoder().encode
_decode_produce = msgspec.json.Decoder(Produce).decode


def parse_time(text: str) -> float:
    """Seconds since 1970 of an ISO 8601 time (UTC unless it says otherwise) or of milliseconds
    since 1970.
    """
    try:
        if text.isdecimal():
            return int(text) / 1000
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{text!r} is no time: write 2026-01-31T12:00:00Z, or milliseconds since 1970"
        ) from None


class TopicsApi:
    def __init__(
        self, topics: TopicStore, groups: Groups, feeds: Feeds, keep_alive: KeepAlive
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._feeds = feeds
        self._keep_alive = keep_alive

    def names(self, _: Request) -> Response:
        return json_response(sorted(self._topics.names()))

    async def create(self, request: Request) -> Response:
        name = request.params["topic"]
        await self._topics.create(name)
        return json_response(Created(name), 201)

    async def delete(self, request: Request) -> Response:
        name = request.params["topic"]
        await self._topics.delete(name)
        return json_response(Created(name, "deleted"))

    def scrub(self, _: Request) -> Response:
        return json_response(self._topics.scrub.status())

    def scrub_now(self, _: Request) -> Response:
        self._topics.scrub.ask()
        return json_response(self._topics.scrub.status(), 202)

    def details(self, request: Request) -> Response:
        topic = self._topics.require(request.params["topic"])
        return json_response(topic.details() | {"groups": self._group_details(topic)})

    def produce(self, request: Request) -> Awaitable[Response]:
        name = request.params["topic"]
        payloads, many = _payloads(request)
        topic = self._topics.get(name)
        if topic is None:
            return self._create_and_produce(name, payloads, many)
        return _produced(name, topic.append(payloads), many)

    async def _create_and_produce(self, name: str, payloads: list[bytes], many: bool) -> Response:
        topic = await self._topics.create(name)
        return await _produced(name, topic.append(payloads), many)

    def consume(self, request: Request) -> Response:
        query: ConsumeQuery = request.args
        name = request.params["topic"]
        topic = self._find(name)
        most = min(query.max_messages, MAX_MESSAGES)
        if query.offset >= 1 << 64:
            raise InvalidRequest(
                f"Query parameter `offset`: {query.offset} is larger than any offset"
            )
        if topic is None or not most:
            return json_response([])
        offset = query.offset if query.at is None else topic.offset_at(parse_time(query.at))
        batch = topic.read(offset, most, CONSUME_BYTES)
        return json_response(messages(name, batch.offsets.tolist(), batch.payloads()))

    def next_offset(self, request: Request) -> Response:
        name = request.params["topic"]
        topic = self._find(name)
        return json_response(NextOffset(name, topic.next_offset if topic is not None else 0))

    def _find(self, name: str) -> Topic | None:
        """The topic if there is one; a name that can be nobody's is refused."""
        topic = self._topics.get(name)
        if topic is None:
            check_name(name)
        return topic

    def offset(self, request: Request) -> Response:
        topic = self._topics.require(request.params["topic"])
        query: AtQuery = request.args
        return json_response(OffsetAt(topic.name, topic.offset_at(parse_time(query.at))))

    def stream(self, request: Request) -> StreamResponse:
        topic = self._topics.require(request.params["topic"])
        query: StreamQuery = request.args
        position = _position(topic, query, request.header("last-event-id"))
        return stream_response(self._feeds, self._keep_alive, topic, position)

    # -- groups
    # -----------------------------------------------------------------------------------------------------

    def groups(self, request: Request) -> Response:
        return json_response(self._group_details(self._topics.require(request.params["topic"])))

    def group(self, request: Request) -> Response:
        topic, group = self._topics.require(request.params["topic"]), request.params["group"]
        for found in self._groups.details(group):
            if found["topic"] == topic.name:
                return json_response(found)
        raise NotFound(f"group {group!r} does not exist on topic {topic.name!r}")

    async def delete_group(self, request: Request) -> Response:
        topic, group = self._topics.require(request.params["topic"]), request.params["group"]
        await self._groups.delete(group, topic.name)
        return json_response({"group": group, "topic": topic.name, "status": "deleted"})

    async def commit(self, request: Request) -> Response:
        topic, group = self._topics.require(request.params["topic"]), request.params["group"]
        body: Commit = request.data
        await self._groups.commit(group, topic.name, body.offset)
        return json_response(
            Committed(group, topic.name, body.offset, self._groups.lag(group, topic.name))
        )

    async def lease(self, request: Request) -> Response:
        topic, group = self._topics.require(request.params["topic"]), request.params["group"]
        body: Lease = request.data
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(body.wait_ms / 1000, MAX_WAIT)
        while True:
            lease = self._groups.lease(group, topic.name, body.member, body.max_records)
            if lease is not None:
                left = max(0.0, lease.expires - time.monotonic())
                return json_response(Leased(lease.lease_id, lease.start, lease.end, round(left, 3)))
            if loop.time() >= deadline:
                return EMPTY
            await topic.wait_for(topic.next_offset, min(1.0, deadline - loop.time()))

    async def complete(self, request: Request) -> Response:
        topic, group = self._topics.require(request.params["topic"]), request.params["group"]
        body: LeaseId = request.data
        committed = await self._groups.complete(body.lease)
        return json_response(
            Committed(group, topic.name, committed, self._groups.lag(group, topic.name))
        )

    async def group_minutes(self, request: Request) -> Response:
        query: TimesQuery = request.args
        found = await self._groups.minutes.between(parse_time(query.from_), parse_time(query.to))
        rows = []
        for minute in found:
            at = datetime.fromtimestamp(minute.at, UTC).isoformat()
            buckets = sorted(minute.latency)
            counts = [minute.latency[bucket] for bucket in buckets]
            row = GroupMinute(
                at,
                minute.topic,
                minute.group,
                minute.acked,
                minute.retried,
                minute.lag,
                buckets,
                counts,
            )
            rows.append(row)
        return json_response(rows)

    def renew(self, request: Request) -> Response:
        self._topics.require(request.params["topic"])
        body: LeaseId = request.data
        lease = self._groups.renew(body.lease)
        return json_response(
            Leased(
                lease.lease_id, lease.start, lease.end, round(lease.expires - time.monotonic(), 3)
            )
        )

    def _group_details(self, topic: Topic) -> list[dict[str, Any]]:
        found = [
            details
            for name in self._groups.names(topic.name)
            for details in self._groups.details(name)
        ]
        return [details for details in found if details["topic"] == topic.name]


def _payloads(request: Request) -> tuple[list[bytes], bool]:
    """What to append, and whether the answer speaks of many."""
    kind = request.header("content-type")
    if kind is not None and kind.partition(";")[0].strip().lower() == OCTETS:
        return [request.body], False
    try:
        body = _decode_produce(request.body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"Invalid body: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"Invalid JSON: {error}") from None
    if isinstance(body.payload, str) and body.payloads is UNSET:
        return [payload_bytes(body.payload, body.encoding)], False
    if isinstance(body.payloads, list) and body.payload is UNSET:
        if not body.payloads:
            raise InvalidRequest("`payloads` is empty")
        if len(body.payloads) > MAX_PAYLOADS:
            raise TooLarge(
                f"`payloads` has more than {MAX_PAYLOADS} records: send them in several requests"
            )
        return [payload_bytes(payload, body.encoding) for payload in body.payloads], True
    raise InvalidRequest("The body must have either `payload` or `payloads`")


async def _produced(name: str, future: "Awaitable[Appended]", many: bool) -> Response:
    appended = await future
    if many:
        return Response(201, _encode(ProducedMany(name, appended.first_offset, appended.count)))
    return Response(201, _encode(Produced(name, appended.first_offset)))


def _position(topic: Topic, query: StreamQuery, last_event_id: str | None) -> int:
    """Where a stream begins. A reconnecting client (Last-Event-ID) knows better than its original
    address.
    """
    if last_event_id is not None and last_event_id.strip().isdecimal():
        return int(last_event_id) + 1
    if query.at is not None:
        return topic.offset_at(parse_time(query.at))
    if query.offset is None or query.offset == "earliest":
        return topic.first_offset
    if query.offset == "latest":
        return topic.next_offset
    if not query.offset.isdecimal() or int(query.offset) >= 1 << 64:
        raise InvalidRequest(
            f"Query parameter `offset`: expected a number or `latest`, got {query.offset!r}"
        )
    return int(query.offset)


def routes(topics: TopicStore, groups: Groups, feeds: Feeds, keep_alive: KeepAlive) -> list[Route]:
    api = TopicsApi(topics, groups, feeds, keep_alive)
    route = partial(Route, tag="topics")
    return [
        route("GET", "/topics", api.names, answer=list[str], summary="List the topics"),
        route(
            "POST",
            "/topics/{topic}",
            api.create,
            answer=Created,
            status=201,
            summary="Create a topic",
        ),
        route(
            "GET",
            "/api/v1/scrub",
            api.scrub,
            answer=dict[str, Any],
            summary="How far the check of sealed segments is",
        ),
        route(
            "POST",
            "/api/v1/scrub",
            api.scrub_now,
            answer=dict[str, Any],
            status=202,
            summary="Check all sealed segments now",
            role=Role.ADMIN,
        ),
        route(
            "GET", "/topics/{topic}", api.details, answer=dict[str, Any], summary="Describe a topic"
        ),
        route(
            "DELETE",
            "/topics/{topic}",
            api.delete,
            answer=Created,
            summary="Delete a topic and its records",
            role=Role.ADMIN,
        ),
        route(
            "POST",
            "/topics/{topic}/produce",
            api.produce,
            body=Produce,
            decode=False,
            answer=Produced | ProducedMany,
            status=201,
            summary="Append one record, or several as one batch",
        ),
        route(
            "GET",
            "/topics/{topic}/consume",
            api.consume,
            query=ConsumeQuery,
            answer=list[Message],
            summary="Read records from an offset on",
        ),
        route(
            "GET",
            "/topics/{topic}/next_offset",
            api.next_offset,
            answer=NextOffset,
            summary="The next record's offset",
        ),
        route(
            "GET",
            "/topics/{topic}/offset",
            api.offset,
            query=AtQuery,
            answer=OffsetAt,
            summary="The first record appended at or after a time",
        ),
        route(
            "GET",
            "/topics/{topic}/stream",
            api.stream,
            query=StreamQuery,
            answer_type="text/event-stream",
            summary="Follow a topic as server-sent events",
        ),
        route(
            "GET",
            "/topics/{topic}/groups",
            api.groups,
            answer=list[dict[str, Any]],
            summary="The topic's groups",
        ),
        route(
            "GET",
            GROUP,
            api.group,
            answer=dict[str, Any],
            summary="A group's position, lag and leases",
        ),
        route(
            "DELETE",
            GROUP,
            api.delete_group,
            answer=dict[str, str],
            summary="Forget a group on this topic",
            role=Role.ADMIN,
        ),
        route(
            "POST",
            f"{GROUP}/commit",
            api.commit,
            body=Commit,
            answer=Committed,
            summary="Set a group's position",
        ),
        route(
            "POST",
            f"{GROUP}/lease",
            api.lease,
            body=Lease,
            answer=Leased,
            summary="Take a range of records",
        ),
        route(
            "POST",
            f"{GROUP}/complete",
            api.complete,
            body=LeaseId,
            answer=Committed,
            summary="A range is done",
        ),
        route(
            "GET",
            "/api/v1/analytics/topic-groups",
            api.group_minutes,
            query=TimesQuery,
            answer=list[GroupMinute],
            summary="What groups on topics did per minute, as the broker counted it: for `rollup`",
        ),
        route(
            "POST",
            f"{GROUP}/renew",
            api.renew,
            body=LeaseId,
            answer=Leased,
            summary="Keep a range for longer",
        ),
    ]
