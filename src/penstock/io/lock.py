"""Lock a directory for one process with flock, which the kernel releases when the process dies.

The lock file is never removed: otherwise two processes could lock two files of the same name. Its
content, the owner's process id, only serves the error message.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from penstock.errors import Locked


class DirectoryLock:
    """A lock that is held from `acquire` to `release`, or to the end of the process."""

    def __init__(self, directory: Path, what: str = "directory") -> None:
        self.path = directory / "lock"
        self._what = what
        self._fd: int | None = None

    def acquire(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise Locked(
                f"the {self._what} {self.path.parent} is in use by process {owner or 'unknown'}; "
                "stop that process first, or use another directory"
            ) from None
        with contextlib.suppress(OSError):  # the lock also works on a full disk
            os.pwrite(fd, f"{os.getpid():<20}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> "DirectoryLock":
        self.acquire()
        return self

    def __exit__(self, *failure: object) -> None:
        self.release()
