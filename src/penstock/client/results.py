"""What the broker answers to what an operator asks, as structs.

Field names are the HTTP API's in snake case. A broker that is newer may send more: it is ignored.
"""

from datetime import datetime
from typing import Any, TypedDict

import msgspec

from penstock.protocol.queue_options import QueueOptions


class Result(msgspec.Struct, rename="camel", kw_only=True):
    """Base of the answers; `msgspec.json.encode` gives the API's JSON again."""


class Counts(Result, kw_only=True):
    """The messages of a queue or a partition, by state."""

    total: int
    pending: int
    processing: int
    completed: int
    failed: int | None = None  # failed attempts; None for a partition
    dead_letter: int
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


class Configured(Result, kw_only=True):
    """The configuration of a queue after a change."""

    configured: bool
    queue: str
    queue_id: str
    partition_id: str | None = None
    namespace: str = ""
    task: str = ""
    options: QueueOptions


class QueueSummary(Result, kw_only=True):
    """A queue, as listed by `Client.queues`."""

    id: str
    name: str
    namespace: str
    task: str
    created_at: datetime
    partitions: int
    messages: Counts


class QueueAbout(Result, kw_only=True):
    """The names and options of a queue."""

    id: str
    name: str
    namespace: str
    task: str
    created_at: datetime
    options: QueueOptions


class PartitionSummary(Result, kw_only=True):
    """A partition of a queue."""

    id: str
    name: str
    created_at: datetime
    messages: Counts
    last_activity: datetime | None = None
    oldest_message: datetime | None = None
    newest_message: datetime | None = None


class QueueDescription(Result, kw_only=True):
    """A queue with its options, partitions and counts."""

    queue: QueueAbout
    partitions: list[PartitionSummary]
    partition_count: int
    totals: Counts


class GroupSummary(Result, kw_only=True):
    """A consumer group on one queue."""

    name: str
    queue_name: str
    members: int
    partitions_with_lag: int
    total_lag: int
    max_time_lag: float
    state: str
    subscription_mode: str | None = None  # None: the group never subscribed
    subscription_timestamp: datetime | None = None
    leased: int = 0
    completed: int = 0
    failed: int = 0
    dead_letters: int = 0
    dropped: int = 0
    skipped: int = 0


class GroupPartition(Result, kw_only=True):
    """The position and lag of a consumer group in one partition."""

    queue: str = ""
    partition: str
    worker_id: str | None = None
    last_consumed_at: datetime | None = None
    total_consumed: int
    offset_lag: int
    time_lag_seconds: float
    lease_active: bool


class Seek(Result, kw_only=True):
    """The result of moving a consumer group, or of the dry run."""

    consumer_group: str
    queue_name: str
    partitions_updated: int
    dry_run: bool = False
    seek_to_end: bool = False
    target_timestamp: datetime | None = None
    redelivered: int | None = None  # only in a dry run
    skipped: int | None = None  # only in a dry run


class DeadLetterMessage(Result, kw_only=True):
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


class DeadLetters(Result, kw_only=True):
    """A page of dead letters, newest first. `total` counts all that match."""

    messages: list[DeadLetterMessage]
    total: int


class RouteQueue(Result, kw_only=True):
    """The send queue of a route: records not delivered yet."""

    batches: int
    records: int
    bytes: int
    oldest_age_seconds: float = 0.0
    drain_eta_seconds: float = 0.0


class RouteStatus(Result, kw_only=True):
    """The status of an export route. If the route could not start, only `state` and `last_error`
    are set.
    """

    name: str
    state: str
    source: dict[str, str] | str = "push"  # {"topic": ...}, or {"queue": ..., "group": ...}
    destination: str = ""
    paused: str | None = None
    lag: int | None = None
    queue: RouteQueue | None = None
    dead_letters: int = 0
    last_error: str | None = None


class RoutePushed(Result, kw_only=True):
    """The result of pushing records to a route."""

    accepted: int
    dropped: int


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


class TransactionStep(Result, kw_only=True):
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


class ScheduledMessage(Result, kw_only=True):
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


class ScheduledMessages(Result, kw_only=True):
    """A page of delayed messages, next due first. Pass `next` as `cursor` to get the following
    page.
    """

    messages: list[ScheduledMessage]
    next: str | None = None


class ScheduleRun(Result, kw_only=True):
    """One run of a schedule: the message it pushed, or why it pushed none."""

    due_at: datetime
    fired_at: datetime
    transaction_id: str
    result: str  # queued, duplicate, skipped, full, refused
    manual: bool = False
    error: str | None = None


class Schedule(Result, kw_only=True):
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


class ConsumerHealth(Result, kw_only=True):
    """The status of a running consumer, as it last reported."""

    id: str
    name: str
    queue: str
    group: str
    hostname: str = ""
    pid: int = 0
    concurrency: int = 1
    in_flight: int = 0
    waiting: int = 0  # messages waiting for their next attempt
    handled: int = 0
    failed: int = 0
    last_error: str | None = None
    last_error_at: datetime | None = None
    started_at: datetime | None = None
    ended: bool = False  # the last report of a consumer that has stopped
    seen_at: datetime | None = None  # time of the last report, by the broker's clock
