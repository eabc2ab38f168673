"""`penstock export`: routes from a shell.

All but `repair` ask a running broker, on this machine or another. `inspect` and `verify` also read
a route's files themselves, for when the broker is down: `--data-dir`, `--config` or `--directory`
say where these are. `repair` needs the broker stopped. Exit codes: 0 done, 1 refused or damaged, 2
wrong usage.
"""

import asyncio
import json as text
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from msgspec import to_builtins

from penstock.cli import (
    LOCAL_URL,
    Api,
    Commands,
    ConfigFile,
    DataDir,
    Json,
    Token,
    Url,
    Yes,
    app,
    argument,
    completer,
    confirm,
    option,
)
from penstock.cli.tables import (
    Column,
    Line,
    Table,
    View,
    count,
    duration,
    estimate,
    print_json,
    rate,
    show,
    size,
)
from penstock.config import load
from penstock.errors import PenstockError
from penstock.export import inspection
from penstock.export.deadletters import from_text
from penstock.export.sendqueue import repair as repair_queue
from penstock.net.http import CannotConnect

commands = Commands("Create, monitor, control and check export routes.", app, name="export")

ROUTES = "/api/v1/routes"
Name = Annotated[
    str, argument("Name of the route.", metavar="ROUTE", autocompletion=completer(ROUTES, "routes"))
]
Dir = Annotated[Path | None, option("Directory of the route.")]
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
NO_ROUTES = "no routes; one that sends a topic on: penstock export create lake route.yaml"


@commands.command("list", watch=True)
def list_routes(api: Api) -> View:
    """List the routes of a broker.

    Example: `penstock export list --watch`
    """
    return _view(api.get(ROUTES)["routes"])


@commands.command(watch=True)
def status(
    api: Api,
    route: Annotated[
        str,
        argument(
            "Name of the route; default: all routes.",
            metavar="[ROUTE]",
            autocompletion=completer(ROUTES, "routes"),
        ),
    ] = "",
) -> View:
    """Show the state of routes: depth, age, rates, circuit breaker, accounting and problems.

    Example: `penstock export status lake --watch 1`
    """
    if not route:
        return list_routes(api)
    one = api.get(ROUTES, route)
    return View(one, [*_view([one]).parts, *_books(one)])


def _view(routes: list[dict[str, Any]]) -> View:
    troubles = [
        Line(f"{one['name']}: {trouble}", "red") for one in routes for trouble in _troubles(one)
    ]
    return View(routes, [Table(COLUMNS, routes, NO_ROUTES), *troubles])


