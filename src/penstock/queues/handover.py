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


class Claim:
    """The parked pops that could have the items of a push, which takes for them: nobody else wakes
    them until it is closed.
    """

    def __init__(
        self, database: Database, exchanger: Exchanger, signals: Signals, items: Iterable[Item]
    ) -> None:
        self._database, self._exchanger = database, exchanger
        partitions: dict[str, set[str]] = {}
        for item in items:
            if item.due is None and item.queue in signals.waiters:
                partitions.setdefault(item.queue, set()).add(item.partition)
        self._waiters: list[tuple[Take, Waiter]] = []  # with what is to be taken for each
        for queue, names in partitions.items():
            most = min(len(names), MAX_TAKES - len(self._waiters))
            self._waiters += signals.claim(queue, most)
        self._waiters.sort(key=lambda one: one[0].target.group_id)
        self._called = not self._waiters
        # queue, group -> pops that got something or look
        self.served: dict[tuple[str, str], int] = {}

    async def fetch(self, sql: str, *push: Any) -> list[Any]:
        """Run the statement of a push, the first time with the pops; its rows."""
        if self._called:
            return await self._database.fetch(sql, *push)
        self._called = True
        takes = [take for take, _ in self._waiters]
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
        shares = self._exchanger.shares(takes, since, rows, 1)
        for take, waiter in self._waiters:
            share = shares.get(id(take))
            if not waiter.claimed:  # it went away, or looks for itself
                if share is not None:
                    self._exchanger.orphaned(share)
                continue
            key = take.target.queue, take.target.group
            self.served[key] = self.served.get(key, 0) + 1
            if share is not None and share.rows:
                waiter.deliver(share)
        return [rows[0][23:]]

    def close(self) -> None:
        """Let those look for themselves that got nothing, or for which it would be unusual."""
        for _, waiter in self._waiters:
            if waiter.claimed:
                waiter.wake()
