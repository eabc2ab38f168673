"""A segment whose files are in the tier. It is read like any other, through the cache."""

from collections.abc import Sequence
from pathlib import Path

from penstock.io.fs import Bytes, File
from penstock.log.segment import Mark, Segment
from penstock.log.tier.cache import MAX_BLOCKS_AHEAD, BlockCache
from penstock.log.tier.manifest import StoredObject, StoredSegment, TierManifest


class StoredSegmentFile:
    """A read-only `File` in the tier."""

    __slots__ = ("_cache", "_stored", "path", "poisoned", "size")

    def __init__(self, cache: BlockCache, stored: StoredObject) -> None:
        self.path = Path(stored.name)
        self.size = stored.file.size
        self.poisoned: str | None = "it is in the tier"
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


class TieredFiles:
    """The files of a segment in the tier."""

    def __init__(self, incarnation: str, stored: StoredSegment, cache: BlockCache) -> None:
        self._read_ahead = MAX_BLOCKS_AHEAD * stored.block_bytes
        self._files = {
            kind: StoredSegmentFile(cache, StoredObject.of(incarnation, stored, kind))
            for kind in stored.files
        }

    def file(self, kind: str) -> File:
        return self._files[kind]

    def warm(self) -> None:
        for file in self._files.values():
            file.warm()

    def is_near_end(self, remaining: int) -> bool:
        return remaining < self._read_ahead


def put_in_tier(
    segment: Segment,
    incarnation: str,
    stored: StoredSegment,
    cache: BlockCache,
    holes: tuple[tuple[int, int], ...],
) -> Segment:
    """Turn a blank segment into one whose files are in the tier."""
    sizes = {kind: file.size for kind, file in stored.files.items()}
    segment.elsewhere = TieredFiles(incarnation, stored, cache)
    segment.take(Mark(stored.end, stored.rows, stored.newest, sizes))
    segment.compacted = stored.compacted
    segment.holes = holes
    return segment


def not_local(tier: TierManifest, segments: Sequence[Segment]) -> list[StoredSegment]:
    """Return the segments that are in the tier only."""
    here = [segment for segment in segments if segment.local and segment.rows]
    return [
        one
        for one in tier.segments
        if not one.superseded
        and not any(other.base <= one.base < max(other.end, other.base + 1) for other in here)
    ]