def _books(route: dict[str, Any]) -> Iterator[Line]:
    if "queue" in route:
        books = route["queue"]["accounting"]
        dropped = ", ".join(f"{why} {n:,}" for why, n in books["dropped"].items()) or "0"
        yield Line(
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


@commands.command()
def create(
    api: Api,
    name: Annotated[str, argument("Name of the route.", metavar="ROUTE")],
    file: Annotated[
        typer.FileText,
        argument("YAML or JSON, as under `routes.NAME` in the configuration; - = standard input."),
    ],
) -> None:
    """Create a route on a running broker. It exists until you delete it.

    Examples:

    `penstock export create lake route.yaml`

    `echo '{destination: {type: http, url: "http://lake:8080/in"}, source: {topic: orders}}' |
    penstock export create lake -`
    """
    try:
        definition = yaml.safe_load(file)
    except yaml.YAMLError as error:
        raise PenstockError(f"{file.name} is no YAML: {error}") from None
    if not isinstance(definition, dict):
        raise PenstockError(f"{file.name} must hold keys such as destination and source")
    api.post(ROUTES, body=definition | {"name": name})
    typer.echo(f"made route {name}; penstock export status {name} shows it", err=True)


@commands.command()
def delete(
    api: Api,
    route: Name,
    force: Annotated[
        bool, option("Delete the route even if it has records or dead letters; they are lost.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Stop and delete a route. Fails if it has records or dead letters, unless you use --force.

    Example: `penstock export drain lake && penstock export delete lake`
    """
    queue = api.get(ROUTES, route).get("queue") or {"records": 0}
    confirm(f"Delete route {route}, in which {queue['records']:,} records wait?", yes)
    api.delete(ROUTES, route, force=str(force).lower())


@commands.command()
def pause(api: Api, route: Name) -> None:
    """Stop sending. New records are still queued.

    Example: `penstock export pause lake`
    """
    api.post(ROUTES, route, "pause")


@commands.command()
def resume(api: Api, route: Name) -> None:
    """Resume sending immediately.

    Example: `penstock export resume lake`
    """
    api.post(ROUTES, route, "resume")


@commands.command()
def drain(api: Api, route: Name) -> None:
    """Accept nothing new and deliver what is queued, until you use `resume`.

    Example: `penstock export drain lake`
    """
    api.post(ROUTES, route, "drain")


@commands.command()
def replay(api: Api, route: Name) -> None:
    """Move the dead letters of a route back to its send queue.

    Example: `penstock export replay lake`
    """
    print(f"{api.post(ROUTES, route, 'replay')['records']} records queued again")


@commands.command()
def purge(api: Api, route: Name, yes: Yes = False) -> None:
    """Drop all queued records. They are counted as dropped{reason="purged"}.

    Example: `penstock export purge lake`
    """
    confirm(f"Drop everything queued in route {route}?", yes)
    print(f"{api.post(ROUTES, route, 'purge')['records']} records dropped")


@dataclass(frozen=True, slots=True)
class RouteFiles:
    route: Name
    config: ConfigFile = None
    data_dir: DataDir = None
    directory: Dir = None

    def path(self) -> Path:
        directory = self.directory
        if directory is None:
            loaded = load(self.config, flags={"data_directory": self.data_dir})
            directory = loaded.config.routes_directory / self.route
        if not directory.is_dir():
            raise PenstockError(f"there is no send queue at {directory}")
        return directory


@dataclass(frozen=True, slots=True)
class Inspected(RouteFiles):
    """A route looked into: through its broker, or in its files when these are named."""

    url: Url = LOCAL_URL
    token: Token = ""

    def _path(self) -> Path | None:
        return self.path() if self.config or self.data_dir or self.directory else None

    def _get(self, part: str, **query: Any) -> Any:
        try:
            api = Api(self.url, self.token)
            return api.get(ROUTES, self.route, part, timeout=EXAMINE_TIMEOUT_SECONDS, **query)
        except CannotConnect as error:
            hint = "if the broker is down, --data-dir DIR reads the route's files"
            raise PenstockError(f"{error} ({hint})") from None

    def everything(self) -> dict[str, Any]:
        path = self._path()
        if path is None:
            return dict(self._get("inspect"))
        return {"directory": str(path), **to_builtins(inspection.examine(path))}

    def dead_letters(self) -> Iterator[bytes]:
        if path := self._path():
            yield from inspection.dead_letters(path)
            return
        offset: int | None = 0
        while offset is not None:
            page = self._get("deadletters", limit=PAGE_RECORDS, offset=offset)
            yield from (
                text.dumps(letter, ensure_ascii=False).encode() for letter in page["letters"]
            )
            offset = page["next"]

    def records(self, limit: int) -> Iterator[bytes]:
        if path := self._path():
            yield from (record for _, _, record in islice(inspection.waiting_records(path), limit))
            return
        for one in self._get("records", limit=min(limit, PAGE_RECORDS))["records"]:
            yield from_text(one["record"], one["encoding"])


@commands.command()
def inspect(
    inspected: Inspected,
    json: Json = False,
    records: Annotated[
        int, option("Show this many queued records; a broker returns at most 1000.", "-n")
    ] = 0,
    dead: Annotated[bool, option("Show the dead letters instead of the queue.")] = False,
) -> None:
    """Show what a route holds, from its broker or files: chunks, accounting, records, dead letters.

    Examples:

    `penstock export inspect lake`

    `penstock export inspect lake --data-dir /var/lib/penstock --dead`
    """
    if dead or records:
        for line in inspected.dead_letters() if dead else inspected.records(records):
            sys.stdout.buffer.write(line + b"\n")
        return
    show(lambda: _contents(inspected.everything()), json)


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
            Table(columns, report["chunks"], "no chunks"),
            Line(
                f"{report['waitingBatches']:,} batches with {report['waitingRecords']:,} records "
                f"wait; {books['delivered']:,} delivered, {books['deadLettered']:,} dead-lettered, "
                f"{sum(books['dropped'].values()):,} dropped; "
                f"{report['deadLetters']:,} dead letters"
            ),
            *(Line(problem, "red") for problem in report["problems"]),
        ],
    )


@commands.command()
def verify(inspected: Inspected, json: Json = False) -> None:
    """Verify every block of a route, in its broker or its files. Exit code 1 if any is damaged.

    Example: `penstock export verify lake --data-dir /var/lib/penstock`
    """
    report = inspected.everything()
    problems, chunks = report["problems"], report["chunks"]
    if json:
        print_json({"problems": problems, "accounting": report["accounting"]})
    else:
        blocks = sum(chunk["blocks"] for chunk in chunks)
        for problem in problems:
            print(problem)
        print(f"{blocks} blocks in {len(chunks)} chunks: {len(problems)} problems")
    if problems:
        raise typer.Exit(1)


@commands.command()
def repair(route: RouteFiles, json: Json = False) -> None:
    """Move damaged data to quarantine/ and count it as dropped. The broker must be stopped.

    Example: `penstock export repair lake --data-dir /var/lib/penstock`
    """
    report = asyncio.run(repair_queue(route.path()))
    if json:
        print_json(to_builtins(report))
        return
    lost = report.events.get("lost_blocks", 0)
    print(f"{report.waiting_batches} batches wait, {lost} damaged ones were set aside")
