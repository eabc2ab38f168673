"""The segments of a topic and how much of them is durable: fsyncs, rolls, repairs, checkpoints.

Under `interval` what is answered but not yet synced is also kept in memory, so that a failed fsync
loses nothing while the process lives: the segment is closed and a new one is started from that
memory (see `penstock.log.writer`).

Two tasks may run for a topic: the commit loop (commits, rolls, repairs: whatever writes; see
`penstock.log.log`) and one in the background (the fsync of `interval`, a checkpoint). Whoever
renames files waits for the latter first.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.errors import StorageFailed, StorageFull
from penstock.log.context import Context
from penstock.log.damage import Damage
from penstock.log.layout import CLEAN, INDEX_SIZE, KINDS, Checkpoint
from penstock.log.producers import Producers
from penstock.log.segment import Segment
from penstock.log.writer import Mark, Write, Writer

log = logging.getLogger("penstock.topics")

UNSYNCED_BYTES = 64 << 20  # held in memory under `interval` before appends wait for the fsync
CHECKPOINT_BYTES = 64 << 20  # written since the last checkpoint: bounds what a restart scans
CHECKPOINT_RECORDS = 1 << 20
RETRY_SECONDS = 1.0


class Recovered(NamedTuple):
    """A topic as found on disk."""

    incarnation: str
    incarnation_lost: bool  # it is a new one, for a topic that had one
    segments: tuple[Segment, ...]  # in order of offsets, the active one last
    next_offset: int
    producers: Producers
    checkpointed: int  # size of the active segment's data at its checkpoint, -1 when there is none
    state: int  # of that checkpoint
    archived: int | None
    policy: str  # delete or compact
    damage: Damage


class Unfinished(NamedTuple):
    """A swap of segments whose marker may be on disk: it has to be finished, or taken back, before
    the next one.
    """

    marker: str
    fresh: Segment | None  # the compacted segment, once it counts; None: the old ones do


class DurableLog:
    def __init__(self, name: str, directory: Path, context: Context, found: Recovered) -> None:
        self.name = name
        self.directory = directory
        self.incarnation = found.incarnation
        self.next_offset = found.next_offset
        self.deleted = False
        self._context = context
        self._policy = context.settings.fsync
        self._segments = (
            found.segments
        )  # replaced, never changed in place: a reader keeps the tuple it started with
        self._producers = found.producers
        for segment in found.segments:
            self._adopt(segment)
        self._writer = Writer(context.fs, directory, found.segments[-1])
        self._last_time = max(segment.newest for segment in found.segments)
        self._synced = self._mark()
        self._checkpointed = found.checkpointed
        self._checkpointed_rows = found.segments[-1].rows
        self._state = found.state if found.checkpointed >= 0 else -1
        self._committing: asyncio.Task[None] | None = None
        self._background: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsynced: list[Write] = []
        self._unsynced_bytes = 0
        self._sync_pending: list[Write] = []  # what the running fsync covers
        self._checkpointing = asyncio.Lock()
        self.unfinished: Unfinished | None = (
            None  # a swap that the disk did not let end; guarded by `maintenance`
        )

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

    def _schedule(self) -> None:
        """See to it that the commit loop runs: there is something to write."""
        raise NotImplementedError

    # Syncing, repairing, rolling

    def _mark(self) -> Mark:
        segment = self._segments[-1]
        return Mark(
            self.next_offset, segment.rows, segment.data_size, segment.batches_size, segment.newest
        )

    def _unpin(self) -> None:
        self._segments[-1].pinned = bool(
            self._unsynced
            or self._sync_pending
            or self._committing
            or self._background
            or self._writer.broken
        )

    def _after_write(self, job: Write) -> None:
        if self._policy == "interval":
            self._unsynced.append(job)
            self._unsynced_bytes += job.size
            if self._timer is None and self._background is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(
                    self._context.settings.fsync_interval, self._start_sync
                )
        elif self._policy != "never":
            self._synced = self._mark()
        self._maybe_checkpoint()
        self._unpin()

    @property
    def _rescue_needed(self) -> bool:
        """Answered records are only in memory and in a broken segment."""
        return bool(
            self._writer.broken and self._unsynced and self._timer is None and not self.deleted
        )

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
                "topic %s: fsync failed, moving %d bytes to a new segment: %s",
                self.name,
                self._unsynced_bytes,
                error,
            )
        finally:
            self._background = None
            if self._writer.broken:
                self._schedule()
            elif self._unsynced and self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(
                    self._context.settings.fsync_interval, self._start_sync
                )
            self._unpin()

    async def _sync(self) -> None:
        """One fsync over everything visible; on failure what it should have covered stays in
        memory.
        """
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
        log.warning(
            "topic %s: a segment was closed (%s), a new one begins at offset %d",
            self.name,
            why,
            base,
        )
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
        sealed, fresh = await self._context.run(
            self._writer.switch, self.next_offset, self._synced, []
        )
        self._install(sealed, fresh)
        await self._write_checkpoint()

    async def _skip_to(self, offset: int) -> None:
        """Let the active segment, which is empty, begin here."""
        active = self._segments[-1]
        active.base = active.end = self.next_offset = offset
        self._synced = self._mark()
        await self._write_checkpoint()

    async def drop(self, segments: Sequence[Segment]) -> None:
        """Forget the oldest segments and remove their files. When none is left beside an empty
        active one, the checkpoint is what remembers the next offset, so it is written first."""
        gone = set(map(id, segments))
        if not self._segments[-1].rows:
            await self._write_checkpoint()
        self._segments = tuple(segment for segment in self._segments if id(segment) not in gone)
        for segment in segments:
            self._context.open_files.closed(segment)
            await self._context.run(remove_files, segment)

    def swapped(self, old: Sequence[Segment], fresh: Segment) -> None:
        """A compacted segment takes the place of these: readers that come now see it, through its
        open files.
        """
        at = self._segments.index(old[0])
        self._segments = (*self._segments[:at], fresh, *self._segments[at + len(old) :])
        self._adopt(fresh)
        self._context.open_files.opened(fresh)
        for segment in old:
            segment.on_mismatch = (
                None  # whoever still reads it may meet files of both: it looks again
            )
            self._context.open_files.closed(segment)

    # Checkpoints

    def _maybe_checkpoint(self) -> None:
        segment = self._segments[-1]
        due = (
            segment.data_size - self._checkpointed >= CHECKPOINT_BYTES
            or segment.rows - self._checkpointed_rows >= CHECKPOINT_RECORDS
        )
        if due and self._background is None and not self._writer.broken:
            self._background = asyncio.get_running_loop().create_task(
                self._checkpoint_in_background()
            )

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
        """Note how far the active segment is durable, unless that is known; only when nothing is
        being written.
        """
        if self._segments[-1].data_size != self._checkpointed or self._state != CLEAN:
            await self._write_checkpoint(CLEAN)
            self._unsynced, self._unsynced_bytes = [], 0

    async def _write_checkpoint(self, state: int | None = None) -> None:
        """One at a time, so that the last one written is the last one asked for.

        While the state on disk is being changed it counts as unknown, and a commit that wants
        another one waits.
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
                await self._context.run(
                    self._writer.checkpoint, checkpoint.pack(), mark.next_offset
                )
            except (StorageFull, StorageFailed):
                self._state = -1
                raise
            self._state = wanted

    def close_files(self) -> None:
        for segment in self._segments:
            segment.forget_files()
            self._context.open_files.closed(segment)


def remove_files(segment: Segment) -> None:
    """The data last: a data file missing beside its index is damage, never an interrupted removal."""
    for kind in KINDS:
        segment.fs.remove(segment.path(kind))
    # here in the pool: the last close of a removed file gives its blocks back
    segment.forget_files()
    segment.fs.sync_dir(segment.directory)
