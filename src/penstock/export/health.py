"""Decide when a route may send: its circuit breaker, its backoff and its pause."""

import asyncio
import logging
from collections.abc import Callable
from random import random

from penstock.config.schema import CircuitBreaker, SendQueueSettings
from penstock.export.context import Clock

log = logging.getLogger("penstock.export")
CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"


class Breaker:
    """Stop sending to a destination that is down, and send single probes until it is back.

        closed     to open after `threshold` failures in a row
        open       to half open after `reset_timeout`
        half open  to closed when the probe succeeds, to open when it fails

    Only the destination's health counts: network errors, timeouts, 5xx, 429. A destination that
    rejects bad data is healthy. A worker asks for a permit before it takes a block from the queue,
    and always releases it. While the breaker is half open, there is one permit, the probe's.
    """

    def __init__(
        self,
        name: str,
        settings: CircuitBreaker,
        clock: Clock,
        count: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._settings = settings
        self._clock = clock
        self._count = count  # increments the metric of this name
        self.state = CLOSED
        self.failures = 0  # in a row
        self._opened_at = 0.0
        self._probes = 0  # admitted so far
        self._probe: int | None = None  # the number of the probe that is being sent
        self._changed = asyncio.Event()  # replaced whenever it is set

    async def admit(self) -> int:
        """Wait until a batch may be sent. Return the permit: a probe's number, 0 when closed."""
        rejected = False
        while self.state != CLOSED:
            wait = self._seconds_open()
            if wait is not None and wait <= 0:
                self._enter(HALF_OPEN)
            if self.state == HALF_OPEN and self._probe is None:
                self._probes += 1
                self._probe = self._probes
                return self._probe
            if not rejected:
                rejected = True
                self._count("circuit_breaker_rejected_total")
            await self._clock.wait(self._changed, wait)
        return 0

    async def wait_while_open(self) -> None:
        """Wait while the breaker is open. Preparers use it: they need no permit."""
        while (wait := self._seconds_open() or 0.0) > 0:
            await self._clock.wait(self._changed, wait)

    @property
    def remaining(self) -> float:
        """Return the seconds until the next probe while the breaker is open, else 0."""
        return max(0.0, self._seconds_open() or 0.0)

    def _seconds_open(self) -> float | None:
        """Return the seconds until a probe may be sent; None when the breaker is not open."""
        if self.state != OPEN:
            return None
        return self._opened_at + self._settings.reset_timeout - self._clock.monotonic()

    def succeeded(self, permit: int) -> None:
        if self.state == CLOSED:
            self.failures = 0
        elif permit == self._probe:
            self._probe = None
            self.failures = 0
            self._enter(CLOSED)

    def failed(self, permit: int) -> None:
        if not self._settings.enabled:
            return
        self.failures += 1
        probe = permit == self._probe
        if probe or (self.state == CLOSED and self.failures >= self._settings.threshold):
            self._probe = None
            self._opened_at = self._clock.monotonic()
            self._enter(OPEN)
            self._count("circuit_breaker_open_total")

    def release(self, permit: int) -> None:
        """Return the permit. Without `succeeded` or `failed`, the state stays as it is."""
        if permit == self._probe:
            self._probe = None
            self._notify()

    def _enter(self, state: str) -> None:
        if state != self.state:
            level = logging.WARNING if state == OPEN else logging.INFO
            text = "route %s: circuit breaker %s after %d failures"
            log.log(level, text, self._name, state, self.failures)
        self.state = state
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class RouteBackoff:
    """Delay a route after a failure: exponential backoff with full jitter, at least as long as the
    destination asked for.

    The delay after the n-th failure in a row is random between 0 and
    retry_interval * multiplier^(n-1), limited by max_retry_delay. Full jitter distributes many
    senders best when a destination recovers. Without backoff, every delay is retry_interval. It
    applies to the whole route: an unhealthy destination would fail the next batch too.
    """

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


class Pause:
    """Pause a route, because an operator asked for it or its destination denied a batch.

    A destination that denies a batch for a reason that no retry changes (credentials, address)
    pauses the route. Often the reason disappears without a change to the route: a deployment ends,
    or a token is renewed. So while a route is denied, one worker sends one batch from time to time,
    a probe: after `first` seconds, then at growing intervals of up to `longest` seconds. If the
    destination does not deny the probe, the route resumes. A route that an operator has paused
    stays paused until an operator resumes it.
    """

    def __init__(
        self, clock: Clock, *, first: float, longest: float, on_resume: Callable[[], None]
    ) -> None:
        self._clock = clock
        self._first = first
        self._longest = max(first, longest)
        self._on_resume = on_resume  # called when a probe ends the pause
        self.reason: str | None = None  # why it is paused, while it is
        self.next_probe: float | None = None  # monotonic; None unless the destination denies
        self._delay = first  # between two probes
        self._changed = asyncio.Event()  # replaced whenever it is set

    @property
    def denied(self) -> bool:
        """Return whether the destination, not an operator, paused the route."""
        return self.next_probe is not None

    def begin(self, reason: str, *, denied: bool) -> None:
        self.reason = reason
        self._delay = self._first
        self.next_probe = self._clock.monotonic() + self._delay if denied else None

    def end(self) -> None:
        self.reason = self.next_probe = None
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, leave_probe: Callable[[], bool] = lambda: False) -> bool:
        """Wait until a batch may be sent. Return whether it is the probe. While `leave_probe`
        returns True, the probe is left to other callers.
        """
        while self.reason is not None:
            remaining = None
            if self.next_probe is not None:
                now = self._clock.monotonic()
                remaining = self.next_probe - now
                if remaining <= 0 and not leave_probe():
                    self._delay = min(2 * self._delay, self._longest)
                    self.next_probe = now + self._delay
                    return True
                if remaining <= 0:
                    remaining = self._delay
            await self._clock.wait(self._changed, remaining)
        return False

    def probe_succeeded(self) -> None:
        """Resume: the destination did not deny the probe."""
        if self.denied:
            self.end()
            self._on_resume()
