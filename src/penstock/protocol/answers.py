"""Structs of the HTTP dialect that both ends use: a broker writes its answers with them, and the
client reads them. What only one end has is declared there, on top of these.
"""

from datetime import datetime

import msgspec

from penstock.protocol.queue_options import QueueOptions


class Body(msgspec.Struct, rename="camel"):
    """Base of answers: their fields have their names in camel case."""


class Range(Body):
    """A range of time."""

    from_: datetime = msgspec.field(name="from")
    to: datetime


class Pagination(Body):
    limit: int
    offset: int


class PaginationOf(Pagination):
    """The page, and the total number of entries."""

    total: int


class Configured(Body):
    """The configuration of a queue after a change."""

    configured: bool
    queue_id: str
    partition_id: str  # of the default partition
    queue: str
    namespace: str
    task: str
    options: QueueOptions


class PartitionCounts(Body):
    """Messages of a partition, by state."""

    total: int
    pending: int
    processing: int
    completed: int
    failed: int | None  # failed attempts; None for a partition
    dead_letter: int


class QueueNames(Body):
    id: str
    name: str
    namespace: str
    task: str
    created_at: datetime


class PartitionTimes(Body):
    id: str
    name: str
    created_at: datetime
    oldest_message: datetime | None
    newest_message: datetime | None


class GroupLag(Body):
    queue_name: str
    name: str
    total_lag: int
    max_time_lag: int  # seconds
    partitions_with_lag: int
    state: str


class GroupSummary(GroupLag):
    """A consumer group on one queue."""

    members: int
    subscription_mode: str | None  # None: the group never subscribed
    subscription_timestamp: datetime | None
    leased: int
    completed: int
    failed: int
    dead_letters: int
    dropped: int
    skipped: int


class GroupPosition(Body):
    """The position and lag of a consumer group in one partition."""

    partition: str
    worker_id: str | None  # the lease that is live
    last_consumed_at: datetime | None
    total_consumed: int
    offset_lag: int
    time_lag_seconds: int
    lease_active: bool


class ScheduleRun(Body):
    """One run of a schedule: the message it pushed, or why it pushed none."""

    due_at: datetime
    fired_at: datetime
    transaction_id: str
    result: str  # queued, duplicate, skipped, full, refused
    manual: bool
    error: str | None


class RoutePushed(msgspec.Struct):
    """The result of pushing records to a route."""

    accepted: int
    dropped: int
