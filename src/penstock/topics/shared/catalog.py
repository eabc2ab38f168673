"""One broker's view of the shared topics in a database: which exist, and where each log ends.

Brokers announce appends and new or deleted topics with NOTIFY. NOTIFY serializes the commits of the
whole database, so it is never part of an append. The ends of logs are collected and sent in a call
of their own, at most every `NOTIFY_SECONDS`. A notice may be lost with its connection, so watched
logs are also polled every `POLL_SECONDS`, and the catalog is read every `CATALOG_SECONDS`.

After a failover the server has a new timeline and may have lost the last appends. All caches are
then dropped, and every log is read from the database again.

A file keeps the catalog as it was last read, for a start while the database is down.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

from penstock.config.schema import TopicsSettings
from penstock.database import Database
from penstock.errors import InvalidRequest, NotFound, PenstockError, StorageError, Unavailable
from penstock.io.fs import DISK
from penstock.io.tasks import cancelled, supervised
from penstock.log.context import Instruments
from penstock.log.layout import COMPACT, DELETE, pack_checked, parse_checked
from penstock.log.limits import TopicLimits
from penstock.log.verify import Finding
from penstock.metrics import Metrics
from penstock.object_store import ObjectStore
from penstock.protocol.ids import uuid7
from penstock.protocol.names import check_name, partition_label
from penstock.topics.shared.appends import Flusher
from penstock.topics.shared.chunks import ChunkCache, Row, SharedObjects
from penstock.topics.shared.groups import SharedGroups
from penstock.topics.shared.log import SharedContext, SharedLog
from penstock.topics.shared.mover import Mover
from penstock.topics.shared.nodes import SharedNodes
from penstock.topics.shared.verify import check, report_of

log = logging.getLogger("penstock.topics.shared")

NOTIFY_SECONDS = 0.01
POLL_SECONDS = 2.0
CATALOG_SECONDS = 30.0
MAX_NOTIFIED = 200  # logs per notice: the payload must be smaller than 8,000 bytes
OLDER_BYTES = 32 << 20  # cached for readers that lag behind
START_SECONDS = 10.0  # how long `start` waits for the catalog

# All logs, or those of one topic.
LOGS = """
  SELECT l.id, l.topic, l.partition, encode(uuid_send(l.incarnation), 'hex') AS incarnation,
         l.policy, l.limits, l.next_offset,
         coalesce((SELECT b.base_offset FROM shared_batches b WHERE b.log_id = l.id
                    ORDER BY b.last_offset LIMIT 1), l.next_offset) AS first_offset
    FROM shared_logs l WHERE ($1::text IS NULL OR l.topic = $1) AND NOT l.moving
   ORDER BY l.topic, l.partition"""
SERVER = "SELECT clock_timestamp() AS now, shared_timeline() AS timeline"
# The partitions that do not exist.
CREATE = """
  INSERT INTO shared_logs (topic, partition, incarnation, timeline, changed_at)
  SELECT $1, n, coalesce((SELECT l.incarnation FROM shared_logs l WHERE l.topic = $1 LIMIT 1), $3),
         shared_timeline(), clock_timestamp()
    FROM generate_series(0, $2 - 1) n
   WHERE NOT EXISTS (SELECT 1 FROM shared_logs l WHERE l.topic = $1 AND l.moving)
      ON CONFLICT (topic, partition) DO NOTHING"""
CONFIGURE = """
  UPDATE shared_logs SET policy = coalesce($2, policy), limits = coalesce($3, limits)
   WHERE topic = $1"""
# What is left of it goes in steps (`mover`): an append never waits for that.
DROP = """
  WITH gone AS (DELETE FROM shared_logs WHERE topic = $1 AND NOT moving RETURNING id),
       offsets AS (DELETE FROM shared_offsets o USING gone g WHERE o.log_id = g.id),
       leases AS (DELETE FROM shared_leases o USING gone g WHERE o.log_id = g.id),
       noted AS (INSERT INTO shared_removals (log_id, due_at)
                 SELECT id, clock_timestamp() FROM gone)
  SELECT id FROM gone"""
ENDS = "SELECT id, next_offset FROM shared_logs WHERE id = ANY ($1)"
NOTIFY = "SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2)"


class SharedTopics:
    def __init__(
        self,
        database: Database,
        settings: TopicsSettings,
        instruments: Instruments,
        metrics: Metrics,
        store: ObjectStore | None = None,
        clock: Callable[[], float] = time.time,
        saved: Path | None = None,
    ) -> None:
        self._clock = clock
        self._saved = saved  # the file with the catalog
        self.database = database
        self.groups = SharedGroups(database, settings.lease_time)
        self.nodes = SharedNodes(database, metrics)
        self.settings = settings
        self._metrics = metrics
        self._logs: dict[str, SharedLog] = {}  # by label
        self._by_id: dict[int, SharedLog] = {}
        self._partitions: dict[str, int] = {}  # by topic
        self._channel = f"{database.settings.db_schema}_shared_topics"
        self._broker = uuid7().hex
        self._ends: dict[int, int] = {}  # ends of logs to announce
        self._changed = False  # new or deleted topics are to be announced
        self._unsaved = False  # the file does not have them yet
        self._unannounced = asyncio.Event()  # there is something to announce
        self._stale = asyncio.Event()  # the catalog must be read
        self._loaded = asyncio.Event()  # the catalog was read at least once
        self._catching_up: dict[int, asyncio.Task[None]] = {}
        self._timeline: int | None = None
        self._identity: int | None = None  # of the database in the file, until it is compared
        self._rewind = False  # the timeline has changed since the catalog was read
        self._clock_offset = 0.0  # seconds by which the database's clock is ahead of ours
        self._tasks: list[asyncio.Task[None]] = []
        self.on_create: Callable[[str], None] = lambda _: None  # gets the name of each new log
        # Gets each log that is deleted, here or by another broker.
        self.on_delete: Callable[[SharedLog], None] = lambda _: None
        flush_seconds = metrics.histogram(
            "penstock_shared_flush_seconds", "Time of one call that appends to shared topics"
        )
        self.context = SharedContext(
            database=database,
            settings=settings,
            flusher=Flusher(database, self._note_answer, flush_seconds.observe),
            objects=SharedObjects(store),
            recent=ChunkCache(settings.shared_cache),
            older=ChunkCache(min(OLDER_BYTES, settings.shared_cache)),
            instruments=instruments,
            now=lambda: int((clock() + self._clock_offset) * 1e6),
            announce=self._announce,
            on_gone=self._stale.set,
            configure=self.configure,
        )
        self.mover = Mover(
            database,
            settings,
            lambda: list(self._logs.values()),
            self.context.objects,
            self.context.now,
            metrics,
        )
        metrics.gauge(
            "penstock_shared_topics",
            "Number of shared topics",
            read=lambda: len(self._partitions),
            merge="max",
        )
        metrics.gauge(
            "penstock_shared_cache_bytes",
            "Bytes of shared topics in memory",
            read=lambda: self.context.recent.size + self.context.older.size,
        )
        self._notices = metrics.counter(
            "penstock_shared_notices_total", "Notices about shared topics, sent and received", "way"
        )

    async def start(self) -> None:
        """Read the catalog. If the database is down, read the file, and wait for the database in
        the background.
        """
        self._tasks = [
            supervised("shared topics' catalog", self._keep_reading, self._metrics),
            supervised("shared topics' notices", self._keep_announcing, self._metrics),
            supervised("shared topics' watch", self._keep_polling, self._metrics),
        ]
        self._stale.set()
        await self.database.listen(self._channel, self._receive)
        await self.mover.start()
        try:
            async with asyncio.timeout(START_SECONDS if self.database.healthy else 0):
                await self._loaded.wait()
        except TimeoutError:
            self._restore()

    def _restore(self) -> None:
        """Add the logs that the file names."""
        try:
            text = parse_checked(self._saved.read_bytes()) if self._saved is not None else None
        except OSError:
            return  # the database has never been reached
        if text is not None:
            self._identity, self._timeline, rows = json.loads(text)
            self._add(rows)
            self._rewind = True  # the ends in the file may be ahead of the database
            self._loaded.set()
            self.database.on_change(self._drop_foreign)
            self._drop_foreign(self.database.healthy)

    def _drop_foreign(self, healthy: bool) -> None:
        """Drop the logs of the file if this is another database: its ids name other logs."""
        if healthy and self._identity is not None:
            if self._identity != self.database.identity:
                for topic in self.names():
                    self._drop(topic)
                self._loaded.clear()
            self._identity = None

    async def _save(self) -> None:
        if self._saved is None or not self._loaded.is_set() or self.database.identity is None:
            return  # the list is incomplete, or it is the one in the file
        self._unsaved = False
        rows = [
            {
                "id": one.log_id,
                "topic": one.topic,
                "partition": one.partition,
                "incarnation": one.incarnation,
                "policy": one.policy,
                "limits": msgspec.json.encode(one.limits).decode(),
                "first_offset": one.first_offset,
                "next_offset": one.next_offset,
            }
            for one in self._logs.values()
        ]
        text = pack_checked(json.dumps([self.database.identity, self._timeline, rows]))
        try:
            await self.context.objects.run(DISK.replace, self._saved, text)
        except StorageError as error:  # it is saved again with the next catalog
            log.warning("the list of shared topics is not saved: %s", error)

    @property
    def timeline(self) -> int:
        """Return the server's timeline. Kafka clients see it as the leader epoch."""
        return self._timeline or 0

    async def stop(self) -> None:
        await self.nodes.stop()
        await self.mover.stop()
        for shared in self._logs.values():
            shared.appends.close()
            while shared.appends.busy:  # until all appends are stored or refused
                shared.appends.commit()
                await self.context.flusher.drain()
                await asyncio.sleep(0)
        for task in [*self._tasks, *self._catching_up.values()]:
            await cancelled(task)
        with suppress(Unavailable, asyncpg.PostgresError):
            await self._notify()
        await self._save()
        self.context.objects.stop()

    # Topics by name

    def names(self) -> list[str]:
        return list(self._partitions)

    def __iter__(self) -> Any:
        return iter(list(self._logs.values()))

    def get(self, label: str) -> SharedLog | None:
        return self._logs.get(label)

    def partitions(self, topic: str) -> int:
        return self._partitions.get(topic, 0)

    async def find(self, topic: str) -> SharedLog | None:
        """Return the topic if it exists, even if another broker has just created it."""
        if topic not in self._partitions:
            if self.database.healthy:
                self._add(await self.database.read(LOGS, topic))
            else:
                self.refuse_unknown(topic)
        return self._logs.get(topic)

    def refuse_unknown(self, topic: str) -> None:
        """Raise Unavailable while no list of shared topics was read: the topic may be one."""
        if not self._loaded.is_set():
            raise Unavailable(f"it is not known yet whether topic {topic!r} is a shared one")

    async def create(self, topic: str, partitions: int) -> SharedLog:
        check_name(topic)
        existing = self._logs.get(topic)
        if existing is not None:
            return existing
        await self.database.read(CREATE, topic, partitions, uuid7())
        await self.announce_topic(topic)
        if topic not in self._logs:
            raise Unavailable(f"topic {topic!r} is being moved here by another broker")
        return self._logs[topic]

    async def add_partitions(self, topic: str, count: int) -> None:
        if count <= self.partitions(topic):
            raise InvalidRequest(
                f"topic {topic!r} has {self.partitions(topic)} partitions; none can be removed"
            )
        await self.database.read(CREATE, topic, count, uuid7())
        await self.announce_topic(topic)

    async def announce_topic(self, topic: str) -> None:
        """Serve a new or changed topic, and announce it to the other brokers."""
        self._add(await self.database.read(LOGS, topic))
        self._announce_change()

    async def delete(self, topic: str) -> None:
        if not await self.database.read(DROP, topic) and topic not in self._partitions:
            raise NotFound(f"topic {topic!r} does not exist")
        self._drop(topic)
        self._announce_change()

    async def configure(self, topic: str, policy: str | None, limits: TopicLimits | None) -> None:
        """Change the policy or the limits of a topic."""
        if policy not in (None, DELETE, COMPACT):
            raise InvalidRequest(f"a topic's policy is {DELETE!r} or {COMPACT!r}, not {policy!r}")
        packed = None if limits is None else msgspec.json.encode(limits).decode()
        await self.database.read(CONFIGURE, topic, policy, packed)
        await self.announce_topic(topic)

    def _announce_change(self) -> None:
        self._changed = True
        self._unannounced.set()
        self._unsaved = True

    def _add(self, rows: Sequence[Row], *, rewind: bool = False) -> None:
        """Add or update these logs. With `rewind`, their ends may have moved back."""
        for row in rows:
            existing = self._by_id.get(row["id"])
            if existing is not None:
                existing.apply_settings(row)
                existing.first_offset = max(existing.first_offset, row["first_offset"])
                if rewind:
                    existing.next_offset = row["next_offset"]
                self._advance(existing, row["next_offset"])
                continue
            shared = SharedLog(row, self.context)
            before = self._logs.get(shared.name)
            if before is not None:
                if before.log_id > shared.log_id:
                    continue  # the row is older than our log of this name
                self._forget(before)
            self._logs[shared.name] = self._by_id[shared.log_id] = shared
            self._partitions[shared.topic] = max(
                self._partitions.get(shared.topic, 0), shared.partition + 1
            )
            self.on_create(shared.name)

    def _drop(self, topic: str) -> None:
        for number in range(self._partitions.pop(topic, 0)):
            shared = self._logs.pop(partition_label(topic, number), None)
            if shared is not None:
                self._forget(shared)

    def _forget(self, shared: SharedLog) -> None:
        self._by_id.pop(shared.log_id, None)
        shared.mark_deleted()
        self.on_delete(shared)

    async def _keep_reading(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CATALOG_SECONDS):
                    await self._stale.wait()
            self._stale.clear()
            await self.database.recovered()
            try:
                await self.read_catalog()
            except (Unavailable, asyncpg.PostgresError) as error:
                log.warning("the shared topics could not be listed: %s", error)
                await asyncio.sleep(POLL_SECONDS / 2)
                self._stale.set()

    async def read_catalog(self) -> None:
        """Read the catalog."""
        existing = list(self._by_id.values())  # one that is created meanwhile may be in no row
        [server] = await self.database.read(SERVER)
        self._clock_offset = server["now"].timestamp() - self._clock()
        self._check_timeline(server["timeline"])
        rows = await self.database.read(LOGS, None)
        if self._rewind:
            self._clear_caches()
        rewind, self._rewind = self._rewind, False
        stored = {(row["id"], row["incarnation"]) for row in rows}
        for shared in existing:
            gone = (shared.log_id, shared.incarnation) not in stored
            if gone and self._logs.get(shared.name) is shared:
                self._drop(shared.topic)
        self._add(rows, rewind=rewind)
        self._loaded.set()
        await self._save()

    # Appends of other brokers

    def _note_answer(self, answer: Row) -> None:
        self._clock_offset = answer["at"].timestamp() - self._clock()
        self._check_timeline(answer["timeline"])

    def _check_timeline(self, timeline: int) -> None:
        """Drop all caches if the server's timeline has changed."""
        if self._timeline == timeline:
            return
        if self._timeline is not None:
            log.warning(
                "the timeline of the database is %d and was %d: a standby was promoted or a backup "
                "was restored. The cache of shared topics is dropped",
                timeline,
                self._timeline,
            )
            self._clear_caches()
            self._rewind = True
            self._stale.set()
        self._timeline = timeline

    def _clear_caches(self) -> None:
        self.context.recent.clear()
        self.context.older.clear()

    def _announce(self, log_id: int, end: int) -> None:
        self._ends[log_id] = end
        self._unannounced.set()

    async def _keep_announcing(self) -> None:
        while True:
            await self._unannounced.wait()
            self._unannounced.clear()
            with suppress(Unavailable):  # other brokers read the catalog when they reconnect
                await self._notify()
            await asyncio.sleep(NOTIFY_SECONDS)

    async def _notify(self) -> None:
        ends, self._ends = self._ends, {}
        changed, self._changed = self._changed, False
        if not (ends or changed):
            return
        items = list(ends.items())
        for i in range(0, max(1, len(items)), MAX_NOTIFIED):
            payload = json.dumps([self._broker, changed, items[i : i + MAX_NOTIFIED]])
            await self.database.fetch(NOTIFY, self._channel, payload)
            self._notices.add(1, "sent")

    def _receive(self, payload: str | None) -> None:
        if payload is None:  # connected: notices may have been lost
            self._stale.set()
            return
        broker, changed, ends = json.loads(payload)
        if broker == self._broker:
            return
        self._notices.add(1, "heard")
        if changed:
            self._stale.set()
        for log_id, end in ends:
            shared = self._by_id.get(log_id)
            if shared is None:
                self._stale.set()
            else:
                self._advance(shared, end)

    def _advance(self, shared: SharedLog, end: int) -> None:
        """Note that another broker has appended. If the log is watched, load the records."""
        if end <= shared.next_offset:
            return
        if not shared.watched:
            shared.advance(end)
            return
        shared.announced = max(end, shared.announced)
        if shared.log_id not in self._catching_up:
            task = asyncio.get_running_loop().create_task(self._catch_up(shared))
            self._catching_up[shared.log_id] = task

    async def _catch_up(self, shared: SharedLog) -> None:
        try:
            await shared.catch_up()
        except (PenstockError, asyncpg.PostgresError) as error:
            log.info("topic %s: new records will be read at the next poll: %s", shared.name, error)
        finally:
            del self._catching_up[shared.log_id]

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self._unsaved:
                await self._save()
            watched = [one.log_id for one in self._by_id.values() if one.watched]
            if not watched or not self.database.healthy:
                continue
            try:
                rows = await self.database.read(ENDS, watched)
            except (Unavailable, asyncpg.PostgresError):
                continue  # until the next poll
            for row in rows:
                shared = self._by_id.get(row["id"])
                if shared is not None:
                    self._advance(shared, row["next_offset"])
            if len(rows) < len(watched):
                self._stale.set()

    async def scrub(self) -> AsyncIterator[tuple[int, list[Finding]]]:
        """Check all logs, if this broker runs the mover. Yield bytes and findings."""
        for row in await self.database.read(LOGS, None) if self.mover.active else []:
            report = report_of(row)
            async for size in check(
                row["id"], report, self.database.browse, self.context.objects.read
            ):
                findings, report.findings = report.findings, []
                for finding in findings:
                    log.error("topic %s: %s: %s (scrub)", report.topic, finding.file, finding.what)
                yield size, findings
