"""List a topic's partitions, groups and records (with the start of each payload) for people."""

from typing import Annotated

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, convert

from penstock.contract.noun import of
from penstock.contract.topics import LeaseDetails, MemberDetails, PartitionQuery
from penstock.errors import InvalidRequest
from penstock.protocol.names import split_label
from penstock.protocol.records import RecordMessage, Text
from penstock.protocol.times import epoch_seconds
from penstock.topics.groups import Groups
from penstock.topics.shared.log import SharedLog
from penstock.topics.store import AnyLog, TopicStore
from penstock.wire.feed import messages_of
from penstock.wire.http.routes import route

PREVIEW = 300  # characters of a payload in a list; a multiple of 4, so that base64 stays valid
READ_BYTES = 16 << 20
TOPIC = "/api/v1/topics/{topic}"


class RecordsQuery(PartitionQuery, frozen=True):
    offset: Annotated[int, Meta(ge=0)] | None = None  # None: the newest
    at: str | None = None  # instead of an offset: the first record of this time or later
    limit: Annotated[int, Meta(ge=1, le=200)] = 50


class ListedRecord(Struct, kw_only=True):
    """A record with the beginning of its payload."""

    offset: int
    time: float  # milliseconds since 1970
    payload: str | None  # null: a tombstone
    size: int  # bytes of the payload
    encoding: str | UnsetType = UNSET
    key: Text | UnsetType = UNSET
    headers: list[tuple[str, Text | None]] | UnsetType = UNSET


class RecordPage(Struct):
    records: list[ListedRecord]  # the oldest first
    partition: int
    first_offset: int
    next_offset: int


class SharedPlacement(Struct):
    """Where the records of a shared partition are."""

    head_rows: int  # batches in PostgreSQL
    head_bytes: int
    tiered_ranges: int  # in object storage
    tiered_bytes: int
    tiered_until: int | None  # the offset after the last of these ranges
    mover_lag: float | None  # seconds by which the oldest batch is late; null without a store


class PartitionDetails(Struct):
    partition: int
    first_offset: int
    next_offset: int
    records: int
    bytes: int
    shared: SharedPlacement | None = None


class TopicGroupPartition(Struct):
    partition: int
    committed: int
    lag: int
    lag_seconds: float | None
    metadata: str


class TopicGroupParts(Struct):
    group: str
    lag: int
    partitions: list[TopicGroupPartition]
    leases: list[LeaseDetails]  # of members that lease ranges
    members: list[MemberDetails]  # Kafka clients, each with the partitions that it has


class TopicParts(Struct):
    format: str
    partitions: list[PartitionDetails]
    groups: list[TopicGroupParts]


class RecordsApi:
    tag = "internal"

    def __init__(self, topics: TopicStore, groups: Groups) -> None:
        self._topics = topics
        self._groups = groups

    @route("GET", f"{TOPIC}/partitions")
    async def partitions(self, topic: str) -> TopicParts:
        """The partitions of a topic, and its groups with their offset in each of them."""
        name = self._topics.require(topic).format.name
        logs = [self._topics.partition(topic, n) for n in range(self._topics.partitions(topic))]
        parts = [await self._partition(log) for log in logs]
        return TopicParts(name, parts, self._groups_of(topic))

    async def _partition(self, log: AnyLog) -> PartitionDetails:
        placement = None
        if isinstance(log, SharedLog):
            usage = await log.measure()
            settings = self._topics.settings
            late = max(0.0, usage["head_age"] - settings.tier_delay)
            lag = late if settings.shared_tier else None
            placement = convert({**usage, "mover_lag": lag}, SharedPlacement)
        return of(PartitionDetails, log, bytes=log.size_bytes, shared=placement)

    def _groups_of(self, topic: str) -> list[TopicGroupParts]:
        groups: dict[str, TopicGroupParts] = {}
        for name in self._groups.names():
            for details in self._groups.details(name):
                on, partition = split_label(details.topic)
                if on != topic:
                    continue
                group = groups.setdefault(name, TopicGroupParts(name, 0, [], [], details.members))
                seconds = self._topics.partition(topic, partition).age_at(details.committed)
                group.partitions.append(
                    of(TopicGroupPartition, details, partition=partition, lag_seconds=seconds)
                )
                group.leases += details.leases
                group.lag += details.lag
        return list(groups.values())

    @route("GET", f"{TOPIC}/records")
    async def records(self, topic: str, args: RecordsQuery) -> RecordPage:
        """Records of a partition from an offset or a time on, with times, keys and headers;
        without either, the newest.
        """
        if args.offset is not None and args.at is not None:
            raise InvalidRequest("Name an offset or a time (at), not both")
        log = self._topics.partition(topic, args.partition)

        def read() -> list[ListedRecord]:
            offset = max(log.first_offset, log.next_offset - args.limit)
            if args.at is not None:
                offset = log.offset_at(epoch_seconds(args.at))
            elif args.offset is not None:
                offset = args.offset
            listed: list[ListedRecord] = []
            while len(listed) < args.limit and offset < log.next_offset:
                batch = log.read(offset, args.limit - len(listed), READ_BYTES)
                times = log.timestamps(batch.offsets) if batch.count else np.empty(0)
                listed += [
                    _listed(message, batch.length(i), int(times[i]) / 1000)
                    for i, message in enumerate(messages_of(topic, batch))
                ]
                if batch.next_offset <= offset:
                    break
                offset = batch.next_offset
            return listed

        records = await log.read_through(read)
        return RecordPage(records, args.partition, log.first_offset, log.next_offset)


def _listed(message: RecordMessage, size: int, at: float) -> ListedRecord:
    record = of(ListedRecord, message, size=size, time=at)
    if message.timestamp is not UNSET:
        record.time = message.timestamp
    if record.payload is not None:
        record.payload = record.payload[:PREVIEW]
    return record
