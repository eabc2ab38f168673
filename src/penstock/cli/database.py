"""`penstock database`: the way into the broker's PostgreSQL for psql, Spark, jobs on the same
machine and applications that use the outbox.
"""

import asyncio
from typing import Annotated

import asyncpg
import typer

from penstock.cli import BrokerConfig, Commands, app, argument
from penstock.config.database_url import url_here
from penstock.errors import Unavailable
from penstock.queues.admin.grants import change_grant

commands = Commands(
    "Connect to the broker's PostgreSQL, and grant access to the outbox.", app, name="database"
)
Role = Annotated[str, argument("Name of the database role.")]


@commands.callback()
def group() -> None:
    "Connect to the broker's PostgreSQL, and grant access to the outbox."


@commands.command("url")
def url_command(given: BrokerConfig) -> None:
    """Print the URL of the broker's database, for psql, Spark and jobs on the same machine.

    Use the configuration that the broker was started with: the same file, environment and data
    directory. Only the broker's user and root can connect to the embedded database. The URL of your
    own database is printed with its password.

    Examples:

    `psql "$(penstock database url)"`

    `penstock database url --data-dir /var/lib/penstock`
    """
    typer.echo(url_here(given.load().config))


@commands.command("grant")
def grant_command(role: Role, given: BrokerConfig) -> None:
    """Allow a database role to use the outbox: push and acknowledge in its own transactions.

    The role may call the functions of the outbox and nothing else. It cannot read messages or
    tables.

        penstock database grant shop --set database.url=postgresql://penstock@db/shop
    """
    asyncio.run(_change("grant", role, given))
    typer.echo(f"{role} may use the outbox.")


@commands.command("revoke")
def revoke_command(role: Role, given: BrokerConfig) -> None:
    """Revoke the access that `penstock database grant` gave.

    penstock database revoke shop
    """
    asyncio.run(_change("revoke", role, given))
    typer.echo(f"{role} may not use the outbox any more.")


async def _change(verb: str, role: str, given: BrokerConfig) -> None:
    config = given.load().config
    try:
        connection = await asyncpg.connect(url_here(config))
    except (OSError, asyncpg.PostgresError) as error:
        raise Unavailable(f"the database cannot be reached: {error}") from None
    try:
        await change_grant(connection, config.database.db_schema, role, verb)
    finally:
        await connection.close()
