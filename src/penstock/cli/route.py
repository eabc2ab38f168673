"""`penstock route`: export routes from a shell.

All commands but `repair` ask a running broker. `inspect` can also read the files of a route while
the broker is down: `--data-dir`, `--config` or `--directory` say where they are. `repair` needs the
broker stopped. Exit codes: 0 done, 1 refused or damaged, 2 wrong usage.
"""

import asyncio
import json as text
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import yaml
from cyclopts import Parameter
from msgspec import to_builtins

from penstock.cli import (
    LOCAL_URL,
    AnyText,
    BrokerApi,
    ConfigFile,
    DataDir,
    JsonOutput,
    Token,
    Url,
    WatchApi,
    Yes,
    command_group,
    completer,
    confirm,
    say,
)
from penstock.cli.tables import (
    Column,
    TableBlock,
    TextLine,
    View,
    count,
    duration,
    estimate,
    rate,
    size,
)
from penstock.config import load
from penstock.errors import PenstockError
from penstock.export import inspection
from penstock.export.deadletters import from_text
from penstock.export.sendqueue import repair as repair_queue
from penstock.net.http import CannotConnect

commands = command_group("route")

ROUTES = "/api/v1/routes"
Name = Annotated[str, Parameter(help="Name of the route.", completer=completer(ROUTES, "routes"))]
EXAMINE_TIMEOUT_SECONDS = 600.0  # gigabytes are read
PAGE_RECORDS = 1000  # asked for at a time


def _age(route: dict[str, Any]) -> float | None:
    queue = route.get("queue")
    return queue["oldestAgeSeconds"] if queue and queue["batches"] else None


COLUMNS = (
    Column("route", "name"),
    Column("state"),
    Column("to", "destination", prose=True),
    Column("lag", format=count, optional=True),
    Column("records", "queue.records", count),
    Column("oldest", _age, duration),
    Column("in/s", "queue.batchesInPerSecond", rate),
    Column("out/s", "queue.batchesOutPerSecond", rate),
    Column("breaker", "breaker.state", optional=True),
    Column("dead", "deadLetters", count),
    Column("empty in", "queue.drainEtaSeconds", estimate, optional=True),
    Column("size", "queue.bytes", size, optional=True),
    Column("batches", "queue.batches", count, optional=True),
)
NO_ROUTES = "no routes; one that sends a topic on: penstock route create lake route.yaml"


@commands.command(name="list")
def list_routes(route: Name = "", /, *, api: WatchApi = WatchApi()) -> View:
    """List the routes of a broker, or show one: depth, age, rates, circuit breaker, accounting and
    problems.

    Examples:

    `penstock route list --watch`

    `penstock route list lake`
    """
    if not route:
        return _view(api.get(ROUTES)["routes"])
    one = api.get(ROUTES, route)
    return View(one, [*_view([one]).parts, *_books(one)])


def _view(routes: list[dict[str, Any]]) -> View:
    troubles = [
        TextLine(f"{one['name']}: {trouble}", "red") for one in routes for trouble in _troubles(one)
    ]
    return View(routes, [TableBlock(COLUMNS, routes, NO_ROUTES), *troubles])


def _books(route: dict[str, Any]) -> Iterator[TextLine]:
    if "queue" in route:
        books = route["queue"]["accounting"]
        dropped = ", ".join(f"{why} {n:,}" for why, n in books["dropped"].items()) or "0"
        yield TextLine(
            f"accepted {books['accepted']:,} = delivered {books['delivered']:,}"
            f" + dead {books['deadLettered']:,} + dropped {dropped} + queued {books['queued']:,}"
        )


def _troubles(route: dict[str, Any]) -> Iterator[str]:
    again = route.get("triesAgainSeconds")
    if route.get("paused"):
        yield route["paused"] + ("" if again is None else f" (tries again in {duration(again)})")
    elif route.get("lastError"):
        yield route["lastError"]
    if route.get("sourceError"):
        yield route["sourceError"]
    if route.get("sourceDamage"):
        yield route["sourceDamage"]


