"""Pause a route, because an operator asked for it or its destination denied a batch.

A destination that denies a batch for a reason that no retry changes (credentials, address) pauses
the route. Often the reason disappears without a change to the route: a deployment ends, or a token
is renewed. So while a route is denied, one worker sends one batch from time to time, a probe: after
`first` seconds, then at growing intervals of up to `longest` seconds. If the destination does not
deny the probe, the route resumes. A route that an operator has paused stays paused until an
operator resumes it.
"""

import asyncio
from collections.abc import Callable

from penstock.export.clock import Clock


class Pause:
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
