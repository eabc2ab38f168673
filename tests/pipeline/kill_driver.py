"""Streaming queries in a process of its own, to be killed: topic -> queue, queue -> topic, topic ->
Parquet. When the queue is consumed by others, the second topic is written from the first one.
"""

import json
import sys
from typing import Any

from penstock.pipeline.session import build
from tests.pipeline.cluster import on_cores

PER_BATCH = 60


def main(
    broker: str,
    url: str,
    database: str,
    master: str,
    directory: str,
    tag: str,
    cores: int,
    consumed: bool,
) -> None:
    settings = {**on_cores(cores), "spark.sql.streaming.pollingDelay": "50ms"}
    spark = build(f"kill-{tag}", master, settings)

    def source(**options: str) -> Any:
        return (
            spark.readStream.format("penstock")
            .options(**options, maxOffsetsPerTrigger=str(PER_BATCH))
            .load()
        )

    def start(name: str, frame: Any, kind: str, **options: str) -> None:
        writer = (
            frame.writeStream.format(kind)
            .options(**options)
            .option("checkpointLocation", f"{directory}/{name}")
        )
        writer.trigger(processingTime="100 milliseconds").start()

    into = source(topic=f"in-{tag}", broker=broker).selectExpr(
        "concat('p', offset % 3) AS partition", "CAST(payload AS STRING) AS payload"
    )
    start("one", into, "penstock", queue=f"mid-{tag}", url=url, appId=f"one-{tag}")
    middle = into if consumed else source(queue=f"mid-{tag}", database=database)
    back = middle.selectExpr("concat(partition, ':', payload) AS payload")
    start("two", back, "penstock", topic=f"out-{tag}", broker=broker, appId=f"two-{tag}")
    start("three", source(topic=f"out-{tag}", broker=broker), "parquet", path=f"{directory}/lake")
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
