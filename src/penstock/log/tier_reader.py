"""Read a topic from the tier, without its broker: ranges of records as numpy columns.

Readers on other machines (Spark executors) use it. They get the end offset from the broker, and
read from the broker what the tier does not have.
"""

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import NotFound
from penstock.io.fs import DISK
from penstock.log.damage import holes_of
from penstock.log.formats import FORMATS
from penstock.log.segment import Segment
from penstock.log.tier.cache import BlockCache, BlocksInMemory
from penstock.log.tier.manifest import TierManifest, manifest_name
from penstock.log.tier.segment import put_in_tier
from penstock.log.topic_files import Slice, slices
from penstock.metrics import Metrics
from penstock.object_store import ObjectStore

CACHE_BYTES = 64 << 20


class TierReader:
    """A reader of one tier. Close it at the end: it has threads."""

    def __init__(self, address: str) -> None:
        self._store = ObjectStore(address, create=False)
        self._cache = BlockCache(self._store, BlocksInMemory(), CACHE_BYTES, Metrics())

    def close(self) -> None:
        self._cache.close()

    def read(self, incarnation: str, start: int, end: int) -> Iterator[Slice]:
        """Yield the records from `start` up to, not including, `end`, until the first gap in the
        tier. The broker has the records after it.
        """
        for segment in self._segments(incarnation, start):
            if segment.base >= end:
                return
            try:
                yield from slices(segment, start, end)
            except FileNotFoundError:
                return  # retention or compaction removed it

    def _segments(self, incarnation: str, start: int) -> list[Segment]:
        """Return the segment that contains `start` and those that follow it without a gap. Records
        that compaction removed are not a gap.
        """
        name = manifest_name(incarnation)
        try:
            manifest = TierManifest.parse(self._store.get(name)[0], name)
        except NotFound:
            return []
        stored = [one for one in manifest.segments if not one.superseded]
        first = bisect_right(stored, start, key=lambda one: one.base) - 1
        segments: list[Segment] = []
        for one in stored[first:] if first >= 0 else ():
            before = segments[-1] if segments else None
            if before is not None and before.end < one.base and not before.compacted:
                break
            holes = holes_of(manifest.damage, one.base)
            form = FORMATS[manifest.layout]
            blank = form.new_segment(DISK, Path(name).parent, one.base, sealed=True)
            segments.append(put_in_tier(blank, incarnation, one, self._cache, holes))
        return segments
