"""How long to wait after a failure: exponential with full jitter, and never less than the
destination asked for.

The n-th failure in a row waits a random time between 0 and retry_interval * multiplier^(n-1),
capped at max_retry_delay: full jitter spreads a crowd of senders best when a destination comes
back. With backoff off, every failure waits retry_interval. It holds back the whole route, not one
batch: a destination that fails one batch for reasons of health fails the next one too.
"""

import asyncio
from collections.abc import Callable
from random import random

from penstock.config.schema import SendQueueSettings
from penstock.export.clock import Clock


class RouteBackoff:
    def __init__(
        self, settings: SendQueueSettings, clock: Clock, random: Callable[[], float] = random
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._random = random
        self.failures = 0  # in a row
        self._until = 0.0  # monotonic
        self._changed = asyncio.Event()

    def failed(self, retry_after: float | None = None) -> float:
        """Count a failure, and return the delay."""
        self.failures += 1
        settings = self._settings
        delay = settings.retry_interval
        if settings.backoff.enabled:
            delay *= settings.backoff.multiplier ** min(self.failures - 1, 64)
            delay = self._random() * min(settings.max_retry_delay, delay)
        delay = max(delay, retry_after or 0.0)
        self._until = max(self._until, self._clock.monotonic() + delay)
        return delay

    def succeeded(self) -> None:
        self.failures = 0

    def reset(self) -> None:
        """End the backoff at once, at the request of a person."""
        self.failures, self._until = 0, 0.0
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def remaining(self) -> float:
        return max(0.0, self._until - self._clock.monotonic())

    async def over(self) -> None:
        while (remaining := self.remaining) > 0:
            await self._clock.wait(self._changed, remaining)
