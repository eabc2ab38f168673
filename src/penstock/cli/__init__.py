"""The `penstock` command: one module per group of commands, put together here with what they
share: options, errors in words, questions, and asking a broker.

A module is imported when its first word is on the command line, so that a command starts without
what the others need. How results are shown is in `tables`.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlencode

import typer
from typer.core import TyperCommand

from penstock import __version__
from penstock.errors import Forbidden, PenstockError, Unauthorized
from penstock.net.broker_caller import BrokerCaller
from penstock.net.http import CannotConnect
from penstock.net.tls import CA_FILE, CLIENT_CERT, CLIENT_KEY

REFUSED, INTERRUPTED, READER_GONE = 1, 130, 141  # exit codes
NO_TOKEN = "Authentication required"  # how the broker's refusal of a request without one begins
WATCH_SECONDS = "2"
F = TypeVar("F", bound=Callable[..., Any])
HELP = {"help_option_names": ["-h", "--help"]}


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
    except OSError as error:
        typer.echo(f"penstock: {error}", err=True)
        raise typer.Exit(REFUSED) from None


class Command(TyperCommand):
    """A command that ends as `errors_explained` says, and whose `--watch` may stand without its
    number, which options of typer cannot.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any("--watch" in param.opts for param in self.params):
            for at in reversed(range(len(args))):
                following = args[at + 1] if at + 1 < len(args) else ""
                if args[at] in ("--watch", "-w") and not following.replace(".", "", 1).isdecimal():
                    args.insert(at + 1, WATCH_SECONDS)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with errors_explained():
            return super().invoke(ctx)


class Commands(typer.Typer):
    """A group of such commands."""

    def __init__(self, help: str, parent: typer.Typer | None = None, **options: Any) -> None:
        """`parent` and `name=`: where it is added."""
        super().__init__(help=help, no_args_is_help=True, context_settings=HELP, **options)
        if parent is not None:
            parent.add_typer(self)

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        return super().command(name, **({"cls": Command} | options))


