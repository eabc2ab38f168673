"""Count latencies in buckets. Histograms add up without loss, and percentiles have a known error.

Bucket b counts latencies above 0.1 ms * 2^((b-1)/8) and up to 0.1 ms * 2^(b/8). Bucket 0 counts all
up to 0.1 ms, the last bucket all from 40 days on. The geometric middle of a bucket stands for it
and is at most a factor of 2^(1/16) from any latency in it. This is `ERROR`; it does not grow when
minutes are added up to days.

`latency_bucket.sql` uses the same buckets.
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
    """Return the upper bound of a bucket, in seconds."""
    return float(SMALLEST * 2 ** (bucket / PER_DOUBLING)) if bucket < LAST else math.inf


def seconds_of(bucket: int) -> float:
    """Return the value that stands for a bucket, in seconds."""
    return SMALLEST if bucket <= 0 else float(SMALLEST * 2 ** ((bucket - 0.5) / PER_DOUBLING))


class Latencies:
    """A histogram: the sum of counts of minutes, groups or brokers."""

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
        """Return a percentile in seconds, or None without counts."""
        wanted = max(1, math.ceil(self.total * percent / 100))
        for bucket in sorted(self._counts):
            wanted -= self._counts[bucket]
            if wanted <= 0:
                return seconds_of(bucket)
        return None
