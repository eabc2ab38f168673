"""Pops that wait, and how they learn that there may be something for them: in this process at once,
from other brokers by NOTIFY.

A pop that may wait is registered before it polls. A wake-up while it polls makes it poll again, so
none is lost between the poll and the parking; and there is no memory of queues that nobody waits
for.

A NOTIFY makes commits of the whole database queue up behind each other, so it is never part of a
push: names are collected and sent by a call of their own, at most every `NOTIFY_SECONDS`, the first
one at once. A notice that is lost (a reconnect) shows as "anything may have changed"; waiting pops
also poll by themselves every `poll_interval`.

A broker that is alone notifies nobody. Each broker says that it is there when it starts to listen
and every `HELLO_SECONDS`. One that hears of a broker for the first time polls again for everything
and has the other one do so too, since neither notified the other before. A silent broker is
forgotten.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Generic, TypeVar

from penstock.database import Database
from penstock.errors import Unavailable
from penstock.io.tasks import cancelled, supervised
from penstock.queues.types import Item

log = logging.getLogger("penstock.queues")
D = TypeVar("D")

CHANNEL = "penstock_queues"
# nothing to make durable
NOTIFY = "SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2)"
NOTIFY_SECONDS = 0.02
# No queue has this name. In a notification it stands for "a message for later was pushed", with the
# time at which it is due; a broker of an older release takes it for a queue that nobody waits for.
DELAYED = ""
NOTIFIED_PARTITIONS = 16  # that a notified queue may have something in
MAX_PAYLOAD_BYTES = 7000
MAX_HAND_OFFS = 64  # pops of a group that one push takes for
HELLO_SECONDS = 30.0
FORGET_SECONDS = 3 * HELLO_SECONDS  # after which a silent broker is taken to be gone


class WaitingPop(Generic[D]):
    """A pop that polls, or is parked until it is woken or a push hands it a delivery."""

    __slots__ = ("_parked", "_woken", "claimed", "group", "partition", "queues", "take")

    def __init__(self, group: str) -> None:
        self.group = group
        self.queues: list[str] = []  # that it waits for; it is registered under each
        self.partition: int | None = None  # the only one that it wants
        self.take: Any = (
            None  # the `Take` that a push may make for it; None: it must poll by itself
        )
        self.claimed = False  # a push takes for it: nobody else wakes it for what comes
        self._parked: asyncio.Future[D | None] | None = None
        self._woken = False  # while it was polling

    @property
    def parked(self) -> bool:
        return self._parked is not None and not self._parked.done()

    def begin_poll(self) -> None:
        """Note that a poll begins: only what happens from now on is news."""
        self._woken = False

    def wake(self) -> None:
        """Have it poll, again if it is polling."""
        if self._parked is None:
            self._woken = True
        elif not self._parked.done():
            self._parked.set_result(None)

    def hand_over(self, delivery: D) -> bool:
        """End the wait with a delivery; false when the pop is not parked any more."""
        if not self.parked:
            return False
        assert self._parked is not None
        self._parked.set_result(delivery)
        self.claimed = False
        return True

    async def park(self, seconds: float, unclaimed: Callable[[D], None]) -> D | None:
        """Wait; what was handed over, or None: poll. A delivery that comes in the very turn in
        which the pop is cancelled goes to `unclaimed`.
        """
        if self._woken:
            return None
        loop = asyncio.get_running_loop()
        parked: asyncio.Future[D | None] = loop.create_future()
        self._parked = parked
        timer = loop.call_later(seconds, self.wake)
        try:
            return await parked
        except asyncio.CancelledError:
            if not parked.cancelled() and (delivery := parked.result()) is not None:
                unclaimed(delivery)
            raise
        finally:
            timer.cancel()
            self._parked, self.claimed = None, False


class WaitingPops(Generic[D]):
    def __init__(self, database: Database, forget: Callable[[], None]) -> None:
        self._database = database
        self._forget = forget  # drops what is remembered of queues
        self._broker = os.urandom(6).hex()
        # queue -> group -> pops, the oldest first; nothing is kept for a queue without any
        self.pops: dict[str, dict[str, dict[WaitingPop[D], None]]] = {}
        self.sent = self.heard = 0  # notifications to other processes, and from them
        self.changes = 0  # how often the set of queues may have changed
        self.on_delayed: Callable[[float], object] = lambda _: None  # a message is due then
        self._queues: set[str] = set()  # to announce, and so are the next ones
        self._changed = False
        self._anything = False  # others are to poll every queue
        self._due: float | None = None  # the earliest message for later
        self._others_until = 0.0  # there are other brokers until then (monotonic)
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._database.listen(CHANNEL, self._heard)
        self._task = supervised("queue notifications", self._send, self._database.metrics)

    async def stop(self) -> None:
        await cancelled(self._task)
        if self._ready.is_set():  # nobody else will notify the others
            await self._notify()
        self.wake_all()

    # The pops of this process

    @property
    def parked(self) -> int:
        """How many pops are parked."""
        return sum(self.parked_by_queue(len(self.pops)).values())

    def parked_by_queue(self, most: int) -> dict[str, int]:
        """How many pops are parked for each queue, for up to `most` queues."""
        counts = (
            (queue, sum(pop.parked for pops in groups.values() for pop in pops))
            for queue, groups in self.pops.items()
        )
        return dict(islice(((queue, count) for queue, count in counts if count), most))

    def register(self, pop: WaitingPop[D], queues: list[str]) -> None:
        """Let it be woken for these queues, instead of those before."""
        if pop.queues != queues:
            self.leave(pop)
            pop.queues = queues
            for queue in queues:
                self.pops.setdefault(queue, {}).setdefault(pop.group, {})[pop] = None

    def leave(self, pop: WaitingPop[D]) -> None:
        for queue in pop.queues:
            groups = self.pops[queue]
            del groups[pop.group][pop]
            if not groups[pop.group]:
                del groups[pop.group]
                if not groups:
                    del self.pops[queue]
        pop.queues = []

    def claim(self, items: Iterable[Item]) -> list[WaitingPop[D]]:
        """Parked pops that a push of these items may take for: in each group at most as many as
        the items have partitions.
        """
        partitions: dict[str, set[str]] = {}
        for item in items:
            if item.due is None and item.queue in self.pops:
                partitions.setdefault(item.queue, set()).add(item.partition)
        claimed: list[WaitingPop[D]] = []
        for queue, names in partitions.items():
            most = min(len(names), MAX_HAND_OFFS - len(claimed))
            for pops in self.pops[queue].values():
                free = (pop for pop in pops if pop.take and pop.parked and not pop.claimed)
                claimed += islice(free, max(0, most))
        for pop in claimed:
            pop.claimed = True
        return claimed

    def available(
        self,
        queue: str,
        partitions: int,
        group: str | None = None,
        *,
        announce: bool = True,
        served: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        """Up to `partitions` partitions of a queue may have something, for one group or for all,
        less what pops of a queue and group were `served` already.
        """
        groups = self.pops.get(queue)
        if groups:
            for name in (group,) if group is not None else tuple(groups):
                remaining = partitions - (served.get((queue, name), 0) if served else 0)
                for pop in tuple(groups.get(name, ())):
                    if not pop.parked or pop.partition is not None:
                        pop.wake()
                    elif remaining > 0 and not pop.claimed:
                        remaining -= 1
                        pop.wake()
        if announce and time.monotonic() < self._others_until:
            self._queues.add(queue)
            self._ready.set()

    def changed(self, *, announce: bool = True) -> None:
        """Queues or groups were created, configured or deleted."""
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
        """Whether no other broker was heard of lately."""
        return time.monotonic() >= self._others_until

    def announce_delayed(self, due: float) -> None:
        """Notify other brokers of a message for later, due then (seconds since 1970)."""
        self._due = due if self._due is None else min(due, self._due)
        self._ready.set()

    def _heard(self, payload: str | None) -> None:
        if payload is None:
            self.on_delayed(0.0)
            self._ready.set()  # says that we are there
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
                self.available(queue, partitions, announce=False)
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
            pass  # other brokers lost their LISTEN too and will poll again when they are back
        except asyncio.CancelledError:
            self._changed = self._anything = True  # what this would have said, and more
            self._ready.set()  # `stop` says it
            raise
