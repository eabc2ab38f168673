"""Penstock: queues on PostgreSQL, topics on disk, pipelines on Spark, in one broker."""

__version__ = "0.1.0"
