"""Batches that wait for more records (`minOffsetsPerTrigger`), but not for ever
(`maxTriggerDelay`), as in Kafka's source: the first batch of a run does not wait.
"""

import time
from collections.abc import Callable

from penstock.errors import InvalidRequest
from penstock.pipeline.options import Options

MAX_DELAY_SECONDS = 900.0


class TriggerDelay:
    """Whether a batch should wait. Lives in the process that plans a query's batches."""

    def __init__(self, options: Options, clock: Callable[[], float] = time.monotonic) -> None:
        self.at_least = options.whole("minOffsetsPerTrigger", 0)  # records of a batch
        self._seconds = options.duration("maxTriggerDelay", MAX_DELAY_SECONDS)
        self._clock = clock
        self._last: float | None = None  # when a batch was last let through
        most = options.whole("maxOffsetsPerTrigger", None)
        if most is not None and most < self.at_least:
            raise InvalidRequest(
                f"the option 'minOffsetsPerTrigger' ({self.at_least}) is above "
                f"'maxOffsetsPerTrigger' ({most})"
            )

    def holds(self, enough: bool) -> bool:
        """Whether a batch waits for more; `enough` says if there is as much as `at_least`."""
        if not self.at_least:
            return False
        now = self._clock()
        due = self._last is None or now - self._last >= self._seconds
        if not enough and not due:
            return True
        self._last = now
        return False
