"""Archive a topic or queue in a Delta table, each record exactly once.

    <root>/topics/<name>/_delta_log/...                the log, as Delta's protocol defines it
    <root>/topics/<name>/date=<day>/<file>.parquet     see `penstock.pipeline.lake.data_files`
    <root>/topics/<name>~2F1/...                       partition 1, a table of its own
    <root>/queues/<name>/...

Executors write data files; the driver commits them. The commit carries an application transaction
(Delta's `txn` action) whose id is the identity of the source (a topic's incarnation; database and
queue). Its version is the position after the commit (the next offset; the transaction horizon). So
the position and the files change atomically:

- A run reads one snapshot and commits on top of it. Delta refuses the commit if another one with
  the same transaction id followed the snapshot. Of two runs from one position, one adds its rows.
  The other raises `Superseded`, deletes the files it wrote and adds nothing.
- If a commit was refused for another reason (a concurrent compaction), the run commits again on top
  of the newer snapshot, provided that the position is the same.
- The answer to a successful commit can be lost. So a refused run looks for its own commit before it
  deletes its files (`penstock.pipeline.lake.commits`).
- A run that is killed before the commit leaves files that no commit names. `vacuum` removes them
  once they are older than its limit.

Compaction and expiry remove files in commits with a transaction id of their own. They never commit
on top of a version that they have not read (`max_commit_retries=0`): deltalake would let two such
commits remove the same files and keep the new files of both. Files of a snapshot stay on disk for
`vacuum`'s limit, so its readers are not disturbed. Log entries and records of removed files expire
after the same limit. A commit reads all of them, so this bounds its duration.

Directory names contain no `=` and no `%`: polars would read `=` as a partition, and deltalake `%`
as an escape.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from deltalake import DeltaTable, Field, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import RemoveAction
from pyarrow import fs

from penstock.errors import Conflict, NotFound, Unavailable
from penstock.pipeline.lake.commits import (
    KEPT_HOURS,
    MAX_ATTEMPTS,
    commit,
    is_committed,
    new_run,
    settings,
    sync_commits,
)
from penstock.pipeline.lake.data_files import KINDS, DataFile, Kind
from penstock.pipeline.lake.storage import Storage
from penstock.protocol.names import partition_label

MAINTENANCE = "penstock:maintenance"
MISFITS = "penstockMisfits"  # the commit's files that have records that do not fit the columns
KIND, NAME, IDENTITY = "penstock.kind", "penstock.name", "penstock.identity"
Properties = dict[str, str]


class Superseded(Conflict):
    """Another run archived the same rows first. This run added nothing."""


@dataclass
class Snapshot:
    """An immutable view of a table at one version."""

    delta: Any
    kind: Kind
    version: int
    identity: str
    position: int | None  # where the next run begins; None before the first commit
    properties: Properties = field(default_factory=dict)

    def columns(self) -> pa.Schema:
        """Return the columns of the data files: all but `date`."""
        schema = pa.schema(self.delta.schema())
        return pa.schema([one for one in schema if one.name != "date"])

    def files(self) -> list[DataFile]:
        rows = pa.table(self.delta.get_add_actions(flatten=True)).to_pylist()
        return [_data_file(row, self.kind) for row in rows]


def _data_file(row: dict[str, Any], kind: Kind) -> DataFile:
    times = [row.get(f"{end}.{kind.time}") for end in ("min", "max")]
    since, until = (None if at is None else round(at.timestamp() * 1_000_000) for at in times)
    first, last = row.get(f"min.{kind.key}"), row.get(f"max.{kind.key}")
    return DataFile(
        row["path"],
        row["size_bytes"],
        row["num_records"] or 0,
        str(row["partition.date"]),
        # files of other programs may have no statistics: assume the widest range
        *(0 if first is None else first, (1 << 63) - 1 if last is None else last),
        *(since, until),
    )


class LakeTable:
    """The table of one topic or queue below an archive's root."""

    def __init__(self, root: str, kind: str, name: str, options: Properties | None = None) -> None:
        self.root = Storage(root, options)
        self.kind, self.name = KINDS[kind], name
        self.storage = self.root.below(f"{kind}s", folder(name))

    def open(self) -> Snapshot | None:
        """Return the current snapshot, or None if the table does not exist."""
        if self.storage.local is not None and not (self.storage.local / "_delta_log").is_dir():
            return None
        try:
            delta = DeltaTable(self.storage.uri, storage_options=self.storage.options)
        except TableNotFoundError:
            return None
        properties = dict(delta.metadata().configuration)
        identity = properties.get(IDENTITY, "")
        position = delta.transaction_version(_application(identity))
        return Snapshot(delta, self.kind, delta.version(), identity, position, properties)

    def require(self) -> Snapshot:
        """Return the current snapshot. Raises NotFound if nothing has been archived."""
        snapshot = self.open()
        if snapshot is None or snapshot.position is None:
            raise NotFound(
                f"{self.root.uri} has no archive of {self.kind.name} {self.name!r}: create one "
                f"with `penstock pipeline run archive {self.root.uri} "
                f"--{self.kind.name} {self.name}`"
            )
        return snapshot

    def create(self, identity: str, properties: Properties | None = None) -> Snapshot:
        """Create the table, unless another run has just created it."""
        schema = pa.schema([*self.kind.columns, pa.field("date", pa.date32())])
        own = {KIND: self.kind.name, NAME: self.name, IDENTITY: identity}
        try:
            DeltaTable.create(
                self.storage.uri,
                schema=schema,
                mode="ignore",
                partition_by=["date"],
                name=self.name,
                configuration={**settings(KEPT_HOURS), **own, **(properties or {})},
                storage_options=self.storage.options,
                raise_if_key_not_exists=False,
            )
        except DeltaError:
            if self.open() is None:
                raise
        snapshot = self.open()
        assert snapshot is not None
        return snapshot

    def append(self, base: Snapshot, run: str, files: list[DataFile], position: int) -> Snapshot:
        """Add the files and move the position atomically. Raises Superseded if another run moved it
        since `base`. Retention may delete archived records, so missing files are never committed.
        """
        actions = [file.add_action(self.kind) for file in files]
        marks = [Transaction(_application(base.identity), position)]
        misfits = [file.path for file in files if file.misfits]
        notes = {MISFITS: misfits} if misfits else {}
        paths = [file.path for file in files]
        if missing := self.storage.missing(paths):
            raise Conflict(
                f"{self.storage.uri}/{missing[0]} was deleted before it was committed, perhaps by "
                "a vacuum with a limit shorter than this run: run it again"
            )
        snapshot = base
        for _ in range(MAX_ATTEMPTS):
            try:
                accepted = self._commit(snapshot, run, actions, marks, notes=notes)
            except OSError:
                # a local disk loses no answers; delete the files, since the disk may be full
                if self.storage.local is not None and not self._look_up(base, run)[1]:
                    self.storage.delete(paths)
                raise
            if accepted:
                return self._committed(base)
            newer, is_own = self._look_up(base, run)
            if is_own:
                return newer
            if newer.position != base.position:
                self.storage.delete(paths)
                raise self.superseded(newer)
            snapshot = newer
        raise Unavailable(f"{self.storage.uri} changes too often to be committed to: run it again")

    def superseded(self, newer: Snapshot) -> Superseded:
        return Superseded(
            f"another run archived {self.kind.name} {self.name!r} up to {newer.position} "
            "meanwhile; this one has added nothing"
        )

    def replace(
        self, base: Snapshot, run: str, old: list[DataFile], new: list[DataFile]
    ) -> Snapshot | None:
        """Replace files by others with the same rows, or drop them. If the table was changed since
        `base`, change nothing and return None.
        """
        now = int(time.time() * 1000)
        change = not new
        gone = [
            RemoveAction(file.path, change, now, file.bytes, {"date": file.date}) for file in old
        ]
        actions = [*(file.add_action(self.kind, data_change=False) for file in new), *gone]
        marks = [Transaction(MAINTENANCE, base.version + 1)]
        if self._commit(base, run, actions, marks, retries=0):
            return self._committed(base)
        newer, is_own = self._look_up(base, run)
        if is_own:
            return newer
        self.storage.delete([file.path for file in new])
        return None

    def mark(self, application: str, version: int) -> None:
        """Record the version of an application in the table."""
        for _ in range(MAX_ATTEMPTS):
            base = self.require()
            if (base.delta.transaction_version(application) or -1) >= version:
                return
            if self._commit(base, new_run(), [], [Transaction(application, version)]):
                return
        raise Unavailable(f"{self.storage.uri} changes too often to be committed to: run it again")

    def add_columns(self, base: Snapshot, columns: Iterable[pa.Field]) -> Snapshot:
        """Append columns, except those that another run has added meanwhile."""
        for _ in range(MAX_ATTEMPTS):
            names = base.columns().names
            missing = [Field.from_arrow(one) for one in columns if one.name not in names]
            if not missing:
                return base
            try:
                base.delta.alter.add_columns(missing)
            except DeltaError as error:
                newer = self.require_version(base)
                if newer.version == base.version:
                    raise Conflict(f"{self.storage.uri}: {error}") from error
            base = self.require_version(base)
        raise Unavailable(f"{self.storage.uri} changes too often: run it again")

    def keep_versions(self, snapshot: Snapshot, hours: int) -> Snapshot:
        """Keep the log entries that old versions need to stay readable for so many hours."""
        if settings(hours).items() <= snapshot.properties.items():
            return snapshot
        try:
            snapshot.delta.alter.set_table_properties(settings(hours))
        except CommitFailedError:
            pass  # another commit was faster: the next run tries again
        return self.require_version(snapshot)

    def vacuum(self, hours: int) -> int:
        """Delete files that no version of the last `hours` has. Return their number."""
        snapshot = self.open()
        if snapshot is None:
            return 0
        limits: dict[str, Any] = {
            "retention_hours": hours,
            "enforce_retention_duration": False,
            "full": True,
        }
        unused = set(snapshot.delta.vacuum(dry_run=True, **limits))
        if unused:
            snapshot.delta.vacuum(dry_run=False, **limits)
        return len(unused)

    def require_version(self, base: Snapshot) -> Snapshot:
        """Return the current snapshot. Raises Conflict if the table was deleted or recreated."""
        newer = self.open()
        if newer is None or newer.identity != base.identity or newer.version < base.version:
            raise Conflict(f"{self.storage.uri} was deleted or made again while it was written to")
        return newer

    def _commit(
        self, base: Snapshot, run: str, actions: list[Any], marks: list[Any], **how: Any
    ) -> bool:
        """Commit on top of `base`. Return whether the commit was accepted."""
        return commit(base.delta, run, actions, marks, **how)

    def _committed(self, base: Snapshot) -> Snapshot:
        """Make the last commits durable and return the snapshot after them."""
        snapshot = self.require_version(base)
        sync_commits(self.storage, base.version, snapshot.delta)
        return snapshot

    def _look_up(self, base: Snapshot, run: str) -> tuple[Snapshot, bool]:
        """Return the current snapshot, and whether `run` made a commit since `base`."""
        newer = self.require_version(base)
        return newer, is_committed(newer.delta, run, base.version)


def archived_partitions(root: str, topic: str) -> list[str]:
    """Return the labels of the topic's partitions that have a table; the topic if none has."""
    if "/" in topic:
        return [topic]
    selector = fs.FileSelector("topics", allow_not_found=True)
    names = {info.base_name for info in Storage(root).files().get_file_info(selector)}
    prefix = folder(f"{topic}/")
    numbers = [int(name.removeprefix(prefix)) for name in names if name.startswith(prefix)]
    if folder(topic) in names or not numbers:
        numbers.append(0)
    return [partition_label(topic, number) for number in sorted(numbers)]


def folder(name: str) -> str:
    return quote(name, safe="").replace("~", "%7E").replace("%", "~")


def _application(identity: str) -> str:
    return f"penstock:{identity}"
