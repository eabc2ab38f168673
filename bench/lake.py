"""Archives as tables on Spark, local[2]: lake and log as one frame against plain Parquet, archiving
against copying Parquet, and micro-batches of a stream that begins in the table.

PENSTOCK_BENCH_SCALE (default 1.0) shrinks the data; the figures of the docs are at 1.0.
"""

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.harness import Contest
from penstock import pipeline
from penstock.config.schema import Topics as TopicSettings
from penstock.metrics import Metrics
from penstock.pipeline.jobs.archive import Archiver, Origin
from penstock.pipeline.session import build
from penstock.topics.store import TopicStore

SCALE = float(os.environ.get("PENSTOCK_BENCH_SCALE", "1"))
RECORDS = int(5_000_000 * SCALE) // 100 * 100
ARCHIVED = RECORDS // 100 * 95
BATCHES = 20
GROUPED = "get_json_object(CAST(payload AS STRING), '$.shop')"
SPARK = {"spark.driver.memory": "2g"}


class Setup:
    """A topic of JSON records of which 95 % are archived, and the same as plain Parquet."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-bench-lake-"))
        self.topics, self.lake = self.directory / "topics", str(self.directory / "lake")
        self.spark = build("bench-lake", "local[2]", SPARK)
        asyncio.run(self._fill(0, ARCHIVED))
        self.origin = Origin(topic="t", directory=str(self.topics))
        assert Archiver(self.lake, self.origin).run(self.spark).rows == ARCHIVED
        asyncio.run(self._fill(ARCHIVED, RECORDS))
        self.parquet = str(self.directory / "parquet")
        self.table().drop("date").write.parquet(self.parquet)
        self.runs = 0

    async def _fill(self, first: int, end: int) -> None:
        with ThreadPoolExecutor(2) as pool:
            settings = TopicSettings(fsync="never")
            store = TopicStore(self.topics, settings, pool=pool, metrics=Metrics())
            await store.start()
            topic = store.get("t") or await store.create("t")
            for begin in range(first, end, 50_000):
                numbers = range(begin, min(end, begin + 50_000))
                await topic.append([self._record(number) for number in numbers])
            await store.stop()

    def _record(self, number: int) -> bytes:
        order = {"id": number, "shop": number % 97, "amount": number % 1000 / 10, "note": "x" * 40}
        return json.dumps(order).encode()

    def table(self) -> Any:
        return pipeline.table(self.spark, "t", self.lake, directory=str(self.topics))

    def files(self) -> Any:
        return self.spark.read.parquet(self.parquet)

    def count(self, frame: Any) -> float:
        began = time.perf_counter()
        assert frame.where("length(payload) >= 50").count() == RECORDS
        return RECORDS / (time.perf_counter() - began)

    def group(self, frame: Any) -> float:
        began = time.perf_counter()
        assert frame.groupBy(self.spark_expr()).count().count() == 97
        return RECORDS / (time.perf_counter() - began)

    def spark_expr(self) -> Any:
        from pyspark.sql import functions as f

        return f.expr(GROUPED)

    def archive(self) -> float:
        self.runs += 1
        target = self.directory / f"lake-{self.runs}"
        began = time.perf_counter()
        assert Archiver(str(target), self.origin).run(self.spark).rows == RECORDS
        took = time.perf_counter() - began
        shutil.rmtree(target)
        return RECORDS / took

    def copy(self) -> float:
        target = self.directory / "copy"
        shutil.rmtree(target, ignore_errors=True)
        began = time.perf_counter()
        day = self.files().selectExpr("*", "to_date(timestamp) AS date")
        day.write.partitionBy("date").parquet(str(target))
        return RECORDS / (time.perf_counter() - began)

    def micro_batches(self) -> float:
        options = {"topic": "t", "directory": str(self.topics), "archive": self.lake}
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
        self.runs += 1
        checkpoint = str(self.directory / f"checkpoint-{self.runs}")
        writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
        began = time.perf_counter()
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        took = time.perf_counter() - began
        assert sum(one["numInputRows"] for one in query.recentProgress) == RECORDS
        return BATCHES / took

    def close(self) -> None:
        self.spark.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


def contests() -> Iterator[Contest]:
    setup = Setup()
    try:
        yield Contest(
            "Spark counts a table of lake and log after a filter, 95 % archived",
            "records/s",
            lambda: setup.count(setup.table()),
            lambda: setup.count(setup.files()),
            "the same records in plain Parquet",
            at_least=0.85,
            rounds=5,
        )
        yield Contest(
            "Spark groups a table of lake and log by a JSON field, 95 % archived",
            "records/s",
            lambda: setup.group(setup.table()),
            lambda: setup.group(setup.files()),
            "the same records in plain Parquet",
            at_least=0.85,
            rounds=3,
        )
        yield Contest(
            "A topic is archived to a Delta table",
            "records/s",
            setup.archive,
            setup.copy,
            "Parquet to Parquet by day, by Spark",
            rounds=3,
        )
        yield Contest(
            "A stream begins in the table and goes on in the log, in 20 micro-batches",
            "micro-batches/s",
            setup.micro_batches,
            setup.file_batches,
            "Spark's stream of the same records in 20 Parquet files",
            rounds=3,
        )
    finally:
        setup.close()
