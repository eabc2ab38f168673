"""Who writes: the identity that makes a sink's rows recognisable when a batch is run again.

Spark runs a batch again after a crash, and a task again after a failure, and a Python sink is told
neither the query nor the batch by its arguments. The task's local properties tell both, in a
stream's own writes and in those that `foreachBatch` makes; the user names the application with the
option `appId`. So a row is (appId, query, batch, task, row), and the sinks turn that into an
idempotent producer's sequence (topics) or a transactionId (queues). The query is the checkpoint's:
with a new checkpoint batches are counted from 0 again over other rows, which must not be taken for
the old ones. A write without a stream is batch 0 of its appId: made again, it adds nothing.

An identity is worth as much as the content behind it. So a task holds its rows until it has them
all, claims its place at the broker with their checksum, and writes when the broker agrees
(`claimed`; the rules are those of `penstock.topics.write_claims`). A batch that is run again with
other rows is refused, before anything of it is written.

A row keeps its number only if the batch, run again, gives each task the same rows in the same
order. Sources here see to it; a shuffle does not, hence `orderBy`: the columns by which a task
sorts its rows before it writes them.
"""

import hashlib
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any, ClassVar, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.errors import Conflict, InvalidRequest, Unavailable
from penstock.pipeline.options import BROKER_PATIENCE_SECONDS, Options
from penstock.pipeline.plain_errors import plain_errors
from penstock.protocol.sink_claims import Claim, Claimed, Commit

QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
HELD_BYTES = 64 << 20  # of a task's rows in memory; more of them go to a temporary file
ADDED_COLUMNS = {"headers"}  # after the first release
POLL_SECONDS = 0.2
WAIT_SECONDS = 600.0  # for tasks that wrote in an earlier run and have to come again
OTHER_ROWS = "before with other rows"


@dataclass(frozen=True)
class Writer:
    """One task's attempt at one batch."""

    app: str
    batch: int
    task: int


@dataclass
class Written(WriterCommitMessage):
    """What a task tells the driver."""

    writer: Writer | None = None


class Keeper(Protocol):
    """Where identities are kept: the broker that is written to."""

    def claim(self, claim: Claim) -> Claimed:
        """Whether the task may write its rows."""

    def commit_sink(self, done: Commit) -> None:
        """Say that the batch takes no more tasks."""

    def close(self) -> None: ...


class Held:
    """A task's rows until they may be written, and their checksum, however they are cut."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self._stream: pa.ipc.RecordBatchStreamWriter | None = None
        # of each column's lengths, and of its bytes
        self._hashes = {
            name: [hashlib.blake2b(digest_size=16) for _ in range(2)] for name in columns
        }
        self._filled: set[str] = set()  # columns in which some row has a value
        self.rows = 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch in; beyond HELD_BYTES it goes to a file."""
        for name in self._columns:
            if name in batch.schema.names:
                lengths, data = self._hashes[name]
                values = batch.column(name).cast(pa.binary())
                lengths.update(
                    pc.fill_null(pc.binary_length(values), -1).cast(pa.int32()).to_numpy()
                )
                data.update(_joined(values))
                if values.null_count < len(values):
                    self._filled.add(name)
        self.rows += batch.num_rows
        self._batches.append(batch)
        self._bytes += batch.nbytes
        if self._bytes > HELD_BYTES:
            self._spill()

    def _spill(self) -> None:
        if self._file is None or self._stream is None:
            self._file = tempfile.TemporaryFile(prefix="penstock-sink-")  # noqa: SIM115 - closed with this object
            self._stream = pa.ipc.new_stream(self._file, self._batches[0].schema)
        for batch in self._batches:
            self._stream.write_batch(batch)
        self._batches, self._bytes = [], 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._file is not None and self._stream is not None:
            self._spill()
            self._stream.close()
            self._file.seek(0)
            yield from pa.ipc.open_stream(self._file)
        yield from self._batches

    @property
    def checksum(self) -> str:
        """Of the rows' content, in hexadecimal. Headers that no row has are left out, so that a
        batch begun by a release without them is still the same.
        """
        parts = [
            f"{n}:{a.hexdigest()}:{b.hexdigest()}"
            for n, (a, b) in self._hashes.items()
            if n in self._filled or n not in ADDED_COLUMNS
        ]
        return hashlib.sha256(f"{self.rows} {' '.join(parts)}".encode()).hexdigest()[:32]


def _joined(values: pa.Array) -> memoryview:
    """The bytes of all values, one after another."""
    ends = values.buffers()[1]
    if ends is None or values.buffers()[2] is None:
        return memoryview(b"")
    offsets = memoryview(ends).cast("i")
    if values.null_count:  # the bytes under a null are anyone's
        return _joined(values.drop_null())
    return memoryview(values.buffers()[2])[
        offsets[values.offset] : offsets[values.offset + len(values)]
    ]


