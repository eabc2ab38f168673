"""Write events to the active failover file, by group commit.

Submissions that arrive during a write wait and share the next one: one append and one fsync,
whatever their number. Their order is the order of `submit`. A submission is written to one file as
a whole, or rejected as a whole.

- When the disk or the buffer is full, the submissions of that write are rejected, and the file is
  cut back to what was acknowledged.
- After a failed fsync, the kernel may have dropped the pages, and a retry would succeed without
  them. The file is cut back to its synced size, and completed. The same submissions are written to
  a new file, once.
- A file is complete when it has `events_per_file` events, or when `seal` is called for its replay.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.buffer.backlog import BufferBacklog, BufferFile, Key, keys_of
from penstock.buffer.storage import BufferStorage
from penstock.errors import PenstockError, StorageError, StorageFailed, StorageFull, Unavailable
from penstock.io.fs import File
from penstock.queues.types import Item

log = logging.getLogger("penstock.buffer")

ENDED = "the buffer's writer ended"


@dataclass(slots=True, eq=False)
class FailoverEntry:
    lines: list[bytes]
    keys: set[Key]
    done: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class Active:
    """The file that is being written."""

    file: BufferFile
    handle: File
    synced: int = 0  # bytes known to be durable


class FailoverJournal:
    """The active failover file. All file access is serialised by `_lock` and runs in the pool."""

    def __init__(self, storage: BufferStorage, backlog: BufferBacklog) -> None:
        self._storage = storage
        self._directory = storage.directory
        self._fs = storage.fs
        self._backlog = backlog
        self._per_file = storage.settings.events_per_file
        self._active: Active | None = None
        self._waiting: deque[FailoverEntry] = deque()
        self.unwritten = 0  # events that are submitted and not written
        self._writing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._closed = False
        # Made in the pool, handed to the backlog on the event loop.
        self._completed: list[BufferFile] = []

    @property
    def files(self) -> list[BufferFile]:
        """Return the active file and those that are not in the backlog yet."""
        active = self._active  # read first: a thread moves it to `_completed`
        completed = list(self._completed)
        return (
            completed if active is None or active.file in completed else [*completed, active.file]
        )

    @property
    def events(self) -> int:
        """Return how many events are submitted or in `files`; may count some twice, misses none."""
        return self.unwritten + sum(file.events for file in self.files)

    def submit(self, items: list[Item]) -> asyncio.Future[None]:
        """Hold the partitions and queue the events. The future is done when they are durable."""
        if self._closed:
            raise Unavailable("the broker is stopping")
        lines, keys = self._storage.encode(items), keys_of(items)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._backlog.hold(keys)
        self._waiting.append(FailoverEntry(lines, keys, done))
        self.unwritten += len(lines)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return done

    async def flush(self) -> None:
        """Wait until everything submitted so far is written or rejected."""
        while self._writing is not None:
            await asyncio.wait([self._writing])

    async def seal(self) -> None:
        """Complete the active file and hand it to the backlog."""
        async with self._lock:
            await self._storage.in_pool(self._complete)
            self._hand_over()

    async def close(self) -> None:
        self._closed = True
        await self.flush()
        await self.seal()

    async def _write(self) -> None:
        try:
            while self._waiting:
                async with self._lock:
                    batch = self._take()
                    try:
                        file = await self._storage.in_pool(self._commit, batch)
                    except StorageError as error:
                        self._refuse(batch, error)
                    except BaseException:  # a cancellation or a bug: nobody may wait forever
                        self._refuse(batch, StorageFailed(ENDED))
                        raise
                    else:
                        for submission in batch:
                            self._backlog.transfer(submission.keys, file)
                            if not submission.done.done():
                                submission.done.set_result(None)
                    self.unwritten -= sum(len(submission.lines) for submission in batch)
                    self._hand_over()
        finally:
            self._writing = None
            self.unwritten = 0
            self._refuse(self._waiting, StorageFailed(ENDED))
            self._waiting.clear()

    def _take(self) -> list[FailoverEntry]:
        batch = [self._waiting.popleft()]
        events = len(batch[0].lines)
        while self._waiting and events + len(self._waiting[0].lines) <= self._per_file:
            batch.append(self._waiting.popleft())
            events += len(batch[-1].lines)
        return batch

    def _refuse(self, batch: Iterable[FailoverEntry], error: PenstockError) -> None:
        for submission in batch:
            self._backlog.release(submission.keys)
            if not submission.done.done():
                submission.done.set_exception(error)

    def _hand_over(self) -> None:
        for file in self._completed:
            self._backlog.add(file)
            log.info("Buffered %d events to %s", file.events, file.name)
        self._completed.clear()

    # The methods below run in the pool, one at a time.

    def _commit(self, batch: list[FailoverEntry]) -> BufferFile:
        lines = [line for submission in batch for line in submission.lines]
        self._storage.reserve(sum(map(len, lines)))
        if self._active and self._active.file.events + len(lines) > self._per_file:
            self._complete()
        try:
            return self._append(lines)
        except StorageFailed as error:
            log.error("%s; starting a new buffer file", error)
            self._abandon()
            return self._append(lines)

    def _append(self, lines: list[bytes]) -> BufferFile:
        active = self._active = self._active or Active(*self._storage.create("failover"))
        active.handle.append(lines)
        try:
            active.handle.sync()
        except StorageFull:
            self._abandon()
            raise
        active.synced = active.file.size = active.handle.size
        active.file.events += len(lines)
        return active.file

    def _complete(self) -> None:
        """Rename the active file, which is durable. If that fails, it is replayed as .tmp."""
        active = self._active
        if active is None or active.file.events == 0:
            return
        try:
            active.file.complete(self._fs)
            self._fs.sync_dir(self._directory)
        except StorageError as error:
            log.warning("%s: the file is replayed as %s", error, active.file.name)
        self._release(active)

    def _abandon(self) -> None:
        """Cut the active file back to its durable size, and write no more to it."""
        active = self._active
        if active is None:
            return
        try:
            active.handle.truncate(active.synced)
        except StorageError as error:
            log.error("%s: the replay recognises events that were written twice", error)
        self._release(active)
        if not active.file.events:
            self._fs.remove(active.file.path)

    def _release(self, active: Active) -> None:
        if active.file.events:
            self._completed.append(active.file)
        active.handle.close()
        self._active = None
