"""A file system in memory that forgets, tears and fails like a real one at its worst.

It implements `penstock.io.fs.Fs`, so topics, buffers and send queues run on it unchanged:

- What was written but not synced is known as such. `crash(random, how)` is a power loss: a new file
  system with what survived. `how` is "drop" (only what was synced), "keep" (everything), "tear" (a
  prefix of each file's unsynced writes, the last one torn) or "reorder" (any of them in any order,
  torn, with zeros in the holes).
- Creations, renames and removals are durable after `sync_dir` of their directory. They survive a
  crash in order (file systems journal them), so a crash keeps some first part of the unsynced ones.
- `kill()` is the end of the process only: everything written is still there, synced or not.
- `fail(n, ...)` makes the n-th call from now fail: once, or that and every later one ("the disk is
  gone"). `calls` counts them, so a test loops n from 1 until a run makes fewer calls than n.
- After a failed `sync` the pages are gone for good although reads still show them, and the file
  takes no more writes, as Linux does it and `DiskFile` answers it.

    fs = FaultyFs()
    fs.fail(7, errno.ENOSPC)                     # once
    fs.fail(7, errno.EIO, forever=True)          # power off at the 7th call
    fs.fail(1, errno.EIO, only={"sync"})         # the next sync
    after = fs.crash(Random(seed), "reorder")
"""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Literal

from penstock.errors import StorageFailed
from penstock.io.fs import Bytes, storage_error

How = Literal["drop", "keep", "tear", "reorder"]
HOWS: tuple[How, ...] = ("drop", "keep", "tear", "reorder")
CHANGES = frozenset(
    {"append", "sync", "truncate", "open", "replace", "rename", "remove", "make_dir", "sync_dir"}
)


