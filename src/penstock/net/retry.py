"""Delays between retries of a client."""

import random


class Backoff:
    """Delays that double from `first` to `most` seconds, shortened at random to spread clients."""

    def __init__(self, first: float = 0.05, most: float = 2.0) -> None:
        self._first = first
        self._most = most
        self._next = first

    def reset(self) -> None:
        """Start again with the first delay."""
        self._next = self._first

    def delay(self) -> float:
        """Return the seconds before the next attempt."""
        delay, self._next = self._next, min(self._next * 2, self._most)
        return delay * random.uniform(0.5, 1.0)
