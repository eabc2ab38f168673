"""Queues on PostgreSQL: push, pop, acknowledge, leases, groups, dead letters, retention."""

from penstock.queues.engine import Queues
from penstock.queues.types import (
    Ack,
    AckOutcome,
    Delivered,
    Extended,
    Item,
    PopOutcome,
    PopRequest,
    PushOutcome,
    TransactionResult,
)

__all__ = [
    "Ack",
    "AckOutcome",
    "Delivered",
    "Extended",
    "Item",
    "PopOutcome",
    "PopRequest",
    "PushOutcome",
    "Queues",
    "TransactionResult",
]
