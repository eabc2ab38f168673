"""A Delta table as the sink of a pipeline file: any rows, each batch exactly once.

Executors write Parquet files below the table's directory, as those of an archive
(`penstock.pipeline.lake.data_files`), and the driver commits them. With `mode: upsert` the driver
merges the batch by its key instead: a row replaces the one with its key, or deletes it.

Either commit carries an application transaction (Delta's `txn` action): its id is the pipeline's
and its query's, its version the batch's number. So a batch that is run again, after a kill at any
step, finds its number in the table and adds nothing; of two runs at once one adds its files, the
other deletes its own. Files of a run that was killed before its commit are in no commit; the sink's
upkeep removes them, and merges small files.
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
DELETED = "_penstock_deleted"  # the column of a batch that says which rows delete their key
NO_KEY = "a row has no {}: every row of an upsert needs its key"
SAME_KEY = (
    "two rows of one batch have the same {}: let sink.orderBy name the columns that say which of "
    "them is the last"
)
PARTITION_TYPES = ("string", "int64", "int32", "int16", "int8", "date32[day]", "bool")


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as Delta knows them: times in microseconds, UTC."""

    def kind(given: pa.DataType) -> pa.DataType:
        return TIMESTAMP if pa.types.is_timestamp(given) and given.tz else given

    return pa.schema([(field.name, kind(field.type)) for field in schema])


class TableSink:
    """Called with each batch and its number."""

    def __init__(self, sink: PipelineSink, app: str) -> None:
        self._sink = sink
        self._storage = Storage(sink.table or "", texts(sink.options))
        self._app = app

    def __call__(self, batch: Any, number: int) -> None:
        """Add or merge the batch, unless the table has it."""
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
        """The table, made with the first batch's columns if there is none; new columns are added
        to it."""
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
        """Take the rows' new columns into the table; refuse those of another type."""
        known = {one.name.lower(): one for one in table.schema().fields}
        added: list[Field] = []
        for one in Schema.from_arrow(schema).fields:
            before = known.get(one.name.lower())
            if before is None:
                added.append(one)
            elif (before.name, before.type) != (one.name, one.type):
                raise InvalidRequest(
                    f"the table {self._storage.uri} has the column {before.name} "
                    f"{before.type}, the rows have {one.name} {one.type}: cast it in a step, or "
                    "write it under another name, or give the sink another table"
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
        """Whether this run's commit added the batch, as opposed to another run's."""
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
            f"{self._storage.uri}: others commit faster than this batch can be added; run it again"
        )

    def _upkeep(self, table: Any) -> None:
        """Merge small files, and remove those that nothing has any more, once in a while. A commit
        that meets another one is given up: the next time finds the same files."""
        version = table.version()
        if version % COMPACT_INTERVAL == 0:
            try:
                table.optimize.compact()
            except CommitFailedError:
                return
        if version % CLEANUP_INTERVAL == 0:
            table.vacuum(KEPT_HOURS, dry_run=False, full=True)


def latest_by_key(batch: Any, sink: PipelineSink) -> Any:
    """Of each key the last row by `orderBy`, and whether it deletes its key. Columns that begin
    with an underscore are for `orderBy` and `delete`, and end here."""
    deleted = f.coalesce(f.expr(sink.delete), f.lit(False)) if sink.delete else f.lit(False)
    rows = batch.withColumn(DELETED, deleted)
    if sink.orderBy:
        order = [f.col(f"`{name}`").desc() for name in sink.orderBy]
        window = Window.partitionBy(*(f.col(f"`{name}`") for name in sink.key)).orderBy(*order)
        rows = rows.withColumn("_rank", f.row_number().over(window)).where("_rank = 1")
    kept = [name for name in batch.columns if not name.startswith("_") or name in sink.key]
    return rows.select(*(f.col(f"`{name}`") for name in kept), DELETED)


def query_of(batch: Any) -> str:
    """The query that the batch belongs to: with another checkpoint it is another one."""
    context = getattr(batch.sparkSession, "sparkContext", None) if hasattr(batch, "_jdf") else None
    if context is None:
        raise ConfigError(
            "sinks for tables do not work over Spark Connect, which does not tell a sink its query"
        )
    return context.getLocalProperty("sql.streaming.queryId") or "batch"
