"""The interface of a segment, independent of its format: its numbers, its files, and reading.

The numbers say how much of the files is visible. For the active segment they grow after a commit,
so a reader never sees data that may still be lost. Reads name their positions and share no state,
so they run on the event loop or in a pool while the writer appends.

Files are opened on demand and dropped when idle. The last reference closes a file, so a reader
keeps it open, and neither retention nor the idle close can interrupt a transfer. A segment in the
tier reads its files from there (`SegmentFiles`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from penstock.io.fs import Bytes, File, Fs
from penstock.log.layout import DATA, HEADER_SIZE, INDEX_TYPE, sealed_name
from penstock.protocol.kafka_batch import KafkaRecord


class Batch:
    """Records read together: one buffer, and the position of each payload in it."""

    __slots__ = (
        "_details",
        "buffer",
        "count",
        "ends",
        "first_offset",
        "next_offset",
        "offsets",
        "starts",
    )

    def __init__(
        self,
        buffer: bytes,
        offsets: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        next_offset: int,
        details: Callable[[], list[KafkaRecord]] | None = None,
    ) -> None:
        self.buffer = buffer
        self.offsets = offsets
        self.starts = starts
        self.ends = ends
        self.count = len(offsets)
        self.first_offset = int(offsets[0]) if self.count else next_offset
        self.next_offset = next_offset  # where the next read continues
        self._details = details

    def records(self) -> list[KafkaRecord] | None:
        """Return records with keys, headers and timestamps; None if the format has no keys."""
        return self._details() if self._details is not None else None

    @property
    def keyed(self) -> bool:
        """Return whether the records may have keys, headers or null values."""
        return self._details is not None

    @property
    def lengths(self) -> np.ndarray:
        """Return the lengths of the payloads."""
        lengths: np.ndarray = self.ends - self.starts
        return lengths

    def length(self, i: int) -> int:
        return int(self.ends[i]) - int(self.starts[i])

    def payload(self, i: int) -> memoryview:
        return memoryview(self.buffer)[int(self.starts[i]) : int(self.ends[i])]

    def payloads(self) -> list[bytes]:
        buffer = self.buffer
        return [buffer[a:b] for a, b in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]

    def __iter__(self) -> Iterator[tuple[int, memoryview]]:
        view = memoryview(self.buffer)
        for offset, a, b in zip(
            self.offsets.tolist(), self.starts.tolist(), self.ends.tolist(), strict=True
        ):
            yield offset, view[a:b]


_NONE = np.empty(0, np.int64)
_NO_ROWS = np.empty(0, INDEX_TYPE)


def empty_batch(next_offset: int) -> Batch:
    return Batch(b"", _NONE, _NONE, _NONE, next_offset)


@dataclass(slots=True)
class Raw:
    """Whole records or batches for one read, as a part of the data file."""

    first_offset: int
    count: int
    next_offset: int
    file: File | None
    position: int
    length: int
    # Of aiq's index: offset and position of each record. A transfer without columns needs neither.
    rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)

    @property
    def offsets(self) -> np.ndarray:
        return self.rows["offset"].astype(np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """Return the lengths of the payloads."""
        starts = self.rows["position"].astype(np.int64)
        return np.diff(starts, append=self.position + self.length) - HEADER_SIZE

    def read(self) -> bytes:
        return self.file.read_at(self.position, self.length) if self.file is not None else b""


@dataclass(slots=True)
class FetchedBatches:
    """Record batches as bytes. The first one contains the requested offset, or follows it."""

    data: bytes
    first_offset: int
    next_offset: int  # where the next read continues
    count: int  # of the records


class StoredBatch(NamedTuple):
    """Records that a commit stored under one checksum."""

    first: int  # its first offset
    end: int  # the offset after its last
    records: int
    size: int  # bytes in the data file
    time: int  # of its newest record, microseconds


@dataclass(slots=True)
class Write:
    """The bytes that one commit adds to each file, in the order in which the files are written."""

    first: int
    position: int = 0  # of its first byte in the data file
    time: int = 0  # of the commit, microseconds
    count: int = 0
    size: int = 0  # of the data
    started: float = 0.0  # when the pool got it, by `perf_counter`
    parts: dict[str, list[Bytes]] = field(default_factory=dict)  # by kind of file
    batches: list[StoredBatch] = field(default_factory=list)  # where the format indexes them

    def add(self, parts: dict[str, list[Bytes]], count: int, size: int) -> None:
        """Add the bytes for each file, of one append or of several with a common frame."""
        if self.count:
            for kind, chunks in parts.items():
                self.parts[kind] += chunks
        else:
            self.parts = parts
        self.count += count
        self.size += size


class Mark(NamedTuple):
    """A position in the active segment, at the end of a commit."""

    end: int  # the offset there
    rows: int
    newest: int
    sizes: Mapping[str, int]  # of the files, by kind

    @property
    def data_size(self) -> int:
        return self.sizes[DATA]


class SegmentFiles(Protocol):
    """The files of a segment that is not on this disk."""

    def file(self, kind: str) -> File: ...

    def warm(self) -> None:
        """Prepare for a reader that is about to read from the beginning."""

    def is_near_end(self, remaining: int) -> bool:
        """Return whether to warm the next segment for a reader with so many bytes left to read."""


class Fault(NamedTuple):
    """Damage in a sealed segment, in the terms of recovery's report."""

    file: str
    position: int
    what: str
    hole: dict[str, int]  # as in damage.json, if records are lost


