"""The queue source for batches and streams: read all partitions from PostgreSQL in parallel.

The position in a queue of a million partitions is one number. Each message has the id of the
transaction that stored it (`xid`). `pg_snapshot_xmin(pg_current_snapshot())` is the oldest running
transaction, the horizon: every transaction below it has ended, so messages with a smaller xid are
visible now or never. A batch is the messages with `from <= xid < horizon`. A transaction that stays
open keeps the horizon below itself. Its messages are in a later batch whenever it commits, so none
is missed. The price: while any writing transaction is open on the server, the source sees nothing
newer. A read that ends by itself waits for open transactions for `waitForTransactions`; the log
names the transactions that stay open longer.

An offset is `{"queue", "id", "installation", "xid", "cuts"}`. The queue's id and the database's
installation number detect a queue that was created again, and another database. `cuts` says how the
batch that ends here is divided into tasks: by whole partitions, so that the messages of a partition
stay in order within one task.

A batch read (`spark.read`) has no order. If it needs a large part of the table, its tasks read
ranges of the table's blocks: each block once and in sequence. Ranges of partitions would visit
every block from every task. Blocks keep their rows as long as the table's file stays the same
(messages are never updated), which each task checks. PostgreSQL packs many messages into a row
(`penstock.pipeline.sources.packed_messages`).
"""

import copy
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.errors import InvalidRequest, NotFound, Unavailable
from penstock.pipeline.failure import plain_errors
from penstock.pipeline.options import LATEST, QueueSourceOptions
from penstock.pipeline.source_columns import QUEUE_COLUMNS, checked_columns
from penstock.pipeline.sources.group_mirror import Mirror
from penstock.pipeline.sources.postgres import Away, Patience, Postgres
from penstock.pipeline.sources.pushed_filters import FilteredReader, Interval, Names
from penstock.pipeline.sources.queue_rows import FILE, QueueRange, QueueRows
from penstock.pipeline.sources.topic import DataLoss
from penstock.pipeline.sources.trigger_delay import TriggerDelay

log = logging.getLogger("penstock.pipeline")

POLL_SECONDS = 0.05
WARN_SECONDS = 5.0  # how long a transaction holds a stream back before it is named
REPEAT_SECONDS = 60.0  # until it is named again
COUNTED = 100_000  # messages held back are counted up to here
SMALL_BATCH = 20_000  # messages; up to here one task reads them all
SCAN_SHARE = 0.2  # from this share of the table on, its blocks are read in sequence
NEVER_NULL = ("queue", "partition", "seq", "id", "transactionId", "createdAt")

# Lengths are counted in bytes of the server's encoding; texts arrive in ours.
_PACKED = """CASE WHEN current_setting('server_encoding') <> 'UTF8' THEN ''
                  WHEN coalesce(pg_relation_size(nullif(reltoastrelid, 0)), 0) = 0 THEN 'all'
                  ELSE 'small' END"""


@dataclass(frozen=True)
class QueueState:
    """Which queue it is, and how far it may be read now."""

    id: int
    installation: int
    horizon: int


