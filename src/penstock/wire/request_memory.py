"""How much memory requests that are still arriving may take, over all connections of a process.

One request has its own limit, but thousands of connections may each be in the middle of a large
one. What is large asks here as it grows; small requests always pass, so that a flood of large ones
keeps nobody else out.
"""

import sys

SMALL = 64 << 10  # a request up to this size passes, whatever else is under way
TOO_MANY = "Too many large requests are under way, try again"
RETRY_SECONDS = 1.0
MIN_RATE = 1 << 10  # bytes per second of a large request, where it is not configured


class RequestMemory:
    """The bytes of all large requests that are arriving or being worked on."""

    __slots__ = ("limit", "total")

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.limit = limit  # bytes; by default as many as they like
        self.total = 0  # bytes; above `limit` by what arrived last, at most

    @property
    def full(self) -> bool:
        return self.total > self.limit
