"""When to ask PostgreSQL again. Everything between a request and the database follows this.

Each of these cases has one place that repeats, so that attempts do not multiply:

    undone   PostgreSQL rolled the work back (a deadlock): `Database.fetch` and `transact`, and
             `queues.transaction` for what the broker does in one transaction
    lost     the connection broke, so the outcome is unknown: `Batcher` repeats calls that are safe
             to repeat and says why; `Database.read` and `browse` repeat reads
    down     the database as a whole is down: pushes go to the buffer, other requests fail with 503,
             and background work waits for `Database.recovered`, then `BACKGROUND_SECONDS`

    stale    a queue that the broker remembers has changed: `queues.push` and `queues.transaction`
             look it up again

A failover takes longer than all attempts together: requests do not wait for it.
"""

import asyncpg

UNDONE = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)  # rolled back as a whole
ATTEMPTS = 6  # of one request, the first included
UNDONE_SECONDS = 0.02  # times the number of attempts so far: whoever won the deadlock ends first
LOST_SECONDS = 0.05  # the same after a lost connection: the pool has to open another one
BACKGROUND_SECONDS = 0.2  # work that nobody waits for must not be given up, and need not be fast
