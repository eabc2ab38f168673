"""Penstock: queues on PostgreSQL, topics on disk, pipelines on Spark, in one broker.

`from penstock import Client` gives the client of a broker, and everything beside it that a program
may catch, annotate or construct. It is imported when first asked for, so that the server and the
command line do not load it (type checkers see it in `__init__.pyi`).
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# What `penstock.client` exports, beside what is here: a test compares them.
_FROM_CLIENT = frozenset(
    {
        "AckRefused",
        "AckStatus",
        "Acked",
        "Address",
        "Batch",
        "BrokerStatus",
        "Busy",
        "Client",
        "Configured",
        "Conflict",
        "ConnectionLost",
        "Consumer",
        "ConsumerHealth",
        "Counts",
        "Damaged",
        "DeadLetter",
        "DeadLetterMessage",
        "DeadLetters",
        "Delivery",
        "Forbidden",
        "Full",
        "GroupPartition",
        "GroupSummary",
        "InvalidOffset",
        "InvalidRequest",
        "Locked",
        "Message",
        "MissingKey",
        "NotFound",
        "PartitionSummary",
        "PenstockError",
        "Producer",
        "PushBuffer",
        "Pushed",
        "QueueDescription",
        "QueueFull",
        "QueueOptions",
        "QueueSettings",
        "QueueSummary",
        "Reader",
        "Received",
        "Record",
        "Retry",
        "RetryPolicy",
        "RoutePushed",
        "RouteStatus",
        "Routes",
        "Schedule",
        "ScheduleRun",
        "ScheduledMessage",
        "ScheduledMessages",
        "Schedules",
        "Seek",
        "StorageFailed",
        "StorageFull",
        "SyncClient",
        "SyncMessage",
        "SyncProducer",
        "SyncPushBuffer",
        "SyncReader",
        "SyncRoutes",
        "SyncSchedules",
        "SyncTopic",
        "SyncTopicClient",
        "SyncTopicGroup",
        "SyncTransaction",
        "TooLarge",
        "Topic",
        "TopicClient",
        "TopicGroup",
        "Transaction",
        "TransactionStep",
        "Unauthorized",
        "Unavailable",
        "backoff",
        "processing",
    }
)


def __getattr__(name: str) -> Any:
    if name in _FROM_CLIENT:
        return getattr(importlib.import_module("penstock.client"), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *_FROM_CLIENT))
