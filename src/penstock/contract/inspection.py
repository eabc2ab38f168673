"""Answers for the Console: the history of a message, messages by their payload, dead letters by
error, and rates over days.
"""

from datetime import datetime
from typing import Annotated, Literal

import msgspec

from penstock.contract.noun import Noun, TimeRange
from penstock.contract.queries import TimesQuery

SEARCHED = 2000  # messages of one search


class LifelineEvent(msgspec.Struct, rename="camel"):
    """An event in the history of a message."""

    at: float | None  # milliseconds since 1970; null: not recorded
    kind: str  # pushed, leased, failed, retry, dead letter, requeued, trace, completed, waiting
    group: str
    who: str
    why: str
    attempts: int | None
    until: float | None  # of a lease, or when it is tried again


class Lifeline(msgspec.Struct):
    """The history of a message, oldest event first."""

    events: list[LifelineEvent]


class Hit(msgspec.Struct, rename="camel"):
    queue: str
    partition: str
    partition_id: str
    transaction_id: str
    created_at: float
    producer: str | None
    size: int
    preview: str | None  # the beginning of the payload; null: it is large, or cannot be decrypted


class ListedLetter(msgspec.Struct, rename="camel"):
    """A dead letter with the beginning of its payload."""

    number: int  # to requeue or delete this one
    transaction_id: str
    partition_id: str
    queue: str
    partition: str
    group: str | None  # None: it was deleted
    error: str
    attempts: int
    failed_at: float  # milliseconds since 1970
    preview: str


class Hits(msgspec.Struct):
    messages: list[Hit]
    searched: int
    complete: bool  # False: `next` continues the search
    next: str | None


class SearchQuery(TimesQuery, rename="camel", frozen=True):
    search: str = ""  # text, or a path and a value: order.id=7
    transaction_id: str = ""
    partition: str | None = None
    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=SEARCHED)] = SEARCHED  # messages to look at


class ErrorGroup(msgspec.Struct):
    error: str
    queue: str
    group: str
    count: int
    first: float
    last: float
    oldest: float  # when the oldest of them was pushed
    history: list[int]


class ErrorGroups(msgspec.Struct):
    errors: list[ErrorGroup]
    total: int  # that match; exact up to 100,000
    times: list[float]  # where the counts of `history` begin


class ErrorsQuery(msgspec.Struct, rename="camel", frozen=True):
    queue: str = ""
    consumer_group: str = ""
    filter: str = ""  # part of the error


class HistoryQuery(msgspec.Struct, frozen=True):
    range: Literal["1h", "24h", "7d"] = "24h"
    queue: str | None = None


class Series(msgspec.Struct):
    times: list[float]
    series: dict[str, list[float | None]]


class MinutesQuery(TimesQuery, frozen=True):
    queue: str | None = None
    topic: str | None = None
    group: str | None = None
    interval: Literal["minute", "hour", "day"] = "minute"
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


class Latency(Noun):
    """Milliseconds from push to ack, with a relative error of at most `latencyError`."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None


class AnalyticsPoint(Noun, kw_only=True):
    """Figures of a queue, a topic or a consumer group in one interval."""

    time: datetime
    kind: Literal["queue", "group", "topic"]
    queue: str | None
    group: str | None
    topic: str | None
    pushed: int
    bytes: int
    completed: int
    acked: int  # former name of `completed`, for one more release
    failed: int
    retried: int
    dead_letters: int
    dropped: int
    lag: int | None  # at the end of the interval
    latency: Latency | None


class Minutes(TimeRange):
    interval: str
    latency_error: float
    points: list[AnalyticsPoint]
    truncated: bool  # set if there is more: ask from `next` on, or with a longer interval
    next: datetime | None
