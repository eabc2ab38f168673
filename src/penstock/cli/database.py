"""`penstock database`: access to the broker's PostgreSQL for psql, Spark, jobs and the outbox."""

import asyncio
from typing import Annotated

import asyncpg
from cyclopts import Parameter

from penstock.cli import BrokerConfig, command_group
from penstock.config.database_url import url_here
from penstock.errors import Unavailable
from penstock.queues.admin.grants import change_grant

commands = command_group("database")


@commands.command
def url(*, given: BrokerConfig = BrokerConfig()) -> None:
    """Print the URL of the broker's database, for psql, Spark and jobs on the same machine.

    Use the configuration that the broker was started with: the same file, environment and data
    directory. Only the broker's user and root can connect to the embedded database. The URL of your
    own database is printed with its password.

    Examples:

    `psql "$(penstock database url)"`

    `penstock database url --data-dir /var/lib/penstock`
    """
    print(url_here(given.load().config))


@commands.command
def grant(
    role: Annotated[str, Parameter(help="Name of the database role.")],
    /,
    *,
    revoke: bool = False,
    given: BrokerConfig = BrokerConfig(),
) -> None:
    """Allow a database role to use the outbox: push and acknowledge in its own transactions.

    The role may call the functions of the outbox and nothing else. It cannot read messages or
    tables.

    Examples:

    `penstock database grant shop --set database.url=postgresql://penstock@db/shop`

    `penstock database grant shop --revoke`

    :param revoke: Revoke the access instead.
    """
    asyncio.run(_change("revoke" if revoke else "grant", role, given))
    print(f"{role} may {'not use the outbox any more' if revoke else 'use the outbox'}.")


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
