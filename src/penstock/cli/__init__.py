"""The `penstock` command: one module per group of commands, and what they share.

A command is a function. Its parameters are the options, its docstring is the help, and a dataclass
as a parameter stands for the options that are its fields. A command that returns a `View` takes a
`JsonOutput` or a `WatchOutput`, which say how `run` shows it (`tables`).

`run` imports the module of the first word only, so a command starts without the libraries that the
others need. Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted, 141 the reader
of the output is gone.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError
from cyclopts.validators import Number

from penstock import __version__
from penstock.cli.old_words import current_words
from penstock.errors import ConfigError, Forbidden, PenstockError, Unauthorized
from penstock.net.addresses import resource
from penstock.net.broker_caller import BrokerCaller
from penstock.net.http import CannotConnect
from penstock.net.tls import CA_FILE, CLIENT_CERT, CLIENT_KEY

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

    from penstock.cli.tables import View
    from penstock.config import Loaded

REFUSED, USAGE, INTERRUPTED, READER_GONE = 1, 2, 130, 141  # exit codes
NO_TOKEN = "Authentication required"  # how the broker's answer to a request without a token begins
LOCAL_URL = "http://127.0.0.1:6632"
PAGE_ROWS = 500  # rows per request of a listing
COMPLETED_NAMES = 200  # at most, where there may be thousands
INSTALL_COMPLETION = "--install-completion"

COMMANDS = {  # words, each with a module of that name, and their help
    "serve": "Start a broker.",
    "status": "Show the whole broker on one screen: problems first, then each part.",
    "doctor": "Check a broker and its configuration for what will hurt in production.",
    "top": "Watch the whole broker live.",
    "queue": "Push to, pop from and manage queues.",
    "schedule": "Push messages on a cron schedule.",
    "topic": "Create, read, write and check topics.",
    "route": "Create, monitor, control and check export routes.",
    "pipeline": "Create, check, run and monitor Spark pipelines.",
    "buffer": "Inspect, replay and clean up the disk buffer.",
    "worker": "Run the consumers of a Python module.",
    "tasks": "Show requeues and purges that run in the background, or cancel one.",
    "maintenance": "Buffer pushes on disk, or stop pops, during maintenance of PostgreSQL.",
    "audit": "Show who changed what and when, newest first.",
    "logs": "Show the latest log lines of the broker, newest last.",
    "token": "Create an access token and print it.",
    "config": "Show the effective configuration, or check a file.",
    "database": "Connect to the broker's PostgreSQL, and grant access to the outbox.",
    "backup": "Back up queues, topics, groups, routes and buffered pushes while the broker runs.",
    "restore": "Restore a backup into an empty data directory and database, and verify it.",
    "demo": "Fill a broker with live example data, to try the Console.",
}
MODULES = {  # the modules of commands that share one
    "restore": "backup",
    "token": "config",
    **dict.fromkeys(("tasks", "maintenance", "audit", "logs"), "operations"),
}
EXTRAS = {"pipeline": "pipeline"}  # what to install for a command, when it is not `server`
# Imported when a command runs, by what an extra brings.
LIBRARIES = (
    *("adbc_driver_postgresql", "cramjam", "crc32c", "jwt", "numpy", "pandas", "pyarrow"),
    *("pyspark", "yaml"),
)


# Options that commands share

Positive = Number(gte=1)
NotNegative = Number(gte=0)
Limit = Annotated[int, Parameter(alias="-n", validator=Positive)]
LimitOrAll = Annotated[int, Parameter(alias="-n", validator=NotNegative)]
# Text that may begin with a hyphen, such as -waiting.
AnyText = Annotated[str, Parameter(allow_leading_hyphen=True)]
Token = Annotated[
    str,
    Parameter(env_var="PENSTOCK_TOKEN", help="Access token (JWT), if the broker requires one."),
]
Url = Annotated[
    str,
    Parameter(
        alias="-u",
        env_var="PENSTOCK_URL",
        help="HTTP address of the broker; of several, separated by commas, the first that answers.",
    ),
]
Yes = Annotated[bool, Parameter(alias="-y", help="Do not ask for confirmation.")]
ConfigFile = Annotated[
    Path | None,
    Parameter(
        alias="-c",
        env_var="PENSTOCK_CONFIG",
        help="The broker's configuration file (YAML); default: penstock.yaml or config.yaml, if "
        "it exists.",
    ),
]
DataDir = Annotated[Path | None, Parameter(alias="-d", help="The broker's data directory.")]
Settings = Annotated[
    list[str] | None,
    Parameter(name="--set", help="Set a configuration key, KEY=VALUE; may be repeated."),
]


@Parameter(name="*")
@dataclass(frozen=True)
class JsonOutput:
    """Options of a command whose view is shown once."""

    json: Annotated[bool, Parameter(alias="-J", help="Print JSON instead of text.")] = False

    def show(self, look: Callable[[], "View"]) -> None:
        from penstock.cli.tables import show

        view = show(look, self.json, self.seconds)
        if view is not None and view.failed:
            raise SystemExit(int(view.failed))

    @property
    def seconds(self) -> float | None:
        """Seconds between two updates; None: show once."""
        return None


@dataclass(frozen=True)
class WatchOutput(JsonOutput):
    """Options of a command whose view is shown once or repeatedly."""

    watch: Annotated[bool, Parameter(alias="-w", help="Repeat until Ctrl-C.")] = False
    interval: Annotated[
        float, Parameter(validator=Number(gte=0.1), help="Seconds between updates with --watch.")
    ] = 2.0

    @property
    def seconds(self) -> float | None:
        return self.interval if self.watch else None


@Parameter(name="*")
@dataclass(frozen=True)
class BrokerConfig:
    """The configuration of the broker on this machine."""

    config: ConfigFile = None
    data_dir: DataDir = None
    settings: Settings = None

    def load(self, **flags: Any) -> "Loaded":
        """Load it with these options. Ends the command if it is invalid."""
        from penstock.config.load import default_file, load, parse_settings

        try:
            given = {
                "data_directory": self.data_dir,
                **flags,
                **parse_settings(self.settings or []),
            }
            return load(self.config or default_file(), flags=given)
        except ConfigError as error:
            raise usage(f"the configuration is wrong:\n{error}") from None


@Parameter(name="*")
@dataclass(frozen=True)
class BrokerApi:
    """The HTTP API of the broker that --url and --token name."""

    url: Url = LOCAL_URL
    token: Token = ""

    def caller(self, timeout: float = 30.0) -> BrokerCaller:
        """Return a caller of the first of the named brokers that answers."""
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
        """Send one request and decode its answer. `parts` and `query` are those of `resource`."""
        with self.caller(timeout) as caller:
            return caller.json(method, resource(*parts, **query), body)

    def rows(self, target: str, key: str, limit: int = 0, **query: Any) -> list[dict[str, Any]]:
        """Return the rows of a listing that is answered in pages: the first `limit`, or all."""
        rows: list[dict[str, Any]] = []
        cursor = None
        while True:
            wanted = min(PAGE_ROWS, limit - len(rows)) if limit else PAGE_ROWS
            place = {"offset": len(rows)} if cursor is None else {"cursor": cursor}
            page = self.get(target, limit=wanted, **place, **query)
            rows += page[key]
            cursor = page.get("next")
            whole = len(rows) >= (limit or page["total"])
            if not page[key] or (whole and (limit or cursor is None)):
                return rows

    get = functools.partialmethod(ask, "GET")
    post = functools.partialmethod(ask, "POST")
    put = functools.partialmethod(ask, "PUT")
    delete = functools.partialmethod(ask, "DELETE")


@dataclass(frozen=True)
class JsonApi(BrokerApi, JsonOutput):
    """The API, and a view that is shown once."""


@dataclass(frozen=True)
class WatchApi(BrokerApi, WatchOutput):
    """The API, and a view that can be watched."""


def completer(
    target: str, key: str, *, filtered: bool = False
) -> Callable[["CompletionContext"], list[str]]:
    """Complete names in a shell: those of the broker's answer, of its list under `key`.

    `filtered`: the list is answered in pages, so ask only for names that may be meant.
    """

    def complete(context: "CompletionContext") -> list[str]:
        url = os.environ.get("PENSTOCK_URL") or LOCAL_URL
        token = os.environ.get("PENSTOCK_TOKEN") or ""
        query = {"filter": context.incomplete, "limit": COMPLETED_NAMES} if filtered else {}
        try:
            answer = BrokerApi(url=url, token=token).get(target, timeout=1.0, **query)
        except PenstockError:
            return []  # an error would disturb the shell's prompt
        rows = answer[key] if key else answer
        return sorted({row["name"] if isinstance(row, dict) else row for row in rows})

    return complete


# The program


def _shown_default(value: Any) -> str | None:
    """Return a default as help shows it: not that a flag is off or a text is empty."""
    return None if value in (None, False, "") or not isinstance(value, str | int | float) else value  # type: ignore[return-value]


def _new_program() -> App:
    """Return an app without commands, with the options of every command."""
    program = App(
        name="penstock",
        help="A message broker for Python and data teams: "
        "queues on PostgreSQL, topics on disk, pipelines on Spark.",
        version=__version__,
        help_flags=("-h", "--help"),
        default_parameter=Parameter(negative=(), show_default=_shown_default),
        group_parameters=Group("Options"),
    )
    program.meta.group_parameters = Group("Options of every command")
    program.meta.default(_connection_options)
    return program


def _connection_options(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    ca: Annotated[Path | None, Parameter(env_var=CA_FILE)] = None,
    client_cert: Annotated[Path | None, Parameter(env_var=CLIENT_CERT)] = None,
    client_key: Annotated[Path | None, Parameter(env_var=CLIENT_KEY)] = None,
) -> tuple[str, ...]:
    """Set how every command connects, and return the words of the command.

    :param ca: Trust broker certificates signed by this CA (PEM).
    :param client_cert: Client certificate, for brokers that require one (PEM).
    :param client_key: Private key of --client-cert (PEM).
    """
    for name, value in ((CA_FILE, ca), (CLIENT_CERT, client_cert), (CLIENT_KEY, client_key)):
        if value is not None:
            # Read by everything that connects, also in other processes.
            os.environ[name] = str(value)
    return words


app = _new_program()
app.register_install_completion_command(INSTALL_COMPLETION)


def command_group(name: str, parent: App = app) -> App:
    """Add a group of commands to the program."""
    group = App(name=name, help=COMMANDS[name])
    parent.command(group)
    return group


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(given: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        with errors_explained():
            words = current_words(list(given), say)
            program = _program(words)
            if next((word for word in words if word in COMMANDS), "") == "serve":
                words = _translate_flags(words)
            command, bound, _ = _parse(program.meta, words)
            if command is _connection_options:
                command, bound, _ = _parse(program, command(*bound.args, **bound.kwargs))
            bound.apply_defaults()
            outputs = [one for one in bound.arguments.values() if isinstance(one, JsonOutput)]
            look = functools.partial(command, *bound.args, **bound.kwargs)
            if outputs:
                outputs[0].show(look)
            else:
                look()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else REFUSED
    except ModuleNotFoundError as missing:
        word = next((word for word in given if word in COMMANDS), "")
        if not word or (missing.name or "").partition(".")[0] not in LIBRARIES:
            raise
        return _needs_extra(word, missing.name or "")
    return 0


def _translate_flags(words: list[str]) -> list[str]:
    """Replace the flags of metrics-governor, which `serve` takes too."""
    from penstock.config.governor_flags import translate_flags

    try:
        return translate_flags(words)
    except ConfigError as error:
        raise usage(str(error)) from None


def _parse(program: App, words: Sequence[str]) -> Any:
    return program.parse_args(list(words), exit_on_error=False, print_error=False)


def _program(words: Sequence[str]) -> App:
    """Return the app with the commands that the words may mean, or their names alone."""
    asked = [word for word in words if word in COMMANDS][:1]
    for word in [*COMMANDS] if INSTALL_COMPLETION in words else asked:
        try:
            importlib.import_module(f"penstock.cli.{MODULES.get(word, word)}")
        except ModuleNotFoundError as missing:
            if not missing.name or missing.name.startswith("penstock"):
                raise
            if asked:
                raise SystemExit(_needs_extra(word, missing.name)) from None
    if asked or INSTALL_COMPLETION in words:
        return app
    overview = _new_program()
    for word, text in COMMANDS.items():
        overview.command(App(name=word, help=text))
    overview.register_install_completion_command(INSTALL_COMPLETION)
    return overview


def _needs_extra(word: str, module: str) -> int:
    line = f"pip install 'penstock[{EXTRAS.get(word, 'server')}]'"
    say(f"penstock: `penstock {word}` needs {module}, so first: {line}")
    return USAGE


# Errors and questions


def say(text: str) -> None:
    """Write a line for people to standard error."""
    sys.stderr.write(text + "\n")


def usage(text: str) -> SystemExit:
    """Report wrong usage. Returns the exception to raise."""
    say(f"penstock: {text}")
    return SystemExit(USAGE)


def explain(error: Exception) -> str:
    """Return an error in the words of the command line: a token is an option, not a header."""
    if isinstance(error, Unauthorized):
        if str(error).startswith(NO_TOKEN):
            return "this broker requires a token: pass --token TOKEN, or set PENSTOCK_TOKEN"
        return f"the broker does not accept the token (--token or PENSTOCK_TOKEN): {error}"
    if isinstance(error, Forbidden):
        return f"{error} (--token or PENSTOCK_TOKEN)"
    if isinstance(error, CannotConnect):
        return f"{error}. Is the broker running? --url or PENSTOCK_URL sets another address"
    return str(error)


@contextmanager
def errors_explained() -> Iterator[None]:
    """End a command that fails with a sentence and an exit code instead of a traceback."""
    try:
        yield
        sys.stdout.flush()
    except CycloptsError as error:
        problem = str(error)
        if isinstance(error, UnusedCliTokensError):
            problem = f"unexpected argument: {' '.join(error.unused_tokens or ())}."
        hint = " ".join(["penstock", *(error.command_chain or ()), "--help"])
        raise usage(f"{problem} See: {hint}") from None
    except PenstockError as error:
        say(f"penstock: {explain(error)}")
        raise SystemExit(REFUSED) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # Otherwise Python reports the error again when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(READER_GONE) from None
    except OSError as error:
        say(f"penstock: {error}")
        raise SystemExit(REFUSED) from None


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation, unless `--yes` was passed."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise usage(f"{question} Confirmation is needed. Pass --yes when there is no terminal.")
    if input(f"{question} [y/N]: ").strip().lower() not in ("y", "yes"):
        say("Aborted.")
        raise SystemExit(REFUSED)
