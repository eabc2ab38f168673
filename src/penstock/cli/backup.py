"""`penstock backup` and `penstock restore`: all that a broker holds, to a directory or an object
store and back.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from penstock.backup.create import create
from penstock.backup.manifest import BackupManifest
from penstock.backup.restore import check, restore
from penstock.cli import BrokerConfig, app
from penstock.cli.doctor import BACKUP_RECORD
from penstock.object_store import ObjectStore

Place = Annotated[
    str,
    Parameter(help="Location of the backup: a directory, or an s3://, gs:// or az:// address."),
]
Programs = Annotated[
    Path | None,
    Parameter(
        help="Directory of pg_dump and pg_restore, for a server newer than the embedded PostgreSQL."
    ),
]


@app.command(name="backup")
def backup_command(
    place: Place,
    /,
    *,
    programs: Programs = None,
    tier: bool = False,
    given: BrokerConfig = BrokerConfig(),
) -> None:
    """Back up queues, topics, groups, routes and buffered pushes while the broker runs.

    Run it on the broker's machine, with the broker's configuration. The backup contains everything
    that was acknowledged before it started. It contains no passwords or tokens.

    Examples:

    `penstock backup /backups/monday`

    `penstock backup s3://bucket/penstock/monday`

    :param tier: Also copy records of topics that are only in object storage.
    """
    loaded = given.load()
    with _bar("backup") as bar:
        done = create(loaded, ObjectStore(place), programs=programs, progress=bar, tier=tier)
    with contextlib.suppress(OSError):  # a full disk: `doctor` would ask for a newer one
        (loaded.config.private_directory / BACKUP_RECORD).write_text(f"{place}\n")
    _report("backed up", done)


@app.command(name="restore")
def restore_command(
    place: Place,
    /,
    *,
    programs: Programs = None,
    only_check: Annotated[bool, Parameter(name="--check")] = False,
    given: BrokerConfig = BrokerConfig(),
) -> None:
    """Restore a backup into an empty data directory and database, and verify it.

    Examples:

    `penstock restore /backups/monday --data-dir /var/lib/penstock`

    `penstock restore s3://bucket/penstock/monday --check`

    :param only_check: Only read the backup and verify its checksums; restore nothing.
    """
    with _bar("check" if only_check else "restore") as bar:
        source = ObjectStore(place, create=False)
        if only_check:
            done = check(source, bar)
        else:
            done = restore(given.load().config, source, programs=programs, progress=bar)
    _report("sound:" if only_check else "restored", done)


def _report(what: str, done: BackupManifest) -> None:
    size = sum(file.size for file in done.files.values())
    print(
        f"{what} {len(done.topics)} topics and {'all' if done.database_schema else 'no'} queues, "
        f"{len(done.files)} files, {size:,} bytes; state of {done.began_at}"
    )
    for address in filter(None, (done.tier, done.shared_tier)):
        print(f"Older records of topics are not in the backup: they are read from {address}")


@contextmanager
def _bar(what: str) -> Iterator[Callable[[str, int, int], None]]:
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _name, _done, _total: None
        return
    with Progress(*columns, TextColumn("{task.description}"), console=console) as rows:
        task = rows.add_task("", total=None)
        yield lambda name, done, total: rows.update(
            task, description=name[-40:], completed=done, total=total
        )
