"""Export routes and their send queues."""

from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType


class RouteSource(Struct, omit_defaults=True):
    topic: str | None = None
    queue: str | None = None
    kafka: str | None = None  # topic of another cluster
    group: str | None = None  # of the queue, or of that cluster
    partition: int | None = None  # of the topic


class Accounting(Struct, rename="camel"):
    """All records ever accepted, by outcome."""

    accepted: int
    delivered: int
    dead_lettered: int
    dropped: dict[str, int]  # by reason
    queued: int


class SendQueueStatus(Struct, rename="camel", kw_only=True):
    accounting: Accounting
    batches: int
    records: int
    leased: int
    bytes: int
    disk_bytes: int
    memory_blocks: int
    oldest_age_seconds: float
    batches_in_per_second: float
    batches_out_per_second: float
    drain_eta_seconds: float
    time_to_full_seconds: float
    storage_failing: str | None


class BreakerStatus(Struct):
    state: str
    failures: int


class WorkersStatus(Struct, rename="camel", kw_only=True):
    total: int
    active: int
    target: int
    inflight: int
    latency_seconds: float


class RouteStatus(Struct, rename="camel", kw_only=True):
    """The status of an export route. If the route could not start, only `state` and `last_error`
    are set.
    """

    name: str
    state: str
    last_error: str | None = None
    paused: str | None = None  # why; None: it is not
    tries_again_seconds: float | None = None
    source: RouteSource | str = "push"  # "push": none; "otlp", "remote_write"
    lag: int | None = None
    source_error: str | None = None
    source_damage: str | None = None
    destination: str = ""
    queue: SendQueueStatus | None = None
    breaker: BreakerStatus | None = None
    backoff_seconds: float = 0.0
    workers: WorkersStatus | None = None
    dead_letters: int = 0
    failing_since: float | None = None


class RouteList(Struct):
    """All routes, by name."""

    routes: list[RouteStatus]


class RouteDefinition(Struct, forbid_unknown_fields=True):
    """A route as it stands in the configuration, and its name."""

    name: str
    destination: dict[str, Any]
    source: dict[str, Any] | str | None = None
    batch: dict[str, Any] | None = None
    queue: dict[str, Any] | None = None


class RouteRecords(Struct):
    records: list[Raw]


class RoutePushed(Struct):
    """The result of pushing records to a route."""

    accepted: int
    dropped: int


class RecordCount(Struct):
    records: int


class WaitingRecord(Struct):
    sequence: int  # of its batch
    index: int  # in its batch
    record: str
    encoding: str  # utf-8 or base64


class WaitingRecords(Struct):
    records: list[WaitingRecord]


class RouteDeadLetter(WaitingRecord):
    reason: str
    detail: str
    attempts: int
    enqueued: float  # seconds since 1970
    died: float


class DeadRecordPage(Struct):
    total: int
    letters: list[RouteDeadLetter]
    next: int | None  # the `offset` of the next page; None: these were the last


class DamagedBytes(Struct):
    at: int
    bytes: int


class ChunkReport(Struct, omit_defaults=True):
    name: str
    bytes: int
    blocks: int
    waiting: int
    damaged: list[DamagedBytes]
    first: int | UnsetType = UNSET  # sequence numbers; absent: it has no block
    last: int | UnsetType = UNSET


class RouteInspection(Struct, rename="camel", kw_only=True):
    chunks: list[ChunkReport]
    waiting_batches: int
    waiting_records: int
    journal_entries: int
    accounting: Accounting
    position: int
    dead_letters: int
    meta: dict[str, Any] | None
    problems: list[str]


class Repaired(Struct, rename="camel"):
    accounting: Accounting
    waiting_batches: int
    events: dict[str, int]
