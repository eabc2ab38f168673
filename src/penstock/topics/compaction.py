"""The door for compaction: swap sealed segments for one that holds fewer of their records.

Which records stay is someone else's decision (the pipeline keeps the latest value per key); here only the swap is
made, atomically and while readers go on. Offsets, times and order stay as they were; offsets get gaps.

1. The compacted segment is written beside the old ones (`*.swap`) and synced.
2. `swap-<base>` is put in place: from here on the swap will be finished, by us or by the next start. It is text with a
   checksum: the base of the compacted segment, then the bases of the segments merged into it, separated by commas.
3. The files are renamed over the first old segment, the others are removed, then the marker.

Sidecar rows of a compacted segment are flagged, carry no producer (the checkpoint knows the producers), and cover what
is left of the batch they stood for.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from crc32c import crc32c

from penstock.errors import Conflict, InvalidRequest
from penstock.storage.fs import File
from penstock.topics.context import Context
from penstock.topics.layout import (
    BATCHES,
    COMPACTED,
    DATA,
    HEADER_SIZE,
    INDEX,
    INDEX_TYPE,
    KINDS,
    NO_PRODUCER,
    RECORD_HEADER,
    pack_batch,
    pack_checked,
    sealed_name,
)
from penstock.topics.recovery import finish_swap
from penstock.topics.segment import Segment
from penstock.topics.topic import Topic

ROWS_AT_ONCE = 1 << 16


async def compact(topic: Topic, context: Context, bases: Sequence[int], keep: np.ndarray) -> Segment:
    """Replace the sealed segments with these bases (neighbours, in order) by one with only the offsets in `keep`."""
    async with topic.maintenance:
        segments = topic.segments[:-1]
        known = [segment.base for segment in segments]
        at = known.index(bases[0]) if bases and bases[0] in known else -1
        old = segments[at : at + len(bases)] if at >= 0 else ()
        if not old or [segment.base for segment in old] != list(bases):
            raise InvalidRequest(f"{list(bases)} are not neighbouring sealed segments of topic {topic.name!r}")
        wanted = np.unique(keep.astype(np.uint64))
        fresh = await context.run(_build, old, wanted)
        if topic.deleted:
            raise Conflict(f"topic {topic.name!r} was deleted")
        marker = f"swap-{fresh.base:020d}"
        told = ",".join(str(base) for base in bases)
        await context.run(context.fs.replace, topic.directory / marker, pack_checked(told))
        await context.run(finish_swap, context.fs, topic.directory, marker)
        topic.swapped(old, fresh)
        return fresh


def _build(old: Sequence[Segment], wanted: np.ndarray) -> Segment:
    first = old[0]
    fresh = Segment(first.fs, first.directory, first.base, sealed=True)
    fresh.end, fresh.newest = old[-1].end, old[-1].newest
    files = {}
    for kind in KINDS:
        path = first.directory / f"{sealed_name(kind, first.base)}.swap"
        first.fs.remove(path)
        files[kind] = first.fs.open(path, create=True)
    for segment in old:
        _copy(segment, wanted, files[DATA], files[INDEX], files[BATCHES], fresh)
    for file in files.values():
        file.sync()
        file.close()
    return fresh


def _copy(segment: Segment, wanted: np.ndarray, data: File, index: File, batches: File, fresh: Segment) -> None:
    """Append what is wanted of one segment, a slice of its index at a time."""
    source = segment.file(DATA)
    for start in range(0, segment.rows, ROWS_AT_ONCE):
        rows = segment.index_rows(start, min(segment.rows, start + ROWS_AT_ONCE))
        rows = rows[np.isin(rows["offset"], wanted, assume_unique=True)]
        if not len(rows):
            continue
        times = segment.times(rows["offset"].astype(np.int64))
        cuts = [0, *(np.flatnonzero(np.diff(times)) + 1).tolist(), len(rows)]
        for low, high in pairwise(cuts):
            _copy_run(source, rows[low:high], int(times[low]), data, index, batches, fresh)


def _copy_run(
    source: File, rows: np.ndarray, time: int, data: File, index: File, batches: File, fresh: Segment
) -> None:
    """Records appended at the same time: one sidecar row."""
    chunks = []
    placed = np.empty(len(rows), INDEX_TYPE)
    placed["offset"] = rows["offset"]
    at = fresh.data_size
    for i, position in enumerate(rows["position"].tolist()):
        _, length = RECORD_HEADER.unpack(source.read_at(position, HEADER_SIZE))
        chunks.append(source.read_at(position, HEADER_SIZE + length))
        placed["position"][i] = at
        at += HEADER_SIZE + length
    block = b"".join(chunks)
    first = int(rows["offset"][0])
    row = pack_batch(first, len(rows), COMPACTED, fresh.data_size, at, time, NO_PRODUCER, 0, crc32c(block))
    data.append([block])
    index.append([placed.tobytes()])
    batches.append([row])
    fresh.data_size, fresh.rows = at, fresh.rows + len(rows)
    fresh.batches_size += len(row)
