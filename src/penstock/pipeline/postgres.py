"""PostgreSQL from Spark: queries as Arrow, through ADBC (binary COPY underneath, no row becomes a Python object)."""

import atexit
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from penstock.errors import InvalidRequest, Unavailable
from penstock.pipeline.options import Options


class Postgres:
    """How to reach the broker's database. Picklable."""

    def __init__(self, options: Options) -> None:
        url = options.text("database") or os.environ.get("PENSTOCK_DATABASE_URL") or os.environ.get("DATABASE_URL")
        if not url:
            raise InvalidRequest(
                "give the option 'database' (postgresql://...) or set DATABASE_URL: queues are read from PostgreSQL"
            )
        self.url = url
        self.schema = options.text("databaseSchema", default="penstock") or "penstock"

    def connect(self, *, autocommit: bool = False) -> Any:
        from adbc_driver_postgresql import dbapi

        try:
            connection = dbapi.connect(self.url, autocommit=autocommit)
        except dbapi.Error as error:
            raise Unavailable(f"PostgreSQL cannot be reached: {first_line(error)}") from error
        with connection.cursor() as cursor:
            quoted = '"' + self.schema.replace('"', '""') + '"'
            cursor.execute(f"SET search_path TO {quoted}")
        return connection

    @contextmanager
    def _ask(self, query: str, parameters: tuple[Any, ...] = (), *, copy: bool = True) -> Iterator[Any]:
        """A cursor with the query's answer. The connection is kept for the next one if all went well."""
        from adbc_driver_postgresql import dbapi

        idle = _IDLE.setdefault((self.url, self.schema), [])
        while True:
            try:
                connection, kept = idle.pop(), True  # a thread may have been faster: no look before the leap
            except IndexError:
                connection, kept = self.connect(autocommit=True), False
            cursor = connection.cursor()
            if not copy:
                cursor.adbc_statement.set_options(**{"adbc.postgresql.use_copy": "false"})
            try:
                cursor.execute(query, parameters)
                break
            except dbapi.Error as error:
                cursor.close()
                connection.close()
                if not kept:  # else PostgreSQL may have been restarted since it was last used
                    raise Unavailable(f"PostgreSQL refused: {first_line(error)}") from error
        try:
            yield cursor
        except BaseException:
            cursor.close()
            connection.close()
            raise
        cursor.close()
        idle.append(connection)

    def rows(self, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """A small answer, as tuples."""
        with self._ask(query, parameters) as cursor:
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def estimate(self, query: str) -> float:
        """How many rows PostgreSQL expects of a query."""
        with self._ask(f"EXPLAIN (FORMAT JSON) {query}", copy=False) as cursor:
            return float(json.loads(cursor.fetchone()[0])[0]["Plan"]["Plan Rows"])

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """A large answer, batch by batch as it arrives."""
        from adbc_driver_postgresql import dbapi

        try:
            with self._ask(query) as cursor:
                yield from cursor.fetch_record_batch()
        except dbapi.Error as error:
            raise Unavailable(f"PostgreSQL failed while a range was read: {first_line(error)}") from error


_IDLE: dict[tuple[str, str], list[Any]] = {}  # connections of this process; ADBC takes its time to open one


@atexit.register
def _close_idle() -> None:
    while _IDLE:
        for connection in _IDLE.popitem()[1]:
            connection.close()


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
