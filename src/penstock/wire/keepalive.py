"""Keep every streaming connection alive from one timer: each gets a sign of life every fifteen
seconds. The timer serves a fifteenth of them every second, so ten thousand subscribers make no
burst.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from penstock.io.tasks import repeated

TICK_SECONDS = 1.0
SLOTS = 15  # each connection is served once in TICK_SECONDS * SLOTS


class KeptAlive(Protocol):
    def keep_alive(self) -> None: ...


class KeepAlive:
    """The shared timer; it runs while there are streams."""

    def __init__(self, tick: float = TICK_SECONDS) -> None:
        self._tick = tick
        self._slots: list[set[KeptAlive]] = [set() for _ in range(SLOTS)]
        self._next = 0  # the slot that the next tick serves
        self._count = 0  # streams in all slots
        self._serving: asyncio.Task[None] | None = None  # set while there are streams

    def add(self, stream: KeptAlive) -> Callable[[], None]:
        """Keep the stream alive until the returned function is called."""
        # Use the slot that was served last: the first comment is a whole period away.
        slot = self._slots[(self._next - 1 - self._count) % SLOTS]
        slot.add(stream)
        self._count += 1
        if self._serving is None:
            self._serving = repeated("keep-alive of streams", self._serve, self._tick)

        def remove() -> None:
            slot.discard(stream)
            self._count -= 1
            if not self._count and self._serving is not None:
                self._serving.cancel()
                self._serving = None

        return remove

    def _serve(self) -> None:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        for stream in list(slot):
            stream.keep_alive()
