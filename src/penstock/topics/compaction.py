"""Swapping sealed segments for one that holds fewer of their records.

Which records stay is someone else's decision (the pipeline's `compact` job keeps the latest per
key); it comes as a bit per offset. The broker copies those records from its own files, so nothing
can be changed or added on the way, and checks every batch it copies from: damage is refused, never
hidden under a new checksum. Offsets, times and order stay as they were; offsets get gaps.

1. The compacted segment is written beside the old ones (`*.swap`) and synced.
2. `swap-<base>` is put in place: from here on the swap will be finished, by us or by the next
   start. It is text with a checksum: the base of the compacted segment, which is that of the first
   it replaces, and those of the others, separated by commas. Readers are given the compacted
   segment now, by its open files, so that none of them depends on the renames that follow.
3. The files are renamed over the first old segment, the others are removed, then the marker.

A crash before 2 leaves the old segments, after it the new one. A disk that fails in 2 leaves the
old ones and in 3 the new one; what is left to do is kept in `Topic.unfinished_swap` and done before
anything else touches the segments. Readers of an old segment keep their open files; whoever opens
one again finds it gone or different and looks again.

What may not be removed: the newest sealed record, so that a reader at the end is never left before
a gap with nothing behind it, and the last record of what would become an empty segment. What is not
archived yet in a topic that is.

Sidecar rows of a compacted segment are flagged, carry no producer (the checkpoint, which is brought
up to date first, knows the producers), and cover what is left of the batches they stood for.
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
    segments: int  # how many there were
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
    """Finish, or undo, a swap that failed; the caller holds `topic.maintenance`."""
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
    """Where these segments are read: commits do not wait behind what comes from the tier."""
    if context.cache is None or all(segment.local for segment in old):
        return context.run
    return context.cache.in_thread


def _refuse_ended(topic: Topic) -> None:
    if topic.deleted:
        raise Conflict(f"topic {topic.name!r} was deleted")
    if topic.ending:
        raise Unavailable("the broker is stopping")


def _segments_to_compact(topic: Topic, bases: Sequence[int], keep: bytes) -> tuple[Segment, ...]:
    """The segments meant, if they may be compacted."""
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
        raise InvalidRequest(
            f"{len(keep) * 8} bits do not say which of {end - first} offsets to keep"
        )
    if topic.archived_offset is not None and end > topic.archived_offset:
        raise Conflict(
            f"topic {topic.name!r} is archived up to offset {topic.archived_offset}, "
            f"not up to {end}"
        )
    following = topic.segments[at + len(old)].base
    for place in topic.damage:
        lost = place.get("lost_from", -1) < following and place.get("lost_to", -1) > first
        if lost or place.get("base") in bases:
            raise Damaged(f"{place['what']}: what is damaged is not compacted", following)
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
    """Let `fresh`, whose files are beside those of `old`, take their place. The caller holds
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
                "topic %s: a failed swap (%s) could not be taken back yet: %s",
                topic.name,
                error,
                again,
            )
        raise
    fresh.pinned = True  # read by its open files: its names are not its own yet
    topic.unfinished_swap = UnfinishedSwap(marker, fresh)
    topic.replace(old, fresh)
    try:
        await finish_or_undo_swap(topic, context)
    except StorageError as error:
        log.error("topic %s: a swap counts, but is not finished on disk yet: %s", topic.name, error)
    await context.run(_forget, old)


def _forget(old: Sequence[Segment]) -> None:
    """In the pool: the last close of a removed file gives its blocks back, which takes time."""
    for segment in old:
        segment.forget_files()


def _take_back(fs: Fs, topic: Topic, marker: str) -> None:
    """The marker first, durably: without it the rest is only litter."""
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
    """Write it, sync it, open it for reading."""
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
    """Everything in the segment must match the checksums that it has."""
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
    """The files of the segment to be."""

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
        """Append what is wanted of a segment."""
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
        sizes = batch.ends - batch.starts + HEADER_SIZE
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
        """Records appended at the same time have one row."""
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
