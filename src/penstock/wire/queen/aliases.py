"""Queen MQ's names for the fields of nouns.

If Queen MQ and Penstock have the same operation, the answer has the fields of the noun and, beside
them, the fields that Queen's clients read.
"""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec

from penstock.contract.broker import BrokerStatus
from penstock.contract.dead_letters import DeadLetterMessage, Purged, Requeued
from penstock.contract.groups import Group, GroupDeleted, GroupPosition, Seek
from penstock.contract.messages import (
    MessageBuried,
    MessageDeleted,
    MessageGroup,
    MessageRetried,
    MessageWithPayload,
    StoredMessage,
    StoredMessages,
    TraceAdded,
)
from penstock.contract.noun import Noun
from penstock.contract.queues import QueueCleared, QueueCounts
from penstock.protocol.names import QUEUE_MODE

Json = dict[str, Any]


def shape(names: str) -> Callable[[object], Json]:
    """Return a function that returns the fields of a struct under Queen's names:
    `"queueName=queue name"`. A name alone stands for the field of that name in snake_case.
    """
    fields = [_field(*one.split("=")) for one in names.split()]

    def shown(value: object) -> Json:
        return {name: getattr(value, field) for name, field in fields}

    return shown


def _field(name: str, field: str = "") -> tuple[str, str]:
    return name, field or re.sub("([A-Z])", r"_\1", name).lower()


_counts = shape("total=stored processing=leased completed failed deadLetter=dead_letters dropped")


def counts(one: QueueCounts) -> Json:
    waiting = max(0, one.waiting - one.leased)
    return {**_counts(one), "pending": waiting, "scheduled": one.scheduled}


def time_range(since: datetime, until: datetime) -> Json:
    return {"from": since, "to": until}


def page(limit: int, offset: int, **total: int) -> Json:
    return {"limit": limit, "offset": offset, **total}


_STATUS = {"waiting": "pending", "leased": "processing"}
STATES = {theirs: ours for ours, theirs in _STATUS.items()}  # Queen's name -> ours
_group = shape(
    "queueName=queue totalLag=waiting maxTimeLag=lag_seconds partitionsWithLag=lagging_partitions "
    "subscriptionMode=mode subscriptionTimestamp=start_at subscriptionCreatedAt=created_at"
)
_position = shape(
    "workerId=lease_id lastConsumedAt=consumed_at totalConsumed=consumed offsetLag=waiting"
)
_group_deleted = shape(
    "consumerGroup=group deletedPartitions=partitions metadataDeleted=subscription_deleted"
)
_sought = shape("consumerGroup=group queueName=queue")
_sought_in_all = shape("targetTimestamp=at partitionsUpdated=partitions")
_sought_in_one = shape("partitionName=partition cursorMovedTo=position")
_dead_letter = shape(
    "dlqId=number id=message_id consumerGroup=group errorMessage=error producerSub=producer"
)
_stored = shape("producerSub=producer queuePriority=priority")
_message = shape(
    "producerSub=producer isEncrypted=encrypted errorMessage=error retryCount=attempts "
    "consumerGroups=groups"
)
_config = shape("leaseTime retryLimit retryDelay ttl priority")


def _seek(one: Seek) -> Json:
    if one.partition is not None:
        shown = {**_sought_in_one(one), "updated": bool(one.partitions)}
    else:
        shown = {**_sought_in_all(one), "seekToEnd": one.to == "end"}
    return {"success": True, **_sought(one), **shown}


def _mode(queue_mode: bool, groups: int) -> Json:
    """Return how queues are read: without a group, by groups (bus), both (hybrid), or none."""
    bus = "hybrid" if groups else "queue"
    kind = bus if queue_mode else "bus" if groups else "none"
    return {"hasQueueMode": queue_mode, "busGroupsCount": groups, "type": kind}


def _place(one: StoredMessage | MessageWithPayload) -> Json:
    status = _STATUS.get(one.state, one.state)
    return {"status": status, "queuePath": f"{one.queue}/{one.partition}"}


def _message_mode(groups: list[MessageGroup]) -> Json:
    buses = len([group for group in groups if group.name != QUEUE_MODE])
    consumed = sum(group.consumed for group in groups)
    return _mode(buses < len(groups), buses) | {"consumedByGroups": consumed}


def _success(_: Noun) -> Json:
    return {"success": True}


ALIASES: dict[type[msgspec.Struct], Callable[[Any], Json]] = {
    Group: lambda one: {**_group(one), "topics": [one.queue]},
    GroupPosition: lambda one: {
        **_position(one),
        "timeLagSeconds": int(one.lag_seconds),
        "leaseActive": one.lease_id is not None,
    },
    GroupDeleted: lambda one: {
        "success": True,
        **_group_deleted(one),
        **({} if one.queue is None else {"queueName": one.queue}),
    },
    Seek: _seek,
    BrokerStatus: lambda one: {
        "shared_state": {"enabled": True, "server_id": one.member},
        "queen": {"waiting_pops": one.waiting_pops, "merging": one.merging},
    },
    DeadLetterMessage: lambda one: {
        **_dead_letter(one),
        "retryCount": max(0, one.attempts - 1),
    },
    StoredMessage: lambda one: {
        **_place(one),
        **_stored(one),
        "queueStatus": _STATUS.get(one.queue_state, one.queue_state),
        "busStatus": {"consumedBy": one.groups_done, "totalGroups": one.groups},
    },
    StoredMessages: lambda one: {"mode": _mode(one.queue_mode, one.groups)},
    MessageWithPayload: lambda one: {
        **_place(one),
        **_message(one),
        "queueConfig": _config(one.options),
        "mode": _message_mode(one.groups),
    },
    MessageDeleted: lambda _: {"success": True, "message": "Message deleted successfully"},
    MessageBuried: lambda one: {"success": one.moved, "dlq": one.moved},
    **dict.fromkeys((MessageRetried, QueueCleared, Requeued, Purged, TraceAdded), _success),
}
