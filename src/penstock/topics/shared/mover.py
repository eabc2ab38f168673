"""Move old ranges of shared logs to object storage, and apply retention.

One broker at a time does this. It leases a row for `LEASE_SECONDS` and renews that while it works.
A broker that dies, or is frozen, loses the lease to another one. Two movers at once do no harm: one
transaction replaces a range if all of its batches are as they were, and otherwise nothing.

    schedule the deletion of the new object, in an hour
    write the object
    in one transaction: cancel its deletion, replace the batches by coordinates,
                        schedule the deletion of objects that no row refers to any more

So the object of a killed mover is deleted. A replaced object is deleted `topics.tier_grace` after
the last row that refers to it: longer than any read takes. Small objects are merged with the
following batches. No step takes a lock that an append needs.

With the policy `compact`, moved ranges are compacted by key (`log.batches.by_key`): their objects
are replaced in the same way when half of their bytes have never been compacted.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import asyncpg

from penstock.config.schema import TopicsSettings
from penstock.database import Database
from penstock.errors import Damaged, NotFound, StorageError, Unavailable
from penstock.io.tasks import cancelled, supervised
from penstock.log.batches.by_key import LatestOffsets
from penstock.log.layout import COMPACT
from penstock.metrics import Metrics
from penstock.protocol.ids import uuid7
from penstock.protocol.kafka_batch import batches_in
from penstock.topics.shared.chunks import COMPACTED, Row, SharedObjects, new_name, read_row
from penstock.topics.shared.log import SharedLog, drop_batches

log = logging.getLogger("penstock.topics.shared")

LEASE_SECONDS = 60.0
RENEW_SECONDS = 10.0  # between renewals: not one for each of ten thousand idle logs
OBJECT_BYTES = 8 << 20
RANGE_BYTES = 1 << 20  # of an object that one row stands for, which is read at a time
MERGE_BYTES = 1 << 20  # a smaller object is written again, together with what follows it
ORPHAN_SECONDS = 3600.0  # until an object that no row refers to is deleted
COMMIT_SECONDS = 900.0  # that the answer of a call is remembered: repeats come within seconds
MAX_ROWS = 2000  # of one object
MIN_DIRTY_SHARE = 0.5  # of the moved bytes, from which on a pass of compaction runs

RENEW = """
  UPDATE shared_mover SET holder = $1, until = clock_timestamp() + make_interval(secs => $2)
   WHERE holder = $1 OR until < clock_timestamp() RETURNING holder"""
ROWS = """
  SELECT base_offset, last_offset, newest, timeline, data, object, position, size,
         extract(epoch FROM clock_timestamp() - appended_at)::float8 AS age
    FROM shared_batches WHERE log_id = $1 AND {} ORDER BY last_offset"""
CANDIDATES = ROWS.format("last_offset >= $2") + f" LIMIT {MAX_ROWS}"
BEFORE = ROWS.format("""last_offset < $2
     AND object = (SELECT o.object FROM shared_batches o WHERE o.log_id = $1 AND o.last_offset < $2
                    ORDER BY o.last_offset DESC LIMIT 1)""")
MOVED = ROWS.format("object IS NOT NULL")
REPLACE = "SELECT shared_replace($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)"
NOTE = """INSERT INTO shared_removals (object, due_at)
          VALUES ($1, clock_timestamp() + make_interval(secs => $2))"""
# Nothing while a backup runs (`penstock.backup.dump`): its snapshot may refer to these objects.
DUE = """
  SELECT id, log_id, object FROM shared_removals
   WHERE due_at < clock_timestamp()
     AND (SELECT pg_try_advisory_xact_lock(hashtextextended('shared_removals', 0))) LIMIT 500"""
OVERSIZED = """
  SELECT max(b.last_offset) + 1 AS until
    FROM (SELECT last_offset, sum(size) OVER (ORDER BY last_offset DESC) AS following
            FROM shared_batches WHERE log_id = $1) b WHERE b.following > $2"""
FORGET = """
  WITH producers AS (DELETE FROM shared_producers WHERE log_id = $1),
       gaps AS (DELETE FROM shared_gaps WHERE log_id = $1)
  DELETE FROM shared_removals WHERE log_id = $1"""
FIGURES = """
  SELECT pg_total_relation_size('shared_batches') AS bytes,
         (SELECT greatest(0, reltuples)::bigint FROM pg_class
           WHERE oid = 'shared_batches'::regclass) AS rows,
         (SELECT count(*) FROM shared_removals WHERE object IS NOT NULL) AS objects"""


class Mover:
    """Moves the logs that `logs()` returns."""

    def __init__(
        self,
        database: Database,
        settings: TopicsSettings,
        logs: Callable[[], Sequence[SharedLog]],
        objects: SharedObjects,
        now: Callable[[], int],  # microseconds since 1970, by the database's clock
        metrics: Metrics,
    ) -> None:
        self._database = database
        self._settings = settings
        self._logs = logs
        self._objects = objects
        self._now = now
        self._metrics = metrics
        self._name = uuid7().hex
        self.active = False  # this broker has the lease
        self._renew_at = 0.0  # monotonic
        self._moved_ends: dict[int, int] = {}  # ends of logs when all old ranges were moved
        self._task: asyncio.Task[None] | None = None
        self._lag = 0.0
        self._figures = (0, 0, 0)
        self._moved = metrics.counter(
            "penstock_shared_moved_bytes_total", "Bytes of shared topics moved to object storage"
        )
        self._dropped = metrics.counter(
            "penstock_shared_dropped_batches_total", "Batches of shared topics deleted by retention"
        )
        for i, (name, text) in enumerate(
            (
                ("penstock_shared_head_rows", "Rows of batches of shared topics in the database"),
                (
                    "penstock_shared_head_bytes",
                    "Bytes of the rows of shared topics and their indexes",
                ),
                ("penstock_shared_removal_objects", "Objects that wait to be deleted"),
            )
        ):
            metrics.gauge(name, text, read=lambda i=i: self._figures[i], merge="max")  # type: ignore[misc]
        metrics.gauge(
            "penstock_shared_mover_lag_seconds",
            "How much later than topics.tier_delay the oldest batch will be moved",
            read=lambda: self._lag,
            merge="max",
        )

    async def start(self) -> None:
        self._task = supervised("shared topics' mover", self._keep_moving, self._metrics)

    async def stop(self) -> None:
        await cancelled(self._task)

    async def _keep_moving(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tier_interval)
            await self._database.recovered()
            try:
                await self.step()
            except (Unavailable, StorageError, asyncpg.PostgresError) as error:
                log.warning("shared topics: nothing is moved for now: %s", error)

    async def _renew(self) -> bool:
        now = time.monotonic()
        if not self.active or now >= self._renew_at:
            self.active = bool(await self._database.fetch(RENEW, self._name, LEASE_SECONDS))
            self._renew_at = now + RENEW_SECONDS
            if not self.active:
                self._moved_ends.clear()
        return self.active

    async def step(self) -> bool:
        """Do everything that is due, if this broker has the lease. Return whether it has."""
        if not await self._renew():
            self._lag, self._figures = 0.0, (0, 0, 0)  # the broker that moves has them
            return False
        await self._delete_due()
        lag = 0.0
        for shared in self._logs():
            try:
                await self._retain(shared)
                moved = self._moved_ends.get(shared.log_id) == shared.next_offset
                if self._objects.store is not None and not moved:
                    lag = max(lag, await self._move_old(shared))
                    if shared.policy == COMPACT:
                        await self._compact(shared)
            except (Damaged, NotFound) as error:
                log.error("topic %s cannot be moved: %s", shared.name, error)
            if not await self._renew():
                return False
        self._lag = lag
        await self._forget_old()
        [row] = await self._database.browse(FIGURES)
        self._figures = row["rows"], row["bytes"], row["objects"]
        return True

    # Moving

    async def _move_old(self, shared: SharedLog) -> float:
        """Move everything that is old enough. Return by how many seconds it was late."""
        end = shared.next_offset
        late: float = 0.0
        while True:
            [row] = await self._database.browse("SELECT shared_offset_at($1) AS at", shared.log_id)
            if row["at"] is None:
                self._moved_ends[shared.log_id] = end
                return late
            rows = await self._next_rows(shared, row["at"])
            if not rows:
                return late
            late = max(late, float(rows[-1]["age"]) - self._settings.tier_delay)
            self._lag = max(self._lag, late)  # if it cannot be moved, it gets later and later
            parts = [await read_row(row, self._objects.read) for row in rows]
            if not await self._replace(shared, rows, parts) or not await self._renew():
                return late

    async def _next_rows(self, shared: SharedLog, offset: int) -> list[Row]:
        """Return the rows from `offset` on that are old enough and fit an object."""
        rows: list[Row] = []
        size = 0
        for one in await self._database.browse(CANDIDATES, shared.log_id, offset):
            full = size + one["size"] > OBJECT_BYTES
            if one["age"] < self._settings.tier_delay or (rows and full):
                break
            rows.append(one)
            size += one["size"]
        if not rows:
            return []
        before = await self._database.browse(BEFORE, shared.log_id, rows[0]["last_offset"])
        small = sum(one["size"] for one in before)
        if before and small < MERGE_BYTES and small + size <= OBJECT_BYTES:
            return [*before, *rows]
        return rows

    async def _replace(
        self,
        shared: SharedLog,
        rows: Sequence[Row],
        parts: Sequence[bytes],
        *,
        compacted: bool = False,
    ) -> bool:
        """Write an object of these parts, one per row, and replace the rows by references to it."""
        base, end = rows[0]["base_offset"], rows[-1]["last_offset"] + 1
        name = new_name(shared.directory, base, end, compacted=compacted)
        await self._database.fetch(NOTE, name, ORPHAN_SECONDS)
        await self._objects.write(name, parts)
        try:
            await self._database.fetch(
                REPLACE,
                shared.log_id,
                name,
                [row["last_offset"] for row in rows],
                [row["object"] for row in rows],
                *map(list, zip(*_ranges(rows, parts), strict=True)),
                self._settings.tier_grace,
            )
        except asyncpg.RaiseError as error:
            log.info("topic %s: a range is moved later: %s", shared.name, error)
            return False
        self._moved.add(sum(map(len, parts)))
        return True

    # Compaction

    async def _compact(self, shared: SharedLog) -> None:
        """Compact what was moved, if enough of it is new."""
        rows = await self._database.browse(MOVED, shared.log_id)
        dirty = sum(one["size"] for one in rows if not one["object"].endswith(COMPACTED))
        if not dirty or dirty < MIN_DIRTY_SHARE * sum(one["size"] for one in rows):
            return
        latest = LatestOffsets(self._now() / 1e6)
        run, read = self._objects.run, self._objects.read
        for row in rows:
            await run(_note_keys, latest, await read_row(row, read))
            if not await self._renew():
                return
        for group in _split_by_object(rows):
            last = group[-1]["last_offset"]
            parts = [
                await run(_without_replaced, latest, await read_row(row, read), last)
                for row in group
            ]
            replaced = await self._replace(shared, group, parts, compacted=True)
            if not replaced or not await self._renew():
                return

    # Retention

    async def _retain(self, shared: SharedLog) -> None:
        if shared.policy == COMPACT:
            return
        age, size = shared.limits.retention(self._settings)
        end = 0
        if age:
            cut = int(self._now() / 1e3 - age * 1e3)
            [row] = await self._database.browse(
                "SELECT shared_offset_at($1, $2) AS at", shared.log_id, cut
            )
            end = shared.next_offset if row["at"] is None else row["at"]
        if size:
            [row] = await self._database.browse(OVERSIZED, shared.log_id, size)
            end = max(end, row["until"] or 0)
        if end > shared.first_offset:
            self._dropped.add(await shared.drop_before(end))

    # Deleting

    async def _delete_due(self) -> None:
        """Delete the objects that are due, and the batches of deleted topics."""
        rows = await self._database.browse(DUE)
        objects = {row["id"]: row["object"] for row in rows if row["object"] is not None}
        if objects and self._objects.store is not None:
            await self._objects.run(self._objects.store.delete, list(objects.values()))
            await self._database.fetch(
                "DELETE FROM shared_removals WHERE id = ANY ($1)", list(objects)
            )
        for row in rows:
            if row["log_id"] is not None:
                everything = (row["log_id"], (1 << 63) - 1, self._settings.tier_grace)
                await drop_batches(self._database, *everything)
                await self._database.fetch(FORGET, row["log_id"])

    async def _forget_old(self) -> None:
        await self._database.fetch(
            "DELETE FROM shared_commits WHERE at < clock_timestamp() - make_interval(secs => $1)",
            COMMIT_SECONDS,
        )
        await self._database.fetch(
            """DELETE FROM shared_producers
                WHERE seen_at < clock_timestamp() - make_interval(secs => $1)""",
            self._settings.producer_expiry,
        )


def _split_by_object(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Split rows into groups that fit an object. The rows of one object stay together, so that
    nothing refers to it afterwards.
    """
    group: list[Row] = []
    for _, together in groupby(rows, key=itemgetter("object")):
        taken = list(together)
        if group and sum(one["size"] for one in (*group, *taken)) > OBJECT_BYTES:
            yield group
            group = []
        group += taken
    if group:
        yield group


def _note_keys(latest: LatestOffsets, data: bytes) -> None:
    for at, head in batches_in(data):
        latest.add(head, data[at : at + head.size])


def _without_replaced(latest: LatestOffsets, data: bytes, last: int) -> bytes:
    return b"".join(
        latest.compact(head, data[at : at + head.size], last)[0] for at, head in batches_in(data)
    )


def _ranges(rows: Sequence[Row], parts: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Return the ranges of the object, of about `RANGE_BYTES` each: last and base offset, records,
    newest, timeline, size and position.
    """
    ranges: list[tuple[int, ...]] = []
    first = rows[0]
    records, size, position = 0, 0, 0
    for i, (row, part) in enumerate(zip(rows, parts, strict=True), 1):
        records += sum(head.records for _, head in batches_in(part))
        size += len(part)
        if size >= RANGE_BYTES or i == len(rows):
            last, base, newest = row["last_offset"], first["base_offset"], row["newest"]
            ranges.append((last, base, records, newest, row["timeline"], size, position))
            first = rows[i % len(rows)]
            records, size, position = 0, 0, position + size
    return ranges
