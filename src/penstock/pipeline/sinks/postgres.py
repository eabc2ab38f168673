"""A table in PostgreSQL as the sink of a pipeline file, each batch exactly once.

Tasks copy their rows into a staging table; then one transaction inserts or upserts them into the
target and records the batch in `penstock_batches`, one row for each pipeline and query. So the rows
of a batch are there as a whole or not at all, and a batch that is run again, after a kill at any
step, finds its number and adds nothing. Of two runs at once the second waits for the row of the
first. A staging table of a killed run is dropped by the next one.
"""

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.errors import ConfigError, InvalidRequest
from penstock.pipeline.options import DATABASE_PATIENCE_SECONDS
from penstock.pipeline.pipeline_file import PipelineSink
from penstock.pipeline.sinks.table import DELETED, NO_KEY, SAME_KEY, latest_by_key, query_of
from penstock.pipeline.sources.postgres import Away, Patience, failure

BATCHES = "penstock_batches"
ATTEMPT = "_penstock_attempt"  # the column of a staging table that marks a task's attempt
OPTIONS = ("database", "databaseTimeout")


class PostgresSink:
    """Called with each batch and its number."""

    def __init__(self, sink: PipelineSink, app: str) -> None:
        for name in sink.options:
            if name not in OPTIONS:
                raise ConfigError(
                    f"a postgres sink has no option {name!r}; it has {', '.join(OPTIONS)}"
                )
        self._url = str(sink.options.get("database") or "")
        if not self._url:
            raise ConfigError(
                "a postgres sink needs the option database, such as postgresql://user@host/shop"
            )
        self._patience = float(sink.options.get("databaseTimeout", DATABASE_PATIENCE_SECONDS))
        self._sink, self._app = sink, app
        schema, _, self._table = (sink.postgres or "").rpartition(".")
        self._schema = schema or None

    def __call__(self, batch: Any, number: int) -> None:
        """Write the batch, unless it is there."""
        app = f"{self._app}:{query_of(batch)}"
        rows = latest_by_key(batch, self._sink) if self._sink.key else batch
        nested = [one.name for one in rows.schema.fields if one.dataType.typeName() in NESTED]
        for name in nested:  # as JSON, which is cast to the type of the target's column
            rows = rows.withColumn(name, f.to_json(f.col(f"`{name}`")))
        patience = Patience(self._patience)
        while True:  # safe to repeat as a whole
            try:
                self._write(rows, app, number)
                break
            except Away as error:
                patience.wait(error)
        patience.end()

    def _write(self, rows: Any, app: str, number: int) -> None:
        with closing(PostgresSession(self._url)) as session:
            types = self._column_types(session, rows.columns)
            if session.run("SELECT to_regclass($1) IS NULL", self._place(BATCHES))[0][0]:
                session.run(
                    f"CREATE TABLE IF NOT EXISTS {self._place(BATCHES)} (app text PRIMARY KEY, "
                    "batch bigint NOT NULL, rows bigint NOT NULL, written_at timestamptz NOT NULL)"
                )
            done = session.run(f"SELECT batch FROM {self._place(BATCHES)} WHERE app = $1", app)
            if done and done[0][0] >= number:
                rows.count()  # steps with state store it when their rows are read
                return
            digest = hashlib.sha256(app.encode()).hexdigest()[:16]
            stage = f"penstock_stage_{digest}"
            session.run(f"DROP TABLE IF EXISTS {self._place(stage)}")
            session.commit()
            schema = to_arrow_schema(rows.schema, timezone="UTC")
            empty = schema.append(pa.field(ATTEMPT, pa.int64())).empty_table()
            session.ingest(stage, self._schema, empty, mode="create")
            session.run(f"ALTER TABLE {self._place(stage)} SET UNLOGGED")
            session.commit()
            copied = rows.mapInArrow(
                CopyTask(self._url, stage, self._schema), "attempt BIGINT, rows BIGINT"
            ).collect()
            count = sum(row.rows for row in copied)
            if self._record(session, app, number, count):
                attempts = ", ".join(str(row.attempt) for row in copied) or "0"
                # Spark may have run a task twice: its attempt that did not count is left out.
                session.run(f"DELETE FROM {self._place(stage)} WHERE {ATTEMPT} NOT IN ({attempts})")
                self._move(session, stage, types, count)
            session.run(f"DROP TABLE {self._place(stage)}")
            session.commit()

    def _record(self, session: "PostgresSession", app: str, number: int, rows: int) -> bool:
        """Note the batch as written, in the transaction that writes it; whether it is new."""
        table = self._place(BATCHES)
        return bool(
            session.run(
                f"INSERT INTO {table} VALUES ($1, {number}, {rows}, now()) ON CONFLICT (app) DO "
                "UPDATE SET batch = excluded.batch, rows = excluded.rows, written_at = now() "
                f"WHERE {table}.batch < excluded.batch RETURNING batch",
                app,
            )
        )

    def _move(
        self, session: "PostgresSession", stage: str, types: dict[str, str], count: int
    ) -> None:
        """Insert the staged rows into the target, or upsert and delete them by their key."""
        target, source, key = self._place(self._table), self._place(stage), self._sink.key
        names = ", ".join(map(quoted, types))
        values = ", ".join(f"s.{quoted(name)}::{kind}" for name, kind in types.items())
        insert = f"INSERT INTO {target} AS t ({names}) SELECT {values} FROM {source} s"
        if not key:
            session.run(insert)
            return
        keys = ", ".join(map(quoted, key))
        distinct, missing = session.run(
            f"SELECT count(DISTINCT ({keys})), count(*) FILTER (WHERE "
            f"{' OR '.join(f'{quoted(name)} IS NULL' for name in key)}) FROM {source}"
        )[0]
        if missing:
            raise InvalidRequest(NO_KEY.format(", ".join(key)))
        if distinct < count:
            raise InvalidRequest(SAME_KEY.format(", ".join(key)))
        others = [name for name in types if name not in key]
        changes = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in others)
        action = f"UPDATE SET {changes}" if changes else "NOTHING"
        session.run(f"{insert} WHERE NOT s.{DELETED} ON CONFLICT ({keys}) DO {action}")
        if self._sink.delete:
            same = " AND ".join(f"t.{quoted(n)} = s.{quoted(n)}::{types[n]}" for n in key)
            session.run(f"DELETE FROM {target} t USING {source} s WHERE s.{DELETED} AND {same}")

    def _column_types(self, session: "PostgresSession", columns: list[str]) -> dict[str, str]:
        """Return the types that the target's columns have, of those that are written."""
        target_columns = session.run(
            "SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped",
            self._place(self._table),
        )
        types: dict[str, str] = dict(target_columns)
        written = [name for name in columns if name != DELETED]
        if not types:
            raise InvalidRequest(
                f"table {self._sink.postgres!r} does not exist in the database: create it with the "
                f"columns {', '.join(written)}"
            )
        if missing := [name for name in written if name not in types]:
            raise InvalidRequest(
                f"the table {self._sink.postgres!r} has no column {missing[0]!r}; it has "
                f"{', '.join(types)}: add the column, or leave it out in a step"
            )
        return {name: types[name] for name in written}

    def _place(self, table: str) -> str:
        return f"{quoted(self._schema)}.{quoted(table)}" if self._schema else quoted(table)


