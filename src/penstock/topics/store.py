"""All topics of a data directory.

Every topic is opened at the start, so that damage is reported at once and sizes are known. After a
clean stop, this reads a checkpoint and a few rows of its indexes (in the pool, about 0.2 ms). Files
are only open while they are used. A topic that cannot be read at all is logged and counted, and the
others are served.

A topic has a log per partition, each a `Topic`. The log of partition 0 has the topic's name, the
others `name/number`. Logs in aiq's layout are directories in the data directory (aiq treats every
directory there as a topic), and such a topic has one partition. Record batches are in
`.penstock/logs/<topic>/<partition>/`. They are created elsewhere and renamed into place, all
partitions at once.

Shared topics, which belong to no broker, are in `penstock.topics.shared`. A name is searched on
this disk first, then among them. Iterating over the store yields the logs on this disk.

To delete a topic, its directory is renamed, which is atomic, and then removed. Its name is taken
until then. Otherwise `create` could recover the old files, and the rename would remove records that
were appended since.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from penstock.config.schema import TopicsSettings
from penstock.database import Database
from penstock.errors import (
    Conflict,
    Damaged,
    InvalidRequest,
    NotFound,
    PenstockError,
    StorageError,
    StorageFailed,
    Unavailable,
)
from penstock.io.fs import DISK, Fs
from penstock.io.tasks import cancelled, supervised
from penstock.log.aiq.format import AIQ
from penstock.log.batches.format import BATCHES
from penstock.log.context import Context
from penstock.log.format import SegmentFormat
from penstock.log.formats import FORMATS
from penstock.log.layout import LOGS, PRIVATE
from penstock.log.recovery import RecoveredTopic, create_files, recover
from penstock.log.verify import Finding
from penstock.metrics import Metrics
from penstock.object_store import ObjectStore
from penstock.protocol.ids import uuid7
from penstock.protocol.names import check_name, is_topic_name, partition_label, split_label
from penstock.topics.compaction import Swapped, compact
from penstock.topics.key_compaction import compact_by_key
from penstock.topics.retention import delete_before, retain
from penstock.topics.scrub import Scrub
from penstock.topics.shared.catalog import SharedTopics
from penstock.topics.shared.log import SharedLog
from penstock.topics.tier.tier import Tier
from penstock.topics.topic import Topic

log = logging.getLogger("penstock.topics")

AnyLog = Topic | SharedLog
LOCAL, SHARED = PLACEMENTS = "local", "shared"
TRASH, UNFINISHED = "deleted-topics", "new-topics"
MAX_PARTITIONS = 1024
IDLE_SECONDS = 30.0
TOPICS_PER_STEP = 256
# The errors that damaged files may cause. The topic is left out, and the others are served.
CANNOT_OPEN = (PenstockError, OSError, ValueError, LookupError, ArithmeticError)


class Deletion(NamedTuple):
    """The deletion of a topic, in progress or failed."""

    partitions: list[Topic]
    task: asyncio.Task[None]


class LogDirectory(NamedTuple):
    """A partition's log on disk."""

    label: str
    path: Path
    form: SegmentFormat


