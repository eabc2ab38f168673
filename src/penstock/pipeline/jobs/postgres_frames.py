"""Tables of PostgreSQL as frames, for jobs: a list of queries, each a task of its own, and rows
written back.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa

from penstock.errors import Unavailable
from penstock.pipeline.sources.postgres import Postgres, first_line

KINDS = {
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP",
    pa.list_(pa.int16()): "ARRAY<SMALLINT>",
    pa.list_(pa.int64()): "ARRAY<BIGINT>",
}
ROWS_PER_STATEMENT = 5000  # rows of one statement


def ddl(schema: pa.Schema) -> str:
    """The schema as Spark reads it."""
    return ", ".join(f"{field.name} {KINDS[field.type]}" for field in schema)


def read(spark: Any, postgres: Postgres, queries: list[str], schema: pa.Schema) -> Any:
    """The rows of all the queries. Their columns come in the order of the schema and may have
    narrower types.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for query in batch.column(0).to_pylist():
                for rows in postgres.batches(query):
                    columns = [
                        column.cast(field.type)
                        for column, field in zip(rows.columns, schema, strict=True)
                    ]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)

    wanted = spark.createDataFrame([(query,) for query in queries], "query STRING")
    return wanted.repartition(max(1, len(queries))).mapInArrow(run, ddl(schema))


def write(frame: Any, postgres: Postgres, statement: str) -> int:
    """Run `statement` over the rows, given to it as JSON in $1 a few thousand at a time; how many
    there were.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from adbc_driver_postgresql import dbapi

        done = 0
        with closing(postgres.connect()) as connection, connection.cursor() as cursor:
            for batch in batches:
                for begin in range(0, batch.num_rows, ROWS_PER_STATEMENT):
                    rows = batch.slice(begin, ROWS_PER_STATEMENT).to_pylist()
                    try:
                        cursor.execute(statement, (json.dumps(rows, default=_text),))
                        connection.commit()
                    except dbapi.Error as error:
                        raise Unavailable(f"PostgreSQL refused: {first_line(error)}") from error
                    done += len(rows)
        yield pa.RecordBatch.from_pydict({"done": pa.array([done], pa.int64())})

    return sum(row.done for row in frame.mapInArrow(run, "done BIGINT").collect())


def _text(value: Any) -> str:
    return str(value.isoformat())
