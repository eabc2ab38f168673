"""Queues on PostgreSQL: push, pop, acknowledge, leases, groups, dead letters, retention."""

from penstock.queues.engine import Queues
from penstock.queues.types import (
    Ack,
    Acked,
    Delivered,
    Extended,
    Item,
    Popped,
    PopRequest,
    Pushed,
    TransactionResult,
)

__all__ = [
    "Ack",
    "Acked",
    "Delivered",
    "Extended",
    "Item",
    "PopRequest",
    "Popped",
    "Pushed",
    "Queues",
    "TransactionResult",
]
