"""All topics of a data directory.

Every topic is opened at start, which for one that was stopped cleanly means reading a checkpoint
and a few rows of its indexes (in the pool, some 0.2 ms), so that damage is reported at once and
sizes are known; files are only held open while they are used. A topic that cannot be read at all is
left out, logged and counted: the others are served.

A topic is deleted by renaming its directory away, which is atomic, and removing it after.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

from penstock.config.schema import Topics
from penstock.errors import (
    Conflict,
    NotFound,
    PenstockError,
    StorageError,
    StorageFailed,
    Unavailable,
)
from penstock.io.fs import DISK, Fs
from penstock.io.tasks import cancelled
from penstock.log.aiq.format import AIQ
from penstock.log.context import Context
from penstock.log.recovery import Recovered, create_files, recover
from penstock.metrics import Metrics
from penstock.protocol.ids import uuid7
from penstock.protocol.names import check_name, is_topic_name
from penstock.topics.compaction import Swapped, compact
from penstock.topics.retention import retain
from penstock.topics.scrub import Scrub
from penstock.topics.tier.tier import Tier
from penstock.topics.topic import Topic

log = logging.getLogger("penstock.topics")

PRIVATE = ".penstock"
TRASH = "deleted-topics"
IDLE_SECONDS = 30.0
TOPICS_PER_STEP = 256
# Whatever a topic's files may do to the code that reads them: the topic is left out, the others are
# served.
CANNOT_OPEN = (PenstockError, OSError, ValueError, LookupError, ArithmeticError)


class TopicStore:
    def __init__(
        self,
        directory: Path,
        settings: Topics,
        *,
        fs: Fs = DISK,
        pool: Executor,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory
        self.settings = settings
        self._fs = fs
        self._context = Context(directory, settings, fs, pool, metrics, clock)
        self._topics: dict[str, Topic] = {}
        self._creating: dict[str, asyncio.Future[Topic]] = {}
        self.unreadable: dict[str, str] = {}  # topics that could not be opened, and why
        self._maintenance: asyncio.Task[None] | None = None
        # A task that nobody refers to may be collected.
        self._compactions: set[asyncio.Task[Swapped]] = set()
        self.tier = (
            Tier(self._context, directory / PRIVATE, self, metrics) if settings.tier else None
        )
        self.scrub = Scrub(self._context, directory / PRIVATE, self, metrics)
        self._running = False
        self._deletions: list[Callable[[Topic], None]] = []
        metrics.gauge("penstock_topics", "Number of topics", read=lambda: len(self._topics))
        metrics.gauge(
            "penstock_topics_unreadable",
            "Topics that could not be opened",
            read=lambda: len(self.unreadable),
        )
        metrics.gauge(
            "penstock_topic_open_segments",
            "Segments whose files are open",
            read=lambda: len(self._context.open_files),
        )
        metrics.gauge(
            "penstock_topic_stored_bytes",
            "Bytes of all topics on the local disk",
            read=lambda: sum(t.local_bytes for t in self),
        )

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self._topics.values()))

    async def start(self) -> None:
        await self._context.run(self._prepare)
        if self.tier is not None:
            await self.tier.prepare()
        names = await self._context.run(self._topic_names)
        for i in range(0, len(names), TOPICS_PER_STEP):
            opened = await self._context.run(self._open_many, names[i : i + TOPICS_PER_STEP])
            for name, recovered in opened:
                self._topics[name] = Topic(name, self.directory / name, self._context, recovered)
        self._running = True
        self._maintenance = asyncio.get_running_loop().create_task(self._maintain())
        await self.scrub.start()
        if names:
            log.info("opened %d topics in %s", len(self._topics), self.directory)

    def _prepare(self) -> None:
        self._fs.make_dir(self.directory / PRIVATE / TRASH)
        for name in self._fs.list_dir(self.directory / PRIVATE / TRASH):
            self._fs.remove_tree(self.directory / PRIVATE / TRASH / name)

    def _topic_names(self) -> list[str]:
        return [
            name
            for name in self._fs.list_dir(self.directory)
            if is_topic_name(name) and self._fs.is_dir(self.directory / name)
        ]

    def _open_many(self, names: list[str]) -> list[tuple[str, Recovered]]:
        opened = []
        for name in names:
            try:
                opened.append((name, recover(AIQ, self._context, self.directory / name)))
            except CANNOT_OPEN as error:
                self.unreadable[name] = str(error)
                self._context.instruments.damage.add(1, "refused")
                log.error(
                    "topic %s cannot be opened: %s",
                    name,
                    error,
                    exc_info=not isinstance(error, PenstockError),
                )
        return opened

    async def stop(self) -> None:
        self._running = False
        await cancelled(self._maintenance)
        self._maintenance = None
        await self.scrub.stop()
        topics = list(self._topics.values())
        for i in range(0, len(topics), TOPICS_PER_STEP):
            await asyncio.gather(*(topic.stop() for topic in topics[i : i + TOPICS_PER_STEP]))

    # Topics by name

    def names(self) -> list[str]:
        return sorted(self._topics)

    @property
    def disk_full(self) -> str | None:
        """Why appends are refused for want of room, if they are."""
        return self._context.space.full

    def get(self, name: str) -> Topic | None:
        """The topic of this name, if there is one."""
        return self._topics.get(name)

    def find(self, name: str) -> Topic | None:
        """The topic if there is one; a name that can be nobody's is refused."""
        topic = self._topics.get(name)
        if topic is None:
            check_name(name)
        return topic

    def require(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            raise NotFound(f"topic {name!r} does not exist")
        return topic

    async def create(self, name: str) -> Topic:
        """The topic of this name, made if need be."""
        topic = self._topics.get(name)
        if topic is not None:
            return topic
        check_name(name)
        if not self._running:
            raise Unavailable("topics are not running")
        if name in self.unreadable:
            raise StorageFailed(f"topic {name!r} cannot be opened: {self.unreadable[name]}")
        making = self._creating.get(name)
        if making is None:
            making = asyncio.ensure_future(self._create(name))
            self._creating[name] = making
            making.add_done_callback(lambda _: self._creating.pop(name, None))
        return await asyncio.shield(making)

    async def _create(self, name: str) -> Topic:
        directory = self.directory / name
        self._context.space.take(0)
        recovered = await self._context.run(self._make, directory)
        topic = self._topics[name] = Topic(name, directory, self._context, recovered)
        return topic

    def _make(self, directory: Path) -> Recovered:
        try:
            create_files(
                AIQ, self._fs, directory, self._context.open_state, sync=self._context.durable
            )
        except StorageError:
            self._fs.remove_tree(directory)
            raise
        return recover(AIQ, self._context, directory)

    async def delete(self, name: str) -> None:
        topic = self.require(name)
        del self._topics[name]
        await topic.mark_deleted()
        for forget in self._deletions:
            forget(topic)
        if self.tier is not None:
            await self.tier.note_deletion(topic)
        await self._context.run(self._remove, topic)

    def _remove(self, topic: Topic) -> None:
        trash = self.directory / PRIVATE / TRASH / f"{topic.incarnation}-{uuid7().hex}"
        self._fs.rename(topic.directory, trash)
        self._fs.sync_dir(self.directory)
        self._fs.remove_tree(trash)

    def on_delete(self, callback: Callable[[Topic], None]) -> None:
        """Call it with each topic that is deleted."""
        self._deletions.append(callback)

    async def compact(
        self, name: str, bases: Sequence[int], keep: bytes, incarnation: str | None = None
    ) -> Swapped:
        """Swap these neighbouring sealed segments for one with only the records that `keep` names.

        `keep` has a bit for each offset from the first base on, the lowest bit of a byte first. A
        caller that goes away does not interrupt it.
        """
        work = compact(self.require(name), self._context, bases, keep, incarnation)
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
        """Roll old segments, delete what retention lets go, close what nobody uses."""
        self._context.space.check()
        for topic in list(self._topics.values()):
            try:
                await retain(topic, self._context, self.tier)
                await topic.close_if_idle(IDLE_SECONDS)
            except (StorageError, Conflict) as error:
                log.error("topic %s: maintenance failed: %s", topic.name, error)
