"""Fixtures that several test packages use: a real PostgreSQL, and a fresh database on it for each
test.
"""

import asyncio
import functools
import gc
import inspect
import os
import random
import shutil
import signal
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
import uvloop

from penstock.database import embedded
from penstock.database.embedded import EmbeddedPostgres
from penstock.database.migrate import migrate
from penstock.queues.schema import SCHEMA
from tests.support import guard, leftovers, machine, order
from tests.support.broker import stop_forks
from tests.support.form import SHORT, SOAK
from tests.support.spans import Spans

if other := os.environ.get(
    "PENSTOCK_TEST_POSTGRES"
):  # the bin directory of another PostgreSQL than the embedded one
    embedded.BINARIES = Path(other)
    for name in ("io_method", "io_max_concurrency"):  # of 18 and later
        embedded.SETTINGS.pop(name)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every program that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
IN_MEMORY = not SOAK and machine.files_in_memory()
# This run, unless this is a worker of pytest-xdist: the process that started the workers has it.
RUN = leftovers.Run() if leftovers.RUN not in os.environ else None
leftovers.temporary_directory(Path(os.environ[leftovers.RUN]))
if RUN:
    guard.watch_run(RUN.directory)
LEFT = pytest.StashKey[list[str]]()
machine.cache_bytecode()
machine.share_certificates()
machine.wait_longer_for_answers()
if SHORT:
    import hypothesis  # a narrow run that needs it not should not wait for it

    hypothesis.settings.register_profile("short", max_examples=20)
    hypothesis.settings.load_profile("short")
# The JVMs of these tests live for seconds: compiling thoroughly costs more than it gains, and the
# two cores are shared (the Spark tests take half the time).
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
# Java does not know TMPDIR, and writes its statistics to /tmp.
os.environ["JAVA_TOOL_OPTIONS"] += f" -XX:-UsePerfData -Djava.io.tmpdir={tempfile.gettempdir()}"


TESTS = Path(__file__).parent
# What kind a test is depends on where it lives. Kinds that `make test-fast` leaves out:
KINDS = {
    # kills, freezes or restarts whole processes
    "chaos": [
        "chaos/*",
        "celery/test_kills.py",  # workers and brokers in the middle of tasks
        "database/test_embedded*.py",  # PostgreSQL, as the broker starts and stops it
        "e2e/*",  # whole brokers
        "pipeline/test_kills.py",  # a Spark cluster, which other tests of pipelines share
    ],
    # needs Chromium
    "browser": ["browser/*"],
    # takes as long as a hundred others, also in its short form
    "long": [
        "backup/*",  # whole brokers, dumped and restored
        "celery/test_workers.py",  # workers, each with a pool of processes
        "client/test_packages.py",  # builds the wheel, installs it into empty environments
        "client/test_testing.py",  # other pytests, each with a broker
        "client/test_types.py",  # mypy and pyright over a program
        "client/test_worker.py",  # processes that are started again
        "database/test_upgrade.py",  # brokers of two releases
        "deploy/test_monitoring.py",  # promtool, and a broker with everything that has a metric
        "django/*",  # sites and their workers
        "docs/test_links.py",  # the site is built
        "docs/test_pages.py",  # every page does what it says
        "examples/*",  # whole applications
        "wire/test_queue_openapi.py",  # schemathesis makes up requests
    ],
}


LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@functools.cache
def kinds_of(path: Path) -> list[str]:
    place = path.relative_to(TESTS)
    return [kind for kind, places in KINDS.items() if any(map(place.match, places))]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    restore_log_format(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    restore_log_format(item)


def restore_log_format(item: pytest.Item) -> None:
    """Restore the format of pytest's log handlers: loggers of PySpark make a handler write JSON.

    pytest adds its handlers again for each phase of a test.
    """
    plugin: Any = item.config.pluginmanager.get_plugin("logging-plugin")
    for handler in (plugin.caplog_handler, plugin.report_handler):
        handler.setFormatter(plugin.formatter)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what the marker expression leaves out as a whole."""
    expression = config.getoption("markexpr")
    left_out = collection_path.is_file() and any(
        f"not {kind}" in expression for kind in kinds_of(collection_path)
    )
    return left_out or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, and keep it from what was collected: looking through
    modules and tests, which are no garbage, took two fifths of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a fixture of their module or package (a broker, as a rule) run in one worker,
    so that there is one of it.
    """
    order.shuffle(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Tests without a group are handed out in this order: one that takes long must not be last.
        items.sort(key=lambda item: not kinds_of(item.path))
    for item in items:
        assert isinstance(item, pytest.Function)
        if inspect.iscoroutinefunction(item.obj):
            item.obj = _limited(item.obj, 0.9 * _timeout_of(item) or None)
        for kind in kinds_of(item.path):
            item.add_marker(kind)
        if item.get_closest_marker("xdist_group"):
            continue
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        scopes = {of_name[-1].scope for of_name in fixtures}
        module = item.nodeid.partition("::")[0]
        if "package" in scopes:
            item.add_marker(pytest.mark.xdist_group(module.rpartition("/")[0]))
        elif "module" in scopes:
            item.add_marker(pytest.mark.xdist_group(module))


def _timeout_of(item: pytest.Item) -> float:
    """Return the seconds after which pytest-timeout ends this test; 0: never."""
    if mark := item.get_closest_marker("timeout"):
        return float(mark.args[0])
    option = item.config.getoption("timeout")
    return float(item.config.getini("timeout") if option is None else option)


def _limited(
    test: Callable[..., Awaitable[None]], seconds: float | None
) -> Callable[..., Awaitable[None]]:
    """Cancel a coroutine that hangs, so that the traceback shows where it waits: that of
    pytest-timeout shows the event loop only.
    """

    @functools.wraps(test)
    async def limited(*arguments: Any, **fixtures: Any) -> None:
        async with asyncio.timeout(seconds):
            await test(*arguments, **fixtures)

    return limited


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], Any]]:
    """Coroutines run on the loop that the broker runs on, unless a mark names the other one:
    `pytest.mark.asyncio(loop_factories=["asyncio"])`.
    """
    mark = item.get_closest_marker("asyncio")
    names = mark.kwargs.get("loop_factories", ["uvloop"]) if mark else ["uvloop"]
    return {name: LOOPS[name] for name in names}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests of a group share a server: a pytest that pytest-xdist does not know yet would start it
    in every worker.
    """
    if getattr(session.config.option, "loadgroup", False):
        apart = [
            i.nodeid
            for i in session.items
            if i.get_closest_marker("xdist_group") and "@" not in i.nodeid
        ]
        if apart:
            raise pytest.UsageError(f"pytest-xdist does not keep groups together: {apart[0]}")


@pytest.hookimpl(wrapper=True, trylast=True)  # the workers have ended, nothing is printed yet
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Fail the run when it has left something behind."""
    result = yield
    stop_forks()
    left = RUN.leftovers() if RUN else []
    session.config.stash[LEFT] = left
    if left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result


