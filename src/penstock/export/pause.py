"""Whether a route may send: it runs, it was paused by hand, or its destination denied it.

A destination that denies for a reason no retry helps (credentials, address) pauses the route. Often
the reason goes away without anybody coming back to the route: a deployment ends, a token is renewed
over there. So while a route is denied, one worker is let through now and then with one batch, a
probe: after `first` seconds and then ever more rarely, up to every `longest`. If the destination
does not deny it, the route resumes. What a person paused, a person resumes.
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
        self._on_resume = on_resume  # it resumed by itself
        self.reason: str | None = None  # why it is paused, while it is
        self.denied = False  # by the destination, not by a person
        self._probe_due = False  # somebody may send although it is paused
        self._changed = asyncio.Event()  # replaced whenever it is set
        self._prober: asyncio.Task[None] | None = None
        self.next_probe: float | None = None  # when (monotonic), while denied

    def begin(self, reason: str, *, denied: bool) -> None:
        self.reason = reason
        self.denied = denied
        if not denied:
            self.stop_probing()
        elif self._prober is None:
            self._prober = asyncio.create_task(self._probe())

    def end(self) -> None:
        self.reason, self.denied, self._probe_due = None, False, False
        self.stop_probing()
        self._notify()

    def stop_probing(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            self._prober, self.next_probe = None, None

    async def wait(self, leave_probe: Callable[[], bool] = lambda: False) -> bool:
        """Until one may send; True for the probe, unless `leave_probe` leaves it to others."""
        while self.reason is not None:
            if self._probe_due and not leave_probe():
                self._probe_due = False
                return True
            await self._changed.wait()
        return False

    def probe_succeeded(self) -> None:
        """The probe was not denied."""
        if self.denied:
            self.end()
            self._on_resume()

    async def _probe(self) -> None:
        delay = self._first
        while True:
            self.next_probe = self._clock.monotonic() + delay
            await self._clock.sleep(delay)
            self._probe_due = True
            self._notify()
            delay = min(2 * delay, self._longest)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
