"""Topics and queues as Spark sinks."""
