"""The `penstock` command: one module per group of commands, put together here."""

import importlib
import sys
from typing import Annotated

import typer

from penstock import __version__

app = typer.Typer(
    name="penstock",
    help="A message broker for Python and data teams: queues on PostgreSQL, topics on disk, pipelines on Spark.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Token = Annotated[
    str, typer.Option("--token", envvar="PENSTOCK_TOKEN", help="Bearer token (JWT), when the broker asks for one.")
]
GROUPS = ("serve", "config", "queue", "topic", "buffer", "export", "pipeline")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    asked = sys.argv[1:2]
    for group in asked if asked and asked[0] in GROUPS else GROUPS:  # the others need not be imported
        importlib.import_module(f"penstock.cli.{group}")
    app()
