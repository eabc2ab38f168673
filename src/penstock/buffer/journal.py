"""Writes events to the active failover file, by group commit.

Submissions that arrive while a write is under way wait together and share the next one: one append,
one fsync, whatever their number. Order is the order of `submit`. A submission is in one file as a
whole, or refused as a whole.

- A full disk (or a used-up cap) refuses the submissions of that write; the file is cut back to what
  was acknowledged.
- A failed fsync poisons its file, since the kernel may have dropped the pages and a retry would
  lie. The file is cut back to what was synced before and completed; the same submissions go to a
  new file from memory, once.
- A file is complete when it holds `events_per_file` events, or when `seal` is called because its
  turn has come.
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from penstock.buffer.backlog import Backlog, BufferFile, Key, keys_of
from penstock.buffer.events import size_of
from penstock.buffer.files import Namer
from penstock.buffer.storage import Storage
from penstock.errors import PenstockError, StorageError, StorageFailed, StorageFull, Unavailable
from penstock.log.fs import File
from penstock.queues.types import Item

log = logging.getLogger("penstock.buffer")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Submission:
    lines: list[bytes]
    keys: set[Key]
    done: asyncio.Future[None]


class Journal:
    """The active failover file. All file access is serialised by `_lock` and runs in the pool."""

    def __init__(
        self,
        storage: Storage,
        backlog: Backlog,
        namer: Namer,
    ) -> None:
        self._storage = storage
        self._directory = storage.directory
        self._fs = storage.fs
        self._backlog = backlog
        self._namer = namer
        self._per_file = storage.settings.events_per_file
        self._active: BufferFile | None = None
        self._file: File | None = None
        self._synced = 0  # bytes of the active file known to be durable
        self._waiting: deque[Submission] = deque()
        self._unwritten = 0
        self._writing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._closed = False
        # Made in the pool, handed to the backlog on the event loop.
        self._completed: list[BufferFile] = []

    @property
    def files(self) -> list[BufferFile]:
        """The active file and those on their way from it to the backlog: none is missing while it
        goes from one to the other.
        """
        active = self._active  # before the others: the pool moves it there
        completed = list(self._completed)
        return completed if active is None or active in completed else [*completed, active]

    @property
    def events(self) -> int:
        """Events in `files` and on their way to them: never too few."""
        return self._unwritten + sum(file.events for file in self.files)

    def submit(self, items: list[Item]) -> asyncio.Future[None]:
        """Queue events for the file; the future is done when they are durable. Their partitions are
        held from now.
        """
        if self._closed:
            raise Unavailable("the broker is stopping")
        lines, keys = self._storage.encode(items), keys_of(items)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._backlog.hold(keys)
        self._waiting.append(Submission(lines, keys, done))
        self._unwritten += len(lines)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return done

    async def flush(self) -> None:
        """Wait until everything submitted so far is written or refused."""
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
                    else:
                        self._accept(batch, file)
                    self._unwritten -= sum(len(submission.lines) for submission in batch)
                    self._hand_over()
        finally:
            self._writing = None
            self._unwritten = 0
            # Only when we are cancelled or broken: nobody is left waiting.
            for submission in self._waiting:
                self._refuse([submission], StorageFailed("the buffer's writer ended"))
            self._waiting.clear()

    def _take(self) -> list[Submission]:
        batch = [self._waiting.popleft()]
        events = len(batch[0].lines)
        while self._waiting and events + len(self._waiting[0].lines) <= self._per_file:
            batch.append(self._waiting.popleft())
            events += len(batch[-1].lines)
        return batch

    def _accept(self, batch: list[Submission], file: BufferFile) -> None:
        for submission in batch:
            self._backlog.transfer(submission.keys, file)
            if not submission.done.done():
                submission.done.set_result(None)

    def _refuse(self, batch: list[Submission], error: PenstockError) -> None:
        for submission in batch:
            self._backlog.release(submission.keys)
            if not submission.done.done():
                submission.done.set_exception(error)

    def _hand_over(self) -> None:
        for file in self._completed:
            self._backlog.add(file)
            log.info("Buffered %d events to %s", file.events, file.name)
        self._completed.clear()

    # From here on: in the pool, one at a time.

    def _commit(self, batch: list[Submission]) -> BufferFile:
        lines = [line for submission in batch for line in submission.lines]
        total = size_of(lines)
        self._storage.reserve(total)
        if self._active and self._active.events + len(lines) > self._per_file:
            self._complete()
        try:
            return self._append(lines)
        except StorageFailed as error:
            log.error("%s; starting a new buffer file", error)
            self._abandon()
            return self._append(lines)

    def _append(self, lines: list[bytes]) -> BufferFile:
        if self._active is None:
            self._open()
        assert self._active
        assert self._file
        self._file.append(lines)
        try:
            self._file.sync()
        except StorageFull:
            self._abandon()
            raise
        self._synced = self._file.size
        self._active.events += len(lines)
        self._active.size = self._file.size
        return self._active

    def _open(self) -> None:
        name = self._namer.next("failover")
        path = self._directory / str(name)
        self._file = self._fs.open(path, create=True)
        try:
            self._fs.sync_dir(self._directory)
        except StorageError:
            self._file.close()
            self._file = None
            self._fs.remove(path)
            raise
        self._active = BufferFile(name, path)
        self._synced = 0

    def _complete(self) -> None:
        """Rename the active file. Its content is durable already; a file that keeps its .tmp is
        replayed as well.
        """
        if self._active is None or self._active.events == 0:
            return
        active, complete = self._active, self._active.name.complete
        try:
            self._fs.rename(active.path, self._directory / str(complete))
            active.name, active.path = complete, self._directory / str(complete)
            self._fs.sync_dir(self._directory)
        except StorageError as error:
            log.warning("%s: it is replayed as %s", error, active.name)
        self._completed.append(active)
        self._release_file()

    def _abandon(self) -> None:
        """The active file takes no more writes: what was durable in it stays, the rest goes."""
        if self._active is None or self._file is None:
            return
        active = self._active
        try:
            self._file.truncate(self._synced)
        except StorageError as error:
            log.error("%s: events written twice are recognised at replay", error)
        if active.events:
            self._completed.append(active)
        self._release_file()
        if not active.events:
            self._fs.remove(active.path)

    def _release_file(self) -> None:
        assert self._file
        self._file.close()
        self._file = None
        self._active = None
