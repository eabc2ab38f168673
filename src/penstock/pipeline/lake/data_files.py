"""The Parquet files of a table: tasks write one per day, readers read ranges of the key.

    <table>/date=<day>/<run>-<random>.parquet       of an archive
    <table>/<run>-<random>.parquet                  of a pipeline file's sink

A task writes its rows to one file per day, and begins another when a file is large enough. It
buffers at most `BUFFERED_BYTES`, for any number of days. File names are random, so that a task that
is repeated or killed cannot touch the files of another. A file belongs to the table when a commit
names it (`penstock.pipeline.lake.table`).

A range is read in the order of the key. The rows and their order do not depend on the files, so a
stream's batch that is repeated after a compaction has the same content.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from penstock.errors import Damaged
from penstock.pipeline.lake.storage import Storage
from penstock.pipeline.source_columns import QUEUE_COLUMNS, TOPIC_COLUMNS, ddl
from penstock.protocol.names import is_relative_path

FILE_BYTES = 128 << 20
ROW_GROUP_BYTES = 32 << 20  # buffered for one day before they are written
BUFFERED_BYTES = 96 << 20  # buffered for all days of a task
OPEN_FILES = 64  # per task
READ_BYTES = 64 << 20  # of Parquet read at once, approximately
COMPRESSION = "zstd"
UNIX = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class Kind:
    """The kind of rows in a table: a topic's records, a queue's messages, or any rows."""

    name: str
    key: str | None  # the column that orders rows, used for statistics and ranges
    time: str | None  # the column whose day is the partition
    columns: pa.Schema  # columns of every such table, except `date`


def _without(schema: pa.Schema, name: str) -> pa.Schema:
    return pa.schema([field for field in schema if field.name != name])


TOPIC = Kind("topic", "offset", "timestamp", _without(TOPIC_COLUMNS, "topic"))
QUEUE = Kind("queue", "seq", "createdAt", _without(QUEUE_COLUMNS, "queue"))
KINDS = {"topic": TOPIC, "queue": QUEUE}
ROWS = Kind("rows", None, None, pa.schema([]))  # a pipeline file's sink, not partitioned


@dataclass(frozen=True)
class DataFile:
    """One file of a table, with the statistics that let readers skip it."""

    path: str  # relative to the table's root
    bytes: int
    rows: int
    date: str  # "" = not partitioned
    first: int  # the smallest key
    last: int
    since: int | None = None  # the earliest time, in microseconds
    until: int | None = None
    misfits: int = 0  # rows whose payload is not in the columns (`_reason`)
    values: str = ""  # of a sink's partition columns, as a JSON object

    def __post_init__(self) -> None:
        if not is_relative_path(self.path):
            raise Damaged(f"a table names a file that is not below its root: {self.path!r}")

    def statistics(self, kind: Kind) -> str:
        low: dict[str, Any] = {}
        high: dict[str, Any] = {}
        if kind.key is not None:
            low[kind.key], high[kind.key] = self.first, self.last
        if kind.time is not None and self.since is not None and self.until is not None:
            low[kind.time], high[kind.time] = _iso(self.since), _iso(self.until)
        nulls = dict.fromkeys(low, 0)
        return json.dumps(
            {"numRecords": self.rows, "minValues": low, "maxValues": high, "nullCount": nulls}
        )

    def add_action(self, kind: Kind, *, data_change: bool = True) -> Any:
        from deltalake.transaction import AddAction

        return AddAction(
            path=self.path,
            size=self.bytes,
            partition_values={"date": self.date} if self.date else json.loads(self.values or "{}"),
            modification_time=int(time.time() * 1000),
            data_change=data_change,
            stats=self.statistics(kind),
        )


_FILES = pa.schema(
    [(one.name, pa.string() if one.type is str else pa.int64()) for one in fields(DataFile)]
)
FILES_DDL = ddl(_FILES)


def as_batch(files: list[DataFile]) -> pa.RecordBatch:
    """Return files as rows of FILES_DDL, the output of a task."""
    return pa.RecordBatch.from_pylist([asdict(file) for file in files], schema=_FILES)


def by_tasks(
    spark: Any,
    groups: list[list[DataFile]],
    work: Callable[[list[DataFile]], Iterator[pa.RecordBatch]],
    schema: Any,
) -> Any:
    """Return a frame of the results of `work`, which runs in one task per group of files."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for text in batch.column(0).to_pylist():
                yield from work([DataFile(*one) for one in json.loads(text)])

    texts = [(json.dumps([astuple(file) for file in group]),) for group in groups]
    tasks = spark.createDataFrame(texts, "files STRING").repartition(len(groups))
    return tasks.mapInArrow(run, schema)


