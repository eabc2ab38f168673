"""Store events of files in the database, each exactly once. A bad event delays no other.

Events are inserted by the engine's push, which recognises duplicates by their transaction ids. So
a replay that starts again after a crash inserts only what is missing. The outcome decides what
happens to an event:

| the engine's answer             | the event                                                    |
|---------------------------------|--------------------------------------------------------------|
| queued, duplicate               | is in the database                                           |
| full (`maxSize`)                | goes to failed/ and is tried again                           |
| rejected for its content        | goes to failed/, when halving the batch has isolated it      |
| no key for an encrypted queue   | goes to failed/ and is tried again                           |
| its payload cannot be decrypted | goes to failed/, encrypted                                   |
| busy (its disk is full, a lock) | stays, as if the database were down                          |
| unavailable, the database is up | is isolated by halving, like a rejected one                  |
| unavailable, the database down  | stays; the replay starts again when the database is back     |

A file is deleted when all its events are in the database or durably in failed/. A file that cannot
be read is moved to quarantine/ after a few tries, so that the following files do not wait for it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from penstock.buffer.backlog import BufferFile
from penstock.buffer.events import Window, windows
from penstock.buffer.failed import FailedEvents, FailedFile, RefusedEvent
from penstock.buffer.files import FAILED, QUARANTINE, TITLES, Kind
from penstock.buffer.storage import BufferStorage
from penstock.database import Database
from penstock.errors import (
    Busy,
    Damaged,
    Full,
    InvalidRequest,
    MissingKey,
    PenstockError,
    StorageFailed,
    TooLarge,
    Unavailable,
)
from penstock.metrics import Metrics
from penstock.queues.engine import Queues
from penstock.queues.types import Item, ItemOutcome

log = logging.getLogger("penstock.buffer")

MAX_DISK_ATTEMPTS = 4  # per file
# Batches of `max_batch` events in one call: fewer commits, the same locks in the same order.
BATCHES_PER_CALL = 10
MAX_BATCH_BYTES = 8 << 20
EVENTS_PER_PROGRESS = 5000
EVENTS_PER_PAUSE = 1000
RATE_SECONDS = 10.0


class GivenUp(Exception):
    """The database is up, but did not store the event after several attempts."""


# errors that are about the content of an event
REFUSED = (InvalidRequest, TooLarge, Full, MissingKey, Damaged, ValueError, GivenUp)


@dataclass(slots=True)
class Leftovers:
    """The events that a replay could not store."""

    refusals: list[RefusedEvent] = field(default_factory=list)
    unreadable: int = 0  # parts of the file that are not events


class Progress:
    """The progress of a recovery, for the status and, every few thousand events, the log."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done, self._logged = what, total, 0, 0

    def add(self, events: int) -> None:
        self.done += events
        if self.done - self._logged >= EVENTS_PER_PROGRESS or (
            self.done >= self.total > self._logged
        ):
            self._logged = self.done
            share = 100 * self.done / self.total if self.total else 100.0
            log.info("%s: Progress %d/%d events (%.1f%%)", self.what, self.done, self.total, share)