class Inode:
    """A file's contents: as they are, as they are on the platter, and the writes in between."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.durable = bytes(data)
        self.pending: list[
            tuple[int, bytes | None]
        ] = []  # (position, bytes), or (size, None) for a truncation
        self.modified = 1_700_000_000.0

    def write(self, position: int, data: bytes) -> None:
        _put(self.data, position, data)
        self.pending.append((position, data))

    def cut(self, size: int) -> None:
        _put(self.data, size, None)
        self.pending.append((size, None))

    def sync(self) -> None:
        for position, data in self.pending:
            whole = bytearray(self.durable)
            _put(whole, position, data)
            self.durable = bytes(whole)
        self.pending = []

    def lose(self) -> None:
        """A failed fsync: the pages count as clean and never reach the disk."""
        self.pending = []

    def survivor(self, random: Random, how: How) -> bytes:
        pending = list(self.pending)
        if how == "drop":
            pending = []
        elif how == "tear" and pending:
            keep = random.randint(0, len(pending))
            pending = [*pending[:keep], *(_torn(op, random) for op in pending[keep : keep + 1])]
        elif how == "reorder":
            pending = [
                op if random.random() < 0.6 else _torn(op, random)
                for op in pending
                if random.random() < 0.7
            ]
            random.shuffle(pending)
        data = bytearray(self.durable)
        for position, piece in pending:
            _put(data, position, piece)
        return bytes(data)


def _put(data: bytearray, position: int, piece: bytes | None) -> None:
    if piece is None:
        del data[position:]
        data.extend(bytes(position - len(data)))
    else:
        data.extend(bytes(max(0, position - len(data))))
        data[position : position + len(piece)] = piece


def _torn(op: tuple[int, bytes | None], random: Random) -> tuple[int, bytes | None]:
    position, piece = op
    if piece is None:
        return op
    cut = random.randint(0, len(piece))
    return (position, piece[:cut]) if random.random() < 0.7 else (position + cut, piece[cut:])


class FaultyFile:
    def __init__(self, fs: "FaultyFs", path: Path, inode: Inode, write: bool) -> None:
        self._fs, self.path, self._inode, self._write = fs, path, inode, write
        self.size = len(inode.data)
        self.poisoned: str | None = None
        self.closed = False

    def append(self, chunks: Sequence[Bytes]) -> int:
        assert self._write
        assert not self.closed
        if self.poisoned:
            raise StorageFailed(f"{self.path.name} takes no more writes: {self.poisoned}")
        start, data = self.size, b"".join(chunks)
        error = self._fs.failing("append")
        if error is not None:
            part = data[
                : len(data) // 2
            ]  # a short write, and then the error: cut back as DiskFile does
            self._inode.write(start, part)
            if self._fs.failing("truncate") is None:
                self._inode.cut(start)
            else:
                self.poisoned = "a torn write could not be cut off"
            raise storage_error(error, "writing", self.path)
        self._inode.write(start, data)
        self.size = start + len(data)
        return start

    def read_at(self, position: int, length: int) -> bytes:
        assert not self.closed
        self._fs.check("read_at", self.path)
        return bytes(self._inode.data[position : position + length])

    def forget(self, position: int, length: int) -> None:
        assert not self.closed

    def truncate(self, size: int) -> None:
        assert self._write
        self._fs.check("truncate", self.path)
        self._inode.cut(size)
        self.size = size

    def sync(self) -> None:
        assert not self.closed
        if self.poisoned:
            raise StorageFailed(f"{self.path.name} cannot be synced: {self.poisoned}")
        error = self._fs.failing("sync")
        if error is not None:
            self._inode.lose()
            self.poisoned = "an earlier fsync failed"
            raise storage_error(error, "syncing", self.path)
        self._inode.sync()

    def close(self) -> None:
        self.closed = True

    def fileno(self) -> int:
        raise AssertionError("there is no descriptor in memory: read_at is the way")


class FaultyFs:
    def __init__(self) -> None:
        self.files: dict[Path, Inode] = {}
        self.dirs: set[Path] = {Path("/")}
        self._durable_files: dict[Path, Inode] = {}
        self._durable_dirs: set[Path] = {Path("/")}
        self._journal: list[tuple[str, tuple[Path, ...], Inode | None]] = []
        self.free = 1 << 40
        self.calls = 0
        self._at = 0
        self._code = 0
        self._forever = False
        self._only: frozenset[str] | None = None
        self._then: Callable[[], None] | None = None
        self.failed = 0  # how many calls were made to fail

    # Faults

    def fail(
        self,
        n: int,
        code: int = errno.EIO,
        *,
        forever: bool = False,
        only: Iterable[str] | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Fail the n-th call from now (of the kinds in `only`; CHANGES: those that change the
        disk). `then` is called right after it, to set the next fault before any other call.
        """
        self._then = then
        self.calls, self._at, self._code, self._forever = 0, n, code, forever
        self._only = None if only is None else frozenset(only)

    def heal(self) -> None:
        self._at = 0

    def failing(self, kind: str) -> OSError | None:
        if self._only is not None and kind not in self._only:
            return None
        self.calls += 1
        if self._at and (self.calls == self._at or (self._forever and self.calls > self._at)):
            self.failed += 1
            error = OSError(self._code, os.strerror(self._code))
            if self._then is not None:
                self._then()
            return error
        return None

    def check(self, kind: str, path: Path) -> None:
        error = self.failing(kind)
        if error is not None:
            raise storage_error(error, kind, path)

    # The end of the machine, and of the process

    def crash(self, random: Random, how: How) -> "FaultyFs":
        """What a machine finds after losing power now."""
        kept = {"drop": 0, "keep": len(self._journal)}.get(how)
        kept = random.randint(0, len(self._journal)) if kept is None else kept
        files, dirs = dict(self._durable_files), set(self._durable_dirs)
        for op in self._journal[:kept]:
            _apply(files, dirs, op)
        after = FaultyFs()
        after.free = self.free
        after.dirs = after._durable_dirs = dirs
        after.files = {path: Inode(inode.survivor(random, how)) for path, inode in files.items()}
        after._durable_files, after._durable_dirs = dict(after.files), set(dirs)
        return after

    def kill(self) -> "FaultyFs":
        """What the next process finds after this one was killed: the machine went on."""
        self.heal()
        return self

    # Fs

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> FaultyFile:
        inode = self.files.get(path)
        if inode is None and not create:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        self.check("open", path)
        if inode is None:
            if path.parent not in self.dirs:
                raise storage_error(OSError(errno.ENOENT, "No such directory"), "opening", path)
            inode = Inode()
            self._do("link", (path,), inode)
        return FaultyFile(self, path, inode, write)

    def read(self, path: Path) -> bytes:
        inode = self.files.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        self.check("read", path)
        return bytes(inode.data)

    def replace(self, path: Path, data: Bytes, *, sync: bool = True) -> None:
        self.check("replace", path)
        inode = Inode()
        inode.write(0, bytes(data))
        beside = path.with_name(path.name + ".new")
        self._do("link", (beside,), inode)
        if sync:
            inode.sync()
        self._do("rename", (beside, path), None)
        if sync:
            self.sync_dir(path.parent)

    def rename(self, source: Path, target: Path) -> None:
        self.check("rename", source)
        if source not in self.files and source not in self.dirs:
            raise storage_error(OSError(errno.ENOENT, "No such file"), "renaming", source)
        self._do("rename", (source, target), None)

    def remove(self, path: Path) -> None:
        self.check("remove", path)
        if path in self.files:
            self._do("unlink", (path,), None)

    def remove_tree(self, path: Path) -> None:
        self.check("remove", path)
        self._do("rmtree", (path,), None)

    def make_dir(self, path: Path) -> None:
        self.check("make_dir", path)
        for parent in reversed([path, *path.parents]):
            if parent not in self.dirs:
                self._do("mkdir", (parent,), None)

    def list_dir(self, path: Path) -> list[str]:
        self.check("list_dir", path)
        inside = [*self.files, *self.dirs]
        return sorted(other.name for other in inside if other.parent == path and other != path)

    def exists(self, path: Path) -> bool:
        return path in self.files or path in self.dirs

    def is_dir(self, path: Path) -> bool:
        return path in self.dirs

    def size(self, path: Path) -> int:
        return len(self.files[path].data)

    def modified(self, path: Path) -> float:
        return self.files[path].modified

    def free_bytes(self, path: Path) -> int:
        return self.free

    def sync_dir(self, path: Path) -> None:
        self.check("sync_dir", path)
        last = max(
            (i for i, op in enumerate(self._journal) if any(p.parent == path for p in op[1])),
            default=-1,
        )
        for op in self._journal[: last + 1]:
            _apply(self._durable_files, self._durable_dirs, op)
        del self._journal[: last + 1]

    def _do(self, kind: str, paths: tuple[Path, ...], inode: Inode | None) -> None:
        op = (kind, paths, inode)
        _apply(self.files, self.dirs, op)
        self._journal.append(op)


def _apply(
    files: dict[Path, Inode], dirs: set[Path], op: tuple[str, tuple[Path, ...], Inode | None]
) -> None:
    kind, (path, *more), inode = op
    if kind == "link":
        assert inode is not None
        files[path] = inode
    elif kind == "unlink":
        files.pop(path, None)
    elif kind == "mkdir":
        dirs.add(path)
    elif kind == "rename" and path in files:
        files[more[0]] = files.pop(path)
    elif kind == "rename":
        target = more[0]
        for old in [other for other in files if path in other.parents]:
            files[target / old.relative_to(path)] = files.pop(old)
        for old in [other for other in dirs if other == path or path in other.parents]:
            dirs.discard(old)
            dirs.add(target / old.relative_to(path))
    elif kind == "rmtree":
        for old in [other for other in files if path in other.parents]:
            del files[old]
        dirs.difference_update([other for other in dirs if other == path or path in other.parents])
