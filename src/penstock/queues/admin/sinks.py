"""Record in PostgreSQL what exactly-once sinks have written to queues, for all brokers on it.

A push of a sink's task stores its rows, and how many of the task's rows are stored now, in one
transaction. So a row is stored once even if its message was consumed and deleted before the task
is run again.
"""

from msgspec.structs import astuple

from penstock.database import Database, struct_of
from penstock.errors import Conflict, Full, InvalidRequest
from penstock.protocol.sink_claims import Claim, Claimed, Commit
from penstock.queues.checks import check_text
from penstock.queues.context import QueueContext
from penstock.queues.push import with_ids
from penstock.queues.transaction import QueueTransaction, Transactions
from penstock.queues.types import Item, ItemOutcome


class Sinks:
    def __init__(self, context: QueueContext, transactions: Transactions) -> None:
        self._database = context.database
        self._transactions = transactions

    async def claim(self, claim: Claim) -> Claimed:
        for name in ("target", "app", "checksum", "run", "note", "keys"):
            check_text(name, getattr(claim, name))
        (row,) = await self._database.fetch(
            "SELECT * FROM sink_claim($1, $2, $3, $4, $5, $6, $7, $8)", *astuple(claim)
        )
        return struct_of(Claimed, row)

    async def commit(self, done: Commit) -> None:
        """Record that a batch has been written; its tasks were recorded with their last rows."""
        check_text("target", done.target)
        check_text("app", done.app)
        if done.task is not None:
            raise InvalidRequest("a queue's task is done with its last rows: push them with `last`")
        await self._database.fetch(
            """INSERT INTO sink_tasks (target, app, batch, task, queue_id, checksum, run, note)
               SELECT s.target, s.app, s.batch, -1, s.queue_id, '', '', '' FROM sink_tasks s
                WHERE s.target = $1 AND s.app = $2 AND s.batch = $3 LIMIT 1
               ON CONFLICT DO NOTHING""",
            done.target,
            done.app,
            done.batch,
        )

    async def push(self, task: Commit, first: int, items: list[Item], *, last: bool) -> int:
        """Store rows of a task, the first of which has the number `first`; how many of the task's
        rows are stored now. Rows that are stored already are left out, and of a queue that is
        almost full the rows that fit are taken. `last`: there are no more."""
        items = with_ids(items)
        key = astuple(task)

        async def work(transaction: QueueTransaction) -> tuple[int, list[ItemOutcome]]:
            connection = transaction.connection
            rows = await connection.fetchval(
                """SELECT rows FROM sink_tasks
                    WHERE target = $1 AND app = $2 AND batch = $3 AND task = $4 FOR UPDATE""",
                *key,
            )
            if rows is None or rows < first:
                raise Conflict(
                    f"task {task.task} of batch {task.batch} has not stored the rows before these"
                )
            fresh = items[rows - first :]
            pushed = await _append_fitting(transaction, fresh)
            rows += len(pushed)
            done = last and len(pushed) == len(fresh)
            await connection.execute(
                """UPDATE sink_tasks SET rows = $5, done = done OR $6, claimed_at = now()
                    WHERE target = $1 AND app = $2 AND batch = $3 AND task = $4""",
                *key,
                rows,
                done,
            )
            return rows, pushed

        rows, pushed = await self._transactions.attempt(items, work)
        self._transactions.count_and_wake(pushed)
        return rows


async def _append_fitting(transaction: QueueTransaction, items: list[Item]) -> list[ItemOutcome]:
    """Push all items, or as many of the first ones as fit after halving their number."""
    while items:
        attempt = transaction.connection.transaction()
        await attempt.start()
        pushed = await transaction.append(items)
        if not any(one.status == "full" for one in pushed):
            await attempt.commit()
            return pushed
        await attempt.rollback()
        if len(items) == 1:
            raise Full(f"queue '{items[0].queue}' is full (maxSize)")
        items = items[: len(items) // 2]
    return []


async def forget_idle_sinks(database: Database, seconds: float) -> None:
    """Forget sinks that have not written for so long."""
    await database.fetch(
        """DELETE FROM sink_tasks s USING
               (SELECT target, app FROM sink_tasks GROUP BY target, app
                HAVING max(claimed_at) < now() - make_interval(secs => $1)) old
            WHERE s.target = old.target AND s.app = old.app""",
        seconds,
    )
