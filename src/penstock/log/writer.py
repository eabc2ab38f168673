"""The active segment's disk work: write, sync, switch to a new segment, checkpoint.

Everything here blocks and runs one call at a time per topic (the topic sees to it), on the loop for
small writes that wait for no fsync, in the pool otherwise.

The order of one commit, and what it buys:

1. The batch's sidecar rows are written, and under `always` and `group` synced.
2. The data is written, then its index rows. So data on disk implies its row on disk: after a crash
   a retried batch is recognised, and one that survived in part is told from a whole one by its
   checksum and cut off.
3. Under `always` and `group` the data is synced.

A failure before 3 cuts all three files back to where they were. When the cut fails too, or an fsync
failed (after which the kernel may have dropped the pages, so asking again proves nothing), the
segment is *broken*: no file of it is written again. `switch` then starts a new segment holding what
was answered but not yet durable, from memory; the old one ends where it was last known durable.
What was not answered is not carried over: its producers got the error.
"""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.errors import StorageFailed, StorageFull
from penstock.io.fs import Bytes, Fs
from penstock.log.layout import (
    BATCH_SIZE,
    BATCH_TYPE,
    BATCHES,
    CHECKPOINT,
    DATA,
    INDEX,
    INDEX_SIZE,
    INDEX_TYPE,
    KINDS,
    METADATA,
    BatchRow,
    pack_metadata,
    sealed_name,
)
from penstock.log.segment import Segment


@dataclass(slots=True)
class Mark:
    """A place in the active segment: everything before it is whole."""

    end: int  # the offset there
    rows: int
    data_size: int
    batches_size: int
    newest: int

    @classmethod
    def at_end_of(cls, one: Segment) -> "Mark":
        return cls(one.end, one.rows, one.data_size, one.batches_size, one.newest)


@dataclass(slots=True)
class Write:
    """One commit: what goes to each file."""

    first: int
    count: int = 0
    size: int = 0
    time: int = 0
    started: float = 0.0  # when the pool got it, by `perf_counter`
    data: list[Bytes] = field(default_factory=list)
    index: list[Bytes] = field(default_factory=list)
    batches: list[Bytes] = field(default_factory=list)


