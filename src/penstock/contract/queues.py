"""Queues and their partitions."""

from datetime import datetime

from penstock.contract.noun import Noun
from penstock.protocol.queue_options import QueueOptions


class Configured(Noun):
    """The configuration of a queue after a change."""

    configured: bool
    queue_id: str
    partition_id: str  # of the default partition
    queue: str
    namespace: str
    task: str
    options: QueueOptions


class PartitionCounts(Noun):
    """Messages of a partition, by state."""

    total: int
    pending: int
    processing: int
    completed: int
    failed: int | None  # failed attempts; None for a partition
    dead_letter: int


class QueueNames(Noun):
    id: str
    name: str
    namespace: str
    task: str
    created_at: datetime


class PartitionTimes(Noun):
    id: str
    name: str
    created_at: datetime
    oldest_message: datetime | None
    newest_message: datetime | None
