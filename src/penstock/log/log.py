"""The log of a topic as its writer sees it: appends that share commits.

The event loop owns all state; only disk work leaves it. Appends are queued; what is queued at the
end of a loop tick, or while the commit before it was in the pool, becomes one commit: one write,
and under `group` one fsync. A commit assigns offsets, so a failed one leaves no gap. Readers see a
record (and `next_offset` moves) when its commit satisfied the fsync policy, never before.

    always     every append is a commit of its own, answered after its fsync
    group      appends share a commit, answered after its fsync
    interval   answered after the write; an fsync follows within `fsync_interval`
    never      answered after the write; the kernel decides (checkpoints and rolls still sync, in the background)

How what was written becomes durable, segments roll and broken ones are repaired is in
`penstock.log.durable`.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

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
from penstock.log.commit import Appended, Commit, Entry
from penstock.log.context import Context
from penstock.log.durable import UNSYNCED_BYTES, DurableLog, Recovered
from penstock.log.fs import Bytes
from penstock.log.layout import HEADER_SIZE
from penstock.log.producers import Producer

log = logging.getLogger("penstock.topics")

INLINE_BYTES = 1 << 20  # a larger write goes to the pool even when nobody waits for an fsync
COMMIT_BYTES = 64 << 20
BACKLOG_BYTES = 256 << 20  # queued beyond this, appends are refused


class Log(DurableLog):
    def __init__(self, name: str, directory: Path, context: Context, found: Recovered) -> None:
        super().__init__(name, directory, context, found)
        self._pending: list[Entry] = []
        self._pending_bytes = 0
        self._scheduled = False
        self._seal_wanted: list[
            tuple[asyncio.Future[None], bool]
        ] = []  # and whether to roll, or only to come to rest
        self.maintenance = asyncio.Lock()  # retention and compaction take turns
        self._stopping = False
        self.last_used = time.monotonic()

    # Appending

    def append(
        self, payloads: Sequence[Bytes], producer: Producer | None = None
    ) -> "asyncio.Future[Appended]":
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
        """Append payloads that lie one after another in `payloads`, as one batch, without a look at
        each.
        """
        count = len(lengths)
        if not count:
            raise InvalidRequest("a batch has at least one record")
        wide = lengths.astype(np.int64)
        largest = int(wide.max())
        if int(wide.min()) < 0 or int(wide.sum()) != len(payloads):
            raise InvalidRequest(
                f"the lengths add up to {int(wide.sum())}, the payloads have {len(payloads)} bytes"
            )
        if largest > self._context.settings.max_record:
            raise self._too_large(largest)
        return self._enqueue((payloads,), wide, count, len(payloads), producer)

    def _too_large(self, length: int) -> TooLarge:
        return TooLarge(
            f"a record has at most {self._context.settings.max_record} bytes, this one has {length}"
        )

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
            raise Unavailable(
                f"topic {self.name!r} has {self._pending_bytes} bytes waiting for the disk"
            )
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
        return (
            bool(limit)
            and self._segments[-1].data_size > 0
            and self._segments[-1].data_size + size > limit
        )

    def _put_together(self, entries: list[Entry]) -> Commit:
        self._context.space.take(sum(entry.size for entry in entries))
        self._last_time = max(
            self._context.now(), self._last_time + 1
        )  # distinct: it also tells commits apart
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

    def _fail(self, entries: list[Entry], error: PenstockError) -> None:
        self._context.instruments.failures.add(1, type(error).__name__)
        if isinstance(error, StorageFull):
            self._context.space.refused(error, sum(entry.size for entry in entries))
        if self._writer.broken:
            log.error(
                "topic %s: segment %d is closed: %s",
                self.name,
                self._segments[-1].base,
                self._writer.broken,
            )
        for entry in entries:
            if entry.producer is not None and not entry.future.done():
                self._producers.expect(entry.producer, self._last_time)
            entry.refuse(error)
        self._unpin()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    @property
    def _has_work(self) -> bool:
        return bool(self._pending or self._seal_wanted or self._rescue_needed)

    async def seal(self) -> None:
        """Seal the active segment and start an empty one; nothing happens when it is empty."""
        await self._between_commits(roll=True)

    async def rest(self) -> None:
        """Until no segment is being repaired and the checkpoint on disk speaks of the active one.

        From then on the checkpoint knows the producers of all sealed segments, whose sidecars are
        no longer asked.
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

    # Coming to rest

    async def drain(self) -> None:
        """Until everything queued is answered and nothing runs in the pool."""
        while (
            self._has_work
            or self._committing is not None
            or self._background is not None
            or self._scheduled
        ):
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

    @property
    def idle(self) -> bool:
        busy = self._segments[-1].pinned or self._pending or self._committing or self._background
        return not (busy or self.maintenance.locked() or self.unfinished)
