"""A Delta table as the sink of a pipeline file: any rows, each batch exactly once.

Executors write Parquet files below the table's directory, as those of an archive
(`penstock.pipeline.lake.data_files`), the driver commits them. The commit
carries an application transaction (Delta's `txn` action): its id is the pipeline's and its query's,
its version the batch's number. So a batch that is run again, after a kill at any step, finds its
number in the table and adds nothing; of two runs at once one adds its files, the other deletes its
own. Files of a run that was killed before its commit are in no commit; `vacuum` removes them.
"""

from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Transaction
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.errors import ConfigError, InvalidRequest, Unavailable
from penstock.pipeline.lake.commits import (
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
from penstock.pipeline.source_columns import TIMESTAMP


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as Delta knows them: times in microseconds, UTC."""

    def kind(given: pa.DataType) -> pa.DataType:
        return TIMESTAMP if pa.types.is_timestamp(given) and given.tz else given

    return pa.schema([(field.name, kind(field.type)) for field in schema])


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
        run = new_run()
        writer = FileWriter(self._storage, ROWS, pa.schema(table.schema()), run)
        files = [DataFile(*row) for row in batch.mapInArrow(writer, FILES_DDL).collect()]
        if files and not self._commit(table, app, number, run, files):
            self._storage.delete([file.path for file in files])

    def _table(self, batch: Any) -> Any:
        """The table, made with the first batch's columns if there is none."""
        schema = delta_schema(to_arrow_schema(batch.schema, timezone="UTC"))
        self._storage.make_directory("")
        options = self._storage.options
        if not DeltaTable.is_deltatable(self._storage.uri, options):
            DeltaTable.create(
                self._storage.uri,
                schema,
                mode="ignore",
                configuration=settings(KEPT_HOURS),
                storage_options=options,
            )
        table = DeltaTable(self._storage.uri, storage_options=options)
        if partitions := table.metadata().partition_columns:
            raise InvalidRequest(
                f"the table {self._storage.uri} is partitioned by {', '.join(partitions)}, and a "
                "pipeline writes no partitions: give the sink a table without"
            )
        columns = [field.name for field in table.schema().fields]
        if columns != schema.names:
            raise InvalidRequest(
                f"the table {self._storage.uri} has the columns {', '.join(columns)}, the rows "
                f"have {', '.join(schema.names)}: give the sink another table, or select these "
                "columns"
            )
        return table

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
