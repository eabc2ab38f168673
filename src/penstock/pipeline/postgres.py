"""PostgreSQL from Spark: queries as Arrow, through ADBC (binary COPY underneath, no row becomes a Python object)."""

import atexit
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from penstock.errors import InvalidRequest, NotFound, Unavailable
from penstock.pipeline.options import Options


class Postgres:
    """How to reach the broker's database. Picklable.

    Without the option `database` it is that of the broker on this machine, by the configuration found here: the
    environment, penstock.yaml, or what runs in ./penstock-data.
    """

    def __init__(self, options: Options) -> None:
        self.schema = options.text("databaseSchema") or "penstock"
        self.url = options.text("database") or ""
        if self.url:
            return
        from penstock.config.database_url import database_here  # executors are given a URL and need no configuration

        try:
            self.url, schema = database_here()
        except NotFound as error:
            raise InvalidRequest(
                f"queues are read from PostgreSQL, and its address is not known: {error}. Or give the option "
                "'database', or set DATABASE_URL: `penstock database url`, on the broker's machine, prints it"
            ) from error
        self.schema = options.text("databaseSchema") or schema

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
