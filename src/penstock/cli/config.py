"""`penstock config`: what is in effect, and whether a file is right."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import Commands, ConfigFile, app, argument, option
from penstock.cli.tables import Column, View, table
from penstock.config import load
from penstock.config import show as effective
from penstock.config.load import default_file
from penstock.errors import ConfigError

commands = Commands("Show or check the configuration.", app, name="config")


@commands.command("show")
def show_command(
    config: ConfigFile = None,
    changed: Annotated[bool, option("Show only values that differ from the defaults.")] = False,
) -> View:
    """Print the effective configuration and where each value came from; secrets are masked.

    Example: `penstock config show -c penstock.yaml --changed`
    """
    try:
        loaded = load(config or default_file())
    except ConfigError as error:
        _refuse(error)
    rows = [
        {"key": key, "value": value, "from": origin}
        for key, value, origin in effective(loaded)
        if not changed or origin != "default"
    ]
    for warning in loaded.warnings:
        typer.echo(f"warning: {warning}", err=True)
    columns = (Column("key"), Column("value", prose=True), Column("from"))
    return table(rows, *columns, empty="all is as by default")


@commands.command("check")
def check_command(file: Annotated[Path, argument("YAML file to check.")]) -> None:
    """Check a configuration file without starting anything.

    Example: `penstock config check penstock.yaml`
    """
    from penstock.export.spec import parse_routes

    try:
        parse_routes(load(file, environ={}).config)
    except ConfigError as error:
        _refuse(error)
    typer.echo(f"{file} is fine")


def _refuse(error: ConfigError) -> None:
    typer.echo(str(error), err=True)
    raise typer.Exit(2) from None
