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

commands = Commands(
    "Connect to the broker's PostgreSQL, and grant access to the outbox.", app, name="database"
)
Role = Annotated[str, typer.Argument(help="Name of the database role.")]


@commands.callback()
def group() -> None:
    "Connect to the broker's PostgreSQL, and grant access to the outbox."


@commands.command("url")
def url_command(
    config: ConfigFile = None,
    data_dir: DataDir = None,
    settings: Settings = None,
) -> None:
    """Print the URL of the broker's database, for psql, Spark and jobs on the same machine.

    Use the configuration that the broker was started with: the same file, environment and data
    directory. Only the broker's user and root can connect to the embedded database. The URL of your
    own database is printed with its password.

    Examples:

    `psql "$(penstock database url)"`

    `penstock database url --data-dir /var/lib/penstock`
    """
    typer.echo(_place(config, data_dir, settings)[0])


@commands.command("grant")
def grant_command(
    role: Role, config: ConfigFile = None, data_dir: DataDir = None, settings: Settings = None
) -> None:
    """Allow a database role to use the outbox: push and acknowledge in its own transactions.

    The role may call the functions of the outbox and nothing else. It cannot read messages or
    tables.

        penstock database grant shop --set database.url=postgresql://penstock@db/shop
    """
    asyncio.run(_change("grant", role, *_place(config, data_dir, settings)))
    typer.echo(f"{role} may use the outbox.")


@commands.command("revoke")
def revoke_command(
    role: Role, config: ConfigFile = None, data_dir: DataDir = None, settings: Settings = None
) -> None:
    """Revoke the access that `penstock database grant` gave.

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
