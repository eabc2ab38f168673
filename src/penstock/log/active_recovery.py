"""Open the active segment: the part of recovery that both formats share.

The beginning of the segment is trusted as far as checkpoint and index cover it; the rest is read.
Losses are written to `damage.json` before anything is cut, because the cut destroys the only other
evidence.
"""

import logging
from abc import ABC, abstractmethod
from typing import NamedTuple

from penstock.errors import StorageError
from penstock.log.format import SegmentFormat
from penstock.log.layout import CHECKPOINT, CLEAN, DATA, Checkpoint, label_of
from penstock.log.segment import Segment
from penstock.log.topic_directory import MAX_OFFSET, TopicDirectory
from penstock.log.writer import skip_to

log = logging.getLogger("penstock.topics")


class EndClaim(NamedTuple):
    """The end of the records according to one file."""

    end: int  # the offset after the last one
    file: str


class OpeningSegment(ABC):
    """An active segment that is being opened.

    `sealed` are the segments before it. `proven` is its base, if a checksum covers it.
    """

    def __init__(
        self,
        form: SegmentFormat,
        directory: TopicDirectory,
        sealed: list[Segment],
        checkpoint: Checkpoint | None,
        proven: int | None,
        segment: Segment,
    ) -> None:
        self._format = form
        self._directory = directory
        self._sealed = sealed
        self._checkpoint = checkpoint
        directory.create_missing(form.kinds, checkpoint, sealed)
        self._data = segment.file(DATA)
        self._floor = sealed[-1].end if sealed else 0  # its base is not below this
        base = self.likely_base() if proven is None else proven
        segment.begin_at(base)
        # The checkpoint, if it belongs to this segment.
        self._here = checkpoint if checkpoint and checkpoint.base == base else None
        # True if data is missing that the checkpoint calls durable.
        self._shorter = self._here is not None and self._here.data_size > self._data.size
        self._state = CLEAN if checkpoint is None or self._shorter else checkpoint.state

    @property
    @abstractmethod
    def segment(self) -> Segment: ...

    @abstractmethod
    def likely_base(self) -> int:
        """Return the best guess of the first offset when no checksum covers it."""

    @abstractmethod
    def open(self) -> bool:
        """Open the segment. Return whether anything had to be read, cut or rebuilt."""

    def skip_lost(self) -> list[Segment]:
        """Skip lost offsets, so that no record gets them again. Return the new active segment,
        preceded by the one that was closed for it.
        """
        end = self._directory.damage.end
        if self.segment.end >= end:
            return [self.segment]
        return skip_to(self._format, self.segment, end)

    def report_lost(self, claims: list[EndClaim], more: str = "") -> None:
        """Report records as lost if any other file claims a later end."""
        segment, directory = self.segment, self._directory
        if self._checkpoint is not None:
            claims = [*claims, EndClaim(self._checkpoint.next_offset, CHECKPOINT)]
        claims += [
            EndClaim(orphan.end, f"the rest of segment {base}")
            for base, orphan in directory.orphans.items()
        ]
        known = (claim for claim in claims if claim.end < MAX_OFFSET)
        end, file = max(known, key=lambda claim: claim.end, default=EndClaim(0, ""))
        if end <= max(segment.end, directory.damage.end):
            return
        if not segment.rows and self._sealed and self._sealed[-1].compacted:
            segment.begin_at(end)  # compaction may have removed them
            return
        text = f"offsets {segment.end} to {end - 1} are not in {DATA}{more}, {file} had them"
        directory.damage.report_lost(text, DATA, segment.end, end)

    def report_unfinished(self, where: str) -> None:
        self._directory.report(
            "unfinished",
            f"the last commit, {where}, is incomplete and is dropped: it was being written when "
            "the broker ended, and was not acknowledged",
        )

    def cut(self) -> None:
        """Copy the bytes after the last record to quarantine, then cut them off."""
        segment, directory = self.segment, self._directory
        if self._data.size <= segment.data_size:
            return
        name = f"quarantine-{segment.base:020d}-{segment.data_size}.bin"
        if not directory.fs.exists(directory.path / name):
            directory.quarantine(segment, segment.data_size, self._data.size)
        self._data.truncate(segment.data_size)

    def sync(self, *kinds: str) -> None:
        """Sync the files, so that the segment counts as durable."""
        if not self._directory.context.durable:
            return
        try:
            for kind in kinds:
                self.segment.file(kind).sync()
            self._directory.fs.sync_dir(self._directory.path)
        except StorageError as error:
            log.error(
                "topic %s: the recovered segment could not be synced: %s",
                label_of(self._directory.path),
                error,
            )
