"""What the broker answers to what an operator asks, as structs.

Field names are the HTTP API's in snake case. A broker that is newer may send more: it is ignored.
"""

from datetime import datetime
from typing import Any, TypedDict

import msgspec

from penstock.protocol.answers import (
    Body,
    GroupPosition,
    PartitionCounts,
    PartitionTimes,
    QueueNames,
    ScheduleRun,
)
from penstock.protocol.queue_options import QueueOptions


class Counts(PartitionCounts):
    """The messages of a queue or a partition, by state."""

    dropped: int = 0
    scheduled: int = 0


class QueueSettings(TypedDict, total=False):
    """The options of `Client.configure`. `QueueOptions` has their defaults and meanings."""

    lease_time: int
    retry_limit: int
    retry_delay: int
    delayed_processing: int
    window_buffer: int
    max_size: int
    ttl: int
    priority: int
    dead_letter_queue: bool
    dlq_after_max_retries: bool
    retention_enabled: bool
    retention_seconds: int
    completed_retention_seconds: int
    max_wait_time_seconds: int
    encryption_enabled: bool
    record_deliveries: bool
    ordering: str


class QueueSummary(QueueNames):
    """A queue, as listed by `Client.queues`."""

    partitions: int
    messages: Counts


class QueueAbout(QueueNames):
    """The names and options of a queue."""

    options: QueueOptions


class PartitionSummary(PartitionTimes):
    """A partition of a queue."""

    messages: Counts
    last_activity: datetime | None = None


class QueueDescription(Body, kw_only=True):
    """A queue with its options, partitions and counts."""

    queue: QueueAbout
    partitions: list[PartitionSummary]
    partition_count: int
    totals: Counts


class GroupPartition(GroupPosition):
    """The position and lag of a consumer group in one partition."""

    queue: str = ""


class Seek(Body, kw_only=True):
    """The result of moving a consumer group, or of the dry run."""

    consumer_group: str
    queue_name: str
    partitions_updated: int
    dry_run: bool = False
    seek_to_end: bool = False
    target_timestamp: datetime | None = None
    redelivered: int | None = None  # only in a dry run
    skipped: int | None = None  # only in a dry run


class DeadLetterMessage(msgspec.Struct, rename="camel", kw_only=True):
    """A dead letter: a message that failed for good, with the reason."""

    dlq_id: int
    id: str
    transaction_id: str
    partition_id: str
    queue: str
    partition: str
    consumer_group: str | None  # None: the group was deleted
    error_message: str | None
    retry_count: int
    attempts: int
    data: Any = None
    data_omitted: bool = False  # the page is too large: use a smaller limit
    headers: dict[str, str] = {}
    producer_sub: str | None = None
    created_at: datetime
    failed_at: datetime


class DeadLetters(Body, kw_only=True):
    """A page of dead letters, newest first. `total` counts all that match."""

    messages: list[DeadLetterMessage]
    total: int


class RouteQueue(Body, kw_only=True):
    """The send queue of a route: records not delivered yet."""

    batches: int
    records: int
    bytes: int
    oldest_age_seconds: float = 0.0
    drain_eta_seconds: float = 0.0


class RouteStatus(Body, kw_only=True):
    """The status of an export route. If the route could not start, only `state` and `last_error`
    are set.
    """

    name: str
    state: str
    # {"topic": ...}, {"queue": ..., "group": ...}, "push", "otlp" or "remote_write"
    source: dict[str, str] | str = "push"
    destination: str = ""
    paused: str | None = None
    lag: int | None = None
    queue: RouteQueue | None = None
    dead_letters: int = 0
    last_error: str | None = None


class BrokerStatus(msgspec.Struct, kw_only=True):
    """The health of a broker, as reported by `/health`."""

    status: str  # healthy, degraded (the disk of topics is full) or unhealthy (database down)
    database: str
    server: str
    version: str
    uptime: float
    worker_id: int = 0
    database_problem: str = ""
    disk: str = "ok"
    listeners: dict[str, str] = {}


class TransactionStep(Body, kw_only=True):
    """The result of one push or ack in a transaction."""

    type: str
    index: int
    success: bool
    transaction_id: str
    message_id: str | None = None
    partition_id: str | None = None
    queue_name: str | None = None
    error: str | None = None
    dlq: bool = False


class ScheduledMessage(msgspec.Struct, rename="camel", kw_only=True):
    """A delayed message that is not due yet."""

    transaction_id: str
    queue: str
    partition: str
    partition_id: str
    deliver_at: datetime
    pushed_at: datetime
    trace_id: str | None = None
    producer_sub: str | None = None
    is_encrypted: bool = False
    headers: dict[str, str] = {}


class ScheduledMessages(Body, kw_only=True):
    """A page of delayed messages, next due first. Pass `next` as `cursor` to get the following
    page.
    """

    messages: list[ScheduledMessage]
    next: str | None = None


class Schedule(msgspec.Struct, rename="camel", kw_only=True):
    """A schedule: a message that is pushed at the times of a cron expression."""

    name: str
    cron: str
    timezone: str
    queue: str
    partition: str
    payload: Any = None
    headers: dict[str, str] | None = None
    catch_up: str
    paused: bool
    created_at: datetime
    updated_at: datetime
    next_runs: list[datetime] = []
    last_runs: list[ScheduleRun] = []


class ConsumerHealth(Body, kw_only=True):
    """The status of a running consumer, as it last reported."""

    id: str
    name: str
    queue: str
    group: str
    hostname: str = ""
    pid: int = 0
    concurrency: int = 1
    in_flight: int = 0
    in_flight_seconds: float = 0.0  # since the oldest call under way began
    handled: int = 0
    failed: int = 0
    last_error: str | None = None
    last_error_at: datetime | None = None
    started_at: datetime | None = None
    ended: bool = False  # the last report of a consumer that has stopped
    seen_at: datetime | None = None  # time of the last report, by the broker's clock
