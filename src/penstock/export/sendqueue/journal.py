"""The outcomes of the blocks of a send queue: entries, the books that sum them up, and their file.

A block is completed when it is delivered, dead-lettered or dropped. Each of these is a
`BlockEntry`. Only entries change the `Books`, live and at recovery alike, so a restart results in
the same numbers. The `Journal` is the append-only file `fastqueue.log` of entries.

    accepted = delivered + dead-lettered + dropped{reason} + queued

is always true, in records, since `queued` is computed as the difference. Applying an entry twice
has no effect. Entries have a fixed size, so damage is limited to single entries. The file begins
with a snapshot of all earlier entries, so it can be shortened at any time by a new snapshot
(`restart`). An entry is in the page cache before the completion counts, so SIGKILL loses none. It
is synced before its chunk is deleted; if a power failure loses it, the block is delivered again.

    offset size (little-endian)
    0      4    CRC32C of bytes 4 to 31
    4      1    kind, see `EntryKind`
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
    REFUSED                                        records dropped     number of blocks
    COUNTER                      value             (reason: the counter's number)
    SPAN_START   first completed records before    (snapshot: a completed range begins)
    SPAN_END     after the last  records through   (snapshot: ... and ends)
    POSITION                     source position
    ACCEPTED     next block      records accepted

Refused records are dropped before they get a sequence number. Records that a source has lost are in
no block.
"""

import enum
import struct
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import crc32c

from penstock.contract.routes import Accounting
from penstock.errors import StorageError, StorageFailed
from penstock.io.fs import File, Fs

ENTRY = struct.Struct("<BBHQQII")
SIZE = ENTRY.size + 4  # 32
JOURNAL = "fastqueue.log"
REASONS = ("", "oldest", "newest", "disk_full", "crash", "damaged", "purged", "source_gap")
OLDEST, NEWEST, DISK_FULL, CRASH, DAMAGED, PURGED, SOURCE_GAP = range(1, 8)
LOSSES = (CRASH, DAMAGED, SOURCE_GAP)  # that no policy or person decided
# The counters in a snapshot, by their numbers; a drop's is 16 + reason.
_COUNTERS, _DROPPED = ("delivered", "dead", "refused"), 16


class EntryKind(enum.IntEnum):
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
class BlockEntry:
    kind: int
    reason: int = 0
    sequence: int = 0
    value: int = 0
    a: int = 0
    b: int = 0

    def encode(self) -> bytes:
        fields = ENTRY.pack(self.kind, self.reason, 0, self.sequence, self.value, self.a, self.b)
        return crc32c.crc32c(fields).to_bytes(4, "little") + fields


def decode(data: bytes) -> Iterator[BlockEntry | None]:
    """Yield every entry in `data`; None for a damaged one. A torn last entry is skipped."""
    for at in range(0, len(data) - SIZE + 1, SIZE):
        if int.from_bytes(data[at : at + 4], "little") != crc32c.crc32c(data[at + 4 : at + SIZE]):
            yield None
            continue
        kind, reason, _, sequence, value, a, b = ENTRY.unpack_from(data, at + 4)
        yield BlockEntry(kind, reason, sequence, value, a, b)


# First and next sequence number, records accepted before the first and through the last block.
Span = tuple[int, int, int, int]
_start = itemgetter(0)


