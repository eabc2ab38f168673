"""What exactly-once sinks have written: a checksum of the content under each identity.

A sink's rows are known by (sink, batch, task). Before a task writes the first of them it claims its
place with a checksum of all of them. The same place with the same checksum may be written again,
since whoever stored part of it is recognised row by row; the same place with another checksum is
refused. A task that has no place yet gets one only when every task that an earlier run left in this
batch has come again with its old checksum: until then it waits, so that a batch whose content
changed is refused before anything new of it is written. A batch that is behind the newest takes no
new tasks, nor does one that was committed.

    <data_directory>/.penstock/groups/sinks.log    text, one line per event, the last one of a task
                                                   counts
        <8 hexadecimal digits: CRC32C of the rest> <JSON array>\\n
        ["task", target, app, batch, task, checksum, run, note, seconds since 1970]
        ["commit", target, app, batch, seconds since 1970]

`sink_claim.sql` does the same for queues, in PostgreSQL, where any broker finds it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.io.fs import DISK, Fs
from penstock.io.journal import SNAPSHOT_BYTES, SNAPSHOT_FACTOR, JournalFile, events, line
from penstock.io.tasks import in_pool
from penstock.protocol.sink_claims import Claim, Claimed, Commit

log = logging.getLogger("penstock.topics")

JOURNAL = "sinks.log"
BATCHES_REMEMBERED = 4  # remembered of a sink; a legitimate run comes back to the newest only
FIELDS = {"task": 9, "commit": 5}

Key = tuple[str, str]  # target, app


@dataclass(slots=True)
class _TaskClaim:
    checksum: str
    run: str
    note: str
    at: float


@dataclass(slots=True)
class _Batch:
    tasks: dict[int, _TaskClaim] = field(default_factory=dict)
    committed: float = 0.0


class WriteClaims:
    """Lives on the event loop; an answer is given when what it rests on is durable."""

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
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        data = await in_pool(self._pool, self._file.read)
        said, damaged = events(data or b"", FIELDS)
        for event in said:
            self._apply(event)
        self._rewrite = damaged > 0
        if damaged:
            log.warning(
                "%s: %d damaged lines were skipped; what they said of sinks is not known",
                JOURNAL,
                damaged,
            )

    def close(self) -> None:
        self._file.close()

    async def claim(self, claim: Claim) -> Claimed:
        async with self._lock:
            batches = self._sinks.get((claim.target, claim.app), {})
            newest = max([claim.batch, *batches])
            batch = batches.get(claim.batch, _Batch())
            earlier = batch.tasks.get(claim.task)
            if earlier is not None:
                if earlier.checksum != claim.checksum:
                    return Claimed("other", newest, earlier.note)
                if earlier.run != claim.run:
                    await self._record(claim, earlier.note)
                return Claimed("write", newest, earlier.note)
            if claim.batch < newest:
                return Claimed("behind", newest)
            if batch.committed:
                return Claimed("complete", newest)
            waits = sorted(task for task, held in batch.tasks.items() if held.run != claim.run)
            if waits:
                return Claimed("wait", newest, tasks=waits)
            await self._record(claim, claim.note)
            return Claimed("write", newest, claim.note)

    async def commit(self, done: Commit) -> None:
        """Every task of the batch has written: it takes no others."""
        async with self._lock:
            batch = self._sinks.get((done.target, done.app), {}).get(done.batch)
            if batch is not None and not batch.committed:
                await self._write(["commit", done.target, done.app, done.batch, self._clock()])

    def forget(self, topic: str) -> None:
        """The topic was deleted, and what was written to it with it. If the broker ends before the
        next write, the entries come back: harmless but for other rows under an old identity, which
        are then refused."""
        for key in [key for key in self._sinks if key[0] == topic]:
            del self._sinks[key]
        self._rewrite = True

    async def _record(self, claim: Claim, note: str) -> None:
        task = [claim.target, claim.app, claim.batch, claim.task, claim.checksum, claim.run, note]
        await self._write(["task", *task, self._clock()])

    async def _write(self, event: list[Any]) -> None:
        text = line(event)
        if self._rewrite or self._file.size > self._limit:
            self._expire()
            text = self._snapshot() + text
            await in_pool(self._pool, self._file.replace, text)
            self._limit = max(SNAPSHOT_BYTES, SNAPSHOT_FACTOR * len(text))
        else:
            self._rewrite = True  # until the line is known to be whole
            await in_pool(self._pool, self._file.append, text)
        self._rewrite = False
        self._apply(event)

    def _apply(self, event: list[Any]) -> None:
        kind, target, app, number, *rest = event
        batches = self._sinks.setdefault((target, app), {})
        batch = batches.setdefault(number, _Batch())
        if kind == "commit":
            batch.committed = rest[0]
            return
        task, checksum, run, note, at = rest
        batch.tasks[task] = _TaskClaim(checksum, run, note, at)
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
                    rest = [held.checksum, held.run, held.note, held.at]
                    lines.append(line(["task", *key, number, task, *rest]))
                if batch.committed:
                    lines.append(line(["commit", *key, number, batch.committed]))
        return b"".join(lines)
