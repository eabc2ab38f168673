"""Latencies as counts in buckets: small, added up without loss, and good for percentiles with a
known error.

Bucket b holds what took longer than 0.1 ms * 2^((b-1)/8) and not longer than 0.1 ms * 2^(b/8);
bucket 0 everything up to 0.1 ms, the last one everything from 40 days on. A bucket is shown as its
geometric middle, which is at most a factor of 2^(1/16) away from any latency in it: that is
`ERROR`, and it does not grow when minutes are added up to days.

The database sorts into the same buckets (`latency_bucket.sql`).
"""

import math
from collections.abc import Iterable

SMALLEST = 0.0001  # seconds
PER_DOUBLING = 8
LAST = 280
ERROR = 2 ** (1 / (2 * PER_DOUBLING)) - 1  # relative, of a percentile
PERCENTILES = (50, 95, 99)


def bucket_of(seconds: float) -> int:
    return min(LAST, math.ceil(PER_DOUBLING * math.log2(max(seconds, SMALLEST) / SMALLEST)))


def upper_of(bucket: int) -> float:
    """The longest that belongs into a bucket, in seconds."""
    return float(SMALLEST * 2 ** (bucket / PER_DOUBLING)) if bucket < LAST else math.inf


def seconds_of(bucket: int) -> float:
    """Return the value that stands for a bucket."""
    return SMALLEST if bucket <= 0 else float(SMALLEST * 2 ** ((bucket - 0.5) / PER_DOUBLING))


class Latencies:
    """Counts of many minutes, groups or brokers, added up."""

    def __init__(
        self, buckets: Iterable[int] | None = None, counts: Iterable[int] | None = None
    ) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0
        self.add(buckets, counts)

    def add(self, buckets: Iterable[int] | None, counts: Iterable[int] | None) -> None:
        for bucket, count in zip(buckets or (), counts or (), strict=True):
            self._counts[bucket] = self._counts.get(bucket, 0) + count
            self.total += count

    def merge(self, other: "Latencies") -> None:
        self.add(other._counts.keys(), other._counts.values())

    def percentile(self, percent: float) -> float | None:
        """Seconds within which `percent` of all were done; None when there are none."""
        wanted = max(1, math.ceil(self.total * percent / 100))
        for bucket in sorted(self._counts):
            wanted -= self._counts[bucket]
            if wanted <= 0:
                return seconds_of(bucket)
        return None
