"""A topic: appends that share commits, reads of what is visible, and whoever waits for more.

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
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from penstock.errors import (
    Conflict,
    Damaged,
    InvalidOffset,
    InvalidRequest,
    NotFound,
    PenstockError,
    StorageFailed,
    StorageFull,
    TooLarge,
    Unavailable,
)
from penstock.storage.fs import Bytes
from penstock.topics.context import Context
from penstock.topics.frames import Frame, frame_arrays, frame_payloads
from penstock.topics.layout import (
    ARCHIVED,
    CLEAN,
    HAS_PRODUCER,
    HEADER_SIZE,
    INDEX_SIZE,
    KINDS,
    NO_PRODUCER,
    Checkpoint,
    pack_batch,
    pack_checked,
)
from penstock.topics.producers import Producer, Producers
from penstock.topics.segment import Batch, Raw, Segment, empty_batch
from penstock.topics.writer import Mark, Write, Writer

log = logging.getLogger("penstock.topics")

INLINE_BYTES = 1 << 20  # a larger write goes to the pool even when nobody waits for an fsync
COMMIT_BYTES = 64 << 20
BACKLOG_BYTES = 256 << 20  # queued beyond this, appends are refused
UNSYNCED_BYTES = 64 << 20  # held in memory under `interval` before appends wait for the fsync
CHECKPOINT_BYTES = 64 << 20  # written since the last checkpoint: bounds what a restart scans
CHECKPOINT_RECORDS = 1 << 20
RETRY_SECONDS = 1.0


@dataclass(slots=True)
class Appended:
    first_offset: int
    count: int
    duplicate: bool


class _Entry:
    """One append on its way."""

    __slots__ = ("count", "first", "future", "lengths", "payloads", "producer", "size", "twin")

    def __init__(
        self,
        payloads: Sequence[Bytes],
        lengths: np.ndarray | None,
        count: int,
        size: int,
        producer: Producer | None,
        future: "asyncio.Future[Appended]",
    ) -> None:
        self.payloads = payloads  # with `lengths`: a single buffer that holds them all
        self.lengths = lengths
        self.count = count
        self.size = size  # as records, headers included
        self.producer = producer
        self.future = future
        self.first = -1  # its first offset, once it is part of a commit
        self.twin: _Entry | None = None  # the same batch, earlier in the same commit


class Recovered(NamedTuple):
    """A topic as found on disk."""

    incarnation: str
    segments: tuple[Segment, ...]  # in order of offsets, the active one last
    next_offset: int
    producers: Producers
    checkpointed: int  # size of the active segment's data at its checkpoint, -1 when there is none
    state: int  # of that checkpoint
    archived: int | None
    damage: list[dict[str, Any]]


class Topic:
    def __init__(self, name: str, directory: Path, context: Context, found: Recovered) -> None:
        self.name = name
        self.directory = directory
        self.incarnation = found.incarnation
        self.next_offset = found.next_offset
        self.archived_offset = found.archived
        self.damage = found.damage
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
        self._pending: list[_Entry] = []
        self._pending_bytes = 0
        self._scheduled = False
        self._committing: asyncio.Task[None] | None = None
        self._background: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsynced: list[Write] = []
        self._unsynced_bytes = 0
        self._sync_pending: list[Write] = []  # what the running fsync covers
        self._subscribers: dict[int, Callable[[], None]] = {}
        self._subscriptions = 0
        self._waiters: dict[asyncio.Future[None], int] = {}
        self._seal_wanted: list[asyncio.Future[None]] = []
        self.maintenance = asyncio.Lock()  # retention and compaction take turns
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

    # What it holds

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._segments

    @property
    def first_offset(self) -> int:
        return self._segments[0].base

    @property
    def records(self) -> int:
        return sum(segment.rows for segment in self._segments)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    @property
    def backlog_bytes(self) -> int:
        return self._pending_bytes

    @property
    def broken(self) -> str | None:
        """Why appends fail at the moment, if they do."""
        return self._writer.broken

    def details(self) -> dict[str, Any]:
        return {
            "topic": self.name,
            "incarnation": self.incarnation,
            "first_offset": self.first_offset,
            "next_offset": self.next_offset,
            "records": self.records,
            "bytes": self.size_bytes,
            "producers": len(self._producers.entries),
            "archived_offset": self.archived_offset,
            "broken": self.broken,
            "damage": self.damage,
            "segments": [
                {
                    "base": segment.base,
                    "end": segment.end,
                    "records": segment.rows,
                    "bytes": segment.size,
                    "newest": segment.newest / 1e6,
                    "sealed": segment.sealed,
                }
                for segment in self._segments
            ],
        }

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
        self._pending.append(_Entry(payloads, lengths, count, size, producer, future))
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

    def _commit_inline(self, entries: list[_Entry]) -> None:
        try:
            job = self._build(entries)
            if job.count:
                self._writer.segment.pinned = True
                self._writer.write(job, False)
        except (StorageFull, StorageFailed, NotFound) as error:
            self._fail(entries, error)
        except BaseException:
            self._fail(entries, StorageFailed(f"appending to {self.name!r} failed, see the log"))
            raise
        else:
            self._publish(entries, job)

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

    def _take(self) -> list[_Entry]:
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

    async def _commit(self, entries: list[_Entry]) -> None:
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
            job = self._build(entries)
            if job.count:
                self._writer.segment.pinned = True
                started = time.perf_counter()
                sync = self._policy in ("always", "group")
                await self._context.run(self._writer.write, job, sync)
                if sync:
                    self._context.instruments.sync_seconds.observe(time.perf_counter() - started)
        except (StorageFull, StorageFailed, NotFound) as error:
            self._fail(entries, error)
        except BaseException:
            self._fail(entries, StorageFailed(f"appending to {self.name!r} failed, see the log"))
            raise
        else:
            self._publish(entries, job)

    def _must_roll(self, size: int) -> bool:
        limit = self._context.settings.segment_bytes
        return bool(limit) and self._segments[-1].data_size > 0 and self._segments[-1].data_size + size > limit

    def _build(self, entries: list[_Entry]) -> Write:
        """Lay out a commit: offsets, positions, checksums. Duplicates and gaps drop out here."""
        self._context.take_space(sum(entry.size for entry in entries))
        self._last_time = max(self._context.now(), self._last_time + 1)  # distinct: it also tells commits apart
        segment = self._segments[-1]
        job = Write(self.next_offset, time=self._last_time)
        seen: dict[Producer, _Entry] = {}  # batches of producers in this very commit
        alike: list[_Entry] = []  # neighbours without a producer: they share a sidecar row
        for entry in entries:
            producer = entry.producer
            if producer is None:
                if entry.lengths is None:
                    alike.append(entry)
                    continue
            elif self._is_old(entry, producer, seen):
                continue
            if alike:
                self._add_alike(job, segment, alike)
                alike = []
            if entry.lengths is None:
                frame = frame_payloads(entry.payloads, job.first + job.count, segment.data_size + job.size)
            else:
                view = memoryview(entry.payloads[0])
                frame = frame_arrays(entry.lengths, view, job.first + job.count, segment.data_size + job.size)
            entry.first = job.first + job.count
            _add(job, segment, frame, producer)
        if alike:
            self._add_alike(job, segment, alike)
        return job

    def _add_alike(self, job: Write, segment: Segment, alike: list[_Entry]) -> None:
        first = job.first + job.count
        payloads: list[Bytes] = []
        for entry in alike:
            entry.first = first + len(payloads)
            payloads.extend(entry.payloads)
        _add(job, segment, frame_payloads(payloads, first, segment.data_size + job.size), None)

    def _is_old(self, entry: _Entry, producer: Producer, seen: dict[Producer, _Entry]) -> bool:
        """Whether this append needs no write: it is there already, twice in this commit, or out of order."""
        twin = seen.get(producer)
        if twin is not None:
            entry.twin = twin
            return True
        if Producer(producer.id, producer.sequence - 1) not in seen:  # otherwise it is the next one
            try:
                place = self._producers.earlier(producer)
            except Conflict as error:
                _refuse(entry, error)
                return True
            if place is not None:
                self._context.instruments.duplicates.add()
                _answer(entry, Appended(*place, True))
                return True
        seen[producer] = entry
        return False

    def _publish(self, entries: list[_Entry], job: Write) -> None:
        """The commit satisfied the policy: it is visible and answered from here on."""
        self.last_used = time.monotonic()
        if job.count:
            segment = self._segments[-1]
            segment.data_size += job.size
            segment.rows += job.count
            segment.batches_size += sum(map(len, job.batches))
            segment.newest = job.time
            segment.end = self.next_offset = job.first + job.count
            instruments = self._context.instruments
            instruments.commits.add()
            instruments.records.add(job.count, self.name)
            instruments.bytes.add(job.size, self.name)
        for entry in entries:
            if entry.first >= 0:
                if entry.producer is not None:
                    self._producers.add(entry.producer, entry.first, entry.count, job.time)
                _answer(entry, Appended(entry.first, entry.count, False))
            elif entry.twin is not None:
                _answer(entry, Appended(entry.twin.first, entry.twin.count, True))
        if job.count:
            self._after_write(job)
            self._notify()

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

    def _fail(self, entries: list[_Entry], error: PenstockError) -> None:
        self._context.instruments.failures.add(1, type(error).__name__)
        if self._writer.broken:
            log.error("topic %s: segment %d is closed: %s", self.name, self._segments[-1].base, self._writer.broken)
        for entry in entries:
            if entry.producer is not None and not entry.future.done():
                self._producers.expect(entry.producer, self._last_time)
            _refuse(entry, error)
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
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seal_wanted.append(future)
        self._schedule()
        await future

    async def _seal_for_others(self) -> None:
        waiting, self._seal_wanted = self._seal_wanted, []
        try:
            if self._writer.broken:
                await self._repair()
            await self._roll()
        except (StorageFull, StorageFailed) as error:
            for future in waiting:
                future.set_exception(type(error)(str(error)))
        else:
            for future in waiting:
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
        """A compacted segment took the place of these."""
        at = self._segments.index(old[0])
        self._segments = (*self._segments[:at], fresh, *self._segments[at + len(old) :])
        self._adopt(fresh)
        for segment in old:
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
            state=self._context.open_state if state is None else state,
            producers=self._producers.entries,
        )
        packed = checkpoint.pack()
        self._checkpointed, self._checkpointed_rows = mark.data_size, mark.rows
        try:
            await self._context.run(self._writer.checkpoint, packed, mark.next_offset)
        except (StorageFull, StorageFailed):
            self._state = -1
            raise
        self._state = checkpoint.state

    # Reading

    def read(self, offset: int, max_records: int = 1000, max_bytes: int = 1 << 20, *, strict: bool = False) -> Batch:
        """Visible records from `offset` on, of one segment; at least one when there is one."""
        return self._reading(
            lambda segment, at: segment.read(at, max_records, max_bytes), offset, strict
        ) or empty_batch(max(offset, self.next_offset))

    def raw(self, offset: int, max_bytes: int, max_records: int | None = None, *, strict: bool = False) -> Raw:
        """The same as bytes of the log: where they lie in which file."""
        found = self._reading(lambda segment, at: segment.raw(at, max_bytes, max_records), offset, strict)
        end = max(offset, self.next_offset)
        return found or Raw(end, 0, end, None, 0, 0)

    def _reading(self, read: Callable[[Segment, int], Any], offset: int, strict: bool) -> Any:
        """Call `read` on the segment that holds `offset` (or what follows it), with the offset to start at."""
        while True:
            segments = self._segments
            at = max(offset, segments[0].base)
            if strict and not segments[0].base <= offset <= self.next_offset:
                raise InvalidOffset(f"offset {offset} lies outside {segments[0].base} to {self.next_offset}")
            try:
                return self._read_from(segments, read, at)
            except (Damaged, FileNotFoundError) as error:
                if segments is not self._segments:
                    continue  # retention or compaction took the file away: look again
                if isinstance(error, Damaged):
                    raise
                raise Damaged(f"{Path(str(error.filename)).name} is missing") from error

    def _read_from(self, segments: tuple[Segment, ...], read: Callable[[Segment, int], Any], at: int) -> Any:
        if at >= self.next_offset:
            return None
        low, high = 0, len(segments) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if segments[middle].base <= at:
                low = middle
            else:
                high = middle - 1
        for segment in segments[low:]:
            if at < segment.base:
                self._refuse_gap(segment, at)
            found = read(segment, max(at, segment.base))
            if found.count:
                return found
        return None

    def _refuse_gap(self, following: Segment, at: int) -> None:
        for place in self.damage:
            if place.get("lost_from", -1) <= at < place.get("lost_to", -1):
                raise Damaged(
                    f"{place['file']}: offsets {place['lost_from']} to {place['lost_to'] - 1} are lost", following.base
                )

    def times(self, batch: Batch) -> np.ndarray:
        """Append time of each record, microseconds since 1970."""
        return self.timestamps(batch.offsets)

    def timestamps(self, offsets: np.ndarray) -> np.ndarray:
        segments = self._segments
        bases = np.array([segment.base for segment in segments], np.int64)
        which = np.maximum(np.searchsorted(bases, offsets, "right") - 1, 0)
        found = np.empty(len(offsets), np.int64)
        for i in np.unique(which):
            mask = which == i
            found[mask] = segments[int(i)].times(offsets[mask])
        return found

    def offset_at(self, timestamp: float) -> int:
        """The first offset appended at or after `timestamp` (seconds since 1970); `next_offset` when there is none."""
        microseconds = round(timestamp * 1e6)
        for segment in self._segments:
            offset = segment.offset_at(microseconds)
            if offset is not None:
                return offset
        return self.next_offset

    # Waiting for more

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once after each commit that became visible, and when the topic is deleted."""
        self._subscriptions += 1
        key = self._subscriptions
        self._subscribers[key] = callback
        return lambda: self._subscribers.pop(key, None) and None

    async def wait_for(self, offset: int, timeout: float | None = None) -> bool:
        """Until `offset` can be read (True), or the time is over (False)."""
        if self.deleted:
            raise NotFound(f"topic {self.name!r} was deleted")
        if self.next_offset > offset:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[future] = offset
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiters.pop(future, None)
        return True

    def _notify(self) -> None:
        if self._waiters:
            for future in [f for f, offset in self._waiters.items() if offset < self.next_offset]:
                del self._waiters[future]
                if not future.done():
                    future.set_result(None)
        if self._subscribers:
            for callback in tuple(self._subscribers.values()):
                callback()

    # Ending

    async def drain(self) -> None:
        """Until everything queued is answered and nothing runs in the pool."""
        while self._has_work or self._committing is not None or self._background is not None or self._scheduled:
            running = [task for task in (self._committing, self._background) if task is not None]
            if running:
                await asyncio.wait(running)
            else:
                self._schedule()
                await asyncio.sleep(0)

    async def stop(self) -> None:
        """Make everything durable, note how far, and let go of the files."""
        self._stopping = True
        await self.drain()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            if self._writer.broken:
                await self._repair()
            await self.checkpoint()
        except (StorageFull, StorageFailed) as error:
            log.error("topic %s: stopped without a checkpoint: %s", self.name, error)
        self.close_files()

    def close_files(self) -> None:
        for segment in self._segments:
            segment.forget_files()
            self._context.open_files.closed(segment)

    @property
    def idle(self) -> bool:
        return not (self._segments[-1].pinned or self._pending or self._committing or self._background)

    async def mark_archived(self, offset: int) -> None:
        """Retention keeps what lies at or after this offset (it waits to be archived)."""
        if self.archived_offset is not None and offset < self.archived_offset:
            raise Conflict(f"topic {self.name!r} is archived up to {self.archived_offset} already")
        path = self.directory / ARCHIVED
        await self._context.run(self._context.fs.replace, path, pack_checked(str(offset)))
        self.archived_offset = offset

    async def mark_deleted(self) -> None:
        """Refuse whatever comes, wake whoever waits."""
        self.deleted = True
        await self.drain()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unsynced = []
        for future in list(self._waiters):
            if not future.done():
                future.set_exception(NotFound(f"topic {self.name!r} was deleted"))
        for callback in list(self._subscribers.values()):
            callback()
        self._subscribers.clear()
        self.close_files()


def remove_files(segment: Segment) -> None:
    """The data last: a data file missing beside its index is damage, never an interrupted removal."""
    for kind in KINDS:
        segment.fs.remove(segment.path(kind))
    segment.fs.sync_dir(segment.directory)


def _add(job: Write, segment: Segment, frame: Frame, producer: Producer | None) -> None:
    start = segment.data_size + job.size
    size = len(frame.data)
    job.batches.append(
        pack_batch(
            job.first + job.count,
            frame.count,
            0 if producer is None else HAS_PRODUCER,
            start,
            start + size,
            job.time,
            NO_PRODUCER if producer is None else producer.id,
            0 if producer is None else producer.sequence,
            crc32c(frame.data),
        )
    )
    job.data.append(frame.data)
    job.index.append(frame.index)
    job.count += frame.count
    job.size += size


def _answer(entry: _Entry, appended: Appended) -> None:
    if not entry.future.done():
        entry.future.set_result(appended)


def _refuse(entry: _Entry, error: PenstockError) -> None:
    if not entry.future.done():
        with contextlib.suppress(TypeError):
            entry.future.set_exception(type(error)(str(error)))
