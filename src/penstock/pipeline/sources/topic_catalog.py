"""Read topics for the topic source, as `Slice`s of records, from one or more of these places.

Broker: lists the topics and their offsets, and sends records over TCP.
Directory: with a broker, records come from its files, which is faster. A driver on the broker's
    machine finds the directory in the configuration; a task checks the incarnation of the files.
    Without a broker, serves topics that no broker has open.
Tier: records in object storage are read from there, the rest from the broker or its files.
Database: shared topics are read from the database and the store (`shared_topics`). Only local
    topics need a broker then.
Archive: records that the log no longer has are read from the table (`archived_topics`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.config.database_url import data_directory_here
from penstock.errors import (
    Conflict,
    Damaged,
    InvalidOffset,
    NotFound,
    PenstockError,
)
from penstock.log.layout import DATA, HEADER_SIZE, find_logs, has_batches, log_path
from penstock.log.tier_reader import TierReader
from penstock.log.topic_files import Slice, TopicFiles
from penstock.net.topic_link import TopicLink
from penstock.pipeline.options import TopicSourceOptions
from penstock.pipeline.source_columns import ArchivedRecords
from penstock.pipeline.sources.shared_topics import SharedLogState, SharedTopicReader
from penstock.protocol.frames import RECORD_BATCHES, Fetched
from penstock.protocol.names import partition_label, split_label
from penstock.protocol.record_batch import Batch

FETCH_BYTES = 4 << 20


@dataclass(frozen=True)
class TopicState:
    """The state of a topic at one moment."""

    incarnation: str
    first: int  # the first offset it still has
    next: int  # the offset after the last
    bytes: int
    partitions: int = 1  # of the topic
    ordered: bool = True  # times never decrease; False if producers set them

    @property
    def mean_bytes(self) -> float:
        """Return the mean size of a record with its header."""
        records = self.next - self.first
        return max(float(HEADER_SIZE), self.bytes / records) if records > 0 else float(HEADER_SIZE)


class Topics:
    """Finds and reads topics. Picklable. Connects at first use."""

    def __init__(self, options: TopicSourceOptions, *, keyed: bool = False) -> None:
        self.given = options
        # the data directory of a broker here; tasks check that it is the right one
        near = options.broker and not options.directory
        self._near = data_directory_here() if near else None
        self.keyed = keyed  # whether keys and headers are wanted
        self._link: TopicLink | None = None
        self._tier: TierReader | None = None
        self._shared = SharedTopicReader(options) if options.database else None
        self._archive = None
        if options.archive:
            from penstock.pipeline.sources.archived_topics import ArchivedTopics

            self._archive = ArchivedTopics(options.archive)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_link": None, "_tier": None}

    @property
    def link(self) -> TopicLink:
        o = self.given
        assert o.broker is not None
        self._link = self._link or TopicLink(o.broker, o.broker_timeout, o.token, o.ca)
        return self._link

    def close(self) -> None:
        """Close the connections. The next call opens them again."""
        if self._tier is not None:
            self._tier.close()
            self._tier = None
        if self._link is not None:
            self._link.close()
            self._link = None

    def names(self) -> list[str]:
        if self.given.broker:
            return self.link.names()
        if self._shared is not None and not self.given.directory:
            return self._shared.names()
        logs = find_logs(Path(self.given.directory or ""))
        labels = [label for label, path in logs.items() if (path / DATA).exists()]
        return list(dict.fromkeys(split_label(label)[0] for label in labels))

    def partitions(self, topic: str) -> list[str]:
        """Return the labels of the topic's partitions. A label returns itself."""
        if "/" in topic:
            return [topic]
        count = self._log_state(topic).partitions
        return [partition_label(topic, number) for number in range(count)]

    def state(self, topic: str, start: int = -1) -> TopicState:
        """Return the current state. The archive is read only if the log begins after `start`."""
        state = self._log_state(topic)
        if self._archive is None or start >= state.first:
            return state
        first = self._archive.first(topic, state.incarnation, state.first)
        size = state.bytes + round(state.mean_bytes * (state.first - first))
        return replace(state, first=first, bytes=size)

    def _shared_log(self, topic: str) -> SharedLogState | None:
        """Return the topic in the database, or None if its records are elsewhere."""
        if self._shared is None:
            return None
        log = self._shared.find(topic)
        if log is None and not self.given.broker and not self.given.directory:
            raise NotFound(
                f"shared topic {topic!r} does not exist; local ones need the option 'broker'"
            )
        return log

    def _log_state(self, topic: str) -> TopicState:
        log = self._shared_log(topic)
        if log is not None:
            size = round((log.record_bytes or 0) * (log.next - log.first))
            return TopicState(
                log.incarnation, log.first, log.next, size, log.partitions, ordered=False
            )
        if self.given.broker:
            info = self.link.info(topic)
            return TopicState(
                info.incarnation.hex(),
                info.first_offset,
                info.next_offset,
                info.bytes,
                info.partitions,
                info.format == "aiq",
            )
        files = self._files(topic)
        first, following = files.bounds()
        plain, partitions = True, 1
        if has_batches(files.directory):
            plain, partitions = False, sum(one.is_dir() for one in files.directory.parent.iterdir())
        size = files.bytes()
        return TopicState(files.incarnation, first, following, size, partitions, plain)

    def offset_at(self, topic: str, milliseconds: int) -> int:
        """Return the first offset whose record is not older than this time."""
        if self._archive is not None:
            log = self._log_state(topic)
            archived = self._archive.offset_at(topic, log.incarnation, milliseconds)
            if archived is not None and archived < log.first:
                return archived
        shared = self._shared_log(topic)
        if self._shared is not None and shared is not None:
            return self._shared.offset_at(topic, shared, milliseconds)
        if self.given.broker:
            return self.link.offset_at(topic, milliseconds)
        return self._files(topic).offset_at(milliseconds * 1000)

    def first_from(self, topic: str, offset: int) -> int:
        """Return the first offset of a record from `offset` on, or `offset` if unknown."""
        if self._archive is not None and offset < self._log_state(topic).first:
            return offset
        shared = self._shared_log(topic)
        if self._shared is not None and shared is not None:
            return self._shared.first_from(shared, offset)
        if not self.given.broker:
            return offset
        try:
            return max(offset, self.link.fetch(topic, offset, 1).first_offset)
        except (Damaged, InvalidOffset):  # `read` raises it again
            return offset

    def read(
        self, topic: str, incarnation: str, start: int, end: int
    ) -> Iterator[Slice | ArchivedRecords]:
        """Yield the records in [start, end). Raises InvalidOffset if they were deleted, Conflict if
        the topic was created again."""
        if self._archive is None:
            yield from self._read_log(topic, incarnation, start, end)
            return
        while start < end:
            first = min(end, self._log_state(topic).first)
            if start < first:
                yield from self._archive.read(topic, incarnation, range(start, first))
                start = first
                continue
            try:
                for piece in self._read_log(topic, incarnation, start, end):
                    yield piece
                    start = int(piece.offsets[-1]) + 1
                return
            except InvalidOffset:
                if self._log_state(topic).first <= start:
                    raise
                # retention has deleted records meanwhile: the archive has them

    def _read_log(self, topic: str, incarnation: str, start: int, end: int) -> Iterator[Slice]:
        if self._shared is not None and self._shared_log(topic) is not None:
            yield from self._shared.read(topic, incarnation, start, end, keyed=self.keyed)
            return
        if self.given.tier:
            self._tier = self._tier or TierReader(self.given.tier)
            for piece in self._tier.read(incarnation, start, end):
                yield piece
                start = int(piece.offsets[-1]) + 1
        files = self._files(topic) if self.given.directory else self._near_files(topic, incarnation)
        if files is None:
            yield from self._fetch(topic, incarnation, start, end)
            return
        if files.incarnation != incarnation:
            raise _recreated(topic, incarnation, files.incarnation)
        if self.given.broker and files.tiered and start < (first := files.bounds()[0]):
            yield from self._fetch(topic, incarnation, start, min(first, end))
            start = first
        if start < end:
            yield from files.read(start, end, keyed=self.keyed)

    def _fetch(self, topic: str, incarnation: str, start: int, end: int) -> Iterator[Slice]:
        while start < end:
            fetched = self.link.fetch(topic, start, FETCH_BYTES, keyed=self.keyed, end=end)
            if (actual := fetched.incarnation.hex()) != incarnation:
                raise _recreated(topic, incarnation, actual)
            if fetched.records:
                if fetched.format == RECORD_BATCHES:
                    piece = _keyed_slice(fetched, start, end)
                else:
                    piece = _slice(fetched.raw, fetched.lengths, fetched.times, end)
                if len(piece.offsets):  # else compaction left nothing before `end`
                    yield piece
            elif fetched.next_offset <= start:
                return  # the end of the log
            start = fetched.next_offset

    def _near_files(self, topic: str, incarnation: str) -> TopicFiles | None:
        """Return the topic's files with this incarnation, if this machine has them."""
        if self._near is None:
            return None
        directory = log_path(self._near, topic)
        try:
            files = TopicFiles(directory) if directory.is_dir() else None
            return files if files is not None and files.incarnation == incarnation else None
        except (OSError, PenstockError):  # no permission, or not readable
            return None

    def _files(self, topic: str) -> TopicFiles:
        directory = log_path(Path(self.given.directory or ""), topic)
        if not directory.is_dir():
            raise NotFound(f"topic {topic!r} does not exist in {self.given.directory}")
        return TopicFiles(directory)


