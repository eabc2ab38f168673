"""Queen MQ's names for the fields of nouns.

Where Queen MQ and Penstock have the same operation, the answer has the fields of the noun, and
beside them those that Queen's clients read.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.contract.dead_letters import DeadLetterMessage, Purged, Requeued
from penstock.contract.groups import Group, GroupDeleted, GroupPosition, Seek
from penstock.contract.noun import Noun


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


def _success(_: Noun) -> dict[str, Any]:
    return {"success": True}


ALIASES: dict[type[msgspec.Struct], Callable[[Any], dict[str, Any]]] = {
    Group: group,
    GroupPosition: _position,
    GroupDeleted: _group_deleted,
    Seek: _seek,
    DeadLetterMessage: _dead_letter,
    Requeued: _success,
    Purged: _success,
}
