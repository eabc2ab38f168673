"""Files, locks, line journals, disk space and background tasks, for topics, queues and others."""