def _recreated(topic: str, expected: str, actual: str) -> Conflict:
    return Conflict(
        f"topic {topic!r} was deleted and created again: incarnation {actual}, not {expected}"
    )


def _keyed_slice(fetched: Fetched, start: int, end: int) -> Slice:
    batch = Batch.decoded("", 0, fetched.raw, start, fetched.next_offset).until(end)
    records = list(batch)
    times = np.array([(one.timestamp or 0) * 1000 for one in records], np.int64)
    piece = _slice(batch.raw, batch.lengths, times, end) if records else _NO_RECORDS
    return piece._replace(records=records)


_NOTHING = np.empty(0, np.int64)
_NO_RECORDS = Slice(memoryview(b""), np.zeros(1, np.int64), _NOTHING, _NOTHING)


def _slice(raw: memoryview, lengths: np.ndarray, times: np.ndarray, end: int) -> Slice:
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths.astype(np.int64) + HEADER_SIZE, out=starts[1:])
    # With a stride of one byte, entry p is the integer that begins at byte p.
    offsets = np.ndarray(len(raw) - 7, "<u8", raw, strides=(1,))[starts[:-1]].astype(np.int64)
    keep = int(np.searchsorted(offsets, end))
    return Slice(raw, starts[: keep + 1], offsets[:keep], times[:keep])
