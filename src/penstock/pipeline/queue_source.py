"""The queue source, batch and streaming: all partitions of a queue, read from PostgreSQL in parallel.

The position in a queue of a million partitions is one number. Each message carries the id of the transaction that
stored it (`xid`), and `pg_snapshot_xmin(pg_current_snapshot())` is the oldest transaction still running: every
transaction below it has ended, so messages with a smaller xid are all visible or never will be. That is the horizon. A
batch is the messages with `from <= xid < horizon`. A transaction that stays open keeps the horizon below itself, so
its messages are in a later batch whenever it commits; none is passed by. What it costs: while any transaction that
writes stays open, on the whole server, the source sees nothing newer than it.

An offset is `{"queue", "id", "installation", "xid", "cuts"}`. The queue's id and the database's installation number
tell a queue that was deleted and made again, or another database, from the one the checkpoint belongs to. `cuts` says
how the batch that ends here is divided among tasks: whole partitions, so that one partition's messages stay in order
within one task.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from penstock.errors import InvalidRequest, NotFound
from penstock.pipeline.columns import QUEUE_COLUMNS, TIMESTAMP
from penstock.pipeline.mirror import Mirror
from penstock.pipeline.options import EARLIEST, LATEST, Options
from penstock.pipeline.postgres import Postgres
from penstock.pipeline.topic_source import DataLoss

SMALL_BATCH = 20_000  # messages; up to here one task reads them all
TASKS = 4
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_DASHES = (8, 13, 18, 23)
_DIGITS = [i for i in range(36) if i not in _DASHES]


@dataclass
class QueueRange(InputPartition):
    """One task's share: messages with low <= xid < high between two places of (partition, seq) order."""

    low: str
    high: str
    after: tuple[int, int] | None
    until: tuple[int, int] | None


@dataclass(frozen=True)
class QueueState:
    id: int
    installation: int
    horizon: int


