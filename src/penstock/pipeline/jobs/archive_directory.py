"""Snapshots of `compact`, and archives of earlier releases: Parquet files, and a manifest that says
which of them count. Archives are tables now (`penstock.pipeline.lake`).

    <root>/_archive/<name>.json                 the manifest of one topic or queue, replaced as one
    <root>/topic=<name>/date=<day>/<run>-<n>.parquet
    <root>/_staging/<run>/...                   what a run is writing; ignored by every reader

A run writes its files aside, moves them in, then replaces the manifest, which holds both the new
position and the list of files. That one replacement is the moment at which the run counts: files
that are not listed are left over from a run that was killed, and the next one removes them. So
nothing is ever in the archive twice and nothing is missing, whenever the process dies. Any file
system of pyarrow will do (a path, s3://, gs://, hdfs://).
"""

import json
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote

from pyarrow import fs, parquet

from penstock.errors import Damaged, NotFound
from penstock.pipeline.lake.data_files import bounds
from penstock.protocol.names import is_relative_path


@dataclass
class DirectoryEntry:
    path: str  # below the root
    rows: int
    bytes: int
    first: int
    last: int


@dataclass
class Manifest:
    """The files archived of one topic or queue, and where the next run begins."""

    # topic or queue, or compacted: a snapshot of a topic (see `penstock.pipeline.jobs.compact`)
    kind: str
    name: str
    # Where the next run begins, in the source's own terms.
    position: dict[str, Any] = field(default_factory=dict)
    files: list[DirectoryEntry] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(entry.rows for entry in self.files)


class Lake:
    """An archive directory on any file system of pyarrow."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._fs: Any = fs.LocalFileSystem()
        self._base: str = self.root
        if "://" in root:
            self._fs, self._base = fs.FileSystem.from_uri(self.root)

    def url(self, path: str) -> str:
        """Return the address for Spark of a path below the root."""
        return f"{self.root}/{path}"

    def folder(self, kind: str, name: str) -> str:
        """Return the directory of a topic's or queue's files, below the root."""
        return f"{kind}={quote(name, safe='')}"

    def manifest(self, kind: str, name: str) -> Manifest:
        """Return the manifest of a topic or queue; an empty one if it is not archived."""
        try:
            with self._fs.open_input_stream(f"{self._base}/{manifest_path(kind, name)}") as file:
                return parse_manifest(kind, name, file.read())
        except FileNotFoundError:
            return Manifest(kind, name)

    def names(self) -> list[tuple[str, str]]:
        selector = fs.FileSelector(f"{self._base}/_archive", allow_not_found=True)
        names = []
        for info in self._fs.get_file_info(selector):
            if info.base_name.endswith(".json"):
                with self._fs.open_input_stream(info.path) as file:
                    one = json.loads(file.read())
                names.append((one["kind"], one["name"]))
        return sorted(names)

    def require(self, kind: str, name: str) -> Manifest:
        """Return an existing manifest. Raises NotFound, which names what the archive has."""
        manifest = self.manifest(kind, name)
        if not manifest.files:
            names = ", ".join(f"{k} {n}" for k, n in self.names()) or "nothing"
            raise NotFound(f"{self.root} does not contain {kind} {name!r}; it has {names}")
        return manifest

    def replace(self, manifest: Manifest) -> None:
        """Replace the manifest atomically: write a new file, then rename it over the old one."""
        path = f"{self._base}/{manifest_path(manifest.kind, manifest.name)}"
        self._fs.create_dir(f"{self._base}/_archive", recursive=True)
        beside = f"{path}.{uuid.uuid4().hex}"
        with self._fs.open_output_stream(beside) as file:
            file.write(json.dumps(asdict(manifest)).encode())
        self._fs.move(beside, path)

    def staging(self) -> tuple[str, str]:
        """Create a directory for a run. Returns its name, and its address for Spark."""
        run = uuid.uuid4().hex
        return run, self.url(f"_staging/{run}")

    def take_in(self, run: str, kind: str, name: str) -> list[str]:
        """Move a run's files into place. Returns their paths below the root."""
        moved: list[str] = []
        source = f"{self._base}/_staging/{run}"
        folder = self.folder(kind, name)
        self._fs.create_dir(f"{self._base}/{folder}", recursive=True)
        for info in self._files(source):
            if info.base_name.endswith(".parquet"):
                path = f"{folder}/{run}-{len(moved)}.parquet"
                self._fs.move(info.path, f"{self._base}/{path}")
                moved.append(path)
        if self._fs.get_file_info(source).type == fs.FileType.Directory:
            self._fs.delete_dir(source)
        return moved

    def remove_strays(self, manifest: Manifest) -> int:
        """Delete the files of a killed run, which the manifest does not list; how many."""
        listed = {entry.path for entry in manifest.files}
        folder = self.folder(manifest.kind, manifest.name)
        strays = 0
        for info in self._files(f"{self._base}/{folder}"):
            if info.path.removeprefix(self._base).lstrip("/") not in listed:
                self._fs.delete_file(info.path)
                strays += 1
        return strays

    def _files(self, directory: str) -> list[Any]:
        """Return the files at any depth; none if the directory does not exist."""
        selector = fs.FileSelector(directory, recursive=True, allow_not_found=True)
        infos = self._fs.get_file_info(selector)
        return [info for info in infos if info.type == fs.FileType.File]

    def describe(self, path: str, column: str) -> DirectoryEntry:
        """Return rows, size and the range of a column from the file's footer."""
        with self._fs.open_input_file(f"{self._base}/{path}") as file:
            footer = parquet.read_metadata(file)
            size = file.size()
        if not footer.num_rows:
            return DirectoryEntry(path, 0, size, 0, -1)
        return DirectoryEntry(path, footer.num_rows, size, *bounds(footer, column))


def manifest_path(kind: str, name: str) -> str:
    return f"_archive/{kind}-{quote(name, safe='')}.json"


def parse_manifest(kind: str, name: str, stored: bytes) -> Manifest:
    """Decode a stored manifest. Raises Damaged if it is not valid."""
    try:
        fields = json.loads(stored)
        files = [DirectoryEntry(**entry) for entry in fields["files"]]
        if outside := [entry.path for entry in files if not is_relative_path(entry.path)]:
            raise ValueError(f"it names a file that is not below it: {outside[0]!r}")
        return Manifest(kind, name, fields["position"], files)
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{manifest_path(kind, name)} is damaged: {error!r}") from error