@dataclass
class FileWriter:
    """Write the rows of one task. Sent to executors."""

    storage: Storage
    kind: Kind
    schema: pa.Schema  # the rows' schema, without `date`
    run: str
    file_bytes: int = FILE_BYTES
    partition_by: tuple[str, ...] = ()  # a sink's columns that its files omit

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write rows and yield the files, for `mapInArrow`."""
        yield as_batch(self.write(batches))

    def write(self, batches: Iterable[pa.RecordBatch]) -> list[DataFile]:
        days: dict[str, _Day] = {}
        finished: list[DataFile] = []

        def finish(day: str) -> None:
            finished.append(days[day].close())
            del days[day]

        try:
            for batch in batches:
                for day, rows in self._by_partition(aligned(batch, self.schema)):
                    if day not in days:
                        if len(days) >= OPEN_FILES:
                            finish(min(days, key=lambda one: days[one].used))
                        days[day] = _Day(self, day)
                    days[day].add(rows)
                    if days[day].size >= self.file_bytes:
                        finish(day)
                while sum(one.buffered for one in days.values()) > BUFFERED_BYTES:
                    max(days.values(), key=lambda one: one.buffered).flush()
            for day in list(days):
                finish(day)
        except BaseException:
            # no commit will name these files, and a full disk needs the space
            paths = [*(file.path for file in finished), *(one.abandon() for one in days.values())]
            with contextlib.suppress(OSError):
                self.storage.delete(paths)
            raise
        return finished

    def _by_partition(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Split rows by day, or by the values of the partition columns (JSON)."""
        if not rows.num_rows:
            return
        if self.kind.time is not None:
            keys = rows.column(self.kind.time).cast(pa.date32()).cast(pa.string())
        elif self.partition_by:
            texts = [rows.column(name).cast(pa.string()) for name in self.partition_by]
            values = zip(*(one.to_pylist() for one in texts), strict=True)
            keys = pa.array(
                [json.dumps(dict(zip(self.partition_by, one, strict=True))) for one in values]
            )
            rows = rows.select([n for n in rows.schema.names if n not in self.partition_by])
        else:
            yield "", rows
            return
        for key in sorted(keys.unique().to_pylist()):
            yield key, rows.filter(pc.equal(keys, key))


class _Day:
    """The open file of one day, of the rows with the same partition values, or of all rows."""

    def __init__(self, writer: FileWriter, day: str) -> None:
        self._kind, self._storage = writer.kind, writer.storage
        self._day, self._values = ("", day) if writer.kind.time is None else (day, "")
        self._schema = pa.schema(
            [one for one in writer.schema if one.name not in writer.partition_by]
        )
        directory = f"date={day}/" if self._day else ""
        self._path = f"{directory}{writer.run}-{uuid.uuid4().hex[:12]}.parquet"
        self._storage.make_directory(directory)
        self._stream = self._storage.files().open_output_stream(self._path)
        self._footer: list[Any] = []
        plain = {self._kind.key, self._kind.time, "payload", "id", "transactionId"}
        counted = [name for name in self._schema.names if name not in ("payload", "headers")]
        self._writer = parquet.ParquetWriter(
            self._stream,
            self._schema,
            compression=COMPRESSION,
            use_dictionary=[name for name in self._schema.names if name not in plain],
            write_statistics=[
                name for name in counted if not pa.types.is_nested(self._schema.field(name).type)
            ],
            metadata_collector=self._footer,
        )
        self._waiting: list[pa.RecordBatch] = []
        self.buffered = 0  # bytes of rows not yet in a row group
        self.used = time.monotonic()

    @property
    def size(self) -> int:
        """Return the bytes in the file so far."""
        return int(self._stream.tell())

    def add(self, rows: pa.RecordBatch) -> None:
        self._waiting.append(rows)
        self.buffered += rows.nbytes
        self.used = time.monotonic()
        if self.buffered >= ROW_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        rows = pa.Table.from_batches(self._waiting, self._schema)
        self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))
        self._waiting, self.buffered = [], 0

    def close(self) -> DataFile:
        """Finish the file durably and return it."""
        if self._waiting:
            self.flush()
        self._writer.close()
        size = self.size
        self._stream.close()
        self._storage.sync(self._path)
        footer, key, at = self._footer[0], self._kind.key, self._kind.time
        first, last = bounds(footer, key) if key else (0, 0)
        since, until = map(_microseconds, bounds(footer, at)) if at else (None, None)
        misfits = sum(chunk.statistics.num_values for chunk in _chunks(footer, "_reason"))
        return DataFile(
            *(self._path, size, footer.num_rows, self._day, first, last, since, until),
            *(misfits, self._values),
        )

    def abandon(self) -> str:
        """Leave the file unfinished after a failure. Return its path."""
        self._writer.is_open = False  # or its finalizer would write a footer to a closed stream
        with contextlib.suppress(OSError):  # the failure may recur
            self._stream.close()
        return self._path


