"""Topics over HTTP: aiq's endpoints exactly, and our own beside them."""

from collections.abc import Awaitable, Callable

import msgspec
from msgspec import UNSET

from penstock.contract import operations
from penstock.contract.noun import of
from penstock.contract.operation import Audited
from penstock.contract.topics import (
    ArchivedOffset,
    AtQuery,
    CleanupPolicy,
    CompactBody,
    ConsumeQuery,
    Created,
    CreateQuery,
    OffsetAt,
    PartitionQuery,
    ProduceBody,
    RecordsProduced,
    Retention,
    ScrubStatus,
    SegmentDetails,
    StreamQuery,
    TierStatus,
    TopicDetails,
    TopicNextOffset,
    TopicPage,
    TopicRolled,
    TopicRow,
    TopicsQuery,
)
from penstock.errors import InvalidRequest, NotFound, TooLarge
from penstock.monitor.figures import TopicRates
from penstock.protocol.kafka_batch import NewRecord
from penstock.protocol.names import partition_label
from penstock.protocol.records import payload_bytes
from penstock.protocol.times import epoch_seconds
from penstock.topics.compaction import Swapped
from penstock.topics.groups import Groups
from penstock.topics.moves import TopicMoves
from penstock.topics.shared.log import SharedLog
from penstock.topics.store import LOCAL, SHARED, AnyLog, TopicStore
from penstock.topics.tier.tier import Tier
from penstock.wire.auth import Role
from penstock.wire.feed import Feeds, messages_of
from penstock.wire.http.api.topic_groups import group_details
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import (
    Request,
    Response,
    StreamResponse,
    error_response,
    json_response,
)
from penstock.wire.http.routes import ANY, HttpRoute, route, serves
from penstock.wire.sse import stream_response

CONSUME_BYTES = 16 << 20  # an answer holds at most this much payload, and at least one record
MAX_MESSAGES = 1000
MAX_PAYLOADS = 100_000  # of one produce: more would keep other requests waiting
NO_TOPICS = (
    "This broker serves queues only (topics.enabled: false). Topics, and what pipelines report,"
    " are with the broker that has the topics: ask that one"
)
PATHS = (
    *("/topics", "/topics/{rest...}", "/api/v1/pipelines", "/api/v1/pipelines/{rest...}"),
    *("/api/v1/scrub", "/api/v1/tier", "/api/v1/tier/flush", "/api/v1/analytics/topic-groups"),
)
OCTETS = "application/octet-stream"


_encode = msgspec.json.Encoder().encode
read_produce = body_decoder(ProduceBody)