@commands.command
def create(route: str, file: AnyText, /, *, api: BrokerApi = BrokerApi()) -> None:
    """Create a route on a running broker. It exists until you delete it.

    Examples:

    `penstock route create lake route.yaml`

    `echo '{destination: {type: http, url: "http://lake:8080/in"}, source: {topic: orders}}' |
    penstock route create lake -`

    :param route: Name of the route.
    :param file: YAML or JSON file, as under `routes.NAME` in the configuration; - = standard input.
    """
    try:
        content = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        definition = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PenstockError(f"{file} is not YAML: {error}") from None
    if not isinstance(definition, dict):
        raise PenstockError(f"{file} must have keys such as destination and source")
    api.post(ROUTES, body=definition | {"name": route})
    say(f"made route {route}; penstock route list {route} shows it")


@commands.command
def delete(
    route: Name, /, *, force: bool = False, yes: Yes = False, api: BrokerApi = BrokerApi()
) -> None:
    """Stop and delete a route. Fails if it has records or dead letters, unless you use --force.

    Example: `penstock route drain lake && penstock route delete lake`

    :param force: Delete the route even if it has records or dead letters; they are lost.
    """
    queue = api.get(ROUTES, route).get("queue") or {"records": 0}
    confirm(f"Delete route {route}, in which {queue['records']:,} records wait?", yes)
    api.delete(ROUTES, route, force=str(force).lower())


@commands.command
def pause(route: Name, /, *, api: BrokerApi = BrokerApi()) -> None:
    """Stop sending. New records are still queued.

    Example: `penstock route pause lake`
    """
    api.post(ROUTES, route, "pause")


@commands.command
def resume(route: Name, /, *, api: BrokerApi = BrokerApi()) -> None:
    """Resume sending immediately.

    Example: `penstock route resume lake`
    """
    api.post(ROUTES, route, "resume")


@commands.command
def drain(route: Name, /, *, api: BrokerApi = BrokerApi()) -> None:
    """Accept nothing new and deliver what is queued, until you use `resume`.

    Example: `penstock route drain lake`
    """
    api.post(ROUTES, route, "drain")


@commands.command
def replay(route: Name, /, *, api: BrokerApi = BrokerApi()) -> None:
    """Move the dead letters of a route back to its send queue.

    Example: `penstock route replay lake`
    """
    print(f"{api.post(ROUTES, route, 'replay')['records']} records queued again")


@commands.command
def purge(route: Name, /, *, yes: Yes = False, api: BrokerApi = BrokerApi()) -> None:
    """Drop all queued records. They are counted as dropped{reason="purged"}.

    Example: `penstock route purge lake`
    """
    confirm(f"Drop everything queued in route {route}?", yes)
    print(f"{api.post(ROUTES, route, 'purge')['records']} records dropped")


@Parameter(name="*")
@dataclass(frozen=True)
class RouteFiles:
    """Where the files of a route are."""

    config: ConfigFile = None
    data_dir: DataDir = None
    directory: Annotated[Path | None, Parameter(help="Directory of the route.")] = None

    def path(self, route: str) -> Path:
        directory = self.directory
        if directory is None:
            loaded = load(self.config, flags={"data_directory": self.data_dir})
            directory = loaded.config.routes_directory / route
        if not directory.is_dir():
            raise PenstockError(f"{directory} has no send queue")
        return directory


