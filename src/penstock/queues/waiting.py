"""Park pops and wake them: directly in this process, and by NOTIFY from other brokers.

A pop that may wait is registered before it polls. A wake-up during the poll makes it poll again, so
no wake-up is lost before the pop parks. Nothing is kept for queues without waiting pops.

NOTIFY serializes the commits of the whole database, so it is never part of a push. Queue names are
collected and sent in a call of their own, the first at once, then at most every `NOTIFY_SECONDS`.
After a reconnect, notices may be lost, so all pops are woken. Waiting pops also poll every
`poll_interval`.

A broker that is alone announces no queues. Each broker announces itself when it starts to listen,
then every `HELLO_SECONDS`. When a broker hears of another for the first time, both wake all pops:
neither has notified the other before. A silent broker is forgotten.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from penstock.database import Database
from penstock.errors import Unavailable
from penstock.io.tasks import cancelled, supervised
from penstock.queues.taking import Take, Taken
from penstock.queues.types import Item

log = logging.getLogger("penstock.queues")

CHANNEL = "penstock_queues"
# a notice need not be durable
NOTIFY = "SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2)"
NOTIFY_SECONDS = 0.02
# No queue has this name. In a notice it announces a delayed message, with the time at which it is
# due. Brokers of older releases take it for a queue without waiting pops.
DELAYED = ""
# How many parked pops of each group a notice of another broker wakes: it does not say how many
# partitions have messages. The others poll after `poll_interval` at the latest.
NOTIFIED_PARTITIONS = 16
MAX_PAYLOAD_BYTES = 7000
MAX_HAND_OFFS = 64  # pops of a group that one push may serve
HELLO_SECONDS = 30.0
FORGET_SECONDS = 3 * HELLO_SECONDS  # then a silent broker is gone


class WaitingPop:
    """A pop that polls, or is parked until it is woken or a push hands it messages."""

    __slots__ = ("_parked", "_woken", "claimed", "groups", "partition", "take", "woken_by")

    def __init__(self) -> None:
        self.groups: list[tuple[str, str]] = []  # queue and group; the pop is registered under each
        self.partition: int | None = None  # set: pop only from this partition of its queue
        self.woken_by: str | None = None  # the queue that may have messages; None: any of them
        self.take: Take | None = None  # what a push may take for the pop; None: it must poll
        self.claimed = False  # a push takes for the parked pop: other pushes do not wake it
        self._parked: asyncio.Future[Taken | None] | None = None
        self._woken = False  # it was woken during its poll

    @property
    def parked(self) -> bool:
        return self._parked is not None and not self._parked.done()

    def begin_poll(self) -> None:
        """Begin a poll: only later wake-ups make the pop poll again."""
        self._woken = False

    def wake(self, queue: str | None = None) -> None:
        """Make the pop poll, `queue` first. If it is polling, it polls again."""
        if self._parked is None:
            self._woken = True
        elif not self._parked.done():
            self.woken_by = queue
            self._parked.set_result(None)

    def hand_off(self, taken: Taken) -> bool:
        """End the wait with what a push took. Return False if the pop is not parked any more."""
        if self._parked is None or self._parked.done():
            return False
        self._parked.set_result(taken)
        self.claimed = False
        return True

    async def park(self, seconds: float, give_back: Callable[[Taken], None]) -> Taken | None:
        """Wait until a push hands off what it took, and return it; None if the pop must poll. If
        the pop is cancelled in the same tick, call `give_back` with it.
        """
        if self._woken:
            return None
        loop = asyncio.get_running_loop()
        parked: asyncio.Future[Taken | None] = loop.create_future()
        self._parked = parked
        timer = loop.call_later(seconds, self.wake)
        try:
            return await parked
        except asyncio.CancelledError:
            if not parked.cancelled() and (taken := parked.result()) is not None:
                give_back(taken)
            raise
        finally:
            timer.cancel()
            self._parked, self.claimed = None, False


class WaitingPops:
    def __init__(self, database: Database, forget: Callable[[], None]) -> None:
        self._database = database
        self._forget = forget  # clears the cache of queues
        self._broker = os.urandom(6).hex()
        # queue -> group -> pops, oldest first; only queues that have pops
        self.pops: dict[str, dict[str, dict[WaitingPop, None]]] = {}
        self.sent = self.heard = 0  # notices to and from other brokers
        self.changes = 0  # counts changes of queues and groups
        self.on_delayed: Callable[[float], object] = lambda _: None  # gets its due time
        # What the next notice to other brokers says:
        self._queues: set[str] = set()  # these have messages
        self._changed = False  # queues or groups were created, configured or deleted
        self._anything = False  # all pops must be woken
        self._due: float | None = None  # when the earliest delayed message is due
        self._others_until = 0.0  # until then, other brokers count as alive (monotonic)
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._database.listen(CHANNEL, self._heard)
        self._task = supervised("queue notifications", self._send, self._database.metrics)

    async def stop(self) -> None:
        await cancelled(self._task)
        if self._ready.is_set():  # a notice is still to be sent
            await self._notify()
        self.wake_all()

    # The pops of this process

    @property
    def parked(self) -> int:
        """Return the number of parked pops."""
        groups = (pops for groups in self.pops.values() for pops in groups.values())
        return sum(pop.parked for pop in set().union(*groups))

    def parked_by_queue(self, most: int) -> dict[str, int]:
        """Return the number of parked pops of each queue, for up to `most` queues."""
        counts = (
            (queue, sum(pop.parked for pops in groups.values() for pop in pops))
            for queue, groups in self.pops.items()
        )
        return dict(islice(((queue, count) for queue, count in counts if count), most))

    def register(self, pop: WaitingPop, groups: list[tuple[str, str]]) -> None:
        """Register the pop under these queues and groups instead of its previous ones."""
        if pop.groups != groups:
            self.leave(pop)
            pop.groups = groups
            for queue, group in groups:
                self.pops.setdefault(queue, {}).setdefault(group, {})[pop] = None

    def leave(self, pop: WaitingPop) -> None:
        for queue, group in pop.groups:
            of_queue = self.pops[queue]
            del of_queue[group][pop]
            if not of_queue[group]:
                del of_queue[group]
                if not of_queue:
                    del self.pops[queue]
        pop.groups = []

    def claim(self, items: Iterable[Item]) -> list[WaitingPop]:
        """Claim parked pops that a push of these items can serve: per group, at most one for each
        partition of the items.
        """
        partitions: dict[str, set[str]] = {}
        for item in items:
            if item.due is None and item.queue in self.pops:
                partitions.setdefault(item.queue, set()).add(item.partition)
        claimed: list[WaitingPop] = []
        for queue, names in partitions.items():
            most = min(len(names), MAX_HAND_OFFS - len(claimed))
            for pops in self.pops[queue].values():
                free = (pop for pop in pops if pop.take and pop.parked and not pop.claimed)
                claimed += islice(free, max(0, most))
        for pop in claimed:
            pop.claimed = True
        return claimed

    def wake(
        self,
        queue: str,
        partitions: int,
        group: str | None = None,
        *,
        announce: bool = True,
        served: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        """Wake pops: up to `partitions` partitions of a queue may have messages, for one group or
        for all. `served` counts the partitions that pops of a queue and group have received.
        """
        groups = self.pops.get(queue)
        if groups:
            for name in (group,) if group is not None else tuple(groups):
                remaining = partitions - (served.get((queue, name), 0) if served else 0)
                for pop in tuple(groups.get(name, ())):
                    # It polls, or wants one partition, which may be among these.
                    if not pop.parked or pop.partition is not None:
                        pop.wake(queue)
                    elif remaining > 0 and not pop.claimed:
                        remaining -= 1
                        pop.wake(queue)
        if announce and not self.alone:
            self._queues.add(queue)
            self._ready.set()

    def changed(self, *, announce: bool = True) -> None:
        """Wake all pops: queues or groups were created, configured or deleted."""
        self._forget()
        self.changes += 1
        if announce:
            self._changed = True
            self._ready.set()
        self.wake_all()

    def wake_all(self) -> None:
        for groups in tuple(self.pops.values()):
            for pops in tuple(groups.values()):
                for pop in tuple(pops):
                    pop.wake()

    # Other brokers

    @property
    def alone(self) -> bool:
        """Return whether no other broker is alive."""
        return time.monotonic() >= self._others_until

    def announce_delayed(self, due: float) -> None:
        """Notify other brokers of a delayed message, due at `due` (seconds since 1970)."""
        self._due = due if self._due is None else min(due, self._due)
        self._ready.set()

    def _heard(self, payload: str | None) -> None:
        """Wake the pops that a notice names. None: the connection for notices is new, so some may
        be lost.
        """
        if payload is None:
            self.on_delayed(0.0)
            self._ready.set()  # announce this broker
            return self.changed(announce=False)
        broker, changed, queues = json.loads(payload)
        if broker == self._broker:
            return None
        self.heard += 1
        if self.alone:
            self._anything = True
            self._ready.set()
            self.on_delayed(0.0)
            self.wake_all()
        self._others_until = time.monotonic() + FORGET_SECONDS
        if changed:
            self.changed(announce=False)
        if queues is None:
            self.on_delayed(0.0)
            return self.wake_all()
        for queue, partitions in queues:
            if queue == DELAYED:
                self.on_delayed(partitions)
            else:
                self.wake(queue, partitions, announce=False)
        return None

    async def _send(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HELLO_SECONDS):
                    await self._ready.wait()
            await self._notify()
            await asyncio.sleep(NOTIFY_SECONDS)

    async def _notify(self) -> None:
        self._ready.clear()
        queues, self._queues = self._queues, set()
        changed, self._changed = self._changed, False
        anything, self._anything = self._anything, False
        notified: list[list[Any]] = [[queue, NOTIFIED_PARTITIONS] for queue in queues]
        due, self._due = self._due, None
        if due is not None:
            notified.append([DELAYED, due])
        payload = json.dumps([self._broker, changed, notified])
        if anything or len(payload.encode()) > MAX_PAYLOAD_BYTES:
            payload = json.dumps([self._broker, changed, None])
        try:
            await self._database.fetch(NOTIFY, CHANNEL, payload)
            self.sent += 1
        except Unavailable:
            pass  # the others lost their LISTEN too, and poll when they reconnect
        except asyncio.CancelledError:
            self._changed = self._anything = True  # covers the lost notice
            self._ready.set()  # `stop` sends it
            raise
