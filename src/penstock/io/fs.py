"""The interface for all disk access of the broker.

Topics, buffers and send queues never call `os` themselves; they get an `Fs`. `DISK` is a thin layer
over system calls. The tests' double keeps unsynced data in memory. At a simulated crash it drops,
tears or reorders that data. It can also fail the n-th call with EIO, ENOSPC, a short write or a
failed fsync. The contract:

- Writers append (`File.append`) or replace a whole small file (`Fs.replace`). Nothing seeks, so
  readers and writers never share a file position. Reads name their position (`File.read_at`).
- A file is durable after `File.sync`; its name (creation, rename, removal) only after `Fs.sync_dir`
  of its directory.
- After a failed `sync`, the unsynced pages may be lost although a retry would succeed. The `File`
  then refuses further appends and syncs; its owner must start a new file from what it has in
  memory.
- `append` writes all bytes, or cuts the file back and raises; `size` is always the true end. If the
  cut fails too, the file is poisoned and its owner must start a new one.

These calls block. Code on the event loop calls slow ones (sync, large reads) through a pool.
"""

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from penstock.errors import StorageError, StorageFailed, StorageFull

Bytes = bytes | bytearray | memoryview
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
IOV_MAX = 1024


class File(Protocol):
    """One open file: appended to at its end, read at any position."""

    path: Path
    size: int  # bytes in the file, including those not yet synced
    poisoned: str | None  # why the file refuses writes; None: it accepts them

    def append(self, chunks: Sequence[Bytes]) -> int:
        """Write all chunks at the end, all or nothing; return the position where they begin."""

    def read_at(self, position: int, length: int) -> bytes:
        """Read up to `length` bytes from `position`; fewer only at the end of the file."""

    def forget(self, position: int, length: int) -> None:
        """Drop these bytes from the page cache: the next read comes from the disk."""

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Make contents and size durable (fdatasync). After one failure it always fails."""

    def close(self) -> None: ...

    def fileno(self) -> int:
        """Return the descriptor for zero-copy reads (sendfile, mmap); never for writing."""


class Fs(Protocol):
    """A file system as the broker uses it."""

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> File: ...

    def read(self, path: Path) -> bytes: ...

    def replace(self, path: Path, data: Bytes, *, sync: bool = True) -> None:
        """Put a whole small file in place atomically and, with `sync`, durably."""

    def rename(self, source: Path, target: Path) -> None: ...

    def remove(self, path: Path) -> None:
        """Remove a file; a missing one is ignored, here and in `remove_tree`."""

    def remove_tree(self, path: Path) -> None: ...

    def make_dir(self, path: Path) -> None:
        """Create the directory and its parents, if they do not exist."""

    def list_dir(self, path: Path) -> list[str]:
        """Return the sorted names in the directory; empty if it does not exist."""

    def exists(self, path: Path) -> bool: ...

    def is_dir(self, path: Path) -> bool: ...

    def size(self, path: Path) -> int: ...

    def modified(self, path: Path) -> float: ...

    def free_bytes(self, path: Path) -> int: ...

    def sync_dir(self, path: Path) -> None:
        """Make creations, renames and removals in this directory durable."""


def raise_file_limit() -> int:
    """Raise the limit of open files to the maximum, and return it.

    The default limit suits programs that use `select`, which can handle no more than 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def storage_error(error: OSError, doing: str, path: Path) -> StorageError:
    """Convert a failed system call: `StorageFull` may pass, `StorageFailed` does not."""
    if error.errno in NO_SPACE:
        return StorageFull(f"no space left while {doing} {path.name}")
    return StorageFailed(f"{doing} {path.name} failed: {error.strerror}")


@contextlib.contextmanager
def _reported(doing: str, path: Path, *passed: type[OSError]) -> Iterator[None]:
    """Convert OSError to `StorageError`, except the classes in `passed`."""
    try:
        yield
    except passed:
        raise
    except OSError as error:
        raise storage_error(error, doing, path) from error


