"""Descriptions and examples for the OpenAPI document.

`api_examples.json` has real requests and answers, recorded from a broker by `tools/api-examples`.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any

PARTITION_ID = "20ff6f94-0000-8000-8008-000000000000"
NAMES = {  # parameter of a path -> an example
    "queue": "orders",
    "topic": "orders",
    "group": "billing",
    "partition": "c-1",
    "transaction": "order-7",
    "lease": "01a1e49a-e1da-7008-9162-f15891935489",
    "name": "lake",
    "signal": "traces",
    "id": "1",
}
PARAMETERS = {
    "action": "What to do.",
    "after": "Start after this entry: the `id` of the last one on the previous page.",
    "at": "A time: ISO 8601, or milliseconds since 1970.",
    "autoAck": "Acknowledge on delivery: at most once instead of at least once.",
    "autopilot": "If `batch` or `partitions` is missing, let the broker choose it.",
    "batch": "The most messages to return.",
    "before": "Return entries before this id: the last one on the previous page.",
    "consumerGroup": "The consumer group. Consumers that name no group share the queue.",
    "cursor": "`next` of the previous page.",
    "database": "`required`: not ready while PostgreSQL is down, even if pushes can be buffered.",
    "deleteMetadata": "Also delete the group's subscription: where it starts reading.",
    "details": "Return sizes and rates of each topic instead of only names.",
    "error": "Only dead letters whose error contains this text.",
    "filter": "Only entries whose name contains this text.",
    "force": "Delete the route even if it holds undelivered records; they are lost.",
    "from": "Start of the time range, inclusive (ISO 8601).",
    "group": "The consumer group.",
    "groupBy": "Add totals per queue, namespace or task.",
    "hostname": "Only processes on this host.",
    "interval": "Length of one interval.",
    "lease": "The `leaseId` that the pop returned.",
    "level": "The lowest level to return: info, warning or error.",
    "limit": "The most entries to return.",
    "max_messages": "The most records to return.",
    "format": "The format of the topic's files: `aiq` or `kafka`; default: `topics.format`.",
    "minLagSeconds": "Only partitions with at least this lag, in seconds.",
    "signal": "traces, metrics or logs.",
    "afterQueue": "With `afterGroup`: the queue that ended the page before.",
    "afterGroup": "With `afterQueue`: the group that ended the page before.",
    "namespace": "Only queues in this namespace.",
    "ns": "Only queues in this namespace.",
    "offset": "Number of entries to skip.",
    "partition": "The partition.",
    "partitions": "The most partitions to take messages from.",
    "placement": "Where the records are: `local` or `shared`; default: `topics.placement`.",
    "q": "The text to look for.",
    "queue": "The queue.",
    "range": "The time range: 1h, 24h or 7d.",
    "recent": "Allow figures that are a few seconds old; cheaper for the broker.",
    "search": "Only payloads in which a JSON path has this value, such as `$.id=7`.",
    "sort": "The field to sort by; with a leading `-`, largest first.",
    "status": "Only messages in this state.",
    "subscriptionFrom": "Where a new group starts: `now`, or a time (ISO 8601).",
    "subscriptionMode": "Where a new group starts: `all` messages or only `new` ones.",
    "task": "Only queues with this task.",
    "timeout": "The longest time to wait, in milliseconds.",
    "to": "End of the time range, exclusive (ISO 8601).",
    "topic": "The topic.",
    "transaction": "The message's transactionId.",
    "transactionId": "Only messages with this transactionId.",
    "wait": "If there are no messages, wait for some.",
    "workerId": "Only the process with this number on its host.",
}
APPENDED_AT = "appended at or after this time: ISO 8601, or milliseconds since 1970."
OTHERWISE = {  # (part of a path, parameter) -> its description on such paths
    ("/api/v1/messages/", "partition"): "The message's partitionId.",
    ("/retry", "consumerGroup"): "The consumer group; default: all groups that finished it.",
    ("/api/v1/traces/", "partition"): "The message's partitionId.",
    ("/api/v1/traces/by-name", "name"): "The trace name.",
    ("/topics/{topic}", "partitions"): "The number of partitions; default: 1.",
    ("/topics/{topic}", "partition"): "The number of the partition; default: 0.",
    ("/api/v1/pipelines", "name"): "The pipeline.",
    ("/api/v1/routes", "name"): "The route.",
    ("/api/v1/schedules", "name"): "The schedule.",
    ("/consume", "offset"): "The first offset to read.",
    ("/consume", "at"): f"Start at the first record {APPENDED_AT}",
    ("/stream", "at"): f"Start at the first record {APPENDED_AT}",
    ("/stream", "offset"): "The first offset to read, or `latest`.",
    ("/api/v1/tasks/requeue", "id"): "Only the dead letter with this `dlqId`.",
    ("/api/v1/tasks/purge", "id"): "Only the dead letter with this `dlqId`.",
    ("/api/v1/tasks", "id"): "The task's id, as returned when it was started.",
    ("/api/v1/tasks", "consumerGroup"): "Only dead letters of this consumer group.",
    ("/api/v1/dlq/errors", "filter"): "Only errors that contain this text.",
    ("/api/v1/dlq", "id"): "Only the dead letter with this `dlqId`.",
    ("/api/v1/dlq", "before"): "`dlqId` of the last entry on the previous page.",
    ("/api/v1/dlq", "consumerGroup"): "Only dead letters of this consumer group.",
    ("/api/v1/audit", "filter"): "Only entries that contain this text.",
}


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """Map operations (`GET /topics/{topic}`) to their `query`, `body` and `answer`, if any."""
    text = files("penstock.wire.http").joinpath("api_examples.json").read_text()
    examples: dict[str, dict[str, Any]] = json.loads(text)
    return examples


def meaning(path: str, parameter: str) -> str:
    """Return the description of a parameter; empty if there is none."""
    for (part, name), text in OTHERWISE.items():
        if name == parameter and part in path:
            return text
    return PARAMETERS.get(parameter, "")


def parameter_example(path: str, parameter: str) -> str:
    """Return an example of a parameter of the path."""
    if parameter == "partition" and meaning(path, parameter).endswith("partitionId."):
        return PARTITION_ID
    if parameter == "name" and "/pipelines" in path:
        return "big-orders"
    return NAMES.get(parameter, parameter)