def _chunks(footer: Any, column: str) -> list[Any]:
    """Return a column's chunks in the row groups; none if the column does not exist."""
    names = [footer.schema.column(i).path for i in range(footer.num_columns)]
    if column not in names:
        return []
    place = names.index(column)
    return [footer.row_group(i).column(place) for i in range(footer.num_row_groups)]


def bounds(footer: Any, column: str) -> tuple[Any, Any]:
    """Return the least and greatest value of a column from a Parquet file's footer."""
    groups = [chunk.statistics for chunk in _chunks(footer, column)]
    return min(group.min for group in groups), max(group.max for group in groups)


def aligned(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows with the schema's columns: drop others, fill missing ones with null."""
    columns = []
    for field in schema:
        if field.name not in rows.schema.names:
            columns.append(pa.nulls(rows.num_rows, field.type))
        else:
            column = rows.column(field.name)
            columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def read_file(storage: Storage, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield a file's rows as stored, in bounded batches."""
    with storage.files().open_input_file(path) as file:
        pieces = parquet.ParquetFile(file, coerce_int96_timestamp_unit="us")
        for batch in pieces.iter_batches():
            yield aligned(batch, schema)


def read_range(
    storage: Storage, files: Iterable[DataFile], kind: Kind, schema: pa.Schema, span: range
) -> Iterator[pa.RecordBatch]:
    """Yield the rows whose key is in `span`, ordered by key."""
    files = sorted(
        (one for one in files if one.last >= span.start and one.first < span.stop),
        key=lambda one: one.first,
    )
    start = span.start
    while start < span.stop:
        stop = _reach(files, start, span.stop)
        tables = [
            _part(storage, one.path, kind, schema, range(start, stop))
            for one in files
            if one.last >= start and one.first < stop
        ]
        if tables:
            rows = pa.concat_tables(tables)
            key = rows.column(kind.key)
            if not _ascending(key):
                rows = rows.sort_by(kind.key)
            yield from rows.to_batches()
        start = stop


def _reach(files: list[DataFile], start: int, stop: int) -> int:
    """Return the key up to which the files have about READ_BYTES."""
    size = 0.0
    for one in files:
        if one.last < start:
            continue
        if size >= READ_BYTES:
            return max(start + 1, min(stop, one.first))
        span = max(1, one.last + 1 - one.first)
        share = (min(one.last + 1, stop) - max(one.first, start)) / span
        if size + share * one.bytes > READ_BYTES:
            keys = int(span * (READ_BYTES - size) / one.bytes)
            return max(start + 1, min(stop, max(one.first, start) + keys))
        size += share * one.bytes
    return stop


def _ascending(key: pa.ChunkedArray) -> bool:
    values = key.to_numpy()
    return len(values) < 2 or bool((values[1:] > values[:-1]).all())


def _part(storage: Storage, path: str, kind: Kind, schema: pa.Schema, span: range) -> pa.Table:
    """Return the rows of one file in the span. Skip row groups outside it."""
    key = pc.field(kind.key)
    with storage.files().open_input_file(path) as file:
        rows = parquet.read_table(
            file,
            columns=schema.names,
            filters=(key >= span.start) & (key < span.stop),
            use_threads=False,
            coerce_int96_timestamp_unit="us",
        )
    return pa.Table.from_batches([aligned(batch, schema) for batch in rows.to_batches()], schema)


def _microseconds(at: datetime) -> int:
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return (at - UNIX) // MICROSECOND


def _iso(microseconds: int) -> str:
    at = UNIX + timedelta(microseconds=microseconds)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")
