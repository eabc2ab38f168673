"""A PostgreSQL table, filled with COPY.

Each record is stored in one column (text, json, jsonb or bytea). With `columns`, its keys are
columns instead, and missing keys get the column's default. With `once`, the same transaction stores
the key of the batch in table penstock_exported: repeating a batch after a lost answer changes
nothing, so each record is stored exactly once. Keys are deleted after a week. A record that the
table refuses (constraint, type) is isolated like any bad record.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import asyncpg

from penstock.config.schema import Seconds, Secret, key
from penstock.errors import ConfigError
from penstock.export.checks import character_problems, limit_problems, url_problems
from penstock.export.context import RouteContext
from penstock.export.destinations import (
    BatchRefused,
    Denied,
    Destination,
    OutgoingBatch,
    RetryLater,
    Target,
    TooBig,
    destination,
)

KEYS_TABLE = "penstock_exported"
KEYS_INTERVAL = "7 days"  # age at which keys are deleted
FORGET_SECONDS = 3600.0  # between two deletions of old keys
# By the class of SQLSTATE. Denied: login, missing database, schema or table, or no privilege.
MEANINGS = {
    **dict.fromkeys(("22", "23", "P0", "44"), BatchRefused),
    **dict.fromkeys(("28", "3D", "3F", "42"), Denied),
    "54": TooBig,
}
MAX_NAME_BYTES = 63  # PostgreSQL truncates longer names
FILE_PARAMETERS = frozenset(
    ("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile", "service", "servicefile")
)


@dataclass(slots=True)
class Rows:
    """Records with the number of their shape, the keys of each shape, and a problem, if any."""

    records: list[tuple[int, str]]
    shapes: list[tuple[str, ...]]
    bad: str | None = None


@destination("postgres")
@dataclass(frozen=True, kw_only=True)
class PostgresTarget(Target):
    needed = ("url", "table")

    url: Secret = key("", "address")
    table: str = key("", "table")
    column: str = key("payload", "column that takes the record")
    columns: bool = key(False, "records are objects whose keys are columns")
    strict: bool = key(
        True,
        "with columns: refuse records with a key that is not a column; false = leave the key out",
    )
    once: bool = key(True, "remember batch keys so that nothing is stored twice")
    timeout: Seconds = key(30.0, "longest wait")
    connections: int = key(4, "most connections")

    def checks(self) -> list[str]:
        unseen = character_problems(table=self.table, column=self.column)
        wrong = [
            f"{word}: a name in PostgreSQL has 1 to {MAX_NAME_BYTES} bytes, not {part[:80]!r}"
            for word, names in (("table", self.table.split(".")), ("column", [self.column]))
            for part in names
            if not 0 < len(part.encode(errors="replace")) <= MAX_NAME_BYTES
        ]
        return [
            *url_problems(self.url, "postgres", "postgresql"),
            *limit_problems(self.timeout, self.connections),
            *(unseen or wrong),
        ]

    def from_api(self, _certificates: Path, *, stored: bool) -> Target:
        files = FILE_PARAMETERS.intersection(dict(parse_qsl(urlsplit(self.url).query)))
        if files and not stored:
            raise ConfigError(
                f"destination.url names files of the broker ({', '.join(sorted(files))}): "
                "a route that needs them belongs in the broker's configuration"
            )
        return self

    def make(self, _context: RouteContext) -> Destination:
        return PostgresDestination(self)


class PostgresDestination(Destination):
    """Connect when sending: the database may be down at the start."""

    def __init__(self, target: PostgresTarget) -> None:
        self._target = target
        schema, _, self._table = target.table.rpartition(".")
        self._schema = schema or None
        self._columns: dict[str, str] = {}  # column types, as last read from the table
        self._pool: Any = None
        self._prepared_tables = False
        self._forgot_at = time.monotonic()
        self._starting = asyncio.Lock()

    async def stop(self) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None

    def prepare(self, batch: OutgoingBatch) -> list[bytes] | Rows:
        return _rows(batch.split()) if self._target.columns else batch.split()

    async def send(self, batch: OutgoingBatch, prepared: Any) -> None:
        try:
            async with asyncio.timeout(self._target.timeout):
                await self._open()
                async with self._pool.acquire() as connection, connection.transaction():
                    if self._target.once and not await self._is_new(connection, batch.key):
                        return
                    if self._target.columns:
                        await self._write_rows(connection, prepared)
                    else:
                        await self._write(connection, prepared)
        except TimeoutError as error:
            raise RetryLater("timeout", f"no answer within {self._target.timeout:g} s") from error
        except asyncpg.PostgresError as error:
            self._prepared_tables = False  # the table may have been recreated
            raise _meaning(error) from error
        except (OSError, asyncpg.InterfaceError) as error:
            raise RetryLater("network", str(error) or type(error).__name__) from error
        except UnicodeDecodeError as error:
            raise BatchRefused(str(error)) from error

    async def _open(self) -> None:
        async with self._starting:
            if self._pool is None:
                self._pool = await asyncpg.create_pool(
                    self._target.url,
                    min_size=0,
                    max_size=self._target.connections,
                    timeout=self._target.timeout,
                )
            if not self._prepared_tables:
                async with self._pool.acquire() as connection:
                    await self._inspect_table(connection)
                self._prepared_tables = True
            if self._target.once and time.monotonic() - self._forgot_at > FORGET_SECONDS:
                self._forgot_at = time.monotonic()
                await self._pool.execute(
                    f"DELETE FROM {KEYS_TABLE} WHERE at < now() - interval '{KEYS_INTERVAL}'"
                )

    async def _inspect_table(self, connection: Any) -> None:
        if self._target.once:
            await connection.execute(
                f"CREATE TABLE IF NOT EXISTS {KEYS_TABLE} (key text PRIMARY KEY, "
                "at timestamptz NOT NULL DEFAULT now())"
            )
        await self._read_columns(connection)
        if not self._target.columns and self._target.column not in self._columns:
            raise Denied(f"table {self._quoted} has no column {self._target.column}", "address")

    async def _read_columns(self, connection: Any) -> None:
        rows = await connection.fetch(
            "SELECT attname, format_type(atttypid, NULL) AS kind FROM pg_attribute "
            "WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped",
            self._quoted,
        )
        self._columns = {row["attname"]: row["kind"] for row in rows}

    @property
    def _quoted(self) -> str:
        return ".".join(_quote(part) for part in (self._schema, self._table) if part)

    async def _is_new(self, connection: Any, key: str) -> bool:
        stored = await connection.fetchval(
            f"INSERT INTO {KEYS_TABLE} (key) VALUES ($1) ON CONFLICT DO NOTHING RETURNING true", key
        )
        return stored is not None

    async def _write_rows(self, connection: Any, rows: Rows) -> None:
        """Run one COPY, then one INSERT per shape, so that missing columns get their defaults."""
        if rows.bad is not None:
            raise BatchRefused(rows.bad)
        if not all(name in self._columns for shape in rows.shapes for name in shape):
            await self._read_columns(connection)  # they may have been added
        columns = [
            [_quote(name) for name in shape if name in self._columns] for shape in rows.shapes
        ]
        for shape, names in zip(rows.shapes, columns, strict=True):
            if not names or (self._target.strict and len(names) < len(shape)):
                missing = ", ".join(name for name in shape if name not in self._columns)
                raise BatchRefused(f"table {self._quoted} has no column {missing}")
        await connection.execute(
            "CREATE TEMP TABLE IF NOT EXISTS penstock_batch (shape int, record jsonb) "
            "ON COMMIT DELETE ROWS"
        )
        await connection.copy_records_to_table(
            "penstock_batch", records=rows.records, columns=["shape", "record"]
        )
        for shape_number, names in enumerate(columns):
            listed = ", ".join(names)
            await connection.execute(
                f"INSERT INTO {self._quoted} ({listed}) SELECT {listed} FROM (SELECT filled.* "
                f"FROM penstock_batch, jsonb_populate_record(NULL::{self._quoted}, record) "
                "AS filled WHERE shape = $1) AS rows",
                shape_number,
            )

    async def _write(self, connection: Any, records: list[bytes]) -> None:
        values: list[Any] = (
            records
            if self._columns.get(self._target.column) == "bytea"
            else [record.decode() for record in records]
        )
        await connection.copy_records_to_table(
            self._table,
            schema_name=self._schema,
            records=[(value,) for value in values],
            columns=[self._target.column],
        )

    def describe(self) -> str:
        parts = urlsplit(self._target.url)
        return f"table {self._quoted} at {parts.netloc.rpartition('@')[2]}{parts.path}"


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _rows(records: list[bytes]) -> Rows:
    rows, shapes = Rows([], []), dict[tuple[str, ...], int]()
    for record in records:
        try:
            value = json.loads(record)
            text = record.decode()
        except ValueError as error:
            rows.bad = str(error)
            break
        if not isinstance(value, dict) or not value:
            rows.bad = "not a JSON object with keys"
            break
        rows.records.append((shapes.setdefault(tuple(sorted(value)), len(shapes)), text))
    rows.shapes = list(shapes)
    return rows


def _meaning(error: asyncpg.PostgresError) -> Exception:
    text = f"{type(error).__name__}: {error}"
    meaning = MEANINGS.get(str(getattr(error, "sqlstate", ""))[:2])
    return RetryLater("server_error", text) if meaning is None else meaning(text)
