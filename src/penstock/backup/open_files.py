"""Open the files of a running broker: those of a directory, and of a topic as of one moment.

A file that is renamed or deleted afterwards stays readable through its descriptor. A file that
grows is copied up to the size it had.

The snapshot of a topic opens all files and then lists the directory again. If no segment was
rolled, swapped or deleted in between, the open files belong together. Only the active segment
grows; it is cut after the last batch that is whole in all its files.
"""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.errors import Unavailable
from penstock.log.batches.index import SparseIndex
from penstock.log.batches.walk import whole_batches
from penstock.log.layout import (
    ARCHIVED,
    BATCH_SIZE,
    BATCH_TYPE,
    BATCHES,
    CHECKPOINT,
    DAMAGE,
    DATA,
    HEADER_SIZE,
    INCARNATION,
    INDEX,
    INDEX_SIZE,
    INDEX_TYPE,
    LIMITS,
    METADATA,
    POLICY,
    RECORD_HEADER,
    SWAP_PREFIX,
    TIER,
    Checkpoint,
    has_batches,
    label_of,
    pack_metadata,
    parse_metadata,
    parse_sealed,
)

OPEN_SECONDS = 10.0  # how long to try: a busy topic rolls or swaps segments in between
PAUSE_SECONDS = 0.01  # between attempts; a roll or swap takes a few fsyncs
READ_BYTES = 1 << 20
# Locks, and unfinished files, which recovery removes or writes again.
_NOT_COPIED = re.compile(r"lock|owner_.*\.lock|.*\.new|.*\.sock|restoring|trash")
SMALL = (CHECKPOINT, INCARNATION, ARCHIVED, POLICY, LIMITS, DAMAGE, TIER)


@dataclass(slots=True)
class OpenFile:
    fd: int
    size: int  # how much of it belongs to the snapshot

    def read_at(self, position: int, length: int) -> bytes:
        return os.pread(self.fd, length, position)

    def parts(self) -> Iterator[bytes]:
        position = 0
        while position < self.size:
            part = os.pread(self.fd, min(READ_BYTES, self.size - position), position)
            if not part:
                raise Unavailable("a file became shorter while it was copied")
            position += len(part)
            yield part


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


@dataclass(slots=True)
class TopicSnapshot:
    """A context manager that closes the files on exit."""

    name: str
    next_offset: int = 0
    small: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, OpenFile] = field(default_factory=dict)

    def __enter__(self) -> "TopicSnapshot":
        return self

    def __exit__(self, *failure: object) -> None:
        for file in self.files.values():
            os.close(file.fd)
        self.files = {}


def open_topic(directory: Path) -> TopicSnapshot | None:
    """Return a snapshot of the topic; None if the directory has no topic."""
    deadline = time.monotonic() + OPEN_SECONDS
    while time.monotonic() < deadline:
        snapshot = TopicSnapshot(label_of(directory))
        try:
            before = _shape(directory)
            if before is None:  # segments are being rolled or swapped
                time.sleep(PAUSE_SECONDS)
                continue
            if DATA not in before:
                return None
            for name in SMALL:  # before the segments, which then contain what these files refer to
                if (directory / name).exists():
                    snapshot.small[name] = (directory / name).read_bytes()
            metadata = 0
            if not has_batches(directory):
                metadata = parse_metadata((directory / METADATA).read_bytes()) or 0
            for name in before:
                fd = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
                snapshot.files[name] = OpenFile(fd, os.fstat(fd).st_size)
            if _shape(directory) == before:
                if has_batches(directory):
                    _cut_batches(snapshot)
                else:
                    _cut(snapshot, metadata)
                return snapshot
        except FileNotFoundError:
            if not directory.exists():
                snapshot.__exit__()
                return None
        snapshot.__exit__()
    raise Unavailable(
        f"the segments of topic {directory.name} change faster than they can be opened"
    )


def _shape(directory: Path) -> dict[str, int] | None:
    """Return names and inodes of the segment files; None during a swap or a roll."""
    shape = {}
    for entry in os.scandir(directory):
        if entry.name.startswith(SWAP_PREFIX) or entry.name.endswith((".new", ".swap")):
            return None
        if entry.name in (DATA, INDEX, BATCHES) or parse_sealed(entry.name) is not None:
            shape[entry.name] = entry.inode()
    return shape


def _cut(snapshot: TopicSnapshot, metadata: int) -> None:
    """Cut the active segment's files after the last batch that is whole in all of them."""
    data, index = snapshot.files[DATA], snapshot.files[INDEX]
    batches = snapshot.files.get(BATCHES)
    rows = np.frombuffer(_all_of(index), INDEX_TYPE, index.size // INDEX_SIZE)
    while rows.size and not _is_whole(data, rows[-1]):
        rows = rows[:-1]
    if batches is not None:
        sidecar = np.frombuffer(_all_of(batches), BATCH_TYPE, batches.size // BATCH_SIZE)
        ends = sidecar["first"] + sidecar["count"]
        last = int(rows["offset"][-1]) + 1 if rows.size else 0
        whole = sidecar[(sidecar["end"] <= data.size) & (ends <= last)]
        # Records that aiq appended have no row; in that case the index counts.
        if whole.size and whole.size < sidecar.size:
            rows = rows[rows["offset"] < ends[whole.size - 1]]
        elif not whole.size and sidecar.size:
            rows = rows[:0]
        batches.size = whole.size * BATCH_SIZE
    index.size = rows.size * INDEX_SIZE
    if rows.size:
        data.size = int(rows["position"][-1]) + _length(data, rows[-1])
        snapshot.next_offset = int(rows["offset"][-1]) + 1
    else:
        # The segment was just rolled, and the metadata may still be from before.
        data.size = 0
        snapshot.next_offset = max(metadata, _sealed_end(snapshot))
    snapshot.small[METADATA] = pack_metadata(snapshot.next_offset)


def _sealed_end(snapshot: TopicSnapshot) -> int:
    """Return the offset after the last record of the sealed segments; 0 when there are none."""
    for name in sorted(snapshot.files, reverse=True):
        if name == INDEX or not name.endswith(".idx"):
            continue
        content = _all_of(snapshot.files[name])
        sparse = SparseIndex.parse(content)
        if sparse is not None:
            return sparse.end
        rows = np.frombuffer(content, INDEX_TYPE, len(content) // INDEX_SIZE)
        if rows.size:
            return int(rows["offset"][-1]) + 1
    return 0


def _cut_batches(snapshot: TopicSnapshot) -> None:
    """Cut the active data after the last batch that is whole. Its index describes a part of it."""
    data, index = snapshot.files[DATA], SparseIndex.parse(_all_of(snapshot.files[INDEX]))
    if index is None:  # rolled since the last checkpoint, which may be of the segment before
        checkpoint = Checkpoint.parse(snapshot.small.get(CHECKPOINT, b""))
        base = checkpoint.base if checkpoint is not None else 0
        index = SparseIndex(max(base, _sealed_end(snapshot)))
    for batch in whole_batches(data, index.size, data.size, index.end):
        index.add(batch.stored())
    data.size, snapshot.next_offset = index.size, index.end


def _all_of(file: OpenFile) -> bytes:
    return b"".join(file.parts())


def _length(data: OpenFile, row: np.void) -> int:
    header = os.pread(data.fd, HEADER_SIZE, int(row["position"]))
    return HEADER_SIZE + int(RECORD_HEADER.unpack(header)[1])


def _is_whole(data: OpenFile, row: np.void) -> bool:
    position = int(row["position"])
    return position + HEADER_SIZE <= data.size and position + _length(data, row) <= data.size
