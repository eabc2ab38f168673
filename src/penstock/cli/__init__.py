"""The `penstock` command: one module per group of commands, put together here with what they
share: options, errors in words, questions, and asking a broker.

A module is imported when its first word is on the command line, so that a command starts without
what the others need. How results are shown is in `tables`.
"""

import copy
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from penstock import __version__
from penstock.errors import Forbidden, PenstockError, Unauthorized
from penstock.net.addresses import resource
from penstock.net.broker_caller import BrokerCaller
from penstock.net.http import CannotConnect
from penstock.net.tls import CA_FILE, CLIENT_CERT, CLIENT_KEY

if TYPE_CHECKING:
    from penstock.cli.tables import View
    from penstock.config import Loaded

REFUSED, INTERRUPTED, READER_GONE = 1, 130, 141  # exit codes
NO_TOKEN = "Authentication required"  # how the broker's refusal of a request without one begins
WATCH_SECONDS = "2"
PAGE_ROWS = 500  # of a listing, asked for at a time
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
    """A group of such commands.

    A parameter whose type is a dataclass stands for the options that are its fields. A command that
    returns something returns a `View`: it is shown, and has the option --json.
    """

    def __init__(self, help: str, parent: typer.Typer | None = None, **options: Any) -> None:
        """`parent` and `name=`: where it is added."""
        super().__init__(help=help, no_args_is_help=True, context_settings=HELP, **options)
        if parent is not None:
            parent.add_typer(self)

    def command(
        self, name: str | None = None, *, watch: bool = False, **options: Any
    ) -> Callable[[F], F]:
        """`watch`: the view may be shown again and again, with --watch."""
        register = super().command(name, **({"cls": Command} | options))

        def add(function: F) -> F:
            register(_flat(function, watch))
            return function

        return add


def _flat(function: Callable[..., Any], watch: bool) -> Callable[..., None]:
    """A command as typer takes it: each option a parameter of its own, and nothing returned."""
    signature = inspect.signature(function, eval_str=True)
    kinds = {name: one.annotation for name, one in signature.parameters.items()}
    groups: dict[str, Any] = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}
    parameters = {name: one for name, one in signature.parameters.items() if name not in groups}
    shown = signature.return_annotation is not None
    if shown:
        groups = {"display": Display, **groups}
    for kind in groups.values():
        parameters |= inspect.signature(kind).parameters
    if shown and not watch:
        del parameters["watch"]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, kind in groups.items():
            fields = [field for field in inspect.signature(kind).parameters if field in values]
            values[name] = kind(**{field: values.pop(field) for field in fields})
        if shown:
            values.pop("display").show(lambda: function(**values))
        else:
            function(**values)

    given = [_named(one).replace(kind=one.KEYWORD_ONLY) for one in parameters.values()]
    command.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in given}
    return command


def _named(parameter: inspect.Parameter) -> inspect.Parameter:
    """With the parameter's name as the long one of an option that has none."""
    kind, *about = get_args(parameter.annotation) or (None,)
    for one in about:
        names = one.param_decls or () if isinstance(one, OptionInfo) else ("--",)
        if not any(name.startswith("--") for name in names):
            named = copy.copy(one)  # other parameters may have the same
            named.param_decls = (f"--{parameter.name.replace('_', '-')}", *names)
            return parameter.replace(annotation=Annotated[kind, named])
    return parameter


def option(help: str, *names: str, **more: Any) -> Any:
    """For the annotation of an option; its long name is the parameter's, unless one is given."""
    made = typer.Option(help=help, **more)
    made.param_decls = names
    return made


