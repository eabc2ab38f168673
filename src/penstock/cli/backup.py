"""`penstock backup` and `penstock restore`: all that a broker holds, to a directory or an object
store and back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from penstock.backup.create import create
from penstock.backup.manifest import Manifest
from penstock.backup.place import Place
from penstock.backup.restore import check, restore
from penstock.cli import app, errors_explained
from penstock.config import load
from penstock.config.load import Loaded, default_file, parse_settings
from penstock.errors import ConfigError

Address = Annotated[
    str, typer.Argument(metavar="PLACE", help="A directory, or s3://, gs:// or az://.")
]
Configuration = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The broker's YAML file; default: as for `serve`."),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", "-d", help="The broker's data directory.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any configuration key; may be repeated."),
]
Programs = Annotated[
    Path | None,
    typer.Option(help="Where pg_dump and pg_restore are, for a server newer than the embedded."),
]


@app.command("backup")
def backup_command(
    place: Address,
    config: Configuration = None,
    data_dir: DataDir = None,
    settings: Settings = None,
    programs: Programs = None,
) -> None:
    """Copy queues, topics, groups, routes and buffered pushes, while the broker runs.

    Run it on the broker's machine, with the broker's configuration. What was acknowledged before
    it began is in the backup. Passwords and tokens are not.

        penstock backup /backups/monday

        penstock backup s3://bucket/penstock/monday
    """
    with errors_explained(), _bar("backup") as bar:
        done = create(
            _load(config, data_dir, settings), Place(place), programs=programs, progress=bar
        )
    _say("backed up", done)


@app.command("restore")
def restore_command(
    place: Address,
    config: Configuration = None,
    data_dir: DataDir = None,
    settings: Settings = None,
    programs: Programs = None,
    only_check: Annotated[
        bool, typer.Option("--check", help="Only read the backup and compare its checksums.")
    ] = False,
) -> None:
    """Restore a backup into an empty data directory and database, and check it.

    penstock restore /backups/monday --data-dir /var/lib/penstock

    penstock restore s3://bucket/penstock/monday --check
    """
    with errors_explained(), _bar("check" if only_check else "restore") as bar:
        source = Place(place, create=False)
        if only_check:
            done = check(source, bar)
        else:
            loaded = _load(config, data_dir, settings)
            done = restore(loaded.config, source, programs=programs, progress=bar)
    _say("sound:" if only_check else "restored", done)


def _load(config: Path | None, data_dir: Path | None, settings: list[str] | None) -> Loaded:
    try:
        flags = {"data_directory": data_dir, **parse_settings(settings or [])}
        return load(config or default_file(), flags=flags)
    except ConfigError as error:
        typer.echo(f"penstock: the configuration is wrong:\n{error}", err=True)
        raise typer.Exit(2) from None


def _say(what: str, done: Manifest) -> None:
    size = sum(file.size for file in done.files.values())
    typer.echo(
        f"{what} {len(done.topics)} topics and {'all' if done.database_schema else 'no'} queues, "
        f"{len(done.files)} files, {size:,} bytes; state of {done.began_at}"
    )


@contextmanager
def _bar(what: str) -> Iterator["_Bar"]:
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as rows:
        yield _Bar(rows)


class _Bar:
    def __init__(self, rows: Progress) -> None:
        self._rows = rows
        self._task = rows.add_task("", total=None)

    def __call__(self, name: str, done: int, total: int) -> None:
        self._rows.update(self._task, description=name[-40:], completed=done, total=total)
