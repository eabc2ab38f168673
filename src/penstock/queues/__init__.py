"""Queues on PostgreSQL: push, pop, acknowledge, leases, groups, dead letters, retention.

engine.py      `Queues`, the public face
types.py       the structs that go in and come out
push.py        check items, give them transaction ids, append them     functions/append.sql
deliver.py     a pop: take or park, until there are messages or its time is over
exchanges.py   the calls that settle and take, and those of a push that takes for parked pops;
               leases that no client has are released
taking.py      arguments and rows of `take`                             functions/take.sql
settling.py    arguments and rows of `settle`; the remembered leases    functions/settle.sql
waiting.py     parked pops, and NOTIFY between brokers
transaction.py, streams.py     push and settle in one transaction
calls.py       the SQL of all these
catalog.py     a cache of queues, partitions and groups
checks.py      what names and texts may be
options.py     a table of the options of a queue, their limits and columns
crypto.py      encrypts payloads and headers
consumers.py   which connections pop, for the members of a group, and the reports of consumers
failures.py    which worker reported a failure, for the timeline of a message
context.py     what all parts get
admin/         requests of people: groups, dead letters, messages, traces, figures, options
background/    work without a request: delayed messages, schedules, retention, presence
schema/        migrations, functions and queries

docs/explanation/queues.md follows a message from its push to a pop on another broker.
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
