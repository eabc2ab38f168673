"""The clock of export: one object, so that tests can simulate an hour's outage in a second.

Delays are measured on the monotonic clock. Enqueue times must survive a restart, so they are wall
time: it is read once at the start and continued by the monotonic clock (`steady`). A wall clock
that jumps later changes no age.
"""

import asyncio
import time
from collections.abc import Callable


class Clock:
    def __init__(self) -> None:
        self._wall_at_zero = self.wall() - self.monotonic()

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def steady(self) -> float:
        """Return wall time that never jumps: that of the start, plus the time since then."""
        return self._wall_at_zero + self.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, call)

    async def wait(self, event: asyncio.Event, timeout: float | None) -> bool:
        """Return whether the event was set within `timeout` seconds; None waits without a limit."""
        if event.is_set() or timeout is None:
            await event.wait()
            return True
        sleep = asyncio.ensure_future(self.sleep(timeout))
        wait = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((sleep, wait), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            wait.cancel()
        return event.is_set()
