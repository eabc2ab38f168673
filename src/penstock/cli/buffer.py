"""`penstock buffer`: show, replay and delete the events that wait on disk for the database.

`status` and `replay` call a running broker (`--url`). `list` and `purge` read a directory
(`--dir`). With `--database-url`, `replay` also reads a directory and needs no broker. Files of a
running broker are never changed. Exit codes: 0 done, 1 refused or events are left, 2 wrong usage.
"""

import asyncio
import os
import sys
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from penstock.buffer import Buffer, files
from penstock.buffer.events import count_events, windows
from penstock.cli import (
    BrokerApi,
    LimitOrAll,
    WatchApi,
    WatchOutput,
    Yes,
    command_group,
    confirm,
    say,
    usage,
)
from penstock.cli.tables import Column, Facts, TableBlock, View, count, duration, rate, size, table
from penstock.config import load, schema
from penstock.config.load import default_file
from penstock.contract.broker import BufferStatus
from penstock.database import Database
from penstock.errors import PenstockError, Unavailable
from penstock.io.fs import DISK
from penstock.metrics import Metrics
from penstock.queues.engine import Queues
from penstock.queues.schema import SCHEMA

commands = command_group("buffer")
STATUS = "/api/v1/status/buffers"

POLL_SECONDS = 0.1
Directory = Annotated[
    Path | None,
    Parameter(
        name="--dir",
        env_var="FILE_BUFFER_DIR",
        help="The buffer directory; default: penstock-data/.penstock/buffers.",
    ),
]


@dataclass(slots=True)
class ListedBufferFile:
    name: files.Name
    path: Path
    place: str  # "", failed or quarantine
    live: bool

    @property
    def state(self) -> str:
        if self.place:
            return self.place
        return "being written" if self.name.active and self.live else "waiting"


@commands.command
def status(*, api: WatchApi = WatchApi()) -> View:
    """Show what is buffered, and the progress of the replay.

    Example: `penstock buffer status --json | jq .pending`
    """
    report = api.get(STATUS)
    kinds = [
        report[kind]
        | {"kind": kind, "age": report[kind]["oldestAge"] if report[kind]["files"] else None}
        for kind in ("failover", "qos0")
    ]
    return View(
        report,
        [
            Facts(
                (
                    Column("database", lambda one: "up" if one["dbHealthy"] else "down"),
                    Column("maintenance", lambda one: "on" if one["maintenanceMode"] else "off"),
                    Column("pops stopped", "popMaintenanceMode"),
                    Column("replay/s", "replayRate", rate),
                    Column("partitions that wait", "heldPartitions", count),
                    Column("failed events", "failed", count),
                    Column("lines in quarantine", "quarantined", count),
                ),
                report,
            ),
            TableBlock(
                (
                    Column("kind"),
                    Column("waiting", "pending", count),
                    Column("files", format=count),
                    Column("size", "bytes", size),
                    Column("oldest", "age", duration),
                    Column("replayed", "flushed", count),
                ),
                kinds,
            ),
        ],
    )


@commands.command(name="list")
def list_files(
    file: str = "",
    /,
    *,
    directory: Directory = None,
    limit: LimitOrAll = 20,
    output: WatchOutput = WatchOutput(),  # noqa: ARG001  # `run` reads it
) -> View:
    """List the buffer files in a directory, oldest first; or print the events of one, one JSON
    object per line. If the database rejected them, the reasons go to standard error.

    Examples:

    `penstock buffer list --dir /var/lib/penstock/buffers`

    `penstock buffer list failover_019a0c11-7fe8-7000-8000-00001a2b3c4d.buf -n 0 | jq .payload`

    :param file: Path of a buffer file, or its name in the buffer directory.
    :param limit: Most events of a file to print; 0 = all.
    """
    if file:
        _print_events(_path_of(file, _directory(directory)), limit)
        raise SystemExit(0)
    rows = [
        {
            "file": str(file.path),
            "kind": file.name.kind,
            "state": file.state,
            "owner": "live" if file.live else "dead",
            "events": count_events(DISK, file.path),
            "bytes": file.path.stat().st_size,
            "age": round(time.time() - (file.name.created_at or file.path.stat().st_mtime), 1),
        }
        for file in _find(_directory(directory))
    ]
    return table(
        rows,
        Column("file"),
        Column("state"),
        Column("owner"),
        Column("events", format=count),
        Column("size", "bytes", size),
        Column("age", format=duration),
        Column("kind", optional=True),
        empty="no buffer files",
    )


def _print_events(path: Path, limit: int) -> None:
    shown = total = 0
    for window in windows(DISK, path):
        total += len(window.items)
        for item in window.items:
            if limit and shown >= limit:
                break
            shown += 1
            event = {
                "queue": item.queue,
                "partition": item.partition,
                "payload": msgspec.Raw(item.payload),
                "transactionId": item.transaction_id,
                "traceId": item.trace_id,
            }
            if item.key_id is not None:
                event |= {"payload": b64encode(item.payload).decode(), "sealed": item.key_id}
            sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        for bad in window.bad:
            say(f"not an event: {bad[:200]!r}")
        if window.torn:
            say(f"cut short by a crash: {window.torn[:200]!r}")
    sys.stdout.flush()
    reasons = path.with_name(path.name + ".error")
    if reasons.exists():
        for line in reasons.read_text().splitlines()[: limit or None]:
            say(line)
    if shown < total:
        say(f"{total - shown:,} more; -n 0 shows all")


