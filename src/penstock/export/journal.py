"""What happened to the blocks of a send queue: the append-only file `fastqueue.log`.

Chunks say what was accepted, the journal says what became of it. It is fixed-size entries, so
damage to one costs that one entry; it begins with a snapshot of everything before it, so it can be
cut short at any time by writing the snapshot anew (`restart`). An entry is in the page cache before
the settlement counts (SIGKILL loses none), and synced before the chunk it speaks of is deleted.
What a power failure takes from it is delivered once more, never lost.

    offset size (little-endian)
    0      4    CRC32C of bytes 4 to 31
    4      1    kind, see `Kind`
    5      1    reason: of a drop (`REASONS`), or which counter
    6      2    0
    8      8    sequence number
    16     8    value
    24     4    a
    28     4    b

    kind         sequence        value             a                   b
    DELIVERED    block           records through   records delivered   records dead-lettered
    DROPPED      first block     records through   records dropped     number of blocks
    ATTEMPT      block                             attempts so far
    REFUSED                                        records dropped before they got a sequence number
    COUNTER                      value             (reason: the counter's number)
    SPAN_START   first settled   records before    (snapshot: a settled range begins)
    SPAN_END     after the last  records through   (snapshot: ... and ends)
    POSITION                     source position
    ACCEPTED     next block      records accepted
"""

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import crc32c

from penstock.errors import StorageFailed, StorageFull
from penstock.log.fs import File, Fs

ENTRY = struct.Struct("<BBHQQII")
SIZE = ENTRY.size + 4  # 32
REASONS = ("", "oldest", "newest", "disk_full", "crash", "damaged", "purged", "source_gap")
STORAGE_ERRORS = (StorageFull, StorageFailed)
OLDEST, NEWEST, DISK_FULL, CRASH, DAMAGED, PURGED, SOURCE_GAP = range(1, 8)


class Kind(enum.IntEnum):
    DELIVERED = 1
    DROPPED = 2
    ATTEMPT = 3
    REFUSED = 4
    COUNTER = 5
    SPAN_START = 6
    SPAN_END = 7
    POSITION = 8
    ACCEPTED = 9


@dataclass(frozen=True, slots=True)
class Entry:
    kind: int
    reason: int = 0
    sequence: int = 0
    value: int = 0
    a: int = 0
    b: int = 0

    def encode(self) -> bytes:
        fields = ENTRY.pack(self.kind, self.reason, 0, self.sequence, self.value, self.a, self.b)
        return crc32c.crc32c(fields).to_bytes(4, "little") + fields


def decode(data: bytes) -> Iterator[Entry | None]:
    """Every entry in `data`; None for a damaged one. A torn last entry is left out."""
    for at in range(0, len(data) - SIZE + 1, SIZE):
        if int.from_bytes(data[at : at + 4], "little") != crc32c.crc32c(data[at + 4 : at + SIZE]):
            yield None
            continue
        kind, reason, _, sequence, value, a, b = ENTRY.unpack_from(data, at + 4)
        yield Entry(kind, reason, sequence, value, a, b)


class Journal:
    """Entries wait in `pending` until `flush` has them in the file; a failed flush keeps them.

    A restart has two steps, so that no settlement is ever only in memory: `prepare_restart` (slow,
    in a pool) writes and syncs the snapshot beside the journal while entries go on into the old
    file; `commit_restart` (fast, where entries are added) puts the entries since the snapshot
    behind it and renames it into place.
    """

    def __init__(self, fs: Fs, path: Path) -> None:
        self._fs = fs
        self._path = path
        self._next_path = path.with_name(path.name + ".next")
        self._file: File | None = None
        self._next: File | None = None
        self._pending: list[bytes] = []
        self._since: list[bytes] | None = None  # entries since the snapshot of a restart under way
        self.dirty = False  # something is written but not synced
        self.broken = False  # the file takes no more, or cannot be trusted: begin anew

    def load(self) -> list[Entry | None]:
        if not self._fs.exists(self._path):
            return []
        entries = list(decode(self._fs.read(self._path)))
        while entries and entries[-1] is None:  # a torn or never-written tail holds nothing
            entries.pop()
        return entries

    @property
    def size(self) -> int:
        return (self._file.size if self._file else 0) + len(self._pending) * SIZE

    @property
    def pending(self) -> int:
        return len(self._pending)

    def add(self, entry: Entry) -> None:
        data = entry.encode()
        self._pending.append(data)
        if self._since is not None:
            self._since.append(data)

    def flush(self) -> None:
        """Write what is pending; raises StorageFull or StorageFailed and keeps it."""
        if not self._pending:
            return
        if self._file is None:
            self._file = self._fs.open(self._path, create=True)
            if self._file.size % SIZE:
                self._file.truncate(self._file.size - self._file.size % SIZE)
        try:
            self._file.append(self._pending)
        except StorageFailed:
            self.broken = True
            raise
        self._pending = []
        self.dirty = True

    def sync(self) -> None:
        """Make what was flushed durable."""
        if self.dirty and self._file is not None:
            self.dirty = False
            try:
                self._file.sync()
            except STORAGE_ERRORS:
                self.dirty = self.broken = (
                    True  # its unsynced pages may be gone: only a restart helps
                )
                raise

    def begin_restart(self) -> None:
        """Call together with taking the snapshot: from here on entries are kept for its end."""
        self._since = []

    def prepare_restart(self, snapshot: list[Entry]) -> None:
        self._fs.remove(self._next_path)
        self._next = self._fs.open(self._next_path, create=True)
        self._next.append([entry.encode() for entry in snapshot])
        self._next.sync()

    def commit_restart(self) -> None:
        assert self._next is not None
        assert self._since is not None
        if self._since:
            self._next.append(self._since)
        self._fs.rename(self._next_path, self._path)
        if self._file is not None:
            self._file.close()
        self._file, self._next = self._next, None
        self._pending, self._since = [], None  # the snapshot and what followed it hold them all
        self.dirty, self.broken = True, False

    def abandon_restart(self) -> None:
        self._since = None
        if self._next is not None:
            self._next.close()
            self._next = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
