"""`penstock export`: routes from a shell.

All but `repair` ask a running broker, on this machine or another. `inspect` and `verify` also read
a route's files themselves, for when the broker is down: `--data-dir`, `--config` or `--directory`
say where these are. `repair` needs the broker stopped. Exit codes: 0 done, 1 refused or damaged, 2
wrong usage.
"""

import asyncio
import base64
import json as text
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from penstock.cli import Token, app, explain
from penstock.config import load
from penstock.config.values import format_duration, format_size
from penstock.errors import PenstockError
from penstock.export.manager import route_directory
from penstock.export.sendqueue import inspect as files
from penstock.net.broker_caller import BrokerCaller
from penstock.net.http import CannotConnect

commands = typer.Typer(
    help="Watch, steer and check export routes.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(commands, name="export")

Url = Annotated[
    str, typer.Option("--url", "-u", envvar="PENSTOCK_URL", help="Address of the broker.")
]
Json = Annotated[bool, typer.Option("--json", "-J", help="JSON instead of text for people.")]
Name = Annotated[str, typer.Argument(metavar="ROUTE")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="PENSTOCK_CONFIG", help="Configuration file."),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", "-d", help="Data directory of the broker.")
]
Dir = Annotated[Path | None, typer.Option("--directory", help="The route's directory itself.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DEFAULT_URL = "http://127.0.0.1:6632"
EXAMINE_TIMEOUT_SECONDS = 600.0  # gigabytes are read
PAGE_RECORDS = 1000  # asked for at a time
COLUMNS = (
    *("route", "state", "to", "lag", "batches", "records", "size"),
    *("oldest", "in/s", "out/s", "ETA", "breaker", "dead"),
)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except PenstockError as error:
        typer.echo(f"penstock: {explain(error)}", err=True)
        raise typer.Exit(1) from None
    except (TimeoutError, OSError) as error:
        typer.echo(f"penstock: {error}", err=True)
        raise typer.Exit(1) from None


def _ask(url: str, token: str, method: str, target: str, timeout: float = 30.0) -> Any:
    with BrokerCaller(url, token=token or None, timeout=timeout) as broker:
        return broker.json(method, f"/api/v1/routes{target}")


def _print_json(value: Any) -> None:
    print(text.dumps(value, indent=2))


def _table(routes: list[dict[str, Any]]) -> Table:
    table = Table(*COLUMNS)
    for route in routes:
        queue = route.get("queue")
        if queue is None:
            error = escape(route.get("lastError", ""))
            table.add_row(route["name"], f"[red]{route['state']}[/red]", error)
            continue
        colour = {"running": "green", "paused": "red"}.get(route["state"], "yellow")
        eta = queue["drainEtaSeconds"]
        table.add_row(
            route["name"],
            f"[{colour}]{route['state']}[/{colour}]",
            escape(route["destination"]),
            "" if route.get("lag") is None else f"{route['lag']:,}",
            f"{queue['batches']:,}",
            f"{queue['records']:,}",
            _size(queue["bytes"]),
            format_duration(round(queue["oldestAgeSeconds"])) if queue["batches"] else "",
            f"{queue['batchesInPerSecond']:.1f}",
            f"{queue['batchesOutPerSecond']:.1f}",
            "never" if eta < 0 else format_duration(round(eta)) if queue["batches"] else "",
            route["breaker"]["state"],
            f"{route['deadLetters']:,}" if route["deadLetters"] else "",
        )
    return table


def _size(size: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size = size / 1024  # type: ignore[assignment]
    return format_size(size)


@commands.command("list")
def list_routes(url: Url = DEFAULT_URL, token: Token = "", json: Json = False) -> None:
    """All routes of a broker."""
    with _errors():
        routes = _ask(url, token, "GET", "")["routes"]
        if json:
            _print_json(routes)
        else:
            Console().print(_table(routes))


@commands.command()
def status(
    route: Annotated[str, typer.Argument(metavar="[ROUTE]")] = "",
    url: Url = DEFAULT_URL,
    token: Token = "",
    json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on showing it, every second.")
    ] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    count: Annotated[
        int, typer.Option(help="Stop watching after this many looks; 0 = never.", hidden=True)
    ] = 0,
) -> None:
    """What routes are doing: depth, age, rates, breaker, accounting."""

    def look() -> list[dict[str, Any]]:
        if route:
            return [_ask(url, token, "GET", f"/{quote(route, safe='')}")]
        routes: list[dict[str, Any]] = _ask(url, token, "GET", "")["routes"]
        return routes

    with _errors():
        if watch:
            _watch(look, interval, count)
            return
        routes = look()
        if json:
            _print_json(routes[0] if route else routes)
            return
        console = Console()
        console.print(_table(routes))
        for each in routes:
            for trouble in _troubles(each):
                console.print(f"{each['name']}: {trouble}", style="red", markup=False)
            if route and "queue" in each:
                books = each["queue"]["accounting"]
                dropped = ", ".join(f"{why} {n:,}" for why, n in books["dropped"].items()) or "0"
                console.print(
                    f"accepted {books['accepted']:,} = delivered {books['delivered']:,}"
                    f" + dead {books['deadLettered']:,} + dropped {dropped}"
                    f" + queued {books['queued']:,}"
                )


def _troubles(route: dict[str, Any]) -> Iterator[str]:
    again = route.get("triesAgainSeconds")
    if route.get("paused"):
        when = "" if again is None else f" (tries again in {format_duration(round(again))})"
        yield route["paused"] + when
    elif route.get("lastError"):
        yield route["lastError"]
    if route.get("sourceError"):
        yield route["sourceError"]
    if route.get("sourceDamage"):
        yield route["sourceDamage"]


def _watch(look: Any, interval: float, count: int) -> None:
    looks = 0
    try:
        with Live(_table(look()), refresh_per_second=4) as live:
            while not count or (looks := looks + 1) < count:
                time.sleep(interval)
                live.update(_table(look()))
    except KeyboardInterrupt:
        pass


def _act(url: str, token: str, route: str, action: str) -> Any:
    return _ask(url, token, "POST", f"/{quote(route, safe='')}/{action}")


@commands.command()
def pause(route: Name, url: Url = DEFAULT_URL, token: Token = "") -> None:
    """Stop sending; the route still queues."""
    with _errors():
        _act(url, token, route, "pause")


@commands.command()
def resume(route: Name, url: Url = DEFAULT_URL, token: Token = "") -> None:
    """Send again, at once."""
    with _errors():
        _act(url, token, route, "resume")


@commands.command()
def drain(route: Name, url: Url = DEFAULT_URL, token: Token = "") -> None:
    """Take nothing new and deliver what is queued; `resume` ends it."""
    with _errors():
        _act(url, token, route, "drain")


@commands.command()
def replay(route: Name, url: Url = DEFAULT_URL, token: Token = "") -> None:
    """Queue the dead letters of a route again."""
    with _errors():
        print(f"{_act(url, token, route, 'replay')['records']} records queued again")


@commands.command()
def purge(route: Name, url: Url = DEFAULT_URL, token: Token = "", yes: Yes = False) -> None:
    """Drop everything that is queued. It is counted as dropped{reason="purged"}."""
    with _errors():
        if not yes:
            typer.confirm(f"Drop everything queued in route {route}?", abort=True)
        print(f"{_act(url, token, route, 'purge')['records']} records dropped")


def _directory(
    route: str, config: Path | None, data_dir: Path | None, directory: Path | None
) -> Path:
    if directory is None:
        flags = {"data_directory": data_dir} if data_dir else {}
        directory = route_directory(load(config, flags=flags).config, route)
    if not directory.is_dir():
        raise PenstockError(f"there is no send queue at {directory}")
    return directory


class Inspected:
    """A route looked into: through its broker, or in its files when these are named."""

    def __init__(
        self,
        route: str,
        url: str,
        token: str,
        config: Path | None,
        data_dir: Path | None,
        directory: Path | None,
    ) -> None:
        self._url, self._token, self._route = url, token, f"/{quote(route, safe='')}"
        self._files = (
            _directory(route, config, data_dir, directory)
            if config or data_dir or directory
            else None
        )

    def _get(self, target: str) -> Any:
        try:
            return _ask(
                self._url, self._token, "GET", self._route + target, EXAMINE_TIMEOUT_SECONDS
            )
        except CannotConnect as error:
            hint = "if the broker is down, --data-dir DIR reads the route's files"
            raise PenstockError(f"{error} ({hint})") from None

    def everything(self) -> dict[str, Any]:
        return files.examine(self._files) if self._files else dict(self._get("/inspect"))

    def dead_letters(self) -> Iterator[bytes]:
        if self._files:
            yield from files.dead_letters(self._files)
            return
        offset: int | None = 0
        while offset is not None:
            page = self._get(f"/deadletters?limit={PAGE_RECORDS}&offset={offset}")
            yield from (
                text.dumps(letter, ensure_ascii=False).encode() for letter in page["letters"]
            )
            offset = page["next"]

    def records(self, limit: int) -> Iterator[bytes]:
        if self._files:
            yield from (
                record for _, _, record in islice(files.waiting_records(self._files), limit)
            )
            return
        for one in self._get(f"/records?limit={min(limit, PAGE_RECORDS)}")["records"]:
            yield (
                base64.b64decode(one["record"])
                if one["encoding"] == "base64"
                else one["record"].encode()
            )


@commands.command()
def inspect(
    route: Name,
    url: Url = DEFAULT_URL,
    token: Token = "",
    config: ConfigFile = None,
    data_dir: DataDir = None,
    directory: Dir = None,
    json: Json = False,
    records: Annotated[
        int,
        typer.Option(
            "--records",
            "-n",
            help="Show this many waiting records (a broker answers 1000 at most).",
        ),
    ] = 0,
    dead: Annotated[bool, typer.Option("--dead", help="Show the dead letters instead.")] = False,
) -> None:
    """What a route holds, from its broker or its files: chunks, books, records, dead letters."""
    with _errors():
        inspected = Inspected(route, url, token, config, data_dir, directory)
        if dead or records:
            for line in inspected.dead_letters() if dead else inspected.records(records):
                sys.stdout.buffer.write(line + b"\n")
            return
        report = inspected.everything()
        if json:
            _print_json(report)
            return
        table = Table("chunk", "size", "blocks", "waiting", "first", "last", "damaged")
        for chunk in report["chunks"]:
            damaged = sum(place["bytes"] for place in chunk["damaged"])
            table.add_row(
                chunk["name"],
                _size(chunk["bytes"]),
                f"{chunk['blocks']:,}",
                f"{chunk['waiting']:,}",
                str(chunk.get("first", "")),
                str(chunk.get("last", "")),
                f"[red]{damaged} bytes[/red]" if damaged else "",
            )
        console = Console()
        console.print(table)
        books = report["accounting"]
        console.print(
            f"{report['waitingBatches']:,} batches with {report['waitingRecords']:,} records wait; "
            f"{books['delivered']:,} delivered, {books['deadLettered']:,} dead-lettered, "
            f"{sum(books['dropped'].values()):,} dropped; {report['deadLetters']:,} dead letters",
            highlight=False,
        )
        for problem in report["problems"]:
            console.print(problem, style="red")


@commands.command()
def verify(
    route: Name,
    url: Url = DEFAULT_URL,
    token: Token = "",
    config: ConfigFile = None,
    data_dir: DataDir = None,
    directory: Dir = None,
    json: Json = False,
) -> None:
    """Check every block of a route, by its broker or here. Exit code 1: something is wrong."""
    with _errors():
        report = Inspected(route, url, token, config, data_dir, directory).everything()
        problems, chunks = report["problems"], report["chunks"]
        if json:
            _print_json({"problems": problems, "accounting": report["accounting"]})
        else:
            blocks = sum(chunk["blocks"] for chunk in chunks)
            for problem in problems:
                print(problem)
            print(f"{blocks} blocks in {len(chunks)} chunks: {len(problems)} problems")
        if problems:
            raise typer.Exit(1)


@commands.command()
def repair(
    route: Name,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    directory: Dir = None,
    json: Json = False,
) -> None:
    """Set damaged places aside and book them as dropped. The broker must be stopped."""
    with _errors():
        report = asyncio.run(files.repair(_directory(route, config, data_dir, directory)))
        if json:
            _print_json(report)
            return
        lost = report["events"].get("lost_blocks", 0)
        print(f"{report['waitingBatches']} batches wait, {lost} damaged ones were set aside")
