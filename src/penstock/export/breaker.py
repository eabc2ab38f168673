"""Stop sending to a destination that is down, and send single probes until it is back.

    closed     to open after `threshold` failures in a row
    open       to half open after `reset_timeout`
    half open  to closed when the probe succeeds, to open when it fails

Only the destination's health counts: network errors, timeouts, 5xx, 429. A destination that rejects
bad data is healthy. A worker asks for a permit before it takes a block from the queue, and always
releases it. While the breaker is half open, there is one permit, the probe's.
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