class Completed:
    """The sequence numbers of completed blocks: disjoint ranges [start, end), in order.

    Workers complete blocks out of order, and `newest_first` begins with the newest, so one position
    is not enough. Adjacent ranges are merged. A range also has the number of records that were
    accepted before its first and through its last block. So the records between two ranges can be
    counted, even when their blocks are lost.
    """

    __slots__ = ("spans", "total")

    def __init__(self) -> None:
        self.total = 0  # sequence numbers in all ranges
        self.spans: list[Span] = []

    def add(self, start: int, end: int, before: int, through: int) -> bool:
        """Add [start, end). Return False if it is present. Ranges never overlap partially."""
        spans, at = self.spans, self._at(start)
        if at >= 0 and spans[at][1] >= end:
            return False
        self.total += end - start
        low = high = at + 1  # of the ranges that it replaces
        if at >= 0 and spans[at][1] == start:
            start, before, low = spans[at][0], spans[at][2], at
        if high < len(spans) and spans[high][0] == end:
            end, through, high = spans[high][1], spans[high][3], high + 1
        spans[low:high] = [(start, end, before, through)]
        return True

    def _at(self, sequence: int) -> int:
        """Return the index of the last range that begins at or before `sequence`, or -1."""
        return bisect_right(self.spans, sequence, key=_start) - 1

    def __contains__(self, sequence: int) -> bool:
        return self.covers(sequence, sequence + 1)

    def covers(self, start: int, end: int) -> bool:
        at = self._at(start)
        return at >= 0 and end <= self.spans[at][1]

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of [start, end) that are not completed."""
        gaps = []
        for first, stop, *_ in islice(self.spans, max(0, self._at(start)), None):
            if start >= end or first >= end:
                break
            if first > start:
                gaps.append((start, first))
            start = max(start, stop)
        if start < end:
            gaps.append((start, end))
        return gaps

    def records_at(self, sequence: int) -> int | None:
        """Return the records accepted before the block `sequence`, if a range begins or ends
        there.
        """
        at = self._at(sequence)
        if at >= 0 and self.spans[at][0] == sequence:
            return self.spans[at][2]
        return self.spans[at][3] if at >= 0 and self.spans[at][1] == sequence else None


def _ignore(*_: object) -> None:
    pass


@dataclass(slots=True)
class Books:
    """The accepted records and their outcomes, in memory."""

    completed: Completed = field(default_factory=Completed)
    attempts: dict[int, int] = field(default_factory=dict)  # of blocks that are not completed
    next_sequence: int = 1
    numbered: int = 0  # records in blocks that got a sequence number
    refused: int = 0  # records dropped before they got one (part of `dropped`)
    delivered: int = 0
    dead: int = 0
    dropped: list[int] = field(default_factory=lambda: [0] * len(REASONS))
    position: int = -1  # up to which the source was read
    count: Callable[..., None] = _ignore  # increments the metric of a name, by amount and labels

    @property
    def accepted(self) -> int:
        return self.numbered + self.refused

    @property
    def queued(self) -> int:
        return self.accepted - self.delivered - self.dead - sum(self.dropped)

    @property
    def open_blocks(self) -> int:
        """Return the number of blocks that are not completed."""
        return self.next_sequence - 1 - self.completed.total

    def first_open(self) -> int:
        gaps = self.completed.gaps(1, self.next_sequence)
        return gaps[0][0] if gaps else self.next_sequence

    def apply(self, entry: BlockEntry) -> bool:
        """Book the entry. Return False if it was booked before."""
        kind = entry.kind
        if kind == EntryKind.DELIVERED:
            records = entry.a + entry.b
            if not self._complete(entry.sequence, 1, entry.value, records):
                return False
            self.delivered += entry.a
            self.dead += entry.b
            self.count("queue_delivered_records_total", entry.a)
            if entry.b:
                self.count("queue_dead_lettered_records_total", entry.b)
        elif kind == EntryKind.ACCEPTED:
            self.advance(entry.sequence, entry.value)
        elif kind == EntryKind.DROPPED:
            if not self._complete(entry.sequence, entry.b, entry.value, entry.a):
                return False
            self._drop(entry)
        elif kind == EntryKind.ATTEMPT:
            self.attempts[entry.sequence] = entry.a
        elif kind == EntryKind.REFUSED:
            self.refused += entry.a
            self.count("queue_accepted_records_total", entry.a)
            self._drop(entry)
        elif kind == EntryKind.POSITION:
            self.position = max(self.position, entry.value)
        elif kind == EntryKind.COUNTER:
            if entry.reason < len(_COUNTERS):
                setattr(self, _COUNTERS[entry.reason], entry.value)
            elif _DROPPED <= entry.reason < _DROPPED + len(REASONS):
                self.dropped[entry.reason - _DROPPED] = entry.value
        return True

    def _drop(self, entry: BlockEntry) -> None:
        self.dropped[entry.reason] += entry.a
        self.count("queue_dropped_records_total", entry.a, REASONS[entry.reason])
        self.count("queue_dropped_total", entry.b, REASONS[entry.reason])
        if entry.reason in LOSSES:
            self.count("data_loss_total", entry.a)

    def advance(self, next_sequence: int, numbered: int) -> None:
        self.next_sequence = max(self.next_sequence, next_sequence)
        self.numbered = max(self.numbered, numbered)

    def _complete(self, sequence: int, blocks: int, through: int, records: int) -> bool:
        if not self.completed.add(sequence, sequence + blocks, through - records, through):
            return False
        self.advance(sequence + blocks, through)
        for each in [n for n in self.attempts if sequence <= n < sequence + blocks]:
            del self.attempts[each]
        return True

    def accounting(self) -> Accounting:
        dropped = {REASONS[number]: n for number, n in enumerate(self.dropped) if n}
        return Accounting(self.accepted, self.delivered, self.dead, dropped, self.queued)

    def snapshot(self) -> list[BlockEntry]:
        """Return entries that produce these books when they are applied to empty ones."""
        entries = [
            BlockEntry(EntryKind.COUNTER, number, value=getattr(self, name))
            for number, name in enumerate(_COUNTERS)
        ]
        entries += [
            BlockEntry(EntryKind.COUNTER, _DROPPED + reason, value=n)
            for reason, n in enumerate(self.dropped)
            if n
        ]
        for start, end, before, through in self.completed.spans:
            entries.append(BlockEntry(EntryKind.SPAN_START, sequence=start, value=before))
            entries.append(BlockEntry(EntryKind.SPAN_END, sequence=end, value=through))
        entries += [
            BlockEntry(EntryKind.ATTEMPT, sequence=sequence, a=n)
            for sequence, n in self.attempts.items()
        ]
        return entries + self.progress()

    def progress(self) -> list[BlockEntry]:
        """Return entries with the accepted records and the position in the source."""
        position = (
            [BlockEntry(EntryKind.POSITION, value=self.position)] if self.position >= 0 else []
        )
        accepted = BlockEntry(EntryKind.ACCEPTED, sequence=self.next_sequence, value=self.numbered)
        return [*position, accepted]

    def replay(self, entries: Iterable[BlockEntry | None]) -> int:
        """Apply the entries of a journal to empty books. Return the number of damaged entries."""
        damaged = 0
        count, self.count = self.count, _ignore  # these entries were counted before
        span: BlockEntry | None = None  # a SPAN_START without its end
        for entry in entries:
            if entry is None:
                damaged += 1
            elif entry.kind == EntryKind.SPAN_START:
                span = entry
            elif entry.kind == EntryKind.SPAN_END:
                if span is not None:
                    self.completed.add(span.sequence, entry.sequence, span.value, entry.value)
                    self.advance(entry.sequence, entry.value)
                span = None
            else:
                self.apply(entry)
        for sequence in [each for each in self.attempts if each in self.completed]:
            del self.attempts[sequence]
        self.count = count
        return damaged


class Journal:
    """The file of entries. They are pending until `flush` writes them; a failed one keeps them."""

    def __init__(self, fs: Fs, directory: Path) -> None:
        self._fs = fs
        self._path = directory / JOURNAL
        self._next_path = directory / f"{JOURNAL}.next"
        self._file: File | None = None
        self._pending: list[bytes] = []
        self._since: list[bytes] | None = None  # entries since the snapshot, during a restart
        self.dirty = False  # entries are written but not synced
        self.broken = False  # the file refuses writes, or cannot be trusted: restart it

    def load(self) -> list[BlockEntry | None]:
        if not self._fs.exists(self._path):
            return []
        entries = list(decode(self._fs.read(self._path)))
        while entries and entries[-1] is None:  # a torn or unwritten tail has no entries
            entries.pop()
        return entries

    @property
    def size(self) -> int:
        return (self._file.size if self._file else 0) + len(self._pending) * SIZE

    def add(self, entry: BlockEntry) -> None:
        data = entry.encode()
        self._pending.append(data)
        if self._since is not None:
            self._since.append(data)

    def flush(self) -> None:
        """Write pending entries. If it raises StorageFull or StorageFailed, they stay pending."""
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
        """Make flushed entries durable."""
        if self.dirty and self._file is not None:
            self.dirty = False
            try:
                self._file.sync()
            except StorageError:
                self.dirty = self.broken = True  # unsynced pages may be gone: only a restart helps
                raise

    async def restart(
        self, snapshot: list[BlockEntry], in_pool: Callable[..., Awaitable[Any]]
    ) -> None:
        """Replace the file by a snapshot that was just taken.

        No completion is ever only in memory. The snapshot is written and synced beside the journal,
        in the pool, while new entries are added to the old file. Then, on the event loop, entries
        since the snapshot are appended to it, and it is renamed into place.
        """
        self._since = []
        try:
            file: File = await in_pool(self._write_snapshot, snapshot)
            try:
                if self._since:
                    file.append(self._since)
                self._fs.rename(self._next_path, self._path)
            except StorageError:
                file.close()
                raise
        finally:
            self._since = None
        self.close()
        self._file, self._pending = file, []  # the new file has all entries
        self.dirty, self.broken = True, False
        await in_pool(self._fs.sync_dir, self._path.parent)

    def _write_snapshot(self, snapshot: list[BlockEntry]) -> File:
        self._fs.remove(self._next_path)
        file = self._fs.open(self._next_path, create=True)
        try:
            file.append([entry.encode() for entry in snapshot])
            file.sync()
        except StorageError:
            file.close()
            raise
        return file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
