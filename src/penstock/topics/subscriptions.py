"""Who wants to know when a topic has more: callbacks, and callers that wait for an offset."""

import asyncio
from collections.abc import Callable

from penstock.errors import PenstockError


class Subscriptions:
    """Lives on the event loop."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[], None]] = {}  # in the order of subscribing
        self._last_key = 0
        self._waiters: dict[asyncio.Future[None], int] = {}  # and the offset each waits for

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once after each commit that became visible, and when the topic is
        deleted; until what is returned is called.
        """
        self._last_key += 1
        key = self._last_key
        self._callbacks[key] = callback
        return lambda: self._callbacks.pop(key, None) and None

    async def wait_for(self, offset: int, timeout: float | None) -> bool:
        """Until a change makes `offset` readable (True), or the time is over (False)."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[future] = offset
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiters.pop(future, None)
        return True

    def notify(self, next_offset: int) -> None:
        """Records below `next_offset` can be read."""
        if self._waiters:
            for future in [f for f, offset in self._waiters.items() if offset < next_offset]:
                del self._waiters[future]
                if not future.done():
                    future.set_result(None)
        if self._callbacks:
            for callback in tuple(self._callbacks.values()):
                callback()

    def end(self, error: PenstockError) -> None:
        """There will be no more: waiters get the error, callbacks are called a last time."""
        for future in list(self._waiters):
            if not future.done():
                future.set_exception(error)
        for callback in list(self._callbacks.values()):
            callback()
        self._callbacks.clear()
