"""A row of `analytics_points`: the figures of one interval, for the API and for reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.protocol.latency import Latencies
from penstock.protocol.names import QUEUE_MODE

COUNTS = ("pushed", "bytes", "acked", "failed", "retried", "dead", "dropped")


@dataclass(slots=True)
class Point:
    """The figures of a queue, a topic, or a group of either, in one interval."""

    at: datetime
    # queue, topic, or group (of a queue). A group of a topic has the kind topic, and `group` is set
    kind: str
    name: str
    group: str
    counts: dict[str, int]
    lag: int | None
    latency: Latencies

    @property
    def label(self) -> str:
        """Return the name to show to people."""
        if not self.group or self.group == QUEUE_MODE:
            return self.name
        return f"{'topic ' if self.kind == 'topic' else ''}{self.name} / {self.group}"


def point_of(row: Sequence[Any]) -> Point:
    at, kind, name, group, *counts, lag, buckets, shares = row
    return Point(
        at,
        kind,
        name,
        group,
        dict(zip(COUNTS, counts, strict=True)),
        lag,
        Latencies(buckets, shares),
    )
