"""What the benchmarks on Spark share: a session, a topic that it reads from files, and the same
records as plain Parquet.

PENSTOCK_BENCH_SCALE (default 1.0) shrinks the data; the figures of the docs are at 1.0.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.pipeline.session import build
from tests.support.postgres import JDBC_DRIVER
from tests.support.topics import Arrays, append

SCALE = float(os.environ.get("PENSTOCK_BENCH_SCALE", "1"))
RECORDS = int(5_000_000 * SCALE) // 100 * 100
SPARK = {
    "spark.driver.memory": "2g",
    "spark.driver.extraClassPath": str(JDBC_DRIVER),
}  # one JVM serves all sessions
TOPIC = "t"


class SparkTopic:
    """A topic of RECORDS records, and a place for its copies."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-bench-spark-"))
        self.topics = self.directory / "topics"
        self.parquet = self.directory / "parquet"
        self.spark = build("bench", "local[2]", SPARK)

    def append(self, batches: Iterable[Sequence[bytes] | Arrays]) -> None:
        append(self.topics, TOPIC, batches)

    def topic(self, kind: str = "penstock") -> Any:
        reader = self.spark.read.format(kind).option("directory", str(self.topics))
        return reader.option("topic", TOPIC).load()

    def files(self) -> Any:
        return self.spark.read.parquet(str(self.parquet))

    def count(self, frame: Any, bytes: int, records: int = RECORDS) -> float:
        """Records a second of a count after a filter that all of them pass."""
        began = time.perf_counter()
        assert frame.where(f"length(payload) >= {bytes}").count() == records
        return records / (time.perf_counter() - began)

    def copy(self, frame: Any, *partitions: str) -> float:
        """Records a second to Parquet."""
        target = self.directory / "copy"
        shutil.rmtree(target, ignore_errors=True)
        began = time.perf_counter()
        frame.write.partitionBy(*partitions).parquet(str(target))
        return RECORDS / (time.perf_counter() - began)

    def checkpoint(self) -> str:
        return tempfile.mkdtemp(prefix="checkpoint-", dir=self.directory)

    def close(self) -> None:
        self.spark.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
