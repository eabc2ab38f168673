"""`penstock database`: the way into the broker's PostgreSQL for psql, Spark and jobs on the same
machine.
"""

import typer

from penstock.cli import Commands, ConfigFile, DataDir, Settings, app
from penstock.config import load
from penstock.config.database_url import url_here
from penstock.config.load import default_file, parse_settings
from penstock.errors import ConfigError

commands = Commands("The broker's PostgreSQL.", app, name="database")


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
    try:
        flags = {"data_directory": data_dir, **parse_settings(settings or [])}
        url = url_here(load(config or default_file(), flags=flags).config)
    except ConfigError as error:
        typer.echo(f"penstock: the configuration is wrong:\n{error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(url)
