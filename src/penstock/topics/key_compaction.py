"""Compact local topics by key (`penstock.log.batches.by_key`).

The broker reads the sealed segments, and replaces adjacent ones, as many as fit into one segment,
by one without the records that have a later record of the same key. `penstock.topics.compaction`
swaps them. A pass runs when at least half of the sealed bytes were not compacted before. Damage is
refused, never hidden under a new checksum.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

from penstock.errors import Damaged, StorageFull, Unavailable
from penstock.io.fs import File
from penstock.log.batches.by_key import LatestOffsets
from penstock.log.batches.index import SparseIndex
from penstock.log.batches.segment import BatchSegment
from penstock.log.batches.walk import Located, whole_batches
from penstock.log.context import Context
from penstock.log.layout import COMPACT, DATA, INDEX
from penstock.log.segment import Segment, StoredBatch
from penstock.topics.compaction import beside, finish_or_undo_swap, swap_in
from penstock.topics.topic import Topic

log = logging.getLogger("penstock.topics")

MIN_DIRTY_SHARE = 0.5  # of the sealed bytes


async def compact_by_key(topic: Topic, context: Context) -> int:
    """Compact the topic if it is worth it. Return the number of removed records."""
    if topic.policy != COMPACT or not topic.format.keyed or topic.maintenance.locked():
        return 0
    async with topic.maintenance:
        await finish_or_undo_swap(topic, context)
        archived = topic.archived_offset
        sealed = [
            one
            for one in topic.segments[:-1]
            if isinstance(one, BatchSegment) and (archived is None or one.end <= archived)
        ]
        dirty = sum(one.data_size for one in sealed if not one.compacted)
        if not dirty or dirty < MIN_DIRTY_SHARE * sum(one.data_size for one in sealed):
            return 0
        if not all(one.local for one in sealed) or topic.damage:
            return 0  # segments that are in the tier, or damaged, are not compacted
        await topic.rest()
        latest = LatestOffsets(context.clock())
        await context.run(_note_keys, latest, sealed, lambda: topic.ending)
        removed = 0
        for group in _groups(sealed, context.settings.segment_bytes):
            build = _Rebuild(group, latest, context.settings.free_space_reserve)
            fresh = await context.run(build.run, lambda: topic.ending)
            before = sum(one.rows for one in group)
            await swap_in(topic, context, group, fresh)
            removed += before - fresh.rows
        context.instruments.compacted.add(removed)
        log.info("topic %s: compaction removed %d records", topic.name, removed)
        return removed


def _groups(sealed: Sequence[BatchSegment], limit: int) -> Iterator[list[BatchSegment]]:
    group: list[BatchSegment] = []
    for segment in sealed:
        if group and limit and sum(one.data_size for one in (*group, segment)) > limit:
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


def _note_keys(
    latest: LatestOffsets, sealed: Sequence[Segment], ending: Callable[[], bool]
) -> None:
    for segment in sealed:
        for batch in _batches(segment, ending):
            latest.add(batch.head, batch.data)


def _batches(segment: Segment, ending: Callable[[], bool]) -> Iterator[Located]:
    """Yield all batches of a segment. Raises Damaged if one is not intact."""
    at, data = 0, segment.file(DATA)
    for batch in whole_batches(data, 0, segment.data_size, segment.base, limit=segment.end):
        if ending():
            raise Unavailable("the broker is stopping, or the topic was deleted")
        yield batch
        at = batch.end
    if at != segment.data_size:
        raise Damaged(f"{segment.path(DATA).name}: byte {at} is damaged: it is not compacted", at)


class _Rebuild:
    """The compacted segment that replaces `old`."""

    def __init__(self, old: Sequence[BatchSegment], latest: LatestOffsets, reserve: int) -> None:
        self._old = old
        self._latest = latest
        self._reserve = reserve
        self._index = SparseIndex(old[0].base)
        self._index.compacted = True

    def run(self, ending: Callable[[], bool]) -> BatchSegment:
        """Write the segment beside the old ones, sync it, and open it for reading."""
        first = self._old[0]
        fs, directory = first.fs, first.directory
        size = sum(one.data_size for one in self._old)
        if fs.free_bytes(directory) - size < self._reserve:
            raise StorageFull(f"the disk has no room for a compacted segment ({size} bytes)")
        fresh = BatchSegment(fs, directory, first.base, sealed=True)
        for kind in fresh.kinds:
            fs.remove(beside(fresh, kind))
        data = fs.open(beside(fresh, DATA), create=True)
        try:
            for segment in self._old:
                for batch in _batches(segment, ending):
                    self._copy(batch, data)
            data.sync()
        finally:
            data.close()
        index = fs.open(beside(fresh, INDEX), create=True)
        index.append([self._index.pack()])
        index.sync()
        index.close()
        for kind in fresh.kinds:
            fresh.adopt(kind, fs.open(beside(fresh, kind), write=False))
        fresh.take_index(self._index)
        return fresh

    def _copy(self, batch: Located, data: File) -> None:
        kept, records = self._latest.compact(batch.head, batch.data, self._old[-1].end - 1)
        if not records:
            return
        data.append([kept])
        stored = batch.stored()
        self._index.add(StoredBatch(stored.first, stored.end, records, len(kept), stored.time))
