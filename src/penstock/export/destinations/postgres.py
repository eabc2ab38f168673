"""A PostgreSQL table, filled with COPY.

    type: postgres
    url: postgres://user:password@host/database
    table: events                 or schema.events
    column: payload               each record goes whole into this column (text, json, jsonb or bytea)
    columns: true                 instead: records are JSON objects whose keys are columns; what a record does not
                                  name gets the column's default
    strict: true                  a record with a key that is no column is bad (default); false = the key is left out
    once: true                    remember batch keys in table penstock_exported, in the same transaction (default)
    timeout: 30s

With `once` a batch that is sent again after a lost answer changes nothing: each record is in the
table exactly once. Keys older than a week are forgotten. A record the table refuses (constraint,
type) is isolated like any bad record.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from penstock.export.destinations import CHEAP, Batch, Denied, Refused, Retry, TooBig, cheap_to_open
from penstock.export.payload import FRAMES

KEYS = "penstock_exported"
FORGET_AFTER = "7 days"
FORGET_EVERY = 3600.0
DENIED = (
    "28",
    "3D",
    "3F",
    "42",
)  # login, no such database or schema, no such table or no right to it
BAD_DATA = ("22", "23", "P0", "44")
TOO_BIG = ("54",)


@dataclass(slots=True)
class Rows:
    """A batch of objects: its records with the number of their shape, the keys of each shape, and
    what is wrong.
    """

    records: list[tuple[int, str]]
    shapes: list[tuple[str, ...]]
    bad: str | None = None


class PostgresDestination:
    encoding = FRAMES
    compression: int | None = None

    def __init__(
        self,
        url: str,
        table: str,
        *,
        column: str = "payload",
        columns: bool = False,
        strict: bool = True,
        once: bool = True,
        timeout: float = 30.0,
        connections: int = 4,
    ) -> None:
        self._url, self._timeout, self._connections = url, timeout, connections
        schema, _, self._table = table.rpartition(".")
        self._schema = schema or None
        self._column, self._columns, self._strict, self._once = column, columns, strict, once
        self._known: frozenset[str] = frozenset()  # the table's columns
        self._pool: Any = None
        self._kind = ""
        self._prepared_tables = False
        self._forgot_at = time.monotonic()
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Nothing: the database may be down now and up later."""

    async def stop(self) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None

    def is_cheap(self, batch: Batch) -> bool:
        return cheap_to_open(batch) and not (self._columns and len(batch.body) > CHEAP)

    def prepare(self, batch: Batch) -> list[bytes] | Rows:
        return _rows(batch.split()) if self._columns else batch.split()

    async def send(self, batch: Batch, prepared: Any) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._open()
                async with self._pool.acquire() as connection, connection.transaction():
                    if self._once and not await self._is_new(connection, batch.key):
                        return
                    if self._columns:
                        await self._write_rows(connection, prepared)
                    else:
                        await self._write(connection, prepared)
        except TimeoutError as error:
            raise Retry("timeout", f"no answer within {self._timeout:g} s") from error
        except asyncpg.PostgresError as error:
            self._prepared_tables = False  # it may have been made anew, with other columns
            raise _meaning(error) from error
        except (OSError, asyncpg.InterfaceError) as error:
            raise Retry("network", str(error) or type(error).__name__) from error
        except UnicodeDecodeError as error:
            raise Refused(str(error)) from error

    async def _open(self) -> None:
        async with self._starting:
            if self._pool is None:
                self._pool = await asyncpg.create_pool(
                    self._url, min_size=0, max_size=self._connections, timeout=self._timeout
                )
            if not self._prepared_tables:
                async with self._pool.acquire() as connection:
                    await self._look_at_table(connection)
                self._prepared_tables = True
            if self._once and time.monotonic() - self._forgot_at > FORGET_EVERY:
                self._forgot_at = time.monotonic()
                await self._pool.execute(
                    f"DELETE FROM {KEYS} WHERE at < now() - interval '{FORGET_AFTER}'"
                )

    async def _look_at_table(self, connection: Any) -> None:
        if self._once:
            await connection.execute(
                f"CREATE TABLE IF NOT EXISTS {KEYS} (key text PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())"
            )
        kinds = await self._columns_of(connection)
        if not self._columns:
            if self._column not in kinds:
                raise Denied(f"table {self._quoted} has no column {self._column}", "address")
            self._kind = kinds[self._column]

    async def _columns_of(self, connection: Any) -> dict[str, str]:
        rows = await connection.fetch(
            "SELECT attname, format_type(atttypid, NULL) AS kind FROM pg_attribute "
            "WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped",
            self._quoted,
        )
        kinds = {row["attname"]: row["kind"] for row in rows}
        self._known = frozenset(kinds)
        return kinds

    @property
    def _quoted(self) -> str:
        return ".".join(_quote(part) for part in (self._schema, self._table) if part)

    async def _is_new(self, connection: Any, key: str) -> bool:
        found = await connection.fetchval(
            f"INSERT INTO {KEYS} (key) VALUES ($1) ON CONFLICT DO NOTHING RETURNING true", key
        )
        return found is not None

    async def _write_rows(self, connection: Any, rows: Rows) -> None:
        """One COPY, then one INSERT for each shape: a column no record of a shape names gets its
        default.
        """
        if rows.bad is not None:
            raise Refused(rows.bad)
        if not all(map(self._known.issuperset, rows.shapes)):
            await self._columns_of(connection)  # perhaps it has them by now
        columns = [[_quote(name) for name in shape if name in self._known] for shape in rows.shapes]
        for shape, found in zip(rows.shapes, columns, strict=True):
            if not found or (self._strict and len(found) < len(shape)):
                missing = ", ".join(name for name in shape if name not in self._known)
                raise Refused(f"table {self._quoted} has no column {missing}")
        await connection.execute(
            "CREATE TEMP TABLE IF NOT EXISTS penstock_batch (shape int, record jsonb) ON COMMIT DELETE ROWS"
        )
        await connection.copy_records_to_table(
            "penstock_batch", records=rows.records, columns=["shape", "record"]
        )
        for shape_number, found in enumerate(columns):
            names = ", ".join(found)
            await connection.execute(
                f"INSERT INTO {self._quoted} ({names}) SELECT {names} FROM (SELECT filled.* FROM penstock_batch, "
                f"jsonb_populate_record(NULL::{self._quoted}, record) AS filled WHERE shape = $1) AS rows",
                shape_number,
            )

    async def _write(self, connection: Any, records: list[bytes]) -> None:
        values: list[Any] = (
            records if self._kind == "bytea" else [record.decode() for record in records]
        )
        await connection.copy_records_to_table(
            self._table,
            schema_name=self._schema,
            records=[(value,) for value in values],
            columns=[self._column],
        )

    def describe(self) -> str:
        parts = urlsplit(self._url)
        return f"table {self._quoted} at {parts.netloc.rpartition('@')[2]}{parts.path}"


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _rows(records: list[bytes]) -> Rows:
    rows, shapes = Rows([], []), dict[tuple[str, ...], int]()
    for record in records:
        try:
            found = json.loads(record)
            text = record.decode()
        except ValueError as error:
            rows.bad = str(error)
            break
        if not isinstance(found, dict) or not found:
            rows.bad = "not a JSON object with keys"
            break
        rows.records.append((shapes.setdefault(tuple(sorted(found)), len(shapes)), text))
    rows.shapes = list(shapes)
    return rows


def _meaning(error: asyncpg.PostgresError) -> Exception:
    state = str(getattr(error, "sqlstate", "") or "")
    text = f"{type(error).__name__}: {error}"
    if state[:2] in BAD_DATA:
        return Refused(text)
    if state[:2] in TOO_BIG:
        return TooBig(text)
    if state[:2] in DENIED:
        return Denied(text)
    return Retry("server_error", text)
