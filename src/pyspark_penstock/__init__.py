"""Lets Spark find `format("penstock")` by itself: it imports installed modules named `pyspark_*`
and takes their `DefaultSource`. So every session of every thread has it, new ones too, and nothing
needs to be registered.
"""

from penstock.pipeline.sources.data_source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
