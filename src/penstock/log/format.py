"""The interface of a segment format: how commits are encoded, and how segments are recovered.

There are two formats: aiq's layout (`penstock.log.aiq`) and Kafka's record batches
(`penstock.log.batches`). The rest of a log (commits, fsyncs, rolls, repairs, checkpoints,
retention, tier, scrub) works with either. Both use the files of a directory as described in
`penstock.log.layout`; they differ in the files of a segment and their content.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from penstock.errors import InvalidRequest
from penstock.io.fs import Bytes, File, Fs
from penstock.log.layout import Checkpoint
from penstock.log.producers import AnyProducer, Producers
from penstock.log.segment import Mark, Segment, SegmentCheck, Write
from penstock.log.topic_directory import TopicDirectory
from penstock.protocol.kafka_batch import BatchHead, NewRecord


class InvalidRecord(InvalidRequest):
    """The topic's format cannot store the record."""


class Arrays(NamedTuple):
    """Payloads that lie one after another."""

    lengths: np.ndarray  # int64
    payloads: memoryview


class ReadyBatch(NamedTuple):
    """A record batch that a Kafka client built; its checksum was verified."""

    head: BatchHead
    data: memoryview


class Records(NamedTuple):
    """Records with keys, headers, timestamps, or without values."""

    records: Sequence[NewRecord]


# The content of an append: payloads in a list, joined, or of equal length in a table; records with
# keys; or a batch.
Content = list[Bytes] | Arrays | np.ndarray | Records | ReadyBatch


class ActiveRecovery(Protocol):
    """The active segment while it is being opened (`penstock.log.active_recovery`)."""

    def open(self) -> bool: ...

    def skip_lost(self) -> list[Segment]: ...


class SegmentFormat(Protocol):
    name: str
    kinds: tuple[str, ...]  # files of a segment, in the order in which a roll renames them
    written: tuple[str, ...]  # files that a commit appends to, in this order
    synced_before: tuple[str, ...]  # of these, files that are synced before the next one is written
    keyed: bool  # whether it can store keys, headers, null values and batches

    # Writing

    def new_segment(self, fs: Fs, directory: Path, base: int, *, sealed: bool) -> Segment: ...

    def add(self, write: Write, content: Content, producer: AnyProducer | None) -> None:
        """Encode the content of an append and add it to the commit."""

    def rebase(self, writes: Sequence[Write]) -> Mapping[str, Sequence[Bytes]]:
        """Return the files of a segment that begins with these writes, by kind."""

    def companions(self, segment: Segment, mark: Mark, /) -> dict[str, bytes]:
        """Return the files to replace at a checkpoint, by name. The segment is at `mark`."""

    def seals(self, segment: Segment, mark: Mark, /) -> dict[str, bytes]:
        """Return the files to replace before the segment is sealed at `mark`, by kind."""

    # Opening

    def first_offset(self, data: File) -> int:
        """Return the first offset of a data file; -1 if it is unknown."""

    def described_size(self, kind: str, content: bytes) -> int:
        """Return the size of the data file according to a file of this kind."""

    def described_end(self, kind: str, content: bytes) -> int:
        """Return the offset after the last record according to a file of this kind; 0: none."""

    def proven_base(
        self, directory: TopicDirectory, sealed: list[int], checkpoint: Checkpoint | None
    ) -> int | None:
        """Return the first offset of the active segment, if a file with a checksum has it."""

    def open_sealed(
        self, directory: TopicDirectory, base: int, following: int | None
    ) -> Segment: ...

    def open_active(
        self,
        directory: TopicDirectory,
        sealed: list[Segment],
        checkpoint: Checkpoint | None,
        proven: int | None,
    ) -> ActiveRecovery: ...

    def replay(self, producers: Producers, segment: Segment, start: Checkpoint | None) -> None:
        """Add the producers of a segment. With `start`, only of batches after this checkpoint."""

    # Checking

    def check(self, segment: Segment) -> SegmentCheck:
        """Return the check that a scrub makes of a sealed segment."""
