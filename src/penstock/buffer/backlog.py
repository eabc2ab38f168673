"""The events that are buffered and not yet committed, the partitions that wait for them, and how
fast pushes may join them.

A partition (queue, name) is *held* while an event of it is being written to a file, or is in a
file that is not replayed. New pushes to a held partition are buffered behind those events. When the
last of them is committed, pushes go to the database directly again. Holds are counted per holder (a
submission or a file), not per event. So an event that is in two files, or twice in one, may prolong
a hold but never ends it early.

An adopted file holds all partitions until it has been read.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.buffer.files import Kind, Name
from penstock.io.fs import Fs
from penstock.queues.types import Item

Key = tuple[str, str]  # queue, partition
FIRST_EVENTS = 1000  # admitted at once during a replay, so that a short outage delays no push
SHARE = 0.5  # new events admitted for each committed one


def keys_of(items: Iterable[Item]) -> set[Key]:
    return {(item.queue, item.partition) for item in items}


@dataclass(slots=True, eq=False)
class BufferFile:
    """A file of this process, with figures of its content."""

    name: Name
    path: Path
    events: int = 0
    size: int = 0
    # the partitions that it holds; None: all, since it has not been read
    keys: set[Key] | None = field(default_factory=set)
    done: int = 0  # events replayed so far, to show the progress
    disk_failures: int = 0  # failures of the disk during its replay

    def complete(self, fs: Fs) -> None:
        """Rename a file after its last write. Blocks."""
        path = self.path.with_name(str(self.name.complete))
        fs.rename(self.path, path)
        self.name, self.path = self.name.complete, path


class BufferBacklog:
    """The complete files, in the order of their replay, and the holds."""

    def __init__(self) -> None:
        self.files: list[BufferFile] = []
        self._holders: dict[Key, int] = {}
        self._same: dict[Key, Key] = {}  # one tuple per partition, however many files mention it
        self._unknown = 0  # files that hold all partitions

    def add(self, file: BufferFile) -> None:
        """Add a complete file. Its holds were transferred to it while it was written."""
        if file.keys is None:
            self._unknown += 1
        self.files.append(file)

    def limit_hold(self, file: BufferFile, keys: set[Key]) -> None:
        """Limit the hold of an adopted file to the partitions in it."""
        if file.keys is None and file in self.files:
            file.keys = set()
            self.hold(keys)
            self.transfer(keys, file)
            self._unknown -= 1

    def remove(self, file: BufferFile) -> None:
        """Remove a file whose events are all committed or set aside."""
        self.files.remove(file)
        if file.keys is None:
            self._unknown -= 1
        else:
            self.release(file.keys)

    def hold(self, keys: set[Key]) -> None:
        for key in keys:
            key = self._same.setdefault(key, key)
            self._holders[key] = self._holders.get(key, 0) + 1

    def transfer(self, keys: set[Key], file: BufferFile) -> None:
        """Transfer the holds of a submission to `file`, which contains it now."""
        assert file.keys is not None
        for key in keys:
            if key in file.keys:
                self.release((key,))
            else:
                file.keys.add(self._same[key])

    def release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key], self._same[key]

    def blocks(self, items: Iterable[Item]) -> bool:
        """Return whether one of these items would overtake an older event."""
        if self._unknown:
            return True
        holders = self._holders
        return bool(holders) and any((item.queue, item.partition) in holders for item in items)

    @property
    def held_partitions(self) -> int:
        return len(self._holders)

    def events(self) -> int:
        return sum(file.events - file.done for file in self.files)

    def files_of(self, kind: Kind) -> list[BufferFile]:
        return [file for file in self.files if file.name.kind == kind]


class Admission:
    """The queue of pushes that wait to join the backlog. The replay opens and closes it.

    A file takes events faster than the database does. Without a limit, busy producers could keep
    the backlog of their partitions growing forever after a short outage. So while a replay runs,
    two committed events admit one new event: every pass at least halves the backlog. During the
    last pass no push is admitted. Pushes wait some milliseconds until it is committed, and then go
    to the database directly. Waiting pushes keep their order.
    """

    def __init__(self) -> None:
        self._replaying = False
        self._closing = False
        self._credit = 0.0
        self._waiting: deque[tuple[int, asyncio.Future[bool]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def begin(self) -> None:
        self._replaying, self._closing, self._credit = True, False, FIRST_EVENTS

    def close(self) -> None:
        """Admit no push until the last pass is over."""
        self._closing = True

    def committed(self, events: int) -> None:
        self._credit += events * SHARE
        while self._waiting and not self._closing and self._waiting[0][0] <= self._credit:
            events, waiter = self._waiting.popleft()
            if not waiter.done():
                self._credit -= events
                waiter.set_result(True)

    def end(self) -> None:
        """End the replay. Waiting pushes choose again where to go."""
        self._replaying = self._closing = False
        while self._waiting:
            waiter = self._waiting.popleft()[1]
            if not waiter.done():
                waiter.set_result(False)

    async def ask(self, events: int) -> bool:
        """Wait for admission. True: join the backlog; False: the replay ended, choose again."""
        if not self._replaying:
            return True
        if (
            not self._closing
            and not self._waiting
            and (events <= self._credit or events > FIRST_EVENTS)
        ):
            self._credit -= events
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((min(events, FIRST_EVENTS), waiter))
        return await waiter
