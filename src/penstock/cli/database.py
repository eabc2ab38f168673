"""`penstock database`: the way into the broker's PostgreSQL for psql, Spark, jobs on the same
machine and applications that use the outbox.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import asyncpg
import typer

from penstock.cli import Commands, ConfigFile, DataDir, Settings, app
from penstock.config import load
from penstock.config.database_url import url_here
from penstock.config.load import Loaded, default_file, parse_settings
from penstock.errors import ConfigError, Unavailable
from penstock.queues.grants import change_grant

commands = Commands("The broker's PostgreSQL.", app, name="database")
Role = Annotated[str, typer.Argument(help="A role of the database.")]


@commands.callback()
def group() -> None:
    """The broker's PostgreSQL."""


@commands.command("url")
def url_command(
    config: ConfigFile = None,
    data_dir: DataDir = None,
    settings: Settings = None,
) -> None:
    """Print the URL of the broker's database, for psql, Spark and jobs on its machine.

    With the configuration the broker was started with: the same file, environment and directory.
    The embedded database is for the broker's user and root only. A URL of yours is printed with its
    password.

        psql "$(penstock database url)"

        penstock database url --data-dir /var/lib/penstock
    """
    typer.echo(_place(config, data_dir, settings)[0])


@commands.command("grant")
def grant_command(
    role: Role, config: ConfigFile = None, data_dir: DataDir = None, settings: Settings = None
) -> None:
    """Let a role of the database use the outbox: push and acknowledge in its own transactions.

    It may call the functions of the outbox and nothing else: it sees no message and no table.

        penstock database grant shop --set database.url=postgresql://penstock@db/shop
    """
    asyncio.run(_change("grant", role, *_place(config, data_dir, settings)))
    typer.echo(f"{role} may use the outbox.")


@commands.command("revoke")
def revoke_command(
    role: Role, config: ConfigFile = None, data_dir: DataDir = None, settings: Settings = None
) -> None:
    """Take back what `penstock database grant` gave.

    penstock database revoke shop
    """
    asyncio.run(_change("revoke", role, *_place(config, data_dir, settings)))
    typer.echo(f"{role} may not use the outbox any more.")


def loaded(config: Path | None, data_dir: Path | None, settings: list[str] | None) -> Loaded:
    """The configuration of the broker on this machine, as the options of a command name it."""
    try:
        flags = {"data_directory": data_dir, **parse_settings(settings or [])}
        return load(config or default_file(), flags=flags)
    except ConfigError as error:
        typer.echo(f"penstock: the configuration is wrong:\n{error}", err=True)
        raise typer.Exit(2) from None


def _place(
    config: Path | None, data_dir: Path | None, settings: list[str] | None
) -> tuple[str, str]:
    """URL and schema of the broker's database."""
    made = loaded(config, data_dir, settings).config
    return url_here(made), made.database.db_schema


async def _change(verb: str, role: str, url: str, schema: str) -> None:
    try:
        connection = await asyncpg.connect(url)
    except (OSError, asyncpg.PostgresError) as error:
        raise Unavailable(f"the database cannot be reached: {error}") from None
    try:
        await change_grant(connection, schema, role, verb)
    finally:
        await connection.close()
