"""Push the messages of schedules at the times of their cron expressions.

Any broker does it; none is the leader. Each sleeps until the next due time in the database. A
change wakes it: at once on the broker that made the change, by NOTIFY on the others. The first
broker locks the schedule's row (the others skip it), pushes the due messages and advances
`next_at`, in one transaction.
So after a kill at any moment, a due time is either done or still due. The transaction id consists
of the schedule and the due time.

Only the database's clock decides what is due. `catch_up` decides about due times that passed while
no broker or no database was running:

    all     a message for each of them
    one     a message for the last of them
    none    none, unless the last is less than a minute ago
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import asyncpg
import msgspec

from penstock.contract.schedules import Schedule, ScheduleDefinition, ScheduleRun
from penstock.database import struct_of
from penstock.database.retry import BACKGROUND_SECONDS
from penstock.errors import Full, MissingKey, NotFound, PenstockError, Unavailable
from penstock.io.tasks import cancelled, supervised
from penstock.protocol import headers
from penstock.queues.background.cron import Cron, due_until
from penstock.queues.checks import check_name
from penstock.queues.context import QueueContext
from penstock.queues.transaction import QueueTransaction, Transactions
from penstock.queues.types import Item, ItemOutcome

log = logging.getLogger("penstock.queues")

REFUSED_SECONDS = 5.0  # after a push that was refused
FALLBACK_SECONDS = 60.0  # in case a notification was lost
SPREAD_SECONDS = 0.02  # brokers that wait for the same moment do not all come at once
MAX_FIRINGS = 100  # before a change is refused, since more and more is due
SCHEDULES_PER_STEP = 100
KEPT_RUNS, SHOWN_RUNS = 10, 5

DUE = f"""SELECT name FROM schedules WHERE look_at <= clock_timestamp()
           ORDER BY look_at LIMIT {SCHEDULES_PER_STEP}"""
DUE_LOCKED = """SELECT *, clock_timestamp() AS now FROM schedules
                 WHERE name = $1 AND look_at <= clock_timestamp() FOR UPDATE SKIP LOCKED"""
LOCKED = "SELECT *, clock_timestamp() AS now FROM schedules WHERE name = $1 FOR UPDATE"
NEXT = "SELECT extract(epoch FROM min(look_at) - clock_timestamp())::float8 AS s FROM schedules"
READ = "SELECT *, clock_timestamp() AS now FROM schedules WHERE name = $1"
RAN = "UPDATE schedules SET next_at = $2, look_at = $3, runs = $4 WHERE name = $1"
PAUSE = """UPDATE schedules SET paused = $2, next_at = $3, look_at = $3,
                  updated_at = clock_timestamp()
            WHERE name = $1 RETURNING *, clock_timestamp() AS now"""
PUT = """INSERT INTO schedules AS s (name, cron, timezone, queue, partition, payload, headers,
                                     key_id, catch_up, paused, next_at, look_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $11)
         ON CONFLICT (name) DO UPDATE SET
           cron = excluded.cron, timezone = excluded.timezone, queue = excluded.queue,
           partition = excluded.partition, payload = excluded.payload, headers = excluded.headers,
           key_id = excluded.key_id, catch_up = excluded.catch_up, paused = excluded.paused,
           next_at = excluded.next_at, look_at = excluded.look_at, updated_at = clock_timestamp()
         RETURNING *, clock_timestamp() AS now"""


class Fired(msgspec.Struct):
    pushed: list[ItemOutcome]
    runs: list[ScheduleRun]


class Scheduler:
    def __init__(self, context: QueueContext, transactions: Transactions) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._keys, self._waiting = context.keys, context.waiting
        self._transactions = transactions
        self._changed = asyncio.Event()  # a due time may have become earlier
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = supervised("schedules", self._run, self._database.metrics)

    async def stop(self) -> None:
        await cancelled(self._task)

    def wake(self) -> None:
        """Ask the database again when the next is due."""
        self._changed.set()

    # What users ask for

    async def listing(self) -> list[Schedule]:
        rows = await self._database.browse(
            "SELECT *, clock_timestamp() AS now FROM schedules ORDER BY name"
        )
        return [self._schedule(row) for row in rows]

    async def get(self, name: str) -> Schedule:
        return self._schedule(_one(await self._database.read(READ, name), name))

    async def put(self, name: str, wanted: ScheduleDefinition) -> Schedule:
        """Create a schedule, or change it. The next run stays the same as long as cron and time
        zone do. A change of them applies from now on: what was due before is pushed first.
        """
        for kind, text in (
            ("schedule", name),
            ("queue", wanted.queue),
            ("partition", wanted.partition),
        ):
            check_name(kind, text)
        cron = Cron(wanted.cron, wanted.timezone)
        item = await self._at_rest(name, wanted)

        async def work(connection: Any) -> Any:
            row = await connection.fetchrow(LOCKED, name)
            next_at = row and row["next_at"]
            same = row and (row["cron"], row["timezone"]) == (wanted.cron, wanted.timezone)
            if row and _is_due(row) and (wanted.paused or not same):
                return None
            overdue = next_at is not None and next_at <= row["now"]  # its queue is full
            if next_at is None or not (same or overdue):
                # From the moment at which nothing was due: later, a run could be passed over.
                now = row["now"] if row else await connection.fetchval("SELECT clock_timestamp()")
                next_at = cron.after(now)
            return await connection.fetchrow(
                PUT,
                *(name, wanted.cron, wanted.timezone, wanted.queue, wanted.partition),
                *(item.payload, item.headers, item.key_id, wanted.catch_up, wanted.paused),
                None if wanted.paused else next_at,
            )

        row = await self._change(name, work)
        self._waiting.changed()
        return self._schedule(row)

    async def pause(self, name: str, paused: bool = True) -> Schedule:
        """Pause a schedule, or resume it from now: runs that were due in between are not made up
        for. What was due before the pause is pushed first.
        """

        async def work(connection: Any) -> Any:
            row = _one(await connection.fetch(LOCKED, name), name)
            if row["paused"] == paused:
                return row
            if paused and _is_due(row):
                return None
            next_at = None if paused else Cron(row["cron"], row["timezone"]).after(row["now"])
            return await connection.fetchrow(PAUSE, name, paused, next_at)

        row = await self._change(name, work)
        self._waiting.changed()
        return self._schedule(row)

    async def _change(self, name: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run `work` in a transaction. While it returns None, push what is due and try again."""
        for _ in range(MAX_FIRINGS):
            row = await self._database.transact(work)
            if row is not None:
                return row
            await self._fire_one(name)
        raise Unavailable(f"schedule '{name}' still pushes the runs that it missed; try again")

    async def delete(self, name: str) -> None:
        sql = "DELETE FROM schedules WHERE name = $1 RETURNING name"
        _one(await self._database.fetch(sql, name), name)

    async def run(self, name: str) -> ScheduleRun:
        """Push its message now. What is due stays due."""

        async def work(transaction: QueueTransaction) -> Fired:
            connection = transaction.connection
            row = _one(await connection.fetch(LOCKED, name), name)
            fired = await self._push(transaction, row, [row["now"]])
            for run in fired.runs:
                run.manual = True
            await connection.execute(
                RAN, name, row["next_at"], row["look_at"], _recorded(row, fired.runs)
            )
            return fired

        return (await self._transact(name, work)).runs[0]

    # What happens by itself

    async def fire(self) -> float | None:
        """Push all that is due; the seconds until the next, None when there is none."""
        while True:
            rows = await self._database.fetch(DUE)
            for row in rows:
                await self._fire_one(row["name"])
            if len(rows) < SCHEDULES_PER_STEP:
                return (await self._database.fetch(NEXT))[0]["s"]  # type: ignore[no-any-return]

    async def _fire_one(self, name: str) -> None:
        async def work(transaction: QueueTransaction) -> Fired:
            connection = transaction.connection
            row = await connection.fetchrow(DUE_LOCKED, name)
            if row is None:
                return Fired([], [])  # another broker does it, or has done it
            cron = Cron(row["cron"], row["timezone"])
            due = due_until(cron, row["catch_up"], row["next_at"], row["now"])
            fired = await self._push(transaction, row, due.times)
            fired.runs = [
                *(ScheduleRun(at, row["now"], _id(name, at), "skipped") for at in due.skipped),
                *fired.runs,
            ]
            await connection.execute(
                RAN, name, due.next_at, due.next_at, _recorded(row, fired.runs)
            )
            return fired

        try:
            await self._transact(name, work)
        except (Full, MissingKey) as error:
            await self._put_off(name, error)
        except NotFound:
            pass  # deleted meanwhile

    async def _transact(
        self, name: str, work: Callable[[QueueTransaction], Awaitable[Fired]]
    ) -> Fired:
        """Run `work` in a transaction that may push to the schedule's queue."""
        row = _one(await self._database.read(READ, name), name)
        fired = await self._transactions.attempt([_item(row)], work)
        self._transactions.count_and_wake(fired.pushed)
        return fired

    async def _push(self, transaction: QueueTransaction, row: Any, times: list[datetime]) -> Fired:
        """Push a message per due time, all or none."""
        template = self._keys.decrypt_item(_item(row))
        items = [
            msgspec.structs.replace(template, transaction_id=_id(row["name"], at)) for at in times
        ]
        fired = Fired([], [])
        if not items:
            return fired
        answers = await transaction.append(items)
        for at, answer in zip(times, answers, strict=True):
            if answer.status == "full":
                raise Full(f"queue '{answer.queue}' is full")
            result: Any = "duplicate" if answer.status == "duplicate" else "queued"
            fired.pushed.append(answer)
            fired.runs.append(ScheduleRun(at, row["now"], answer.transaction_id, result))
        return fired

    async def _put_off(self, name: str, error: PenstockError) -> None:
        """Record why a due time could not be pushed, and try again a little later."""

        async def work(connection: Any) -> None:
            row = await connection.fetchrow(DUE_LOCKED, name)
            if row is None:
                return
            result: Any = "full" if isinstance(error, Full) else "refused"
            at = row["next_at"]
            run = ScheduleRun(at, row["now"], _id(name, at), result, error=str(error))
            before = _runs(row)
            if before and before[0].due_at == at and before[0].result == result:
                before = before[1:]  # the same again
            await connection.execute(
                "UPDATE schedules SET runs = $2, "
                "look_at = clock_timestamp() + make_interval(secs => $3) WHERE name = $1",
                *(name, _encode([run, *before]), REFUSED_SECONDS),
            )

        log.warning("schedule '%s' is tried again in %.0f s: %s", name, REFUSED_SECONDS, error)
        await self._database.transact(work)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                pause = await self.fire()
            except Unavailable:
                pause = BACKGROUND_SECONDS
            except asyncpg.PostgresError as error:
                log.warning("schedules are looked at again in %.0f s: %s", REFUSED_SECONDS, error)
                pause = REFUSED_SECONDS
            pause = FALLBACK_SECONDS if pause is None else min(max(pause, 0.0), FALLBACK_SECONDS)
            try:
                async with asyncio.timeout(pause + random.uniform(0, SPREAD_SECONDS)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _at_rest(self, name: str, wanted: ScheduleDefinition) -> Item:
        """Return payload and headers as the table stores them, encrypted if the queue is."""
        item = Item(
            wanted.queue,
            bytes(wanted.payload),
            wanted.partition,
            _item_id(name),
            headers=headers.encode(wanted.headers) if wanted.headers else None,
        )
        queue = await self._catalog.queue(wanted.queue)
        encrypted = queue is not None and queue.options.encryption_enabled
        return self._keys.encrypt_item(item) if encrypted else item

    def _schedule(self, row: Any) -> Schedule:
        item = _item(row)
        try:
            item = self._keys.decrypt_item(item)
        except MissingKey:  # others may have the key
            item = msgspec.structs.replace(item, payload=b"null", headers=None)
        next_runs = []
        if row["next_at"] is not None:
            cron = Cron(row["cron"], row["timezone"])
            next_runs = [row["next_at"], *islice(cron.times(row["next_at"]), SHOWN_RUNS - 1)]
        return struct_of(
            Schedule,
            row,
            payload=item.payload,
            headers=headers.decode(item.headers) if item.headers else None,
            next_runs=next_runs,
            last_runs=_runs(row),
        )


def _one(rows: list[Any], name: str) -> Any:
    if not rows:
        raise NotFound(f"Schedule not found: {name}")
    return rows[0]


def _is_due(row: Any) -> bool:
    """Return whether a run can be pushed now."""
    return row["look_at"] is not None and bool(row["look_at"] <= row["now"])


def _id(name: str, due: datetime) -> str:
    """Return the transaction id of a due time's message."""
    text = due.astimezone(UTC).replace(tzinfo=None).isoformat()
    return f"schedule:{name}:{text}Z"


def _item_id(name: str) -> str:
    return f"schedule:{name}"


def _item(row: Any) -> Item:
    return Item(
        row["queue"],
        row["payload"],
        row["partition"],
        _item_id(row["name"]),
        key_id=row["key_id"],
        headers=row["headers"],
    )


def _runs(row: Any) -> list[ScheduleRun]:
    return msgspec.json.decode(row["runs"], type=list[ScheduleRun])


def _recorded(row: Any, runs: list[ScheduleRun]) -> str:
    return _encode([*reversed(runs), *_runs(row)])


def _encode(runs: list[ScheduleRun]) -> str:
    return msgspec.json.encode(runs[:KEPT_RUNS]).decode()
