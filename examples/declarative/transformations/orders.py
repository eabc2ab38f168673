"""Orders from a topic: typed as a table, added up, and the large ones in a topic of their own.

Nothing of ours is imported or registered: Spark finds `format("penstock")` by itself.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()
BROKER = spark.conf.get("shop.broker")
ORDERS = spark.conf.get("shop.orders")


@dp.table
def orders() -> DataFrame:
    """Each order once, as a streaming table: a run adds what is new."""
    records = spark.readStream.format("penstock").options(broker=BROKER, topic=ORDERS).load()
    order = f.from_json(f.col("payload").cast("string"), "id BIGINT, customer STRING, total DOUBLE")
    return records.select("timestamp", order.alias("order")).select("timestamp", "order.*")


@dp.materialized_view
def customers() -> DataFrame:
    """What each customer has ordered so far."""
    return spark.read.table("orders").groupBy("customer").agg(f.sum("total").alias("total"))


# With `appId` each row is written exactly once, also when a run was killed and is started again.
dp.create_sink(
    "large_orders",
    "penstock",
    {"broker": BROKER, "topic": f"{ORDERS}-large", "appId": "shop-large-orders"},
)


@dp.append_flow(target="large_orders")
def large() -> DataFrame:
    """Orders of 100 and more, as JSON."""
    rows = spark.readStream.table("orders").where("total >= 100")
    return rows.select(f.to_json(f.struct("id", "customer", "total")).alias("payload"))
