"""Read records from the archive table that are no longer in the log, for the topic source.

Offsets alone decide which records a task reads. A batch that runs again has the same records in the
same order, whether they are in the log or in the table by then. Drivers ask for the first offset
with every batch, so the bounds of a table are cached for `FRESH_SECONDS`. Tasks open the table only
if the log no longer has their records.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from penstock.errors import Conflict, InvalidOffset
from penstock.pipeline.lake.data_files import TOPIC, DataFile, read_range
from penstock.pipeline.lake.storage import Storage
from penstock.pipeline.source_columns import ArchivedRecords

if TYPE_CHECKING:
    from penstock.pipeline.lake.table import LakeTable, Snapshot

FRESH_SECONDS = 60.0


@dataclass(frozen=True)
class Bounds:
    """The offsets in a table."""

    first: int
    next: int
    at: float  # when the table was read


class ArchivedTopics:
    """Finds and reads archived topics. Picklable."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._options = Storage(root).options  # from the environment, which tasks lack
        self._bounds: dict[str, Bounds] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_bounds": {}}

    def first(self, topic: str, incarnation: str, local: int) -> int:
        """Return the first offset in the table or in the log, which begins at `local`."""
        bounds = self._bounds.get(topic)
        now = time.monotonic()
        if bounds is None or bounds.next < local or now - bounds.at > FRESH_SECONDS:
            _, snapshot = self._table(topic, incarnation)
            if snapshot is None or snapshot.position is None:
                return local
            first = min((file.first for file in snapshot.files()), default=snapshot.position)
            bounds = self._bounds[topic] = Bounds(first, snapshot.position, now)
        if bounds.next < local:
            raise Conflict(
                f"the archive of topic {topic!r} ends at offset {bounds.next} and the topic begins "
                f"at {local}: the records between them are lost. Leave out the option 'archive' to "
                "read only the topic"
            )
        return min(local, bounds.first)

    def read(self, topic: str, incarnation: str, span: range) -> Iterator[ArchivedRecords]:
        """Yield the records of a range that the log no longer has."""
        table, snapshot = self._table(topic, incarnation)
        if snapshot is None or snapshot.position is None or snapshot.position < span.stop:
            reach = snapshot.position if snapshot is not None else 0
            raise InvalidOffset(f"topic {topic!r} is archived up to offset {reach} only")
        files = snapshot.files()
        first = min((file.first for file in files), default=span.stop)
        if span.start < first:
            raise InvalidOffset(f"the archive of topic {topic!r} begins at offset {first}")
        yield from _records(table, files, span)

    def offset_at(self, topic: str, incarnation: str, milliseconds: int) -> int | None:
        """Return the first archived offset at or after a time, or None."""
        table, snapshot = self._table(topic, incarnation)
        wanted = milliseconds * 1000
        files = snapshot.files() if snapshot is not None else []
        for file in sorted(files, key=lambda one: one.first):
            if file.until is not None and file.until < wanted:
                continue
            if file.since is not None and file.since >= wanted:
                return file.first
            for records in _records(table, [file], range(file.first, file.last + 1)):
                later = np.flatnonzero(records.times >= wanted)
                if len(later):
                    return int(records.offsets[later[0]])
        return None

    def _table(self, topic: str, incarnation: str) -> "tuple[LakeTable, Snapshot | None]":
        # few tasks need the table, and importing deltalake is slow
        from penstock.pipeline.lake.convert import refuse_old
        from penstock.pipeline.lake.table import LakeTable

        table = LakeTable(self._root, "topic", topic, self._options)
        snapshot = table.open()
        refuse_old(table, snapshot)
        if snapshot is not None and snapshot.identity != incarnation:
            raise Conflict(
                f"topic {topic!r} was deleted and created again since it was archived to "
                f"{self._root}: leave out the option 'archive', or name the new topic's archive"
            )
        return table, snapshot


def _records(table: "LakeTable", files: list[DataFile], span: range) -> Iterator[ArchivedRecords]:
    for rows in read_range(table.storage, files, TOPIC, TOPIC.columns, span):
        times = rows.column("timestamp").cast(pa.int64()).to_numpy()
        yield ArchivedRecords(rows.column("offset").to_numpy(), times, rows.column("payload"))
