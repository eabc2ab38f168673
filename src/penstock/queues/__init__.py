"""Queues on PostgreSQL: push, pop, acknowledge, leases, groups, dead letters, retention.

engine.py      Queues, the public face
types.py       what goes in and what comes out
push.py        check and name items, append them            schema/functions/append.sql
deliver.py     a pop: take, or park and take again; its answer
exchanges.py   the calls that take, for consumers and for the parked pops that a push serves;
               leases that no client has
taking.py      takes on their way to the database, and what they got        take.sql
settling.py    acknowledgements on their way to the database                 settle.sql
waiting.py     parked pops, and NOTIFY between brokers
transaction.py, streams.py     push and settle in one transaction
calls.py       the SQL of all these
catalog.py     what a broker remembers of queues, partitions and groups
admin/         what people ask for: groups, dead letters, messages, traces, figures, options
background/    what happens by itself: delayed messages, schedules, retention, presence
schema/        migrations, functions and queries
"""

from penstock.queues.engine import Queues
from penstock.queues.types import (
    Ack,
    AckOutcome,
    Delivered,
    Extended,
    Item,
    ItemOutcome,
    PopOutcome,
    PopRequest,
    TransactionResult,
)

__all__ = [
    "Ack",
    "AckOutcome",
    "Delivered",
    "Extended",
    "Item",
    "ItemOutcome",
    "PopOutcome",
    "PopRequest",
    "Queues",
    "TransactionResult",
]