@dataclass(frozen=True)
class InspectedRoute(RouteFiles):
    """A route as its broker shows it, or as its files do when these are named."""

    url: Url = LOCAL_URL
    token: Token = ""

    def _path(self, route: str) -> Path | None:
        return self.path(route) if self.config or self.data_dir or self.directory else None

    def _get(self, route: str, part: str, **query: Any) -> Any:
        try:
            api = BrokerApi(url=self.url, token=self.token)
            return api.get(ROUTES, route, part, timeout=EXAMINE_TIMEOUT_SECONDS, **query)
        except CannotConnect as error:
            hint = "if the broker is down, --data-dir DIR reads the route's files"
            raise PenstockError(f"{error} ({hint})") from None

    def everything(self, route: str) -> dict[str, Any]:
        path = self._path(route)
        if path is None:
            return dict(self._get(route, "inspect"))
        return {"directory": str(path), **to_builtins(inspection.examine(path))}

    def dead_letters(self, route: str) -> Iterator[bytes]:
        if path := self._path(route):
            yield from inspection.dead_letters(path)
            return
        offset: int | None = 0
        while offset is not None:
            page = self._get(route, "deadletters", limit=PAGE_RECORDS, offset=offset)
            yield from (
                text.dumps(letter, ensure_ascii=False).encode() for letter in page["letters"]
            )
            offset = page["next"]

    def records(self, route: str, limit: int) -> Iterator[bytes]:
        if path := self._path(route):
            yield from (record for _, _, record in islice(inspection.waiting_records(path), limit))
            return
        for one in self._get(route, "records", limit=min(limit, PAGE_RECORDS))["records"]:
            yield from_text(one["record"], one["encoding"])


@commands.command
def inspect(
    route: Name,
    /,
    *,
    inspected: InspectedRoute = InspectedRoute(),
    records: Annotated[int, Parameter(alias="-n")] = 0,
    dead: bool = False,
    output: JsonOutput = JsonOutput(),  # noqa: ARG001  # `run` reads it
) -> View:
    """Verify every block of a route and show what it holds, from its broker or files: chunks,
    accounting, records, dead letters. Exit code 1 if a block is damaged.

    Examples:

    `penstock route inspect lake`

    `penstock route inspect lake --data-dir /var/lib/penstock --dead`

    :param records: Show this many queued records; a broker returns at most 1000.
    :param dead: Show the dead letters instead of the queue.
    """
    if not dead and not records:
        return _contents(inspected.everything(route))
    for line in inspected.dead_letters(route) if dead else inspected.records(route, records):
        sys.stdout.buffer.write(line + b"\n")
    raise SystemExit(0)


def _contents(report: dict[str, Any]) -> View:
    books = report["accounting"]
    columns = (
        Column("chunk", "name"),
        Column("size", "bytes", size),
        Column("blocks", format=count),
        Column("waiting", format=count),
        Column("first", format=count),
        Column("last", format=count),
        Column("damaged", lambda chunk: sum(at["bytes"] for at in chunk["damaged"]), size),
    )
    return View(
        report,
        [
            TableBlock(columns, report["chunks"], "no chunks"),
            TextLine(
                f"{report['waitingBatches']:,} batches with {report['waitingRecords']:,} records "
                f"wait; {books['delivered']:,} delivered, {books['deadLettered']:,} dead-lettered, "
                f"{sum(books['dropped'].values()):,} dropped; "
                f"{report['deadLetters']:,} dead letters"
            ),
            *(TextLine(problem, "red") for problem in report["problems"]),
        ],
        failed=bool(report["problems"]),
    )


@commands.command
def repair(
    route: Name,
    /,
    *,
    files: RouteFiles = RouteFiles(),
    output: JsonOutput = JsonOutput(),  # noqa: ARG001  # `run` reads it
) -> View:
    """Move damaged data to quarantine/ and count it as dropped. The broker must be stopped.

    Example: `penstock route repair lake --data-dir /var/lib/penstock`
    """
    report = asyncio.run(repair_queue(files.path(route)))
    lost = report.events.get("fastqueue_lost_blocks_total", 0)
    text = f"{report.waiting_batches} batches wait, {lost} damaged ones were set aside"
    return View(to_builtins(report), [TextLine(text)])