@commands.command
def replay(
    *,
    failed: bool = False,
    directory: Directory = None,
    database_url: str = "",
    api: BrokerApi = BrokerApi(),
) -> None:
    """Write the buffered events to the database now, and show the progress.

    Examples:

    `penstock buffer replay`

    `penstock buffer replay --dir /backup/buffers --database-url postgresql://me@db/app`

    `penstock buffer replay --failed`

    :param failed: Retry the events in failed/, which the database rejected.
    :param database_url: Write the files in --dir to this database, without a broker.
    """
    if database_url:
        remaining = asyncio.run(_replay_here(_directory(directory), database_url, failed=failed))
    elif failed:
        remaining = api.post("/api/v1/buffers/retry-failed")["failed"]
    else:
        remaining = _replay_there(api)
    if remaining:
        raise PenstockError(f"{remaining:,} events are left{' in failed/' if failed else ''}")


@commands.command
def purge(
    *names: str,
    failed: bool = False,
    quarantine: bool = False,
    directory: Directory = None,
    yes: Yes = False,
) -> None:
    """Permanently delete buffer files and their events. Fails for files of a running broker.

    Example: `penstock buffer purge --failed --yes`

    :param names: Files to delete.
    :param failed: Delete all files in failed/.
    :param quarantine: Delete all files in quarantine/.
    """
    place = _directory(directory)
    paths = [file.path for file in _find(place) if failed and file.place == files.FAILED]
    paths += [_path_of(name, place) for name in names]
    if quarantine and (place / files.QUARANTINE).is_dir():
        paths += sorted((place / files.QUARANTINE).iterdir())
    if not paths:
        raise usage("nothing to delete; name files, or give --failed or --quarantine")
    owned = [
        path.name
        for path in paths
        if (name := files.parse(path.name)) and files.is_live(place, name.tag)
    ]
    if owned:
        raise PenstockError(f"a running broker owns {', '.join(owned)}; stop it first")
    events = sum(count_events(DISK, path) for path in paths)
    confirm(f"Delete {len(paths):,} files with {events:,} events?", yes)
    for path in paths:
        DISK.remove(path)
        DISK.remove(path.with_name(path.name + ".error"))
    say(f"deleted {len(paths):,} files with {events:,} events")


def _directory(option: Path | None) -> Path:
    directory = option or Path("penstock-data") / ".penstock" / "buffers"
    if not directory.is_dir():
        raise usage(f"the buffer directory {directory} does not exist; name it with --dir")
    return directory


def _find(directory: Path) -> list[ListedBufferFile]:
    stored = [
        ListedBufferFile(name, directory / place / text, place, files.is_live(directory, name.tag))
        for place in ("", files.FAILED)
        for text in DISK.list_dir(directory / place)
        if (name := files.parse(text))
    ]
    return sorted(stored, key=lambda file: (file.place, file.name.id))


def _path_of(name: str, directory: Path) -> Path:
    for place in (Path(), directory, directory / files.FAILED, directory / files.QUARANTINE):
        if (place / name).is_file():
            return place / name
    raise PenstockError(f"the buffer file {name} does not exist")


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


def _replay_there(api: BrokerApi) -> int:
    with api.caller() as caller, _bar() as bar:

        def status(method: str, path: str) -> BufferStatus:
            return msgspec.json.decode(caller.call(method, path), type=BufferStatus)

        report = status("POST", "/api/v1/buffers/replay")
        task = bar.add_task("replay", total=report.pending)
        while report.pending and report.db_healthy and not report.maintenance_mode:
            time.sleep(POLL_SECONDS)
            report = status("GET", STATUS)
            total = max(bar.tasks[0].total or 0, report.pending)
            bar.update(task, total=total, completed=total - report.pending)
    if not report.db_healthy:
        raise Unavailable("the broker's database is down; replay resumes by itself when it is back")
    if report.maintenance_mode:
        raise Unavailable(
            "maintenance mode is on: the buffer keeps everything until it is switched off"
        )
    return report.pending


async def _replay_here(directory: Path, database_url: str, *, failed: bool = False) -> int:
    """Adopt the files in this process and replay them, without a broker."""
    metrics = Metrics()
    database = Database(schema.DatabaseSettings(url=database_url), directory, metrics, SCHEMA)
    # encrypted events need the keys of the configuration
    queues = Queues(database, load(default_file()).config.queues, metrics)
    settings = schema.BufferSettings(max_batch=1000, replay_pause=0.0)
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count() or 1))
        buffer = Buffer(queues, database, settings, directory, DISK, pool, metrics)
        await database.start()
        stack.push_async_callback(database.stop)
        if not database.healthy:
            raise Unavailable(f"the database cannot be used: {database.problem}")
        await queues.start()
        stack.push_async_callback(queues.stop)
        starting = asyncio.create_task(buffer.start())
        with _bar() as bar:
            while not starting.done():
                await asyncio.wait([starting], timeout=POLL_SECONDS)
                if now := buffer.recovering:
                    tasks = {task.description: task.id for task in bar.tasks}
                    if now.what not in tasks:
                        tasks[now.what] = bar.add_task(now.what, total=now.total)
                    bar.update(tasks[now.what], completed=now.done)
        await starting
        if failed:
            await buffer.retry_failed(now=True)
        remaining = buffer.failed.events if failed else buffer.status.pending
        done = int(sum(buffer.replay.flushed.value(kind) for kind in files.KINDS))
        await buffer.stop()
    others = [file for file in _find(directory) if file.live]
    if others:
        say(f"penstock: {len(others)} files belong to a running broker and were not changed")
    say(f"{done:,} events are in the database now")
    return remaining
