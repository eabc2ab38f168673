"""Limit how many messages a consumer starts per second."""

import asyncio
import re
from typing import Self

from penstock.errors import InvalidRequest

BURST_SECONDS = 0.1
UNITS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class RateLimit:
    """Spaces messages evenly. After an idle time, at most a tenth of a second's worth of messages,
    or one message, begins at once.
    """

    def __init__(self, count: float, seconds: float) -> None:
        self._interval = seconds / count  # between two messages of all consumers
        self.consumers = 1  # that share the rate evenly
        self._next = 0.0  # when the next message may start

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "100/s", "30/min" or "500/h"."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*/\s*([a-z]+)\s*", text)
        if match is None or match[2] not in UNITS or float(match[1]) <= 0:
            raise InvalidRequest(f"{text!r} is not a rate such as 100/s, 30/min or 500/h")
        return cls(float(match[1]), UNITS[match[2]])

    async def take(self, count: int) -> None:
        """Wait until this many messages may start."""
        interval = self._interval * self.consumers
        now = asyncio.get_running_loop().time()
        begin = max(self._next, now - max(interval, BURST_SECONDS) + interval)
        self._next = begin + count * interval
        await asyncio.sleep(max(0.0, begin - now))
