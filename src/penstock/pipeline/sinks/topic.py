"""The topic sink: rows become records, in batches that the broker recognises when they come again.

With `appId`, task `t` of a query is the idempotent producer sha256(appId and query, t) and its n-th
append in batch `b` has the sequence 2**63 + b * 2**24 + n. Sequences from 2**63 on may leave gaps
(the broker only asks them to grow), which is what lets a batch number be part of them. How rows are
cut into appends depends on the rows alone, so a batch run again sends the same appends under the
same numbers, and the broker answers them with what it stored the first time.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidRequest
from penstock.net.topic_link import TopicLink
from penstock.pipeline.sinks.held_rows import Held
from penstock.pipeline.sinks.identity import OTHER_ROWS, SinkWriter
from penstock.protocol import frames
from penstock.protocol.frames import SPARSE
from penstock.protocol.sink_claims import Claim, Commit

APPEND_ROWS = 65_536
APPEND_BYTES = 8 << 20
APPENDS_PER_BATCH = 1 << 24


def producer_id(app: str, task: int) -> bytes:
    """The idempotent producer that a task is."""
    return hashlib.sha256(f"{app}\0{task}".encode()).digest()[:16]


def sequence(batch: int, append: int) -> int:
    """The producer's sequence of a task's n-th append in a batch."""
    if append >= APPENDS_PER_BATCH:
        raise InvalidRequest(
            f"one task of one batch makes at most {APPENDS_PER_BATCH} appends to a topic"
        )
    return SPARSE + batch * APPENDS_PER_BATCH + append


class Cutter:
    """Cuts a stream of payload arrays into appends at places that depend on the payloads alone."""

    def __init__(self, rows: int = APPEND_ROWS, size: int = APPEND_BYTES) -> None:
        self._rows, self._size = rows, size
        self._held: list[pa.Array] = []
        self._held_rows = self._held_bytes = 0

    def add(self, payloads: pa.Array) -> Iterator[tuple[npt.NDArray[np.int64], memoryview]]:
        """The appends that are complete now: lengths, and the payloads one after another."""
        self._held.append(payloads)
        self._held_rows += len(payloads)
        self._held_bytes += payloads.nbytes
        if self._held_rows > self._rows or self._held_bytes > self._size:
            yield from self._cut(final=False)

    def rest(self) -> Iterator[tuple[npt.NDArray[np.int64], memoryview]]:
        """The appends that are left when no rows come any more."""
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
                break  # the rows to come may still belong to this append
            yield np.diff(ends[row : stop + 1]), data[int(ends[row]) : int(ends[stop])]
            row = stop
        self._held = [whole.slice(row)] if row < count else []
        self._held_rows = count - row
        self._held_bytes = int(ends[-1] - ends[row]) + 4 * self._held_rows


class _Appender:
    """One task's appends, to one or many topics."""

    def __init__(self, link: TopicLink, claim: Claim | None) -> None:
        self._link = link
        self._claim = claim
        self._cutters: defaultdict[str, Cutter] = defaultdict(Cutter)
        self._appends: Counter[str] = Counter()

    def add(self, topic: str, payloads: pa.Array) -> None:
        for lengths, data in self._cutters[topic].add(payloads):
            self._append(topic, lengths, data)

    def finish(self) -> None:
        for topic, cutter in self._cutters.items():
            for lengths, data in cutter.rest():
                self._append(topic, lengths, data)

    def _append(self, topic: str, lengths: npt.NDArray[np.int64], data: memoryview) -> None:
        claim, producer = self._claim, None
        if claim:
            number = sequence(claim.batch, self._appends[topic])
            producer = producer_id(claim.app, claim.task), number
        self._appends[topic] += 1
        _, count = self._link.append(frames.produce_arrays(topic, lengths, [data], producer))
        # 0: stored long ago, and no longer known where
        if claim and count not in (0, len(lengths)):
            raise InvalidRequest(
                f"batch {claim.batch} of {claim.app!r} was written to topic {topic!r} "
                f"{OTHER_ROWS}: {count} where there are {len(lengths)} now. Two writes never share "
                "an appId. Give this one an appId of its own."
            )


class TopicWriter(SinkWriter):
    """`df.write` or `df.writeStream`, `.format("penstock").option("topic", ...)`."""

    kind = "topic"
    text_columns = ("topic",)
    place_columns = ("topic",)
    connect = TopicLink

    def columns(self) -> Sequence[str]:
        return ("payload",) if self._target else ("topic", "payload")

    def resumes_by_row(self, held: Held) -> bool:
        """A topic has all rows of an append or none, and each topic gets one."""
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
            if payloads.null_count:
                # no value: an empty record, the tombstone of a compacted topic
                payloads = pc.fill_null(payloads, b"")
            if self._target:
                appender.add(self._target, payloads)
                continue
            topics = batch.column("topic").dictionary_encode()
            if topics.null_count:
                raise InvalidRequest("a row has no topic: the column topic is null")
            for number, topic in enumerate(topics.dictionary.to_pylist()):
                appender.add(topic, payloads.filter(pc.equal(topics.indices, number)))
        appender.finish()
        if claim:
            link.commit_sink(Commit(self._target, claim.app, claim.batch, claim.task))
