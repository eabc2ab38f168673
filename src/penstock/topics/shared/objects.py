"""Read and write the objects that contain the old ranges of shared logs.

Rows of the database name them. Their names contain their offsets, so that brokers can read them
while the database is down:

    shared/INCARNATION/PARTITION/LAST-BASE-ID[.compact]

LAST and BASE are offsets of 20 digits. Objects never change. An object that was replaced, or that a
killed mover left behind, has the same records, and also those that compaction has removed since.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from penstock.errors import Unavailable
from penstock.io.tasks import in_pool
from penstock.object_store import ObjectStore
from penstock.protocol.ids import uuid7

T = TypeVar("T")

READERS = 8  # concurrent reads from object storage
CANDIDATES = 50  # objects with an offset or behind it that are listed
COMPACTED = ".compact"  # how the names of compacted objects end
_OFFSETS = re.compile(r"(\d{20})-(\d{20})-")


class LogObject(NamedTuple):
    """An object with the batches of the offsets from `base` up to, not including, `end`."""

    base: int
    end: int
    name: str
    size: int


def new_name(directory: str, base: int, end: int, *, compacted: bool = False) -> str:
    return f"{directory}{end - 1:020}-{base:020}-{uuid7().hex}{COMPACTED if compacted else ''}"


class SharedObjects:
    """The object store, if there is one. Its calls block and run in threads."""

    def __init__(self, store: ObjectStore | None) -> None:
        self.store = store
        self._threads = ThreadPoolExecutor(READERS, "shared-read")

    async def run(self, call: Callable[..., T], *args: object) -> T:
        return await in_pool(self._threads, call, *args)

    async def read(self, name: str, position: int, size: int) -> bytes:
        if self.store is None:
            raise Unavailable(f"{name} is in object storage, and this broker has no topics.tier")
        return await self.run(self.store.read_range, name, position, size)

    async def find(self, directory: str, offset: int) -> LogObject | None:
        """Return the object of a log that has this offset, or the first one behind it."""
        if self.store is None:
            return None
        after = f"{directory}{offset:020}"
        listed = await self.run(self.store.list_first, directory, after, CANDIDATES)
        candidates = []
        for name, size, _ in listed:
            if match := _OFFSETS.match(name.removeprefix(directory)):
                last, base = map(int, match.groups())
                candidates.append(LogObject(base, last + 1, name, size))
        return min(candidates, key=lambda one: max(one.base, offset), default=None)

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
