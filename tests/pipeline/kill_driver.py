"""A streaming query in a process of its own, to be killed: topic -> queue, or queue -> topic. Run as a module."""

import sys

from penstock.pipeline.session import build


def main(
    kind: str, source: str, target: str, checkpoint: str, broker: str, url: str, database: str, master: str
) -> None:
    spark = build(f"kill-{kind}", master, {"spark.task.maxFailures": "4"})
    reader = spark.readStream.format("penstock").option("maxOffsetsPerTrigger", 40)
    if kind == "topic-queue":
        frame = reader.option("topic", source).option("broker", broker).load()
        frame = frame.selectExpr("concat('p', offset % 3) AS partition", "CAST(payload AS STRING) AS payload")
        writer = frame.writeStream.format("penstock").option("queue", target).option("url", url)
    else:
        frame = reader.option("queue", source).option("database", database).load()
        frame = frame.selectExpr("concat(partition, ':', payload) AS payload")
        writer = frame.writeStream.format("penstock").option("topic", target).option("broker", broker)
    query = (
        writer.option("appId", f"kill-{kind}-{target}")
        .option("brokerTimeout", 60)
        .option("checkpointLocation", checkpoint)
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    sys.stdout.write("started\n")
    sys.stdout.flush()
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
