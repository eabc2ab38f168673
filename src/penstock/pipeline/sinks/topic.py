"""The topic sink: append rows as records, in batches that the broker stores once.

With `appId`, task `t` of a query is the idempotent producer sha256(appId and query, t), and its
n-th append in batch `b` has the sequence 2**63 + b * 2**24 + n. From 2**63 on, sequences may leave
gaps, so they can contain the batch number. The rows alone determine how they are cut into appends.
A batch that runs again therefore sends the same appends with the same sequences, and the broker
returns its first answers.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidRequest, NotFound
from penstock.net.topic_link import TopicLink
from penstock.pipeline.sinks.held_rows import Held
from penstock.pipeline.sinks.identity import OTHER_ROWS, SinkWriter
from penstock.protocol import frames
from penstock.protocol.frames import SPARSE, Info
from penstock.protocol.kafka_batch import NewRecord
from penstock.protocol.names import partition_label
from penstock.protocol.partitions import partition_of
from penstock.protocol.sink_claims import Claim, Commit

# Columns for topics of format kafka, and their types. Other topics have no keys and ignore columns
# with these names.
KEYED = {
    "key": ("binary", "string"),
    "partition": ("int", "bigint", "smallint"),
    "headers": ("array<struct<key:string,value:binary>>",),
}
APPEND_ROWS = 65_536
APPEND_BYTES = 8 << 20
APPENDS_PER_BATCH = 1 << 24


def producer_id(app: str, task: int) -> bytes:
    """Return the producer id of a task."""
    return hashlib.sha256(f"{app}\0{task}".encode()).digest()[:16]


def sequence(batch: int, append: int) -> int:
    """Return the sequence of a task's n-th append in a batch."""
    if append >= APPENDS_PER_BATCH:
        raise InvalidRequest(
            f"one task of one batch makes at most {APPENDS_PER_BATCH} appends to a topic"
        )
    return SPARSE + batch * APPENDS_PER_BATCH + append


class Cutter:
    """Cuts payload arrays into appends. The cuts depend only on the payloads."""

    def __init__(self, rows: int = APPEND_ROWS, size: int = APPEND_BYTES) -> None:
        self._rows, self._size = rows, size
        self._held: list[pa.Array] = []
        self._held_rows = self._held_bytes = 0

    def add(self, payloads: pa.Array) -> Iterator[tuple[npt.NDArray[np.int64], memoryview]]:
        """Add payloads. Yield each complete append: its lengths and its joined payloads."""
        self._held.append(payloads)
        self._held_rows += len(payloads)
        self._held_bytes += payloads.nbytes
        if self._held_rows > self._rows or self._held_bytes > self._size:
            yield from self._cut(final=False)

    def rest(self) -> Iterator[tuple[npt.NDArray[np.int64], memoryview]]:
        """Yield the remaining appends after the last row."""
        if self._held_rows:
            yield from self._cut(final=True)

    def _cut(self, *, final: bool) -> Iterator[tuple[npt.NDArray[np.int64], memoryview]]:
        whole = pa.concat_arrays(self._held) if len(self._held) > 1 else self._held[0]
        ends = np.frombuffer(whole.buffers()[1], np.int32)[
            whole.offset : whole.offset + len(whole) + 1
        ].astype(np.int64)
        data = memoryview(whole.buffers()[2] or b"")
        row, count = 0, len(whole)
        while row < count:
            stop = min(
                row + self._rows, int(np.searchsorted(ends, ends[row] + self._size, "right")) - 1
            )
            stop = max(row + 1, stop)
            if stop >= count and not final:
                break  # the next rows may belong to this append
            yield np.diff(ends[row : stop + 1]), data[int(ends[row]) : int(ends[stop])]
            row = stop
        self._held = [whole.slice(row)] if row < count else []
        self._held_rows = count - row
        self._held_bytes = int(ends[-1] - ends[row]) + 4 * self._held_rows


