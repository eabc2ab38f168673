"""Read PostgreSQL tables as data frames, with one task per query, and write rows back."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa

from penstock.errors import NotFound
from penstock.pipeline.options import ReachOptions
from penstock.pipeline.source_columns import ddl
from penstock.pipeline.sources.postgres import Postgres, failure

ROWS_PER_STATEMENT = 5000


def database_at(url: str | None) -> Postgres:
    """Return the broker's database at this URL; default: of the broker on this machine."""
    return Postgres(ReachOptions(database=url or ""))


def queue_ids(postgres: Postgres, names: Sequence[str]) -> dict[str, int]:
    """Return the ids of the named queues, or of all. Raises NotFound for a missing one."""
    rows = postgres.rows("SELECT name, id FROM queues WHERE deleted_at IS NULL ORDER BY id")
    ids: dict[str, int] = dict(rows)
    for name in names:
        if name not in ids:
            raise NotFound(f"queue {name!r} does not exist")
    return {name: ids[name] for name in ids if not names or name in names}


def read(spark: Any, postgres: Postgres, queries: list[str], schema: pa.Schema) -> Any:
    """Return the rows of all queries, with their columns cast to the schema."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for query in batch.column(0).to_pylist():
                for rows in postgres.batches(query):
                    columns = zip(rows.columns, schema, strict=True)
                    arrays = [column.cast(field.type) for column, field in columns]
                    yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    wanted = spark.createDataFrame([(query,) for query in queries], "query STRING")
    return wanted.repartition(max(1, len(queries))).mapInArrow(run, ddl(schema))


def write(frame: Any, postgres: Postgres, statement: str) -> int:
    """Run `statement` with the rows as JSON in $1, in batches. Return the number of rows."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from adbc_driver_postgresql import dbapi

        done = 0
        with closing(postgres.connect()) as connection, connection.cursor() as cursor:
            for batch in batches:
                for begin in range(0, batch.num_rows, ROWS_PER_STATEMENT):
                    rows = batch.slice(begin, ROWS_PER_STATEMENT).to_pylist()
                    try:
                        cursor.execute(statement, (json.dumps(rows, default=str),))
                        connection.commit()
                    except dbapi.Error as error:
                        raise failure("PostgreSQL refused", error) from error
                    done += len(rows)
        yield pa.RecordBatch.from_pydict({"done": pa.array([done], pa.int64())})

    return sum(row.done for row in frame.mapInArrow(run, "done BIGINT").collect())