class TopicsApi:
    tag = "topics"

    def __init__(
        self, topics: TopicStore, groups: Groups, feeds: Feeds, moves: TopicMoves | None
    ) -> None:
        self._topics = topics
        self._moves = moves  # None: without a database
        self._rates = TopicRates(topics)
        self._groups = groups
        self._feeds = feeds

    @serves(operations.LIST_TOPICS)
    def names(self, args: TopicsQuery) -> list[str] | TopicPage:
        if not args.details:
            return self._topics.names()
        self._rates.sample()
        rows = [self._row(self._topics.require(name)) for name in self._topics.names()]
        return TopicPage(*args.page(rows))

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
            history=self._rates.recent(topic.name),
        )

    @serves(operations.CREATE_TOPIC)
    async def create(self, topic: str, args: CreateQuery) -> Created:
        await self._topics.create(
            topic, form=args.format, partitions=args.partitions, placement=args.placement
        )
        return Created(topic)

    @serves(operations.DELETE_TOPIC)
    async def delete(self, topic: str) -> Created:
        await self._topics.delete(topic)
        return Created(topic, "deleted")

    @serves(operations.GET_SCRUB)
    def scrub(self) -> ScrubStatus:
        return self._topics.scrub.status()

    @serves(operations.START_SCRUB)
    def scrub_now(self) -> ScrubStatus:
        self._topics.scrub.ask()
        return self._topics.scrub.status()

    @serves(operations.GET_TIER)
    def tier(self) -> TierStatus:
        return self._tier().status()

    @serves(operations.FLUSH_TIER)
    async def tier_flush(self) -> TierStatus:
        tier = self._tier()
        await tier.flush()
        return tier.status()

    def _tier(self) -> Tier:
        if self._topics.tier is None:
            raise NotFound("this broker has no tier: set topics.tier to an address")
        return self._topics.tier

    @serves(operations.GET_TOPIC)
    async def details(self, topic: str) -> TopicDetails:
        log = self._topics.require(topic)
        if isinstance(log, SharedLog):
            await log.measure()
        self._rates.sample()
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
            history=self._rates.recent(topic),
            retention=Retention(settings.retention_bytes, settings.retention_age),
            move=self._moves and self._moves.status(topic),
        )

    @serves(operations.SET_TOPIC_POLICY)
    async def set_policy(self, topic: str, body: CleanupPolicy) -> CleanupPolicy:
        await self._topics.require(topic).set_policy(body.policy)
        return body

    @serves(operations.SET_ARCHIVED_OFFSET)
    async def set_archived(self, topic: str, body: ArchivedOffset) -> ArchivedOffset:
        await self._topics.local(topic).mark_archived(body.offset)
        return body

    @serves(operations.ROLL_TOPIC)
    async def roll(self, topic: str) -> TopicRolled:
        log = self._topics.local(topic)
        await log.seal()
        return TopicRolled(topic, log.segments[-1].base)

    @route(
        "POST",
        "/topics/{topic}/compact",
        tag="internal",
        role=Role.ADMIN,
        audit=Audited("topic.compact"),
    )
    async def compact(self, topic: str, body: CompactBody) -> Swapped:
        """Replace adjacent sealed segments with one that keeps only the given records."""
        return await self._topics.compact(topic, body.bases, body.keep, body.incarnation)

    @serves(operations.PRODUCE)
    def produce(self, request: Request) -> Awaitable[Response]:
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
        produced = RecordsProduced(topic=topic.topic)
        if many:
            produced.first_offset, produced.count = appended.first_offset, appended.count
        else:
            produced.offset = appended.first_offset
        if self._topics.partitions(topic.topic) > 1:
            produced.partition = topic.partition
        return Response(201, _encode(produced))

    @serves(operations.CONSUME)
    def consume(self, request: Request) -> Response | Awaitable[Response]:
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

        if isinstance(topic, SharedLog) and query.offset >= topic.next_offset:
            return _read_newest(topic, read)  # another broker may have appended it
        return topic.read_or_wait(read)

    def _find(self, name: str, partition: int) -> AnyLog | None:
        """Return the log of a partition; None if the topic does not exist."""
        return self._topics.partition(name, partition) if partition else self._topics.find(name)

    @serves(operations.GET_NEXT_OFFSET)
    async def next_offset(self, topic: str, args: PartitionQuery) -> TopicNextOffset:
        log = self._find(topic, args.partition)
        if isinstance(log, SharedLog):
            await log.refresh_if_possible()
        return TopicNextOffset(topic, log.next_offset if log is not None else 0)

    @serves(operations.GET_OFFSET_AT)
    async def offset(self, topic: str, args: AtQuery) -> OffsetAt:
        log, at = self._topics.partition(topic, args.partition), epoch_seconds(args.at)
        return OffsetAt(topic, await log.read_through(lambda: log.offset_at(at)))

    @serves(operations.STREAM_TOPIC)
    async def stream(self, request: Request, topic: str, args: StreamQuery) -> StreamResponse:
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


async def _read_newest(log: SharedLog, read: Callable[[], Response]) -> Response:
    await log.refresh()  # an empty answer means that there is nothing
    return await log.read_through(read)


# Payloads, or records that have more than that.
Content = list[bytes] | tuple[NewRecord, ...]


def _content(request: Request) -> tuple[Content, bool]:
    """Return the records to append, and whether the answer is that of several."""
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
    """Return a function that finds the first offset of a stream. The Last-Event-ID of a client that
    reconnects takes precedence over its query. All records of a topic that did not exist are new.
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


def _placement(log: AnyLog) -> str:
    return SHARED if isinstance(log, SharedLog) else LOCAL


def no_topics() -> list[HttpRoute]:
    """Return the routes of a broker without topics, which say who has them."""
    return [
        HttpRoute(
            ANY, path, lambda _: error_response(501, NO_TOPICS), hidden=True, role=Role.PUBLIC
        )
        for path in PATHS
    ]
