"""Spark: data sources, sinks, built-in jobs, runner. Needs `pip install 'penstock[pipeline]'`.

spark = penstock.pipeline.session("my-app")   # or penstock.pipeline.register(your_own_session)
orders = spark.readStream.format("penstock").option("topic", "orders")
orders = orders.option("broker", "127.0.0.1:12345").load()
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Importing a module sets it as an attribute of its package. Import `session` here, or a later
# import would replace the function of the same name.
importlib.import_module("penstock.pipeline.session")


def register(spark: Any) -> None:
    """Register the data source `format("penstock")` with a Spark session. Call it in every thread
    that writes: Spark looks up the format of a write in the session of the calling thread.
    """
    from penstock.pipeline.sources.data_source import register

    register(spark)


def watch(spark: Any, url: str | None = None, token: str | None = None) -> Any:
    """Log the progress of the session's streaming queries, and report it to the broker at `url`.
    Returns the listener, for `spark.streams.removeListener`.
    """
    from penstock.pipeline.query_listener import QueryListener

    listener = QueryListener(spark, url, token)
    spark.streams.addListener(listener)
    return listener


def cause(error: BaseException) -> str:
    """Return the cause of an error that Spark raised, in one or two lines."""
    from penstock.pipeline.failure import cause

    return cause(error)


def session(name: str = "penstock", master: str = "local[*]", **settings: str) -> "SparkSession":
    """Create a Spark session for pipelines, with the data source registered. In the names of
    settings, write `__` for dots.
    """
    from penstock.pipeline.session import build

    return build(name, master, {key.replace("__", "."): value for key, value in settings.items()})


def table(spark: Any, name: str, archive: str | None = None, **options: str) -> Any:
    """Return all records of a topic, archived or not, as one data frame with the columns `offset`,
    `timestamp`, `payload` and `date`.

    `archive` is the directory that `penstock pipeline run archive` writes (default:
    PENSTOCK_ARCHIVE), `broker` the broker's TCP address (default: PENSTOCK_BROKER). Other options
    are passed to the data source.
    """
    from penstock.pipeline.lake.frames import table_frame

    return table_frame(spark, "topic", name, archive, options)


def queue_table(spark: Any, name: str, archive: str | None = None, **options: str) -> Any:
    """Return all messages of a queue, archived or not, as one data frame. `database` is the URL of
    the queues' PostgreSQL.
    """
    from penstock.pipeline.lake.frames import table_frame

    return table_frame(spark, "queue", name, archive, options)
