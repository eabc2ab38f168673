"""Migrate the schema to this release, while brokers of other releases may be using it.

Tables are state that all releases share. Migrations are numbered, applied once each, never changed,
and only add things. Functions are code. Those of a release are in a schema of their own, named
after a digest of their text (`penstock_fn_1f0c...`), which precedes the schema of the tables in the
`search_path`. So a broker never changes a function that another one uses, and brokers with the same
functions share them. `function_schemas` has the time at which a broker of each was last seen.
`drop_unused_functions` drops those that were not used for `UNUSED_DAYS`.

All changes are made in one transaction under an advisory lock, so several brokers can start
concurrently, and a failed migration changes nothing.
"""

import hashlib
import logging
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Self

from penstock.errors import ConfigError

log = logging.getLogger("penstock.database")

LOCK_KEY = 0x70656E73746F636B  # "penstock"
OLDEST_SERVER = 14
UNUSED_DAYS = 7  # functions that were not used for so long are dropped
MAX_PREFIX_BYTES = 46  # of the 63 bytes of a name in PostgreSQL


@dataclass(frozen=True, slots=True)
class SchemaFiles:
    """The SQL files of the package that owns the tables: pairs of name and text, in order."""

    migrations: tuple[tuple[str, str], ...]
    functions: tuple[tuple[str, str], ...]
    identity: str  # a query for the number that identifies a database

    @classmethod
    def read(cls, package: str, identity: str) -> Self:
        """Read the directories `migrations` and `functions` of a package."""
        return cls(sql_files(package, "migrations"), sql_files(package, "functions"), identity)

    def function_schema(self, schema: str) -> str:
        """Return the schema of this release's functions, for tables in `schema`."""
        digest = _digest("\0".join([schema, *(text for _, text in self.functions)]))
        prefix = schema.encode()[:MAX_PREFIX_BYTES].decode(errors="ignore")
        return f"{prefix}_fn_{digest[:12]}"

    def search_path(self, schema: str) -> str:
        return f'"{self.function_schema(schema)}", "{schema}"'


def sql_files(package: str, directory: str) -> tuple[tuple[str, str], ...]:
    entries = files(package).joinpath(directory).iterdir()
    return tuple(
        sorted(
            (f"{directory}/{entry.name}", entry.read_text(encoding="utf-8"))
            for entry in entries
            if entry.name.endswith(".sql")
        )
    )


async def migrate(connection: Any, schema: str, sql: SchemaFiles) -> int:
    """Create or update `schema` and return the number that identifies the database."""
    version = connection.get_server_version()
    if version.major < OLDEST_SERVER:
        raise ConfigError(
            f"PostgreSQL {version.major} is too old: Penstock needs {OLDEST_SERVER} or later"
        )
    functions = sql.function_schema(schema)
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK_KEY)
        await connection.execute(
            f"""CREATE SCHEMA IF NOT EXISTS "{schema}";
                SET LOCAL search_path TO "{schema}";
                CREATE TABLE IF NOT EXISTS schema_files (
                  name text PRIMARY KEY, digest text NOT NULL,
                  applied_at timestamptz NOT NULL DEFAULT now());
                CREATE TABLE IF NOT EXISTS function_schemas (
                  name text PRIMARY KEY, made_at timestamptz NOT NULL DEFAULT now(),
                  seen_at timestamptz NOT NULL DEFAULT now())"""
        )
        installed = await connection.fetchval("SELECT to_regnamespace($1)", f'"{functions}"')
        applied = dict(await connection.fetch("SELECT name, digest FROM schema_files"))
        _check_newer(applied, sql, installed=bool(installed))
        count = await _apply_migrations(connection, applied, sql)
        if not installed:
            await connection.execute(f'CREATE SCHEMA "{functions}"')
            await connection.execute(f"SET LOCAL search_path TO {sql.search_path(schema)}")
            for _, text in sql.functions:
                await connection.execute(text)
        await connection.execute(SEEN, functions)
        identity: int = await connection.fetchval(sql.identity)
    if count or not installed:
        log.info(
            "the schema is up to date: %d migrations applied; the functions are in %s",
            count,
            functions,
        )
    return identity


SEEN = """INSERT INTO function_schemas (name) VALUES ($1)
          ON CONFLICT (name) DO UPDATE SET seen_at = now()"""


async def drop_unused_functions(connection: Any, schema: str, sql: SchemaFiles) -> list[str]:
    """Record that our functions are in use, and drop those that were not used for long."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK_KEY)
        await connection.execute(SEEN, sql.function_schema(schema))
        rows = await connection.fetch(
            """DELETE FROM function_schemas WHERE seen_at < now() - make_interval(days => $1)
               RETURNING name""",
            UNUSED_DAYS,
        )
        dropped = [row["name"] for row in rows]
        for name in dropped:
            await connection.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
    if dropped:
        log.info("dropped the functions of releases no longer in use: %s", ", ".join(dropped))
    return dropped


def _check_newer(applied: dict[str, str], sql: SchemaFiles, *, installed: bool) -> None:
    """Refuse a schema of a newer release, unless the functions of our release are in it."""
    own = {name for name, _ in sql.migrations}
    newer = [name for name in sorted(applied) if name.startswith("migrations/") and name not in own]
    if not newer:
        return
    names = ", ".join(newer)
    if not installed:
        raise ConfigError(
            f"the database was migrated by a newer release of Penstock ({names}), and this release "
            "has no functions in it. Nothing was changed. Start the newer release, or restore a "
            "backup that is older than the migration"
        )
    log.warning(
        "the database was migrated by a newer release of Penstock (%s). This broker changes "
        "nothing and continues with the functions of its own release; upgrade it soon",
        names,
    )


async def _apply_migrations(connection: Any, applied: dict[str, str], sql: SchemaFiles) -> int:
    count = 0
    for name, text in sql.migrations:
        if name not in applied:
            await connection.execute(text)
            await connection.execute(
                "INSERT INTO schema_files (name, digest) VALUES ($1, $2)", name, _digest(text)
            )
            count += 1
        elif applied[name] != _digest(text):
            raise ConfigError(
                f"migration {name} was changed after it was applied; add a new one instead"
            )
    return count


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
