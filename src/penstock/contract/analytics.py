"""Figures per interval, as the last rollup counted them."""

from datetime import datetime
from typing import Annotated, Literal

import msgspec

from penstock.contract.noun import Noun, TimeRange
from penstock.contract.queries import TimesQuery


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