class QueueOptions:
    def __init__(self, options: Options, columns: Sequence[str], *, streaming: bool) -> None:
        self.postgres = Postgres(options)
        self.queue = options.require("queue", "the queue's name")
        self.streaming = streaming
        self.group = options.text("group")
        self.starting = options.positions("startingOffsets", EARLIEST)
        if isinstance(self.starting, dict) or self.starting not in (EARLIEST, LATEST):
            raise InvalidRequest(
                "for a queue the option 'startingOffsets' is earliest or latest; use startingTimestamp"
            )
        self.since = options.moment("startingTimestamp")
        self.before = options.moment("endingTimestamp")
        self.from_xid = options.whole("fromXid", 0, least=0) or 0
        self.to_xid = options.whole("toXid")
        self.max_records = options.whole("maxOffsetsPerTrigger")
        self.tasks = options.whole("minPartitions", TASKS) or TASKS
        self.fail_on_loss = options.flag("failOnDataLoss", True)
        self.encrypted = options.text("encrypted", default="fail")
        if self.encrypted not in ("fail", "null"):
            raise InvalidRequest(f"the option 'encrypted' is fail or null, not {self.encrypted!r}")
        unknown = [name for name in columns if name not in QUEUE_COLUMNS.names]
        if unknown:
            raise InvalidRequest(f"a queue has the columns {', '.join(QUEUE_COLUMNS.names)}; it has no {unknown[0]!r}")
        self.columns = list(columns)

    def state(self) -> QueueState:
        rows = self.postgres.rows(
            "SELECT q.id, i.id, pg_snapshot_xmin(pg_current_snapshot())::text FROM queues q CROSS JOIN installation i "
            "WHERE q.name = $1 AND q.deleted_at IS NULL",
            (self.queue,),
        )
        if not rows:
            raise NotFound(f"there is no queue {self.queue!r}")
        number, installation, horizon = rows[0]
        return QueueState(number, installation, int(horizon))

    def nth_xid(self, id: int, low: int, n: int) -> int | None:
        """The xid of the n-th message from `low` on, counted from 0; None when there are not that many."""
        rows = self.postgres.rows(
            f"SELECT xid::text FROM messages WHERE queue_id = {id} AND xid >= '{low}'::xid8 "
            f"ORDER BY xid OFFSET {n} LIMIT 1"
        )
        return int(rows[0][0]) if rows else None

    def cuts(self, id: int, low: int, high: int) -> list[list[int]]:
        """Places of (partition, seq) order that divide the batch into tasks; none for a small one."""
        far = self.nth_xid(id, low, SMALL_BATCH)
        if self.tasks == 1 or far is None or far >= high:
            return []
        shares = ",".join(str(i / self.tasks) for i in range(1, self.tasks))
        rows = self.postgres.rows(
            f"SELECT unnest(percentile_disc(ARRAY[{shares}]) WITHIN GROUP (ORDER BY id)), count(*) FROM partitions "
            f"WHERE queue_id = {id}"
        )
        if self.streaming or not rows or rows[0][1] >= self.tasks:
            return [[cut, 0] for cut in sorted({int(row[0]) + 1 for row in rows if row[0] is not None})]
        # A batch read promises no order: few partitions are cut within.
        ends = self.postgres.rows(
            "SELECT p.id, (SELECT min(seq) FROM messages m WHERE m.partition_id = p.id), "
            "(SELECT max(seq) FROM messages m WHERE m.partition_id = p.id) "
            f"FROM partitions p WHERE p.queue_id = {id} ORDER BY 1"
        )
        found: list[list[int]] = []
        for partition, first, last in ends:
            if first is not None:
                steps = range(0 if found or partition != ends[0][0] else 1, self.tasks)
                found += [[partition, first + (last + 1 - first) * i // self.tasks] for i in steps]
        return found

    def ranges(self, low: str, high: str, cuts: list[list[int]]) -> list[QueueRange]:
        places: list[tuple[int, int] | None] = [None, *((int(p), int(s)) for p, s in cuts), None]
        return [QueueRange(low, high, a, b) for a, b in pairwise(places)]

    def read(self, state: QueueState, task: QueueRange) -> Iterator[pa.RecordBatch]:
        conditions = [
            f"m.queue_id = {state.id}",
            f"m.xid >= '{int(task.low)}'::xid8",
            f"m.xid < '{int(task.high)}'::xid8",
        ]
        if task.after:
            conditions.append(f"(m.partition_id, m.seq) >= ({task.after[0]}, {task.after[1]})")
        if task.until:
            conditions.append(f"(m.partition_id, m.seq) < ({task.until[0]}, {task.until[1]})")
        if self.since is not None:
            conditions.append(f"m.created_at >= to_timestamp({self.since} / 1000.0)")
        if self.before is not None:
            conditions.append(f"m.created_at < to_timestamp({self.before} / 1000.0)")
        order = " ORDER BY m.partition_id, m.seq" if self.streaming else ""
        query = (
            "SELECT p.name, m.partition_id, m.seq, m.transaction_id, m.trace_id::text, m.payload, m.key_id, "
            "m.created_at "
            f"FROM messages m JOIN partitions p ON p.id = m.partition_id WHERE {' AND '.join(conditions)}{order}"
        )
        for batch in self.postgres.batches(query):
            if batch.num_rows:
                yield self._shape(state, batch)

    def _shape(self, state: QueueState, batch: pa.RecordBatch) -> pa.RecordBatch:
        names, partitions, seqs, transactions, traces, payloads, keys, created = batch.columns
        payloads = self._clear(payloads, keys)
        made = {
            "queue": lambda: pa.repeat(pa.scalar(self.queue), batch.num_rows),
            "partition": lambda: names,
            "seq": lambda: seqs,
            "id": lambda: message_ids(state.installation, partitions, seqs),
            "transactionId": lambda: transactions,
            "traceId": lambda: traces,
            "payload": lambda: payloads.cast(pa.string()),
            "createdAt": lambda: created.cast(TIMESTAMP),
        }
        schema = pa.schema([QUEUE_COLUMNS.field(name) for name in self.columns])
        return pa.RecordBatch.from_arrays([made[name]() for name in self.columns], schema=schema)

    def _clear(self, payloads: pa.Array, keys: pa.Array) -> pa.Array:
        """Encrypted payloads never become text by accident."""
        if keys.null_count == len(keys):
            return payloads
        if self.encrypted == "fail":
            raise InvalidRequest(
                f"queue {self.queue!r} holds encrypted messages and Spark is not given the keys: consume them "
                "through the broker, or set the option encrypted=null to read them without their payload"
            )
        return pc.if_else(keys.is_null(), payloads, pa.scalar(None, payloads.type))


def message_ids(installation: int, partitions: pa.Array, seqs: pa.Array) -> pa.Array:
    """The ids of messages as text, for a whole column at once (the layout is that of `message_uuid.sql`)."""
    partition = partitions.to_numpy(zero_copy_only=False).astype(np.uint64)
    seq = seqs.to_numpy(zero_copy_only=False).astype(np.uint64)
    u = np.uint64
    high = u(installation) << u(32) | partition >> u(24) << u(16) | u(0x8000) | (partition >> u(12)) & u(0xFFF)
    low = u(2) << u(62) | (partition & u(0xFFF)) << u(50) | seq
    return _uuid_texts(np.stack([high, low], 1).astype(">u8").view(np.uint8).reshape(-1, 16))


def _uuid_texts(raw: npt.NDArray[np.uint8]) -> pa.Array:
    text = np.full((len(raw), 36), ord("-"), np.uint8)
    digits = np.empty((len(raw), 32), np.uint8)
    digits[:, 0::2], digits[:, 1::2] = _HEX[raw >> 4], _HEX[raw & 15]
    text[:, _DIGITS] = digits
    ends = np.arange(0, 36 * (len(raw) + 1), 36, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(raw), [None, pa.py_buffer(ends), pa.py_buffer(text)])


class QueueReader(DataSourceReader):
    """`spark.read.format("penstock").option("queue", ...)`: what is committed when the read is planned."""

    def __init__(self, options: QueueOptions) -> None:
        self.options = options
        self.state = options.state()

    def partitions(self) -> Sequence[InputPartition]:
        """All of it, or between two horizons that were taken before (`fromXid`, `toXid`)."""
        low, high = self.options.from_xid, min(self.options.to_xid or self.state.horizon, self.state.horizon)
        return self.options.ranges(str(low), str(high), self.options.cuts(self.state.id, low, high))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, QueueRange)
        return self.options.read(self.state, partition)


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("penstock").option("queue", ...)`."""

    def __init__(self, options: QueueOptions) -> None:
        self.options = options
        self.state = options.state()
        self._target: int | None = None
        self._mirror: Mirror | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._offset(0 if self.options.starting == EARLIEST else self.state.horizon, [])

    def _offset(self, xid: int, cuts: list[list[int]]) -> dict[str, Any]:
        s = self.state
        return {"queue": self.options.queue, "id": s.id, "installation": s.installation, "xid": str(xid), "cuts": cuts}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self.options.max_records) if self.options.max_records else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self.options.state().horizon

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        now = self.options.state()
        self._same(start, now)
        low = int(start["xid"])
        high = now.horizon if self._target is None else min(now.horizon, self._target)
        o = self.options
        first = o.nth_xid(now.id, low, 0)
        if first is None or first >= high:
            return start  # nothing new: the horizon alone moving is no batch
        if isinstance(limit, ReadMaxRows):
            # Whole transactions: the batch ends before the one that would go over, but holds at least one.
            past = o.nth_xid(now.id, low, limit.max_rows)
            if past is not None:
                high = min(high, past if past > first else past + 1)
        return self._offset(high, o.cuts(now.id, low, high))

    def _same(self, start: dict[str, Any], now: QueueState) -> None:
        if not isinstance(start, dict) or "xid" not in start:
            raise InvalidRequest("the checkpoint is not of a queue source")
        if start["queue"] != self.options.queue:
            raise InvalidRequest(
                f"the checkpoint belongs to the queue {start['queue']!r}; use another one for this query"
            )
        if start["installation"] != now.installation:
            raise DataLoss(
                "the checkpoint belongs to another database: its positions mean nothing here. "
                "Give the query a new checkpoint."
            )
        if start["id"] != now.id and self.options.fail_on_loss:
            raise DataLoss(
                f"queue {self.options.queue!r} was deleted and created again since the last batch. To go on with what "
                "it holds now, start the query once with failOnDataLoss=false; to begin anew, give it a new checkpoint."
            )
        self.state = now

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._offset(self.options.state().horizon, [])

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self.options.ranges(start["xid"], end["xid"], end["cuts"])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, QueueRange)
        return self.options.read(self.state, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Show the position as a consumer group on the broker."""
        if self.options.group:
            self._mirror = self._mirror or Mirror(self.options.postgres, self.options.queue, self.options.group)
            self._mirror.move(int(end["xid"]))

    def stop(self) -> None:
        if self._mirror is not None:
            self._mirror.stop()
            self._mirror = None
