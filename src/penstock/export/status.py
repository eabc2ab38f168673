"""What routes and their send queues show of themselves: the answers of the API, made here."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType


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
    """The send queue."""

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
    """A route. If it could not start, only its name, state and last error are present."""

    name: str
    state: str
    last_error: str | None
    paused: str | UnsetType | None = UNSET  # why; null: it is not
    tries_again_seconds: float | UnsetType | None = UNSET
    source: RouteSource | str | UnsetType = UNSET  # "push": none; "otlp", "remote_write"
    lag: int | UnsetType | None = UNSET
    source_error: str | UnsetType | None = UNSET
    source_damage: str | UnsetType | None = UNSET
    destination: str | UnsetType = UNSET
    queue: SendQueueStatus | UnsetType = UNSET
    breaker: BreakerStatus | UnsetType = UNSET
    backoff_seconds: float | UnsetType = UNSET
    workers: WorkersStatus | UnsetType = UNSET
    dead_letters: int | UnsetType = UNSET
    failing_since: float | UnsetType | None = UNSET


class DamagedBytes(Struct):
    at: int
    bytes: int


class ChunkReport(Struct, omit_defaults=True):
    """A file of the send queue."""

    name: str
    bytes: int
    blocks: int
    waiting: int
    damaged: list[DamagedBytes]
    first: int | UnsetType = UNSET  # sequence numbers; absent: it has no block
    last: int | UnsetType = UNSET


class Inspection(Struct, rename="camel", kw_only=True):
    """The files of a route, read and checked."""

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
    """The books of a queue after its repair."""

    accounting: Accounting
    waiting_batches: int
    events: dict[str, int]
