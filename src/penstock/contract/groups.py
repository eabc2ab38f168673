"""Consumer groups of queues."""

from datetime import datetime

from penstock.contract.noun import Noun


class Group(Noun, kw_only=True):
    """A consumer group on one queue."""

    queue: str
    name: str
    waiting: int  # messages not finished, those under a lease included
    leased: int
    completed: int
    failed: int  # attempts
    dead_letters: int
    dropped: int
    skipped: int
    lag_seconds: int  # age of the oldest message that waits
    lagging_partitions: int  # that have messages for the group
    members: int  # connected consumers
    state: str  # Empty (no members), Lagging or Stable
    mode: str | None  # where it started: all, new or timestamp; None: it never subscribed
    start_at: datetime | None
    created_at: datetime
    discovering: bool  # it is still reading the list of partitions that are new to it


class GroupPosition(Noun, kw_only=True):
    """The position of a consumer group in one partition."""

    group: str
    queue: str
    partition: str
    partition_id: str
    lease_id: str | None  # of the lease that is live
    waiting: int
    lag_seconds: float
    oldest: datetime | None  # when the oldest message that waits was pushed
    consumed: int
    consumed_at: datetime | None


class GroupPositions(Noun):
    partitions: list[GroupPosition]


class GroupDeleted(Noun):
    """The result of deleting a consumer group."""

    group: str
    queue: str | None  # None: on all queues
    partitions: int  # that it had a position in
    subscription_deleted: bool


class Seek(Noun, kw_only=True):
    """The result of moving a consumer group, or of the dry run."""

    group: str
    queue: str
    partition: str | None = None  # None: all of them
    to: str | None = None  # end or beginning
    at: datetime | None = None  # or the time it was moved to
    partitions: int  # that it was moved in
    position: int | None = None  # in the last of them
    dry_run: bool = False
    redelivered: int | None = None  # messages, only in a dry run
    skipped: int | None = None  # messages, only in a dry run