def claimed(
    rows: Iterator[pa.RecordBatch],
    columns: Sequence[str],
    target: str,
    run: str,
    writer: Writer,
    keeper: Keeper,
) -> Iterator[pa.RecordBatch]:
    """The rows, once the broker agrees that this task of this batch writes them; or Conflict."""
    with closing(Held(columns)) as held:
        for batch in rows:
            held.add(batch)
        if held.rows:
            claim = Claim(target, writer.app, writer.batch, writer.task, held.checksum, run)
            wait_for_turn(keeper.claim, claim)
            yield from held


def wait_for_turn(ask: Callable[[Claim], Claimed], claim: Claim) -> Claimed:
    """Claim until the answer is to write."""
    deadline, waits = time.monotonic() + WAIT_SECONDS, 0
    while (answer := ask(claim)).verdict == "wait":
        if waits != len(answer.tasks):  # some of them came
            deadline, waits = time.monotonic() + WAIT_SECONDS, len(answer.tasks)
        if time.monotonic() > deadline:
            raise Unavailable(
                f"batch {claim.batch} of {claim.app!r} was begun by an earlier run, whose tasks "
                f"{answer.tasks} have not come again for {WAIT_SECONDS:g} s: run it on at least as "
                "many cores as before"
            )
        time.sleep(POLL_SECONDS)
    if answer.verdict == "write":
        return answer
    place = f"batch {claim.batch} of {claim.app!r}"
    if answer.verdict == "behind":
        raise Conflict(
            f"{place} is behind batch {answer.newest}, which was written already: this checkpoint "
            "was copied or restored, and another run went on from it. Nothing of it was written. "
            "Go on from the newest checkpoint, or give this one a new appId, which writes the rows "
            "from here on once more."
        )
    raise Conflict(
        f"{place} was written to {claim.target or 'its targets'} {OTHER_ROWS} (task {claim.task}). "
        "Nothing of it was written now. Two writes never share an appId; a batch run again must "
        "give the same rows (no rand(), no current time; orderBy after a shuffle). There are two "
        "ways to go on: run it with the steps it was begun with, or give it a new appId, which "
        "writes all of its rows once more."
    )


def append_once(rows: Any, order: Sequence[str], app: str, **sink: str | None) -> None:
    """Write the payloads in this order by one task, under this appId."""
    writer = rows.select(*order, "payload").coalesce(1).write.format("penstock").mode("append")
    options = {name: value for name, value in sink.items() if value}
    writer.options(**options, orderBy=",".join(order), appId=app).save()


@plain_errors
class SinkWriter(DataSourceArrowWriter, DataSourceStreamArrowWriter):
    """Of topics and of queues, of batches and of streams. Options are read on the driver."""

    kind: ClassVar[str]  # topic or queue: the option that names the target, or a column that does
    address: ClassVar[tuple[str, str]]  # the option that names the broker, and what it is
    allowed: ClassVar[set[str]]  # names of options
    text_columns: ClassVar[tuple[str, ...]]
    connect: ClassVar[Callable[..., Keeper]]

    def __init__(self, options: Options, schema: StructType, *, streaming: bool = False) -> None:
        self._streaming = streaming
        options.refuse_others(self.allowed, f"a {self.kind} sink")
        self._address = options.require(*self.address)
        self._target = options.text(self.kind) or ""
        self._app = options.text("appId")
        self._order = options.names("orderBy")
        # for `foreachBatch` over Spark Connect
        self._batch = options.whole("batchId", None, least=0)
        self._reach: dict[str, Any] = {
            "patience": options.seconds("brokerTimeout", BROKER_PATIENCE_SECONDS),
            "token": options.token(),
            "ca": options.ca(),
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
        # then the identity is the data's own
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

    def _writer(self) -> Writer | None:
        """On an executor: which batch and task this is; None without an identity of ours."""
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
        return Writer(app, number, context.partitionId())

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
        return iter(table.sort_by([(name, "ascending") for name in self._order]).to_batches())

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int = 0,  # noqa: ARG002, N803
    ) -> None:
        """On the driver, when all tasks have stored their rows: the batch takes no others."""
        for message in messages:
            if isinstance(message, Written) and (writer := message.writer):
                with closing(self.connect(self._address, **self._reach)) as link:
                    link.commit_sink(Commit(self._target, writer.app, writer.batch))
                return

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: N803
        """What was written stays; with an appId the batch, run again, finds it there."""
