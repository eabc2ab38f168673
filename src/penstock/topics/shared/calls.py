"""The SQL of shared logs.

The tables are in `queues/schema/migrations/0021_shared_topics.sql`. What an append does is in
`queues/schema/functions/shared_append.sql`.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from penstock.database import Database
from penstock.io.fs import Bytes

Row = Any  # asyncpg.Record, whose columns are read by name

MAX_ROWS = 256  # of one read


class AppendCall(NamedTuple):
    """The arguments of `shared_append`, a field per argument under its name without `p_`."""

    commit: UUID
    again: bool
    wait: bool
    logs: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    times: Sequence[int]
    data: Sequence[Bytes]
    producers: Sequence[bytes | None] | None = None
    epochs: Sequence[int | None] | None = None
    sequences: Sequence[int | None] | None = None
    nexts: Sequence[int | None] | None = None
    expected: Sequence[int | None] | None = None


class AppendAnswer(NamedTuple):
    offsets: list[int | None]
    statuses: list[str] | None
    counts: list[int]
    ends: list[int | None]
    timeline: int
    at: datetime


class SharedUsage(NamedTuple):
    """Where the batches of a log are, and their bytes."""

    head_rows: int  # batches in the database
    head_bytes: int
    head_age: float  # seconds since the oldest of them was appended
    tiered_ranges: int  # rows that are coordinates of a range in object storage
    tiered_bytes: int
    tiered_until: int | None  # the offset after the last such range


APPEND = "SELECT * FROM shared_append({})".format(
    ", ".join(f"p_{name} => ${i}" for i, name in enumerate(AppendCall._fields, 1))
)
_FIRST = """coalesce((SELECT b.base_offset FROM shared_batches b WHERE b.log_id = l.id
                       ORDER BY b.last_offset LIMIT 1), l.next_offset)"""
LOGS = f"""
  SELECT l.id, l.topic, l.partition, l.incarnation, l.policy, l.limits, l.next_offset, l.timeline,
         {_FIRST} AS first_offset
    FROM shared_logs l WHERE ($1::text IS NULL OR l.topic = $1) AND NOT l.moving
   ORDER BY l.topic, l.partition"""
# One snapshot of the bounds and of the batches from an offset on, as many as `bytes` take and one.
READ = f"""
  SELECT l.next_offset, {_FIRST} AS first_offset,
         b.base_offset, b.last_offset, b.records, b.timeline, b.data, b.object, b.position, b.size
    FROM shared_logs l
    LEFT JOIN LATERAL (
      SELECT b.*, sum(b.size) OVER (ORDER BY b.last_offset) - b.size AS before
        FROM (SELECT * FROM shared_batches b WHERE b.log_id = l.id AND b.last_offset >= $2
               ORDER BY b.last_offset LIMIT {MAX_ROWS}) b) b ON b.before < $3
   WHERE l.id = $1 ORDER BY b.last_offset"""
CREATE = """
  INSERT INTO shared_logs (topic, partition, incarnation, timeline, changed_at)
  SELECT $1, n, coalesce((SELECT l.incarnation FROM shared_logs l WHERE l.topic = $1 LIMIT 1), $3),
         shared_timeline(), clock_timestamp()
    FROM generate_series(0, $2 - 1) n
   WHERE NOT EXISTS (SELECT 1 FROM shared_logs l WHERE l.topic = $1 AND l.moving)
      ON CONFLICT (topic, partition) DO NOTHING"""
# What is left of it goes in steps (`mover`): an append never waits for that.
DELETE = """
  WITH gone AS (DELETE FROM shared_logs WHERE topic = $1 AND NOT moving RETURNING id),
       offsets AS (DELETE FROM shared_offsets o USING gone g WHERE o.log_id = g.id),
       leases AS (DELETE FROM shared_leases o USING gone g WHERE o.log_id = g.id),
       noted AS (INSERT INTO shared_removals (log_id, due_at)
                 SELECT id, clock_timestamp() FROM gone)
  SELECT id FROM gone"""
USAGE = """
  SELECT count(*) FILTER (WHERE object IS NULL),
         coalesce(sum(size) FILTER (WHERE object IS NULL), 0)::bigint,
         coalesce(extract(epoch FROM clock_timestamp()
                          - min(appended_at) FILTER (WHERE object IS NULL)), 0)::float8,
         count(object),
         coalesce(sum(size) FILTER (WHERE object IS NOT NULL), 0)::bigint,
         max(last_offset) FILTER (WHERE object IS NOT NULL) + 1
    FROM shared_batches WHERE log_id = $1"""
ENDS = "SELECT id, next_offset FROM shared_logs WHERE id = ANY ($1)"
NOTIFY = "SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2)"


class SharedCalls:
    """Run these statements on pooled connections. Reads far behind the end have a pool of their own
    (`Database.browse`), so that no append waits for them.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def append(self, call: AppendCall) -> AppendAnswer:
        [row] = await self._database.fetch(APPEND, *call)
        return AppendAnswer(*row)

    async def logs(self, topic: str | None = None) -> list[Row]:
        """Return all logs, or those of one topic."""
        return await self._database.read(LOGS, topic)

    async def read(self, log_id: int, offset: int, max_bytes: int, *, behind: bool) -> list[Row]:
        """Return a row per batch; one without a batch if none follows; none if the log is gone."""
        read = self._database.browse if behind else self._database.read
        return await read(READ, log_id, offset, max_bytes)

    async def offset_at(self, log_id: int, milliseconds: int) -> int | None:
        """Return the base offset of the first batch with a record of this time or later."""
        [row] = await self._database.browse(
            "SELECT shared_offset_at($1, $2) AS base", log_id, milliseconds
        )
        base: int | None = row["base"]
        return base

    async def ends(self, log_ids: Sequence[int]) -> list[Row]:
        return await self._database.read(ENDS, log_ids)

    async def usage(self, log_id: int) -> SharedUsage:
        """Count the batches of a log and their bytes, in the database and in object storage."""
        [row] = await self._database.browse(USAGE, log_id)
        return SharedUsage(*row)

    async def create(self, topic: str, partitions: int, incarnation: UUID) -> None:
        """Create the partitions that do not exist."""
        await self._database.read(CREATE, topic, partitions, incarnation)

    async def delete(self, topic: str) -> int:
        """Delete the topic. Return how many partitions it had."""
        return len(await self._database.read(DELETE, topic))

    async def configure(self, topic: str, policy: str | None, limits: str | None) -> None:
        """Change what is not None, for all partitions."""
        await self._database.read(
            """UPDATE shared_logs SET policy = coalesce($2, policy), limits = coalesce($3, limits)
                WHERE topic = $1""",
            *(topic, policy, limits),
        )

    async def drop_before(self, log_id: int, offset: int, grace: float) -> int:
        """Delete some batches that end before this offset. Return how many."""
        [row] = await self._database.read(
            "SELECT shared_drop($1, $2, $3) AS dropped", log_id, offset, grace
        )
        dropped: int = row["dropped"]
        return dropped

    async def gaps(self, log_id: int) -> list[Row]:
        return await self._database.browse(
            "SELECT * FROM shared_gaps WHERE log_id = $1 ORDER BY gap_start", log_id
        )

    async def notify(self, channel: str, payload: str) -> None:
        await self._database.fetch(NOTIFY, channel, payload)

    async def server(self) -> Row:
        """Return the server's time (`now`) and `timeline`."""
        [row] = await self._database.read(
            "SELECT clock_timestamp() AS now, shared_timeline() AS timeline"
        )
        return row
