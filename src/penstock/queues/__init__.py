"""Queues on PostgreSQL: push, pop, acknowledge, leases, groups, dead letters, retention."""

from penstock.queues.engine import Queues
from penstock.queues.types import (
    Ack,
    Acked,
    Extended,
    Item,
    Message,
    Popped,
    PopRequest,
    Pushed,
    TransactionResult,
)

__all__ = [
    "Ack",
    "Acked",
    "Extended",
    "Item",
    "Message",
    "PopRequest",
    "Popped",
    "Pushed",
    "Queues",
    "TransactionResult",
]
