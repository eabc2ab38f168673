"""The id of a producer and the numbers of its batches, by which the broker stores each batch once.

The broker refuses a batch while it does not have the one before it, so that a retried batch is not
overtaken. A batch that is refused for good, or whose outcome is unknown, is not sent again: the
broker would wait for its number forever. The following batches get a new id, and the broker accepts
any first number of an id that it does not know.
"""

import os


class BatchNumbers:
    __slots__ = ("_following", "id")

    def __init__(self) -> None:
        self.id = os.urandom(16)
        self._following = 0

    def take(self) -> int:
        """Return the number of the next batch."""
        self._following += 1
        return self._following - 1

    def renew_id(self) -> None:
        """Start again under a new id: a batch under the current one is not sent any more."""
        self.id = os.urandom(16)
