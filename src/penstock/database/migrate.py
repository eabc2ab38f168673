"""Brings the schema to this version: numbered migrations once, then the functions whose text
changed.

Everything happens in one transaction under an advisory lock, so that several brokers can start at
once and a failed migration leaves nothing behind. Functions and views are code, not state: their
files (`queues/sql/*.sql`) are applied again whenever their content differs from what was applied
last, in the order of their names.
"""

import hashlib
import logging
from importlib.resources import files
from typing import Any

from penstock.errors import ConfigError

log = logging.getLogger("penstock.database")

LOCK = 0x70656E73746F636B  # "penstock"
OLDEST_SERVER = 140000


async def migrate(connection: Any, schema: str) -> None:
    """Create or update everything in `schema` through an asyncpg `connection`."""
    version = connection.get_server_version()
    if version.major * 10000 < OLDEST_SERVER:
        raise ConfigError(f"PostgreSQL {version.major} is too old: Penstock needs 14 or later")
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
        await connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        await connection.execute(f'SET LOCAL search_path TO "{schema}"')
        await connection.execute(
            """CREATE TABLE IF NOT EXISTS schema_files (
                 name text PRIMARY KEY, digest text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"""
        )
        applied = dict(await connection.fetch("SELECT name, digest FROM schema_files"))
        migrations = await _apply_migrations(connection, applied)
        functions = await _apply_functions(connection, applied)
    if migrations or functions:
        log.info(
            "brought the schema up to date: %d migrations, %d functions", migrations, functions
        )


async def _apply_migrations(connection: Any, applied: dict[str, str]) -> int:
    count = 0
    for name, text in _sql_files("penstock.database", "migrations"):
        if name not in applied:
            await _apply(connection, name, text)
            count += 1
        elif applied[name] != _digest(text):
            raise ConfigError(
                f"migration {name} was changed after it was applied; add a new one instead"
            )
    return count


async def _apply_functions(connection: Any, applied: dict[str, str]) -> int:
    changed = [
        (name, text)
        for name, text in _sql_files("penstock.queues", "sql")
        if applied.get(name) != _digest(text)
    ]
    for name, text in changed:
        await _apply(connection, name, text)
    return len(changed)


async def _apply(connection: Any, name: str, text: str) -> None:
    await connection.execute(text)
    await connection.execute(
        """INSERT INTO schema_files (name, digest) VALUES ($1, $2)
           ON CONFLICT (name) DO UPDATE SET digest = excluded.digest, applied_at = now()""",
        name,
        _digest(text),
    )


def _sql_files(package: str, directory: str) -> list[tuple[str, str]]:
    found = [
        entry
        for entry in files(package).joinpath(directory).iterdir()
        if entry.name.endswith(".sql")
    ]
    return sorted(
        (f"{directory}/{entry.name}", entry.read_text(encoding="utf-8")) for entry in found
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
