"""Bound the memory of requests that are still arriving, over all connections of a process.

One request has its own limit, but thousands of connections may each be in the middle of a large
one. Large requests reserve memory here as they grow. Small requests always pass, so a flood of
large ones does not block others.
"""

import sys

SMALL = 64 << 10  # a request up to this size always passes
TOO_MANY = "Too many large requests are under way, try again"
RETRY_AFTER_SECONDS = 1.0  # in the answer to a refused request
MIN_RATE = 1 << 10  # bytes per second of a large request, where it is not configured


class RequestMemory:
    """The bytes of all large requests that are arriving or being processed."""

    __slots__ = ("limit", "total")

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.limit = limit  # bytes; by default unlimited
        self.total = 0  # bytes; exceeds `limit` by the last part at most

    @property
    def full(self) -> bool:
        return self.total > self.limit
