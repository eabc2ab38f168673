"""Give a sink's rows an identity, so that the target recognizes them when a batch runs again.

Spark runs a batch again after a crash, and a task again after a failure. It passes neither the
query nor the batch to a Python sink, but the local properties of the task have both, also inside
`foreachBatch`. The user names the application with the option `appId`. So the identity of a row is
(appId, query, batch, task, row). The sinks convert it to an idempotent producer's sequence (topics)
or a transactionId (queues). The query belongs to the checkpoint: with a new checkpoint, batches
count from 0 again and have other rows. A write without a stream is batch 0 of its appId; repeating
it adds nothing.

An identity needs the same content every time. So a task holds all its rows and claims its place at
the broker with their checksums (`penstock.topics.write_claims` has the rules). Then it writes them,
or drops them because an earlier run has written them all, or hands them to the driver. No task
waits for another one while it occupies a core: the driver writes after all tasks have claimed. A
batch that runs again with other rows is rejected before anything new of it is written.

A row keeps its number only if a repeated batch gives each task the same rows in the same order. Our
sources do so; a shuffle does not. Therefore `orderBy` names the columns by which a task sorts its
rows before it writes them. They are the keys of the rows: a task that is done is compared only by
keys, because other values, such as sums of floats, may differ between runs.
"""

import sys
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.errors import Conflict, InvalidRequest, Unavailable
from penstock.pipeline.failure import plain_errors
from penstock.pipeline.options import SinkOptions
from penstock.pipeline.sinks.held_rows import EARLIER, Checksum, Held, TwoCrcs
from penstock.protocol.sink_claims import Claim, Claimed, Commit

QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
# of a task's rows that the driver may write; Spark limits those of all tasks to 1 GiB
HANDED_BYTES = 16 << 20
POLL_SECONDS = 0.2
# A task with more than HANDED_BYTES waits for those of an earlier run, this long for the next one.
WAIT_SECONDS = 120.0
OTHER_ROWS = "before with other rows"


@dataclass
class Written(WriterCommitMessage):
    """A task's message to the driver: its claim, and its rows if the driver writes them."""

    claim: Claim | None = None
    rows: bytes = b""  # Arrow's stream format


def rejection(claim: Claim, answer: Claimed) -> Conflict:
    """Return the error of a task whose rows must not be written."""
    place = f"batch {claim.batch} of {claim.app!r}"
    if answer.verdict == "behind":
        return Conflict(
            f"{place} is behind batch {answer.newest}, which was written already: this checkpoint "
            "was copied or restored, and another run went on from it. Nothing of it was written. "
            "Go on from the newest checkpoint, or give this one a new appId, which writes the rows "
            "from here on once more."
        )
    what = f"task {claim.task}"
    if answer.verdict == "later":
        what = f"task {answer.tasks[0]}, which has no rows now"
    return Conflict(
        f"{place} was written to {claim.target or 'its targets'} {OTHER_ROWS} ({what}), in full or "
        "in part. Nothing of it was written now. The rows come from the batch's records, the steps "
        "and the source's options. Were steps or options changed? Run the batch with the steps it "
        "was begun with, and change them when it is done. Do results differ from run to run "
        "(rand(), the current time, sums of DOUBLE)? Let orderBy name the columns that identify a "
        "row, and sum DECIMAL or round in the step. Is this another write? Give it an appId of its "
        "own. A new appId writes all rows of this batch once more, those that are stored too."
    )


def wait_for_turn(link: Any, claim: Claim) -> Claimed:
    """Claim again until the tasks of an earlier run have come."""
    answer: Claimed
    deadline, remaining = 0.0, -1
    while (answer := link.claim(claim)).verdict == "later":
        if remaining != len(answer.tasks):  # some of them came
            deadline, remaining = time.monotonic() + WAIT_SECONDS, len(answer.tasks)
        if time.monotonic() > deadline:
            raise Unavailable(
                f"batch {claim.batch} of {claim.app!r} was begun by an earlier run, whose tasks "
                f"{answer.tasks} have not run again for {WAIT_SECONDS:g} s, and task "
                f"{claim.task} has more than {HANDED_BYTES >> 20} MiB, too much to let the driver "
                "write it: run the batch on at least as many cores as it has tasks"
            )
        time.sleep(POLL_SECONDS)
    return answer


def append_once(rows: Any, order: Sequence[str], app: str, **sink: str | None) -> None:
    """Write the payloads in this order by one task, under this appId."""
    writer = rows.select(*order, "payload").coalesce(1).write.format("penstock").mode("append")
    options = {name: value for name, value in sink.items() if value}
    writer.options(**options, orderBy=",".join(order), appId=app).save()


