"""Delay a route after a failure: exponential backoff with full jitter, at least as long as the
destination asked for.

The delay after the n-th consecutive failure is random between 0 and
retry_interval * multiplier^(n-1), limited by max_retry_delay. Full jitter distributes many senders
best when a destination recovers. Without backoff, every delay is retry_interval. It applies to the
whole route: an unhealthy destination would fail the next batch too.
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
        """End the backoff at once, at the request of an operator."""
        self.failures, self._until = 0, 0.0
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def remaining(self) -> float:
        return max(0.0, self._until - self._clock.monotonic())

    async def wait(self) -> None:
        """Wait until the backoff has ended."""
        while (remaining := self.remaining) > 0:
            await self._clock.wait(self._changed, remaining)
