"""The buffer between the push handler and the queue engine. It has the same `push` as the engine,
and never loses an event that it has acknowledged.

The destination of a push:

    it asks for QoS 0                    the QoS 0 file, committed in batches        (qos0.py)
    the database is up                   the engine, directly
    the database is down, maintenance    the failover file, by group commit          (journal.py)
    older events of a partition wait     the failover file, behind them              (backlog.py,
                                                                                      admission.py)
    it is part of a transaction          the database, once no older event waits here

Every event has a transaction id before it is written anywhere. A push whose outcome is unknown (the
connection broke) goes to the failover file under the same id, and the replay stores it unless the
database has it already.

Order, per partition, as pushes arrive:
- *Down.* Pushes that were in flight when the database went down are written to the file before any
  later push. Later pushes wait until all of them have failed. The connections are cut, so this
  takes milliseconds.
- *Up.* Pushes to a partition go to the database directly once its last buffered event is committed.

Files belong to a process (files.py). The files of a dead process are adopted at the start and every
two seconds.
"""

import asyncio
import logging
import time
from concurrent.futures import Executor
from pathlib import Path

from penstock.buffer.backlog import Admission, BufferBacklog
from penstock.buffer.events import Window, decode_window, keys_in
from penstock.buffer.failed import FailedEvents
from penstock.buffer.files import KINDS, TITLES
from penstock.buffer.journal import FailoverJournal
from penstock.buffer.maintenance import Maintenance
from penstock.buffer.ownership import BufferOwnership
from penstock.buffer.qos0 import Qos0
from penstock.buffer.replay import BufferReplay, Progress
from penstock.buffer.status import BufferFigures
from penstock.buffer.storage import BufferStorage
from penstock.config import schema
from penstock.database import Database
from penstock.errors import (
    InvalidRequest,
    MissingKey,
    PenstockError,
    StorageError,
    StorageFull,
    Unavailable,
)
from penstock.io.fs import Fs
from penstock.io.tasks import cancelled, supervised
from penstock.metrics import Metrics
from penstock.queues.engine import Queues
from penstock.queues.push import name_items
from penstock.queues.types import Item, ItemOutcome

log = logging.getLogger("penstock.buffer")

ADOPT_SECONDS = 2.0
LAST_PASS_EVENTS = 500  # with no more than this left, new pushes wait for the last pass
MAX_REPLAY_PAUSE_SECONDS = 1.0  # pauses double while the database refuses
IN_FLIGHT_SECONDS = 0.5  # limit; pushes in flight fail within milliseconds of an outage
DRAIN_SECONDS, DRAIN_POLL_SECONDS = 5.0, 0.02
STOP_SECONDS = 5.0
DEFAULT_BUFFER_MS, DEFAULT_BUFFER_MAX = 100, 100


