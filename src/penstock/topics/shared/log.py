"""The log of one partition of a shared topic, as every protocol sees it (`TopicLog`).

Records that were appended or read lately are in memory. The others are in the database or in the
object store: a read on the event loop raises `NotLoaded`, whose `load` gets them, and the read is
repeated (`read_or_wait`). While the database is down, the names of the objects show what is in the
object store.

Bounds are those that this broker knows. Other brokers append too, so the real end is there or
later. An offset after the end is rejected only after asking the database.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.errors import InvalidOffset, NotFound, Unavailable
from penstock.log.append_queue import AppendsThrough
from penstock.log.batches.decode import Columns, Decoder
from penstock.log.batches.format import BATCHES
from penstock.log.batches.segment import batch_of
from penstock.log.limits import TopicLimits
from penstock.log.segment import Batch, FetchedBatches, Raw, Segment, empty_batch
from penstock.log.tier.cache import NotCached
from penstock.log.tier.manifest import TierManifest
from penstock.protocol.kafka_batch import CONTROL, BatchHead, assigned, checked
from penstock.protocol.names import partition_label
from penstock.topics.shared.appends import SharedAppends
from penstock.topics.shared.calls import SharedUsage
from penstock.topics.shared.chunks import Chunk
from penstock.topics.shared.context import SharedContext
from penstock.topics.subscriptions import Subscriptions

T = TypeVar("T")

LOAD_BYTES = 1 << 20  # of one read from the database, of which the last batch may be beyond it
MAX_LOADS = 64  # of one read, which may need several logs


class NotLoaded(NotCached):
    """What is to be read is not in memory; `load` gets it."""

    def __init__(self, load: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.load = load


async def read_loading(read: Callable[[], T]) -> T:
    """Call `read` until everything that it needs is in memory, and return its result."""
    for _ in range(MAX_LOADS):
        try:
            return read()
        except NotLoaded as missing:
            await missing.load()
    raise Unavailable("more is read at once than the cache of shared topics has room for")


class SharedLog(AppendsThrough):
    appends: SharedAppends
    shared = True
    format = BATCHES
    # What only logs on a disk have
    segments: tuple[Segment, ...] = ()
    tier: TierManifest | None = None
    archived_offset: int | None = None
    broken: str | None = None
    incarnation_lost = False
    local_bytes = 0
    producers = 0

    def __init__(self, row: Any, context: SharedContext) -> None:
        self.topic: str = row["topic"]
        self.partition: int = row["partition"]
        self.name = partition_label(self.topic, self.partition)
        self.log_id: int = row["id"]
        self.incarnation: str = row["incarnation"].hex
        self.directory = f"shared/{self.incarnation}/{self.partition}/"  # of its objects
        self.first_offset: int = row["first_offset"]  # as far as this broker knows, as is the next
        self.next_offset: int = row["next_offset"]
        self.size_bytes = 0  # as far as it was asked for (`measure`), as is the damage
        self.damage: list[dict[str, Any]] = []
        self._context = context
        self._denied: int | None = (
            None  # an offset that the database has just said is behind the end
        )
        self._times: dict[int, int | None] = {}  # where times were looked up, until they are read
        self._subscriptions = Subscriptions()
        self._subscribers = 0
        self.appends = SharedAppends(
            self.name,
            self.log_id,
            context.flusher,
            max_record=context.max_record,
            now=context.now,
            instruments=context.instruments,
            on_commit=self._committed,
            on_gone=context.on_gone,
        )
        self.take_settings(row)

    def take_settings(self, row: Any) -> None:
        self.policy: str = row["policy"]
        self.limits = msgspec.json.decode(row["limits"], type=TopicLimits)
        self.appends.max_record = self.limits.max_record or self._context.max_record

    # Appending

    def _committed(
        self, batches: Sequence[tuple[int, memoryview]], end: int, timeline: int
    ) -> None:
        for first, data in batches:
            batch = assigned(data, first, timeline)
            following = BatchHead.parse(batch).next_offset
            self._context.recent.put(self.log_id, Chunk(first, first, following, batch))
        self._context.announce(self.log_id, end)
        self.reached(end)

    def reached(self, end: int) -> None:
        """Note that the records below `end` are committed."""
        if end > self.next_offset:
            self.next_offset = end
            self._subscriptions.notify(end)

    # Reading

    @property
    def records(self) -> int:
        """Return about how many records are stored: compaction and failovers leave offsets out."""
        return self.next_offset - self.first_offset

    @property
    def local_offset(self) -> int:
        return self.next_offset

    def first_from(self, offset: int) -> int:
        return max(offset, self.first_offset)

    def read(
        self,
        offset: int,
        max_records: int = 1000,
        max_bytes: int = 1 << 20,
        *,
        strict: bool = False,
    ) -> Batch:
        """Return visible records from `offset` on; at least one if there is one."""
        at = self._begin(offset, strict)
        while at < self.next_offset:
            chunks = self._chunks(at, max_records, max_bytes)
            columns, following = _decode(chunks, at, max_records, max_bytes)
            count = len(columns.offsets)
            skip = int(np.searchsorted(columns.offsets, at))
            if skip < count:
                sizes = np.cumsum(16 + np.maximum(columns.value_lengths[skip:], 0))
                fitting = max(1, int(np.searchsorted(sizes, max_bytes, "right")))
                part = slice(skip, min(count, skip + max_records, skip + fitting))
                return batch_of(columns, part, following)
            at = following
        return empty_batch(max(offset, self.next_offset))

    def raw(self, offset: int, max_bytes: int, *, strict: bool = False) -> Raw:
        """Return whole batches, at least one; the first may begin before `offset`."""
        fetched, first, count = self._whole(offset, max_bytes, strict=strict)
        if not fetched.data:
            return Raw(fetched.next_offset, 0, fetched.next_offset, None, 0, 0)
        file: Any = InMemory(fetched.data)
        return Raw(first, count, fetched.next_offset, file, 0, len(fetched.data))

    def batches(self, offset: int, max_bytes: int) -> FetchedBatches:
        return self._whole(offset, max_bytes, strict=True)[0]

    def _whole(
        self, offset: int, max_bytes: int, *, strict: bool
    ) -> tuple[FetchedBatches, int, int]:
        """Return the batches from the one with `offset` on, their first offset and record count."""
        at = self._begin(offset, strict)
        if at >= self.next_offset:
            return FetchedBatches(b"", max(offset, self.next_offset)), 0, 0
        parts: list[bytes] = []
        size, first, records = 0, -1, 0
        while at < self.next_offset and size < max_bytes:
            chunk = self._find(at)
            if chunk is None:
                if parts:
                    break
                raise self._missing(at)
            for position, head in chunk.heads():
                if head.next_offset <= at:
                    continue
                if parts and size + head.size > max_bytes:
                    return FetchedBatches(b"".join(parts), at), first, records
                first = head.base_offset if first < 0 else first
                parts.append(chunk.data[position : position + head.size])
                size, records, at = size + head.size, records + head.records, head.next_offset
            at = max(at, chunk.end)
        return FetchedBatches(b"".join(parts), at), first, records

    def timestamps(self, offsets: np.ndarray) -> np.ndarray:
        """Return the times of these records, in microseconds since 1970."""
        times = np.zeros(len(offsets), np.int64)
        at = 0
        while at < len(offsets):
            chunk = self._find(int(offsets[at]))
            if chunk is None:
                raise self._missing(int(offsets[at]))
            columns, _ = _decode([chunk], chunk.base, 1 << 62, 1 << 62)
            stop = max(at + 1, int(np.searchsorted(offsets, chunk.end)))
            rows = np.searchsorted(columns.offsets, offsets[at:stop])
            times[at:stop] = columns.times[np.minimum(rows, len(columns.times) - 1)] * 1000
            at = stop
        return times

    def offset_at(self, timestamp: float) -> int:
        """Return the first offset at this time (seconds since 1970) or later; or `next_offset`."""
        milliseconds = int(np.ceil(timestamp * 1000))
        if milliseconds not in self._times:
            raise NotLoaded(lambda: self._find_time(milliseconds))
        base = self._times[milliseconds]
        while base is not None and base < self.next_offset:
            chunk = self._find(base)
            if chunk is None:
                raise self._missing(base)
            columns, _ = _decode([chunk], chunk.base, 1 << 62, 1 << 62)
            later = np.flatnonzero(columns.times >= milliseconds)
            if len(later):
                del self._times[milliseconds]
                return int(columns.offsets[later[0]])
            base = chunk.end
        del self._times[milliseconds]
        return self.next_offset

    async def _find_time(self, milliseconds: int) -> None:
        self._times[milliseconds] = await self._context.calls.offset_at(self.log_id, milliseconds)

    def records_from(self, offset: int) -> int:
        """Return about how many records follow: compaction and failovers leave offsets out."""
        return self.next_offset - min(max(offset, self.first_offset), self.next_offset)

    def lost_at(self, _: int) -> dict[str, Any] | None:
        return None

    def age_at(self, offset: int) -> float | None:
        """Return the seconds since the record at `offset` was appended; None: not in memory."""
        if offset >= self.next_offset:
            return 0.0
        try:
            (at,) = self.timestamps(np.array([max(offset, self.first_offset)]))
        except NotLoaded:
            return None
        return max(0.0, time.time() - int(at) / 1e6)

    def read_or_wait(self, read: Callable[[], T]) -> T | Awaitable[T]:
        try:
            return read()
        except NotLoaded:
            return read_loading(read)

    async def read_through(self, read: Callable[[], T]) -> T:
        return await read_loading(read)

    def _begin(self, offset: int, strict: bool) -> int:
        """Return where a read of `offset` begins."""
        if self.appends.deleted:
            raise self.appends.gone()
        if strict and offset < self.first_offset:
            raise InvalidOffset(f"offset {offset} lies before {self.first_offset}")
        if strict and offset > self.next_offset:
            if self._denied != offset:
                raise NotLoaded(lambda: self._deny(offset))
            self._denied = None
            raise InvalidOffset(
                f"offset {offset} is outside {self.first_offset} to {self.next_offset}"
            )
        return max(offset, self.first_offset)

    async def _deny(self, offset: int) -> None:
        await self.refresh()
        if offset > self.next_offset:
            self._denied = offset

    def _find(self, offset: int) -> Chunk | None:
        context = self._context
        return context.recent.get(self.log_id, offset) or context.older.get(self.log_id, offset)

    def _chunks(self, offset: int, max_records: int, max_bytes: int) -> list[Chunk]:
        """Return consecutive chunks in memory, from the one that covers `offset`."""
        chunks: list[Chunk] = []
        at, size = offset, 0
        while at < self.next_offset and (
            not chunks or (size < max_bytes and at - offset < max_records)
        ):
            chunk = self._find(at)
            if chunk is None:
                break
            chunks.append(chunk)
            at, size = chunk.end, size + len(chunk.data)
        if not chunks:
            raise self._missing(offset)
        return chunks

    def _missing(self, offset: int) -> NotLoaded:
        return NotLoaded(lambda: self._load(offset))

    async def refresh_if_possible(self) -> None:
        """Ask for the bounds; without a database those that are known have to do."""
        with suppress(Unavailable):
            await self.refresh()

    async def end_of_timeline(self, timeline: int) -> int:
        """Return the offset after the last record of this timeline or an earlier one."""
        gaps = await self._context.calls.gaps(self.log_id)
        ends = [gap["gap_start"] for gap in gaps if gap["timeline"] >= timeline]
        return min(ends, default=self.next_offset)

    async def measure(self) -> SharedUsage:
        """Ask the database for what only people look at: the size, and what a failover lost."""
        await self.refresh()
        usage = await self._context.calls.usage(self.log_id)
        self.size_bytes = usage.head_bytes + usage.tiered_bytes
        self.damage = [
            {
                "outcome": "lost",
                "lost_from": gap["gap_start"],
                "lost_to": gap["gap_end"],
                "text": f"timeline {gap['timeline']} of the database ended before offset "
                f"{gap['gap_start']} in a failover",
                "at": gap["at"].isoformat(),
            }
            for gap in await self._context.calls.gaps(self.log_id)
        ]
        return usage

    async def refresh(self) -> None:
        """Ask the database for the bounds."""
        await self._load(self.next_offset)

    async def _load(self, offset: int, *, recent: bool = False) -> None:
        """Get batches from `offset` on into memory."""
        context = self._context
        try:
            rows = await context.calls.read(self.log_id, offset, LOAD_BYTES, behind=not recent)
        except Unavailable:
            stored = await context.objects.find(self.directory, offset)
            if stored is None or offset >= self.next_offset:
                raise
            base, end, name, size = stored
            context.older.put(self.log_id, await self._fetch(offset, base, end, name, 0, size))
            return
        if not rows:
            context.on_gone()
            raise NotFound(f"topic {self.name!r} was deleted")
        self.first_offset = max(self.first_offset, rows[0]["first_offset"])
        chunks: list[Chunk] = []
        at = offset
        for row in rows:
            if row["base_offset"] is None:
                break
            base, end = row["base_offset"], row["last_offset"] + 1
            if row["object"] is None:
                data = assigned(row["data"], base, row["timeline"])
                chunks.append(Chunk(min(at, base), base, end, data))
            elif chunks:
                break  # one range of the store at a time
            else:
                place = (row["object"], row["position"], row["size"])
                chunks.append(await self._fetch(at, base, end, *place))
            at = end
        cache = context.recent if recent else context.older
        for chunk in reversed(chunks):  # what is wanted first is the last to go
            cache.put(self.log_id, chunk)
        self.reached(rows[0]["next_offset"])

    async def _fetch(
        self, start: int, base: int, end: int, name: str, position: int, size: int
    ) -> Chunk:
        try:
            stored = await self._context.objects.read(name, position, size)
        except NotFound as error:
            raise Unavailable(
                f"offsets {base} to {end - 1} of topic {self.name!r} have just left {name}: "
                "try again"
            ) from error
        return Chunk(min(start, base), base, end, checked(stored, base, end))

    # Watching

    @property
    def watched(self) -> bool:
        return self._subscribers > 0

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        cancel = self._subscriptions.add(callback)
        self._subscribers += 1
        cancelled = False

        def end() -> None:
            nonlocal cancelled
            if not cancelled:
                cancelled = True
                self._subscribers -= 1
                cancel()

        return end

    async def wait_for(self, offset: int, timeout: float | None = None) -> bool:
        """Wait until `offset` can be read (True), or until the time is over (False)."""
        if self.appends.deleted:
            raise self.appends.gone()
        if self.next_offset > offset:
            return True
        self._subscribers += 1
        try:
            return await self._subscriptions.wait_for(offset, timeout)
        finally:
            self._subscribers -= 1

    async def catch_up(self, end: int) -> None:
        """Get what others appended up to `end`, for those who watch."""
        before = -1
        while before < self.next_offset < end and not self.appends.deleted:
            before = self.next_offset
            await self._load(before, recent=True)

    # Maintenance

    async def set_policy(self, policy: str) -> None:
        """Set the policy of the whole topic."""
        await self._context.configure(self.topic, policy, None)

    async def set_limits(self, limits: TopicLimits) -> None:
        """Set the limits of the whole topic."""
        await self._context.configure(self.topic, None, limits)

    async def drop_before(self, offset: int) -> int:
        """Delete the batches that end before this offset; how many."""
        total = 0
        drop = self._context.calls.drop_before
        while dropped := await drop(self.log_id, offset, self._context.grace):
            total += dropped
        await self.refresh()
        return total

    # Ending

    @property
    def deleted(self) -> bool:
        return self.appends.deleted

    @property
    def ending(self) -> bool:
        return self.appends.closed

    def mark_deleted(self) -> None:
        """Refuse new appends and wake all readers that wait."""
        self.appends.close(deleted=True)
        self._subscriptions.end(self.appends.gone())


class InMemory:
    """Bytes where a `Raw` expects a file."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_at(self, position: int, length: int) -> bytes:
        return self._data[position : position + length]


def _decode(
    chunks: Sequence[Chunk], offset: int, max_records: int, max_bytes: int
) -> tuple[Columns, int]:
    """Return the records of these chunks from the batch on that holds `offset`, and the offset
    after them.

    Chunks may overlap: one that was cached before the mover merged it lies inside the merged one.
    """
    decoder = Decoder()
    size, following = 0, offset
    for chunk in chunks:
        for position, head in chunk.heads():
            if head.next_offset <= following or head.attributes & CONTROL:
                continue
            if size and (size >= max_bytes or head.base_offset - offset >= max_records):
                return decoder.columns(), following
            decoder.add(chunk.data, head, position)
            size, following = size + head.size, head.next_offset
        following = chunk.end
    return decoder.columns(), following