class BufferReplay:
    """Stores events and whole files of events."""

    def __init__(
        self,
        queues: Queues,
        database: Database,
        storage: BufferStorage,
        failed: FailedEvents,
        metrics: Metrics,
        live: Callable[[], bool] = lambda: False,
    ) -> None:
        self._queues = queues
        self._database = database
        self._storage = storage
        self._settings = storage.settings
        self._directory = storage.directory
        self._fs = storage.fs
        self._failed = failed
        self._live = live  # whether pushes go to the database directly now
        self._recent: deque[tuple[float, int]] = deque()
        self._unpaused = 0
        self.flushed = metrics.counter(
            "penstock_buffer_flushed_total", "Buffered events stored in the database", "kind"
        )
        self.refused = metrics.counter(
            "penstock_buffer_refused_total",
            "Events that the database rejected, moved to failed/",
            "kind",
        )
        self.quarantined = metrics.counter(
            "penstock_buffer_quarantined_total",
            "Incomplete or damaged lines of buffer files moved to quarantine/",
        )
        self.writes = metrics.counter(
            "penstock_buffer_inserts_total", "Batches of buffered events sent to the database"
        )

    @property
    def rate(self) -> float:
        """Return the events stored per second, over the last RATE_SECONDS."""
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()
        if not self._recent:
            return 0.0
        return sum(events for _, events in self._recent) / max(now - self._recent[0][0], 0.1)

    async def file(self, file: BufferFile, committed: Callable[[int], None]) -> None:
        """Replay a complete file and delete it. Call `committed(n)` as events are stored.

        Raise StorageFailed until the disk has failed so often that the file is set aside.
        """
        left = Leftovers()
        try:
            async for events in self._insert_all(file, str(file.name.complete), left):
                committed(events)
                await self._throttle(events)
            await self.finish(file, left.refusals)
        except FileNotFoundError:
            text = "the buffer file %s with %d events was deleted by another program"
            log.error(text, file.name, file.events)
        except StorageFailed as error:
            file.disk_failures += 1
            tries = f"{file.disk_failures} of {MAX_DISK_ATTEMPTS} tries"
            log.error("replay of %s: %s (%s)", file.name, error, tries)
            if file.disk_failures < MAX_DISK_ATTEMPTS:
                raise
            await self._set_aside(file)
        else:
            title = TITLES[file.name.kind]
            if left.refusals or left.unreadable:
                log.error(
                    "%s replay of %s incomplete: %d events in %s/, %d unreadable pieces in %s/",
                    *(title, file.name, len(left.refusals), FAILED, left.unreadable, QUARANTINE),
                )
            else:
                log.info("%s replay complete, deleted file %s", title, file.name)

    async def finish(self, file: BufferFile, refusals: list[RefusedEvent]) -> None:
        """Write the rejected events of a file to failed/, and delete the file."""
        await self._storage.in_pool(self._finish, file, refusals)
        if refusals:
            self.refused.add(len(refusals), file.name.kind)
            log.error(
                "%d events of %s were rejected and are in failed/: %s",
                *(len(refusals), file.name, refusals[0].error),
            )

    async def _set_aside(self, file: BufferFile) -> None:
        quarantine = self._directory / QUARANTINE
        await self._storage.in_pool(self._fs.make_dir, quarantine)
        path = quarantine / str(file.name.complete)
        await self._storage.in_pool(self._fs.rename, file.path, path)
        self.quarantined.add(file.events)
        log.error(
            "%s with %d events cannot be read and was moved to %s/: move it back after a repair",
            file.name,
            file.events,
            QUARANTINE,
        )

    async def failed_file(self, file: FailedFile) -> None:
        """Replay a file in failed/."""
        left = Leftovers()
        refusals = left.refusals
        steps = self._insert_all(file, f"{FAILED}_{file.name}", left)
        total = sum([events async for events in steps])
        log.info(
            "Retried failed file %s: %d events stored, %d left",
            *(file.name, total - len(refusals), len(refusals) + left.unreadable),
        )
        if len(refusals) < file.done or not refusals:
            await self._storage.in_pool(self._failed.write, file.name, refusals)
        if refusals:
            self._failed.postpone(self._failed.files[str(file.name)])

    async def _insert_all(self, file: BufferFile, name: str, left: Leftovers) -> AsyncIterator[int]:
        """Insert the events of a file, and yield how many. Damage goes to quarantine/`name`."""
        file.done = 0
        bad: list[bytes] = []
        steps = windows(self._fs, file.path)
        while (window := await self._storage.in_pool(next, steps, None)) is not None:
            for batch in batches(window.items, self._settings.max_batch * BATCHES_PER_CALL):
                left.refusals += await self.insert(batch, file.name.kind)
                file.done += len(batch)
                yield len(batch)
            bad += window.bad
            file.done += len(window.bad)
            left.unreadable += len(window.bad) + bool(window.torn)
            if window.bad or window.torn:  # before the file is deleted or rewritten
                await self._storage.in_pool(self._quarantine, name, window, bad)

    async def insert(self, items: list[Item], kind: Kind) -> list[RefusedEvent]:
        """Store the items in order, and return the rejected ones, or raise Unavailable."""
        refusals = [refusal for refusal in await self._halve(items) if refusal]
        flushed = len(items) - len(refusals)
        self.flushed.add(flushed, kind)
        self._recent.append((time.monotonic(), flushed))
        return refusals

    async def _halve(self, items: list[Item]) -> list[RefusedEvent | None]:
        """Push the items, in halves if they are refused together."""
        try:
            return await self._push(items)
        except REFUSED as error:
            if len(items) == 1:
                return [RefusedEvent(items[0], str(error))]
        middle = len(items) // 2
        return await self._halve(items[:middle]) + await self._halve(items[middle:])

    async def _push(self, items: list[Item]) -> list[RefusedEvent | None]:
        try:
            results = await self._attempt(items)
        except MissingKey:
            raise
        except Unavailable as error:
            if not self._database.healthy or (isinstance(error, Busy) and len(items) == 1):
                raise
            raise GivenUp(f"given up: {error}") from error
        return [
            RefusedEvent(item, f"the queue {item.queue} is full")
            if result.status == "full"
            else None
            for item, result in zip(items, results, strict=True)
        ]

    async def _attempt(self, items: list[Item]) -> list[ItemOutcome]:
        self.writes.add()
        try:
            return await self._queues.push(self._queues.decrypted(items))
        except PenstockError:
            for item in items:
                item.fresh = False  # it may have been stored
            raise

    async def _throttle(self, events: int) -> None:
        """Pause every thousand events while there are live pushes, and keep to `replay_rate`."""
        if self._settings.replay_rate:
            await asyncio.sleep(events / self._settings.replay_rate)
        self._unpaused += events
        if self._unpaused >= EVENTS_PER_PAUSE:
            self._unpaused = 0
            if self._live():
                await asyncio.sleep(self._settings.replay_pause)

    # The methods below run in the pool.

    def _finish(self, file: BufferFile, refusals: list[RefusedEvent]) -> None:
        if refusals:
            self._failed.write(file.name, refusals)
        self._fs.remove(file.path)
        if file.name.kind == "failover":
            # otherwise a power failure may restore the file when its messages are deleted already
            self._fs.sync_dir(self._directory)

    def _quarantine(self, name: str, window: Window, bad: list[bytes]) -> None:
        directory = self._directory / QUARANTINE
        self._fs.make_dir(directory)
        if window.torn:
            self._fs.replace(directory / f"{name}.torn", window.torn)
            log.warning(
                "the last event of %s was cut short by a crash: %d bytes are in quarantine/",
                name,
                len(window.torn),
            )
        if window.bad:
            self._fs.replace(directory / f"{name}.bad", b"".join(bad))
            log.error(
                "%d pieces of %s are not events and are in %s/",
                *(len(window.bad), name, QUARANTINE),
            )
        self.quarantined.add(len(window.bad) + bool(window.torn))


def batches(items: list[Item], most: int) -> Iterator[list[Item]]:
    """Yield the items in order, at most `most` and MAX_BATCH_BYTES at a time."""
    start = size = 0
    for end, item in enumerate(items):
        size += len(item.payload)
        if end > start and (end - start >= most or size > MAX_BATCH_BYTES):
            yield items[start:end]
            start, size = end, len(item.payload)
    if start < len(items):
        yield items[start:]
