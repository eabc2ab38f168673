"""The claims of exactly-once sinks: which task has written which rows, and which are complete.

The rows of a sink are identified by (sink, batch, task). Before a task writes its first row, it
claims this place with two checksums: of all its rows, and of their keys, the columns that identify
a row in its order. When it has written the last row, the place is done.

- A place that is done is never written again. Only its keys are compared, so other rows under a
  used identity are refused instead of dropped. Values may differ, such as sums of floats.
- A place that was begun is written again if its checksum is the same, since the producer's sequence
  identifies stored appends. With another checksum it is refused.
- A new place in a batch that an earlier run has begun must wait until every task of that run has
  claimed again. So a batch whose content has changed is refused before any new rows are written.
- A batch that is older than the newest, or that is committed, accepts no new places.

    <data_directory>/.penstock/groups/sinks.log    text, one line per event, the last one of a task
                                                   counts
        <8 hexadecimal digits: CRC32C of the rest> <JSON array>\\n
        ["claim", target, app, batch, task, checksum, keys, run, note, seconds since 1970]
        ["done", target, app, batch, task, seconds since 1970]
        ["commit", target, app, batch, seconds since 1970]
        ["task", target, app, batch, task, checksum, run, note, seconds since 1970]
                                                   a claim in the form of earlier releases

`sink_claim.sql` does the same for queues, in PostgreSQL, for all brokers.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import StorageError
from penstock.io.fs import DISK, Fs
from penstock.io.journal import SNAPSHOT_BYTES, SNAPSHOT_FACTOR, JournalFile, events, line
from penstock.io.tasks import in_pool
from penstock.protocol.sink_claims import Claim, Claimed, Commit

log = logging.getLogger("penstock.topics")

JOURNAL = "sinks.log"
BATCHES_REMEMBERED = 4  # per sink; a legitimate run returns to the newest batch only
FIELDS = {"claim": 10, "done": 6, "commit": 5, "task": 9}

Key = tuple[str, str]  # target, app


@dataclass(slots=True)
class _TaskClaim:
    checksum: str
    keys: str
    run: str
    note: str
    at: float
    done: bool = False


@dataclass(slots=True)
class _Batch:
    tasks: dict[int, _TaskClaim] = field(default_factory=dict)
    committed: float = 0.0


class WriteClaims:
    """The claims of all sinks. Runs on the event loop; answers are given when they are durable."""

    def __init__(
        self,
        directory: Path,
        *,
        pool: Executor,
        expiry: float,
        sync: bool = True,
        fs: Fs = DISK,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._file = JournalFile(fs, directory / JOURNAL, sync=sync)
        self._pool = pool
        self._clock = clock
        self._expiry = expiry  # seconds
        self._sinks: dict[Key, dict[int, _Batch]] = {}
        self._limit = SNAPSHOT_BYTES  # bytes from which on the journal is replaced by a snapshot
        self._rewrite = False  # the journal's end cannot be trusted
        self._lock = asyncio.Lock()  # held by a write until its thread has ended
        self._replacements: set[asyncio.Task[None]] = set()  # after topics were deleted

    async def start(self) -> None:
        data = await in_pool(self._pool, self._file.read)
        said, damaged = events(data or b"", FIELDS)
        for event in said:
            self._apply(event)
        self._rewrite = damaged > 0
        if damaged:
            log.warning(
                "%s: %d damaged lines were skipped; their claims of sinks are lost",
                JOURNAL,
                damaged,
            )

    async def stop(self) -> None:
        await asyncio.gather(*self._replacements)
        async with self._lock:  # a write under way ends first
            self._file.close()

    async def claim(self, claim: Claim) -> Claimed:
        """Answer whether a task may write. Cancelling the caller does not interrupt the write."""
        return await asyncio.shield(asyncio.create_task(self._claim(claim)))

    async def _claim(self, claim: Claim) -> Claimed:
        async with self._lock:
            batches = self._sinks.get((claim.target, claim.app), {})
            newest = max([claim.batch, *batches])
            batch = batches.get(claim.batch, _Batch())
            earlier = batch.tasks.get(claim.task)
            if earlier is not None:
                done = earlier.done or batch.committed > 0
                same = (
                    earlier.keys == (claim.keys or claim.checksum)
                    if done
                    else earlier.checksum == claim.checksum
                )
                if not same:
                    return Claimed("other", newest, earlier.note)
                if earlier.run != claim.run:
                    await self._record(claim, earlier)
                return Claimed("done" if done else "write", newest, earlier.note)
            if claim.batch < newest:
                return Claimed("behind", newest)
            if batch.committed:
                return Claimed("other", newest)
            before = sorted(task for task, held in batch.tasks.items() if held.run != claim.run)
            if before:
                return Claimed("later", newest, tasks=before)
            await self._record(claim)
            return Claimed("write", newest, claim.note)

    async def commit(self, done: Commit) -> None:
        """Record that a task has written all its rows, or that all tasks of a batch have. Such a
        batch accepts no more tasks. Cancelling the caller does not interrupt the write.
        """
        await asyncio.shield(asyncio.create_task(self._commit(done)))

    async def _commit(self, done: Commit) -> None:
        async with self._lock:
            batch = self._sinks.get((done.target, done.app), {}).get(done.batch)
            if batch is None:
                return
            if done.task is None:
                if not batch.committed:
                    await self._write(["commit", done.target, done.app, done.batch, self._clock()])
            elif done.task in batch.tasks and not batch.tasks[done.task].done:
                await self._write(
                    ["done", done.target, done.app, done.batch, done.task, self._clock()]
                )

    def forget(self, topic: str) -> None:
        """Forget the claims on a deleted topic, and replace the journal in the background: if they
        came back, a sink that starts again with a new topic of this name would write nothing.
        """
        keys = [key for key in self._sinks if key[0] == topic]
        for key in keys:
            del self._sinks[key]
        if keys:
            replacement = asyncio.create_task(self._replace())
            self._replacements.add(replacement)
            replacement.add_done_callback(self._replacements.discard)

    async def _replace(self) -> None:
        async with self._lock:
            try:
                await self._write_snapshot(self._snapshot())
            except StorageError as error:
                self._rewrite = True
                log.warning("%s still has the claims on a deleted topic: %s", JOURNAL, error)

    async def _record(self, claim: Claim, earlier: _TaskClaim | None = None) -> None:
        """Record a claim. If it was made before, record only that this run made it too."""
        checksum, keys, note = claim.checksum, claim.keys or claim.checksum, claim.note
        if earlier is not None:
            checksum, keys, note = earlier.checksum, earlier.keys, earlier.note
        place = [claim.target, claim.app, claim.batch, claim.task]
        await self._write(["claim", *place, checksum, keys, claim.run, note, self._clock()])

    async def _write(self, event: list[Any]) -> None:
        text = line(event)
        if self._rewrite or self._file.size > self._limit:
            self._expire()
            await self._write_snapshot(self._snapshot() + text)
        else:
            self._rewrite = True  # until the line is known to be whole
            await in_pool(self._pool, self._file.append, text)
            self._rewrite = False
        self._apply(event)

    async def _write_snapshot(self, text: bytes) -> None:
        await in_pool(self._pool, self._file.replace, text)
        self._limit = max(SNAPSHOT_BYTES, SNAPSHOT_FACTOR * len(text))
        self._rewrite = False

    def _apply(self, event: list[Any]) -> None:
        kind, target, app, number, *rest = event
        batches = self._sinks.setdefault((target, app), {})
        batch = batches.setdefault(number, _Batch())
        if kind == "commit":
            batch.committed = rest[0]
            return
        if kind == "done":
            task, at = rest
            if held := batch.tasks.get(task):
                held.done, held.at = True, at
            return
        if kind == "task":  # its checksum is that of the keys too
            rest.insert(1, rest[1])
        task, checksum, keys, run, note, at = rest
        earlier = batch.tasks.get(task)
        done = earlier is not None and earlier.done
        batch.tasks[task] = _TaskClaim(checksum, keys, run, note, at, done)
        for old in [old for old in batches if old <= number - BATCHES_REMEMBERED]:
            del batches[old]

    def _expire(self) -> None:
        """Drop sinks that have not written for as long as producers are remembered."""
        cut = self._clock() - self._expiry
        for key, batches in list(self._sinks.items()):
            if all(task.at < cut for batch in batches.values() for task in batch.tasks.values()):
                del self._sinks[key]

    def _snapshot(self) -> bytes:
        lines = []
        for key, batches in self._sinks.items():
            for number, batch in batches.items():
                for task, held in batch.tasks.items():
                    rest = [held.checksum, held.keys, held.run, held.note, held.at]
                    lines.append(line(["claim", *key, number, task, *rest]))
                    if held.done:
                        lines.append(line(["done", *key, number, task, held.at]))
                if batch.committed:
                    lines.append(line(["commit", *key, number, batch.committed]))
        return b"".join(lines)
