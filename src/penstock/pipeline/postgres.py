"""PostgreSQL from Spark: queries as Arrow, through ADBC (binary COPY underneath, no row becomes a Python object)."""

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa

from penstock.errors import InvalidRequest, Unavailable
from penstock.pipeline.options import Options


class Postgres:
    """How to reach the broker's database. Picklable; every call has a connection of its own."""

    def __init__(self, options: Options) -> None:
        url = options.text("database") or os.environ.get("PENSTOCK_DATABASE_URL") or os.environ.get("DATABASE_URL")
        if not url:
            raise InvalidRequest(
                "give the option 'database' (postgresql://...) or set DATABASE_URL: queues are read from PostgreSQL"
            )
        self.url = url
        self.schema = options.text("databaseSchema", default="penstock") or "penstock"

    def connect(self) -> Any:
        from adbc_driver_postgresql import dbapi

        try:
            connection = dbapi.connect(self.url)
        except dbapi.Error as error:
            raise Unavailable(f"PostgreSQL cannot be reached: {first_line(error)}") from error
        with connection.cursor() as cursor:
            quoted = '"' + self.schema.replace('"', '""') + '"'
            cursor.execute(f"SET search_path TO {quoted}")
        return connection

    def rows(self, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """A small answer, as tuples."""
        from adbc_driver_postgresql import dbapi

        with closing(self.connect()) as connection, connection.cursor() as cursor:
            try:
                cursor.execute(query, parameters)
                found = [tuple(row) for row in cursor.fetchall()] if cursor.description else []
                connection.commit()
                return found
            except dbapi.Error as error:
                raise Unavailable(f"PostgreSQL refused: {first_line(error)}") from error

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """A large answer, batch by batch as it arrives."""
        from adbc_driver_postgresql import dbapi

        with closing(self.connect()) as connection, connection.cursor() as cursor:
            try:
                cursor.execute(query)
                yield from cursor.fetch_record_batch()
            except dbapi.Error as error:
                raise Unavailable(f"PostgreSQL failed while a range was read: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
