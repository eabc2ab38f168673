"""A queue's options: the struct that both ends of the HTTP dialect agree on.

A field is an option: JSON has its name in camel case. `penstock.queues.options` makes the broker's
table of names, limits and columns from it.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

LARGEST = 2**31 - 1


def _whole(meaning: str, least: int = 0) -> Meta:
    return Meta(ge=least, le=LARGEST, description=meaning)


class QueueOptions(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """The options of one queue, as configured."""

    lease_time: Annotated[int, _whole("seconds a lease lasts; 0 means 60")] = 300
    retry_limit: Annotated[int, _whole("attempts after the first")] = 3
    retry_delay: Annotated[
        int, _whole("milliseconds before the next attempt; strict order waits with it")
    ] = 1000
    delayed_processing: Annotated[
        int, _whole("seconds; a message is delivered when it is that old")
    ] = 0
    window_buffer: Annotated[
        int, _whole("seconds; a partition is delivered when its newest message is that old")
    ] = 0
    max_size: Annotated[
        int, _whole("most messages the slowest group has not answered; 0: no limit")
    ] = 0
    ttl: Annotated[
        int, _whole("seconds; older messages are dropped, counted and deleted; 0: never")
    ] = 0
    priority: Annotated[
        int, _whole("higher first among the queues of a namespace or task", -LARGEST)
    ] = 0
    dead_letter_queue: Annotated[
        bool, Meta(description="false: exhausted messages are dropped and counted")
    ] = True
    dlq_after_max_retries: Annotated[
        bool, Meta(description="false: exhausted messages are dropped and counted")
    ] = True
    retention_enabled: Annotated[
        bool, Meta(description="whether the two options of retention apply")
    ] = False
    retention_seconds: Annotated[int, _whole("older messages are deleted; 0: never")] = 0
    completed_retention_seconds: Annotated[
        int, _whole("older messages that every group has answered are deleted; 0: never")
    ] = 0
    max_wait_time_seconds: Annotated[
        int, _whole("older messages that some group has not answered are deleted; 0: never")
    ] = 0
    encryption_enabled: Annotated[
        bool,
        Meta(description="payloads and headers are sealed with AES-256-GCM before they are stored"),
    ] = False
    ordering: Annotated[
        Literal["partition", "none"],
        Meta(description="partition: one lease at a time, strict order; none: competing consumers"),
    ] = "partition"
