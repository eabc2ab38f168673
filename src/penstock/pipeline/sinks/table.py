"""The table sink of a pipeline file: write each batch to a Delta table exactly once.

Executors write Parquet files (`penstock.pipeline.lake.data_files`), and the driver commits them.
With `mode: upsert` the driver merges the batch by key: a row replaces or deletes the row that has
the same key.

Each commit carries an application transaction (Delta's `txn` action). Its id names the pipeline and
the query, its version is the batch number. A batch that runs again finds its number in the table
and adds nothing. If two runs write the same batch at once, one commits and the other deletes its
files. The upkeep removes files that were never committed and merges small files.
"""

from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
from deltalake.exceptions import CommitFailedError
from pyspark.sql import Window
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.errors import ConfigError, InvalidRequest, Unavailable
from penstock.pipeline.lake.commits import (
    CLEANUP_INTERVAL,
    KEPT_HOURS,
    MAX_ATTEMPTS,
    commit,
    is_committed,
    new_run,
    settings,
    sync_commits,
)
from penstock.pipeline.lake.data_files import FILES_DDL, ROWS, DataFile, FileWriter
from penstock.pipeline.lake.storage import Storage
from penstock.pipeline.options import texts
from penstock.pipeline.pipeline_file import PipelineSink
from penstock.pipeline.source_columns import TIMESTAMP

COMPACT_INTERVAL = 20  # commits between merges of small files
DELETED = "_penstock_deleted"  # column of a batch: true for rows that delete their key
NO_KEY = "a row has no {}: every row of an upsert needs a key"
SAME_KEY = (
    "two rows of one batch have the same {}: set sink.orderBy to the columns that order them, so "
    "that the last one is kept"
)
PARTITION_TYPES = ("string", "int64", "int32", "int16", "int8", "date32[day]", "bool")


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """Convert a schema to Delta's types: times are in microseconds, UTC."""

    def kind(given: pa.DataType) -> pa.DataType:
        return TIMESTAMP if pa.types.is_timestamp(given) and given.tz else given

    return pa.schema([(field.name, kind(field.type)) for field in schema])


