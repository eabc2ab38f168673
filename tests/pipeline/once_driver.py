"""Programs for a cluster, in a process of their own: a batch that is begun on two cores and
continued on one, and sums of floats that are written again and again.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from penstock.net.topic_link import TopicLink
from penstock.pipeline.session import build
from tests.pipeline.cluster import on_cores

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


def sums(spark: Any, broker: str, tag: str) -> None:
    """The partial sums of a key are added in the order in which they arrive. Write them until they
    have differed, which takes two or three times."""
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
        if len(seen) > 2:
            break
    print(len(seen))


def main(mode: str, master: str, cores: str, broker: str, tag: str) -> None:
    spark = build(f"once-{tag}", master, {**on_cores(int(cores)), **FEW_TASKS})
    {"begin": begin, "go on": write, "sums": sums}[mode](spark, broker, tag)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
