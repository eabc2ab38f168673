"""A sign of life every fifteen seconds on every idle connection, from one timer.

Every second it serves a fifteenth of them, so that ten thousand idle subscribers never make a
burst.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

TICK = 1.0  # seconds
ROUNDS = 15  # each connection is served once in TICK * ROUNDS seconds


class KeptAlive(Protocol):
    def keep_alive(self) -> None: ...


class KeepAlive:
    """The shared timer; runs while there are streams."""

    def __init__(self, tick: float = TICK) -> None:
        self._tick = tick
        self._rounds: list[set[KeptAlive]] = [set() for _ in range(ROUNDS)]
        self._at = 0
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: KeptAlive) -> Callable[[], None]:
        """Keep the stream alive until the returned function is called."""
        # The round that was served last comes again last: the first comment is a whole period away.
        chosen = self._rounds[(self._at - 1 - self._count) % ROUNDS]
        chosen.add(stream)
        self._count += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick, self._serve)

        def remove() -> None:
            chosen.discard(stream)
            self._count -= 1
            if not self._count and self._timer is not None:
                self._timer.cancel()
                self._timer = None

        return remove

    def _serve(self) -> None:
        for stream in list(self._rounds[self._at]):
            stream.keep_alive()
        self._at = (self._at + 1) % ROUNDS
        self._timer = asyncio.get_running_loop().call_later(self._tick, self._serve)
