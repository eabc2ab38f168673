"""A pool of connections. It opens them on demand and closes idle ones.

asyncpg's own pool uses two tasks and a timer to release a connection, which costs more than a small
call. This pool is a list. It does not reset connections between calls: sessions have no state.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

IDLE_SECONDS = 20.0  # an idle connection is closed after this time
CLOSE_SECONDS = 5.0  # time for calls to end when the pool is closed


class AllInUse(TimeoutError):
    """No connection became free in time."""


class Pool:
    """At most `max_size` connections, opened with `connect`, which has a time limit of its own."""

    def __init__(
        self, connect: Callable[[], Awaitable[Any]], max_size: int, timeout: float
    ) -> None:
        self._connect = connect
        self._max_size = max_size
        self._timeout = timeout  # seconds that a caller waits for a connection
        self._room = asyncio.Semaphore(max_size)
        self._idle: list[tuple[Any, float]] = []  # with the time of release; last used one last
        self.used: dict[Any, float] = {}  # connections in use, with the time of acquire (monotonic)
        self._timer: asyncio.TimerHandle | None = None  # set while a connection is idle

    @property
    def size(self) -> int:
        return len(self.used) + len(self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    async def acquire(self) -> Any:
        """Return a connection. Raises AllInUse, or the error of opening one."""
        if self._room.locked():
            try:
                async with asyncio.timeout(self._timeout):
                    await self._room.acquire()
            except TimeoutError:
                raise AllInUse from None
        else:
            await self._room.acquire()  # does not wait
        try:
            while self._idle:
                connection, _ = self._idle.pop()
                if not connection.is_closed():
                    break
            else:
                connection = await self._connect()
        except BaseException:
            self._room.release()
            raise
        self.used[connection] = time.monotonic()
        return connection

    def release(self, connection: Any, *, usable: bool) -> None:
        """Return a connection to the pool. If it is not usable or in a transaction, drop it."""
        del self.used[connection]
        if usable and not connection.is_closed() and not connection.is_in_transaction():
            self._idle.append((connection, time.monotonic()))
            if self._timer is None:
                self._close_later()
        else:
            connection.terminate()
        self._room.release()

    async def close(self) -> None:
        """Close all connections. Calls in flight have `CLOSE_SECONDS` to end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                for _ in range(self._max_size):
                    await self._room.acquire()
        closing = [connection.close(timeout=CLOSE_SECONDS) for connection, _ in self._idle]
        await asyncio.gather(*closing, return_exceptions=True)
        self.terminate()

    def terminate(self) -> None:
        """Close all connections at once, also those in use."""
        if self._timer is not None:
            self._timer.cancel()
        for connection in (*self.used, *(connection for connection, _ in self._idle)):
            connection.terminate()

    def _close_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(IDLE_SECONDS, self._close_unused)

    def _close_unused(self) -> None:
        self._timer = None
        limit = time.monotonic() - IDLE_SECONDS
        while self._idle and self._idle[0][1] <= limit:
            connection, _ = self._idle.pop(0)
            connection.terminate()
        if self._idle:
            self._close_later()
