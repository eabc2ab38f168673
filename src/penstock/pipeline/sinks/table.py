"""A Delta table as the sink of a pipeline file: any rows, each batch exactly once.

Executors write Parquet files below the table's directory, the driver commits them. The commit
carries an application transaction (Delta's `txn` action): its id is the pipeline's and its query's,
its version the batch's number. So a batch that is run again, after a kill at any step, finds its
number in the table and adds nothing; of two runs at once one adds its files, the other deletes its
own. Files of a run that was killed before its commit are in no commit; `vacuum` removes them.

The archive of a topic or queue is another such table, with columns and partitions of its own
(`penstock.pipeline.lake.table`).
"""

import json
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.errors import ConfigError, InvalidRequest, Unavailable
from penstock.pipeline.lake.commits import (
    MAX_ATTEMPTS,
    commit,
    is_committed,
    new_run,
    sync_commits,
)
from penstock.pipeline.lake.storage import Storage

FILES = "path STRING, bytes BIGINT, records BIGINT"
FILES_SCHEMA = pa.schema([("path", pa.string()), ("bytes", pa.int64()), ("records", pa.int64())])
TIMESTAMP = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True)
class TableFiles:
    """Writes a task's rows to one file."""

    storage: Storage
    prefix: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The file, if there were rows."""
        from pyarrow import parquet

        path = f"{self.prefix}-{uuid.uuid4().hex}.parquet"
        writer, records, files = None, 0, self.storage.files()
        try:
            for batch in batches:
                if batch.num_rows:
                    rows = pa.Table.from_batches([batch])
                    rows = rows.cast(delta_schema(rows.schema))
                    writer = writer or parquet.ParquetWriter(path, rows.schema, filesystem=files)
                    writer.write_table(rows)
                    records += batch.num_rows
        finally:
            if writer is not None:
                writer.close()
        if writer is not None:
            self.storage.sync(path)
            size = files.get_file_info(path).size
            yield pa.RecordBatch.from_pylist(
                [{"path": path, "bytes": size, "records": records}], FILES_SCHEMA
            )


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as Delta knows them: times in microseconds, UTC."""
    return pa.schema(
        [
            (one.name, TIMESTAMP if pa.types.is_timestamp(one.type) and one.type.tz else one.type)
            for one in schema
        ]
    )


class TableSink:
    """Called with each batch and its number."""

    def __init__(self, uri: str, app: str, options: dict[str, Any]) -> None:
        self._storage = Storage(uri, {name: str(value) for name, value in options.items()})
        self._app = app

    def __call__(self, batch: Any, number: int) -> None:
        """Add the batch, unless the table has it."""
        app = f"{self._app}:{_query_of(batch)}"
        table = self._table(batch)
        if self._has(table, app, number):
            return
        prefix = f"part-{number:05d}-{uuid.uuid4().hex[:8]}"
        rows = batch.mapInArrow(TableFiles(self._storage, prefix), FILES).collect()
        if rows and not self._commit(table, app, number, rows):
            self._storage.delete([row["path"] for row in rows])

    def _table(self, batch: Any) -> Any:
        """The table, made with the first batch's columns if there is none."""
        from deltalake import DeltaTable
        from pyspark.sql.pandas.types import to_arrow_schema

        schema = delta_schema(to_arrow_schema(batch.schema))
        self._storage.make_directory("")
        options = self._storage.options
        if not DeltaTable.is_deltatable(self._storage.uri, options):
            DeltaTable.create(self._storage.uri, schema, mode="ignore", storage_options=options)
        table = DeltaTable(self._storage.uri, storage_options=options)
        known = [field.name for field in table.schema().fields]
        if known != schema.names:
            raise InvalidRequest(
                f"the table {self._storage.uri} has the columns {', '.join(known)}, the rows have "
                f"{', '.join(schema.names)}: give the sink another table, or select these columns"
            )
        return table

    @staticmethod
    def _has(table: Any, app: str, number: int) -> bool:
        last = table.transaction_version(app)
        return last is not None and last >= number

    def _commit(self, table: Any, app: str, number: int, rows: list[Any]) -> bool:
        """Whether this run's commit added the batch, as opposed to another run's."""
        from deltalake import Transaction
        from deltalake.transaction import AddAction

        now = int(time.time() * 1000)
        actions = [
            AddAction(
                path=row["path"],
                size=row["bytes"],
                partition_values={},
                modification_time=now,
                data_change=True,
                stats=json.dumps({"numRecords": row["records"]}),
            )
            for row in rows
        ]
        run, base = new_run(), table.version()
        for _ in range(MAX_ATTEMPTS):
            accepted = commit(table, run, actions, [Transaction(app, number)], retries=0)
            table.update_incremental()
            if accepted or self._has(table, app, number):
                if not accepted and not is_committed(table, run, base):
                    return False
                sync_commits(self._storage, base, table.version())
                return True
        raise Unavailable(
            f"{self._storage.uri}: others commit faster than this batch can be added; run it again"
        )


def _query_of(batch: Any) -> str:
    """The query that the batch belongs to: with another checkpoint it is another one."""
    context = getattr(batch.sparkSession, "sparkContext", None) if hasattr(batch, "_jdf") else None
    if context is None:
        raise ConfigError(
            "sink.table does not work over Spark Connect, which does not tell a sink its query"
        )
    return context.getLocalProperty("sql.streaming.queryId") or "batch"
