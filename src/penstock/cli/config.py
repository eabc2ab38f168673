"""`penstock config`: what is in effect, and whether a file is right."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.cli import app
from penstock.config import load, show
from penstock.config.load import default_file
from penstock.errors import ConfigError

commands = typer.Typer(help="Show or check the configuration.", no_args_is_help=True)
app.add_typer(commands, name="config")

File = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file.")]


@commands.command("show")
def show_command(
    config: File = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only what differs from the defaults.")
    ] = False,
) -> None:
    """Print the effective configuration and where each value came from; secrets are masked.

    Example: `penstock config show -c penstock.yaml --changed`
    """
    try:
        loaded = load(config or default_file())
    except ConfigError as error:
        _refuse(error)
    console = Console(soft_wrap=True)
    rows = [row for row in show(loaded) if not changed or row[2] != "default"]
    if console.is_terminal:
        table = Table("key", "value", "from", box=None, header_style="bold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        for name, value, origin in rows:
            print(f"{name}\t{value}\t{origin}")
    for warning in loaded.warnings:
        typer.echo(f"warning: {warning}", err=True)


@commands.command("check")
def check_command(file: Annotated[Path, typer.Argument(help="YAML file to check.")]) -> None:
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