class TopicStore:
    def __init__(
        self,
        directory: Path,
        settings: TopicsSettings,
        *,
        fs: Fs = DISK,
        pool: Executor,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory
        self.settings = settings
        self._fs = fs
        self.context = Context(directory, settings, fs, pool, metrics, clock)
        self._topics: dict[str, Topic] = {}  # partitions, by label
        self._partitions: dict[str, int] = {}  # how many each topic has
        self._creating: dict[str, asyncio.Task[AnyLog]] = {}  # names that are not in `_topics`
        self._deleting: dict[str, Deletion] = {}  # nor are these; `create` waits for them
        self._awaited: dict[str, set[asyncio.Future[None]]] = {}  # callers that wait for a name
        self.unreadable: dict[str, str] = {}  # topics that could not be opened, and why
        self._maintenance: asyncio.Task[None] | None = None
        # References to tasks: a task without one may be garbage-collected.
        self._compactions: set[asyncio.Task[Swapped]] = set()
        self.shared: SharedTopics | None = None
        self.tier = (
            Tier(self.context, directory / PRIVATE, self, metrics) if settings.tier else None
        )
        self.scrub = Scrub(self.context, directory / PRIVATE, self, self._scrub_shared, metrics)
        self._running = False
        self._deletions: list[Callable[[AnyLog], None]] = [
            lambda topic: metrics.forget("topic", topic.name)
        ]
        metrics.gauge("penstock_topics", "Number of topics", read=lambda: len(self._partitions))
        metrics.gauge(
            "penstock_topics_unreadable",
            "Topics that could not be opened",
            read=lambda: len(self.unreadable),
        )
        metrics.gauge(
            "penstock_topic_open_segments",
            "Segments whose files are open",
            read=lambda: len(self.context.open_files),
        )
        metrics.gauge(
            "penstock_topic_stored_bytes",
            "Bytes of all topics on the local disk",
            read=lambda: sum(t.local_bytes for t in self),
        )

    def share(self, database: Database) -> SharedTopics:
        """Also serve the shared topics of this database. The caller starts the returned object."""
        store = ObjectStore(self.settings.shared_tier) if self.settings.shared_tier else None
        self.shared = SharedTopics(
            database,
            self.settings,
            self.context.instruments,
            self.context.metrics,
            store,
            saved=self.directory / PRIVATE / "shared-topics",
        )
        self.shared.on_create = self._wake_awaiting
        self.shared.on_delete = self._forget
        return self.shared

    def _forget(self, log: AnyLog) -> None:
        for forget in self._deletions:
            forget(log)

    async def _scrub_shared(self) -> AsyncIterator[tuple[int, list[Finding]]]:
        if self.shared is not None:
            async for checked in self.shared.scrub():
                yield checked

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self._topics.values()))

    async def start(self) -> None:
        await self.context.run(self._prepare)
        if self.tier is not None:
            await self.tier.prepare()
        logs = await self.context.run(self._find_logs)
        for i in range(0, len(logs), TOPICS_PER_STEP):
            step = logs[i : i + TOPICS_PER_STEP]
            for location, recovered in await self.context.run(self._open_many, step):
                self._add(location, recovered)
        self._running = True
        self._maintenance = supervised("topic maintenance", self._maintain, self.context.metrics)
        await self.scrub.start()
        if logs:
            log.info("opened %d topics in %s", len(self._partitions), self.directory)

    def _add(self, location: LogDirectory, recovered: RecoveredTopic) -> Topic:
        topic = self._topics[location.label] = Topic(
            location.label, location.path, self.context, recovered
        )
        self._partitions[topic.topic] = max(
            self._partitions.get(topic.topic, 0), topic.partition + 1
        )
        return topic

    def _prepare(self) -> None:
        private = self.directory / PRIVATE
        self._fs.make_dir(private / TRASH)
        for place in (TRASH, UNFINISHED):
            for name in self._fs.list_dir(private / place):
                self._fs.remove_tree(private / place / name)

    def _find_logs(self) -> list[LogDirectory]:
        by_name = {
            name: [LogDirectory(name, self.directory / name, AIQ)]
            for name in self._fs.list_dir(self.directory)
            if is_topic_name(name) and self._fs.is_dir(self.directory / name)
        }
        logs = self.directory / PRIVATE / LOGS
        for name in filter(is_topic_name, self._fs.list_dir(logs)):
            if name in by_name:
                self._refuse(f"{name}/0", f"{self.directory / name} has the same name")
                continue
            numbers = sorted(int(one) for one in self._fs.list_dir(logs / name) if one.isdigit())
            by_name[name] = [
                LogDirectory(partition_label(name, number), logs / name / str(number), BATCHES)
                for number in numbers
            ]
            for number in sorted(set(range(max(numbers, default=-1))) - set(numbers)):
                path = logs / name / str(number)
                self._refuse(partition_label(name, number), f"{path} is missing")
        return [one for partitions in by_name.values() for one in partitions]

    def _open_many(self, logs: list[LogDirectory]) -> list[tuple[LogDirectory, RecoveredTopic]]:
        opened = []
        for location in logs:
            try:
                opened.append((location, recover(location.form, self.context, location.path)))
            except CANNOT_OPEN as error:
                self._refuse(location.label, error)
        return opened

    def _refuse(self, label: str, why: Exception | str) -> None:
        self.unreadable[label] = str(why)
        self.context.instruments.damage.add(1, "refused")
        unexpected = isinstance(why, Exception) and not isinstance(why, PenstockError)
        log.error("topic %s cannot be opened: %s", label, why, exc_info=unexpected)

    async def stop(self) -> None:
        self._running = False
        await cancelled(self._maintenance)
        self._maintenance = None
        await self.scrub.stop()
        changing = [*self._creating.values(), *(one.task for one in self._deleting.values())]
        await asyncio.gather(*changing, return_exceptions=True)
        topics = list(self._topics.values())
        for i in range(0, len(topics), TOPICS_PER_STEP):
            await asyncio.gather(*(topic.stop() for topic in topics[i : i + TOPICS_PER_STEP]))

    # Topics by name

    def names(self) -> list[str]:
        if self.shared is None:
            return sorted(self._partitions)
        return sorted({*self._partitions, *self.shared.names()})

    def partitions(self, name: str) -> int:
        """Return the number of partitions; 0 if the topic does not exist."""
        local = self._partitions.get(name, 0)
        return local or (self.shared.partitions(name) if self.shared is not None else 0)

    @property
    def has_shared(self) -> bool:
        return self.shared is not None and bool(self.shared.names())

    def is_shared(self, name: str) -> bool:
        """Return whether the topic of this name is shared."""
        return isinstance(self.get(name), SharedLog)

    def partition(self, name: str, number: int) -> AnyLog:
        """Return the log of a partition."""
        count = self.partitions(name)
        if not 0 <= number < count:
            what = f"has {count} partitions, not {number}" if count else "does not exist"
            raise NotFound(f"topic {name!r} {what}")
        return self.require(partition_label(name, number))

    @property
    def disk_full(self) -> str | None:
        """Return why appends are refused if the disk is full, else None."""
        return self.context.space.full

    def get(self, name: str) -> AnyLog | None:
        """Return partition 0 of this topic, or the partition with this label; None if missing."""
        topic = self._topics.get(name)
        if topic is None and self.shared is not None:
            return self.shared.get(name)
        return topic

    def local(self, name: str) -> Topic:
        """Return the topic of this name. Raises Conflict if it is shared."""
        topic = self.require(name)
        if isinstance(topic, SharedLog):
            raise Conflict(f"topic {name!r} is shared: it has no segments on this broker")
        return topic

    def find(self, name: str) -> AnyLog | None:
        """Return the topic; None if it does not exist. Raises if the name is invalid, or if the
        topic could not be opened or may be a shared one, since it may have records.
        """
        topic = self.get(name)
        if topic is None:
            check_name(name)
            self._refuse_unreadable(name)
            if self.shared is not None:
                self.shared.refuse_unknown(name)
        return topic

    def _refuse_unreadable(self, name: str) -> None:
        if name in self.unreadable:
            raise StorageFailed(f"topic {name!r} cannot be opened: {self.unreadable[name]}")

    def require(self, name: str) -> AnyLog:
        topic = self.get(name)
        if topic is None:
            raise NotFound(f"topic {name!r} does not exist")
        return topic

    async def wait_for(self, name: str) -> AnyLog:
        """Return the topic of this name as soon as there is one."""
        check_name(split_label(name)[0])
        while (topic := self.get(name)) is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._awaited.setdefault(name, set()).add(waiter)
            try:
                await waiter
            finally:
                self._awaited[name].discard(waiter)
                if not self._awaited[name]:
                    del self._awaited[name]
        return topic

    async def create(
        self,
        name: str,
        *,
        form: str | None = None,
        partitions: int = 1,
        placement: str | None = None,
    ) -> AnyLog:
        """Return the topic of this name (its partition 0); create it if it does not exist.

        `form` and `placement` override the settings. More than one partition requires record
        batches, which shared topics always have.
        """
        if form == SHARED:  # the TCP command has no field for the placement
            form, placement = None, SHARED
        if placement not in (None, *PLACEMENTS):
            raise InvalidRequest(f"a topic's placement is local or shared, not {placement!r}")
        topic = self.get(name)
        if topic is not None:
            if isinstance(topic, Topic) and placement == SHARED:
                raise Conflict(
                    f"topic {name!r} is a local topic of this broker; "
                    f"`penstock topic move {name} --shared` makes it shared"
                )
            return topic
        whole, _, number = name.partition("/")
        if number.isdecimal() and 0 < self.partitions(whole) <= int(number):
            return self.partition(whole, int(number))  # raises NotFound: it has fewer
        check_name(name)
        if not self._running:
            raise Unavailable("topics are not running")
        self._refuse_unreadable(name)
        wanted = placement or (LOCAL if form == AIQ.name else self.settings.placement)
        if self.shared is not None and wanted == SHARED:
            _format_of(BATCHES.name if form is None else form, partitions)
            if form == AIQ.name:
                raise InvalidRequest(f"a shared topic has the format {BATCHES.name!r}")
            return await self.shared.create(name, partitions)
        chosen = _format_of(form or self.settings.format, partitions)
        making = self._creating.get(name)
        if making is None:
            work = self._create(name, chosen, partitions)
            making = self._creating[name] = asyncio.get_running_loop().create_task(work)
        return await asyncio.shield(making)

    async def _create(self, name: str, form: SegmentFormat, partitions: int) -> AnyLog:
        """Create a local topic. `_creating` has the name from the first step to the last: a log
        that is opened twice would be damaged by its two writers.
        """
        try:
            if self.shared is not None:  # another broker may have created it a moment ago
                existing = await self.shared.find(name)
                if existing is not None:
                    return existing
            await self._wait_for_deletion(name)
            self.context.space.take(0)
            made = await self.context.run(self._make, name, form, range(partitions))
            for location, recovered in made:
                self._add(location, recovered)
            self._wake_awaiting(name)
            return self._topics[name]
        finally:
            del self._creating[name]

    def _wake_awaiting(self, name: str) -> None:
        for waiter in self._awaited.get(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def add_partitions(self, name: str, count: int) -> None:
        """Add partitions, so that the topic has `count`."""
        before = self.require(name)
        if before.format is AIQ:
            raise Conflict(f"topic {name!r} has aiq's layout, which has one partition")
        _format_of(BATCHES.name, count)
        if self.shared is not None and isinstance(before, SharedLog):
            await self.shared.add_partitions(name, count)
            return
        await self.wait_for_creation(name)
        self._refuse_moving(self.require(name))
        work = self._add_partitions(name, count)
        making = self._creating[name] = asyncio.get_running_loop().create_task(work)
        await asyncio.shield(making)

    async def _add_partitions(self, name: str, count: int) -> AnyLog:
        try:
            numbers = range(self.partitions(name), count)
            if not numbers:
                raise InvalidRequest(
                    f"topic {name!r} has {self.partitions(name)} partitions: partitions are not "
                    "removed"
                )
            first = self._topics[name]
            for location, recovered in await self.context.run(self._make, name, BATCHES, numbers):
                self._add(location, recovered)
                added = self._topics[location.label]
                await added.set_policy(first.policy)
                await added.set_limits(replace(first.limits, start=0))
            return first
        finally:
            del self._creating[name]

    async def wait_for_creation(self, name: str) -> None:
        """Wait while the topic, or a partition of it, is being created."""
        while name in self._creating:
            await asyncio.wait([self._creating[name]])

    async def _wait_for_deletion(self, name: str) -> None:
        deletion = self._deleting.get(name)
        if deletion is not None:
            await asyncio.wait([deletion.task])
            if name in self._deleting:
                raise StorageFailed(
                    f"topic {name!r} could not be deleted: {deletion.task.exception()}"
                )

    def _make(
        self, name: str, form: SegmentFormat, numbers: range
    ) -> list[tuple[LogDirectory, RecoveredTopic]]:
        """Create the empty logs of these partitions."""
        if form is AIQ:
            location = LogDirectory(name, self.directory / name, AIQ)
            self._make_empty(AIQ, location.path, location.path)
            return [(location, recover(AIQ, self.context, location.path))]
        private = self.directory / PRIVATE
        logs, unfinished = private / LOGS / name, private / UNFINISHED / uuid7().hex
        for number in numbers:
            self._make_empty(form, unfinished / str(number), unfinished)
        self._fs.make_dir(logs.parent)
        if numbers[0]:
            for number in numbers:
                self._fs.rename(unfinished / str(number), logs / str(number))
            self._fs.sync_dir(logs)
            self._fs.remove_tree(unfinished)
        else:
            self._fs.rename(unfinished, logs)
            for changed in (logs.parent, private, self.directory):
                self._fs.sync_dir(changed)
        made = [
            LogDirectory(partition_label(name, number), logs / str(number), form)
            for number in numbers
        ]
        return [(location, recover(form, self.context, location.path)) for location in made]

    def _make_empty(self, form: SegmentFormat, directory: Path, whole: Path) -> None:
        """Create the files of an empty log. If that fails, remove `whole`."""
        context = self.context
        try:
            create_files(form, self._fs, directory, context.open_state, sync=context.durable)
        except StorageError:
            self._fs.remove_tree(whole)
            raise

    async def delete(self, name: str) -> None:
        """Delete the topic. Cancelling the caller does not interrupt it. After a failure the name
        stays taken until another `delete` succeeds.
        """
        if self.shared is not None and isinstance(self.get(name), SharedLog):
            await self.shared.delete(name)
            return
        if name in self._partitions:  # else a partition being added would outlive the others
            await self.wait_for_creation(name)
        failed = self._deleting.get(name)
        if failed is None or not failed.task.done():
            self._refuse_moving(self.require(name))
        await self.delete_local(name)

    def _refuse_moving(self, topic: AnyLog) -> None:
        if topic.appends.moving:
            raise Unavailable(f"topic {topic.name!r} is being moved")

    async def delete_local(self, name: str) -> None:
        """Delete the topic on this disk, if there is one. A shared topic of its name is kept."""
        failed = self._deleting.get(name)
        if failed is not None and failed.task.done():
            partitions = failed.partitions
        else:
            labels = [partition_label(name, n) for n in range(self._partitions.pop(name, 0))]
            partitions = [self._topics.pop(label) for label in labels if label in self._topics]
            if not partitions:
                return
        task = asyncio.get_running_loop().create_task(self._delete(name, partitions))
        self._deleting[name] = Deletion(partitions, task)
        await asyncio.shield(task)

    async def _delete(self, name: str, partitions: list[Topic]) -> None:
        try:
            for topic in partitions:
                await topic.mark_deleted()
                self._forget(topic)
                if self.tier is not None:
                    await self.tier.note_deletion(topic)
            await self.context.run(self._remove, partitions[0])
        except StorageError as error:
            log.error("topic %s could not be deleted: %s", name, error)
            raise
        del self._deleting[name]

    def _remove(self, topic: Topic) -> None:
        trash = self.directory / PRIVATE / TRASH / f"{topic.incarnation}-{uuid7().hex}"
        directory = topic.directory if topic.format is AIQ else topic.directory.parent
        if self._fs.exists(directory):
            self._fs.rename(directory, trash)
            self._fs.sync_dir(directory.parent)
        try:
            self._fs.remove_tree(trash)
        except StorageError as error:
            log.warning("the next start removes %s: %s", trash.name, error)

    async def delete_before(self, topic: AnyLog, offset: int) -> None:
        """Delete the records before this offset."""
        if isinstance(topic, SharedLog):
            await topic.drop_before(offset)
        else:
            await delete_before(topic, offset, self.tier)

    def on_delete(self, callback: Callable[[AnyLog], None]) -> None:
        """Call `callback` with each log that is deleted."""
        self._deletions.append(callback)

    async def compact(
        self, name: str, bases: Sequence[int], keep: bytes, incarnation: str | None = None
    ) -> Swapped:
        """Swap these adjacent sealed segments for one with only the records in `keep`.

        `keep` has a bit for each offset from the first base on, the lowest bit of a byte first.
        Cancelling the caller does not interrupt it.
        """
        work = compact(self.local(name), self.context, bases, keep, incarnation)
        task = asyncio.get_running_loop().create_task(work)
        self._compactions.add(task)
        task.add_done_callback(self._compactions.discard)
        return await asyncio.shield(task)

    # Maintenance

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(self.settings.retention_interval)
            await self.maintain()

    async def maintain(self) -> None:
        """Roll old segments, apply retention and compaction, and close idle files."""
        self.context.space.check()
        for topic in self:
            if topic.ending:  # it was deleted since the loop began
                continue
            try:
                await retain(topic, self.context, self.tier)
                await compact_by_key(topic, self.context)
                await topic.close_if_idle(IDLE_SECONDS)
            except (StorageError, Conflict, NotFound, Damaged, Unavailable) as error:
                log.error("topic %s: maintenance failed: %s", topic.name, error)


def _format_of(name: str, partitions: int) -> SegmentFormat:
    form = FORMATS.get(name)
    if form is None:
        raise InvalidRequest(f"a topic's format is one of {', '.join(FORMATS)}, not {name!r}")
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InvalidRequest(f"a topic has 1 to {MAX_PARTITIONS} partitions, not {partitions}")
    if form is AIQ and partitions > 1:
        raise InvalidRequest(f"more than one partition requires the format {BATCHES.name!r}")
    return form
