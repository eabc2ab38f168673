"""Measure how much of the disk is free, and estimate when it will be full.

The rate is that of the last hours, so that a short burst is not an alarm. It is available after an
hour.
"""

import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

SAMPLE_SECONDS = 300.0  # between two samples that are kept
KEPT_SAMPLES = 288  # a day
MIN_WATCHED_SECONDS = 3600.0

Usage = Callable[[Path], tuple[int, int, int]]  # total, used and free bytes, as of shutil


class DiskSpace(msgspec.Struct, rename="camel"):
    free: int  # bytes
    total: int
    full_in_seconds: float | None  # None: it does not fill up, or it is not known yet


class DiskWatch:
    def __init__(
        self,
        directory: Path,
        *,
        usage: Usage = shutil.disk_usage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._usage, self._clock = usage, clock
        self._samples: deque[tuple[float, int]] = deque(maxlen=KEPT_SAMPLES)  # when, free bytes

    def sample(self) -> DiskSpace | None:
        """Sample the disk; None if that fails."""
        try:
            total, _, free = self._usage(self._directory)
        except OSError:
            return None
        now = self._clock()
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((now, free))
        since, before = self._samples[0]
        watched, used = now - since, before - free
        known = watched >= MIN_WATCHED_SECONDS and used > 0
        return DiskSpace(free, total, free / (used / watched) if known else None)