@plain_errors
class SinkWriter(DataSourceArrowWriter, DataSourceStreamArrowWriter):
    """The writer of a sink of batches or streams. The driver reads its options."""

    kind: ClassVar[str]  # topic or queue: the option that names the target, or a column that does
    text_columns: ClassVar[tuple[str, ...]]
    place_columns: ClassVar[tuple[str, ...]]  # that decide where a row goes: part of its keys
    connect: ClassVar[Callable[..., Any]]

    def __init__(
        self, options: SinkOptions, schema: StructType, *, streaming: bool = False
    ) -> None:
        self._streaming = streaming
        self._address = options.address
        self._target = options.target
        self._app = options.app_id
        self._order = options.order_by
        self._batch = options.batch_id
        self._reach: dict[str, Any] = {
            "patience": options.broker_timeout,
            "token": options.token,
            "ca": options.ca,
        }
        # Made on the driver: all tasks of an attempt at a batch have the same.
        self._run = uuid.uuid4().hex
        self._types = {field.name: field.dataType.simpleString() for field in schema.fields}
        if self._types.get("payload") not in ("binary", "string"):
            raise self._unfit(f"a {self.kind} sink needs a column payload, binary or string")
        if not self._target and self.kind not in self._types:
            raise self._unfit(
                f"a {self.kind} sink needs the option {self.kind}, or a column {self.kind}"
            )
        for name in self.text_columns:
            if self._types.get(name, "string") != "string":
                raise self._unfit(f"the column {name} must be a string")
        # the data has its own identity
        self._identified = "transactionId" in self.text_columns and "transactionId" in self._types
        if not self._app and not self._identified:
            sys.stderr.write(
                f"penstock: this {self.kind} sink has no appId, so it writes at least once: a "
                "batch run again is written again. "
                'Give .option("appId", "a name of your own") for exactly once.\n'
            )

    def _unfit(self, why: str) -> InvalidRequest:
        columns = ", ".join(f"{name} {kind}" for name, kind in self._types.items()) or "no columns"
        return InvalidRequest(f"{why}; the rows have {columns}")

    def _place(self) -> Claim | None:
        """Return the place of this executor's task, still without checksums; None for a sink
        without an identity.
        """
        if not self._app or self._identified:
            return None
        context = TaskContext.get()
        if context is None:
            raise InvalidRequest("a sink's rows are written by a Spark task; there is none here")
        query, batch = context.getLocalProperty(QUERY), context.getLocalProperty(BATCH)
        if batch is None and self._streaming:
            raise InvalidRequest(
                f"this Spark does not tell the batch ({BATCH}): exactly once is impossible, leave "
                "appId out"
            )
        app = f"{self._app}:{query[:13]}" if query else self._app
        number = int(batch or 0) if self._batch is None else self._batch
        return Claim(self._target, app, number, context.partitionId(), "", self._run)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write a task's rows, on an executor. Read all of them even if none is written, because
        steps with state store it after the last one.
        """
        rows = self.prepare(self._ordered(iterator) if self._order else iterator)
        claim = self._place()
        with self.connect(self._address, **self._reach) as link, closing(Held()) as held:
            if claim is None:
                self.send(link, rows, None)
                return Written()
            self._sum_up(claim, held, held.keep(rows))
            if not held.rows:
                return Written()
            answer = link.claim(claim)
            if answer.verdict == "other":  # an earlier release may have begun the batch
                self._sum_up(claim, held, held, EARLIER)
                answer = link.claim(claim)
            if answer.verdict == "later" and held.size <= HANDED_BYTES:
                return Written(claim, held.packed())
            if answer.verdict == "later":
                answer = wait_for_turn(link, claim)
            self._finish(link, claim, answer, held)
        return Written(claim)

    def _sum_up(
        self,
        claim: Claim,
        held: Held,
        rows: Iterable[pa.RecordBatch],
        algorithm: Callable[[], Any] = TwoCrcs,
    ) -> None:
        """Set the checksums of a claim. All rows are held when they have been read."""
        content = Checksum(self.columns(), algorithm)
        keys = Checksum(list(dict.fromkeys((*self._order, *self.place_columns))), algorithm)
        for batch in rows:
            content.add(batch)
            keys.add(batch)
        claim.keys = keys.of(held.rows) if self._order else ""
        by_row = self._order and self.resumes_by_row(held)
        claim.checksum = claim.keys if by_row else content.of(held.rows)

    def _finish(
        self, link: Any, claim: Claim, answer: Claimed, rows: Iterable[pa.RecordBatch]
    ) -> None:
        """Do what the broker answered to a claim."""
        if answer.verdict == "write":
            self.send(link, iter(rows), claim, answer.rows)
        elif answer.verdict != "done":
            raise rejection(claim, answer)

    def prepare(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows in the form in which they are claimed. Rows that cannot be written fail
        the task here, before it has claimed anything.
        """
        return rows

    @abstractmethod
    def columns(self) -> Sequence[str]:
        """Return the names of the columns that are written, if the rows have them."""

    @abstractmethod
    def resumes_by_row(self, held: Held) -> bool:
        """Return whether an interrupted task knows which rows are stored, whatever their values.
        Its keys are then enough to continue.
        """

    @abstractmethod
    def send(
        self, link: Any, rows: Iterator[pa.RecordBatch], claim: Claim | None, first: int = 0
    ) -> None:
        """Write the rows from number `first` on, and record that the claim's task is done."""

    def _ordered(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = list(batches)
        if not rows:
            return iter(())
        table = pa.Table.from_batches(rows)
        missing = [name for name in self._order if name not in table.column_names]
        if missing:
            raise InvalidRequest(
                f"orderBy names {missing[0]!r}; the rows have {', '.join(table.column_names)}"
            )
        # Ties are ordered by the other columns, or rows would change their numbers from run to run.
        others = [field.name for field in table.schema if not pa.types.is_nested(field.type)]
        names = dict.fromkeys([*self._order, *others])
        return iter(table.sort_by([(name, "ascending") for name in names]).to_batches())

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int = 0,  # noqa: ARG002, N803
    ) -> None:
        """Write the rows that tasks handed over, on the driver, and close the batch."""
        written = [one for one in messages if isinstance(one, Written) and one.claim is not None]
        if not written:
            return
        with self.connect(self._address, **self._reach) as link:
            for message in written:
                if message.rows and (claim := message.claim):
                    self._finish(link, claim, link.claim(claim), pa.ipc.open_stream(message.rows))
            place = written[0].claim
            assert place is not None
            link.commit_sink(Commit(self._target, place.app, place.batch))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: N803
        """Keep what was written: with an appId, a repeated batch finds it there."""
