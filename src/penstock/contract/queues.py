"""Queues and their partitions."""

from datetime import datetime
from typing import ClassVar

import msgspec

from penstock.contract.noun import Noun
from penstock.protocol.queue_options import QueueOptions


class ConfigureBody(msgspec.Struct):
    queue: str
    namespace: str | None = None
    task: str | None = None
    options: dict[str, msgspec.Raw] | None = None  # decoded one by one: an error names the option

    texts: ClassVar = {"queue": "queue is required", "options": "options must be an object"}


class Configure(ConfigureBody):
    options: QueueOptions | None = None  # type: ignore[assignment]


class Configured(Noun):
    """The configuration of a queue after a change."""

    configured: bool
    queue_id: str
    partition_id: str  # of the default partition
    queue: str
    namespace: str
    task: str
    options: QueueOptions


class OptionMeaning(Noun):
    name: str
    default: int | bool | str
    meaning: str


class OptionsOfQueue(Noun):
    queue: str
    options: QueueOptions
    about: list[OptionMeaning]


class QueueDeleted(Noun):
    deleted: bool
    queue: str
    existed: bool


class QueueCleared(Noun):
    """The result of deleting the messages of a queue or a partition."""

    queue: str
    partition: str | None
    deleted: int  # messages


class QueueCounts(Noun):
    """A queue or a partition in eight numbers. Where groups differ they are those of the group that
    speaks for the queue, but `failed`, `dead_letters` and `dropped` are of all of them.
    """

    stored: int
    waiting: int  # those under a lease included
    leased: int
    completed: int
    failed: int | None  # attempts; None: not known of a partition
    dead_letters: int
    dropped: int | None
    scheduled: int | None  # for later


class PartitionInfo(Noun):
    id: str
    name: str
    queue: str
    created_at: datetime
    messages: int  # stored now
    oldest_message: datetime | None
    newest_message: datetime | None


class Queue(Noun, kw_only=True):
    """A queue with its counts and rates."""

    name: str
    namespace: str
    task: str
    waiting: int  # messages that the slowest group has not finished
    leased: int
    stored: int
    pushed: int
    pushed_rate: float | None  # messages per second
    completed_rate: float | None
    delivered_rate: float | None  # former name of `completed_rate`, for one more release
    oldest: float | None  # seconds that the oldest message waits
    groups: int
    dead_letters: int
    history: list[int]  # messages that waited at the last looks


class QueuePage(Noun):
    queues: list[Queue]
    total: int


class QueueGroup(Noun, kw_only=True):
    """Counts and rates of a consumer group."""

    name: str  # empty: consumers without a group
    waiting: int
    lag_seconds: float | None
    leased: int
    completed: int
    failed: int
    dead_letters: int
    dropped: int
    skipped: int
    consumers: int | None  # connections that pop for it, at all brokers
    rate: float | None  # completed per second


class QueueDetails(Queue, kw_only=True):
    """A queue with its options and consumer groups."""

    groups: list[QueueGroup]  # type: ignore[assignment]
    options: QueueOptions
    created_at: datetime


class QueuePartition(Noun):
    """A partition of a queue, as a group sees it."""

    name: str
    id: str
    stored: int
    waiting: int
    oldest: float | None  # seconds that the oldest message waits which the group has not consumed
    newest: float | None  # seconds since the last push
    leased: int
    lease: str | None  # the last one, while messages are leased
    lease_ends_at: float | None  # milliseconds since 1970


class QueuePartitions(Noun):
    """Partitions of a queue, those with the most waiting messages first."""

    partitions: list[QueuePartition]
    total: int  # of those that were looked at
