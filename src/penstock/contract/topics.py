"""Topics over HTTP: records, offsets, segments, groups and their leases."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.contract.queries import ListQuery
from penstock.protocol.records import MessageFields

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


class RecordsProduced(Struct, kw_only=True):
    """The offset of one appended record, or the first one and the number of a batch."""

    topic: str
    offset: int | UnsetType = UNSET
    first_offset: int | UnsetType = UNSET
    count: int | UnsetType = UNSET
    partition: int | UnsetType = UNSET  # of a topic that has several


class TopicsQuery(ListQuery):
    details: bool = False


class TopicRow(Struct, rename="camel"):
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


TopicListing: Any = list[str] | TopicPage


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


class LeaseDetails(Struct):
    """A range of records that a member holds."""

    lease: str
    member: str
    start: int
    end: int
    expires_in: float  # seconds


class MemberDetails(Struct):
    """A member of a group of Kafka clients, and the partitions of the topic that it has."""

    member: str
    client: str
    host: str
    partitions: list[int]


class GroupDetails(Struct):
    """A group on one topic: its members lease ranges, or divide partitions (Kafka clients)."""

    group: str
    topic: str
    committed: int  # the next offset that it reads
    lag: int
    leases: list[LeaseDetails]
    members: list[MemberDetails]
    metadata: str  # what a Kafka client keeps with its commit


class GroupWithAge(GroupDetails):
    lag_seconds: float | None  # age of the record that it reads next


class TopicMove(Struct):
    """A local topic that becomes a shared one."""

    topic: str
    state: str  # copying, closing, shared, failed
    copied: int = 0  # offsets
    total: int = 0
    problem: str | None = None  # why it does not advance, or failed


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
    move: TopicMove | None  # while the topic is moved, and after a move that failed


class Created(Struct):
    topic: str
    status: str = "created_or_exists"


class TopicNextOffset(Struct):
    topic: str
    next_offset: int


class OffsetAt(Struct):
    topic: str
    offset: int


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


class TopicGroupDeleted(Struct):
    group: str
    topic: str
    status: str = "deleted"


class Pass(Struct, kw_only=True):
    """Progress of one scan. Times are seconds since 1970."""

    started: float
    finished: float | None = None
    segments: int = 0
    bytes: int = 0  # of data
    unchecked_bytes: int = 0  # that no checksum covers
    findings: int = 0  # that were not known before; all those in shared topics


class ScrubStatus(Struct):
    running: bool
    interval: float  # seconds from one pass to the next; 0: only when asked
    rate: int  # bytes per second
    topic: str | None  # where the pass that runs is
    base: int | None
    sealed_bytes: int
    current: Pass | None
    last: Pass | None
    next: float | None  # when the next pass is due


class TierStatus(Struct):
    address: str
    owner: bool  # this broker may write to it
    problem: str | None  # why nothing is copied at the moment
    topic_problems: dict[str, str]  # the same for single topics, by name
    tier_bytes: int
    local_bytes: int
    pending_bytes: int  # not copied yet
    lag_seconds: float
    passes: int  # that went through
    adopted: dict[str, Any] | None  # the report of an adoption, if this broker began so


class TopicRolled(Struct):
    topic: str
    active: int  # base offset of the segment that is written to now


class ArchivedOffset(Struct):
    offset: int


class CleanupPolicy(Struct):
    policy: Literal["delete", "compact"]


class CompactBody(Struct):
    """Sealed segments to compact. `keep` has one bit per offset, from the first base on, lowest bit
    first: 1 keeps the record.
    """

    incarnation: str
    bases: list[Annotated[int, Meta(ge=0)]]
    keep: bytes
