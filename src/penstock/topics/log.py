"""The log of a topic as its writer sees it: appends that share commits, fsyncs, rolls, repairs, checkpoints.

The event loop owns all state; only disk work leaves it. Appends are queued; what is queued at the end of a loop tick,
or while the commit before it was in the pool, becomes one commit: one write, and under `group` one fsync. A commit
assigns offsets, so a failed one leaves no gap. Readers see a record (and `next_offset` moves) when its commit
satisfied the fsync policy, never before.

    always     every append is a commit of its own, answered after its fsync
    group      appends share a commit, answered after its fsync
    interval   answered after the write; an fsync follows within `fsync_interval`
    never      answered after the write; the kernel decides (checkpoints and rolls still sync, in the background)

Under `interval` what is answered but not yet synced is also kept in memory, so that a failed fsync loses nothing while
the process lives: the segment is closed and a new one is started from that memory (see `penstock.topics.writer`).

Two tasks may run for a topic: the commit loop (commits, rolls, repairs: whatever writes) and one in the background
(the fsync of `interval`, a checkpoint). Whoever renames files waits for the latter first.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import (
    InvalidRequest,
    NotFound,
    PenstockError,
    StorageFailed,
    StorageFull,
    TooLarge,
    Unavailable,
)
from penstock.storage.fs import Bytes
from penstock.topics.commit import Appended, Commit, Entry
from penstock.topics.context import Context
from penstock.topics.layout import CLEAN, HEADER_SIZE, INDEX_SIZE, KINDS, Checkpoint
from penstock.topics.producers import Producer, Producers
from penstock.topics.segment import Segment
from penstock.topics.writer import Mark, Write, Writer

log = logging.getLogger("penstock.topics")

INLINE_BYTES = 1 << 20  # a larger write goes to the pool even when nobody waits for an fsync
COMMIT_BYTES = 64 << 20
BACKLOG_BYTES = 256 << 20  # queued beyond this, appends are refused
UNSYNCED_BYTES = 64 << 20  # held in memory under `interval` before appends wait for the fsync
CHECKPOINT_BYTES = 64 << 20  # written since the last checkpoint: bounds what a restart scans
CHECKPOINT_RECORDS = 1 << 20
RETRY_SECONDS = 1.0


class Recovered(NamedTuple):
    """A topic as found on disk."""

    incarnation: str
    segments: tuple[Segment, ...]  # in order of offsets, the active one last
    next_offset: int
    producers: Producers
    checkpointed: int  # size of the active segment's data at its checkpoint, -1 when there is none
    state: int  # of that checkpoint
    archived: int | None
    policy: str  # delete or compact
    damage: list[dict[str, Any]]


class Unfinished(NamedTuple):
    """A swap of segments whose marker may be on disk: it has to be finished, or taken back, before the next one."""

    marker: str
    fresh: Segment | None  # the compacted segment, once it counts; None: the old ones do


class Log:
    def __init__(self, name: str, directory: Path, context: Context, found: Recovered) -> None:
        self.name = name
        self.directory = directory
        self.incarnation = found.incarnation
        self.next_offset = found.next_offset
        self.deleted = False
        self._context = context
        self._policy = context.settings.fsync
        self._segments = found.segments  # replaced, never changed in place: a reader keeps the tuple it started with
        self._producers = found.producers
        for segment in found.segments:
            self._adopt(segment)
        self._writer = Writer(context.fs, directory, found.segments[-1])
        self._last_time = max(segment.newest for segment in found.segments)
        self._synced = self._mark()
        self._checkpointed = found.checkpointed
        self._checkpointed_rows = found.segments[-1].rows
        self._state = found.state if found.checkpointed >= 0 else -1
        self._pending: list[Entry] = []
        self._pending_bytes = 0
        self._scheduled = False
        self._committing: asyncio.Task[None] | None = None
        self._background: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsynced: list[Write] = []
        self._unsynced_bytes = 0
        self._sync_pending: list[Write] = []  # what the running fsync covers
        self._checkpointing = asyncio.Lock()
        self._seal_wanted: list[tuple[asyncio.Future[None], bool]] = []  # and whether to roll, or only to come to rest
        self.maintenance = asyncio.Lock()  # retention and compaction take turns
        self.unfinished: Unfinished | None = None  # a swap that the disk did not let end; guarded by `maintenance`
        self._stopping = False
        self.last_used = time.monotonic()

    def _adopt(self, segment: Segment) -> None:
        segment.on_open = self._context.open_files.opened
        segment.on_mismatch = self._note_mismatch

    def _note_mismatch(self, segment: Segment) -> None:
        segment.on_mismatch = None  # once is enough
        self._context.instruments.damage.add(1, "walked")
        log.warning(
            "topic %s: index and data of segment %d disagree, `verify` tells where; reading without the index there",
            self.name,
            segment.base,
        )

    # Appending

    def append(self, payloads: Sequence[Bytes], producer: Producer | None = None) -> "asyncio.Future[Appended]":
        """Append the payloads as one batch, all or none."""
        count = len(payloads)
        if not count:
            raise InvalidRequest("a batch has at least one record")
        size = 0
        for payload in payloads:
            length = len(payload)
            if length > self._context.settings.max_record:
                raise self._too_large(length)
            size += length
        return self._enqueue(payloads, None, count, size, producer)

    def append_arrays(
        self, lengths: np.ndarray, payloads: memoryview, producer: Producer | None = None
    ) -> "asyncio.Future[Appended]":
        """Append payloads that lie one after another in `payloads`, as one batch, without a look at each."""
        count = len(lengths)
        if not count:
            raise InvalidRequest("a batch has at least one record")
        wide = lengths.astype(np.int64)
        largest = int(wide.max())
        if int(wide.min()) < 0 or int(wide.sum()) != len(payloads):
            raise InvalidRequest(f"the lengths add up to {int(wide.sum())}, the payloads have {len(payloads)} bytes")
        if largest > self._context.settings.max_record:
            raise self._too_large(largest)
        return self._enqueue((payloads,), wide, count, len(payloads), producer)

    def _too_large(self, length: int) -> TooLarge:
        return TooLarge(f"a record has at most {self._context.settings.max_record} bytes, this one has {length}")

    def _enqueue(
        self,
        payloads: Sequence[Bytes],
        lengths: np.ndarray | None,
        count: int,
        size: int,
        producer: Producer | None,
    ) -> "asyncio.Future[Appended]":
        if self.deleted:
            raise NotFound(f"topic {self.name!r} was deleted")
        if self._stopping:
            raise Unavailable("the broker is stopping")
        if producer is not None and len(producer.id) != 16:
            raise InvalidRequest(f"a producer id has 16 bytes, this one has {len(producer.id)}")
        size += HEADER_SIZE * count
        if self._pending_bytes and self._pending_bytes + size > BACKLOG_BYTES:
            raise Unavailable(f"topic {self.name!r} has {self._pending_bytes} bytes waiting for the disk")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Appended] = loop.create_future()
        self._pending.append(Entry(payloads, lengths, count, size, producer, future))
        self._pending_bytes += size
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush)
        return future

    def _flush(self) -> None:
        self._scheduled = False
        if self._committing is not None or not self._has_work:
            return
        inline = (
            not self._seal_wanted
            and self._state == self._context.open_state
            and self._policy in ("interval", "never")
            and self._pending_bytes <= INLINE_BYTES
            and self._unsynced_bytes < UNSYNCED_BYTES
            and not self._writer.broken
            and not self._must_roll(self._pending_bytes)
        )
        if inline:
            entries, self._pending, self._pending_bytes = self._pending, [], 0
            self._commit_inline(entries)
        else:
            self._committing = asyncio.get_running_loop().create_task(self._commit_all())

    def _commit_inline(self, entries: list[Entry]) -> None:
        try:
            commit = self._put_together(entries)
            if commit.write.count:
                self._writer.segment.pinned = True
                self._writer.write(commit.write, False)
        except (StorageFull, StorageFailed, NotFound) as error:
            self._fail(entries, error)
        except BaseException:
            self._fail(entries, StorageFailed(f"appending to {self.name!r} failed, see the log"))
            raise
        else:
            self._publish(commit)

    async def _commit_all(self) -> None:
        try:
            while self._has_work:
                if self._seal_wanted:
                    await self._seal_for_others()
                else:
                    await self._commit(self._take())
        finally:
            self._committing = None
            self._unpin()
            if self._pending:  # only after an unexpected error: the next ones get a new chance
                self._schedule()

    def _take(self) -> list[Entry]:
        """The next commit's appends: one under `always`, otherwise all that wait."""
        count, size = 0, 0
        for entry in self._pending:
            if count and (self._policy == "always" or size + entry.size > COMMIT_BYTES):
                break
            count += 1
            size += entry.size
        taken = self._pending[:count]
        del self._pending[:count]
        self._pending_bytes -= size
        return taken

    async def _commit(self, entries: list[Entry]) -> None:
        size = sum(entry.size for entry in entries)
        try:
            if self._writer.broken:
                await self._repair()
            if self._must_roll(size):
                await self._roll()
            if self._unsynced_bytes >= UNSYNCED_BYTES:
                await self._sync_now()
            if self._state != self._context.open_state:
                await self._settle()
                await self._write_checkpoint()
            if self.deleted:
                raise NotFound(f"topic {self.name!r} was deleted")
            commit = self._put_together(entries)
            if commit.write.count:
                self._writer.segment.pinned = True
                started = time.perf_counter()
                sync = self._policy in ("always", "group")
                await self._context.run(self._writer.write, commit.write, sync)
                if sync:
                    self._context.instruments.sync_seconds.observe(time.perf_counter() - started)
        except (StorageFull, StorageFailed, NotFound) as error:
            self._fail(entries, error)
        except BaseException:
            self._fail(entries, StorageFailed(f"appending to {self.name!r} failed, see the log"))
            raise
        else:
            self._publish(commit)

    def _must_roll(self, size: int) -> bool:
        limit = self._context.settings.segment_bytes
        return bool(limit) and self._segments[-1].data_size > 0 and self._segments[-1].data_size + size > limit

    def _put_together(self, entries: list[Entry]) -> Commit:
        self._context.take_space(sum(entry.size for entry in entries))
        self._last_time = max(self._context.now(), self._last_time + 1)  # distinct: it also tells commits apart
        position = self._segments[-1].data_size
        return Commit(entries, self.next_offset, position, self._last_time, self._producers)

    def _publish(self, commit: Commit) -> None:
        """The commit satisfied the policy: it is visible and answered from here on."""
        self.last_used = time.monotonic()
        write, instruments = commit.write, self._context.instruments
        if write.count:
            segment = self._segments[-1]
            segment.data_size += write.size
            segment.rows += write.count
            segment.batches_size += sum(map(len, write.batches))
            segment.newest = write.time
            segment.end = self.next_offset = write.first + write.count
            instruments.commits.add()
            instruments.records.add(write.count, self.name)
            instruments.bytes.add(write.size, self.name)
        if commit.duplicates:
            instruments.duplicates.add(commit.duplicates)
        commit.succeed()
        if write.count:
            self._after_write(write)
            self._notify()

    def _notify(self) -> None:
        """Something became visible."""

    def _after_write(self, job: Write) -> None:
        if self._policy == "interval":
            self._unsynced.append(job)
            self._unsynced_bytes += job.size
            if self._timer is None and self._background is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._context.settings.fsync_interval, self._start_sync)
        elif self._policy != "never":
            self._synced = self._mark()
        self._maybe_checkpoint()
        self._unpin()

    def _fail(self, entries: list[Entry], error: PenstockError) -> None:
        self._context.instruments.failures.add(1, type(error).__name__)
        if self._writer.broken:
            log.error("topic %s: segment %d is closed: %s", self.name, self._segments[-1].base, self._writer.broken)
        for entry in entries:
            if entry.producer is not None and not entry.future.done():
                self._producers.expect(entry.producer, self._last_time)
            entry.refuse(error)
        self._unpin()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    # Syncing, rolling, repairing

    def _mark(self) -> Mark:
        segment = self._segments[-1]
        return Mark(self.next_offset, segment.rows, segment.data_size, segment.batches_size, segment.newest)

    def _unpin(self) -> None:
        self._segments[-1].pinned = bool(
            self._unsynced or self._sync_pending or self._committing or self._background or self._writer.broken
        )

    @property
    def _has_work(self) -> bool:
        return bool(self._pending or self._seal_wanted or self._rescue_needed)

    @property
    def _rescue_needed(self) -> bool:
        """Answered records are only in memory and in a broken segment."""
        return bool(self._writer.broken and self._unsynced and self._timer is None and not self.deleted)

    def _start_sync(self) -> None:
        self._timer = None
        if self._writer.broken:
            self._schedule()
        elif self._background is None and self._unsynced and not self.deleted:
            self._background = asyncio.get_running_loop().create_task(self._sync_in_background())

    async def _sync_in_background(self) -> None:
        try:
            await self._sync()
        except (StorageFull, StorageFailed) as error:
            log.error(
                "topic %s: fsync failed, moving %d bytes to a new segment: %s", self.name, self._unsynced_bytes, error
            )
        finally:
            self._background = None
            if self._writer.broken:
                self._schedule()
            elif self._unsynced and self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._context.settings.fsync_interval, self._start_sync)
            self._unpin()

    async def _sync(self) -> None:
        """One fsync over everything visible; on failure what it should have covered stays in memory."""
        mark = self._mark()
        self._sync_pending, self._unsynced = self._unsynced, []
        size, self._unsynced_bytes = self._unsynced_bytes, 0
        try:
            await self._context.run(self._writer.sync)
        except (StorageFull, StorageFailed):
            self._unsynced = self._sync_pending + self._unsynced
            self._unsynced_bytes += size
            raise
        else:
            self._synced = mark
        finally:
            self._sync_pending = []
        self._maybe_checkpoint()

    async def _settle(self) -> None:
        """Wait until no fsync or checkpoint runs beside us."""
        while self._background is not None:
            await asyncio.wait([self._background])

    async def _sync_now(self) -> None:
        await self._settle()
        if self._writer.broken:
            await self._repair()
        elif self._unsynced:
            await self._sync()

    async def _repair(self) -> None:
        """Close the broken segment and go on in a new one, from memory."""
        await self._settle()
        why = self._writer.broken
        carried = self._unsynced
        durable = self._synced if self._policy == "interval" else self._mark()
        base = carried[0].first if carried else self.next_offset
        try:
            sealed, fresh = await self._context.run(self._writer.switch, base, durable, carried)
        except (StorageFull, StorageFailed):
            self._retry_later()
            raise
        self._context.instruments.broken.add()
        log.warning("topic %s: a segment was closed (%s), a new one begins at offset %d", self.name, why, base)
        self._install(sealed, fresh)
        self._unsynced, self._unsynced_bytes = [], 0
        if sealed is not None:
            await self._context.run(self._writer.trim, sealed)
        await self._write_checkpoint()

    def _retry_later(self) -> None:
        if self._unsynced and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._start_sync)

    def _install(self, sealed: Segment | None, fresh: Segment) -> None:
        self._context.open_files.closed(self._segments[-1])
        kept = self._segments[:-1]
        self._segments = (*kept, sealed, fresh) if sealed is not None else (*kept, fresh)
        for segment in self._segments[len(kept) :]:
            self._adopt(segment)
        self._synced = self._mark()
        self._state = -1  # the checkpoint still speaks of the segment before

    async def seal(self) -> None:
        """Seal the active segment and start an empty one; nothing happens when it is empty."""
        await self._between_commits(roll=True)

    async def rest(self) -> None:
        """Until no segment is being repaired and the checkpoint on disk speaks of the active one.

        From then on the checkpoint knows the producers of all sealed segments, whose sidecars are no longer asked.
        """
        await self._between_commits(roll=False)

    async def _between_commits(self, *, roll: bool) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seal_wanted.append((future, roll))
        self._schedule()
        await future

    async def _seal_for_others(self) -> None:
        waiting, self._seal_wanted = self._seal_wanted, []
        try:
            if self._writer.broken:
                await self._repair()
            if any(roll for _, roll in waiting):
                await self._roll()
            elif self._state != self._context.open_state:
                await self._settle()
                await self._write_checkpoint()
        except (StorageFull, StorageFailed) as error:
            for future, _ in waiting:
                if not future.done():
                    future.set_exception(type(error)(str(error)))
        else:
            for future, _ in waiting:
                if not future.done():
                    future.set_result(None)

    async def _roll(self) -> None:
        """Runs between commits only: nothing is being written to the segment it seals."""
        await self._settle()
        active = self._segments[-1]
        if not active.rows:
            return
        active.pinned = True
        await self._context.run(self._writer.sync_all)
        self._unsynced, self._unsynced_bytes = [], 0
        self._synced = self._mark()
        sealed, fresh = await self._context.run(self._writer.switch, self.next_offset, self._synced, [])
        self._install(sealed, fresh)
        await self._write_checkpoint()

    async def drop(self, segments: Sequence[Segment]) -> None:
        """Forget the oldest segments and remove their files. When none is left beside an empty active one, the
        checkpoint is what remembers the next offset, so it is written first."""
        gone = set(map(id, segments))
        if not self._segments[-1].rows:
            await self._write_checkpoint()
        self._segments = tuple(segment for segment in self._segments if id(segment) not in gone)
        for segment in segments:
            self._context.open_files.closed(segment)
            await self._context.run(remove_files, segment)

    def swapped(self, old: Sequence[Segment], fresh: Segment) -> None:
        """A compacted segment takes the place of these: readers that come now see it, through its open files."""
        at = self._segments.index(old[0])
        self._segments = (*self._segments[:at], fresh, *self._segments[at + len(old) :])
        self._adopt(fresh)
        self._context.open_files.opened(fresh)
        for segment in old:
            segment.on_mismatch = None  # whoever still reads it may meet files of both: it looks again
            self._context.open_files.closed(segment)

    # Checkpoints

    def _maybe_checkpoint(self) -> None:
        segment = self._segments[-1]
        due = (
            segment.data_size - self._checkpointed >= CHECKPOINT_BYTES
            or segment.rows - self._checkpointed_rows >= CHECKPOINT_RECORDS
        )
        if due and self._background is None and not self._writer.broken:
            self._background = asyncio.get_running_loop().create_task(self._checkpoint_in_background())

    async def _checkpoint_in_background(self) -> None:
        try:
            await self._write_checkpoint()
        except (StorageFull, StorageFailed) as error:
            log.warning("topic %s: no checkpoint could be written: %s", self.name, error)
        finally:
            self._background = None
            if self._writer.broken:
                self._schedule()
            elif self._unsynced and self._timer is None:
                self._start_sync()
            self._unpin()

    async def checkpoint(self) -> None:
        """Note how far the active segment is durable, unless that is known; only when nothing is being written."""
        if self._segments[-1].data_size != self._checkpointed or self._state != CLEAN:
            await self._write_checkpoint(CLEAN)
            self._unsynced, self._unsynced_bytes = [], 0

    async def _write_checkpoint(self, state: int | None = None) -> None:
        """One at a time, so that the last one written is the last one asked for.

        While the state on disk is being changed it counts as unknown, and a commit that wants another one waits.
        """
        wanted = self._context.open_state if state is None else state
        async with self._checkpointing:
            if self._state != wanted:
                self._state = -1
            self._producers.forget_before(self._context.now())
            mark = self._mark()
            checkpoint = Checkpoint(
                incarnation=bytes.fromhex(self.incarnation),
                next_offset=mark.next_offset,
                base=self._segments[-1].base,
                data_size=mark.data_size,
                index_size=mark.rows * INDEX_SIZE,
                batches_size=mark.batches_size,
                last_time=self._last_time,
                state=wanted,
                producers=self._producers.entries,
            )
            self._checkpointed, self._checkpointed_rows = mark.data_size, mark.rows
            try:
                await self._context.run(self._writer.checkpoint, checkpoint.pack(), mark.next_offset)
            except (StorageFull, StorageFailed):
                self._state = -1
                raise
            self._state = wanted

    # Coming to rest

    async def drain(self) -> None:
        """Until everything queued is answered and nothing runs in the pool."""
        while self._has_work or self._committing is not None or self._background is not None or self._scheduled:
            running = [task for task in (self._committing, self._background) if task is not None]
            if running:
                await asyncio.wait(running)
            else:
                self._schedule()
                await asyncio.sleep(0)

    @property
    def ending(self) -> bool:
        """Deleted, or the broker stops: maintenance gives up."""
        return self.deleted or self._stopping

    def close_files(self) -> None:
        for segment in self._segments:
            segment.forget_files()
            self._context.open_files.closed(segment)

    @property
    def idle(self) -> bool:
        busy = self._segments[-1].pinned or self._pending or self._committing or self._background
        return not (busy or self.maintenance.locked() or self.unfinished)


def remove_files(segment: Segment) -> None:
    """The data last: a data file missing beside its index is damage, never an interrupted removal."""
    for kind in KINDS:
        segment.fs.remove(segment.path(kind))
    segment.forget_files()  # here in the pool: the last close of a removed file gives its blocks back
    segment.fs.sync_dir(segment.directory)
