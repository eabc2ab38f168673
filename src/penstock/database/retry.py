"""The rules for repeating a call to PostgreSQL.

Each case is repeated in one place only, so that attempts do not multiply:

    undone   PostgreSQL rolled the work back (a deadlock): `Database.fetch` and `transact`, and
             `queues.transaction` for what the broker does in one transaction
    lost     the connection broke, so the outcome is unknown: `Batcher` repeats calls that are safe
             to repeat; `Database.read` and `browse` repeat reads
    down     the database as a whole is down: pushes go to the buffer, other requests fail with 503,
             and background work waits for `Database.recovered`, then `BACKGROUND_SECONDS`

    stale    the broker's cached copy of a queue is out of date: `queues.push` and
             `queues.transaction` look it up again

A failover takes longer than all attempts together, so requests do not wait for it.
"""

import asyncpg

UNDONE = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)  # rolled back as a whole
ATTEMPTS = 6  # of one request, including the first
UNDONE_SECONDS = 0.02  # times the number of attempts: lets the winner of the deadlock finish
LOST_SECONDS = 0.05  # times the number of attempts: the pool must open another connection
BACKGROUND_SECONDS = 0.2  # pause of background work, which is repeated without limit
