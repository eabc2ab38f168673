"""Open the files of a directory that a running broker changes.

A file that is renamed or deleted afterwards stays readable through its descriptor. A file that
grows is copied up to the size it had.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.backup.topic_snapshot import OpenFile

# Locks, and unfinished files, which recovery removes or writes again.
_NOT_COPIED = re.compile(r"lock|owner_.*\.lock|.*\.new|.*\.sock|restoring|trash")


class LiveFiles:
    """The open files of a directory: a context manager that closes them on exit."""

    def __init__(self, directory: Path, skip: frozenset[str] = frozenset()) -> None:
        self._directory = directory
        self._skip = skip  # names, anywhere below
        self.files: dict[str, OpenFile] = {}  # by path below the directory
        self._inodes: dict[int, str] = {}
        self.extend()

    def extend(self) -> None:
        """Open new files, and include data appended to the others."""
        for file in self.files.values():
            file.size = os.fstat(file.fd).st_size
        while self._open_new():  # until a pass sees no renamed file
            pass

    def _open_new(self) -> bool:
        added = False
        for path in self._walk(self._directory):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                added = True  # perhaps renamed: scan again
                continue
            status = os.fstat(fd)
            name = path.relative_to(self._directory).as_posix()
            before = self._inodes.get(status.st_ino, "")
            if before == name:
                os.close(fd)
                continue
            for old in {before, name} & self.files.keys():  # renamed, or replaced
                os.close(self.files.pop(old).fd)
            self.files[name] = OpenFile(fd, status.st_size)
            self._inodes[status.st_ino] = name
            added = True
        return added

    def _walk(self, directory: Path) -> Iterator[Path]:
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.name in self._skip or _NOT_COPIED.fullmatch(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield Path(entry.path)

    def __enter__(self) -> "LiveFiles":
        return self

    def __exit__(self, *failure: object) -> None:
        for file in self.files.values():
            os.close(file.fd)
        self.files = {}