app = Commands(
    name="penstock",
    help=(
        "A message broker for Python and data teams: "
        "queues on PostgreSQL, topics on disk, pipelines on Spark."
    ),
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Token = Annotated[
    str,
    typer.Option(
        "--token", envvar="PENSTOCK_TOKEN", help="Access token (JWT), if the broker requires one."
    ),
]
Url = Annotated[
    str,
    typer.Option(
        "--url",
        "-u",
        envvar="PENSTOCK_URL",
        help="HTTP address of the broker; of several, separated by commas, the first that answers.",
    ),
]
Json = Annotated[bool, typer.Option("--json", "-J", help="Print JSON instead of text.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Watch = Annotated[
    float | None,
    typer.Option(
        "--watch",
        "-w",
        min=0.1,
        metavar="[SECONDS]",
        help="Repeat every 2 seconds, or at the given interval in seconds, until Ctrl-C.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        envvar="PENSTOCK_CONFIG",
        help="The broker's configuration file (YAML); default: penstock.yaml or config.yaml, if it "
        "exists.",
    ),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", "-d", help="The broker's data directory.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a configuration key; may be repeated."),
]
COMPLETED = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # where shells put the line to be completed
LOCAL_URL = "http://127.0.0.1:6632"
GROUPS = (
    *("serve", "status", "top", "queue", "schedule", "topic", "export", "pipeline", "buffer"),
    "worker",
    *("tasks", "maintenance", "audit", "logs", "token", "config", "database", "backup", "demo"),
)  # words and modules


MODULES = {"restore": "backup"}  # of words that have none of their own
EXTRAS = {"pipeline": "pipeline"}  # what to install for a command, when it is not `server`
# Imported when a command runs, by what an extra brings.
LIBRARIES = (
    *("adbc_driver_postgresql", "cramjam", "crc32c", "jwt", "numpy", "pandas", "pyarrow"),
    *("pyspark", "sqlglot", "yaml"),
)


def resource(*parts: str, **query: Any) -> str:
    """An address below the broker's: parts that hold names are quoted, None is left out."""
    given: Mapping[str, Any] = {key: value for key, value in query.items() if value is not None}
    made = "/".join(quote(part, safe="/" if not at else "") for at, part in enumerate(parts))
    return f"{made}?{urlencode(given)}" if given else made


def broker(url: str, token: str, timeout: float = 30.0) -> BrokerCaller:
    """A caller of the first of the named brokers that answers."""
    addresses = [one.strip() for one in url.split(",") if one.strip()] or [url]
    for address in addresses[:-1]:
        caller = BrokerCaller(address, token=token or None, timeout=timeout)
        try:
            caller.attempt("GET", "/health/live")
            return caller
        except CannotConnect:
            caller.close()
    return BrokerCaller(addresses[-1], token=token or None, timeout=timeout)


def ask(
    url: str, token: str, method: str, target: str, body: Any = None, timeout: float = 30.0
) -> Any:
    """One request, and its decoded answer."""
    with broker(url, token, timeout) as caller:
        return caller.json(method, target, body)


COMPLETED_NAMES = 200  # at most, where there may be thousands


def completer(
    target: str, key: str, *, filtered: bool = False
) -> Callable[[typer.Context, str], list[str]]:
    """Completes names in a shell: those of the broker's answer, of its list under `key`.
    `filtered`: the list is answered in pages, so ask only for names that may be meant.
    """

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        url = ctx.params.get("url") or os.environ.get("PENSTOCK_URL") or LOCAL_URL
        query = {"filter": incomplete, "limit": COMPLETED_NAMES} if filtered else {}
        try:
            answer = ask(
                url, ctx.params.get("token") or "", "GET", resource(target, **query), timeout=1.0
            )
        except PenstockError:
            return []  # a shell's prompt is no place for errors
        rows = answer[key] if key else answer
        names = {row["name"] if isinstance(row, dict) else row for row in rows}
        return sorted(name for name in names if name.startswith(incomplete))

    return complete


def usage(text: str) -> typer.Exit:
    """To be raised: the command was used wrongly."""
    typer.echo(f"penstock: {text}", err=True)
    return typer.Exit(2)


def confirm(question: str, yes: bool) -> None:
    """Go on only when a person says so, or has said `--yes`."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise usage(f"{question} Say --yes: there is nobody to ask.")
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
            "--ca", envvar=CA_FILE, help="Trust broker certificates signed by this CA (PEM)."
        ),
    ] = None,
    client_cert: Annotated[
        Path | None,
        typer.Option(
            envvar=CLIENT_CERT, help="Client certificate, for brokers that require one (PEM)."
        ),
    ] = None,
    client_key: Annotated[
        Path | None, typer.Option(envvar=CLIENT_KEY, help="Private key of --client-cert (PEM).")
    ] = None,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of every command."""
    for name, value in ((CA_FILE, ca), (CLIENT_CERT, client_cert), (CLIENT_KEY, client_key)):
        if value is not None:
            # where everything that connects looks, in other processes too
            os.environ[name] = str(value)


def main() -> None:
    completed = " ".join(map(os.environ.get, COMPLETED, ("", "")))  # by a shell, if it does
    words = (*sys.argv[1:], *completed.split())
    asked = [word for word in words if word in GROUPS or word in MODULES][:1]
    for group in asked or GROUPS:  # the others need not be imported
        try:
            importlib.import_module(f"penstock.cli.{MODULES.get(group, group)}")
        except ModuleNotFoundError as missing:
            if not missing.name or missing.name.startswith("penstock"):
                raise
            _needs_extra(group, missing.name, asked=bool(asked))
    try:
        app()
    except ModuleNotFoundError as missing:
        if not asked or (missing.name or "").partition(".")[0] not in LIBRARIES:
            raise
        _needs_extra(asked[0], str(missing.name), asked=True)


def _needs_extra(group: str, module: str, *, asked: bool) -> None:
    """Say what to install for a command whose libraries are not there; when it was not asked for,
    only in the list of commands.
    """
    line = f"pip install 'penstock[{EXTRAS.get(group, 'server')}]'"
    if asked:
        typer.echo(f"penstock: `penstock {group}` needs {module}, so first: {line}", err=True)
        raise SystemExit(2)

    @app.command(group, help=f"(First: {line})")
    def unavailable() -> None: ...