def pytest_runtest_logfinish() -> None:
    if RUN:
        RUN.look()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left := config.stash.get(LEFT, []):
        terminalreporter.section("left behind", red=True)
        for line in left:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def soak() -> bool:
    """Whether the long form of a test is asked for (`make soak`)."""
    return SOAK


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory that other users can pass through, as the embedded PostgreSQL must when we are
    root.

    pytest's own `tmp_path` is closed to others, and each pytest that starts closes it again.
    """
    directory = Path(tempfile.mkdtemp(prefix="penstock-"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def queue() -> str:
    """A name that no other test has."""
    return f"q-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    return Spans(monkeypatch)


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """A private PostgreSQL 18 for the whole session, with durable settings; do not stop it (see
    `own_postgres`).
    """
    with running_postgres() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL of this test alone, to be stopped, frozen or killed."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def database_url(postgres: EmbeddedPostgres) -> str:
    """The URL of a fresh database without queues."""
    return fresh_database(postgres)


@pytest.fixture
def empty_database_url(postgres: EmbeddedPostgres) -> str:
    """The URL of a fresh database without anything of ours in it."""
    return fresh_database(postgres, empty=True)


class running_postgres:  # noqa: N801
    """A server in a directory of its own, gone with everything in it afterwards."""

    def __enter__(self) -> EmbeddedPostgres:
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
        # Before 16 a map of users cannot say "any role".
        access = {"access": "local all all trust\n"} if other else {}
        self.server = EmbeddedPostgres(self.directory, {"max_connections": "400"}, **access)
        self.server.start()
        guard.watch_postgres(self.directory)
        return self.server

    def __exit__(self, *failure: object) -> None:
        self.server.stop("immediate")
        shutil.rmtree(self.directory, ignore_errors=True)


def fresh_database(server: EmbeddedPostgres, *, empty: bool = False, migrated: bool = False) -> str:
    """Return the URL of a new database, as `create_database` does, outside of a coroutine."""
    return asyncio.run(create_database(server, empty=empty, migrated=migrated))


def copy_database(server: EmbeddedPostgres, url: str) -> str:
    """The URL of a new database with what is in this one, to which nobody is connected."""
    name = f"t{uuid.uuid4().hex}"
    template = urlsplit(url).path[1:]
    url = server.url.replace("/postgres?", f"/{name}?")
    asyncio.run(_execute(server.url, f"CREATE DATABASE {name} TEMPLATE {template} {_strategy()}"))
    return url


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _strategy() -> str:
    """Flushing the copied files costs nothing in memory; PostgreSQL 14 has no such choice."""
    return "STRATEGY FILE_COPY" if IN_MEMORY and not other else ""


async def create_database(
    server: EmbeddedPostgres, *, empty: bool = False, migrated: bool = False
) -> str:
    """Return the URL of a new database. From the second of a server on, or if it has to be
    `migrated`, it has this release's schema already (what a broker would do at its start takes
    longer than many a test), unless it has to be `empty`.
    """
    name = f"t{uuid.uuid4().hex}"
    url = server.url.replace("/postgres?", f"/{name}?")
    template = _templates.get(server.url)
    connection = await asyncpg.connect(server.url)
    try:
        if not empty and (template == "" or (migrated and not template)):
            template = _templates[server.url] = "migrated"
            await connection.execute(f"CREATE DATABASE {template}")
            first = await asyncpg.connect(server.url.replace("/postgres?", f"/{template}?"))
            await migrate(first, "penstock", SCHEMA)
            await first.close()
        _templates.setdefault(server.url, "")
        if empty or not template:
            await connection.execute(f"CREATE DATABASE {name}")
            return url
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} {_strategy()}")
    finally:
        await connection.close()
    await _execute(url, f"UPDATE penstock.installation SET id = {random.getrandbits(31)}")
    return url


_templates: dict[str, str] = {}  # of a server, by its URL; empty: one database was made so far
