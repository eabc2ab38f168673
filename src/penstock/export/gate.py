"""The gate in front of a route's workers: open, closed by hand, or closed because the destination
refused.

A destination that refuses for a reason no retry helps (credentials, address) closes the gate. Often
the reason goes away without anybody coming back to the route: a deployment ends, a token is renewed
over there. So while it is closed by a refusal one worker is let through now and then, with one
batch, after `first` seconds and then ever more rarely, up to every `longest`. If the destination
says anything but no, the route goes on. What a person closed, a person opens.
"""

import asyncio
from collections.abc import Callable

from penstock.export.clock import Clock


class Gate:
    def __init__(self, clock: Clock, *, first: float, longest: float) -> None:
        self._clock, self._first, self._longest = clock, first, max(first, longest)
        self.reason: str | None = None  # why it is closed, while it is
        self.refused = False  # closed by the destination, not by a person
        self._one = False  # somebody may pass although it is closed
        self._changed = asyncio.Event()  # replaced whenever it is set
        self._knocking: asyncio.Task[None] | None = None
        self.next_knock: float | None = None  # when (monotonic), while knocking
        self.on_open: Callable[[], None] = lambda: None  # it opened by itself

    @property
    def closed(self) -> bool:
        return self.reason is not None

    def close(self, reason: str, *, refused: bool) -> None:
        self.reason = reason
        self.refused = refused
        if not refused:
            self.stop()
        elif self._knocking is None:
            self._knocking = asyncio.create_task(self._knock())

    def open(self) -> None:
        self.reason, self.refused, self._one = None, False, False
        self.stop()
        self._tell()

    def stop(self) -> None:
        if self._knocking is not None:
            self._knocking.cancel()
            self._knocking, self.next_knock = None, None

    async def wait(self, after_you: Callable[[], bool] = lambda: False) -> bool:
        """Until one may pass; True when it is closed and this is the one that tries. `after_you`:
        whether to leave that to others."""
        while self.closed:
            if self._one and not after_you():
                self._one = False
                return True
            await self._changed.wait()
        return False

    def answered(self) -> None:
        """The one that tried was not refused."""
        if self.refused:
            self.open()
            self.on_open()

    async def _knock(self) -> None:
        delay = self._first
        while True:
            self.next_knock = self._clock.monotonic() + delay
            await self._clock.sleep(delay)
            self._one = True
            self._tell()
            delay = min(2 * delay, self._longest)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
