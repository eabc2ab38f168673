"""What a format of segments decides: how a commit is encoded, and how what is on disk is recovered.

Two formats: aiq's layout (`penstock.log.aiq`) and Kafka's record batches (`penstock.log.batches`).
Everything else of a log (commits, fsyncs, rolls, repairs, checkpoints, retention, tier, scrub) asks
its format and does not know which one it is. Both keep the files of a directory as
`penstock.log.layout` says; what differs is which files a segment has and what is in them.
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
    """A record has what the topic's format has no room for: a key, headers or a null value."""


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


# What one append brings: payloads in a list, one after another, or of one length in a table;
# records with keys; or a batch.
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
    keyed: bool  # whether it has room for keys, headers, null values and batches

    # Writing

    def new_segment(self, fs: Fs, directory: Path, base: int, *, sealed: bool) -> Segment: ...

    def add(self, write: Write, content: Content, producer: AnyProducer | None) -> None:
        """Encode what an append brings and add it to the commit."""

    def rebase(self, writes: Sequence[Write]) -> Mapping[str, Sequence[Bytes]]:
        """Return the files of a segment that begins with these writes, by kind."""

    def companions(self, segment: Segment, mark: Mark, /) -> dict[str, bytes]:
        """Files that are replaced with each checkpoint, by name; the segment is at `mark`."""

    def seals(self, segment: Segment, mark: Mark, /) -> dict[str, bytes]:
        """Files of a segment that are replaced before it is sealed at `mark`, by kind."""

    # Opening

    def first_offset(self, data: File) -> int:
        """Return the offset that a data file begins with, -1 when it cannot be known."""

    def described_size(self, kind: str, content: bytes) -> int:
        """Return how much data there is according to a file of this kind."""

    def described_end(self, kind: str, content: bytes) -> int:
        """Return the offset after the last record that a file of this kind knows of; 0: none."""

    def proven_base(
        self, directory: TopicDirectory, sealed: list[int], checkpoint: Checkpoint | None
    ) -> int | None:
        """Return the first offset of the active segment as something with a checksum tells it."""

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
        """Add the batches of a segment; with `start`, those after this checkpoint of it."""

    # Checking

    def check(self, segment: Segment) -> SegmentCheck:
        """Return the check that a scrub makes of a sealed segment."""