class DiskFile:
    """A `File` on the real disk."""

    __slots__ = ("_fd", "path", "poisoned", "size")

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.path = path
        self.poisoned: str | None = None
        self.size = os.fstat(fd).st_size

    def append(self, chunks: Sequence[Bytes]) -> int:
        if self.poisoned:
            raise StorageFailed(f"{self.path.name} accepts no more writes: {self.poisoned}")
        start = self.size
        total = sum(map(len, chunks))
        try:
            written = os.pwritev(self._fd, chunks, start) if len(chunks) <= IOV_MAX else 0
            if written < total:
                rest = memoryview(b"".join(chunks))
                while written < total:
                    written += os.pwrite(self._fd, rest[written:], start + written)
        except OSError as error:
            self._cut_back(start)
            raise storage_error(error, "writing", self.path) from error
        self.size = start + total
        return start

    def _cut_back(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            self.poisoned = f"a torn write could not be cut off ({error.strerror})"

    def read_at(self, position: int, length: int) -> bytes:
        try:
            data = os.pread(self._fd, length, position)
            if len(data) == length or position + len(data) >= self.size:
                return data
            parts = [data]
            got = len(data)
            while got < length:
                more = os.pread(self._fd, length - got, position + got)
                if not more:
                    break
                parts.append(more)
                got += len(more)
        except OSError as error:
            raise storage_error(error, "reading", self.path) from error
        return b"".join(parts)

    def forget(self, position: int, length: int) -> None:
        # an optional hint, not available on every system
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, position, length, os.POSIX_FADV_DONTNEED)

    def truncate(self, size: int) -> None:
        with _reported("cutting", self.path):
            os.ftruncate(self._fd, size)
        self.size = size

    def sync(self) -> None:
        if self.poisoned:
            raise StorageFailed(f"{self.path.name} cannot be synced: {self.poisoned}")
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self.poisoned = f"an earlier fsync failed ({error.strerror})"
            raise storage_error(error, "syncing", self.path) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # a transfer may outlive the cache that opened the file, so the last reference closes it
        self.close()

    def fileno(self) -> int:
        return self._fd


class Disk:
    """The real file system."""

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> DiskFile:
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        passed = () if create else (FileNotFoundError,)
        with _reported("opening", path, *passed):
            return DiskFile(os.open(path, flags, 0o640), path)

    def read(self, path: Path) -> bytes:
        with _reported("reading", path, FileNotFoundError):
            return path.read_bytes()

    def replace(self, path: Path, data: Bytes, *, sync: bool = True) -> None:
        beside = path.with_name(path.name + ".new")
        try:
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                if sync:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
            beside.rename(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise storage_error(error, "replacing", path) from error
        if sync:
            self.sync_dir(path.parent)

    def rename(self, source: Path, target: Path) -> None:
        with _reported("renaming", source):
            source.rename(target)

    def remove(self, path: Path) -> None:
        with _reported("removing", path):
            path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        with _reported("removing", path), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def make_dir(self, path: Path) -> None:
        with _reported("creating", path):
            path.mkdir(parents=True, exist_ok=True)

    def list_dir(self, path: Path) -> list[str]:
        with _reported("listing", path), contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(path))
        return []

    def exists(self, path: Path) -> bool:
        return path.exists()

    def is_dir(self, path: Path) -> bool:
        return path.is_dir()

    def size(self, path: Path) -> int:
        with _reported("measuring", path, FileNotFoundError):
            return path.stat().st_size

    def modified(self, path: Path) -> float:
        with _reported("measuring", path, FileNotFoundError):
            return path.stat().st_mtime

    def free_bytes(self, path: Path) -> int:
        with _reported("measuring", path):
            usage = os.statvfs(path)
        return usage.f_bavail * usage.f_frsize

    def sync_dir(self, path: Path) -> None:
        with _reported("syncing", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


DISK: Fs = Disk()
