"""The archived part of topics, for the topic source: records that are in the table and no longer in
the log are read from there.

The offsets of a task decide what it reads, never where: a batch that is run again after the archive
moved on, was compacted, or after the log lost its beginning has the same records in the same order.
Drivers ask for the first offset with every batch, so what a table says is remembered for
`FRESH_SECONDS`; tasks open the table only when the log no longer has what they want.
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
    """What a table holds."""

    first: int
    next: int
    at: float  # when it was looked at


class ArchivedTopics:
    """Looks archived topics up. Picklable."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._options = Storage(root).options  # of the driver's environment: tasks have another
        self._bounds: dict[str, Bounds] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_bounds": {}}

    def first(self, topic: str, incarnation: str, local: int) -> int:
        """The first offset there is, in the table or in the log, which begins at `local`."""
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
                f"at {local}: what was between is gone. Leave the option 'archive' out to read the "
                "topic alone"
            )
        return min(local, bounds.first)

    def read(self, topic: str, incarnation: str, span: range) -> Iterator[ArchivedRecords]:
        """The records of a range that the log no longer has."""
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
        """The first archived offset whose record is not older; None when all of them are."""
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
        # few tasks need the table, and deltalake takes its time to be imported
        from penstock.pipeline.lake.convert import refuse_old
        from penstock.pipeline.lake.table import LakeTable

        table = LakeTable(self._root, "topic", topic, self._options)
        snapshot = table.open()
        refuse_old(table, snapshot)
        if snapshot is not None and snapshot.identity != incarnation:
            raise Conflict(
                f"topic {topic!r} was deleted and created again since it was archived to "
                f"{self._root}: leave the option 'archive' out, or name its own archive"
            )
        return table, snapshot


def _records(table: "LakeTable", files: list[DataFile], span: range) -> Iterator[ArchivedRecords]:
    for rows in read_range(table.storage, files, TOPIC, TOPIC.columns, span):
        times = rows.column("timestamp").cast(pa.int64()).to_numpy()
        yield ArchivedRecords(rows.column("offset").to_numpy(), times, rows.column("payload"))
