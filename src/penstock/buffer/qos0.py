"""QoS 0: write events to a file, acknowledge them, and commit them together later.

An event is in its file before the answer, so `kill -9` loses nothing. It is durable at most
`flush_interval` after the answer, so a power failure may lose that much: either the batch is
committed by then, or the file is synced. A file contains one batch. A batch is committed when its
first request has waited for `bufferMs`, or when it has as many events as the smallest `bufferMax`
of its requests. Meanwhile the next batch grows, so a slow database makes larger batches. A batch of
`events_per_file` events is full: pushes wait until it is committed.

This path is for a database that is up. When it goes down, the waiting events move to the failover
file in order, and later pushes go there too. The replay recognises the copies in the QoS 0 file by
their transaction ids.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.buffer.backlog import BufferBacklog, BufferFile, Key, keys_of
from penstock.buffer.failed import RefusedEvent
from penstock.buffer.journal import FailoverJournal
from penstock.buffer.replay import BATCHES_PER_CALL, BufferReplay, batches
from penstock.buffer.storage import BufferStorage
from penstock.errors import StorageError, StorageFailed, Unavailable
from penstock.io.fs import File
from penstock.queues.types import Item

log = logging.getLogger("penstock.buffer")

MAX_BUFFER_MS = 3_600_000  # upper limit of a request's bufferMs
EARLY = 0.8  # share of bufferMs after which a batch is committed, before an fsync is due


@dataclass(slots=True, eq=False)
class Qos0Batch:
    """The events of a file, from the first write to the commit."""

    file: BufferFile
    handle: File
    done: asyncio.Future[None]
    due: float
    most: int
    items: list[Item] = field(default_factory=list)
    keys: set[Key] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None
    unsynced: asyncio.TimerHandle | None = None
    syncing: asyncio.Future[None] | None = None


class Qos0:
    """The batch that grows and the one that is being committed."""

    def __init__(
        self,
        storage: BufferStorage,
        replay: BufferReplay,
        journal: FailoverJournal,
        backlog: BufferBacklog,
        idle: Callable[[], None],
    ) -> None:
        self._storage = storage
        self._fs = storage.fs
        self._settings = storage.settings
        self._replay = replay
        self._journal = journal  # gets the waiting events when the database goes down
        self._backlog = backlog
        self._idle = idle  # called when no event is waiting
        self._growing: Qos0Batch | None = None
        self._flushing: Qos0Batch | None = None
        self._task: asyncio.Task[None] | None = None
        self._flush_wanted = False

    @property
    def busy(self) -> bool:
        return self._growing is not None or self._flushing is not None

    @property
    def batches(self) -> list[Qos0Batch]:
        return [batch for batch in (self._flushing, self._growing) if batch]

    @property
    def files(self) -> list[BufferFile]:
        return [batch.file for batch in self.batches]

    def blocks(self, items: list[Item]) -> bool:
        """Return whether one of these items would overtake a waiting event."""
        if not (self._flushing or self._growing):
            return False
        keys = keys_of(items)
        return any(not keys.isdisjoint(batch.keys) for batch in self.batches)

    async def push(self, items: list[Item], buffer_ms: float, buffer_max: int) -> bool:
        """Write the events to the file, or raise StorageFull or StorageFailed.

        Return False after a wait in which nothing was written: the caller chooses again.
        """
        if self._growing and len(self._growing.items) >= self._settings.events_per_file:
            await asyncio.wait([self._growing.done])
            return False
        lines = self._storage.encode(items)
        self._storage.reserve(sum(map(len, lines)))
        batch = self._growing or self._open()
        try:
            batch.handle.append(lines)
        except StorageFailed as error:
            log.error("%s; starting a new buffer file", error)
            if not batch.items:
                self._drop(batch)
                raise
            await self.flush()
            return False
        batch.items += items
        batch.keys |= keys_of(items)
        batch.file.events += len(items)
        batch.file.size = batch.handle.size
        self._schedule(batch, min(buffer_ms, MAX_BUFFER_MS) / 1000, buffer_max)
        return True

    async def flush(self) -> None:
        """Commit the waiting events, or move them to the failover file."""
        self.flush_soon()
        if last := self._growing or self._flushing:
            await asyncio.wait([last.done])

    def flush_soon(self) -> None:
        """Begin to commit now, without waiting for it."""
        if self._growing:
            self._flush_wanted = True
            self._start()

    def _open(self) -> Qos0Batch:
        loop = asyncio.get_running_loop()
        file, handle = self._storage.create("qos0")
        batch = Qos0Batch(file, handle, loop.create_future(), due=float("inf"), most=1 << 62)
        batch.unsynced = loop.call_later(self._settings.flush_interval, self._sync_later, batch, 0)
        self._growing = batch
        return batch

    def _drop(self, batch: Qos0Batch) -> None:
        """Remove a file that contains no event."""
        self._growing = None
        if batch.unsynced:
            batch.unsynced.cancel()
        batch.handle.close()
        self._fs.remove(batch.file.path)
        batch.done.set_result(None)
        self._idle()

    def _schedule(self, batch: Qos0Batch, seconds: float, most: int) -> None:
        loop = asyncio.get_running_loop()
        batch.most = min(batch.most, max(1, most))
        due = loop.time() + seconds * EARLY
        if due < batch.due:
            batch.due = due
            if batch.timer:
                batch.timer.cancel()
            batch.timer = loop.call_at(due, self._start)
        if len(batch.items) >= batch.most:
            self._start()

    def _start(self) -> None:
        if self._task is None and self._growing and self._growing.items:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._growing and self._is_due(self._growing):
                batch, self._growing = self._growing, None
                self._flushing = batch
                if batch.timer:
                    batch.timer.cancel()
                try:
                    await self._commit(batch)
                    if batch.syncing:
                        await asyncio.wait([batch.syncing])  # before the file is closed
                except Exception as error:
                    # a bug must not lose events: they stay in the file
                    log.exception("a QoS 0 batch could not be committed")
                    self._leave(batch, error)
                finally:
                    batch.handle.close()
                    self._flushing = None
                    if batch.unsynced:
                        batch.unsynced.cancel()
                    batch.done.set_result(None)
        finally:
            self._task = None
            if self._growing is None:
                self._flush_wanted = False
                self._idle()

    def _is_due(self, batch: Qos0Batch) -> bool:
        late = asyncio.get_running_loop().time() >= batch.due - 0.001
        return bool(batch.items) and (self._flush_wanted or late or len(batch.items) >= batch.most)

    async def _commit(self, batch: Qos0Batch) -> None:
        file, refusals, done = batch.file, list[RefusedEvent](), 0
        try:
            file.complete(self._fs)
        except StorageError as error:
            log.warning("%s: the file keeps the name %s", error, file.name)
        try:
            for part in batches(batch.items, self._settings.max_batch * BATCHES_PER_CALL):
                refusals += await self._replay.insert(part, "qos0")
                done += len(part)
        except Unavailable:
            try:
                await self._journal.submit(batch.items[done:])
            except StorageError as error:
                self._leave(batch, error)
                return
        try:
            await self._replay.finish(file, refusals)
        except StorageError as error:
            self._leave(batch, error)

    def _leave(self, batch: Qos0Batch, error: Exception) -> None:
        """Leave the file to the replay, like one after a crash."""
        log.error("%s: %d QoS 0 events wait in %s", error, len(batch.items), batch.file.name)
        self._backlog.hold(batch.keys)
        self._backlog.transfer(batch.keys, batch.file)
        self._backlog.add(batch.file)

    def _sync_later(self, batch: Qos0Batch, synced: int) -> None:
        """Sync the file `flush_interval` after a write, unless the batch is done."""
        batch.unsynced = None
        if batch.done.done():
            return
        loop, size = asyncio.get_running_loop(), batch.handle.size
        if size != synced:
            batch.syncing = loop.run_in_executor(self._storage.pool, self._sync, batch)
        delay = self._settings.flush_interval
        batch.unsynced = loop.call_later(delay, self._sync_later, batch, size)

    def _sync(self, batch: Qos0Batch) -> None:
        try:
            batch.handle.sync()
        except StorageError as error:
            if not batch.done.done():
                log.error("%s: its events are committed at once", error)
                batch.done.get_loop().call_soon_threadsafe(self.flush_soon)