class _Appender:
    """The appends of one task, to one or more topics."""

    def __init__(self, link: TopicLink, claim: Claim | None) -> None:
        self._link = link
        self._claim = claim
        self._cutters: defaultdict[str, Cutter] = defaultdict(Cutter)
        self._records: defaultdict[str, list[NewRecord]] = defaultdict(list)
        self._record_bytes: Counter[str] = Counter()
        self._infos: dict[str, Info] = {}
        self._appends: Counter[str] = Counter()

    def add(self, topic: str, payloads: pa.Array) -> None:
        for lengths, data in self._cutters[topic].add(payloads):
            self._append(topic, lengths, data)

    def finish(self) -> None:
        for topic, cutter in self._cutters.items():
            for lengths, data in cutter.rest():
                self._append(topic, lengths, data)
        for label in list(self._records):
            self._append_records(label)

    def has_keys(self, topic: str) -> bool:
        """Return whether the topic stores keys and headers. Create it if it is missing."""
        if topic not in self._infos:
            try:
                self._infos[topic] = self._link.info(topic)
            except NotFound:
                self._link.create(topic)
                self._infos[topic] = self._link.info(topic)
        return self._infos[topic].format == "kafka"

    def add_record(self, topic: str, record: NewRecord, partition: int | None) -> None:
        """Append a record to the given partition, that of its key, or that of the task."""
        partitions = self._infos[topic].partitions
        if partition is None and record.key is not None:
            partition = partition_of(bytes(record.key), partitions)
        elif partition is None:
            partition = (self._claim.task if self._claim else 0) % partitions
        if not 0 <= partition < partitions:
            raise InvalidRequest(
                f"topic {topic!r} has the partitions 0 to {partitions - 1}; a row names {partition}"
            )
        label = partition_label(topic, partition)
        size = len(record.value or b"") + len(record.key or b"")
        records = self._records[label]
        if len(records) >= APPEND_ROWS or (
            records and self._record_bytes[label] + size > APPEND_BYTES
        ):
            self._append_records(label)
        self._records[label].append(record)
        self._record_bytes[label] += size

    def _append_records(self, label: str) -> None:
        records = self._records.pop(label)
        self._record_bytes[label] = 0
        frame = frames.produce_records(label, records, self._producer(label))
        self._check(label, self._link.append(frame)[1], len(records))

    def _append(self, topic: str, lengths: npt.NDArray[np.int64], data: memoryview) -> None:
        frame = frames.produce_arrays(topic, lengths, [data], self._producer(topic))
        self._check(topic, self._link.append(frame)[1], len(lengths))

    def _producer(self, label: str) -> tuple[bytes, int] | None:
        """Return producer id and sequence of the next append to a partition."""
        if self._claim is None:
            return None
        number = sequence(self._claim.batch, self._appends[label])
        self._appends[label] += 1
        return producer_id(self._claim.app, self._claim.task), number

    def _check(self, label: str, stored: int, wanted: int) -> None:
        # 0: stored, but the broker has forgotten the offsets
        if self._claim and stored not in (0, wanted):
            raise InvalidRequest(
                f"batch {self._claim.batch} of {self._claim.app!r} was written to topic {label!r} "
                f"{OTHER_ROWS}: {stored} then, {wanted} now. Two writes must not share "
                "an appId. Give this one an appId of its own."
            )


class TopicWriter(SinkWriter):
    """`df.write` or `df.writeStream`, `.format("penstock").option("topic", ...)`."""

    kind = "topic"
    text_columns = ("topic",)
    place_columns = ("topic",)
    connect = TopicLink

    def columns(self) -> Sequence[str]:
        return (*(() if self._target else ("topic",)), "payload", *self._keyed)

    @property
    def _keyed(self) -> list[str]:
        """Return the names of the key, partition and header columns of the rows."""
        return [name for name, types in KEYED.items() if self._types.get(name) in types]

    def resumes_by_row(self, held: Held) -> bool:
        """Return True if one append has all rows: it is stored whole or not at all."""
        return held.rows <= APPEND_ROWS and held.size <= APPEND_BYTES

    def send(
        self,
        link: TopicLink,
        rows: Iterator[pa.RecordBatch],
        claim: Claim | None,
        first: int = 0,  # noqa: ARG002 - the broker leaves out the appends that are stored
    ) -> None:
        appender = _Appender(link, claim)
        for batch in rows:
            payloads = batch.column("payload").cast(pa.binary())
            if self._target:
                self._add(appender, self._target, batch, payloads)
                continue
            topics = batch.column("topic").dictionary_encode()
            if topics.null_count:
                raise InvalidRequest("a row has no topic: the column topic is null")
            for number, topic in enumerate(topics.dictionary.to_pylist()):
                own = pc.equal(topics.indices, number)
                self._add(appender, topic, batch.filter(own), payloads.filter(own))
        appender.finish()
        if claim:
            link.commit_sink(Commit(self._target, claim.app, claim.batch, claim.task))

    def _add(
        self, appender: _Appender, topic: str, rows: pa.RecordBatch, payloads: pa.Array
    ) -> None:
        """Append rows to a topic, with keys and headers if it stores them."""
        names = self._keyed
        if not names or not appender.has_keys(topic):
            # null becomes an empty record, the tombstone of a compacted topic
            appender.add(topic, pc.fill_null(payloads, b"") if payloads.null_count else payloads)
            return
        nothing = [None] * len(payloads)
        keys, places, headers = (
            rows.column(name).to_pylist() if name in names else nothing for name in KEYED
        )
        for value, key, place, pairs in zip(
            payloads.to_pylist(), keys, places, headers, strict=True
        ):
            raw = key.encode() if isinstance(key, str) else key
            given = [(pair["key"], pair["value"]) for pair in pairs or ()]
            appender.add_record(topic, NewRecord(value, raw, given), place)
