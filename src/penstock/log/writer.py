"""The active segment's disk work: write, sync, switch to a new segment, checkpoint.

All methods block, and the topic makes one call at a time: on the event loop for small writes
without an fsync, otherwise in the pool.

The format gives the order in which the files of a commit are written. Under `always` and `group`
the data is synced last, after the files that must be durable before it. Record batches have their
checksum in the data and need one fsync. aiq's layout has it in a sidecar and needs two
(docs/decisions/storage.md), so that data on disk implies its checksum on disk.

After a failure before the sync of the data, all files are cut back to their old sizes. If the cut
fails too, or an fsync fails, the segment is *broken*, and its files are never written again: after
a failed fsync the kernel may have dropped the pages, so that a retry proves nothing. `switch` then
starts a new segment from memory, with the data that is acknowledged but not durable. The old one
ends at its last durable byte. Data that was not acknowledged is dropped: its producers got the
error.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.errors import StorageFailed, StorageFull
from penstock.io.fs import Fs
from penstock.log.format import SegmentFormat
from penstock.log.layout import CHECKPOINT, DATA, sealed_name
from penstock.log.segment import Mark, Segment, Write


class SegmentWriter:
    __slots__ = ("_renames", "directory", "format", "fs", "segment")

    def __init__(self, format: SegmentFormat, fs: Fs, directory: Path, segment: Segment) -> None:
        self.format = format
        self.fs = fs
        self.directory = directory
        self.segment = segment
        # The remaining renames of an unfinished switch, in order.
        self._renames: list[tuple[Path, Path]] | None = None

    def write(self, job: Write, sync: bool) -> None:
        before: dict[str, int] = {}  # sizes of the files, by kind
        try:
            for kind, chunks in job.parts.items():
                file = self.segment.file(kind)
                before[kind] = file.size
                file.append(chunks)
                if sync and kind in self.format.synced_before:
                    self._sync(kind)
        except (StorageFull, StorageFailed) as error:
            self._undo(before, str(error))
            raise
        if sync:
            self._sync(DATA)

    def _undo(self, before: dict[str, int], why: str) -> None:
        try:
            for kind, size in before.items():
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
        """Make all written files durable, except those that can be rebuilt."""
        self._sync(*self.format.synced_before, DATA)

    def sync_all(self) -> None:
        hints = [kind for kind in self.format.written if kind not in self.format.synced_before]
        self._sync(*self.format.synced_before, *(kind for kind in hints if kind != DATA), DATA)

    def checkpoint(self, packed: bytes, companions: Mapping[str, bytes]) -> None:
        """Sync the files that the checkpoint describes, then write it."""
        self.sync_all()
        for name, data in companions.items():
            self.fs.replace(self.directory / name, data, sync=False)
        self.fs.replace(self.directory / CHECKPOINT, packed)

    def switch(
        self, base: int, durable: Mark, carried: Sequence[Write]
    ) -> tuple[Segment | None, Segment]:
        """Seal the active segment at `durable`, and start a new one at `base` with `carried`.

        May be called again after a failure: completed renames are not repeated.
        """
        old = self.segment
        fresh = self.format.new_segment(self.fs, self.directory, base, sealed=False)
        if self._renames is None:
            self._renames = self._prepare(old, base, durable, carried)
        try:
            self._finish(self._renames)
            self._renames = None
        except (StorageFull, StorageFailed) as error:
            old.broken = str(error)
            raise
        for write in carried:
            fresh.extend(write)
        self.segment = fresh
        if durable.rows == 0:
            return None, fresh
        sealed = self.format.new_segment(self.fs, self.directory, old.base, sealed=True)
        sealed.take(durable)
        sealed.holes = old.holes
        return sealed, fresh

    def _prepare(
        self, old: Segment, base: int, durable: Mark, carried: Sequence[Write]
    ) -> list[tuple[Path, Path]]:
        kinds = self.format.kinds
        for kind in reversed(kinds):
            # left by a failed attempt; recovery completes new data that has no new sidecar
            self.fs.remove(self.directory / f"{kind}.new")
        if old.base != base:
            for kind, data in self.format.seals(old, durable).items():
                self.fs.replace(old.path(kind), data)
        moved = self.format.rebase(carried)
        for kind in kinds:
            file = self.fs.open(self.directory / f"{kind}.new", create=True)
            if moved.get(kind):
                file.append(moved[kind])
                file.sync()
            file.close()
        renames: list[tuple[Path, Path]] = []
        if old.base != base:
            renames = [(old.path(k), self.directory / sealed_name(k, old.base)) for k in kinds]
        for kind in kinds:
            if not self.fs.exists(old.path(kind)):
                self.fs.open(old.path(kind), create=True).close()
        renames += [(self.directory / f"{kind}.new", self.directory / kind) for kind in kinds]
        return renames

    def _finish(self, renames: list[tuple[Path, Path]]) -> None:
        while renames:
            self.fs.rename(*renames[0])
            del renames[0]
        self.fs.sync_dir(self.directory)

    def trim(self, sealed: Segment) -> None:
        """Cut a segment that broke to what is durable; if this fails, recovery ignores the rest."""
        with contextlib.suppress(StorageFull, StorageFailed):
            for kind, size in sealed.sizes().items():
                file = self.fs.open(sealed.path(kind))
                if file.size > size:
                    file.truncate(size)
                file.close()


def skip_to(form: SegmentFormat, active: Segment, offset: int) -> list[Segment]:
    """Let the active segment begin at this offset. Return the previous one, if it has records, and
    the active one.
    """
    if not active.rows:
        active.begin_at(offset)
        return [active]
    writer = SegmentWriter(form, active.fs, active.directory, active)
    sealed, fresh = writer.switch(offset, active.mark(), [])
    return [sealed, fresh] if sealed is not None else [fresh]
