"""The segments of a topic and how much of them is durable: fsyncs, rolls, repairs, checkpoints.

Under `interval`, acknowledged data that is not yet synced is also kept in memory. So a failed fsync
loses nothing while the process lives: the segment is closed, and a new one is started from memory
(see `penstock.log.writer`).

The event loop owns all state; only disk work runs elsewhere. One task may run in the background:
the fsync of `interval`, or a checkpoint. Only the commit loop (`penstock.log.appender`) writes,
rolls and repairs, one step at a time. Files are renamed only after the background task has ended.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.errors import StorageError
from penstock.io.tasks import RETRY_SECONDS
from penstock.log.context import Context
from penstock.log.layout import BATCHES, CLEAN, INDEX, Checkpoint
from penstock.log.recovery import RecoveredTopic
from penstock.log.segment import Segment, Write
from penstock.log.writer import SegmentWriter

log = logging.getLogger("penstock.topics")

MAX_UNSYNCED_BYTES = 64 << 20  # in memory under `interval`; beyond it, appends wait for the fsync
CHECKPOINT_BYTES = 64 << 20  # between checkpoints; bounds the scan after a restart
CHECKPOINT_RECORDS = 1 << 20
UNKNOWN = -1  # state: the checkpoint on disk does not describe the active segment


class SegmentStore:
    """The segments of one log. `on_broken` is called when the commit loop must repair a segment,
    because acknowledged records are only in memory and in a broken segment.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        context: Context,
        recovered: RecoveredTopic,
        on_broken: Callable[[], None],
    ) -> None:
        self._name = name
        self._context = context
        self.format = recovered.format
        self._relaxed = context.settings.fsync == "interval"
        self._incarnation = bytes.fromhex(recovered.incarnation)
        self._on_broken = on_broken
        # In order of offsets, the active one last. Replaced, never changed in place: a reader keeps
        # the tuple it started with.
        self.all = recovered.segments
        self.active = self.all[-1]  # readers see the offsets below its end
        self.start = recovered.limits.start  # records before this offset were deleted
        self.producers = recovered.producers
        self.writing = False  # the commit loop runs: the active segment's files stay open
        self.background: asyncio.Task[None] | None = None  # an fsync or a checkpoint
        self._abandoned = False  # the topic is deleted: nothing needs to become durable
        for segment in self.all:
            self._adopt(segment)
        self.writer = SegmentWriter(self.format, context.fs, directory, self.active)
        self.last_time = max(segment.newest for segment in self.all)  # of the last commit
        self._synced = self.active.mark()  # under `interval`, all data before it is durable
        # Acknowledged commits that no fsync covers: kept in memory under `interval`.
        self._unsynced: list[Write] = []
        self._unsynced_bytes = 0
        self._syncing: list[Write] = []  # the commits that the running fsync covers
        self._timer: asyncio.TimerHandle | None = None  # of the next fsync
        # At the last checkpoint, which may be of the previous segment.
        self._checkpointed_bytes = recovered.checkpointed
        self._checkpointed_rows = self.active.rows
        self._state = recovered.state if recovered.checkpointed >= 0 else UNKNOWN
        self._checkpointing = asyncio.Lock()

    @property
    def first(self) -> int:
        """Return the first offset that readers see."""
        base = self.all[0].base
        return base if self.start <= base else max(base, min(self.start, self.active.end))

    @property
    def busy(self) -> bool:
        return self.active.pinned or self.background is not None

    def _adopt(self, segment: Segment) -> None:
        segment.on_open = self._context.open_files.opened
        segment.on_mismatch = self._note_mismatch

    def _note_mismatch(self, segment: Segment) -> None:
        segment.on_mismatch = None  # report it only once
        self._context.instruments.damage.add(1, "walked")
        log.warning(
            "topic %s: index and data of segment %d disagree, so it is read without the index; "
            "`verify` shows the place",
            self._name,
            segment.base,
        )

    # One commit: prepare, write, publish

    def is_prepared(self, size: int) -> bool:
        """Return whether a commit of so many bytes can be written at once."""
        return (
            self._state == self._context.open_state
            and self._unsynced_bytes < MAX_UNSYNCED_BYTES
            and not self.active.broken
            and not self._must_roll(size)
        )

    async def prepare(self, size: int) -> None:
        """Repair a broken segment, roll a full one, sync if too much is unsynced, and write a
        checkpoint with the state of a segment that is being written.
        """
        if self.active.broken:
            await self.repair()
        if self._must_roll(size):
            await self._roll()
        if self._unsynced_bytes >= MAX_UNSYNCED_BYTES:
            await self._sync_now()
        await self._mark_open()

    def _must_roll(self, size: int) -> bool:
        limit, used = self._context.settings.segment_bytes, self.active.data_size
        return bool(limit) and used > 0 and used + size > limit

    async def _mark_open(self) -> None:
        if self._state != self._context.open_state:
            await self._wait_for_background()
            await self._write_checkpoint()

    def next_time(self) -> int:
        """Return the append time of a commit, which differs from all earlier ones."""
        self.last_time = max(int(self._context.clock() * 1e6), self.last_time + 1)
        return self.last_time

    def start_write(self, write: Write, done: Callable[[BaseException | None], None]) -> None:
        """Write a commit in the pool, with the fsyncs of the policy; then call `done` on the loop.

        This creates no future and wakes no task, which is the cheapest way to use a thread
        (docs/decisions/storage.md).
        """
        self.active.pinned = True
        write.started = time.perf_counter()
        self._context.pool.submit(self._write_in_thread, write, asyncio.get_running_loop(), done)

    def _write_in_thread(
        self,
        write: Write,
        loop: asyncio.AbstractEventLoop,
        done: Callable[[BaseException | None], None],
    ) -> None:
        error: BaseException | None = None
        try:
            self.writer.write(write, self._context.strict)
        except BaseException as caught:  # noqa: BLE001 - `done` handles it on the loop
            error = caught
        loop.call_soon_threadsafe(done, error)

    def publish(self, write: Write) -> None:
        """Make a commit visible to readers, once it satisfies the fsync policy."""
        self.active.extend(write)
        if self._relaxed:
            self.active.pinned = True  # its next fsync must be that of the same open files
            self._unsynced.append(write)
            self._unsynced_bytes += write.size
            if self.background is None and self._timer is None:
                self._sync_later(self._context.settings.fsync_interval)
        elif self._context.strict:
            seconds = time.perf_counter() - write.started
            self._context.instruments.sync_seconds.observe(seconds)
        self._checkpoint_if_due()

    def release(self) -> None:
        """Let the active segment's files be closed, unless they are still needed."""
        self.active.pinned = bool(
            self._unsynced or self._syncing or self.writing or self.background or self.active.broken
        )

    # Syncing

    def _sync_later(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._start_sync)

    def _start_sync(self) -> None:
        self._timer = None
        if self.active.broken:
            self._rescue()
        elif self.background is None and self._unsynced and not self._abandoned:
            self.background = asyncio.get_running_loop().create_task(self._sync_in_background())

    async def _sync_in_background(self) -> None:
        try:
            await self._sync()
        except StorageError as error:
            log.error(
                "topic %s: fsync failed, moving %d bytes to a new segment: %s",
                self._name,
                self._unsynced_bytes,
                error,
            )
        finally:
            self.background = None
            if self.active.broken:
                self._rescue()
            elif self._unsynced:
                self._sync_later(self._context.settings.fsync_interval)
            self.release()

    async def _sync(self) -> None:
        """Sync all visible data. If the fsync fails, its commits stay in memory."""
        mark = self.active.mark()
        self._syncing, self._unsynced = self._unsynced, []
        size, self._unsynced_bytes = self._unsynced_bytes, 0
        try:
            await self._context.run(self.writer.sync)
        except StorageError:
            self._unsynced = self._syncing + self._unsynced
            self._unsynced_bytes += size
            raise
        else:
            self._synced = mark
        finally:
            self._syncing = []
        self._checkpoint_if_due()

    async def _sync_now(self) -> None:
        await self._wait_for_background()
        if self.active.broken:
            await self.repair()
        elif self._unsynced:
            await self._sync()

    async def _wait_for_background(self) -> None:
        while self.background is not None:
            await asyncio.wait([self.background])

    async def _stop_syncing(self) -> None:
        """Stop syncing before the active segment changes. An fsync that began in between would
        apply its mark and its commits to the wrong segment.
        """
        await self._wait_for_background()
        self._cancel_timer()

    def _clear_unsynced(self) -> None:
        self._unsynced, self._unsynced_bytes = [], 0

    # Repairing, rolling, replacing

    def _rescue(self) -> None:
        """Ask for a repair of the broken segment if acknowledged records are only in memory."""
        if self._unsynced and not self._abandoned:
            self._on_broken()

    async def repair(self) -> None:
        """Close the broken segment and continue in a new one, from memory."""
        await self._stop_syncing()
        reason = self.active.broken
        carried = self._unsynced
        durable = self._synced if self._relaxed else self.active.mark()
        base = carried[0].first if carried else self.active.end
        try:
            sealed, fresh = await self._context.run(self.writer.switch, base, durable, carried)
        except StorageError:
            if self._unsynced:
                self._sync_later(RETRY_SECONDS)
            raise
        self._context.instruments.broken.add()
        log.warning(
            "topic %s: a segment was closed (%s), a new one begins at offset %d",
            self._name,
            reason,
            base,
        )
        self._install(sealed, fresh)
        self._clear_unsynced()
        if sealed is not None:
            await self._context.run(self.writer.trim, sealed)
        await self._write_checkpoint()

    def _install(self, sealed: Segment | None, fresh: Segment) -> None:
        self._context.open_files.closed(self.active)
        added = (sealed, fresh) if sealed is not None else (fresh,)
        self.all, self.active = (*self.all[:-1], *added), fresh
        for segment in added:
            self._adopt(segment)
        self._synced = self.active.mark()
        self._state = UNKNOWN  # the checkpoint still describes the previous segment

    async def rest(self, *, roll: bool) -> None:
        """Bring the segments to rest between commits: repair a broken one, and let the checkpoint
        on disk describe the active one. With `roll`, replace an active one that has records.
        """
        if self.active.broken:
            await self.repair()
        if roll:
            await self._roll()
        else:
            await self._mark_open()

    async def _roll(self) -> None:
        """Seal the active segment, to which nothing is being written, and start a new one."""
        await self._stop_syncing()
        active = self.active
        if not active.rows:
            return
        active.pinned = True
        try:
            await self._context.run(self.writer.sync_all)
        except StorageError:
            self._rescue()
            raise
        self._clear_unsynced()
        self._synced = active.mark()
        sealed, fresh = await self._context.run(self.writer.switch, active.end, self._synced, [])
        self._install(sealed, fresh)
        await self._write_checkpoint()

    async def skip_to(self, offset: int) -> None:
        """Let the active segment, which is empty, begin at `offset`."""
        active = self.active
        active.begin_at(offset)
        self._synced = active.mark()
        await self._write_checkpoint()

    async def drop(self, segments: Sequence[Segment]) -> None:
        """Forget the oldest segments and remove their files. If only an empty active one is left,
        just the checkpoint has the next offset, so it is written first.
        """
        gone = set(map(id, segments))
        if not self.active.rows:
            await self._write_checkpoint()
        self.all = tuple(segment for segment in self.all if id(segment) not in gone)
        for segment in segments:
            if segment.local:
                self._context.open_files.closed(segment)
                await self._context.run(remove_files, segment)

    async def replace_local(self, segment: Segment, tiered: Segment) -> None:
        """Read the segment from the tier from now on, and remove its files."""
        self.replace([segment], tiered)
        await self._context.run(remove_files, segment)

    def attach(self, tiered: Sequence[Segment]) -> None:
        """Add segments that are in the tier only and were unknown when the topic was opened."""
        sealed = sorted([*tiered, *self.all[:-1]], key=lambda segment: segment.base)
        self.all = (*sealed, self.all[-1])

    def replace(self, old: Sequence[Segment], fresh: Segment) -> None:
        """Replace segments by another one. Its files stay open for readers."""
        at = self.all.index(old[0])
        self.all = (*self.all[:at], fresh, *self.all[at + len(old) :])
        self._adopt(fresh)
        if fresh.local:
            self._context.open_files.opened(fresh)
        for segment in old:
            # a reader may see files of both; it then reads again
            segment.on_mismatch = None
            self._context.open_files.closed(segment)

    # Checkpoints

    def _checkpoint_if_due(self) -> None:
        active = self.active
        due = (
            active.data_size - self._checkpointed_bytes >= CHECKPOINT_BYTES
            or active.rows - self._checkpointed_rows >= CHECKPOINT_RECORDS
        )
        if due and self.background is None and not self.active.broken:
            self.background = asyncio.get_running_loop().create_task(
                self._checkpoint_in_background()
            )

    async def _checkpoint_in_background(self) -> None:
        try:
            await self._write_checkpoint()
        except StorageError as error:
            log.warning("topic %s: the checkpoint could not be written: %s", self._name, error)
        finally:
            self.background = None
            if self.active.broken:
                self._rescue()
            elif self._unsynced and self._timer is None:
                self._start_sync()
            self.release()

    async def checkpoint(self) -> None:
        """Write a checkpoint if the last one is out of date. Nothing may be being written."""
        if self.active.data_size != self._checkpointed_bytes or self._state != CLEAN:
            await self._write_checkpoint(CLEAN)
            self._clear_unsynced()

    async def _write_checkpoint(self, state: int | None = None) -> None:
        """Write a checkpoint, one at a time, so that the last one requested is written last.

        While the state on disk is being changed it counts as unknown, and a commit that needs
        another state waits.
        """
        wanted = self._context.open_state if state is None else state
        async with self._checkpointing:
            if self._state != wanted:
                self._state = UNKNOWN
            self.producers.forget_before(self._context.now())
            mark = self.active.mark()
            checkpoint = Checkpoint(
                incarnation=self._incarnation,
                next_offset=mark.end,
                base=self.active.base,
                data_size=mark.data_size,
                index_size=mark.sizes[INDEX],
                batches_size=mark.sizes.get(BATCHES, 0),
                last_time=self.last_time,
                state=wanted,
                producers=self.producers.entries,
            )
            self._checkpointed_bytes, self._checkpointed_rows = mark.data_size, mark.rows
            try:
                companions = self.format.companions(self.active, mark)
                await self._context.run(self.writer.checkpoint, checkpoint.pack(), companions)
            except StorageError:
                self._state = UNKNOWN
                raise
            self._state = wanted

    # Ending

    async def stop(self) -> None:
        """Make everything durable and write a checkpoint."""
        self._cancel_timer()
        if self.active.broken:
            await self.repair()
        await self.checkpoint()

    def abandon(self) -> None:
        """Note that the topic is deleted: nothing needs to become durable any more."""
        self._abandoned = True

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Close the files, and drop data that could not be made durable."""
        self._cancel_timer()
        self._clear_unsynced()
        for segment in self.all:
            segment.forget_files()
            self._context.open_files.closed(segment)


def remove_files(segment: Segment) -> None:
    """Remove the data last: its absence beside an index is damage, not an interrupted removal."""
    for kind in segment.kinds:
        segment.fs.remove(segment.path(kind))
    # close them here, in the pool: the last close of a removed file frees its blocks
    segment.forget_files()
    segment.fs.sync_dir(segment.directory)
