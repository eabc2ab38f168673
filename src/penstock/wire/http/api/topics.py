"""Topics over HTTP: aiq's endpoints exactly, and our own beside them."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.contract.operation import Audited
from penstock.contract.queries import ListQuery
from penstock.errors import InvalidRequest, NotFound, TooLarge
from penstock.monitor.topic_rates import TopicRates
from penstock.protocol.kafka_batch import NewRecord
from penstock.protocol.names import partition_label
from penstock.protocol.records import MessageFields, RecordMessage, payload_bytes
from penstock.protocol.times import epoch_seconds
from penstock.topics.groups import Groups
from penstock.topics.scrub import ScrubStatus
from penstock.topics.shared.log import SharedLog
from penstock.topics.store import LOCAL, SHARED, AnyLog, TopicStore
from penstock.topics.tier.tier import Tier, TierStatus
from penstock.wire.auth import Role
from penstock.wire.feed import Feeds, messages_of
from penstock.wire.http.answers import of
from penstock.wire.http.api.listing import page_of
from penstock.wire.http.api.topic_groups import GroupWithAge, group_details
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Request, Response, StreamResponse, json_response
from penstock.wire.http.routes import route
from penstock.wire.sse import stream_response

CONSUME_BYTES = 16 << 20  # an answer holds at most this much payload, and at least one record
MAX_MESSAGES = 1000
MAX_PAYLOADS = 100_000  # of one produce: more would keep other requests waiting
OCTETS = "application/octet-stream"

Offset = Annotated[int, Meta(ge=0)]


class PartitionQuery(Struct, frozen=True, kw_only=True):
    partition: Annotated[int, Meta(ge=0)] = 0


class CreateQuery(Struct, frozen=True):
    format: str | None = None  # aiq or kafka
    partitions: Annotated[int, Meta(ge=1)] = 1
    placement: str | None = None  # local or shared


class ConsumeQuery(PartitionQuery, frozen=True):
    offset: Offset = 0
    max_messages: Annotated[int, Meta(ge=0)] = 100
    at: str | None = None


class StreamQuery(PartitionQuery, frozen=True):
    offset: str | None = None
    at: str | None = None


class AtQuery(PartitionQuery, frozen=True):
    at: str


class ProducedRecord(MessageFields):
    """A record of a batch. Without a payload it is a tombstone."""

    payload: str | None = None
    encoding: str | UnsetType = UNSET


class ProduceBody(MessageFields):
    payload: str | UnsetType | None = UNSET
    payloads: list[str] | UnsetType = UNSET
    records: list[ProducedRecord] | UnsetType = UNSET
    encoding: str | UnsetType = UNSET


class RecordProduced(Struct):
    topic: str
    offset: int
    partition: int | UnsetType = UNSET  # of a topic that has several


class ProducedMany(Struct):
    topic: str
    first_offset: int
    count: int
    partition: int | UnsetType = UNSET


class TopicsQuery(ListQuery):
    details: bool = False


class TopicRow(Struct, rename="camel"):
    """A topic in a list."""

    name: str
    records: int
    bytes: int
    first_offset: int
    next_offset: int
    segments: int
    rate: float | None  # records per second; null when it was not asked for before
    groups: int
    worst_lag: int | None
    policy: str
    placement: str  # local or shared
    damaged: int
    history: list[float]


class TopicPage(Struct):
    topics: list[TopicRow]
    total: int


class SegmentDetails(Struct):
    base: int
    end: int
    records: int
    bytes: int
    newest: float  # seconds since 1970
    sealed: bool
    compacted: bool
    local: bool  # on this disk


class Retention(Struct):
    bytes: int
    age: float  # seconds


class TopicDetails(Struct):
    topic: str
    incarnation: str
    first_offset: int
    next_offset: int
    records: int
    bytes: int
    local_offset: int
    local_bytes: int
    tier_offset: int | None
    tier_bytes: int
    placement: str  # local or shared
    producers: int  # that are known by their sequence numbers
    archived_offset: int | None
    policy: str
    broken: str | None  # why appends are refused
    damage: list[dict[str, Any]]  # the places of damage.json
    segments: list[SegmentDetails]
    groups: list[GroupWithAge]
    rate: float | None  # records per second; null when it was not asked for before
    history: list[float]
    retention: Retention


class Created(Struct):
    topic: str
    status: str = "created_or_exists"


class TopicNextOffset(Struct):
    topic: str
    next_offset: int


class OffsetAt(Struct):
    topic: str
    offset: int


def _placement(log: AnyLog) -> str:
    return SHARED if isinstance(log, SharedLog) else LOCAL


_encode = msgspec.json.Encoder().encode
read_produce = body_decoder(ProduceBody)


class TopicsApi:
    tag = "topics"

    def __init__(self, topics: TopicStore, groups: Groups, feeds: Feeds) -> None:
        self._topics = topics
        self._rates = TopicRates(topics)
        self._groups = groups
        self._feeds = feeds

    @route("GET", "/topics")
    def names(self, args: TopicsQuery) -> list[str] | TopicPage:
        """List topic names, or with `details=true` topics with their sizes and rates."""
        if not args.details:
            return self._topics.names()
        self._rates.look()
        rows = [self._row(self._topics.require(name)) for name in self._topics.names()]
        return TopicPage(*page_of(rows, args))

    def _row(self, topic: AnyLog) -> TopicRow:
        lags = [self._groups.lag(group, topic.name) for group in self._groups.names(topic.name)]
        return of(
            TopicRow,
            topic,
            bytes=topic.size_bytes,
            segments=len(topic.segments),
            rate=self._rates.rate(topic.name),
            groups=len(lags),
            worst_lag=max(lags, default=None),
            placement=_placement(topic),
            damaged=len(topic.damage),
            history=self._rates.line(topic.name),
        )

    @route("POST", "/topics/{topic}", status=201, audit=Audited("topic.create"))
    async def create(self, topic: str, args: CreateQuery) -> Created:
        """Create a topic. Its format and placement are those of the settings unless given."""
        await self._topics.create(
            topic, form=args.format, partitions=args.partitions, placement=args.placement
        )
        return Created(topic)

    @route("DELETE", "/topics/{topic}", role=Role.ADMIN, audit=Audited("topic.delete"))
    async def delete(self, topic: str) -> Created:
        """Delete a topic and its records."""
        await self._topics.delete(topic)
        return Created(topic, "deleted")

    @route("GET", "/api/v1/scrub")
    def scrub(self) -> ScrubStatus:
        """Progress of the checksum scan over sealed segments."""
        return self._topics.scrub.status()

    @route("POST", "/api/v1/scrub", status=202, role=Role.ADMIN, audit=Audited("topic.scrub"))
    def scrub_now(self) -> ScrubStatus:
        """Verify the checksums of all sealed segments now."""
        self._topics.scrub.ask()
        return self._topics.scrub.status()

    @route("GET", "/api/v1/tier")
    def tier(self) -> TierStatus:
        """Which part of the topics is in the object store, and its lag."""
        return self._tier().status()

    @route(
        "POST", "/api/v1/tier/flush", status=202, role=Role.ADMIN, audit=Audited("topic.tier-flush")
    )
    async def tier_flush(self) -> TierStatus:
        """Seal the active segments of all topics and copy them to the object store now."""
        tier = self._tier()
        await tier.flush()
        return tier.status()

    def _tier(self) -> Tier:
        if self._topics.tier is None:
            raise NotFound("this broker has no tier: set topics.tier to an address")
        return self._topics.tier

    @route("GET", "/topics/{topic}")
    async def details(self, topic: str) -> TopicDetails:
        """A topic with its offsets, size and segments."""
        log = self._topics.require(topic)
        if isinstance(log, SharedLog):
            await log.measure()
        self._rates.look()
        settings = self._topics.settings
        return of(
            TopicDetails,
            log,
            topic=topic,
            bytes=log.size_bytes,
            placement=_placement(log),
            tier_offset=log.tier.end if log.tier is not None else None,
            tier_bytes=log.tier.size if log.tier is not None else 0,
            segments=[
                of(
                    SegmentDetails,
                    segment,
                    records=segment.rows,
                    bytes=segment.size,
                    newest=segment.newest / 1e6,
                )
                for segment in log.segments
            ],
            groups=await group_details(self._groups, log),
            rate=self._rates.rate(topic),
            history=self._rates.line(topic),
            retention=Retention(settings.retention_bytes, settings.retention_age),
        )

    @route(
        "POST",
        "/topics/{topic}/produce",
        query=PartitionQuery,
        body=ProduceBody,
        answer=RecordProduced | ProducedMany,
        status=201,
    )
    def produce(self, request: Request) -> Awaitable[Response]:
        """Append one record, or several as one batch."""
        name, partition = request.params["topic"], request.args.partition
        content, many = _content(request)
        topic = self._topics.get(partition_label(name, partition))
        if topic is None:
            return self._create_and_produce(name, partition, content, many)
        return self._append(topic, content, many)

    async def _create_and_produce(
        self, name: str, partition: int, content: "Content", many: bool
    ) -> Response:
        await self._topics.create(name)
        return await self._append(self._topics.partition(name, partition), content, many)

    async def _append(self, topic: AnyLog, content: "Content", many: bool) -> Response:
        if isinstance(content, tuple):
            appended = await topic.append_records(content)
        else:
            appended = await topic.append(content)
        several = self._topics.partitions(topic.topic) > 1
        partition = topic.partition if several else UNSET
        first = appended.first_offset
        if many:
            answer = ProducedMany(topic.topic, first, appended.count, partition)
            return Response(201, _encode(answer))
        return Response(201, _encode(RecordProduced(topic.topic, first, partition)))

    @route("GET", "/topics/{topic}/consume", query=ConsumeQuery, answer=list[RecordMessage])
    def consume(self, request: Request) -> Response | Awaitable[Response]:
        """Read records from an offset."""
        query: ConsumeQuery = request.args
        name = request.params["topic"]
        topic = self._find(name, query.partition)
        most = min(query.max_messages, MAX_MESSAGES)
        if query.offset >= 1 << 64:
            raise InvalidRequest(
                f"Query parameter `offset`: {query.offset} is larger than any offset"
            )
        if topic is None or not most:
            return json_response([])

        def read() -> Response:
            offset = query.offset if query.at is None else topic.offset_at(epoch_seconds(query.at))
            batch = topic.read(offset, most, CONSUME_BYTES)
            return json_response(messages_of(name, batch))

        return topic.read_or_wait(read)

    def _find(self, name: str, partition: int) -> AnyLog | None:
        """The log of a partition; None when the topic does not exist."""
        return self._topics.partition(name, partition) if partition else self._topics.find(name)

    @route("GET", "/topics/{topic}/next_offset")
    async def next_offset(self, topic: str, args: PartitionQuery) -> TopicNextOffset:
        """The offset that the next record will get."""
        log = self._find(topic, args.partition)
        if isinstance(log, SharedLog):
            await log.refresh_if_possible()
        return TopicNextOffset(topic, log.next_offset if log is not None else 0)

    @route("GET", "/topics/{topic}/offset")
    async def offset(self, topic: str, args: AtQuery) -> OffsetAt:
        """The offset of the first record appended at or after a time."""
        log, at = self._topics.partition(topic, args.partition), epoch_seconds(args.at)
        return OffsetAt(topic, await log.read_through(lambda: log.offset_at(at)))

    @route("GET", "/topics/{topic}/stream", answer_type="text/event-stream")
    async def stream(self, request: Request, topic: str, args: StreamQuery) -> StreamResponse:
        """Follow a topic as server-sent events. Waits for a topic that does not exist yet."""
        label = partition_label(topic, args.partition)
        existed = self._find(topic, args.partition) is not None
        start = _start(args, request.header("last-event-id"), existed=existed)

        async def begin() -> tuple[AnyLog, int]:
            log = await self._topics.wait_for(label)
            return log, await log.read_through(lambda: start(log))

        if not existed:
            return stream_response(self._feeds, begin)
        begun = await begin()  # what fails here has a status

        async def continue_there() -> tuple[AnyLog, int]:
            return begun

        return stream_response(self._feeds, continue_there)


# Payloads, or records that have more than that.
Content = list[bytes] | tuple[NewRecord, ...]


def _content(request: Request) -> tuple[Content, bool]:
    """What to append, and whether the answer speaks of many."""
    kind = request.header("content-type")
    if kind is not None and kind.partition(";")[0].strip().lower() == OCTETS:
        return [request.body], False
    body = read_produce(request.body)
    given = [part is not UNSET for part in (body.payload, body.payloads, body.records)]
    if sum(given) != 1:
        raise InvalidRequest("The body must have one of `payload`, `payloads` and `records`")
    if body.payload is not UNSET:
        payload = None if body.payload is None else payload_bytes(body.payload, body.encoding)
        if payload is None or not body.plain:
            return (body.record(payload),), False
        return [payload], False
    if not body.plain:
        raise InvalidRequest("`key`, `headers` and `timestamp` are of one record: use `records`")
    name, several = ("payloads", body.payloads) if given[1] else ("records", body.records)
    assert isinstance(several, list)
    if not several:
        raise InvalidRequest(f"`{name}` is empty")
    if len(several) > MAX_PAYLOADS:
        raise TooLarge(
            f"`{name}` has more than {MAX_PAYLOADS} records: send them in several requests"
        )
    if isinstance(body.payloads, list):
        return [payload_bytes(payload, body.encoding) for payload in body.payloads], True
    records = body.records if isinstance(body.records, list) else []
    return tuple(
        one.record(None if one.payload is None else payload_bytes(one.payload, one.encoding))
        for one in records
    ), True


def _start(
    query: StreamQuery, last_event_id: str | None, *, existed: bool
) -> Callable[[AnyLog], int]:
    """Where a stream begins. A reconnecting client (Last-Event-ID) knows better than its first
    address. All records of a topic that did not exist are new.
    """
    if last_event_id is not None and last_event_id.strip().isdecimal():
        following = int(last_event_id) + 1
        return lambda _: following
    if query.at is not None:
        seconds = epoch_seconds(query.at)
        return lambda topic: topic.offset_at(seconds)
    if query.offset == "latest" and existed:
        return lambda topic: topic.next_offset
    if query.offset in (None, "earliest", "latest"):
        return lambda topic: topic.first_offset
    if not query.offset.isdecimal() or int(query.offset) >= 1 << 64:
        raise InvalidRequest(
            f"Query parameter `offset`: expected a number or `latest`, got {query.offset!r}"
        )
    offset = int(query.offset)
    return lambda _: offset
