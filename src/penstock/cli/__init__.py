"""The `penstock` command: one module per group of commands, put together here."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from penstock import __version__
from penstock.errors import Forbidden, PenstockError, Unauthorized
from penstock.net.tls import CA_FILE, CLIENT_CERT, CLIENT_KEY

app = typer.Typer(
    name="penstock",
    help=(
        "A message broker for Python and data teams: "
        "queues on PostgreSQL, topics on disk, pipelines on Spark."
    ),
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Token = Annotated[
    str,
    typer.Option(
        "--token", envvar="PENSTOCK_TOKEN", help="Bearer token (JWT), when the broker asks for one."
    ),
]
Url = Annotated[
    str, typer.Option("--url", envvar="PENSTOCK_URL", help="The broker's HTTP address.")
]
Json = Annotated[bool, typer.Option("--json", "-J", help="JSON instead of text for people.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
LOCAL_URL = "http://127.0.0.1:6632"
REFUSED, INTERRUPTED, READER_GONE = 1, 130, 141  # exit codes
NO_TOKEN = "Authentication required"  # how the broker's refusal of a request without one begins
GROUPS = ("serve", "config", "database", "queue", "topic", "buffer", "export", "pipeline")


def explain(error: Exception) -> str:
    """An error in the words of the command line: a token is an option here, not a header."""
    if isinstance(error, Unauthorized):
        if str(error).startswith(NO_TOKEN):
            return (
                "this broker asks for a token: give one with --token TOKEN, or set PENSTOCK_TOKEN"
            )
        return f"the broker does not accept the token (--token or PENSTOCK_TOKEN): {error}"
    if isinstance(error, Forbidden):
        return f"{error} (--token or PENSTOCK_TOKEN)"
    return str(error)


@contextmanager
def errors_explained() -> Iterator[None]:
    """Every way a command may end: an error in words and its exit code, never a traceback."""
    try:
        yield
        sys.stdout.flush()
    except PenstockError as error:
        typer.echo(f"penstock: {explain(error)}", err=True)
        raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Python would complain again when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(READER_GONE) from None


def confirm(question: str, yes: bool) -> None:
    """Go on only when a person says so, or has said `--yes`."""
    if yes:
        return
    if not sys.stdin.isatty():
        typer.echo(f"penstock: {question} Say --yes: there is nobody to ask.", err=True)
        raise typer.Exit(2)
    typer.confirm(question, abort=True)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    ca: Annotated[
        Path | None,
        typer.Option(
            "--ca", envvar=CA_FILE, help="Believe brokers whose certificates this CA signed (PEM)."
        ),
    ] = None,
    client_cert: Annotated[
        Path | None,
        typer.Option(
            envvar=CLIENT_CERT, help="What to show to a broker that asks for a certificate (PEM)."
        ),
    ] = None,
    client_key: Annotated[
        Path | None, typer.Option(envvar=CLIENT_KEY, help="The key of --client-cert (PEM).")
    ] = None,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Options of every command."""
    for name, value in ((CA_FILE, ca), (CLIENT_CERT, client_cert), (CLIENT_KEY, client_key)):
        if value is not None:
            # where everything that connects looks, in other processes too
            os.environ[name] = str(value)


def main() -> None:
    asked = [word for word in sys.argv[1:] if word in GROUPS][:1]
    for group in asked or GROUPS:  # the others need not be imported
        importlib.import_module(f"penstock.cli.{group}")
    app()