def argument(help: str, **more: Any) -> Any:
    return typer.Argument(help=help, **more)


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
    str, option("Access token (JWT), if the broker requires one.", envvar="PENSTOCK_TOKEN")
]
Url = Annotated[
    str,
    option(
        "HTTP address of the broker; of several, separated by commas, the first that answers.",
        "-u",
        envvar="PENSTOCK_URL",
    ),
]
Json = Annotated[bool, option("Print JSON instead of text.", "--json", "-J")]
Yes = Annotated[bool, option("Do not ask for confirmation.", "-y")]
Watch = Annotated[
    float | None,
    option(
        "Repeat every 2 seconds, or at the given interval in seconds, until Ctrl-C.",
        "-w",
        min=0.1,
        metavar="[SECONDS]",
    ),
]
ConfigFile = Annotated[
    Path | None,
    option(
        "The broker's configuration file (YAML); default: penstock.yaml or config.yaml, if it "
        "exists.",
        "-c",
        envvar="PENSTOCK_CONFIG",
    ),
]
DataDir = Annotated[Path | None, option("The broker's data directory.", "-d")]
Settings = Annotated[
    list[str] | None,
    option("Set a configuration key; may be repeated.", "--set", metavar="KEY=VALUE"),
]
LOCAL_URL = "http://127.0.0.1:6632"


@dataclass(frozen=True, slots=True)
class Display:
    json: Json = False
    watch: Watch = None

    def show(self, look: Callable[[], "View"]) -> None:
        from penstock.cli.tables import show

        view = show(look, self.json, self.watch)
        if view is not None and view.failed:
            raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """The configuration of the broker on this machine."""

    config: ConfigFile = None
    data_dir: DataDir = None
    settings: Settings = None

    def load(self, **flags: Any) -> "Loaded":
        """With what the options say; what is wrong with it ends the command."""
        from penstock.config.load import default_file, load, parse_settings
        from penstock.errors import ConfigError

        try:
            given = {
                "data_directory": self.data_dir,
                **flags,
                **parse_settings(self.settings or []),
            }
            return load(self.config or default_file(), flags=given)
        except ConfigError as error:
            raise usage(f"the configuration is wrong:\n{error}") from None


@dataclass(frozen=True, slots=True)
class Api:
    """The HTTP API of the broker that --url and --token name."""

    url: Url = LOCAL_URL
    token: Token = ""

    def caller(self, timeout: float = 30.0) -> BrokerCaller:
        """A caller of the first of the named brokers that answers."""
        addresses = [one.strip() for one in self.url.split(",") if one.strip()] or [self.url]
        for address in addresses[:-1]:
            caller = BrokerCaller(address, token=self.token or None, timeout=timeout)
            try:
                caller.attempt("GET", "/health/live")
                return caller
            except CannotConnect:
                caller.close()
        return BrokerCaller(addresses[-1], token=self.token or None, timeout=timeout)

    def ask(
        self, method: str, *parts: str, body: Any = None, timeout: float = 30.0, **query: Any
    ) -> Any:
        """One request, and its decoded answer. `parts` and `query` are those of `resource`."""
        with self.caller(timeout) as caller:
            return caller.json(method, resource(*parts, **query), body)

    def rows(self, target: str, key: str, limit: int = 0, **query: Any) -> list[dict[str, Any]]:
        """The rows of a listing that is answered in pages: the first `limit`, or all."""
        rows: list[dict[str, Any]] = []
        while True:
            wanted = min(PAGE_ROWS, limit - len(rows)) if limit else PAGE_ROWS
            page = self.get(target, limit=wanted, offset=len(rows), **query)
            rows += page[key]
            if not page[key] or len(rows) >= (limit or page["total"]):
                return rows

    get = functools.partialmethod(ask, "GET")
    post = functools.partialmethod(ask, "POST")
    put = functools.partialmethod(ask, "PUT")
    delete = functools.partialmethod(ask, "DELETE")


COMPLETED = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # where shells put the line to be completed
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
            api = Api(url, ctx.params.get("token") or "")
            answer = api.get(target, timeout=1.0, **query)
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
        Path | None, option("Trust broker certificates signed by this CA (PEM).", envvar=CA_FILE)
    ] = None,
    client_cert: Annotated[
        Path | None,
        option("Client certificate, for brokers that require one (PEM).", envvar=CLIENT_CERT),
    ] = None,
    client_key: Annotated[
        Path | None, option("Private key of --client-cert (PEM).", envvar=CLIENT_KEY)
    ] = None,
    _version: Annotated[
        bool,
        option("Print the version and exit.", "--version", is_eager=True, callback=_print_version),
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
