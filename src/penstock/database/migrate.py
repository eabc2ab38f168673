"""Brings the schema to this release, beside brokers of other releases that work on it.

Tables are state, shared by all releases: numbered migrations, applied once each, never changed and
only ever additive. Functions are code: those of a release live in a schema of their own, named
after a digest of their text (`penstock_fn_1f0c...`), which comes before that of the tables in the
`search_path` of its sessions. So a broker never changes a function under another one, and two
brokers with the same functions share them. `function_schemas` says when a broker of each was last
seen; `drop_unused_functions` drops those that nobody has used for long.

Everything happens in one transaction under an advisory lock, so that several brokers can start at
once and a failed migration leaves nothing behind.
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
UNUSED_DAYS = 7  # after which functions are dropped
MAX_PREFIX_BYTES = 46  # of the 63 that PostgreSQL gives a name


@dataclass(frozen=True, slots=True)
class SchemaFiles:
    """The SQL of the package that owns the tables: pairs of file name and text, in order."""

    migrations: tuple[tuple[str, str], ...]
    functions: tuple[tuple[str, str], ...]
    identity: str  # reads the number that identifies a database

    @classmethod
    def read(cls, package: str, identity: str) -> Self:
        """From the directories `migrations` and `functions` of a package."""
        return cls(sql_files(package, "migrations"), sql_files(package, "functions"), identity)

    def function_schema(self, schema: str) -> str:
        """Where the functions of this release are, for tables in `schema`."""
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
    """Create or update everything in `schema` through an asyncpg `connection`; the identity."""
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
            "brought the schema up to date: %d migrations; the functions are in %s",
            count,
            functions,
        )
    return identity


SEEN = """INSERT INTO function_schemas (name) VALUES ($1)
          ON CONFLICT (name) DO UPDATE SET seen_at = now()"""


async def drop_unused_functions(connection: Any, schema: str, sql: SchemaFiles) -> list[str]:
    """Say that a broker with our functions lives, and drop those of releases not seen for long."""
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
    """A broker of a release before the schema's may go on with the functions it has there."""
    own = {name for name, _ in sql.migrations}
    newer = [name for name in sorted(applied) if name.startswith("migrations/") and name not in own]
    if not newer:
        return
    names = ", ".join(newer)
    if not installed:
        raise ConfigError(
            f"the database was migrated by a newer release of Penstock ({names}), and this release "
            "has no functions in it. Nothing was changed. Start the newer release, or restore a "
            "backup from before it"
        )
    log.warning(
        "the database was migrated by a newer release of Penstock (%s). This broker changes "
        "nothing and works on with the functions of its own release; upgrade it soon",
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
