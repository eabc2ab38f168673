"""Tables as Spark frames: archived rows alone, or together with those not archived yet, and tables
that others wrote.

The files of one snapshot are read by Spark's own Parquet reader, with the days as partitions, so a
filter on `date`, `offset` or `timestamp` skips files and row groups. A commit, a compaction or an
expiry beside the query changes nothing: the snapshot's files stay until `vacuum`.

Without Spark's S3 connector (the jar `hadoop-aws`) files in an object store are read by tasks with
pyarrow instead.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import reduce
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.errors import InvalidRequest, NotFound
from penstock.pipeline.lake.convert import refuse_old
from penstock.pipeline.lake.data_files import DataFile, Kind, by_tasks, read_file
from penstock.pipeline.lake.storage import Storage
from penstock.pipeline.lake.table import LakeTable, Snapshot
from penstock.pipeline.lake.typed_columns import TypedColumns, spark_schema
from penstock.pipeline.options import TopicSourceOptions, read_options
from penstock.pipeline.session import activate
from penstock.pipeline.sources.topic_catalog import Topics
from penstock.protocol.names import split_label

Reach = dict[str, str]

# The day of a row as the archive has it: of UTC, whatever the session's time zone.
DAY = "date_from_unix_date(CAST(floor(unix_micros({}) / 86400000000) AS INT))"
LOCAL_BROKER = "127.0.0.1:12345"
FILES_PER_TASK = 8  # of a table that others wrote
S3_CONNECTOR = "org.apache.hadoop.fs.s3a.S3AFileSystem"


def table_frame(spark: Any, kind: str, name: str, archive: str | None, reach: Reach) -> Any:
    """Return every record of a topic or queue once: from one snapshot of the table, and after its
    position from the log or the queue. `reach` has options of the source. Rows of a topic with
    several partitions have a column `partition`.

    A topic's log may lose its beginning meanwhile, when the archive moves on: the source has the
    archive too, and reads from there what is gone.
    """
    archive = archive or os.environ.get("PENSTOCK_ARCHIVE")
    if not archive:
        raise InvalidRequest(
            "say where the archive is: archive='s3://lake', or the variable PENSTOCK_ARCHIVE"
        )
    spark = activate(spark)
    if kind != "topic":
        return _whole_frame(spark, LakeTable(archive, kind, name), reach)
    reach = {"archive": archive, **reach}
    if "directory" not in reach:
        reach.setdefault("broker", os.environ.get("PENSTOCK_BROKER", LOCAL_BROKER))
    with closing(Topics(read_options(TopicSourceOptions, {"topic": name, **reach}))) as topics:
        labels = topics.partitions(name)
    frames = [
        (label, _whole_frame(spark, LakeTable(archive, kind, label), reach)) for label in labels
    ]
    return frames[0][1] if len(frames) == 1 else union_partitions(frames)


def union_partitions(frames: Iterable[tuple[str, Any]]) -> Any:
    """Union the rows of several partitions, by label, with the column `partition`."""
    numbered = [
        frame.withColumn("partition", f.lit(split_label(label)[1])) for label, frame in frames
    ]
    return reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), numbered)


def _whole_frame(spark: Any, table: LakeTable, reach: Reach) -> Any:
    """Return the rows of the table, and from its position on those of the log or the queue."""
    kind, name = table.kind.name, table.name
    snapshot = table.open()
    refuse_old(table, snapshot)
    options = {kind: name, **reach}
    position = None if snapshot is None else snapshot.position
    if kind == "topic":
        options["firstPartition"] = "true"
        if position is not None:
            options["startingOffsets"] = json.dumps({name: position})
    elif position is not None:
        options["fromXid"] = str(position)
    rest = source_frame(spark, table.kind, options)
    rest = rest.select("*", f.expr(DAY.format(table.kind.time)).alias("date"))
    rest = TypedColumns.of(snapshot, table.kind).applied(rest)
    if snapshot is None or position is None:
        return rest
    # The log first: its tasks take longer to start, and run in parallel with those of the files.
    archived = archived_frame(spark, table, snapshot)
    if rest.columns == archived.columns:
        return rest.union(archived)
    return rest.unionByName(archived, allowMissingColumns=True).select(*archived.columns)


def source_frame(spark: Any, kind: Kind, options: Reach) -> Any:
    """Return rows of a topic or queue in the columns of its table, without its name."""
    schema = from_arrow_schema(kind.columns)
    return spark.read.format("penstock").schema(schema).options(**options).load()


def archived_frame(
    spark: Any, table: LakeTable, snapshot: Snapshot, files: list[DataFile] | None = None
) -> Any:
    """Return the rows of a snapshot, or of some of its files, with `date`."""
    files = snapshot.files() if files is None else files
    schema = spark_schema(snapshot)
    if not files:
        return spark.createDataFrame([], schema)
    if not _reads(spark, table):
        return _by_tasks(spark, table, snapshot, files, schema)
    reader = spark.read.schema(schema).option("basePath", table.storage.spark_url("").rstrip("/"))
    return reader.parquet(*(table.storage.spark_url(file.path) for file in files))


def _reads(spark: Any, table: LakeTable) -> bool:
    """Return whether Spark itself can read the files."""
    if table.storage.local is not None:
        return True
    if not table.storage.uri.startswith("s3") or not hasattr(spark, "_jvm"):
        return True
    try:
        spark._jvm.java.lang.Class.forName(S3_CONNECTOR)
    except Exception as error:
        if "ClassNotFoundException" not in str(error):
            raise
        return False
    return True


def _by_tasks(
    spark: Any, table: LakeTable, snapshot: Snapshot, files: list[DataFile], schema: Any
) -> Any:
    columns, storage = snapshot.columns(), table.storage
    full = pa.schema([*columns, pa.field("date", pa.date32())])

    def read(files: list[DataFile]) -> Iterator[pa.RecordBatch]:
        for file in files:
            for rows in read_file(storage, file.path, columns):
                day = pa.array([file.date] * rows.num_rows).cast(pa.date32())
                yield pa.RecordBatch.from_arrays([*rows.columns, day], schema=full)

    return by_tasks(spark, [[file] for file in files], read, schema)


def delta_frame(spark: Any, uri: str, options: dict[str, str]) -> Any:
    """Return the current rows of any Delta table. Tasks read the version that the driver opened."""
    storage = Storage(uri, options)
    try:
        table = DeltaTable(storage.uri, storage_options=storage.options)
    except TableNotFoundError:
        raise NotFound(f"{storage.uri} is not a Delta table") from None
    version, where, given = table.version(), storage.uri, storage.options
    schema = pa.schema(table.schema())

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers = {number for batch in batches for number in batch.column(0).to_pylist()}
        if not numbers:
            return
        dataset = DeltaTable(where, version, given).to_pyarrow_dataset()
        wide = dataset.schema
        for number, fragment in enumerate(dataset.get_fragments()):
            if number // FILES_PER_TASK in numbers:
                for rows in fragment.to_batches(schema=wide):
                    yield rows.cast(schema)

    tasks = -(-len(table.file_uris()) // FILES_PER_TASK)
    numbers = spark.range(0, max(1, tasks), 1, max(1, tasks))
    return numbers.mapInArrow(read, from_arrow_schema(schema))
