"""Limit how fast pushes join a backlog that is being replayed.

A file takes events faster than the database does. Without a limit, busy producers could keep the
backlog of their partitions growing forever after a short outage. So while a replay runs, two
committed events admit one new event: every pass at least halves the backlog. During the last pass
no push is admitted. Pushes wait some milliseconds until it is committed, and then go to the
database directly. Waiting pushes keep their order.
"""

import asyncio
from collections import deque

FIRST_EVENTS = 1000  # admitted at once, so that a short outage delays no push
SHARE = 0.5


class Admission:
    """The queue of pushes that wait to join the backlog. The replay opens and closes it."""

    def __init__(self) -> None:
        self._replaying = False
        self._closing = False
        self._credit = 0.0
        self._waiting: deque[tuple[int, asyncio.Future[bool]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def begin(self) -> None:
        self._replaying, self._closing, self._credit = True, False, FIRST_EVENTS

    def close(self) -> None:
        """Admit no push until the last pass is over."""
        self._closing = True

    def committed(self, events: int) -> None:
        self._credit += events * SHARE
        while self._waiting and not self._closing and self._waiting[0][0] <= self._credit:
            events, waiter = self._waiting.popleft()
            if not waiter.done():
                self._credit -= events
                waiter.set_result(True)

    def end(self) -> None:
        """End the replay. Waiting pushes choose again where to go."""
        self._replaying = self._closing = False
        while self._waiting:
            waiter = self._waiting.popleft()[1]
            if not waiter.done():
                waiter.set_result(False)

    async def ask(self, events: int) -> bool:
        """Wait for admission. True: join the backlog; False: the replay ended, choose again."""
        if not self._replaying:
            return True
        if (
            not self._closing
            and not self._waiting
            and (events <= self._credit or events > FIRST_EVENTS)
        ):
            self._credit -= events
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((min(events, FIRST_EVENTS), waiter))
        return await waiter