class Buffer:
    """QoS 0 batching and failover of one process."""

    def __init__(
        self,
        queues: Queues,
        database: Database,
        settings: schema.BufferSettings,
        directory: Path,
        fs: Fs,
        pool: Executor,
        metrics: Metrics,
    ) -> None:
        self._queues = queues
        self._database = database
        self._settings = settings
        self.directory = directory
        self._storage = BufferStorage(directory, fs, pool, settings, queues.at_rest)
        self.backlog = BufferBacklog()
        self.failed = FailedEvents(self._storage)
        self._ownership = BufferOwnership(self._storage, self.failed)
        self.maintenance = Maintenance(database, directory, fs, metrics, self._maintenance_changed)
        self.admission = Admission()
        self.replay = BufferReplay(
            queues,
            database,
            self._storage,
            self.failed,
            metrics,
            live=lambda: self._in_flight > 0,
        )
        self.journal = FailoverJournal(self._storage, self.backlog)
        self.qos0 = Qos0(
            self._storage, self.replay, self.journal, self.backlog, self._check_in_flight
        )
        self._metrics = metrics
        self._in_flight = 0  # direct pushes
        self._none_in_flight = asyncio.Event()  # cleared if an outage begins with pushes in flight
        self._none_in_flight.set()
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._scan: asyncio.Task[None] | None = None
        self.recovering: Progress | None = None
        self._stopping = False
        self._retrying = asyncio.Lock()
        self._replay_problem = ""  # why a replay stopped although the database is up; logged once
        self._recovered = True  # an event was replayed since the last outage
        self._buffered = metrics.counter(
            "penstock_buffer_events_total", "Events written to buffer files", "kind"
        )
        self._rejected = metrics.counter(
            "penstock_buffer_rejected_total",
            "Pushes rejected because the buffer or the disk was full",
        )
        self._adopted = metrics.counter(
            "penstock_buffer_adopted_total", "Buffer files taken over from processes that ended"
        )
        self.status = BufferFigures(self, metrics)
        self._storage.used = lambda: self.status.bytes

    async def start(self) -> None:
        """Adopt the files in the directory. If the database is up, replay them before returning."""
        await self._storage.in_pool(self._ownership.begin)
        await self._adopt()
        await self.maintenance.start()
        await self._recover()
        self._database.on_change(self._database_changed)
        self._worker = supervised("buffer replay", self._work, self._metrics)
        if self.backlog.files:
            self._scan = supervised("buffer scan", self._scan_files, self._metrics)

    async def stop(self) -> None:
        """Commit QoS 0 and complete the files. The next start replays the remaining ones."""
        await self.qos0.flush()
        self._stopping = True
        self._wake.set()
        if self._worker:
            done, _ = await asyncio.wait([self._worker], timeout=STOP_SECONDS)
            if not done:
                self._worker.cancel()  # in the middle of a file, which stays
                await asyncio.wait([self._worker])
        await cancelled(self._scan)
        self.admission.end()
        await self.journal.close()
        await self.maintenance.stop()
        self._ownership.release_all(self.backlog.files)
        if self.backlog.files:
            log.info(
                "%d events stay in %d buffer files", self.backlog.events(), len(self.backlog.files)
            )

    async def push(
        self, items: list[Item], buffer_ms: float | None = None, buffer_max: int | None = None
    ) -> list[ItemOutcome]:
        """Store messages: `queued` or `duplicate` in the database, or `buffered` on disk and stored
        later. `buffer_ms` or `buffer_max` ask for QoS 0. The items get their transaction ids first.
        """
        if not items:
            return []
        name_items(items, self._queues.catalog.partitions)
        qos0 = buffer_ms is not None or buffer_max is not None
        if qos0 and self._settings.enabled:
            return await self._push_qos0(items, buffer_ms, buffer_max)
        if self._up and not self.backlog.blocks(items) and not self.qos0.blocks(items):
            return await self._push_directly(items)
        return await self._push_behind(items)

    async def push_lines(self, data: bytes) -> tuple[list[Item], list[ItemOutcome]]:
        """Store the events in lines of a buffer file. Return the items and their outcomes.

        Encrypted events need the key of the broker that wrote them.
        """
        window = decode_window(data) if data.endswith(b"\n") else Window(torn=data)
        if window.bad or window.torn:
            line = window.bad[0] if window.bad else window.torn
            raise InvalidRequest(
                f"a line is not an event, or is damaged or cut short: {line[:200]!r}"
            )
        items = self._queues.decrypted(window.items)
        return items, await self.push(items)

    async def wait_until_drained(self, items: list[Item]) -> None:
        """Wait, for a transaction, until no older event of these partitions is buffered."""
        give_up = time.monotonic() + DRAIN_SECONDS
        while True:
            if self.maintenance.modes.push:
                raise Unavailable(
                    "maintenance: pushes go to the buffer, which cannot store transactions"
                )
            if self.qos0.blocks(items):
                await self.qos0.flush()
            elif not self.backlog.blocks(items):
                return
            elif not self._up or time.monotonic() > give_up:
                raise Unavailable("older messages of this partition are not stored yet")
            else:
                await asyncio.sleep(DRAIN_POLL_SECONDS)

    @property
    def healthy(self) -> bool:
        return self._database.healthy

    def accepts(self) -> bool:
        """Return whether a push would be buffered if the database were down now."""
        if not self._settings.enabled:
            return False
        try:
            self._storage.reserve(1)
        except StorageFull:
            return False
        return True

    @property
    def _up(self) -> bool:
        return self._database.healthy and not self.maintenance.modes.push

    async def _push_directly(self, items: list[Item]) -> list[ItemOutcome]:
        """Push to the database. When the outcome is unknown, the items also go to the file; the
        replay stores those that the database does not have.
        """
        self._in_flight += 1
        try:
            return await self._queues.append(items)
        except MissingKey:
            raise
        except Unavailable:
            written = self._write(items)
        finally:
            self._in_flight -= 1
            if not self._none_in_flight.is_set():
                self._check_in_flight()
        return await self._written(written, items)

    async def _written(self, written: asyncio.Future[None], items: list[Item]) -> list[ItemOutcome]:
        try:
            await written
        except StorageError:
            self._rejected.add()
            raise
        return _buffered(items)

    async def _push_behind(self, items: list[Item]) -> list[ItemOutcome]:
        self._queues.check_keys(items)  # reject them now, not at the replay
        while True:
            if not self._up:
                await self._wait_for_in_flight()
                break
            if self.qos0.blocks(items):
                await self.qos0.flush()
            elif not self.backlog.blocks(items):
                return await self._push_directly(items)
            elif await self.admission.ask(len(items)):
                break
        return await self._written(self._write(items), items)

    async def _push_qos0(
        self, items: list[Item], buffer_ms: float | None, buffer_max: int | None
    ) -> list[ItemOutcome]:
        milliseconds = DEFAULT_BUFFER_MS if buffer_ms is None else buffer_ms
        most = DEFAULT_BUFFER_MAX if buffer_max is None else buffer_max
        written = False
        while not written:  # after a wait, choose again where the items go
            if not self._up or self.backlog.blocks(items):
                return await self._push_behind(items)
            try:
                # Without a key, plain text would be written to the file.
                await self._queues.load_and_check_keys(items)
            except MissingKey:
                raise
            except Unavailable:
                return await self._push_behind(items)
            try:
                written = await self.qos0.push(items, milliseconds, most)
            except StorageError as error:
                log.warning("%s: a QoS 0 push goes to the database directly", error)
                return await self._push_directly(items)
        self._buffered.add(len(items), "qos0")
        return _buffered(items)

    def _write(self, items: list[Item]) -> asyncio.Future[None]:
        if not self._settings.enabled:
            raise Unavailable(
                "the database is down, and this broker does not buffer (buffer.enabled: false)"
            )
        written = self.journal.submit(items)
        self._buffered.add(len(items), "failover")
        if self._up:
            self._wake.set()
        return written

    async def _wait_for_in_flight(self) -> None:
        """Wait until the pushes that were in flight when the database went down are in the file."""
        if not self._none_in_flight.is_set():
            try:
                async with asyncio.timeout(IN_FLIGHT_SECONDS):
                    await self._none_in_flight.wait()
            except TimeoutError:
                log.warning(
                    "%d pushes are still in flight though the database is down", self._in_flight
                )

    def _check_in_flight(self) -> None:
        if not self._in_flight and not self.qos0.busy:
            self._none_in_flight.set()

    def _database_changed(self, healthy: bool) -> None:
        if healthy:
            self._none_in_flight.set()
            self.maintenance.settings_changed(None)
            self._wake.set()
            return
        log.warning("Database connection failed, switching to file buffer")
        self._recovered = False
        self.qos0.flush_soon()
        if self._in_flight or self.qos0.busy:
            self._none_in_flight.clear()
        self.admission.end()

    def _maintenance_changed(self) -> None:
        """Apply the modes to pops, and wake the worker."""
        self._queues.pause_pops(self.maintenance.modes.pop)
        if self.maintenance.modes.push:
            self.admission.end()
        self._wake.set()

    async def _work(self) -> None:
        """Replay the backlog, with growing pauses while that fails. Adopt files, and retry those in
        failed/.
        """
        pause = shortest = self._settings.flush_interval
        adopt_at = time.monotonic() + ADOPT_SECONDS
        while not self._stopping:
            waits = self._up and self._has_backlog
            next_check = min(adopt_at, self.failed.next_due) if self._up else adopt_at
            limit = pause if waits else max(0.0, next_check - time.monotonic())
            try:
                async with asyncio.timeout(limit):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                if time.monotonic() >= adopt_at:
                    adopt_at = time.monotonic() + ADOPT_SECONDS
                    await self._adopt()
                if self._up and self._has_backlog:
                    done = await self._drain()
                    pause = shortest if done else min(pause * 2, MAX_REPLAY_PAUSE_SECONDS)
                if self._up:
                    await self.retry_failed()
            except PenstockError as error:
                log.error("the buffer's worker: %s", error)
                pause = min(pause * 2, MAX_REPLAY_PAUSE_SECONDS)

    @property
    def _has_backlog(self) -> bool:
        return bool(self.backlog.files or self.journal.events)

    async def _drain(self) -> bool:
        """Replay everything in order. Return False if the database went down meanwhile."""
        self.admission.begin()
        try:
            while self._up:
                while self.backlog.files and self._up:
                    file = self.backlog.files[0]
                    await self.replay.file(file, self._committed)
                    self.backlog.remove(file)
                if not self.journal.events:
                    break
                if self.journal.events <= LAST_PASS_EVENTS:
                    self.admission.close()
                    await self.journal.flush()
                await self.journal.seal()
            self._ownership.release_unused(self.backlog.files)
            self._replay_problem = ""
            return not self._has_backlog
        except Unavailable as error:
            if self._up and str(error) != self._replay_problem:
                log.warning("Replay paused with %d events left: %s", self.status.pending, error)
                self._replay_problem = str(error)
            return False
        finally:
            self.admission.end()

    def _committed(self, events: int) -> None:
        if not self._recovered:
            self._recovered = True
            log.info("PostgreSQL recovery detected! Batch flush succeeded")
        self.admission.committed(events)
        if self.recovering:
            self.recovering.add(events)

    @property
    def _stored(self) -> int:
        """Return how many buffered events were stored since the start."""
        return sum(int(self.replay.flushed.value(kind)) for kind in KINDS)

    async def _recover(self) -> None:
        """Replay before requests are served: failover files, oldest first, then QoS 0."""
        if not self.backlog.files:
            return
        total = self.backlog.events()
        if not self._up:
            log.warning(
                "%d events wait in %d files, because %s: serving in failover mode",
                total,
                len(self.backlog.files),
                "maintenance is on" if self.maintenance.modes.push else "the database is down",
            )
            return
        began, stored = time.monotonic(), self._stored
        log.info("Recovery: %d events in %d buffer files", total, len(self.backlog.files))
        try:
            async with asyncio.timeout(self._settings.startup_recovery_timeout):
                for kind in KINDS:
                    waiting = self.backlog.files_of(kind)
                    self.recovering = Progress(TITLES[kind], sum(file.events for file in waiting))
                    for file in waiting:
                        await self.replay.file(file, self._committed)
                        self.backlog.remove(file)
        except (Unavailable, TimeoutError, StorageError) as error:
            log.warning(
                "Recovery stopped after %.1f s (%s): it resumes while the broker serves",
                time.monotonic() - began,
                error,
            )
        else:
            log.info(
                "Recovery: %d of %d events stored in %.2f s",
                *(self._stored - stored, total, time.monotonic() - began),
            )
        finally:
            self.recovering = None
        self._ownership.release_unused(self.backlog.files)

    def replay_now(self) -> None:
        self._wake.set()

    async def retry_failed(self, *, now: bool = False) -> None:
        """Replay the files in failed/ that are due; with `now`, all of them."""
        async with self._retrying:
            for file in self.failed.due(now=now):
                try:
                    await self.replay.failed_file(file)
                except Unavailable:
                    return

    async def _adopt(self) -> None:
        adopted = await self._storage.in_pool(self._ownership.adopt)
        for file in adopted:
            self._storage.namer.seen(file.name)
            self.backlog.add(file)
        if adopted:
            self._adopted.add(len(adopted))
            log.info(
                "Adopted %d buffer files with %d events",
                len(adopted),
                sum(file.events for file in adopted),
            )
            self._wake.set()
            if self._worker and (self._scan is None or self._scan.done()):
                self._scan = supervised("buffer scan", self._scan_files, self._metrics)

    async def _scan_files(self) -> None:
        """Read which partitions the adopted files hold, so that pushes to others do not wait."""
        for file in list(self.backlog.files):
            if file.keys is None:
                try:
                    self.backlog.limit_hold(
                        file, await self._storage.in_pool(keys_in, self._storage.fs, file.path)
                    )
                except FileNotFoundError:
                    pass  # replayed meanwhile
                except StorageError as error:
                    log.warning(
                        "%s: pushes to all partitions wait until the file is replayed", error
                    )


def _buffered(items: list[Item]) -> list[ItemOutcome]:
    return [
        ItemOutcome(
            index, "buffered", None, item.transaction_id or "", "", item.trace_id, item.queue
        )
        for index, item in enumerate(items)
    ]
