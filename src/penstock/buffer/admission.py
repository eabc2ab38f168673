"""How fast pushes may join a backlog that is being replayed.

Files take events faster than the database does. Without a limit, busy producers would keep the
backlog of their partitions growing for ever after a short outage. So while a replay runs, each two
events it commits admit one new one behind them: the backlog at least halves with every pass. For
the last few events nobody is admitted: pushes wait some milliseconds for those to be committed and
then go to the database directly. Waiting pushes keep their order.
"""

import asyncio
from collections import deque

FIRST_EVENTS = 1000  # admitted at once: a short outage passes unnoticed
SHARE = 0.5


class Admission:
    """Closed and open again by the replay; asked by pushes that have to go behind the backlog."""

    def __init__(self) -> None:
        self._replaying = False
        self._closing = False
        self._credit = 0.0
        self._line: deque[tuple[int, asyncio.Future[bool]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._line)

    def begin(self) -> None:
        self._replaying, self._closing, self._credit = True, False, FIRST_EVENTS

    def close(self) -> None:
        """The next pass is the last: admit nobody until it is over."""
        self._closing = True

    def committed(self, events: int) -> None:
        self._credit += events * SHARE
        while self._line and not self._closing and self._line[0][0] <= self._credit:
            events, waiter = self._line.popleft()
            if not waiter.done():
                self._credit -= events
                waiter.set_result(True)

    def end(self) -> None:
        """The replay is over, well or not: everybody looks again where to go."""
        self._replaying = self._closing = False
        while self._line:
            waiter = self._line.popleft()[1]
            if not waiter.done():
                waiter.set_result(False)

    async def ask(self, events: int) -> bool:
        """True: go behind the backlog. False: things have changed, look again."""
        if not self._replaying:
            return True
        if (
            not self._closing
            and not self._line
            and (events <= self._credit or events > FIRST_EVENTS)
        ):
            self._credit -= events
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._line.append((min(events, FIRST_EVENTS), waiter))
        return await waiter
