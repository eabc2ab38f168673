"""The scrub: read and check sealed segments slowly in the background, to find damage early.

A pass goes through the topics by name and their sealed segments in order. A segment is checked in
steps of about a megabyte. Each step runs in the pool, then the loop waits to keep to `scrub_rate`.
So the scrub holds no thread while it waits, and ends as soon as the broker stops. It reads from the
disk and drops the pages from the page cache.

The checks are those of `verify`: every batch against its CRC32C, every index row against its
record, every sidecar row against its own checksum. A batch that fails is read a second time. If it
fails again, it becomes a hole, as in recovery: it is logged, counted and noted in `damage.json`,
and reading it raises `Damaged`.

A pass ends with the shared topics, on the broker that moves them (`shared.verify`). Damage there is
only logged and counted.

Segments may be deleted, compacted or swapped during a check. A step reads through the segment's own
open files, and its findings count only if the topic still has that segment.

`.penstock/scrub.json` stores the position of the running pass and the result of the last one. It is
a hint, written now and then and not synced. If it is missing or damaged, a pass starts over.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from penstock.contract.topics import Pass, ScrubStatus
from penstock.errors import Damaged, StorageError, StorageFailed
from penstock.io.tasks import cancelled, supervised
from penstock.log.context import Context
from penstock.log.layout import DATA
from penstock.log.segment import Fault, Segment
from penstock.log.verify import Finding
from penstock.metrics import Metrics
from penstock.topics.topic import Topic

log = logging.getLogger("penstock.topics")

STATE = "scrub.json"
SAVE_SECONDS = 10.0
START_SECONDS = 60.0  # leave the disk to a broker that was just started
# Errors that damaged files may cause. They are reported; the other segments are still checked.
CANNOT_CHECK = (Damaged, StorageFailed, OSError, ValueError, LookupError, ArithmeticError)
CPU_SHARE = 0.2  # of one core, at most: `scrub_rate` does not limit the cost of small batches


class ScrubState(msgspec.Struct, kw_only=True):
    """The contents of `scrub.json`."""

    current: Pass | None = None
    last: Pass | None = None
    # the current pass has checked the topics before this one, and its segments up to `base`
    topic: str = ""
    base: int = -1


class Scrub:
    """The background task. If this broker moves the shared topics, `shared()` checks them, and
    yields the bytes and the faults of each range.
    """

    def __init__(
        self,
        context: Context,
        private: Path,
        topics: Iterable[Topic],
        shared: Callable[[], AsyncIterator[tuple[int, list[Finding]]]],
        metrics: Metrics,
    ) -> None:
        self._context = context
        self._topics = topics  # iterates over the current topics
        self._shared = shared
        self._path = private / STATE
        self._state = ScrubState()
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._next_step = 0.0
        self._saved = 0.0
        self._bytes = metrics.counter(
            "penstock_topic_scrubbed_bytes_total",
            "Bytes of sealed segments and shared topics read and verified by scrubs",
        )
        self._findings = metrics.counter(
            "penstock_topic_scrub_findings_total", "Damaged places that scrubs have reported"
        )
        metrics.gauge(
            "penstock_topic_scrub_running",
            "1 while a scrub is running",
            read=lambda: self.running,
        )
        metrics.gauge(
            "penstock_topic_scrub_finished_seconds",
            "Unix time at which the last complete scrub finished; 0 = none",
            read=lambda: (self._state.last.finished or 0) if self._state.last else 0,
        )

    @property
    def running(self) -> bool:
        return self._state.current is not None

    async def start(self) -> None:
        self._state = await self._context.run(self._load)
        self._task = supervised("topic scrub", self._run, self._context.metrics)

    async def stop(self) -> None:
        await cancelled(self._task)
        if self._task is not None and self.running:
            await self._save()
        self._task = None

    def ask(self) -> None:
        """Begin a pass now, unless one is running."""
        self._asked.set()

    def status(self) -> ScrubStatus:
        state, settings = self._state, self._context.settings
        sealed = (segment for topic in self._topics for segment in topic.segments[:-1])
        total = sum(segment.data_size for segment in sealed if segment.local)
        return ScrubStatus(
            running=self.running,
            interval=settings.scrub_interval,
            rate=settings.scrub_rate,
            topic=state.topic if self.running else None,
            base=state.base if self.running else None,
            sealed_bytes=total,
            current=state.current,
            last=state.last,
            next=self._due() if not self.running and settings.scrub_interval else None,
        )

    # The schedule

    def _due(self) -> float:
        last = self._state.last
        return last.started + self._context.settings.scrub_interval if last else 0.0

    async def _run(self) -> None:
        await self._wait(START_SECONDS)
        while True:
            current = self._state.current
            if current is None:
                await self._wait_until_due()
                current = Pass(started=self._context.clock())
                self._state = ScrubState(current=current, last=self._state.last)
            try:
                await self._pass(self._state, current)
            except StorageError as error:
                log.error("the scrub was interrupted and resumes in a minute: %s", error)
                await self._wait(START_SECONDS)

    async def _wait_until_due(self) -> None:
        interval = self._context.settings.scrub_interval
        while not self._asked.is_set():
            remaining = self._due() - self._context.clock() if interval else 3600.0
            if remaining <= 0:
                break
            await self._wait(min(remaining, 3600.0))  # the clock may be set meanwhile
        self._asked.clear()

    async def _wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until a pass is requested."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._asked.wait()

    async def _pass(self, state: ScrubState, current: Pass) -> None:
        for topic in sorted(self._topics, key=lambda topic: topic.name):
            if topic.name < state.topic:
                continue
            if topic.name > state.topic:
                state.topic, state.base = topic.name, -1
            while (segment := _following(topic, state.base)) is not None:
                await self._segment(topic, segment, current)
                state.base = segment.base
                if time.monotonic() - self._saved > SAVE_SECONDS:
                    await self._save()
        async for size, findings in self._shared():
            self._bytes.add(size)
            self._findings.add(len(findings))
            current.bytes += size
            current.findings += len(findings)
            await self._pause(size, 0.0)
        current.finished = self._context.clock()
        state.current, state.last = None, current
        self._asked.clear()
        await self._save()
        if current.bytes:
            log.info(
                "scrub: %d segments, %d bytes checked, %d findings",
                current.segments,
                current.bytes,
                current.findings,
            )

    # A segment

    async def _segment(self, topic: Topic, segment: Segment, current: Pass) -> None:
        check = topic.format.check(segment)
        cold = not segment.open_files
        steps = check.steps()
        try:
            while _is_of(topic, segment):
                read, busy = await self._context.run(_step, steps)
                if read < 0:
                    break
                self._bytes.add(read)
                await self._pause(read, busy)
            else:
                return  # deleted or swapped: its faults do not count
        except CANNOT_CHECK as error:
            if not _is_of(topic, segment):
                return
            name = segment.path(DATA).name
            check.faults.append(Fault(name, 0, f"cannot be checked: {error}", {}))
        if not _is_of(topic, segment):
            return
        if cold and not segment.pinned:
            segment.forget_files()
            self._context.open_files.closed(segment)
        current.segments += 1
        current.bytes += segment.data_size
        current.unchecked_bytes += check.unchecked
        await self._report(topic, segment, check.faults, current)

    async def _pause(self, read: int, busy: float) -> None:
        rate = self._context.settings.scrub_rate
        now = time.monotonic()
        owed = max(read / rate, busy / CPU_SHARE) if rate else 0.0
        self._next_step = max(now, self._next_step) + owed
        await asyncio.sleep(self._next_step - now)

    async def _report(
        self, topic: Topic, segment: Segment, faults: list[Fault], current: Pass
    ) -> None:
        damage = topic.damage_report
        noted = {(place.get("file"), place.get("position")) for place in damage.places}
        for fault in faults:
            if (fault.file, fault.position) not in noted:
                current.findings += 1
                self._findings.add()
                outcome = "lost" if fault.hole else "damaged"
                text = f"{fault.file}: {fault.what} (scrub, byte {fault.position})"
                damage.report(outcome, text, file=fault.file, position=fault.position, **fault.hole)
        segment.holes = damage.holes_of(segment.base)
        async with topic.maintenance:
            if not topic.ending:
                await self._context.run(damage.write)

    # scrub.json

    def _load(self) -> ScrubState:
        try:
            return msgspec.json.decode(self._context.fs.read(self._path), type=ScrubState)
        except FileNotFoundError:
            return ScrubState()
        except (msgspec.MsgspecError, StorageFailed) as error:
            log.warning("%s cannot be read, the scrub starts over: %s", self._path.name, error)
            return ScrubState()

    async def _save(self) -> None:
        self._saved = time.monotonic()
        data = msgspec.json.encode(self._state)
        try:
            await self._context.run(self._context.fs.replace, self._path, data, sync=False)
        except StorageError as error:
            log.warning("the position of the scrub could not be saved: %s", error)


def _following(topic: Topic, base: int) -> Segment | None:
    """Return the next segment to check, if there is one."""
    sealed = () if topic.ending else topic.segments[:-1]
    return next((one for one in sealed if one.local and one.base > base), None)


def _is_of(topic: Topic, segment: Segment) -> bool:
    return not topic.ending and any(other is segment for other in topic.segments)


def _step(steps: Iterator[int]) -> tuple[int, float]:
    """Run a step. Return the bytes read (-1: the end) and the processor time."""
    began = time.thread_time()
    read = next(steps, -1)
    return read, time.thread_time() - began
