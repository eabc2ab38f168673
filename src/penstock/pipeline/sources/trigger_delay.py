"""Delay batches until there are enough records (`minOffsetsPerTrigger`), but not forever
(`maxTriggerDelay`), like Kafka's source. The first batch of a run is not delayed.
"""

import time
from collections.abc import Callable

from penstock.pipeline.options import SourceOptions


class TriggerDelay:
    """Decides whether a batch waits, in the process that plans a query's batches."""

    def __init__(self, options: SourceOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.at_least = options.min_offsets_per_trigger  # records of a batch
        self._seconds = options.max_trigger_delay
        self._clock = clock
        self._last: float | None = None  # when a batch was last let through

    def holds(self, enough: bool) -> bool:
        """Return whether a batch waits for more; `enough` says whether it has `at_least`."""
        if not self.at_least:
            return False
        now = self._clock()
        due = self._last is None or now - self._last >= self._seconds
        if not enough and not due:
            return True
        self._last = now
        return False
