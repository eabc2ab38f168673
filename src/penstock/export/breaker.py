"""The circuit breaker: stops sending to a destination that is down, and finds out by single probes
when it is back.

    closed     to open after `threshold` failures in a row
    open       to half open after `reset_timeout`
    half open  to closed when the probe succeeds, to open when it fails

Only the destination's health counts: network errors, time-outs, 5xx, 429. Bad data is an answer,
and an answer is health. A worker asks for a `Permit` before it takes anything from the queue; in
half open there is exactly one. A permit is a context manager: whatever happens to its holder, the
probe slot comes back.
"""

import asyncio
import logging
from collections.abc import Callable

from penstock.config.schema import CircuitBreaker as Settings
from penstock.export.clock import Clock

log = logging.getLogger("penstock.export")
CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"


class Permit:
    """Leave to send one batch. Leaving without `success` or `failure` says nothing of health."""

    __slots__ = ("_breaker", "_open", "_probe")

    def __init__(self, breaker: "Breaker", probe: bool) -> None:
        self._breaker = breaker
        self._probe = probe
        self._open = True  # nothing was said yet

    def success(self) -> None:
        self._report(self._breaker.succeeded)

    def failure(self) -> None:
        self._report(self._breaker.failed)

    def release(self) -> None:
        self._report(self._breaker.released)

    def _report(self, outcome: Callable[[bool], None]) -> None:
        if self._open:
            self._open = False
            outcome(self._probe)

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Breaker:
    def __init__(
        self,
        name: str,
        settings: Settings,
        clock: Clock,
        on_open: Callable[[], None] = lambda: None,
        on_reject: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._settings = settings
        self._clock = clock
        self._on_open = on_open
        self._on_reject = on_reject
        self.state = CLOSED
        self.failures = 0  # in a row
        self._opened_at = 0.0
        self._probing = False
        self._changed = asyncio.Event()  # replaced whenever it is set

    async def admit(self) -> Permit:
        """Wait until a batch may be sent."""
        rejected = False
        while self.state != CLOSED:
            wait = self._seconds_open()
            if wait is not None and wait <= 0:
                self._enter(HALF_OPEN)
            if self.state == HALF_OPEN and not self._probing:
                self._probing = True
                return Permit(self, probe=True)
            if not rejected:
                rejected = True
                self._on_reject()
            await self._clock.wait(self._changed, wait)
        return Permit(self, probe=False)

    async def not_open(self) -> None:
        """Wait while nothing may be taken: for preparers, who need no permit."""
        while (wait := self._seconds_open() or 0.0) > 0:
            await self._clock.wait(self._changed, wait)

    def _seconds_open(self) -> float | None:
        """Until the probe may be sent; None when it is not open."""
        if self.state != OPEN:
            return None
        return self._opened_at + self._settings.reset_timeout - self._clock.monotonic()

    def succeeded(self, probe: bool) -> None:
        if self.state == CLOSED:
            self.failures = 0
        elif probe:
            self._probing = False
            self.failures = 0
            self._enter(CLOSED)

    def failed(self, probe: bool) -> None:
        if not self._settings.enabled:
            return
        self.failures += 1
        if probe:
            self._probing = False
            self._open()
        elif self.state == CLOSED and self.failures >= self._settings.threshold:
            self._open()

    def released(self, probe: bool) -> None:
        if probe:
            self._probing = False
            self._notify()

    def _open(self) -> None:
        self._opened_at = self._clock.monotonic()
        self._enter(OPEN)
        self._on_open()

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