class QueuePlan:
    """The messages to read from a queue, and their division into tasks. Picklable."""

    def __init__(
        self, options: QueueSourceOptions, columns: Sequence[str], *, streaming: bool
    ) -> None:
        self.given = options
        self.primary = Postgres(options, options.read_database)
        self.postgres = (
            self.primary.standby() or self.primary
        )  # the server that messages are read from
        self.queue = options.name
        self.partitions = Names(options.assign[1] if options.assign else None)
        self.streaming = streaming
        self.created = Interval(  # microseconds since 1970
            *(
                None if moment is None else moment * 1000
                for moment in (options.starting_timestamp, options.ending_timestamp)
            )
        )
        self.delay = TriggerDelay(options)
        self.tasks = options.min_partitions
        checked = checked_columns("queue", QUEUE_COLUMNS, columns)
        self.rows = QueueRows(self.postgres, self.queue, checked, streaming, options.encrypted)

    def state(self) -> QueueState:
        """Return the queue's state now, or raise NotFound."""
        rows = self.postgres.rows(
            "SELECT q.id, i.id, pg_snapshot_xmin(pg_current_snapshot())::text FROM queues q "
            "CROSS JOIN installation i WHERE q.name = $1 AND q.deleted_at IS NULL",
            (self.queue,),
        )
        if not rows:
            raise NotFound(f"queue {self.queue!r} does not exist")
        number, installation, horizon = rows[0]
        return QueueState(number, installation, int(horizon))

    def committed_state(self) -> QueueState:
        """Return the state once everything that is committed now is below the horizon. If a
        transaction stays open for longer than `waitForTransactions`, it is named, and newer
        messages are not read.
        """
        deadline = time.monotonic() + self.given.wait_for_transactions
        state = self.state()
        newest = self._newest(state)
        while newest is not None and state.horizon <= newest:
            if time.monotonic() >= deadline:
                self.name_holder(state)
                break
            time.sleep(POLL_SECONDS)
            state = self.state()
        return state

    def _newest(self, state: QueueState) -> int | None:
        """Return the last transaction with committed messages that are not below the horizon."""
        rows = self.postgres.rows(
            f"SELECT m.xid::text FROM messages m WHERE m.queue_id = {state.id} "
            f"AND m.xid >= '{state.horizon}'::xid8 ORDER BY m.xid DESC LIMIT 1"
        )
        return int(rows[0][0]) if rows else None

    def name_holder(self, state: QueueState) -> None:
        """Log which transaction holds committed messages back, if any are."""
        if self.postgres is not self.primary:
            return  # only the primary knows who writes
        short = state.horizon & 0xFFFFFFFF  # as processes show it: without its epoch
        age = "extract(epoch FROM clock_timestamp() - {})::float8"
        rows = self.postgres.rows(
            "SELECT format('pid %s, application_name \"%s\", %s', pid, application_name, "
            "coalesce(state, 'active')), "
            f"{age.format('coalesce(xact_start, backend_start)')} FROM pg_stat_activity "
            f"WHERE backend_xid::text = '{short}' UNION ALL "
            f"SELECT format('prepared transaction %s', gid), {age.format('prepared')} "
            f"FROM pg_prepared_xacts WHERE transaction::text = '{short}'"
        )
        who, age_seconds = rows[0] if rows else ("one that this database user may not see", None)
        held = self.count(state, state.horizon)
        if held:
            log.warning(
                "queue %s: %s%d committed messages are not read yet, since an older transaction "
                "is still open: %s%s. They are read once it ends; the option waitForTransactions "
                "waits for it.",
                *(self.queue, "at least " if held == COUNTED else "", held, who),
                "" if age_seconds is None else f", for {age_seconds:.0f} s",
            )

    def among(self, id: int, column: str = "m.partition_id") -> list[str]:
        """Return the condition that limits messages to the requested partitions, if any."""
        if self.partitions.allowed is None:
            return []
        rows = self.postgres.rows(
            "SELECT id FROM partitions WHERE queue_id = $1 AND name IN "
            "(SELECT jsonb_array_elements_text($2::jsonb))",
            (id, json.dumps(self.partitions.allowed)),
        )
        ids = ",".join(str(row[0]) for row in rows)
        return [f"{column} = ANY('{{{ids}}}'::bigint[])"]

    def count(self, state: QueueState, low: int) -> int:
        """Count the messages from this transaction on, up to COUNTED."""
        ((count,),) = self.postgres.rows(
            f"SELECT count(*) FROM (SELECT 1 FROM {self._messages(state.id, low)} "
            f"LIMIT {COUNTED}) x"
        )
        return int(count)

    def nth_xid(self, id: int, low: int, n: int) -> int | None:
        """Return the xid of the n-th message from `low` on, counted from 0, or None."""
        rows = self.postgres.rows(
            # not `xid`, which would be the text: 9 after 10, and no index
            f"SELECT m.xid::text FROM {self._messages(id, low)} ORDER BY m.xid OFFSET {n} LIMIT 1"
        )
        return int(rows[0][0]) if rows else None

    def _messages(self, id: int, low: int) -> str:
        """Return the query of the messages of the requested partitions, from a transaction on."""
        wanted = [f"m.queue_id = {id}", *self.among(id), f"m.xid >= '{low}'::xid8"]
        return f"messages m WHERE {' AND '.join(wanted)}"

    def cuts(self, id: int, low: int, high: int) -> list[list[int]]:
        """Return the places in (partition, seq) order that divide a large batch into tasks."""
        far = self.nth_xid(id, low, SMALL_BATCH)
        if self.tasks == 1 or far is None or far >= high:
            return []
        shares = ",".join(str(i / self.tasks) for i in range(1, self.tasks))
        rows = self.postgres.rows(
            f"SELECT unnest(percentile_disc(ARRAY[{shares}]) WITHIN GROUP (ORDER BY id)), "
            "count(*) FROM partitions "
            f"WHERE {' AND '.join([f'queue_id = {id}', *self.among(id, 'id')])}"
        )
        if self.streaming or not rows or rows[0][1] >= self.tasks:
            return [
                [cut, 0] for cut in sorted({int(row[0]) + 1 for row in rows if row[0] is not None})
            ]
        # A batch read has no order, so a partition may be split if there are few.
        own = " AND ".join([f"p.queue_id = {id}", *self.among(id, "p.id")])
        ends = self.postgres.rows(
            "SELECT p.id, (SELECT min(seq) FROM messages m WHERE m.partition_id = p.id), "
            "(SELECT max(seq) FROM messages m WHERE m.partition_id = p.id) "
            f"FROM partitions p WHERE {own} ORDER BY 1"
        )
        ranges: list[list[int]] = []
        for partition, first, last in ends:
            if first is not None:
                steps = range(0 if ranges or partition != ends[0][0] else 1, self.tasks)
                ranges += [[partition, first + (last + 1 - first) * i // self.tasks] for i in steps]
        return ranges

    def ranges(self, low: int, high: int, cuts: list[list[int]]) -> list[QueueRange]:
        places: list[tuple[int, int] | None] = [None, *((int(p), int(s)) for p, s in cuts), None]
        return [QueueRange(low, high, a, b) for a, b in pairwise(places)]

    def scan(self, id: int, low: int, high: int) -> list[QueueRange]:
        """Return ranges of the table's blocks if a large part of it is wanted, or else none."""
        ((rows, pages, file, packed),) = self.postgres.rows(
            f"SELECT reltuples::float8, relpages, ({FILE}), {_PACKED} FROM pg_class WHERE oid "
            "= 'messages'::regclass"
        )
        wanted = self.postgres.estimate(
            f"SELECT 1 FROM messages m WHERE {' AND '.join(self._conditions(id, low, high))}"
        )
        if self.tasks == 1 or rows < SMALL_BATCH or wanted < SCAN_SHARE * rows:
            return []
        cuts = [pages * i // self.tasks for i in range(1, self.tasks)]
        places = [(0, 0), *((cut, 0) for cut in cuts), None]  # to the current end
        return [QueueRange(low, high, a, b, file, packed) for a, b in pairwise(places)]

    def read(self, state: QueueState, task: QueueRange) -> Iterator[pa.RecordBatch]:
        self._wait_for_standby(task.high)
        conditions = self._conditions(state.id, task.low, task.high)
        yield from self.rows.read(state.installation, task, conditions)

    def _conditions(self, id: int, low: int, high: int) -> list[str]:
        span = f"m.queue_id = {id} AND m.xid >= '{low}'::xid8 AND m.xid < '{high}'::xid8"
        conditions = [span, *self.among(id)]
        for sign, moment in ((">=", self.created.low), ("<", self.created.high)):
            if moment is not None:
                conditions.append(
                    f"m.created_at {sign} 'epoch'::timestamptz + '{moment} microseconds'::interval"
                )
        return conditions

    def check_standby(self) -> None:
        """Check that a standby follows the primary, and how far it is behind, if one is read."""
        if self.postgres is self.primary:
            return
        log.warning(
            "queue %s is read from a standby, %.1f s behind",
            self.queue,
            self.postgres.behind_seconds(),
        )
        primary = copy.copy(self.primary)
        primary.patience = 0.0
        installation = "SELECT id FROM installation"
        try:
            expected = primary.rows(installation)
        except Unavailable as error:
            log.warning("the primary cannot be asked whether the standby is its own: %s", error)
            return
        if self.postgres.rows(installation) != expected:
            raise InvalidRequest(
                "the standby (readDatabase, or database.read_url) belongs to another database "
                "than the primary"
            )

    def _wait_for_standby(self, horizon: int) -> None:
        """Wait until this server has the whole batch, which another one may have planned."""
        if self.postgres is self.primary:
            return
        patience = Patience(self.postgres.patience)
        while (now := self.state().horizon) < horizon:
            patience.wait(
                Away(f"the standby has transactions up to {now}, the batch those up to {horizon}")
            )
        patience.end()


@plain_errors
class QueueReader(FilteredReader):
    """`spark.read.format("penstock").option("queue", ...)`: what is committed by then."""

    def __init__(self, plan: QueuePlan) -> None:
        super().__init__({"createdAt": plan.created, "partition": plan.partitions}, NEVER_NULL)
        self.plan = plan
        plan.check_standby()
        self.state = plan.state() if plan.given.to_xid else plan.committed_state()

    def partitions(self) -> Sequence[InputPartition]:
        """Return tasks for all messages, or for those between two horizons (`fromXid`, `toXid`)."""
        o, queue = self.plan, self.state.id
        low, high = o.given.from_xid, min(o.given.to_xid or self.state.horizon, self.state.horizon)
        return o.scan(queue, low, high) or o.ranges(low, high, o.cuts(queue, low, high))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, QueueRange)
        return self.plan.read(self.state, partition)


@plain_errors
class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("penstock").option("queue", ...)`."""

    def __init__(self, plan: QueuePlan) -> None:
        self.plan = plan
        plan.check_standby()
        self.state = plan.state()
        self._target: int | None = None
        self._planned = 0  # the transaction up to which the last batch goes
        # A horizon that holds messages back, and when to say so.
        self._held: tuple[int, float] | None = None
        self._mirror: Mirror | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._offset(
            self.state.horizon if self.plan.given.starting_offsets == LATEST else 0, []
        )

    def _offset(self, xid: int, cuts: list[list[int]]) -> dict[str, Any]:
        s = self.state
        return {
            "queue": self.plan.queue,
            "id": s.id,
            "installation": s.installation,
            "xid": str(xid),
            "cuts": cuts,
        }

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self.plan.given.max_offsets_per_trigger
        return ReadMaxRows(most) if most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self.plan.committed_state().horizon

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        now = self.plan.state()
        self._same(start, now)
        self.commit(start)  # all before is done; Spark says so only when there is a next batch
        low = self._planned = int(start["xid"])
        high = now.horizon if self._target is None else min(now.horizon, self._target)
        o = self.plan
        first = o.nth_xid(now.id, low, 0)
        if first is None or first >= high:
            if first is not None and self._target is None:
                self._name_holder(now)
            return start  # nothing new: a horizon that moves without messages makes no batch
        if self._target is None and o.delay.at_least:
            last = o.nth_xid(now.id, low, o.delay.at_least - 1)
            if o.delay.holds(last is not None and last < high):
                return start
        if isinstance(limit, ReadMaxRows):
            # Whole transactions: the batch ends before the one that would go over, but holds at
            # least one.
            past = o.nth_xid(now.id, low, limit.max_rows)
            if past is not None:
                high = min(high, past if past > first else past + 1)
        self._planned = high
        return self._offset(high, o.cuts(now.id, low, high))

    def _name_holder(self, now: QueueState) -> None:
        """Log which transaction holds the horizon back, when it has stood still for a while and
        then from time to time.
        """
        if self._held is None or self._held[0] != now.horizon:
            self._held = (now.horizon, time.monotonic() + WARN_SECONDS)
        elif time.monotonic() >= self._held[1]:
            self.plan.name_holder(now)
            self._held = (now.horizon, time.monotonic() + REPEAT_SECONDS)

    def _same(self, start: dict[str, Any], now: QueueState) -> None:
        if not isinstance(start, dict) or "xid" not in start:
            raise InvalidRequest("the checkpoint is not of a queue source")
        if start["queue"] != self.plan.queue:
            raise InvalidRequest(
                f"the checkpoint belongs to the queue {start['queue']!r}; use another one for "
                "this query"
            )
        if start["installation"] != now.installation:
            raise DataLoss(
                "the checkpoint belongs to another database: its positions mean nothing here. "
                "Give the query a new checkpoint."
            )
        if start["id"] != now.id and self.plan.given.fail_on_data_loss:
            raise DataLoss(
                f"queue {self.plan.queue!r} was deleted and created again since the last "
                "batch. To resume with what it holds now, start the query once with "
                "failOnDataLoss=false; to begin again, give it a new checkpoint."
            )
        self.state = now

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return how far the stream could read, for Spark's progress, and how many messages that is
        after the last planned batch.
        """
        o, now = self.plan, self.plan.state()
        waiting = o.count(now, self._planned)
        latest = {**self._offset(now.horizon, []), "waiting": waiting, "more": waiting >= COUNTED}
        if o.postgres is not o.primary:
            latest["behindSeconds"] = o.postgres.behind_seconds()
        return latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        # a batch begun before is run again without asking for the latest offset first
        self._same(end, self.state)
        return self.plan.ranges(int(start["xid"]), int(end["xid"]), end["cuts"])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, QueueRange)
        return self.plan.read(self.state, partition)

    def commit(self, end: dict[str, Any]) -> None:
        if self.plan.given.group:
            self._mirror = self._mirror or Mirror(
                self.plan.primary, self.plan.queue, self.plan.given.group
            )
            self._mirror.move(int(end["xid"]))

    def stop(self) -> None:
        if self._mirror is not None:
            self._mirror.stop()
            self._mirror = None
