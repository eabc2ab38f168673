"""Convert archives of earlier releases, which have a manifest of their own, to tables.

No record is read: the files are linked into the table's directory (copied, in object stores) and
committed at once, with the position that the manifest has. Then the manifest goes, and the old
files. Killed before the commit, a run does all of it again; killed after it, the next run removes
what is left of the old archive. See `penstock.pipeline.jobs.archive_directory` for the old format.
"""

from penstock.errors import Conflict, InvalidRequest
from penstock.pipeline.jobs.archive_directory import (
    DirectoryEntry,
    Manifest,
    manifest_path,
    parse_manifest,
)
from penstock.pipeline.lake.commits import new_run
from penstock.pipeline.lake.data_files import DataFile
from penstock.pipeline.lake.table import LakeTable, Snapshot


def queue_identity(installation: int, id: int) -> str:
    """Return the identity of a queue: its database and its id."""
    return f"{installation}:{id}"


def old_archive(table: LakeTable) -> Manifest | None:
    """Return the manifest of an earlier release, if there is one."""
    path = manifest_path(table.kind.name, table.name)
    try:
        with table.root.files().open_input_file(path) as file:
            return parse_manifest(table.kind.name, table.name, file.read())
    except FileNotFoundError:
        return None


def convert(table: LakeTable) -> int:
    """Convert the old archive to a table and return its number of files. Safe to kill."""
    manifest = old_archive(table)
    if manifest is None:
        return 0
    identity, position = _old_position(manifest)
    snapshot = table.open() or table.create(identity)
    if snapshot.position is None:
        if snapshot.identity != identity:
            raise Conflict(f"{table.storage.uri} is the table of another {table.kind.name}")
        files = [_take_over(table, entry) for entry in manifest.files if entry.rows]
        table.append(snapshot, new_run(), files, position)
    _remove_old(table, manifest)
    return len(manifest.files)


def _old_position(manifest: Manifest) -> tuple[str, int]:
    """Return the source, and the position where the next run begins."""
    stored = manifest.position
    if manifest.kind == "topic":
        return stored["incarnation"], int(stored["next"])
    return queue_identity(stored["installation"], stored["id"]), int(stored["xid"])


def refuse_old(table: LakeTable, snapshot: Snapshot | None) -> None:
    """Raise if this is an archive of an earlier release, which must be converted first."""
    if (snapshot is None or snapshot.position is None) and old_archive(table) is not None:
        raise InvalidRequest(
            f"{table.root.uri} holds an archive of an earlier release. Run `penstock pipeline run "
            f"archive {table.root.uri} --{table.kind.name} {table.name} --convert` once: its files "
            "become a table as they are, and archiving resumes where it ended"
        )


def remove_old(table: LakeTable, snapshot: Snapshot | None) -> None:
    """Remove what a killed conversion left of the old archive."""
    if snapshot is not None and snapshot.position is not None:
        manifest = old_archive(table)
        if manifest is not None:
            _remove_old(table, manifest)


def _take_over(table: LakeTable, entry: DirectoryEntry) -> DataFile:
    day = next(part for part in entry.path.split("/") if part.startswith("date="))
    target = f"{day}/{entry.path.rpartition('/')[2]}"
    table.storage.copy(table.root, entry.path, target)
    table.storage.sync(target)
    return DataFile(
        *(target, entry.bytes, entry.rows, day.removeprefix("date=")), entry.first, entry.last
    )


def _remove_old(table: LakeTable, manifest: Manifest) -> None:
    """Remove the old files, then the manifest that lists them."""
    table.root.delete([entry.path for entry in manifest.files])
    table.root.delete([manifest_path(manifest.kind, manifest.name)])
