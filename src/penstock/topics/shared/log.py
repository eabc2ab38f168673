"""The log of one partition of a shared topic (`TopicLog`).

Records that were appended or read recently are in memory. Others are in the database or in object
storage: a read on the event loop raises `NotLoaded`, its `load` gets them, and the read is repeated
(`read_or_wait`). While the database is down, objects are found by their names.

The bounds are the latest that this broker has read. Other brokers append too, so the end may be
behind them. An offset behind the end is refused only after the database was asked.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.config.schema import TopicsSettings
from penstock.database import Database
from penstock.errors import Damaged, InvalidOffset, NotFound, PenstockError, Unavailable
from penstock.log.append_queue import AppendsThrough
from penstock.log.batches.decode import decode_batches
from penstock.log.batches.format import BATCHES
from penstock.log.batches.segment import batch_of
from penstock.log.context import Instruments
from penstock.log.limits import TopicLimits
from penstock.log.segment import Batch, FetchedBatches, Segment, empty_batch
from penstock.log.tier.cache import NotCached
from penstock.log.tier.manifest import TierManifest
from penstock.protocol.kafka_batch import BatchHead, assigned, batches_in
from penstock.protocol.names import partition_label
from penstock.topics.shared.appends import Flusher, SharedAppends
from penstock.topics.shared.chunks import Chunk, ChunkCache, Row, SharedObjects, read_row
from penstock.topics.subscriptions import Subscriptions

T = TypeVar("T")

LOAD_BYTES = 1 << 20  # of one read from the database, of which the last batch may be beyond it
MAX_LOADS = 64  # of one read, which may need several logs

READ = "SELECT * FROM shared_read($1, $2, $3)"
USAGE = """
  SELECT count(*) FILTER (WHERE object IS NULL) AS head_rows,
         coalesce(sum(size) FILTER (WHERE object IS NULL), 0)::bigint AS head_bytes,
         coalesce(extract(epoch FROM clock_timestamp()
                          - min(appended_at) FILTER (WHERE object IS NULL)), 0)::float8 AS head_age,
         count(object) AS tiered_ranges,
         coalesce(sum(size) FILTER (WHERE object IS NOT NULL), 0)::bigint AS tiered_bytes,
         max(last_offset) FILTER (WHERE object IS NOT NULL) + 1 AS tiered_until
    FROM shared_batches WHERE log_id = $1"""


@dataclass(slots=True, kw_only=True)
class SharedContext:
    """What all shared logs of a broker use."""

    database: Database
    settings: TopicsSettings
    flusher: Flusher
    objects: SharedObjects
    recent: ChunkCache  # appended by this broker, or loaded for subscribers
    older: ChunkCache  # loaded for readers that lag: they evict no newer ones
    instruments: Instruments
    now: Callable[[], int]  # microseconds since 1970, by the database's clock
    announce: Callable[[int, int], None]  # tell other brokers this log's end
    on_gone: Callable[[], None]  # a log does not exist any more: the catalog must be read
    configure: Callable[[str, str | None, TopicLimits | None], Awaitable[None]]  # a topic


class NotLoaded(NotCached):
    """The records are not in memory. `load` gets them."""

    def __init__(self, load: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.load = load


async def drop_batches(database: Database, log_id: int, offset: int, grace: float) -> int:
    """Delete the batches of a log that end before this offset. Return how many."""
    total, dropped = 0, 1
    while dropped:
        [row] = await database.read("SELECT shared_drop($1, $2, $3)", log_id, offset, grace)
        dropped = row[0]
        total += dropped
    return total


async def read_loading(read: Callable[[], T]) -> T:
    """Load what `read` needs, and return its result."""
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
        self.incarnation: str = row["incarnation"]
        self.directory = f"shared/{self.incarnation}/{self.partition}/"  # of its objects
        self.first_offset: int = row["first_offset"]  # the latest that was read, as the next one
        self.next_offset: int = row["next_offset"]
        self.announced = 0  # the end, as another broker said
        self.size_bytes = 0  # of the last `measure`, as is the damage
        self.damage: list[dict[str, Any]] = []
        self._context = context
        # The last offset that could not be loaded, and the error, until a read raises it.
        self._failure: tuple[int, PenstockError | None] = -1, None
        # Base offsets of the batches that have these times, until `offset_at` reads them.
        self._times: dict[int, int | None] = {}
        self._subscriptions = Subscriptions()
        self.appends = SharedAppends(
            self.name,
            self.log_id,
            context.flusher,
            max_record=context.settings.max_record,
            now=context.now,
            instruments=context.instruments,
            on_commit=self._committed,
            on_gone=context.on_gone,
        )
        self.apply_settings(row)

    def apply_settings(self, row: Any) -> None:
        self.policy: str = row["policy"]
        self.limits = msgspec.json.decode(row["limits"], type=TopicLimits)
        self.appends.max_record = self.limits.max_record or self._context.settings.max_record

    # Appending

    def _committed(
        self, batches: Sequence[tuple[int, memoryview]], end: int, timeline: int
    ) -> None:
        for first, data in batches:
            batch = assigned(data, first, timeline)
            following = BatchHead.parse(batch).next_offset
            self._context.recent.put(self.log_id, Chunk(first, first, following, batch))
        self._context.announce(self.log_id, end)
        self.advance(end)

    def advance(self, end: int) -> None:
        """Let records below `end` be read."""
        if end > self.next_offset:
            self.next_offset = end
            self._subscriptions.notify(end)

    # Reading

    @property
    def records(self) -> int:
        """Return the number of records, or more: compaction and failovers leave offsets out."""
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
        """Return records from `offset` on, at least one if there is one."""
        while True:
            fetched = self._whole_batches(offset, max_bytes, max_records, strict=strict)
            if not fetched.data:
                return empty_batch(fetched.next_offset)
            try:
                columns = decode_batches(fetched.data, offset)
            except Damaged:  # read up to the batch that cannot be decoded
                fetched = self._whole_batches(offset, 1, strict=strict)
                columns = decode_batches(fetched.data, offset)
            count = len(columns.offsets)
            skip = int(np.searchsorted(columns.offsets, offset))
            if skip < count:
                sizes = np.cumsum(16 + np.maximum(columns.value_lengths[skip:], 0))
                fitting = max(1, int(np.searchsorted(sizes, max_bytes, "right")))
                part = slice(skip, min(count, skip + max_records, skip + fitting))
                return batch_of(columns, part, fetched.next_offset)
            offset = fetched.next_offset

    def batches(self, offset: int, max_bytes: int) -> FetchedBatches:
        return self._whole_batches(offset, max_bytes, strict=True)

    def _whole_batches(
        self, offset: int, max_bytes: int, max_records: int = 1 << 62, *, strict: bool
    ) -> FetchedBatches:
        """Return the batches from the one with `offset` on, at least one if there is one.

        Chunks may overlap: one that was cached before the mover merged it is part of another.
        """
        start = at = self._begin(offset, strict)
        if at >= self.next_offset:
            at = max(offset, self.next_offset)
            return FetchedBatches(b"", at, at, 0)
        parts: list[bytes] = []
        size, first, records = 0, -1, 0
        while at < self.next_offset and size < max_bytes:
            chunk = self._cached(at)
            if chunk is None:
                if parts:
                    break
                raise self._not_loaded(at)
            for position, head in batches_in(chunk.data):
                if head.next_offset <= at:
                    continue
                full = size + head.size > max_bytes or head.base_offset - start >= max_records
                if parts and full:
                    return FetchedBatches(b"".join(parts), first, at, records)
                first = head.base_offset if first < 0 else first
                parts.append(chunk.data[position : position + head.size])
                size, records, at = size + head.size, records + head.records, head.next_offset
            at = max(at, chunk.end)
        return FetchedBatches(b"".join(parts), first if parts else at, at, records)

    def timestamps(self, offsets: np.ndarray) -> np.ndarray:
        """Return the times of these records, in microseconds since 1970."""
        times = np.zeros(len(offsets), np.int64)
        at = 0
        while at < len(offsets):
            chunk = self._cached(int(offsets[at]))
            if chunk is None:
                raise self._not_loaded(int(offsets[at]))
            columns = decode_batches(chunk.data, chunk.base)
            stop = max(at + 1, int(np.searchsorted(offsets, chunk.end)))
            rows = np.searchsorted(columns.offsets, offsets[at:stop])
            times[at:stop] = columns.times[np.minimum(rows, len(columns.times) - 1)] * 1000
            at = stop
        return times

    def offset_at(self, timestamp: float) -> int:
        """Return the first offset of this time (seconds since 1970) or later, or `next_offset`."""
        milliseconds = int(np.ceil(timestamp * 1000))
        if milliseconds not in self._times:
            raise NotLoaded(lambda: self._find_time(milliseconds))
        base = self._times[milliseconds]
        while base is not None and base < self.next_offset:
            chunk = self._cached(base)
            if chunk is None:
                raise self._not_loaded(base)
            columns = decode_batches(chunk.data, chunk.base)
            later = np.flatnonzero(columns.times >= milliseconds)
            if len(later):
                del self._times[milliseconds]
                return int(columns.offsets[later[0]])
            base = chunk.end
        del self._times[milliseconds]
        return self.next_offset

    async def _find_time(self, milliseconds: int) -> None:
        [row] = await self._context.database.browse(
            "SELECT shared_offset_at($1, $2) AS base", self.log_id, milliseconds
        )
        self._times[milliseconds] = row["base"]

    def records_from(self, offset: int) -> int:
        """Return the number of records, or more: compaction and failovers leave offsets out."""
        return self.next_offset - min(max(offset, self.first_offset), self.next_offset)

    def lost_at(self, _: int) -> dict[str, Any] | None:
        return None

    def age_at(self, offset: int) -> float | None:
        """Return the seconds since `offset` was appended; None if it is not in memory."""
        if offset >= self.next_offset:
            return 0.0
        try:
            (at,) = self.timestamps(np.array([max(offset, self.first_offset)]))
        except PenstockError:
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
        """Check `offset`, and return where a read of it begins."""
        if self.appends.deleted:
            raise self.appends.gone()
        if strict and offset < self.first_offset:
            raise InvalidOffset(f"offset {offset} lies before {self.first_offset}")
        if strict and offset > self.next_offset:
            raise self._not_loaded(offset)
        return max(offset, self.first_offset)

    def _cached(self, offset: int) -> Chunk | None:
        context = self._context
        chunk = context.recent.get(self.log_id, offset) or context.older.get(self.log_id, offset)
        if chunk is not None and self._failure[0] == offset:  # another read has loaded it
            self._failure = -1, None
        return chunk

    def _not_loaded(self, offset: int) -> PenstockError:
        """Return the error of a read at this offset: `NotLoaded`, or why its load failed."""
        at, error = self._failure
        if at != offset or error is None:
            return NotLoaded(lambda: self._try_to_load(offset))
        self._failure = -1, None
        return error

    async def _try_to_load(self, offset: int) -> None:
        """Load batches. If that fails, the repeated read raises the error, so that the other
        partitions of a request do not fail.
        """
        try:
            await self._load(offset)
            if offset > self.next_offset:
                raise InvalidOffset(
                    f"offset {offset} lies outside {self.first_offset} to {self.next_offset}"
                )
        except PenstockError as error:
            self._failure = offset, error

    async def refresh_if_possible(self) -> None:
        """Read the bounds. Without the database the old ones remain."""
        with suppress(Unavailable):
            await self.refresh()

    async def end_of_timeline(self, timeline: int) -> int:
        """Return the offset after the last record of this timeline, or of one before it."""
        ends = [gap["gap_start"] for gap in await self.gaps() if gap["timeline"] >= timeline]
        return min(ends, default=self.next_offset)

    async def gaps(self) -> list[Any]:
        """Return the offsets that were left out because a failover may have lost their records."""
        return await self._context.database.browse(
            "SELECT * FROM shared_gaps WHERE log_id = $1 ORDER BY gap_start", self.log_id
        )

    async def measure(self) -> Row:
        """Read the size, and what failovers lost. Return the row of `USAGE`. This is costly: use it
        only for answers to people.
        """
        await self.refresh()
        [usage] = await self._context.database.browse(USAGE, self.log_id)
        self.size_bytes = usage["head_bytes"] + usage["tiered_bytes"]
        self.damage = [
            {
                "outcome": "lost",
                "lost_from": gap["gap_start"],
                "lost_to": gap["gap_end"],
                "text": f"timeline {gap['timeline']} of the database ended before offset "
                f"{gap['gap_start']} in a failover",
                "at": gap["at"].isoformat(),
            }
            for gap in await self.gaps()
        ]
        return usage

    async def refresh(self) -> None:
        """Read the bounds from the database."""
        await self._load(self.next_offset)

    async def _load(self, offset: int, *, recent: bool = False) -> None:
        """Load batches from `offset` on."""
        context = self._context
        query = context.database.read if recent else context.database.browse
        try:
            rows = await query(READ, self.log_id, offset, LOAD_BYTES)
        except Unavailable:
            if offset >= self.next_offset:
                raise
            found = await context.objects.find(self.directory, offset)
            if found is None:
                raise
            context.older.put(self.log_id, found)
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
            if row["object"] is not None and chunks:
                break  # one range of the store at a time
            base, end = row["base_offset"], row["last_offset"] + 1
            try:
                data = await read_row(row, context.objects.read)
            except NotFound as error:
                raise Unavailable(
                    f"offsets {base} to {end - 1} of topic {self.name!r} have just left "
                    f"{row['object']}: try again"
                ) from error
            chunks.append(Chunk(min(at, base), base, end, data))
            at = end
        cache = context.recent if recent else context.older
        for chunk in reversed(chunks):  # the first one is used most recently
            cache.put(self.log_id, chunk)
        self.advance(rows[0]["next_offset"])

    # Watching

    @property
    def watched(self) -> bool:
        return self._subscriptions.watched

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._subscriptions.add(callback)

    async def wait_for(self, offset: int, timeout: float | None = None) -> bool:
        """Wait until `offset` can be read. Return False after the timeout."""
        if self.appends.deleted:
            raise self.appends.gone()
        return self.next_offset > offset or await self._subscriptions.wait_for(offset, timeout)

    async def catch_up(self) -> None:
        """Load what other brokers appended up to `announced`, for subscribers."""
        before = -1
        while before < self.next_offset < self.announced and not self.appends.deleted:
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
        """Delete the batches that end before this offset. Return how many."""
        dropped = await drop_batches(
            self._context.database, self.log_id, offset, self._context.settings.tier_grace
        )
        await self.refresh()
        return dropped

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
