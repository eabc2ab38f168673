"""Who writes: the identity that makes a sink's rows recognisable when a batch is run again.

Spark runs a batch again after a crash, and a task again after a failure, and a Python sink is told neither the query
nor the batch by its arguments. The task's local properties tell both, in a stream's own writes and in those that
`foreachBatch` makes; the user names the application with the option `appId`. So a row is (appId, query, batch, task,
row), and the sinks turn that into an idempotent producer's sequence (topics) or a transactionId (queues). The query is
the checkpoint's: with a new checkpoint batches are counted from 0 again over other rows, which must not be taken for
the old ones. A write without a stream is batch 0 of its appId: made again, it adds nothing.

A row keeps its number only if the batch, run again, gives each task the same rows in the same order. Sources here see
to it; a shuffle does not, hence `orderBy`: the columns by which a task sorts its rows before it writes them.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext

from penstock.errors import InvalidRequest
from penstock.pipeline.options import Options

QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass(frozen=True)
class Writer:
    """One task's attempt at one batch."""

    app: str
    batch: int
    task: int


def current_writer(app: str, streaming: bool, options: Options) -> Writer:
    """On an executor: which batch and task this is. `batchId` is for `foreachBatch` where Spark does not tell."""
    context = TaskContext.get()
    if context is None:
        raise InvalidRequest("a sink's rows are written by a Spark task; there is none here")
    query, batch = context.getLocalProperty(QUERY), context.getLocalProperty(BATCH)
    if batch is None and streaming:
        raise InvalidRequest(
            f"this Spark does not tell the batch ({BATCH}): exactly once is impossible, leave appId out"
        )
    number = options.whole("batchId", int(batch or 0), least=0)
    return Writer(f"{app}:{query[:13]}" if query else app, number or 0, context.partitionId())


def say_at_least_once(app: str | None, kind: str) -> None:
    """Said once, where the query is built."""
    if not app:
        sys.stderr.write(
            f"penstock: this {kind} sink has no appId, so it writes at least once: a batch run again is written again. "
            'Give .option("appId", "a name of your own") for exactly once.\n'
        )


def ordered(batches: Iterator[pa.RecordBatch], options: Options) -> Iterator[pa.RecordBatch]:
    """The rows in the order of the columns in `orderBy`; as they come when it is not given."""
    columns = options.names("orderBy")
    if not columns:
        yield from batches
        return
    found = list(batches)
    if found:
        table = pa.Table.from_batches(found)
        missing = [name for name in columns if name not in table.column_names]
        if missing:
            raise InvalidRequest(f"orderBy names {missing[0]!r}; the rows have {', '.join(table.column_names)}")
        yield from table.sort_by([(name, "ascending") for name in columns]).to_batches()
