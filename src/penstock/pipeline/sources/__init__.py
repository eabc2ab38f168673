"""Topics and queues as Spark sources."""
