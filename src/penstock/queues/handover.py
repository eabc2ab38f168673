"""Hands messages to consumers that wait for them on this broker, in the call that pushes them.

Without it a waiting pop is woken by the push's answer and makes a call of its own: a second commit
before the message is delivered. With it the pushing call also takes, for pops that are parked here,
what is due for them. Order and leases are those of any pop, for it is the same function under the
same locks; the lease is committed together with the message.

Only the first attempt of a push does so. When its outcome is unknown the leases it may have taken
are ended, the pops look for themselves, and the push is repeated alone. A pop that went away
meanwhile has its messages returned, uncounted.
"""

import time
from collections.abc import Iterable
from typing import Any

from penstock.database import Database
from penstock.errors import Busy, Unavailable
from penstock.queues.exchange import Exchanger, Take
from penstock.queues.signals import Signals, Waiter
from penstock.queues.types import Item

CASTS = {9: "::text::int[]", 11: "::text::int[]"}  # as in the statement of a push
SQL = f"""SELECT * FROM queue_push_exchange({
    ", ".join(f"${n}{CASTS.get(n, '')}" for n in range(1, 22))
})"""
MAX_TAKES = 64  # in a call


def waiting_pops(signals: Signals, items: Iterable[Item]) -> list[Waiter]:
    """The parked pops that could have these items: they are for a `Claim` from now on."""
    waiting = signals.waiters
    if not waiting:
        return []
    partitions: dict[str, set[str]] = {}
    for item in items:
        if item.due is None and item.queue in waiting:
            partitions.setdefault(item.queue, set()).add(item.partition)
    waiters: list[Waiter] = []
    for queue, names in partitions.items():
        waiters += signals.claim(queue, min(len(names), MAX_TAKES - len(waiters)))
    return waiters


class Claim:
    """The pops that one push takes for; nobody else wakes them until it is closed."""

    def __init__(self, database: Database, exchanger: Exchanger, waiters: list[Waiter]) -> None:
        self._database, self._exchanger = database, exchanger
        self._waiters = waiters  # that are still without an outcome
        # queue, group -> pops that got something or look
        self.served: dict[tuple[str, str], int] = {}

    async def fetch(self, sql: str, *push: Any) -> list[Any]:
        """Run the statement of a push, the first time with the pops; its rows."""
        if not self._waiters:
            return await self._database.fetch(sql, *push)
        taking = [(Take(*waiter.wanted), waiter) for waiter in self._waiters]
        taking.sort(key=lambda one: one[0].target.group_id)
        takes = [take for take, _ in taking]
        now = time.monotonic()
        since = [self._exchanger.since(take, now) for take in takes]
        arguments = self._exchanger.arguments(takes, since)
        ids, starts, plain, groups, _, batches, _, leases, _, _, most_bytes = arguments
        sent = self._database.healthy
        try:
            rows = await self._database.fetch(
                SQL, *push, ids, starts, plain, groups, batches, leases, since, most_bytes
            )
        except Busy:
            raise  # rolled back
        except Unavailable:
            if sent:  # cut off: it may be committed, now or later; nobody has its leases
                self._exchanger.release_later(leases)
            raise
        finally:
            self.close()
        shares = self._exchanger.shares(takes, since, rows, 1)
        for take, waiter in taking:
            share = shares.get(id(take))
            if waiter.gone:
                if share is not None:
                    self._exchanger.orphaned(share)
                continue
            waiter.exchanged = share  # None: nothing, or something unusual: it looks for itself
            key = take.target.queue, take.target.group
            self.served[key] = self.served.get(key, 0) + 1
        return [rows[0][23:]]

    def close(self) -> None:
        """Let those look for themselves that no call was made for."""
        for waiter in self._waiters:
            waiter.claimed = False
            waiter.wake()
        self._waiters = []
