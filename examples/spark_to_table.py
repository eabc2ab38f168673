"""A Spark stream from a queue to a table of Parquet files: what came since the last run, each
message once. Run it from cron, or without `availableNow` for ever.

The queue's consumers are not affected: Spark has a position of its own, in the checkpoint.
"""

import os
import sys
from pathlib import Path

from pyspark.sql.functions import from_json

import penstock.pipeline


def main(directory: Path, queue: str = "orders") -> None:
    spark = penstock.pipeline.session("orders to table")
    # messages are read from PostgreSQL itself: `penstock database url`, or that of the broker here
    where = {"database": os.environ["DATABASE_URL"]} if "DATABASE_URL" in os.environ else {}
    orders = spark.readStream.format("penstock").options(queue=queue, **where).load()
    rows = orders.select(
        "seq", "createdAt", from_json("payload", "id INT, total DOUBLE").alias("order")
    ).select("seq", "createdAt", "order.*")
    query = (
        rows.writeStream.format("parquet")
        .option("path", str(directory / "table"))
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    table = spark.read.parquet(str(directory / "table"))
    table.createOrReplaceTempView("orders")
    print(spark.sql("SELECT count(*) AS orders, sum(total) AS total FROM orders").first().asDict())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
