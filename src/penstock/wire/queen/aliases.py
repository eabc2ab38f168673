"""Queen MQ's names for the fields of nouns.

Where Queen MQ and Penstock have the same operation, the answer has the fields of the noun, and
beside them those that Queen's clients read.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.contract.dead_letters import DeadLetterMessage, Purged, Requeued
from penstock.contract.groups import Group, GroupDeleted, GroupPosition, Seek
from penstock.contract.messages import (
    MessageBuried,
    MessageDeleted,
    MessageRetried,
    MessageWithPayload,
    StoredMessage,
    StoredMessages,
    TraceAdded,
)
from penstock.contract.noun import Noun
from penstock.contract.queues import QueueCleared
from penstock.protocol.names import QUEUE_MODE


def group(one: Group) -> dict[str, Any]:
    return {
        "queueName": one.queue,
        "topics": [one.queue],
        "totalLag": one.waiting,
        "maxTimeLag": one.lag_seconds,
        "partitionsWithLag": one.lagging_partitions,
        "subscriptionMode": one.mode,
        "subscriptionTimestamp": one.start_at,
        "subscriptionCreatedAt": one.created_at,
    }


def _position(one: GroupPosition) -> dict[str, Any]:
    return {
        "workerId": one.lease_id,
        "lastConsumedAt": one.consumed_at,
        "totalConsumed": one.consumed,
        "offsetLag": one.waiting,
        "timeLagSeconds": int(one.lag_seconds),
        "leaseActive": one.lease_id is not None,
    }


def _group_deleted(one: GroupDeleted) -> dict[str, Any]:
    return {
        "success": True,
        "consumerGroup": one.group,
        "deletedPartitions": one.partitions,
        "metadataDeleted": one.subscription_deleted,
        **({} if one.queue is None else {"queueName": one.queue}),
    }


def _seek(one: Seek) -> dict[str, Any]:
    shown = {"success": True, "consumerGroup": one.group, "queueName": one.queue}
    if one.partition is not None:
        return shown | {
            "partitionName": one.partition,
            "updated": bool(one.partitions),
            "cursorMovedTo": one.position,
        }
    return shown | {
        "seekToEnd": one.to == "end",
        "targetTimestamp": one.at,
        "partitionsUpdated": one.partitions,
    }


def _dead_letter(one: DeadLetterMessage) -> dict[str, Any]:
    return {
        "dlqId": one.number,
        "id": one.message_id,
        "consumerGroup": one.group,
        "errorMessage": one.error,
        "retryCount": max(0, one.attempts - 1),
        "producerSub": one.producer,
    }


_STATUS = {"waiting": "pending", "leased": "processing"}


def _mode(queue_mode: bool, groups: int) -> dict[str, Any]:
    """How queues are read: without a group, by groups (a bus), both (hybrid) or not at all."""
    bus = "hybrid" if groups else "queue"
    kind = bus if queue_mode else "bus" if groups else "none"
    return {"hasQueueMode": queue_mode, "busGroupsCount": groups, "type": kind}


def _stored(one: StoredMessage) -> dict[str, Any]:
    return {
        "status": _STATUS.get(one.state, one.state),
        "queueStatus": _STATUS.get(one.queue_state, one.queue_state),
        "queuePath": f"{one.queue}/{one.partition}",
        "busStatus": {"consumedBy": one.groups_done, "totalGroups": one.groups},
        "producerSub": one.producer,
        "queuePriority": one.priority,
    }


def _stored_page(one: StoredMessages) -> dict[str, Any]:
    return {"mode": _mode(one.queue_mode, one.groups)}


def _message(one: MessageWithPayload) -> dict[str, Any]:
    names = [group.name for group in one.groups]
    buses = len([name for name in names if name != QUEUE_MODE])
    consumed = sum(group.consumed for group in one.groups)
    options = one.options
    return {
        "status": _STATUS.get(one.state, one.state),
        "queuePath": f"{one.queue}/{one.partition}",
        "producerSub": one.producer,
        "isEncrypted": one.encrypted,
        "errorMessage": one.error,
        "retryCount": one.attempts,
        "queueConfig": {
            "leaseTime": options.lease_time,
            "retryLimit": options.retry_limit,
            "retryDelay": options.retry_delay,
            "ttl": options.ttl,
            "priority": options.priority,
        },
        "mode": _mode(buses < len(names), buses) | {"consumedByGroups": consumed},
        "consumerGroups": one.groups,
    }


def _deleted(_: MessageDeleted) -> dict[str, Any]:
    return {"success": True, "message": "Message deleted successfully"}


def _buried(one: MessageBuried) -> dict[str, Any]:
    return {"success": one.moved, "dlq": one.moved}


def _success(_: Noun) -> dict[str, Any]:
    return {"success": True}


ALIASES: dict[type[msgspec.Struct], Callable[[Any], dict[str, Any]]] = {
    Group: group,
    GroupPosition: _position,
    GroupDeleted: _group_deleted,
    Seek: _seek,
    DeadLetterMessage: _dead_letter,
    StoredMessage: _stored,
    StoredMessages: _stored_page,
    MessageWithPayload: _message,
    MessageDeleted: _deleted,
    MessageRetried: _success,
    MessageBuried: _buried,
    QueueCleared: _success,
    Requeued: _success,
    Purged: _success,
    TraceAdded: _success,
}
