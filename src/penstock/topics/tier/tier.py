"""Copy the topics of one broker to the tier, in a background task that makes pass after pass.

A pass confirms the ownership, finishes deletions, uploads due segments, removes local files and
writes the state. From time to time it collects garbage. The next pass repeats whatever failed. The
event loop owns all state. `Topic.maintenance` is held while a manifest is written, but not while a
segment is uploaded.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from penstock.contract.topics import TierStatus
from penstock.errors import Conflict, Damaged, NotFound, PenstockError, StorageFailed
from penstock.io.tasks import P, T, cancelled, in_pool, supervised
from penstock.log.context import Context
from penstock.log.layout import INCARNATION, log_path, parse_checked
from penstock.log.segment import Segment
from penstock.log.tier.cache import BlockCache, BlocksOnDisk
from penstock.log.tier.manifest import StoredSegment, TierManifest, manifest_name
from penstock.metrics import Metrics
from penstock.object_store import ObjectStore, RequestLimits
from penstock.topics.offsets_journal import CommittedOffset
from penstock.topics.tier.adopt import Adoption, read_report
from penstock.topics.tier.manifests import Manifests
from penstock.topics.tier.owner import Fenced, Ownership, StateObject, TierState, TopicEnd
from penstock.topics.tier.upload import checkpoint_after, upload
from penstock.topics.topic import Topic, condemned

log = logging.getLogger("penstock.topics.tier")

REQUEST_LIMITS = RequestLimits(attempts=2, seconds=30.0)  # of one request
TOPICS_AT_A_TIME = 4
UPLOADS_AT_A_TIME = 4  # segments of all topics together; bounds the memory
MAX_RETRY_SECONDS = 300.0
START_SECONDS = 5.0  # the longest wait for the store at start
CLOCK_ERROR = 60_000_000  # microseconds; a time further in the future is ignored
STOP_SECONDS = 10.0  # the longest wait to write the state of a clean stop
COLLECT_SECONDS = 600.0  # between two garbage collections
DIRECTORY, CACHE, DELETED = "topic-tier", "topic-tier-cache", "deleted"


class Tier:
    def __init__(
        self, context: Context, private: Path, topics: Iterable[Topic], metrics: Metrics
    ) -> None:
        settings = context.settings
        self._context = context
        self._topics = topics  # live: iterating yields the current topics
        self._directory = private / DIRECTORY
        self.store = ObjectStore(settings.tier, limits=REQUEST_LIMITS)
        self._pool = ThreadPoolExecutor(2 * TOPICS_AT_A_TIME, "tier")
        self._ownership = Ownership(self.store, self._directory, context.fs)
        blocks = BlocksOnDisk(private / CACHE, context.fs)
        self.cache = context.cache = BlockCache(self.store, blocks, settings.tier_cache, metrics)
        # Copied with the topics; set by their owners.
        self.groups: Callable[[], Iterable[CommittedOffset]] = tuple
        self.sinks: Path | None = None
        self._manifests = Manifests(context, self.store, self._ownership, self.cache, self._pool)
        self._state = StateObject(self.store, self._ownership)
        self._unnamed: dict[str, float] = {}  # garbage object -> seen at, monotonic
        self._collected = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.problem: str | None = None  # why nothing can be copied
        self.topic_problems: dict[str, str] = {}  # the same for single topics, by name
        self.passes = 0  # successful ones
        self._pass_lock = asyncio.Lock()
        self._uploading = asyncio.Semaphore(UPLOADS_AT_A_TIME)
        self._tried = asyncio.Event()  # set after the first attempt to write the state
        self._ending = False  # makes uploads abort
        self._due = 0  # microseconds; segments sealed before are copied without delay
        self.adopted: dict[str, Any] | None = None  # the report of the adoption, if there was one
        self._uploaded = metrics.counter(
            "penstock_topic_tier_uploaded_bytes_total", "Bytes copied to the tier"
        )
        self._failures = metrics.counter(
            "penstock_topic_tier_failures_total", "Failed attempts to update the tier"
        )
        self._collections = metrics.counter(
            "penstock_topic_tier_collected_objects_total",
            "Obsolete objects deleted from the tier",
        )
        gauge = metrics.gauge
        gauge("penstock_topic_tier_bytes", "Bytes of topics in the tier", read=self._bytes)
        gauge(
            "penstock_topic_tier_pending_bytes",
            "Bytes of sealed segments that are not in the tier yet",
            read=lambda: sum(s.size for t in self._topics for s in _pending(t)),
        )
        gauge(
            "penstock_topic_tier_lag_seconds",
            "How overdue the oldest sealed segment is that is not in the tier; 0 = none is",
            read=self.lag,
        )
        gauge(
            "penstock_topic_tier_fenced",
            "1 if another broker owns the tier, or another writer owns a topic in it",
            read=lambda: bool(self.fenced or self.topic_problems),
        )
        gauge(
            "penstock_topic_tier_failing",
            "1 if the last attempt to update the tier failed",
            read=lambda: bool(self.problem),
        )
        self.fenced = False

    def _bytes(self) -> int:
        return sum(topic.tier.size for topic in self._topics if topic.tier is not None)

    def lag(self) -> float:
        """Return by how many seconds the oldest due segment is late; 0 if none is."""
        due = [s.newest for t in self._topics for s in _pending(t)]
        late = self._context.now() - min(due, default=self._context.now())
        return max(0.0, late / 1e6 - self._context.settings.tier_delay)

    def status(self) -> TierStatus:
        topics = list(self._topics)
        return TierStatus(
            address=self.store.address,
            owner=bool(self._ownership.epoch),
            problem=self.problem,
            topic_problems=dict(self.topic_problems),
            tier_bytes=self._bytes(),
            local_bytes=sum(topic.local_bytes for topic in topics),
            pending_bytes=sum(s.size for t in topics for s in _pending(t)),
            lag_seconds=self.lag(),
            passes=self.passes,
            adopted=self.adopted,
        )

    async def _run_blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await in_pool(self._pool, function, *args, **kwargs)

    # From start to stop

    async def prepare(self) -> None:
        """Adopt the contents of the tier, if configured. Runs before the topics are opened."""
        await self._run_blocking(self.cache.open)
        if self._context.settings.adopt:
            data = self._context.directory
            adoption = Adoption(self.store, data, self._directory, self._ownership)
            await self._run_blocking(adoption.run)
        self.adopted = await self._run_blocking(read_report, self._directory)

    async def start(self) -> None:
        """Start the passes. Wait briefly until the state in the store is not that of a clean stop:
        an adopting broker takes that as complete, so nothing may be appended before.
        """
        self._task = supervised("topic tier", self._run, self._context.metrics)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await self._tried.wait()

    async def stop(self) -> None:
        """Write the state of a clean stop. Waits for an unreachable store only briefly."""
        self._ending = True
        if self._task is not None:
            await cancelled(self._task)
            self._task = None
            if self._ownership.epoch and self.problem is None:
                with contextlib.suppress(PenstockError, TimeoutError):
                    async with asyncio.timeout(STOP_SECONDS):
                        await self._write_state(clean=True)
        self.close()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.cache.close()

    async def _run(self) -> None:
        failures = 0
        while True:
            failures = 0 if await self.synchronize() else failures + 1
            wait = self._context.settings.tier_interval * 2 ** min(failures, 10)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait, max(MAX_RETRY_SECONDS, wait / 2**10))):
                    await self._wake.wait()
            self._wake.clear()

    async def flush(self) -> None:
        """Seal every topic and start to copy all segments."""
        for topic in self._topics:
            with contextlib.suppress(NotFound):  # deleted meanwhile
                await topic.seal()
        self._due = self._context.now()
        self._wake.set()

    async def synchronize(self) -> bool:
        """Make one pass. Return whether it succeeded."""
        async with self._pass_lock:
            return await self._synchronize()

    async def _synchronize(self) -> bool:
        try:
            await self._run_blocking(self._confirm)
            if not self._tried.is_set():
                await self._write_state(clean=False)
                self._tried.set()
            await self._finish_deletions()
            await self._copy_topics()
            await self._write_state(clean=False)
            if time.monotonic() - self._collected >= COLLECT_SECONDS:
                await self.collect()
        except PenstockError as error:
            if self.problem is None or isinstance(error, Fenced) != self.fenced:
                log.error("tier: %s", error)
            self.problem, self.fenced = str(error), isinstance(error, Fenced)
            self._failures.add(1)
            self._tried.set()
            return False
        if self.problem is not None:
            log.info("tier: %s is brought up to date again", self.store.address)
        self.problem, self.fenced = None, False
        self.passes += 1
        return True

    def _confirm(self) -> None:
        if self._ownership.epoch:
            self._ownership.check()
        else:
            self._manifests.versions.clear()
            self._state.read_again()
            try:
                self._ownership.acquire()
            except Fenced:
                raise
            except Conflict as error:  # another broker started at the same moment
                raise Fenced(str(error)) from None

    # Topics

    async def _copy_topics(self) -> None:
        """Copy all topics, a few at a time. Raises StorageFailed if the store failed."""
        waiting = list(self._topics)
        failures: list[StorageFailed] = []

        async def work() -> None:
            while waiting and not failures:
                topic = waiting.pop(0)
                try:
                    await self._copy_topic(topic)
                except StorageFailed as error:
                    if not topic.appends.deleted:
                        failures.append(error)
                except (Conflict, Damaged) as error:
                    if self.topic_problems.get(topic.name) != str(error):
                        log.error("tier: topic %s is not copied: %s", topic.name, error)
                    self.topic_problems[topic.name] = str(error)
                else:
                    self.topic_problems.pop(topic.name, None)

        await asyncio.gather(*(work() for _ in range(TOPICS_AT_A_TIME)))
        if failures:
            raise failures[0]

    async def _copy_topic(self, topic: Topic) -> None:
        now = self._context.now()
        oldest = max(self._due, now - self._context.settings.tier_delay * 1e6)
        pending = _pending(topic)
        if pending and topic.tier is None and await self._context.run(self._has_note, topic.name):
            return  # first, an earlier topic of this name must be deleted from the tier
        # A time in the future comes from a wrong clock; do not wait until then.
        due = list(takewhile(lambda s: not oldest < s.newest < now + CLOCK_ERROR, pending))
        while due and not topic.ending:
            await self._open_manifest(topic)
            await self._copy_segments(topic, due[:UPLOADS_AT_A_TIME])
            del due[:UPLOADS_AT_A_TIME]
        if topic.tier is not None and _has_changed(topic, topic.tier):
            await self._open_manifest(topic)
            async with topic.maintenance:
                if not topic.ending:
                    await self._manifests.commit(topic, topic.tier.segments)
        await self._release_local(topic)

    async def _open_manifest(self, topic: Topic) -> None:
        async with topic.maintenance:
            if not topic.ending:
                await self._manifests.open(topic)

    async def _copy_segments(self, topic: Topic, segments: Sequence[Segment]) -> None:
        """Upload segments concurrently, then add them to the manifest in one write. If an upload
        fails, only the segments before it are added."""
        uploads = [self._upload(topic, segment) for segment in segments]
        results = await asyncio.gather(*uploads, return_exceptions=True)
        copied: list[tuple[Segment, StoredSegment]] = []
        failure: BaseException | None = None
        for segment, result in zip(segments, results, strict=True):
            if isinstance(result, FileNotFoundError):
                continue  # retention or compaction deleted it
            if isinstance(result, BaseException):
                failure = result
                break
            copied.append((segment, result))
        if copied:
            await self._name_copies(topic, copied)
        if failure is not None:
            raise failure

    async def _upload(self, topic: Topic, segment: Segment) -> StoredSegment:
        async with self._uploading:
            stored = await self._run_blocking(
                upload, self.store, topic.incarnation, segment, lambda: topic.ending or self._ending
            )
        self._uploaded.add(stored.size)
        return stored

    async def _name_copies(
        self, topic: Topic, copied: Sequence[tuple[Segment, StoredSegment]]
    ) -> None:
        tier, settings, now = topic.tier, self._context.settings, self._context.now()
        checkpoint = tier.checkpoint if tier is not None else b""
        end = tier.end if tier is not None else -1
        for segment, _ in copied:
            if segment.end > end:
                with contextlib.suppress(FileNotFoundError):
                    checkpoint = await self._run_blocking(
                        checkpoint_after,
                        topic.format,
                        checkpoint,
                        topic.incarnation,
                        segment,
                        settings.producer_expiry,
                        now,
                    )
                    end = segment.end
        async with topic.maintenance:
            if topic.ending:
                return
            entries = topic.tier.segments if topic.tier is not None else []
            for segment, stored in copied:
                following = _following(topic.segments, segment)
                if following is not None:
                    entries = [one for one in entries if not segment.base <= one.base < following]
                    entries.append(stored)
            await self._manifests.commit(
                topic, sorted(entries, key=lambda one: one.base), checkpoint
            )

    # Releasing and deleting

    async def _release_local(self, topic: Topic) -> None:
        """Delete the local files of segments in the tier, oldest first, to meet the limits of age
        and size."""
        limits = self._context.settings.local_retention
        if topic.tier is None or not (limits.age or limits.bytes) or topic.maintenance.locked():
            return
        async with topic.maintenance:
            if topic.ending or topic.unfinished_swap is not None:
                return
            stored = {one.base: one for one in topic.tier.segments if not one.superseded}
            local, now = [one for one in topic.segments[:-1] if one.local], self._context.now()
            for segment in condemned(
                local, topic.local_bytes, age=limits.age, size=limits.bytes, now=now
            ):
                entry = stored.get(segment.base)
                if entry is None or entry.end != segment.end:
                    break
                await topic.replace_local(segment, self._manifests.tiered(topic, entry))

    async def let_go(self, topic: Topic, first: int) -> None:
        """Remove segments below offset `first` from the manifest, for retention. Their objects
        become garbage. The caller holds `topic.maintenance`."""
        if topic.tier is None or not any(one.base < first for one in topic.tier.segments):
            return
        if not self._ownership.epoch:
            raise StorageFailed(self.problem or "the tier is not confirmed yet")
        await self._manifests.open(topic)
        await self._manifests.commit(
            topic, [one for one in topic.tier.segments if one.base >= first]
        )
        self._collect_soon()

    async def note_deletion(self, topic: Topic) -> None:
        """Record that the topic is being deleted. A later pass deletes it from the tier."""
        if topic.tier is not None:
            path = self._directory / DELETED / topic.incarnation
            await self._context.run(self._context.fs.make_dir, path.parent)
            await self._context.run(self._context.fs.replace, path, topic.name.encode())

    async def _finish_deletions(self) -> None:
        fs, directory = self._context.fs, self._directory / DELETED
        live = {topic.incarnation for topic in self._topics}
        for incarnation in await self._context.run(self._notes):
            if incarnation in live:  # the broker was killed before the topic was deleted
                await self._context.run(fs.remove, directory / incarnation)
            elif await self._context.run(self._is_gone, directory / incarnation):
                await self._run_blocking(self.store.delete, [manifest_name(incarnation)])
                self._manifests.versions.pop(incarnation, None)
                self._collect_soon()
                await self._context.run(fs.remove, directory / incarnation)

    def _notes(self) -> list[str]:
        """Return the incarnations with a recorded deletion, without records being written."""
        names = self._context.fs.list_dir(self._directory / DELETED)
        return [name for name in names if not name.endswith(".new")]

    def _has_note(self, name: str) -> bool:
        fs, directory = self._context.fs, self._directory / DELETED
        return any(fs.read(directory / one) == name.encode() for one in self._notes())

    def _is_gone(self, note: Path) -> bool:
        fs = self._context.fs
        label = fs.read(note).decode()
        path = log_path(self._context.directory, label) / INCARNATION
        try:
            return parse_checked(fs.read(path)) not in (note.name, None)
        except FileNotFoundError:
            return True

    async def collect(self) -> int:
        """Delete objects that no manifest has named for `tier_grace`. Return their number."""
        live = {topic.incarnation: topic for topic in self._topics}
        for topic in live.values():
            if topic.tier is not None:
                with contextlib.suppress(Conflict, Damaged):  # reported when the topic is copied
                    await self._open_manifest(topic)
        garbage = await self._run_blocking(self._manifests.unnamed_objects, live)
        now = time.monotonic()
        self._unnamed = {name: self._unnamed.get(name, now) for name in garbage}
        grace = self._context.settings.tier_grace
        expired = [name for name, since in self._unnamed.items() if now - since >= grace]
        if expired:
            await self._run_blocking(self._delete_as_owner, expired)
            self._collections.add(len(expired))
            log.info("tier: %d objects that no manifest names were deleted", len(expired))
        self._unnamed = {name: at for name, at in self._unnamed.items() if name not in expired}
        self._collected = now if not self._unnamed else now - COLLECT_SECONDS + grace
        return len(expired)

    def _delete_as_owner(self, names: list[str]) -> None:
        self._ownership.check()
        self.store.delete(names)

    def _collect_soon(self) -> None:
        self._collected = -COLLECT_SECONDS

    # Everything else

    async def _write_state(self, *, clean: bool) -> None:
        topics = {
            topic.incarnation: TopicEnd(topic.name, topic.next_offset) for topic in self._topics
        }
        state = TierState(
            broker=self._ownership.broker,
            written_at=self._context.clock(),
            clean=clean,
            topics=topics,
            groups=sorted(self.groups()),
            sinks=await self._context.run(self._read_sinks),
        )
        await self._run_blocking(self._state.write, state)

    def _read_sinks(self) -> bytes:
        try:
            return self._context.fs.read(self.sinks) if self.sinks is not None else b""
        except FileNotFoundError:
            return b""


def _following(segments: Sequence[Segment], segment: Segment) -> int | None:
    """Return the base of the next segment; None if `segment` was removed from the list."""
    for one, following in pairwise(segments):
        if one is segment:
            return following.base
    return None


def _pending(topic: Topic) -> list[Segment]:
    """Return the sealed local segments that are not in the tier."""
    stored = {
        (one.base, one.end)
        for one in (topic.tier.segments if topic.tier is not None else ())
        if not one.superseded
    }
    return [
        segment
        for segment in topic.segments[:-1]
        if segment.local and segment.rows and (segment.base, segment.end) not in stored
    ]


def _has_changed(topic: Topic, tier: TierManifest) -> bool:
    """Check for settings of the topic that differ from its manifest."""
    return (topic.policy, topic.archived_offset, topic.limits, topic.damage) != (
        tier.policy,
        tier.archived,
        tier.limits,
        tier.damage,
    )
