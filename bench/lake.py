"""Archives as tables on Spark, local[2]: lake and log as one frame against plain Parquet, archiving
against copying Parquet, micro-batches of a stream that begins in the table, and commits to a table
that has many.

Spark takes some 0.1 s for any Python source, however little it reads, so a count is shown for two
sizes. The JVM compiles the way of a source later than Parquet's, which it meets all day: hence the
long warm-up, of both sides.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import functions as f

from bench.harness import Contest, Figure
from bench.spark_topic import RECORDS, TOPIC, SparkTopic
from penstock import pipeline
from penstock.pipeline.jobs.archive import Archiver, Origin
from penstock.pipeline.lake.commits import new_run, settings
from penstock.pipeline.lake.data_files import FILE_BYTES, FileWriter
from penstock.pipeline.lake.maintenance import compact
from penstock.pipeline.lake.table import LakeTable
from penstock.pipeline.source_columns import TIMESTAMP
from tests.pipeline.archiver import merge_here

LARGER = 4  # times RECORDS
BATCHES = 20
GROUPED = "get_json_object(CAST(payload AS STRING), '$.shop')"
RECORD = '{"id": %d, "shop": %d, "amount": %.1f, "note": "' + "x" * 40 + '"}'
COMMITS, SOME = 3000, 20  # tens of commits that are compared
KEPT_SECONDS = 15  # in which there are as many commits as in 10 hours of a table that is kept fresh
NOON = 1_794_830_400_000_000  # 2026-11-16 12:00 in microseconds


class Lake(SparkTopic):
    """A topic of JSON records of which 95 % are archived, and the same as plain Parquet."""

    def __init__(self) -> None:
        super().__init__()
        self.lake = str(self.directory / "lake")
        self.origin = Origin(topic=TOPIC, directory=str(self.topics))
        self.records = 0
        self.grow(RECORDS)

    def grow(self, records: int) -> None:
        """Until the topic has as many, of which 95 % are archived."""
        archived = records // 100 * 95
        self.append(self._orders(self.records, archived))
        Archiver(self.lake, self.origin).run(self.spark)
        self.append(self._orders(archived, records))
        self.records = records
        shutil.rmtree(self.parquet, ignore_errors=True)
        self.table().drop("date").write.parquet(str(self.parquet))

    def _orders(self, first: int, end: int, step: int = 50_000) -> Iterator[list[bytes]]:
        for begin in range(first, end, step):
            numbers = range(begin, min(end, begin + step))
            yield [(RECORD % (i, i % 97, i % 1000 / 10)).encode() for i in numbers]

    def table(self) -> Any:
        return pipeline.table(self.spark, TOPIC, self.lake, directory=str(self.topics))

    def group(self, frame: Any) -> float:
        began = time.perf_counter()
        assert frame.groupBy(f.expr(GROUPED)).count().count() == 97
        return RECORDS / (time.perf_counter() - began)

    def archive(self) -> float:
        target = self.directory / "again"
        began = time.perf_counter()
        assert Archiver(str(target), self.origin).run(self.spark).rows == RECORDS
        took = time.perf_counter() - began
        shutil.rmtree(target)
        return RECORDS / took

    def copy_by_day(self) -> float:
        return self.copy(self.files().selectExpr("*", "to_date(timestamp) AS date"), "date")

    def micro_batches(self) -> float:
        options = {"topic": TOPIC, "directory": str(self.topics), "archive": self.lake}
        reader = self.spark.readStream.format("penstock").options(**options)
        per_batch = -(-RECORDS // BATCHES)
        return self._stream(reader.option("maxOffsetsPerTrigger", per_batch).load())

    def file_batches(self) -> float:
        source = self.directory / "files"
        if not source.exists():
            self.files().repartition(BATCHES).write.parquet(str(source))
        reader = self.spark.readStream.schema(self.files().schema)
        return self._stream(reader.option("maxFilesPerTrigger", 1).parquet(str(source)))

    def _stream(self, frame: Any) -> float:
        writer = frame.writeStream.format("noop").option("checkpointLocation", self.checkpoint())
        began = time.perf_counter()
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        took = time.perf_counter() - began
        assert sum(one["numInputRows"] for one in query.recentProgress) == RECORDS
        return BATCHES / took

    def counting(self) -> Contest:
        """Of the size that it has by then."""
        records = self.records
        return Contest(
            f"Spark counts {records:,} records of lake and log after a filter, 95 % archived",
            "records/s",
            lambda: self.count(self.table(), 50, records),
            lambda: self.count(self.files(), 50, records),
            "the same records in plain Parquet",
            at_least=0.85,
            rounds=9,
            warm_up=10,
        )


def contests() -> Iterator[Contest]:
    lake = Lake()
    try:
        yield lake.counting()
        yield Contest(
            "Spark groups a table of lake and log by a JSON field, 95 % archived",
            "records/s",
            lambda: lake.group(lake.table()),
            lambda: lake.group(lake.files()),
            "the same records in plain Parquet",
            at_least=0.85,
            rounds=3,
        )
        yield Contest(
            "A topic is archived to a Delta table",
            "records/s",
            lake.archive,
            lake.copy_by_day,
            "Parquet to Parquet by day, by Spark",
            rounds=2,
            warm_up=0,
        )
        yield Contest(
            "A stream begins in the table and goes on in the log, in 20 micro-batches",
            "micro-batches/s",
            lake.micro_batches,
            lake.file_batches,
            "Spark's stream of the same records in 20 Parquet files",
            rounds=2,
            warm_up=0,
        )
        lake.grow(RECORDS * LARGER)
        yield lake.counting()
    finally:
        lake.close()


def figures() -> Iterator[Figure]:
    """Commits of one file each, with the fsyncs and checkpoints of a real one. Small files are
    merged beside, as the archive does after each run. What a commit goes through is kept for a
    limited time, which is seconds here instead of hours.
    """
    limits = {
        name: f"interval {KEPT_SECONDS} seconds" if name.endswith("Duration") else value
        for name, value in settings(1).items()
    }
    with tempfile.TemporaryDirectory(prefix="penstock-bench-lake-") as directory:
        table = LakeTable(directory, "topic", TOPIC)
        snapshot = table.create("bench", limits)
        names, moment = table.kind.columns.names, pa.array([NOON], TIMESTAMP)
        times: list[float] = []
        full = 0  # commits until the oldest were too old
        started = time.perf_counter()
        while len(times) < COMMITS or len(times) < 3 * full:
            i, run = len(times), new_run()
            row = pa.RecordBatch.from_arrays([pa.array([i]), moment, pa.array([b"x"])], names)
            files = FileWriter(table.storage, table.kind, table.kind.columns, run).write([row])
            began = time.perf_counter()
            snapshot = table.append(snapshot, run, files, i + 1)
            times.append(time.perf_counter() - began)
            if not full and began - started > KEPT_SECONDS:
                full = len(times)
            if compact(table, FILE_BYTES, merge_here):
                snapshot = table.require()
    # ten in a row have one checkpoint; the median leaves out what a busy disk made wait
    tens = [1000 * statistics.mean(times[i : i + 10]) for i in range(0, len(times) - 9, 10)]
    middle = full // 10 + SOME // 2
    ranges = tens[:SOME], tens[middle - SOME // 2 : middle + SOME // 2], tens[-SOME:]
    first, early, last = (statistics.median(some) for some in ranges)
    yield Figure(
        f"A commit to a table, of the last {10 * SOME} of {len(times):,}",
        last,
        "ms",
        target="≤ 1.25x",
        met=last <= 1.25 * early,
        against=f"{10 * SOME} commits after the first {full:,}",
        against_value=early,
        ratio=last / early,
        note=f"old versions can be read for {KEPT_SECONDS} s; {first:.1f} ms for the first "
        f"{10 * SOME}; with the checkpoint of the Delta log after every tenth",
        detail={"seconds": [round(one, 5) for one in times]},
    )
