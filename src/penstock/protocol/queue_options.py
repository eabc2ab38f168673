"""The options of a queue, for both ends of the HTTP API.

Each field is an option; its name in JSON is in camel case. `penstock.queues.options` derives the
broker's table of names, limits and columns from it.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

LARGEST = 2**31 - 1


def _whole(meaning: str, least: int = 0) -> Meta:
    return Meta(ge=least, le=LARGEST, description=meaning)


class QueueOptions(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """The options of a queue."""

    lease_time: Annotated[int, _whole("length of a lease in seconds; 0 means 60")] = 300
    retry_limit: Annotated[int, _whole("retries after the first attempt")] = 3
    retry_delay: Annotated[
        int, _whole("milliseconds before a retry; blocks the partition under strict order")
    ] = 1000
    delayed_processing: Annotated[
        int, _whole("deliver a message when it is this many seconds old")
    ] = 0
    window_buffer: Annotated[
        int, _whole("deliver a partition when its newest message is this many seconds old")
    ] = 0
    max_size: Annotated[
        int, _whole("limit of messages that the slowest group has not finished; 0: no limit")
    ] = 0
    ttl: Annotated[int, _whole("drop messages older than this many seconds; 0: never")] = 0
    priority: Annotated[
        int, _whole("higher values are popped first within a namespace or task", -LARGEST)
    ] = 0
    dead_letter_queue: Annotated[
        bool, Meta(description="false: drop messages after the last attempt")
    ] = True
    dlq_after_max_retries: Annotated[
        bool, Meta(description="false: drop messages after the last attempt")
    ] = True
    retention_enabled: Annotated[
        bool, Meta(description="apply the two retention options below")
    ] = False
    retention_seconds: Annotated[int, _whole("delete messages older than this; 0: never")] = 0
    completed_retention_seconds: Annotated[
        int, _whole("delete older messages that every group has finished; 0: never")
    ] = 0
    max_wait_time_seconds: Annotated[
        int, _whole("delete older messages that a group has not finished; 0: never")
    ] = 0
    encryption_enabled: Annotated[
        bool,
        Meta(description="encrypt payloads and headers with AES-256-GCM"),
    ] = False
    record_deliveries: Annotated[
        bool,
        Meta(description="record for a week when leases end, for `archive --with-outcomes`"),
    ] = False
    ordering: Annotated[
        Literal["partition", "none"],
        Meta(
            description="partition: strict order per partition; none: consumers share a partition"
        ),
    ] = "partition"
