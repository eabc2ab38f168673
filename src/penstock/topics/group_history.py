"""Figures of groups on topics per minute: acknowledged records, their latency since the append,
records that were leased again, lag.

They are computed when a group's committed offset moves, at a cost per commit and not per record.
Append times never decrease along a topic, so the first and the last committed record are mostly in
one bucket of latencies; otherwise a search by time yields the share of each bucket. The counts of a
minute are in memory until it ends.

    <data_directory>/.penstock/groups/minutes.log, minutes.old     text, a line per group, topic and
                                                                   minute
        <8 hexadecimal digits: CRC32C of the rest> <JSON array>\\n
        [minute (seconds since 1970), topic, group, acked, retried, lag, [buckets], [counts]]

If the broker was restarted during a minute, the minute has several lines: they are added up, and
the lag of the last one counts. When minutes.log reaches `MAX_FILE_BYTES` or `MAX_FILE_SECONDS`, it
becomes minutes.old, so at least half a week is kept. These are figures, not state: damaged lines
are skipped, and minutes that a full disk cannot store are lost.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.errors import Damaged, PenstockError, StorageError, StorageFailed
from penstock.io.fs import DISK, File, Fs
from penstock.io.journal import line, parse
from penstock.io.tasks import in_pool
from penstock.log.tier.cache import NotCached
from penstock.protocol.latency import bucket_of, upper_of
from penstock.topics.topic import Topic

log = logging.getLogger("penstock.topics.group_history")

MINUTE_SECONDS = 60
MAX_FILE_BYTES = 32 << 20
MAX_FILE_SECONDS = 3.5 * 86_400


@dataclass(slots=True)
class LagMinute:
    """The figures of a group on a topic in the minute that begins `at` seconds since 1970."""

    at: int
    topic: str
    group: str
    acked: int = 0
    retried: int = 0
    lag: int | None = None
    latency: dict[int, int] = field(default_factory=dict)  # bucket -> records

    def add(self, other: "LagMinute") -> None:
        self.acked += other.acked
        self.retried += other.retried
        self.lag = other.lag if other.lag is not None else self.lag
        for bucket, count in other.latency.items():
            self.latency[bucket] = self.latency.get(bucket, 0) + count

    def line(self) -> bytes:
        buckets = sorted(self.latency)
        counts = [self.latency[bucket] for bucket in buckets]
        return line(
            [self.at, self.topic, self.group, self.acked, self.retried, self.lag, buckets, counts]
        )


class GroupHistory:
    """The figures of all groups. Runs on the event loop; files are accessed in `pool`."""

    def __init__(
        self,
        directory: Path,
        *,
        pool: Executor,
        fs: Fs = DISK,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._current = directory / "minutes.log"
        self._before = directory / "minutes.old"
        self._pool = pool
        self._fs = fs
        self._clock = clock
        self._open: dict[tuple[int, str, str], LagMinute] = {}
        self._writing: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._write(list(self._open.values()))
        self._open = {}

    def committed(self, topic: Topic, group: str, start: int, end: int, lag: int) -> None:
        """Count a commit that moved from `start` to `end`; `lag` is the group's lag after it."""
        now = self._clock()
        minute = self._minute(now, topic.name, group)
        minute.lag = lag
        try:
            for bucket, count in latencies(topic, start, end, now).items():
                minute.latency[bucket] = minute.latency.get(bucket, 0) + count
                minute.acked += count
        except NotCached:  # their append times are in the tier: not worth waiting for
            minute.acked += end - start
        except (Damaged, StorageFailed) as error:
            # readers get the same error; a commit does not depend on these figures
            log.warning("topic %s: latencies of group %s are unknown: %s", topic.name, group, error)

    def retried(self, topic: str, group: str, count: int) -> None:
        """Count records whose lease was released or expired, so that they are leased again."""
        self._minute(self._clock(), topic, group).retried += count

    async def between(self, since: float, until: float) -> list[LagMinute]:
        """Return the figures of a period in order of time. Reads the files, in the pool."""
        lines = await in_pool(self._pool, self._read)
        minutes: dict[tuple[int, str, str], LagMinute] = {}
        for minute in (*filter(None, map(_decode, lines)), *self._open.values()):
            if since <= minute.at < until:
                key = (minute.at, minute.topic, minute.group)
                minutes.setdefault(key, LagMinute(*key)).add(minute)
        return [minutes[key] for key in sorted(minutes)]

    def groups(self) -> list[str]:
        """Return the groups with recent figures. Reads the files."""
        return sorted({minute.group for minute in filter(None, map(_decode, self._read()))})

    def _minute(self, now: float, topic: str, group: str) -> LagMinute:
        at = int(now) // MINUTE_SECONDS * MINUTE_SECONDS
        key = (at, topic, group)
        minute = self._open.get(key)
        if minute is None:
            minute = self._open[key] = LagMinute(at, topic, group)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(
                    at + MINUTE_SECONDS - now + 1, self._over
                )
        return minute

    def _over(self) -> None:
        """Write the minutes that have ended."""
        self._timer = None
        now = self._clock()
        ended = [key for key in self._open if key[0] + MINUTE_SECONDS <= now]
        if ended:
            lines = [self._open.pop(key) for key in ended]
            self._writing = asyncio.ensure_future(self._write(lines))
        if self._open:
            self._timer = asyncio.get_running_loop().call_later(MINUTE_SECONDS, self._over)

    async def _write(self, minutes: list[LagMinute]) -> None:
        before = self._writing
        if before is not None and before is not asyncio.current_task() and not before.done():
            await asyncio.wait([before])
        if not minutes:
            return
        data = b"".join(minute.line() for minute in minutes)
        try:
            await in_pool(self._pool, self._append, data, minutes[0].at)
        except StorageError as error:
            log.warning("figures of %d group minutes are lost: %s", len(minutes), error)

    def _append(self, data: bytes, at: int) -> None:
        self._fs.make_dir(self._current.parent)
        file: File = self._fs.open(self._current, create=True)
        try:
            began = (
                _decode(file.read_at(0, min(4096, file.size)).partition(b"\n")[0])
                if file.size
                else None
            )
            if file.size > MAX_FILE_BYTES or (
                began is not None and at - began.at > MAX_FILE_SECONDS
            ):
                file.close()
                self._fs.rename(self._current, self._before)
                file = self._fs.open(self._current, create=True)
            file.append([data])
        finally:
            file.close()

    def _read(self) -> list[bytes]:
        lines: list[bytes] = []
        for path in (self._before, self._current):
            try:
                lines += self._fs.read(path).split(b"\n")[:-1]
            except FileNotFoundError:
                continue
            except PenstockError as error:
                log.warning("%s cannot be read: %s", path.name, error)
        return lines


def latencies(topic: Topic, start: int, end: int, now: float) -> dict[int, int]:
    """Count the records in [start, end) per bucket of their age at the time `now`."""
    start = max(start, topic.first_offset)
    if start >= end:
        return {}
    first, last = (int(at) / 1e6 for at in topic.timestamps(np.array([start, end - 1])))
    oldest, newest = bucket_of(now - first), bucket_of(now - last)
    counts: dict[int, int] = {}
    rest, upto = topic.records_from(end), end
    for bucket in range(newest, oldest + 1):  # from the end of the range, where the youngest are
        cut = (
            start
            if bucket >= oldest
            else min(max(topic.offset_at(now - upper_of(bucket)), start), upto)
        )
        if cut < upto:
            more = topic.records_from(cut)
            if more > rest:
                counts[bucket] = more - rest
            rest, upto = more, cut
    return counts


def _decode(text: bytes) -> LagMinute | None:
    event = parse(text)
    if not isinstance(event, list) or len(event) != 8:
        return None
    at, topic, group, acked, retried, lag, buckets, counts = event
    return LagMinute(at, topic, group, acked, retried, lag, dict(zip(buckets, counts, strict=True)))