class SegmentCheck(Protocol):
    """The check of one sealed segment, in steps that block."""

    faults: list[Fault]
    unchecked: int  # bytes that no checksum covers

    def steps(self) -> Iterator[int]:
        """Yield how many bytes were read, after each step."""


class Segment(ABC):
    """The part of a segment that the formats have in common."""

    kinds: tuple[str, ...]  # its files, in the order in which a roll renames them: the data last

    __slots__ = (
        "_files",
        "base",
        "broken",
        "compacted",
        "data_size",
        "directory",
        "elsewhere",
        "end",
        "fs",
        "holes",
        "newest",
        "on_mismatch",
        "on_open",
        "pinned",
        "rows",
        "sealed",
    )

    def __init__(self, fs: Fs, directory: Path, base: int, *, sealed: bool) -> None:
        self.fs = fs
        self.directory = directory
        self.base = base
        self.sealed = sealed
        self.end = base  # offset after the last record
        self.rows = 0  # records
        self.data_size = 0
        self.newest = 0  # time of the newest record, microseconds
        self.compacted = False  # records were removed from it
        self.holes: tuple[tuple[int, int], ...] = ()  # damaged byte ranges of data, in order
        self.elsewhere: SegmentFiles | None = None  # its files, if they are in the tier
        self.on_open: Callable[[Segment], None] | None = None  # called when a file is opened
        # called when index and data disagree
        self.on_mismatch: Callable[[Segment], None] | None = None
        self.broken: str | None = None  # why it accepts no more writes; None: it does
        self.pinned = False  # being written: its files stay open
        self._files: dict[str, File] = {}

    # Files

    @property
    def local(self) -> bool:
        """Return whether its files are on this disk."""
        return self.elsewhere is None

    def path(self, kind: str) -> Path:
        return self.directory / (sealed_name(kind, self.base) if self.sealed else kind)

    def file(self, kind: str) -> File:
        file = self._files.get(kind)
        if file is None:
            if self.elsewhere is not None:
                return self.elsewhere.file(kind)
            file = self.fs.open(self.path(kind), create=not self.sealed, write=not self.sealed)
            self._files[kind] = file
            if self.on_open is not None:
                self.on_open(self)
        return file

    def adopt(self, kind: str, file: File) -> None:
        self._files[kind] = file

    def forget_files(self) -> None:
        """Drop the open files. Each is closed when its last reader has finished."""
        self._files = {}

    @property
    def open_files(self) -> int:
        return len(self._files)

    def modified(self) -> int:
        """Return the time to use for records whose time is unknown, in microseconds."""
        if not self.local:
            return self.newest
        return int(self.fs.modified(self.path(DATA)) * 1e6)

    def lead_to(self, following: "Segment", next_offset: int) -> None:
        """Prepare the following segment if a reader at `next_offset` is near the end of this."""
        if self.elsewhere is not None and following.elsewhere is not None:
            remaining = self.data_size * (self.end - next_offset) // max(1, self.end - self.base)
            if self.elsewhere.is_near_end(remaining):
                following.elsewhere.warm()

    # Numbers

    @property
    def dense(self) -> bool:
        """Return whether there is a record for every offset from `base` to `end`."""
        return self.end - self.base == self.rows

    @property
    def size(self) -> int:
        """Return the number of bytes of all its files."""
        return sum(self.sizes().values())

    def begin_at(self, offset: int) -> None:
        """Set the first offset of a segment without records."""
        self.base = self.end = offset

    def mark(self) -> Mark:
        """Return its present end."""
        return Mark(self.end, self.rows, self.newest, self.sizes())

    def take(self, mark: Mark) -> None:
        """Set its end to `mark`."""
        self.end, self.rows, self.newest = mark.end, mark.rows, mark.newest
        self.data_size = mark.data_size
        self.take_sizes(mark.sizes)

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return how much of each file is visible, by kind."""

    @abstractmethod
    def take_sizes(self, sizes: Mapping[str, int]) -> None:
        """Set how much is visible of files that this object has not written."""

    @abstractmethod
    def extend(self, write: Write) -> None:
        """Make a commit visible, which was written at the end."""

    # Reading

    @abstractmethod
    def read(self, offset: int, max_records: int, max_bytes: int) -> Batch:
        """Read records. If there is one at or after `offset`, return at least one of any size."""

    @abstractmethod
    def raw(self, offset: int, max_bytes: int) -> Raw:
        """Return bytes of the data file from `offset` on, in whole units of the format."""

    @abstractmethod
    def records_from(self, offset: int) -> int:
        """Return the number of records from `offset` on."""

    @abstractmethod
    def times(self, offsets: np.ndarray) -> np.ndarray:
        """Return the times of these records in microseconds; if unknown, the file's modification
        time.
        """

    @abstractmethod
    def offset_at(self, microseconds: int) -> int | None:
        """Return the first offset of this time or later, if this segment has one."""

    @abstractmethod
    def oldest(self) -> int:
        """Return the time of its first record, microseconds; only when it has records."""
