"""Names of buffer files, their owners, and their contents.

    <directory>/
      failover_<uuid7>.buf.tmp     being written
      failover_<uuid7>.buf         complete; deleted once all its events are committed
      qos0_<uuid7>.buf[.tmp]       the same for QoS 0
      failed/<file>                events that the database refused, and beside each file
      failed/<file>.error          the reasons: one JSON object per event
      quarantine/<file>.torn       a last line that a crash cut short (it was not acknowledged)
      quarantine/<file>.bad        lines that are not events (damage)
      owner_<tag>.lock             held by the process whose files end in <tag>
      maintenance.json             the maintenance modes that this process read last

Names sort by the time of creation. The last eight digits of the UUID are the owner's tag. The
process that holds the lock of a tag owns all files with it; only the owner writes, renames, replays
or deletes them. When a process dies, the kernel drops its lock, and another process takes the lock
and the files. So each file is replayed by one process at a time, and no file is left behind. A file
that was copied by hand has a tag that no process holds, and is adopted like any other.

Queen MQ's files are adopted too. Their names contain no time. They get names that sort before all
others, in the order in which Queen MQ replays them:

    failed/<file> without <file>.error    was not stored, because the database was down
    failover_processing.buf, qos0_...     was being replayed
    failover.buf, qos0.buf                was being written
"""

import contextlib
import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import UUID

from penstock.errors import StorageFailed
from penstock.io.fs import storage_error
from penstock.protocol.ids import uuid7

Kind = Literal["failover", "qos0"]
KINDS: tuple[Kind, ...] = ("failover", "qos0")
TITLES: dict[Kind, str] = {"failover": "Failover", "qos0": "QoS 0"}
FAILED, QUARANTINE = "failed", "quarantine"
_NAME = re.compile(r"(failover|qos0)(?:_([^/]+?))?\.buf(\.tmp)?")
_TAG = re.compile(r"[0-9a-f]{8}")
_TIME = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})(?![0-9A-Za-z])")
NOBODY = "00000000"  # the tag of files that another program named
_LOCK = re.compile(r"owner_([0-9a-f]{8})\.lock")
_MILLISECOND = 1 << 80  # in a UUID of version 7


@dataclass(frozen=True, slots=True)
class Name:
    """The parts of a buffer file's name."""

    kind: Kind
    id: str
    tag: str
    active: bool  # still .tmp

    def __str__(self) -> str:
        identifier = f"_{self.id}" if self.id else ""
        return f"{self.kind}{identifier}.buf{'.tmp' if self.active else ''}"

    @property
    def complete(self) -> "Name":
        return Name(self.kind, self.id, self.tag, active=False)

    @property
    def created_at(self) -> float:
        """Return the time in the name, in seconds since 1970; 0 if it contains none."""
        match = _TIME.match(self.id)
        return int("".join(match.groups()), 16) / 1000 if match else 0.0

    @property
    def replay_rank(self) -> int:
        """Return the order of files whose names contain no time."""
        return {"": 2, "processing": 1}.get(self.id, 0)


def parse(name: str) -> Name | None:
    match = _NAME.fullmatch(name)
    if not match:
        return None
    kind, identifier, active = match[1], match[2] or "", match[3]
    tag = identifier[-8:] if _TAG.fullmatch(identifier[-8:]) else NOBODY
    return Name("failover" if kind == "failover" else "qos0", identifier, tag, active is not None)


def lock_name(tag: str) -> str:
    return f"owner_{tag}.lock"


def tag_of_lock(name: str) -> str | None:
    match = _LOCK.fullmatch(name)
    return match.group(1) if match else None


class Namer:
    """Create names that sort after all earlier ones, even if the clock was set back."""

    def __init__(self) -> None:
        self.tag = NOBODY  # until this process is an owner
        self._last = 0

    def seen(self, name: Name) -> None:
        try:
            self._last = max(self._last, UUID(name.id).int)
        except ValueError:
            pass  # named by hand: it contains no time

    def next(self, kind: Kind) -> Name:
        value = uuid7().int >> 32 << 32 | int(self.tag, 16)
        if value <= self._last:
            value = (self._last + _MILLISECOND) >> 32 << 32 | int(self.tag, 16)
        self._last = value
        return Name(kind, str(UUID(int=value)), self.tag, active=True)


def name_in_time(kind: Kind, tag: str, milliseconds: int) -> Name:
    """Return a new name of a complete file that sorts by the given time."""
    value = milliseconds << 80 | uuid7().int & (_MILLISECOND - 1)
    return Name(kind, str(UUID(int=value >> 32 << 32 | int(tag, 16))), tag, active=False)


class OwnerLock:
    """The lock of a tag, from `take` to `release` or to the end of the process."""

    def __init__(self, directory: Path, tag: str) -> None:
        self.tag = tag
        self.path = directory / lock_name(tag)
        self._fd: int | None = None

    def take(self) -> bool:
        """Take the lock. Return False if a living process holds it."""
        while True:
            try:
                fd = _locked(self.path, os.O_CREAT)
            except OSError as error:
                raise storage_error(error, "opening", self.path) from error
            if fd is None:
                return False
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(fd).st_ino == self.path.stat().st_ino:
                    self._fd = fd
                    return True
            # the last owner removed it between our open and our lock: there may be a new file
            os.close(fd)

    def release(self, *, remove: bool) -> None:
        """Release the lock; `remove` the lock file when no file of the tag is left."""
        if self._fd is not None:
            if remove:
                self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None


def new_owner(directory: Path) -> OwnerLock:
    """Return the lock of a new tag, which no file has."""
    for _ in range(100):
        lock = OwnerLock(directory, os.urandom(4).hex())
        if any(lock.tag in name for name in os.listdir(directory)):
            continue
        if lock.take():
            return lock
    raise StorageFailed(f"no free owner tag in {directory}")


def is_live(directory: Path, tag: str) -> bool:
    """Return whether a living process owns the files of this tag."""
    try:
        fd = _locked(directory / lock_name(tag))
    except FileNotFoundError:
        return False
    if fd is not None:
        os.close(fd)
    return fd is None


def _locked(path: Path, flags: int = 0) -> int | None:
    """Open and lock the file; return None if another process has the lock."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
