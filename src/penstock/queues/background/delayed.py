"""Keep delayed messages in a table of their own, and append them to their partitions when due.

Every broker delivers them; none is the leader. `queue_deliver` removes the messages that are due
and appends them in one transaction, so after a kill at any moment a message is either waiting or
stored, never both or neither. Until it is due, no consumer waits for it and no pop reads it.

A broker sleeps until the next message is due, which every call of `queue_deliver` returns. A push
of an earlier one wakes it: here at once, and other brokers by NOTIFY. A call every
`FALLBACK_SECONDS` delivers what a lost notification announced.

Only the database's clock decides what is due. It is not compared with ours: a broker remembers how
far it is ahead of the local monotonic clock. Waking a little early only costs one more call.
"""

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from penstock.database.retry import BACKGROUND_SECONDS
from penstock.errors import Unavailable
from penstock.io.tasks import cancelled, supervised
from penstock.metrics import Counter
from penstock.queues.context import QueueContext

log = logging.getLogger("penstock.queues")

SQL = "SELECT * FROM queue_deliver($1, $2, $3, $4)"
ROWS_PER_STEP = 2000
FALLBACK_SECONDS = 30.0
SPREAD_SECONDS = 0.02  # brokers that wait for the same moment do not all come at once
# Partitions that other transactions have locked: the others go first, then we wait for these, each
# for 100 ms.
MAX_WAITED_FOR = 4
LOCKED_SECONDS = 0.05
# What was due long ago leaves dead index entries behind, which vacuum cannot remove while something
# holds an old snapshot. They are passed over, but for a full scan that takes one part in so many.
FULL_SCAN_SHARE = 20
MAX_FULL_SCAN_SECONDS = 10.0
SLACK = timedelta(seconds=10)  # a push may commit after its message is due


class Delayed:
    def __init__(self, context: QueueContext, pushed: Counter) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._waiting = context.waiting
        self._pushed = pushed
        self._next_call_at = 0.0  # monotonic: nothing is due before, as far as we know
        self._earlier = asyncio.Event()  # `_next_call_at` has become earlier
        self._ahead: float | None = None  # seconds: the database's clock minus our monotonic one
        self._since: datetime | None = None  # everything due before has been delivered
        self._full_scan_at = 0.0
        self._announced = 0.0  # due then (seconds since 1970): all brokers deliver at that moment
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._waiting.on_delayed = self._expect
        self._task = supervised("delayed messages", self._run, self._database.metrics)

    async def stop(self) -> None:
        await cancelled(self._task)

    def moment(self, delay: float) -> datetime:
        """Return the time in so many seconds by the database's clock, even while it is down. A
        broker that has not seen the database since its start uses its own clock.
        """
        now = time.time() if self._ahead is None else time.monotonic() + self._ahead
        return datetime.fromtimestamp(now, UTC) + timedelta(seconds=delay)

    def stored(self, dues: Iterable[datetime]) -> None:
        """Note that messages for these times were pushed here."""
        due = min(dues).timestamp()
        self._expect(due)
        if not self.moment(0).timestamp() < self._announced <= due:
            self._announced = due
            self._waiting.announce_delayed(due)

    async def deliver(self) -> int:
        """Append all that is due now; how many."""
        total = 0
        locked: list[int] = []
        while True:
            step = await self._step(locked)
            total += int(step["delivered"])
            locked += step["locked"] or ()
            if not step["more"] and not step["locked"]:
                break
        if not locked:
            self._since = step["database_now"] - SLACK
            return total
        self._since = None
        for partition in random.sample(locked, min(len(locked), MAX_WAITED_FOR)):
            more = True
            while more:
                step = await self._step([], partition)
                total += int(step["delivered"])
                more = step["more"]
        self._next_call_at = min(self._next_call_at, time.monotonic() + LOCKED_SECONDS)
        return total

    async def _step(self, skip: list[int], only: int | None = None) -> Any:
        began = time.monotonic()
        since = None if began >= self._full_scan_at else self._since
        (step,) = await self._database.fetch(SQL, since, skip, only, ROWS_PER_STEP)
        ended = time.monotonic()
        # as if it had read its clock when we began: never behind
        self._ahead = step["database_now"].timestamp() - began
        if since is None:
            pause = FULL_SCAN_SHARE * (ended - began)
            self._full_scan_at = ended + min(pause, MAX_FULL_SCAN_SECONDS)
        if step["next_seconds"] is not None:
            next_at = ended + max(step["next_seconds"], 0) + random.uniform(0, SPREAD_SECONDS)
            self._next_call_at = min(self._next_call_at, next_at)
        if step["delivered"]:
            for queue, messages, partitions in zip(
                step["queue_names"], step["message_counts"], step["partition_counts"], strict=True
            ):
                self._pushed.add(messages, queue)
                unordered = self._catalog.is_unordered(queue)
                self._waiting.wake(queue, messages if unordered else partitions)
        return step

    def _expect(self, due: float) -> None:
        """Deliver at this moment, by the database's clock."""
        if self._since is not None and due < self._since.timestamp():
            self._full_scan_at = 0.0
        at = 0.0 if self._ahead is None else due - self._ahead
        if at < self._next_call_at:
            self._next_call_at = at
            self._earlier.set()

    async def _run(self) -> None:
        while True:
            pause = self._next_call_at - time.monotonic()
            if pause > 0:
                self._earlier.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._earlier.wait()
                continue
            self._next_call_at = time.monotonic() + FALLBACK_SECONDS
            try:
                await self.deliver()
            except Unavailable:
                await asyncio.sleep(BACKGROUND_SECONDS)
                await self._database.recovered()
                self._next_call_at = 0.0
            except asyncpg.PostgresError as error:
                log.warning("messages that are due are tried again: %s", error)
                self._next_call_at = time.monotonic() + BACKGROUND_SECONDS
