"""The circuit breaker: stops sending to a destination that is down, and finds out by single probes
when it is back.

    closed     to open after `threshold` failures in a row
    open       to half open after `reset_timeout`
    half open  to closed when the probe succeeds, to open when it fails

Only the destination's health counts: network errors, time-outs, 5xx, 429. Bad data is an answer,
and an answer is health. A worker asks for a permit before it takes anything from the queue, and
releases it whatever happens: in half open there is exactly one, the probe's.
"""

import asyncio
import logging
from collections.abc import Callable

from penstock.config.schema import CircuitBreaker as Settings
from penstock.export.clock import Clock

log = logging.getLogger("penstock.export")
CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"


class Breaker:
    def __init__(
        self,
        name: str,
        settings: Settings,
        clock: Clock,
        count: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._settings = settings
        self._clock = clock
        self._count = count  # in this metric
        self.state = CLOSED
        self.failures = 0  # in a row
        self._opened_at = 0.0
        self._probes = 0  # that were admitted, ever
        self._probe: int | None = None  # the number of the one that is on its way
        self._changed = asyncio.Event()  # replaced whenever it is set

    async def admit(self) -> int:
        """Wait until a batch may be sent; the permit: the number of the probe, 0 when closed."""
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

    async def not_open(self) -> None:
        """Wait while nothing may be taken: for preparers, who need no permit."""
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
        """Give the permit back. Without `succeeded` or `failed`, it says nothing about health."""
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
