"""Set how often a consumer attempts a message, and how many messages it starts per second."""

import asyncio
import random
import re
from dataclasses import dataclass
from typing import Self

from penstock.errors import InvalidRequest

BURST_SECONDS = 0.1
UNITS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
# A handler that raises one of these has failed, as with any other exception. The worker goes on.
EXITS = (SystemExit, asyncio.CancelledError)
Errors = tuple[type[Exception], ...]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a consumer attempts a message, how long it waits between attempts, and which
    exceptions it retries. Create it with `backoff`.
    """

    max_attempts: int
    first: float
    factor: float
    longest: float
    jitter: bool = True
    retry_on: Errors = (Exception,)
    dead_letter_on: Errors = ()

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after this attempt; the first attempt is 1. With `jitter`, the
        wait is random: between half of that and all of it.
        """
        growth = self.factor ** min(attempt - 1, 1000)
        whole = float(min(self.longest, self.first * growth))
        return whole * (random.uniform(0.5, 1.0) if self.jitter else 1.0)

    def retries(self, failure: BaseException) -> bool:
        """Return whether to make another attempt after this exception."""
        fatal = isinstance(failure, self.dead_letter_on)
        return not fatal and isinstance(failure, (*self.retry_on, *EXITS))


def backoff(
    max_attempts: int = 5,
    *,
    first: float = 1.0,
    factor: float = 2.0,
    longest: float = 60.0,
    jitter: bool = True,
    retry_on: Errors = (Exception,),
    dead_letter_on: Errors = (),
) -> RetryPolicy:
    """Retry with exponential backoff: make up to `max_attempts` attempts, wait `first` seconds
    after the first one and `factor` times longer after each further one, at most `longest` seconds.
    `jitter` shortens each wait by up to a half, at random. After the last attempt the message
    becomes a dead letter; at once if the exception is not one of `retry_on`, or one of
    `dead_letter_on`.
    """
    if max_attempts < 1 or first < 0 or factor < 1 or longest < 0:
        raise InvalidRequest(
            "backoff needs 1 or more attempts, a factor of 1 or more, and no negative seconds"
        )
    return RetryPolicy(max_attempts, first, factor, longest, jitter, retry_on, dead_letter_on)


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
