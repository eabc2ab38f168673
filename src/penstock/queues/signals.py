"""Notifies waiting pops that there may be something for them: in this process at once, in other
brokers by NOTIFY.

A NOTIFY makes commits of the whole database queue up behind each other, so it is never part of a
push: names are collected and sent by a call of their own, at most every `NOTIFY_SECONDS`, the first
one at once. What is lost (a reconnect) shows as "anything may have changed"; waiting pops also look
by themselves every `poll_interval`.

A broker that is alone notifies nobody. Each says that it is there when it starts to listen and
every `HELLO_SECONDS`; who hears of one it did not know looks again at everything, since nobody
notified it before, and has the other do so too: what it pushed until now it notified nobody of. Who
was silent for long is forgotten.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

from penstock.database import Database
from penstock.errors import Unavailable
from penstock.io.tasks import cancelled, supervised
from penstock.queues.types import PopRequest

log = logging.getLogger("penstock.queues")

CHANNEL = "penstock_queues"
# nothing to make durable
NOTIFY = "SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2)"
NOTIFY_SECONDS = 0.02
# No queue has this name. In a notification it stands for "a message for later was pushed", with the
# time at which it is due; a broker of a release before takes it for a queue that nobody waits for.
LATER = ""
MAX_PAYLOAD_BYTES = 7000
HELLO_SECONDS = 30.0
FORGET_SECONDS = 3 * HELLO_SECONDS  # after which a silent broker is taken to be gone


class Waiter(Protocol):
    """A parked pop."""

    queues: list[str]  # it waits for
    claimed: bool  # a push takes for it: nobody else wakes it for what comes

    @property
    def wanted(self) -> PopRequest: ...

    @property
    def partition(self) -> int | None:
        """The only one that it waits for."""

    def wake(self) -> None:
        """Leave, and look."""

    def take(self) -> Any:
        """The `Take` that a push may make for it; None: it must not."""

    def deliver(self, exchanged: Any) -> None:
        """Leave, with what was taken for it."""


class Signals:
    def __init__(self, database: Database, forget: Callable[[], None]) -> None:
        self._database = database
        self._forget = forget
        self._broker = os.urandom(6).hex()
        # queue -> group -> waiters, the oldest first
        self.waiters: dict[str, dict[str, dict[Waiter, None]]] = {}
        # per queue: how often something may have become available
        self.generation: dict[str, int] = {}
        self.sent = self.heard = 0  # notifications to other processes, and from them
        self.changes = 0  # how often the set of queues may have changed
        self.on_scheduled: Callable[[float], object] = lambda _: None  # called when heard of
        self._due: float | None = None  # the earliest to announce
        self._queues: set[str] = set()
        self._changed = False
        self._anything = False  # others are to look at every queue
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

    @property
    def waiting(self) -> int:
        return sum(len(waiters) for groups in self.waiters.values() for waiters in groups.values())

    def parked(self, most: int) -> dict[str, int]:
        """How many pops wait for each queue, for up to `most` queues."""
        counts = ((queue, sum(map(len, groups.values()))) for queue, groups in self.waiters.items())
        return dict(islice(counts, most))

    def generations(self, queues: list[str]) -> list[int]:
        return [self.generation.get(queue, 0) for queue in queues]

    def park(self, waiter: Waiter) -> None:
        for queue in waiter.queues:
            self.waiters.setdefault(queue, {}).setdefault(waiter.wanted.group, {})[waiter] = None

    def leave(self, waiter: Waiter) -> None:
        group = waiter.wanted.group
        for queue in waiter.queues:
            groups = self.waiters.get(queue)
            if groups and group in groups:
                groups[group].pop(waiter, None)
                if not groups[group]:
                    del groups[group]
                    if not groups:
                        del self.waiters[queue]

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
        self.generation[queue] = self.generation.get(queue, 0) + 1
        groups = self.waiters.get(queue)
        if groups:
            for name in (group,) if group is not None else tuple(groups):
                remaining = partitions - (served.get((queue, name), 0) if served else 0)
                for waiter in tuple(groups.get(name, ())):
                    if waiter.partition is not None:
                        waiter.wake()
                    elif remaining > 0 and not waiter.claimed:
                        remaining -= 1
                        waiter.wake()
        if announce and time.monotonic() < self._others_until:
            self._queues.add(queue)
            self._ready.set()

    def claim(self, queue: str, partitions: int) -> list[tuple[Any, Waiter]]:
        """Pops that wait for any partition, up to so many per group, for a push to take for; each
        with what it wants.
        """
        claimed: list[tuple[Any, Waiter]] = []
        for waiters in self.waiters.get(queue, {}).values():
            free = (waiter for waiter in waiters if not waiter.claimed)
            takes = ((waiter.take(), waiter) for waiter in free)
            claimed += islice((one for one in takes if one[0] is not None), max(0, partitions))
        for _, waiter in claimed:
            waiter.claimed = True
        return claimed

    @property
    def alone(self) -> bool:
        """Whether no other broker was heard of lately."""
        return time.monotonic() >= self._others_until

    def changed(self, *, announce: bool = True) -> None:
        """Queues or groups were created, configured or deleted."""
        self._forget()
        self.changes += 1
        if announce:
            self._changed = True
            self._ready.set()
        self.wake_all()

    def scheduled(self, due: float) -> None:
        """Notify other brokers of a message for later, due then (seconds since 1970)."""
        self._due = due if self._due is None else min(due, self._due)
        self._ready.set()

    def wake_all(self) -> None:
        everybody = [
            w for groups in self.waiters.values() for group in groups.values() for w in group
        ]
        for waiter in dict.fromkeys(everybody):
            waiter.wake()

    def _heard(self, payload: str | None) -> None:
        if payload is None:
            self.on_scheduled(0.0)
            self._ready.set()  # says that we are there
            return self.changed(announce=False)
        broker, changed, queues = json.loads(payload)
        if broker == self._broker:
            return None
        self.heard += 1
        if self.alone:
            self._anything = True
            self._ready.set()
            self.on_scheduled(0.0)
            self.wake_all()
        self._others_until = time.monotonic() + FORGET_SECONDS
        if changed:
            self.changed(announce=False)
        if queues is None:
            self.on_scheduled(0.0)
            return self.wake_all()
        for queue, partitions in queues:
            if queue == LATER:
                self.on_scheduled(partitions)
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
        notified: list[list[Any]] = [[queue, 16] for queue in queues]
        due, self._due = self._due, None
        if due is not None:
            notified.append([LATER, due])
        payload = json.dumps([self._broker, changed, notified])
        if anything or len(payload.encode()) > MAX_PAYLOAD_BYTES:
            payload = json.dumps([self._broker, changed, None])
        try:
            await self._database.fetch(NOTIFY, CHANNEL, payload)
            self.sent += 1
        except Unavailable:
            pass  # other brokers lost their LISTEN too and will look again when they are back
        except asyncio.CancelledError:
            self._queues |= queues
            self._changed = self._changed or changed
            self._anything = self._anything or anything
            if due is not None:
                self.scheduled(due)
            self._ready.set()  # `stop` says it once more
            raise
