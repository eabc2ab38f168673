"""The files of one table, on this disk or in an object store.

Driver and executors reach them in the same way, by `deltalake`'s own object store, so that one set
of options (endpoint, region, keys) serves the Delta log and the data files. On a disk the files are
written by pyarrow and made durable before a commit names them: an archived record may be deleted
from its topic.
"""

import os
from pathlib import Path
from typing import Any

from pyarrow import fs

from penstock.errors import InvalidRequest

SCHEMES = ("s3://", "s3a://", "gs://", "az://", "abfs://", "abfss://", "file://")
PASSED_ON = ("AWS_", "GOOGLE_", "AZURE_")  # of the driver's environment, to the executors


class Storage:
    """Files below the root of one table. Picklable."""

    def __init__(self, uri: str, options: dict[str, str] | None = None) -> None:
        uri = uri.removeprefix("file://").rstrip("/")
        if "://" in uri and not uri.startswith(SCHEMES):
            raise InvalidRequest(
                f"an archive is a directory or one of {', '.join(SCHEMES)}, not {uri!r}"
            )
        self.local = None if "://" in uri else Path(uri).absolute()
        if self.local and "%" in str(self.local):
            raise InvalidRequest(
                f"the archive's path must not contain '%', which tables take for an escape: {uri}"
            )
        self.uri = uri.replace("s3a://", "s3://", 1) if self.local is None else str(self.local)
        self.options = _environment() if self.local is None else {}
        self.options |= options or {}
        if self.uri.startswith("s3://"):
            self.options.setdefault("aws_conditional_put", "etag")
            if self.options.get("aws_endpoint_url", "").startswith("http://"):
                self.options.setdefault("aws_allow_http", "true")

    def below(self, *parts: str) -> "Storage":
        return Storage("/".join([self.uri, *parts]), self.options)

    def files(self) -> Any:
        """Return a file system of pyarrow whose root is this directory."""
        if self.local is not None:
            return fs.SubTreeFileSystem(str(self.local), fs.LocalFileSystem())
        from deltalake.fs import DeltaStorageHandler

        return fs.PyFileSystem(DeltaStorageHandler(self.uri, self.options))

    def spark_url(self, path: str) -> str:
        """Return the address of a file for Spark's own readers."""
        return f"{self.uri.replace('s3://', 's3a://', 1)}/{path}"

    def make_directory(self, path: str) -> None:
        """Create a directory; object stores have none."""
        if self.local is not None:
            (self.local / path).mkdir(parents=True, exist_ok=True)

    def sync(self, path: str) -> None:
        """Make a file and its name durable; object stores do it themselves."""
        if self.local is None:
            return
        file = self.local / path
        for part in (file, *file.parents):
            number = os.open(part, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)
            if part == self.local:
                return

    def delete(self, paths: list[str]) -> None:
        """Delete files; one that is not there is fine."""
        files = self.files()
        for path in paths:
            try:
                files.delete_file(path)
            except FileNotFoundError:
                continue

    def missing(self, paths: list[str]) -> list[str]:
        infos = self.files().get_file_info(paths)
        return [
            path for path, info in zip(paths, infos, strict=True) if info.type != fs.FileType.File
        ]

    def copy(self, source: "Storage", path: str, target: str) -> None:
        """Take over a file of another directory, by a link on a disk: it is not read."""
        self.make_directory(target.rpartition("/")[0])
        if self.local is not None:
            assert source.local is not None
            (self.local / target).unlink(missing_ok=True)
            os.link(source.local / path, self.local / target)
            return
        fs.copy_files(
            path, target, source_filesystem=source.files(), destination_filesystem=self.files()
        )


def _environment() -> dict[str, str]:
    """Return the object-store settings of the driver's environment, as options."""
    return {
        name.lower(): value
        for name, value in os.environ.items()
        if name.startswith(PASSED_ON) and value
    }
