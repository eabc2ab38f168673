"""Programs for a cluster, in a process of their own: a batch that is begun on two cores and
continued on one, sums of floats that are written again and again, an archive in a bucket.

The process runs one program after another, so that they share a JVM (`ClusterDriver`). A line of
JSON names the next one; a line answers with its result or its error. Another number of cores is
another application; 0 gives all back to the cluster.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from penstock import pipeline
from penstock.net.topic_link import TopicLink
from penstock.pipeline.jobs.archive import Origin, archive, read_archive
from penstock.pipeline.session import build
from tests.pipeline.cluster import on_cores
from tests.pipeline.test_lake import TOPIC, age_out

TASKS, PER_TASK = 4, 10
FEW_TASKS = {"spark.sql.shuffle.partitions": "2"}


def fail_when_others_are_done(
    broker: str, topic: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A step that fails in the first task, when the rows of all other tasks are in the topic."""

    def step(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if "0" in batch["payload"].to_pylist():
                deadline = time.monotonic() + 120
                with TopicLink(broker, 60) as link:
                    while time.monotonic() < deadline and topic not in link.names():
                        time.sleep(0.05)
                    while link.info(topic).next_offset < (TASKS - 1) * PER_TASK:
                        assert time.monotonic() < deadline
                        time.sleep(0.05)
                raise RuntimeError("broken step")
            yield batch

    return step


def begin(spark: Any, broker: str, tag: str) -> None:
    write(spark, broker, tag, fail_when_others_are_done(broker, f"out-{tag}"))


def write(spark: Any, broker: str, tag: str, step: Any = None) -> None:
    rows = spark.range(0, TASKS * PER_TASK, 1, TASKS).selectExpr("CAST(id AS STRING) AS payload")
    if step is not None:
        rows = rows.mapInArrow(step, rows.schema)
    sink = {"topic": f"out-{tag}", "broker": broker, "appId": f"once-{tag}"}
    rows.write.format("penstock").mode("append").options(**sink).save()


def sums(spark: Any, broker: str, tag: str) -> int:
    """The partial sums of a key are added in the order in which they arrive. Write them until they
    have differed, which takes two or three times; how many different sums there were."""
    rows = spark.range(0, 100_000, 1, 16)
    totals = rows.selectExpr("id % 5 AS k", "hash(id) / 7.0 * pow(10, id % 12) AS amount")
    totals = totals.groupBy("k").sum("amount").withColumnRenamed("sum(amount)", "total")
    payload = totals.selectExpr("k", "to_json(struct(k, total)) AS payload")
    sink = {"topic": f"out-{tag}", "broker": broker, "appId": f"once-{tag}", "orderBy": "k"}
    seen: set[Any] = set()
    for _ in range(30):
        frozen = payload.cache()
        seen.add(tuple(row.payload for row in frozen.orderBy("k").collect()))
        frozen.write.format("penstock").mode("append").options(**sink).save()
        frozen.unpersist(True)
        if len(seen) > 1:
            break
    return len(seen)


def bucket(spark: Any, lake: str, topics: str, checkpoint: str) -> list[Any]:
    """Archive a topic to a bucket, and read it from there."""
    done = archive(spark, lake, Origin(topic=TOPIC, directory=topics))
    age_out(Path(topics), 4)
    table = pipeline.table(spark, TOPIC, lake, directory=topics)
    options = {"topic": TOPIC, "directory": topics, "archive": lake, "maxOffsetsPerTrigger": "50"}
    stream = spark.readStream.format("penstock").options(**options).load()
    writer = stream.writeStream.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    writer.start(f"{checkpoint}-copy").awaitTermination()
    copied = spark.read.parquet(f"{checkpoint}-copy")
    archived = read_archive(spark, lake, topic=TOPIC).count()
    return [done.rows, offsets(table), offsets(copied), archived]


def offsets(frame: Any) -> list[int]:
    return sorted(row.offset for row in frame.select("offset").collect())


PROGRAMS = {"begin": begin, "go on": write, "sums": sums, "bucket": bucket}


def main(master: str) -> None:
    spark: Any = None
    for line in sys.stdin:
        program, cores, arguments = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if spark is not None:
                spark.stop()
                spark = None
            if cores:
                spark = build(f"once-{program}", master, {**on_cores(cores), **FEW_TASKS})
                answer["result"] = PROGRAMS[program](spark, **arguments)
        except (PySparkException, Py4JJavaError) as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
