"""A segment whose files lie in the tier: read like any other, through the cache."""

from collections.abc import Sequence
from pathlib import Path

from penstock.io.fs import Bytes, File, Fs
from penstock.log.layout import BATCHES, DATA, KINDS
from penstock.log.segment import Segment
from penstock.log.tier.cache import MAX_BLOCKS_AHEAD, BlockCache
from penstock.log.tier.manifest import Manifest, StoredObject, StoredSegment


class StoredSegmentFile:
    """A `File` that is only read."""

    __slots__ = ("_cache", "_stored", "path", "poisoned", "size")

    def __init__(self, cache: BlockCache, stored: StoredObject) -> None:
        self.path = Path(stored.name)
        self.size = stored.file.size
        self.poisoned: str | None = "it lies in the tier"
        self._cache = cache
        self._stored = stored

    def read_at(self, position: int, length: int) -> bytes:
        return self._cache.read(self._stored, position, length)

    def warm(self) -> None:
        self._cache.warm(self._stored)

    def forget(self, position: int, length: int) -> None:
        pass

    def close(self) -> None:
        pass

    def append(self, chunks: Sequence[Bytes]) -> int:
        raise NotImplementedError

    def truncate(self, size: int) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def fileno(self) -> int:
        raise NotImplementedError


class TieredSegment(Segment):
    __slots__ = ("_stored_files", "stored")

    local = False

    def __init__(
        self,
        fs: Fs,
        directory: Path,
        incarnation: str,
        stored: StoredSegment,
        cache: BlockCache,
        holes: tuple[tuple[int, int], ...],
    ) -> None:
        super().__init__(fs, directory, stored.base, sealed=True)
        self.stored = stored
        self.end = stored.end
        self.rows = stored.rows
        self.data_size = stored.files[DATA].size
        self.batches_size = stored.files[BATCHES].size
        self.newest = stored.newest
        self.compacted = stored.compacted
        self.holes = holes
        self._stored_files = {
            kind: StoredSegmentFile(cache, StoredObject.of(incarnation, stored, kind))
            for kind in KINDS
        }

    def file(self, kind: str) -> File:
        return self._stored_files[kind]

    def modified(self) -> int:
        return self.newest

    def lead_to(self, following: Segment, next_offset: int) -> None:
        remaining = self.data_size * (self.end - next_offset) // max(1, self.end - self.base)
        if remaining < MAX_BLOCKS_AHEAD * self.stored.block_bytes:
            following.warm()

    def warm(self) -> None:
        for file in self._stored_files.values():
            file.warm()


def not_local(tier: Manifest, segments: Sequence[Segment]) -> list[StoredSegment]:
    """The segments that count and are in the tier only."""
    here = [segment for segment in segments if segment.local and segment.rows]
    return [
        one
        for one in tier.segments
        if not one.superseded
        and not any(other.base <= one.base < max(other.end, other.base + 1) for other in here)
    ]
