"""Group concurrent appends into commits.

Appends are queued. The appends that are queued at the end of a loop tick, or when the commit before
has ended, become one commit: one write, and under `group` one fsync. Offsets are assigned by the
commit, so a failed commit leaves no gap. Readers see a record (and `next_offset` moves) once its
commit has satisfied the fsync policy, never before.

    always     every append is a commit of its own, answered after its fsync
    group      appends share a commit, answered after its fsync
    interval   answered after the write; an fsync follows within `fsync_interval`
    never      answered after the write; the kernel decides (checkpoints and rolls still sync,
               in the background)

One step runs at a time, and nothing else writes to the segments. A step is either

    a preparation    a task that repairs, rolls or syncs the segments, or brings them to rest for a
                     caller of `between_commits`
    a write          on the event loop if it waits for no fsync; otherwise one call in the pool,
                     whose callback on the loop answers all appends (docs/decisions/storage.md)

The end of a step starts the next one. `penstock.log.segment_store` makes the writes durable.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from penstock.errors import (
    NotFound,
    PenstockError,
    StorageError,
    StorageFailed,
    StorageFull,
)
from penstock.log.append_queue import AppendQueue
from penstock.log.commit import Entry, LogCommit
from penstock.log.context import Context
from penstock.log.segment import Write
from penstock.log.segment_store import SegmentStore

log = logging.getLogger("penstock.topics")

INLINE_BYTES = 1 << 20  # a larger write always goes to the pool
COMMIT_BYTES = 64 << 20


class Appender(AppendQueue):
    """The commits of one log. `on_commit` is called with the next offset after each commit that
    readers see.
    """

    def __init__(
        self, name: str, context: Context, segments: SegmentStore, on_commit: Callable[[int], None]
    ) -> None:
        super().__init__(name, segments.format, context.settings.max_record)
        self._context = context
        self._segments = segments
        self._on_commit = on_commit
        self._policy = context.settings.fsync
        # The step that runs now: a preparation, or a write in the pool.
        self._running: asyncio.Future[None] | None = None
        # Callers of `between_commits`, and whether to roll for them.
        self._between: list[tuple[asyncio.Future[None], bool]] = []
        self._rescuing = False  # the next step repairs a broken segment, even if no append waits
        self._last_used = time.monotonic()

    # Committing

    def commit(self) -> None:
        """Start the next step: a preparation if the segments need it, otherwise a write of the
        queued appends. If a step runs, its end starts the next one.
        """
        self._scheduled = False
        special = bool(self._between) or self._rescuing
        if self._running is not None or not (self._pending or special):
            return
        if special or self.deleted or not self._segments.is_prepared(self.pending_bytes):
            self._segments.writing = True
            self._running = asyncio.get_running_loop().create_task(self._prepare())
        else:
            self._write(self._take())

    async def _prepare(self) -> None:
        """Prepare the segments for the next write. Refuse the queued appends if that fails, or if
        the topic was deleted.
        """
        try:
            if self._between:
                await self._rest()
                return
            self._rescuing = False
            try:
                await self._segments.prepare(self.pending_bytes)
                if self.deleted:
                    raise self.gone()
            except (StorageError, NotFound) as error:
                self._fail(self._take(), error)
            except BaseException:
                self._fail(self._take(), self._unexpected())
                raise
        finally:
            self._end_step()

    def _write(self, entries: list[Entry]) -> None:
        """Write a commit: in the pool if it is large or waits for an fsync, otherwise here."""
        try:
            segments = self._segments
            active = segments.active
            write = Write(active.end, active.data_size, segments.next_time())
            commit = LogCommit(self._format, entries, write, segments.producers)
            if (taken := len(commit.entries)) < len(entries):
                self._pending[:0] = entries[taken:]
                self.pending_bytes += sum(entry.size for entry in entries[taken:])
                del entries[taken:]
            if write.count:
                self._context.space.take(write.size)
                if self._context.strict or write.size > INLINE_BYTES:
                    segments.writing = True
                    segments.start_write(write, partial(self._written, commit))
                    self._running = asyncio.get_running_loop().create_future()
                    return
                segments.writer.write(write, sync=False)
        except StorageError as error:
            self._fail(entries, error)
        except BaseException:
            self._segments.writing = False
            self._fail(entries, self._unexpected())
            raise
        else:
            self._publish(commit)
        if self._pending:
            self.schedule()

    def _written(self, commit: LogCommit, error: BaseException | None) -> None:
        """Publish the commit that the pool has written, or refuse its appends if that failed."""
        waiting = self._running
        try:
            if error is None:
                self._publish(commit)
            elif isinstance(error, StorageError):
                self._fail(list(commit.entries), error)
            else:
                self._fail(list(commit.entries), self._unexpected())
                raise error
        finally:
            if isinstance(waiting, asyncio.Future) and not waiting.done():
                waiting.set_result(None)
            self._end_step()

    def _end_step(self) -> None:
        self._running = None
        self._segments.writing = False
        self._segments.release()
        self.commit()

    def _take(self) -> list[Entry]:
        """Dequeue the next commit's appends: one under `always`, else up to COMMIT_BYTES."""
        if len(self._pending) == 1:
            taken, self._pending, self.pending_bytes = self._pending, [], 0
            return taken
        count, size = 0, 0
        for entry in self._pending:
            if count and (self._policy == "always" or size + entry.size > COMMIT_BYTES):
                break
            count += 1
            size += entry.size
        taken = self._pending[:count]
        del self._pending[:count]
        self.pending_bytes -= size
        return taken

    def _publish(self, commit: LogCommit) -> None:
        """Make a commit visible to readers, and answer its appends."""
        self._last_used = time.monotonic()
        write, instruments = commit.write, self._context.instruments
        if write.count:
            self._segments.publish(write)
            instruments.commits.add()
            instruments.records.add(write.count, self._name)
            instruments.bytes.add(write.size, self._name)
        if commit.duplicates:
            instruments.duplicates.add(commit.duplicates)
        commit.succeed()
        if write.count:
            self._on_commit(write.first + write.count)

    def _unexpected(self) -> StorageFailed:
        return StorageFailed(f"appending to {self._name!r} failed, see the log")

    def _fail(self, entries: list[Entry], error: PenstockError) -> None:
        self._context.instruments.failures.add(1, type(error).__name__)
        if isinstance(error, StorageFull):
            self._context.space.refused(error, sum(entry.size for entry in entries))
        active = self._segments.active
        if active.broken:
            log.error("topic %s: segment %d is closed: %s", self._name, active.base, active.broken)
        for entry in entries:
            if entry.producer is not None and not entry.promise.done():
                self._segments.producers.expect(entry.producer, self._context.now())
            entry.refuse(error)
        self._segments.release()

    # Between commits

    def rescue(self) -> None:
        """Repair a broken segment in the next step."""
        self._rescuing = True
        self.schedule()

    async def between_commits(self, *, roll: bool) -> None:
        """Bring the segments to rest between two commits (`SegmentStore.rest`)."""
        if self.deleted:  # the directory may belong to another topic now
            raise self.gone()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._between.append((future, roll))
        self.schedule()
        await future

    async def _rest(self) -> None:
        waiting, self._between = self._between, []
        failure: PenstockError | None = None
        try:
            await self._segments.rest(roll=any(roll for _, roll in waiting))
        except StorageError as error:
            failure = error
        except BaseException:
            failure = self._unexpected()
            raise
        finally:
            for future, _ in waiting:
                if future.done():
                    continue
                if failure is None:
                    future.set_result(None)
                else:
                    future.set_exception(type(failure)(str(failure)))

    # Ending

    @property
    def busy(self) -> bool:
        return bool(self._pending or self._running)

    def idle_for(self, seconds: float) -> bool:
        return time.monotonic() - self._last_used > seconds

    def close(self, *, deleted: bool = False) -> None:
        """Accept no more appends. Queued ones are committed, or refused if the topic is deleted."""
        self.closed = True
        self.deleted = deleted

    async def drain(self) -> None:
        """Wait until all queued appends are answered and nothing runs in the pool."""
        while True:
            tasks = (self._running, self._segments.background)
            running = [task for task in tasks if task is not None]
            if running:
                await asyncio.wait(running)
            elif self._pending or self._between or self._rescuing or self._scheduled:
                self.schedule()
                await asyncio.sleep(0)
            else:
                return