NESTED = ("struct", "array", "map", "variant")


def quoted(name: str) -> str:
    """Quote a name for SQL."""
    return '"' + name.replace('"', '""') + '"'


class PostgresSession:
    """A connection whose statements are one transaction until `commit`. Errors are plain."""

    def __init__(self, url: str) -> None:
        from adbc_driver_postgresql import dbapi

        self._errors = dbapi.Error
        with self._plainly("PostgreSQL cannot be reached"):
            self._connection = dbapi.connect(url)

    @contextmanager
    def _plainly(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise failure(what, error) from error

    def run(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        with self._plainly("PostgreSQL refused"), self._connection.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def ingest(self, table: str, schema: str | None, rows: Any, mode: Any) -> None:
        with self._plainly("PostgreSQL refused the rows"), self._connection.cursor() as cursor:
            cursor.adbc_ingest(table, rows, mode=mode, db_schema_name=schema)

    def commit(self) -> None:
        with self._plainly("PostgreSQL did not commit"):
            self._connection.commit()

    def close(self) -> None:
        self._connection.close()


class CopyTask:
    """Copies one task's rows into the staging table, marked with the attempt. Sent to executors."""

    def __init__(self, url: str, stage: str, schema: str | None) -> None:
        self._url, self._stage, self._schema = url, stage, schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        count, attempt = 0, secrets.randbits(62)
        with closing(PostgresSession(self._url)) as session:
            for batch in batches:
                if batch.num_rows:
                    marks = pa.repeat(pa.scalar(attempt, pa.int64()), batch.num_rows)
                    marked = batch.append_column(ATTEMPT, marks)
                    session.ingest(self._stage, self._schema, marked, mode="append")
                    count += batch.num_rows
            session.commit()
        numbers = {"attempt": pa.array([attempt]), "rows": pa.array([count])}
        yield pa.RecordBatch.from_pydict(numbers)
