"""Spark: data sources, sinks, built-in jobs and the runner."""
