"""Read shared topics without a broker: new batches from PostgreSQL, older ones from object storage.

A range is read in pages, one statement each, so that no snapshot stays open for long. Between two
pages, the mover may replace batches by references to an object. It may also delete an object that
it merged into another one. If a page's object is gone, the page is read again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import Conflict, Damaged, InvalidOffset, InvalidRequest, NotFound
from penstock.log.batches.decode import Columns, decode_batches
from penstock.log.batches.segment import batch_of
from penstock.log.topic_files import Slice, slice_of
from penstock.object_store import ObjectStore
from penstock.pipeline.options import TopicSourceOptions
from penstock.pipeline.sources.postgres import Postgres
from penstock.protocol.kafka_batch import assigned, checked
from penstock.protocol.names import split_label

PAGE_BYTES = 8 << 20  # of one statement; the last batch may exceed it
PAGE_ROWS = 2048
SAMPLE_ROWS = 100  # the newest, from which the size of a record is estimated

LOG = f"""
  SELECT l.id, encode(uuid_send(l.incarnation), 'hex'), l.next_offset,
         coalesce((SELECT b.base_offset FROM shared_batches b WHERE b.log_id = l.id
                    ORDER BY b.last_offset LIMIT 1), l.next_offset),
         (SELECT count(*) FROM shared_logs p WHERE p.topic = l.topic),
         (SELECT (sum(b.size) / greatest(1, sum(b.records)))::float8
            FROM (SELECT size, records FROM shared_batches WHERE log_id = l.id
                   ORDER BY last_offset DESC LIMIT {SAMPLE_ROWS}) b)
    FROM shared_logs l WHERE l.topic = $1 AND l.partition = $2 AND NOT l.moving"""
FIRST_FROM = "SELECT coalesce(base_offset, next_offset) FROM shared_read($1, $2, 1, 1)"
PAGE = f"""
  SELECT base_offset, last_offset, timeline, data, object, position, size
    FROM shared_read($1, $2, {PAGE_BYTES}, {PAGE_ROWS}) WHERE base_offset < $3"""


class SharedLogState(NamedTuple):
    """The current state of a shared topic's partition in the database."""

    log_id: int
    incarnation: str
    next: int
    first: int
    partitions: int  # of the topic
    record_bytes: float | None  # average size of a record; None: no records


class SharedTopicReader:
    """Reads shared topics without a broker. Picklable."""

    def __init__(self, options: TopicSourceOptions) -> None:
        self._postgres = Postgres(options)
        self._tier = options.shared_tier
        self._store: ObjectStore | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_store": None}

    def names(self) -> list[str]:
        names = "SELECT DISTINCT topic FROM shared_logs WHERE NOT moving"
        return [name for (name,) in self._postgres.rows(names)]

    def find(self, label: str) -> SharedLogState | None:
        """Return the state of a partition; None if the shared topic does not exist."""
        rows = self._postgres.rows(LOG, split_label(label))
        return SharedLogState(*rows[0]) if rows else None

    def first_from(self, state: SharedLogState, offset: int) -> int:
        """Return the first offset, not below `offset`, that may have a record."""
        rows = self._postgres.rows(FIRST_FROM, (state.log_id, offset))
        return max(offset, rows[0][0] if rows else state.next)

    def offset_at(self, label: str, state: SharedLogState, milliseconds: int) -> int:
        """Return the first offset of this time or later; the next offset if there is none."""
        query = "SELECT shared_offset_at($1, $2)"
        ((base,),) = self._postgres.rows(query, (state.log_id, milliseconds))
        if base is None:
            return state.next
        for piece in self.read(label, state.incarnation, base, state.next, keyed=False):
            later = np.flatnonzero(piece.times >= milliseconds * 1000)
            if len(later):
                return int(piece.offsets[later[0]])
        return state.next

    def read(
        self, label: str, incarnation: str, start: int, end: int, *, keyed: bool
    ) -> Iterator[Slice]:
        """Yield the records in [start, end). Raises InvalidOffset if they have aged out, Damaged if
        a failover lost them, Conflict if the topic was recreated, NotFound if it was deleted."""
        missing = ""  # the object that was not found
        while start < end:
            log = self._require(label, incarnation)
            if start < log.first:
                raise InvalidOffset(
                    f"offset {start} has aged out; the first one left is {log.first}"
                )
            page = self._postgres.rows(PAGE, (log.log_id, start, end))
            if not page and log.next < end:
                raise Damaged(
                    f"the database ends at offset {log.next}: a failover lost what followed", end
                )
            if not page:
                return  # compaction removed all records up to `end`
            for row in page:
                try:
                    data = self._batches(row)
                except NotFound:
                    if missing == row[4]:
                        raise
                    missing = row[4]
                    break
                columns = decode_batches(data, start, end)
                if piece := _slice(columns, start, end, keyed=keyed):
                    yield piece
                start = row[1] + 1

    def _require(self, label: str, incarnation: str) -> SharedLogState:
        log = self.find(label)
        if log is None:
            raise NotFound(f"topic {label!r} was deleted")
        if log.incarnation != incarnation:
            raise Conflict(
                f"topic {label!r} was deleted and created again: incarnation {log.incarnation}, "
                f"not {incarnation}"
            )
        return log

    def _batches(self, row: tuple[Any, ...]) -> bytes:
        """Return the batches of a row, which contains or references them."""
        base, last, timeline, data, name, position, size = row
        if name is None:
            return assigned(data, base, timeline)
        if self._tier is None:
            raise InvalidRequest(
                f"offsets {base} to {last} are in object storage: set the option 'sharedTier' to "
                "the brokers' topics.shared_tier"
            )
        self._store = self._store or ObjectStore(self._tier, create=False)
        return checked(self._store.read_range(name, position, size), base, last + 1)


def _slice(columns: Columns, start: int, end: int, *, keyed: bool) -> Slice | None:
    first, stop = np.searchsorted(columns.offsets, [start, end]).tolist()
    if first == stop:
        return None
    part = slice(first, stop)
    return slice_of(batch_of(columns, part, end), columns.times[part] * 1000, keyed=keyed)
