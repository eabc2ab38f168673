"""Notify callbacks, and callers that wait for an offset, when a topic has more records."""

import asyncio
from collections.abc import Callable

from penstock.errors import PenstockError


class Subscriptions:
    """The subscribers of one topic. Runs on the event loop."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[], None]] = {}  # in the order of subscribing
        self._last_key = 0
        self._waiters: dict[asyncio.Future[None], int] = {}  # and the offset each waits for

    def __len__(self) -> int:
        return len(self._callbacks)

    @property
    def watched(self) -> bool:
        """Return whether somebody waits for more records."""
        return bool(self._callbacks or self._waiters)

    def add(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each commit that becomes visible, and when the topic is deleted.
        Return a function that ends the subscription.
        """
        self._last_key += 1
        key = self._last_key
        self._callbacks[key] = callback
        return lambda: self._callbacks.pop(key, None) and None

    async def wait_for(self, offset: int, timeout: float | None) -> bool:
        """Wait until `offset` can be read. Return False after the timeout."""
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
        """Wake the waiters for offsets below `next_offset`, and call the callbacks."""
        if self._waiters:
            for future in [f for f, offset in self._waiters.items() if offset < next_offset]:
                del self._waiters[future]
                if not future.done():
                    future.set_result(None)
        if self._callbacks:
            for callback in tuple(self._callbacks.values()):
                callback()

    def end(self, error: PenstockError) -> None:
        """End all subscriptions: waiters get the error, callbacks are called a last time."""
        for future in list(self._waiters):
            if not future.done():
                future.set_exception(error)
        for callback in list(self._callbacks.values()):
            callback()
        self._callbacks.clear()