class Writer:
    __slots__ = ("_renames", "directory", "fs", "segment")

    def __init__(self, fs: Fs, directory: Path, segment: Segment) -> None:
        self.fs = fs
        self.directory = directory
        self.segment = segment
        # What an unfinished switch still has to do, in order.
        self._renames: list[tuple[Path, Path]] | None = None

    def write(self, job: Write, sync: bool) -> None:
        files = [self.segment.file(kind) for kind in (BATCHES, DATA, INDEX)]
        batches, data, index = files
        before = [file.size for file in files]
        try:
            batches.append(job.batches)
            if sync:
                self._sync(BATCHES)
            data.append(job.data)
            index.append(job.index)
        except (StorageFull, StorageFailed) as error:
            self._undo(before, str(error))
            raise
        if sync:
            self._sync(DATA)

    def _undo(self, before: list[int], why: str) -> None:
        try:
            for kind, size in zip((BATCHES, DATA, INDEX), before, strict=True):
                file = self.segment.file(kind)
                if file.size != size:
                    file.truncate(size)
                if file.poisoned:
                    self.segment.broken = file.poisoned
        except (StorageFull, StorageFailed) as error:
            self.segment.broken = f"{why}; and cutting it off failed: {error}"

    def _sync(self, *kinds: str) -> None:
        try:
            for kind in kinds:
                self.segment.file(kind).sync()
        except (StorageFull, StorageFailed) as error:
            self.segment.broken = str(error)
            raise

    def sync(self) -> None:
        self._sync(BATCHES, DATA)

    def sync_all(self) -> None:
        self._sync(BATCHES, INDEX, DATA)

    def checkpoint(self, packed: bytes, next_offset: int) -> None:
        """Sync what the checkpoint speaks of, then write it."""
        self.sync_all()
        self.fs.replace(self.directory / METADATA, pack_metadata(next_offset), sync=False)
        self.fs.replace(self.directory / CHECKPOINT, packed)

    def switch(
        self, base: int, durable: Mark, carried: list[Write]
    ) -> tuple[Segment | None, Segment]:
        """Seal the active segment at `durable` and start a new one at `base` holding `carried`.

        May be called again after it failed: renames that were done are not repeated.
        """
        old = self.segment
        fresh = Segment(self.fs, self.directory, base, sealed=False)
        if self._renames is None:
            self._renames = self._prepare(old, base, carried)
        try:
            self._finish(self._renames)
            self._renames = None
        except (StorageFull, StorageFailed) as error:
            old.broken = str(error)
            raise
        lay_out(fresh, carried)
        self.segment = fresh
        if durable.rows == 0:
            return None, fresh
        sealed = Segment(self.fs, self.directory, old.base, sealed=True)
        sealed.rows = durable.rows
        sealed.data_size = durable.data_size
        sealed.batches_size = durable.batches_size
        sealed.end = durable.end
        sealed.newest = durable.newest
        sealed.holes = old.holes
        return sealed, fresh

    def _prepare(self, old: Segment, base: int, carried: list[Write]) -> list[tuple[Path, Path]]:
        moved = rebase(carried)
        for kind in reversed(KINDS):
            # of an attempt that failed; new data without a new sidecar is one that recovery ends
            self.fs.remove(self.directory / f"{kind}.new")
        for kind in KINDS:
            file = self.fs.open(self.directory / f"{kind}.new", create=True)
            chunks = [chunk for job in moved for chunk in getattr(job, kind.split(".")[0])]
            if chunks:
                file.append(chunks)
                file.sync()
            file.close()
        renames = (
            []
            if old.base == base
            else [(old.path(k), self.directory / sealed_name(k, old.base)) for k in KINDS]
        )
        for kind in KINDS:
            if not self.fs.exists(old.path(kind)):
                self.fs.open(old.path(kind), create=True).close()
        renames += [(self.directory / f"{kind}.new", self.directory / kind) for kind in KINDS]
        return renames

    def _finish(self, renames: list[tuple[Path, Path]]) -> None:
        while renames:
            self.fs.rename(*renames[0])
            del renames[0]
        self.fs.sync_dir(self.directory)

    def trim(self, sealed: Segment) -> None:
        """Cut a segment that broke to what is durable; if this fails, recovery ignores the rest."""
        sizes = {
            DATA: sealed.data_size,
            INDEX: sealed.rows * INDEX_SIZE,
            BATCHES: sealed.batches_size,
        }
        with contextlib.suppress(StorageFull, StorageFailed):
            for kind, size in sizes.items():
                file = self.fs.open(sealed.path(kind))
                if file.size > size:
                    file.truncate(size)
                file.close()


def skip_to(fs: Fs, directory: Path, active: Segment, offset: int) -> list[Segment]:
    """Let the active segment begin at this offset; the one before it, if it has records, and the
    active one.
    """
    if not active.rows:
        active.base = active.end = offset
        return [active]
    sealed, fresh = Writer(fs, directory, active).switch(offset, Mark.at_end_of(active), [])
    return [sealed, fresh] if sealed is not None else [fresh]


def lay_out(segment: Segment, jobs: list[Write]) -> None:
    """The numbers of a segment that holds just these writes."""
    segment.rows = sum(job.count for job in jobs)
    segment.data_size = sum(job.size for job in jobs)
    segment.batches_size = sum(len(chunk) for job in jobs for chunk in job.batches)
    segment.end = segment.base + segment.rows
    segment.newest = jobs[-1].time if jobs else 0


def rebase(jobs: list[Write]) -> list[Write]:
    """The same writes with positions counted from the first one's."""
    if not jobs:
        return []
    index = np.frombuffer(b"".join(chunk for job in jobs for chunk in job.index), INDEX_TYPE).copy()
    delta = int(index["position"][0])
    index["position"] -= np.uint64(delta)
    rows = np.frombuffer(b"".join(chunk for job in jobs for chunk in job.batches), BATCH_TYPE)
    moved = Write(jobs[0].first)
    moved.index = [index.tobytes()]
    moved.data = [chunk for job in jobs for chunk in job.data]
    moved.batches = [
        row._replace(start=row.start - delta, end=row.end - delta).pack()
        for row in (BatchRow(*fields[:-1]) for fields in rows.tolist())
    ]
    assert len(rows) * BATCH_SIZE == sum(map(len, moved.batches))
    return [moved]