class TableSink:
    """Writes batches to the table. Call it with each batch and its number."""

    def __init__(self, sink: PipelineSink, app: str) -> None:
        self._sink = sink
        self._storage = Storage(sink.table or "", texts(sink.options))
        self._app = app

    def __call__(self, batch: Any, number: int) -> None:
        """Add or merge the batch, unless the table already has it."""
        app = f"{self._app}:{query_of(batch)}"
        rows = latest_by_key(batch, self._sink) if self._sink.key else batch
        schema = delta_schema(to_arrow_schema(rows.schema, timezone="UTC"))
        table = self._table(pa.schema([one for one in schema if one.name != DELETED]))
        if self._has(table, app, number):
            batch.count()  # steps with state store it when their rows are read
            return
        if self._sink.key:
            self._merge(table, app, number, rows)
        else:
            self._append(table, app, number, batch)
        self._upkeep(table)

    def _append(self, table: Any, app: str, number: int, batch: Any) -> None:
        run = new_run()
        partitions = tuple(table.metadata().partition_columns)
        schema = pa.schema(table.schema())
        writer = FileWriter(self._storage, ROWS, schema, run, partition_by=partitions)
        files = [DataFile(*row) for row in batch.mapInArrow(writer, FILES_DDL).collect()]
        if files and not self._commit(table, app, number, run, files):
            self._storage.delete([file.path for file in files])

    def _table(self, schema: pa.Schema) -> Any:
        """Open the table, or create it with these columns. Add columns that it lacks."""
        self._storage.make_directory("")
        uri, options, wanted = self._storage.uri, self._storage.options, self._sink.partitionBy
        if not DeltaTable.is_deltatable(uri, options):
            for name in wanted:
                if str(schema.field(name).type) not in PARTITION_TYPES:
                    raise InvalidRequest(
                        f"sink.partitionBy: {name} is {schema.field(name).type}; a partition "
                        "column is a string, a whole number, a date or a boolean"
                    )
            DeltaTable.create(
                uri,
                schema,
                mode="ignore",
                partition_by=wanted or None,
                configuration=settings(KEPT_HOURS),
                storage_options=options,
            )
        table = DeltaTable(uri, storage_options=options)
        partitions = table.metadata().partition_columns
        if partitions != wanted:
            raise InvalidRequest(
                f"the table {uri} is partitioned by {', '.join(partitions) or 'nothing'}, the sink "
                f"by {', '.join(wanted) or 'nothing'}: set partitionBy to the table's, or give the "
                "sink another table"
            )
        self._add_columns(table, schema)
        return table

    def _add_columns(self, table: Any, schema: pa.Schema) -> None:
        """Add new columns to the table. A column of another type is an error."""
        known = {one.name.lower(): one for one in table.schema().fields}
        added: list[Field] = []
        for one in Schema.from_arrow(schema).fields:
            before = known.get(one.name.lower())
            if before is None:
                added.append(one)
            elif (before.name, before.type) != (one.name, one.type):
                raise InvalidRequest(
                    f"the table {self._storage.uri} has the column {before.name} "
                    f"{before.type}, the rows have {one.name} {one.type}: cast it in a step, "
                    "write it under another name, or use another table"
                )
        if added:
            base = table.version()
            try:
                table.alter.add_columns(added)
            except CommitFailedError:  # another writer may have added them
                table.update_incremental()
                self._add_columns(table, schema)
                return
            table.update_incremental()
            sync_commits(self._storage, base, table)

    def _merge(self, table: Any, app: str, number: int, batch: Any) -> None:
        rows = batch.toArrow()
        key, names = self._sink.key, [name for name in rows.column_names if name != DELETED]
        rows = rows.cast(delta_schema(rows.schema))
        if any(rows.column(name).null_count for name in key):
            raise InvalidRequest(NO_KEY.format(", ".join(key)))
        if rows.group_by(key).aggregate([([], "count_all")]).num_rows < rows.num_rows:
            raise InvalidRequest(SAME_KEY.format(", ".join(key)))
        columns = {f"`{name}`": f"s.`{name}`" for name in names}
        same = " AND ".join(f"t.`{name}` = s.`{name}`" for name in key)
        for _ in range(MAX_ATTEMPTS):
            base, before = table.version(), set(table.file_uris())
            properties = CommitProperties(
                app_transactions=[Transaction(app, number)], max_commit_retries=0
            )
            merger = table.merge(
                rows, same, source_alias="s", target_alias="t", commit_properties=properties
            )
            merger = merger.when_matched_delete(f"s.{DELETED}").when_matched_update(columns)
            merger = merger.when_not_matched_insert(columns, predicate=f"NOT s.{DELETED}")
            try:
                merger.execute()
            except CommitFailedError:  # another commit was faster, or was this one
                pass
            table.update_incremental()
            if self._has(table, app, number):
                for uri in set(table.file_uris()) - before:
                    self._storage.sync(uri.removeprefix(self._storage.uri).lstrip("/"))
                sync_commits(self._storage, base, table)
                return
        raise self._busy()

    @staticmethod
    def _has(table: Any, app: str, number: int) -> bool:
        last = table.transaction_version(app)
        return last is not None and last >= number

    def _commit(self, table: Any, app: str, number: int, run: str, files: list[DataFile]) -> bool:
        """Commit the files. Return False if another run has added the batch."""
        actions, base = [file.add_action(ROWS) for file in files], table.version()
        for _ in range(MAX_ATTEMPTS):
            accepted = commit(table, run, actions, [Transaction(app, number)], retries=0)
            table.update_incremental()
            if accepted or self._has(table, app, number):
                if not accepted and not is_committed(table, run, base):
                    return False
                sync_commits(self._storage, base, table)
                return True
        raise self._busy()

    def _busy(self) -> Unavailable:
        return Unavailable(
            f"{self._storage.uri}: other writers commit too often to add this batch; run it again"
        )

    def _upkeep(self, table: Any) -> None:
        """Merge small files and remove unused ones, every few commits."""
        version = table.version()
        if version % COMPACT_INTERVAL == 0:
            try:
                table.optimize.compact()
            except CommitFailedError:
                return  # another commit was faster: the next upkeep finds the same files
        if version % CLEANUP_INTERVAL == 0:
            table.vacuum(KEPT_HOURS, dry_run=False, full=True)


def latest_by_key(batch: Any, sink: PipelineSink) -> Any:
    """Return the last row of each key by `orderBy`, and whether it deletes the key. Columns that
    begin with an underscore serve only `orderBy` and `delete`, and are dropped."""
    deleted = f.coalesce(f.expr(sink.delete), f.lit(False)) if sink.delete else f.lit(False)
    rows = batch.withColumn(DELETED, deleted)
    if sink.orderBy:
        order = [f.col(f"`{name}`").desc() for name in sink.orderBy]
        window = Window.partitionBy(*(f.col(f"`{name}`") for name in sink.key)).orderBy(*order)
        rows = rows.withColumn("_rank", f.row_number().over(window)).where("_rank = 1")
    kept = [name for name in batch.columns if not name.startswith("_") or name in sink.key]
    return rows.select(*(f.col(f"`{name}`") for name in kept), DELETED)


def query_of(batch: Any) -> str:
    """Return the id of the batch's query. A new checkpoint gives the query a new id."""
    context = getattr(batch.sparkSession, "sparkContext", None) if hasattr(batch, "_jdf") else None
    if context is None:
        raise ConfigError(
            "table sinks do not work over Spark Connect: it does not give a sink its query's id"
        )
    return context.getLocalProperty("sql.streaming.queryId") or "batch"
