"""Swap sealed segments for one that has fewer of their records.

The caller decides which records to keep, as a bit per offset (the pipeline's `compact` job keeps
the latest record of each key). The broker copies these records from its own files, so nothing can
be changed or added. It checks every batch that it copies from: damage is refused, never hidden
under a new checksum. Records keep their offsets, times and order; offsets get gaps.

1. The compacted segment is written beside the old ones (`*.swap`) and synced.
2. The marker `swap-<base>` is written. From now on the swap will be finished, by this process or by
   the next start. The marker is text with a checksum: the bases of the replaced segments, separated
   by commas; the first is also the base of the compacted segment. Readers use the compacted segment
   from now on, through its open files, so they do not depend on the renames.
3. The files are renamed over the first old segment, the others are removed, then the marker.

A crash before step 2 leaves the old segments, a crash after it the new one. If the disk fails in
step 2, the old segments stay; if it fails in step 3, the new one counts. The rest of the work is
kept in `Topic.unfinished_swap`, and done before anything else changes the segments. Readers of an
old segment keep their open files. A reader that opens one again sees that it is missing or
different, and reads the list of segments again.

Some records are never removed: the newest sealed record, so that a reader is never left before a
gap without a following record; the last record of a segment that would become empty; and, in an
archived topic, records that are not archived yet.

Sidecar rows of a compacted segment have a flag and no producer, and cover the rest of their former
batches. The producers are in the checkpoint, which is updated first.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from crc32c import crc32c

from penstock.errors import (
    Conflict,
    Damaged,
    InvalidRequest,
    StorageError,
    StorageFull,
    Unavailable,
)
from penstock.io.fs import File, Fs
from penstock.log.aiq.checksums import failing, runs, sidecar
from penstock.log.aiq.format import AIQ
from penstock.log.aiq.segment import AiqSegment
from penstock.log.context import Context
from penstock.log.layout import (
    BATCHES,
    COMPACT,
    COMPACTED,
    DATA,
    HEADER_SIZE,
    INDEX,
    INDEX_TYPE,
    KINDS,
    NO_PRODUCER,
    SWAP_PREFIX,
    BatchRow,
    pack_checked,
    sealed_name,
)
from penstock.log.recovery import finish_swap
from penstock.log.segment import Batch, Segment
from penstock.topics.topic import Topic, UnfinishedSwap

log = logging.getLogger("penstock.topics")

RECORDS_PER_STEP = 1 << 16
BYTES_PER_STEP = 1 << 20  # numpy holds the interpreter while it copies: a step must be short
SYNC_BYTES = 64 << 20  # synced in steps, so that commits do not wait behind one long fsync


@dataclass(slots=True)
class Swapped:
    """The result of a compaction. Bytes are those of all three files of a segment."""

    base: int
    end: int
    segments: int  # number of replaced segments
    records_before: int
    records: int
    bytes_before: int
    bytes: int


async def compact(
    topic: Topic,
    context: Context,
    bases: Sequence[int],
    keep: bytes,
    incarnation: str | None = None,
) -> Swapped:
    """Replace the sealed segments with these bases (neighbours, in order) by one with only the
    records in `keep`.
    """
    async with topic.maintenance:
        _refuse_ended(topic)
        await finish_or_undo_swap(topic, context)
        await topic.rest()
        if incarnation is not None and incarnation != topic.incarnation:
            raise Conflict(
                f"topic {topic.name!r} is incarnation {topic.incarnation}, not {incarnation}"
            )
        old = _segments_to_compact(topic, bases, keep)
        wanted = np.frombuffer(keep, np.uint8).copy()
        if topic.segments[-2] is old[-1]:
            _mark(wanted, old[-1].end - 1 - old[0].base)
        try:
            fresh = await _in_pool_for(context, old)(
                _build, old, wanted, context.settings.free_space_reserve, lambda: topic.ending
            )
        except BaseException:
            with contextlib.suppress(StorageError):
                await context.run(_discard, context.fs, topic, old[0].base)
            raise
        done = _summary(old, fresh)
        if len(old) == 1 and done.records == done.records_before:
            await context.run(_discard, context.fs, topic, old[0].base)
            return _summary(old, old[0])
        _refuse_ended(topic)
        await swap_in(topic, context, old, fresh)
        context.instruments.compacted.add(done.records_before - done.records)
        log.info(
            "topic %s: %d segments from offset %d on were compacted to %d of %d records",
            topic.name,
            len(old),
            fresh.base,
            done.records,
            done.records_before,
        )
        return done


async def finish_or_undo_swap(topic: Topic, context: Context) -> None:
    """Finish or undo a swap that failed. The caller holds `topic.maintenance`."""
    swap = topic.unfinished_swap
    if swap is None:
        return
    if swap.fresh is not None:
        await context.run(finish_swap, topic.format, context.fs, topic.directory, swap.marker)
        swap.fresh.pinned = False
    else:
        await context.run(_take_back, context.fs, topic, swap.marker)
    topic.unfinished_swap = None


def _in_pool_for(context: Context, old: Sequence[Segment]) -> Callable[..., Awaitable[Segment]]:
    """Return the pool that reads these segments, so that commits do not wait for the tier."""
    if context.cache is None or all(segment.local for segment in old):
        return context.run
    return context.cache.in_thread


def _refuse_ended(topic: Topic) -> None:
    if topic.deleted:
        raise Conflict(f"topic {topic.name!r} was deleted")
    if topic.ending:
        raise Unavailable("the broker is stopping")


def _segments_to_compact(topic: Topic, bases: Sequence[int], keep: bytes) -> tuple[Segment, ...]:
    """Return the segments with these bases. Raises if they may not be compacted."""
    if topic.format is not AIQ:
        raise Conflict(
            f"topic {topic.name!r} has the format {topic.format.name!r}: the broker compacts it "
            "itself"
        )
    if topic.policy != COMPACT:
        raise Conflict(
            f"the policy of topic {topic.name!r} is {topic.policy!r}: set it to {COMPACT!r} first"
        )
    segments = topic.segments[:-1]
    sealed = [segment.base for segment in segments]
    at = sealed.index(bases[0]) if bases and bases[0] in sealed else -1
    old = segments[at : at + len(bases)] if at >= 0 else ()
    if not old or [segment.base for segment in old] != list(bases):
        raise Conflict(
            f"{list(bases)} are not neighbouring sealed segments of topic {topic.name!r}"
        )
    first, end = old[0].base, old[-1].end
    if len(keep) * 8 < end - first:
        raise InvalidRequest(f"{len(keep) * 8} bits are too few for {end - first} offsets")
    if topic.archived_offset is not None and end > topic.archived_offset:
        raise Conflict(
            f"topic {topic.name!r} is archived up to offset {topic.archived_offset}, "
            f"not up to {end}"
        )
    following = topic.segments[at + len(old)].base
    for place in topic.damage:
        lost = place.get("lost_from", -1) < following and place.get("lost_to", -1) > first
        if lost or place.get("base") in bases:
            raise Damaged(f"{place['what']}: damaged segments are not compacted", following)
    return old


def _mark(wanted: np.ndarray, bit: int) -> None:
    wanted[bit >> 3] |= 1 << (bit & 7)


def _summary(old: Sequence[Segment], fresh: Segment) -> Swapped:
    return Swapped(
        base=fresh.base,
        end=fresh.end,
        segments=len(old),
        records_before=sum(segment.rows for segment in old),
        records=fresh.rows,
        bytes_before=sum(segment.size for segment in old),
        bytes=fresh.size,
    )


# The swap


async def swap_in(topic: Topic, context: Context, old: Sequence[Segment], fresh: Segment) -> None:
    """Replace `old` by `fresh`, whose files are beside theirs. The caller holds
    `topic.maintenance`.
    """
    marker = f"{SWAP_PREFIX}{fresh.base:020d}"
    bases = ",".join(str(base) for base in (fresh.base, *(segment.base for segment in old[1:])))
    try:
        await context.run(context.fs.replace, topic.directory / marker, pack_checked(bases))
    except StorageError as error:
        topic.unfinished_swap = UnfinishedSwap(marker, None)
        try:
            await finish_or_undo_swap(topic, context)
        except StorageError as again:
            log.error(
                "topic %s: a failed swap (%s) could not be undone yet: %s",
                topic.name,
                error,
                again,
            )
        raise
    fresh.pinned = True  # its files must stay open, since they do not have their names yet
    topic.unfinished_swap = UnfinishedSwap(marker, fresh)
    topic.replace(old, fresh)
    try:
        await finish_or_undo_swap(topic, context)
    except StorageError as error:
        log.error("topic %s: a swap is in effect, but unfinished on disk: %s", topic.name, error)
    await context.run(_forget, old)


def _forget(old: Sequence[Segment]) -> None:
    """Close the files, in the pool: the last close of a removed file frees its blocks."""
    for segment in old:
        segment.forget_files()


def _take_back(fs: Fs, topic: Topic, marker: str) -> None:
    """Remove the marker durably, then the other files, which mean nothing without it."""
    fs.remove(topic.directory / marker)
    fs.sync_dir(topic.directory)
    _discard(fs, topic, int(marker.removeprefix(SWAP_PREFIX)))


def _discard(fs: Fs, topic: Topic, base: int) -> None:
    for kind in topic.format.kinds:
        fs.remove(topic.directory / f"{sealed_name(kind, base)}.swap")


def beside(segment: Segment, kind: str) -> Path:
    return segment.directory / f"{sealed_name(kind, segment.base)}.swap"


# The compacted segment


def _build(
    old: Sequence[Segment], wanted: np.ndarray, reserve: int, ending: Callable[[], bool]
) -> Segment:
    """Write the compacted segment, sync it, and open it for reading."""
    copy = _Copy(old[0], wanted, reserve)
    try:
        for segment in old:
            _check_batches(segment, ending)
            copy.add(segment, ending)
        if not copy.fresh.rows:
            _mark(wanted, old[-1].end - 1 - old[0].base)
            copy.add(old[-1], ending)
        copy.end()
    finally:
        copy.close()
    fresh = copy.fresh
    for kind in KINDS:
        fresh.adopt(kind, fresh.fs.open(beside(fresh, kind), write=False))
    return fresh


def _check_batches(segment: Segment, ending: Callable[[], bool]) -> None:
    """Verify all checksums of the segment. Raises Damaged."""
    data = segment.file(DATA)
    for _, rows, good in sidecar(segment.file(BATCHES), segment.sizes()[BATCHES]):
        if not bool(good.all()):
            raise Damaged(
                f"{segment.path(BATCHES).name}: a row is damaged: its records are not compacted",
                segment.end,
            )
        for run in runs(rows, BYTES_PER_STEP):
            _refuse_ending(ending)
            for i in failing(data, run):
                start, end = int(run["start"][i]), int(run["end"][i])
                raise Damaged(
                    f"{segment.path(DATA).name}: bytes {start} to {end} "
                    "do not match their checksum",
                    segment.end,
                )


def _refuse_ending(ending: Callable[[], bool]) -> None:
    if ending():
        raise Unavailable("the broker is stopping, or the topic was deleted")


class _Copy:
    """The files of the compacted segment."""

    def __init__(self, first: Segment, wanted: np.ndarray, reserve: int) -> None:
        self.fresh = AiqSegment(first.fs, first.directory, first.base, sealed=True)
        self.fresh.compacted = True
        self._wanted, self._reserve = wanted, reserve
        self._unsynced = 0
        self._files: dict[str, File] = {}
        try:
            for kind in KINDS:
                first.fs.remove(beside(first, kind))
                self._files[kind] = first.fs.open(beside(first, kind), create=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def end(self) -> None:
        for file in self._files.values():
            file.sync()

    def add(self, segment: Segment, ending: Callable[[], bool]) -> None:
        """Append the wanted records of a segment."""
        at, rows = segment.base, 0
        while at < segment.end:
            _refuse_ending(ending)
            batch = segment.read(at, RECORDS_PER_STEP, BYTES_PER_STEP)
            if not batch.count:
                break
            rows += batch.count
            bits = batch.offsets - self.fresh.base
            kept = (self._wanted[bits >> 3] >> (bits & 7).astype(np.uint8) & 1).astype(np.bool_)
            if bool(kept.any()):
                self._append(segment, batch, kept)
            at = batch.next_offset
        if rows != segment.rows:
            raise Damaged(
                f"{segment.path(DATA).name}: {rows} of {segment.rows} records can be read; "
                "it is not compacted",
                at,
            )

    def _append(self, segment: Segment, batch: Batch, kept: np.ndarray) -> None:
        fresh = self.fresh
        sizes = batch.lengths + HEADER_SIZE
        start, end = int(batch.starts[0]) - HEADER_SIZE, int(batch.ends[-1])
        data = np.frombuffer(batch.buffer, np.uint8)[start:end][np.repeat(kept, sizes)].tobytes()
        offsets = batch.offsets[kept]
        places = np.zeros(len(offsets) + 1, np.int64)
        np.cumsum(sizes[kept], out=places[1:])
        index = np.empty(len(offsets), INDEX_TYPE)
        index["offset"], index["position"] = offsets, places[:-1] + fresh.data_size
        times = segment.times(offsets)
        sidecar = self._sidecar(offsets, places, times, memoryview(data))
        fs = fresh.fs
        if fs.free_bytes(fresh.directory) - len(data) - index.nbytes - len(sidecar) < self._reserve:
            raise StorageFull(
                "the disk has no room for a compacted segment beside the old ones "
                f"({len(data)} bytes)"
            )
        for kind, piece in ((DATA, data), (INDEX, index.tobytes()), (BATCHES, sidecar)):
            self._files[kind].append([piece])
        fresh.rows += len(offsets)
        fresh.data_size += len(data)
        fresh.batches_size += len(sidecar)
        fresh.newest, fresh.end = int(times[-1]), int(offsets[-1]) + 1
        self._unsynced += len(data)
        if self._unsynced >= SYNC_BYTES:
            self.end()
            self._unsynced = 0

    def _sidecar(
        self, offsets: np.ndarray, places: np.ndarray, times: np.ndarray, data: memoryview
    ) -> bytes:
        """Return the sidecar rows: one for the records of each append time."""
        cuts = [0, *(np.flatnonzero(np.diff(times)) + 1).tolist(), len(offsets)]
        firsts, clock, ends = offsets.tolist(), times.tolist(), places.tolist()
        at = self.fresh.data_size
        return b"".join(
            BatchRow(
                first=firsts[low],
                records=high - low,
                flags=COMPACTED,
                start=at + ends[low],
                end=at + ends[high],
                time=clock[low],
                producer=NO_PRODUCER,
                sequence=0,
                crc=crc32c(data[ends[low] : ends[high]]),
            ).pack()
            for low, high in pairwise(cuts)
        )
