"""Renew the leases of messages in progress, however long their handling takes.

One task per client looks after all of them: a lease is extended when a third of its time has
passed, as long as the program has one of its messages that is not answered, and for at most
`MAX_KEPT_SECONDS`. Messages that the program dropped, such as the rest of a batch after an error,
do not count: their lease would block the partition. Each request has a task and a third of the
lease's time: a broker that hangs costs one attempt of one lease. A lease that the broker no longer
has is dropped here; acknowledging its messages will say so.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from weakref import WeakValueDictionary

from penstock.client.brokers import Brokers
from penstock.client.messages import Received
from penstock.contract import operations
from penstock.errors import PenstockError
from penstock.io.tasks import supervised

log = logging.getLogger("penstock.client")

MAX_KEPT_SECONDS = 6 * 3600.0
ASSUMED_SECONDS = 60.0  # when a broker does not say


class _Kept:
    __slots__ = ("due", "elsewhere", "lease_time", "open", "until")

    def __init__(self, lease_time: float, now: float) -> None:
        self.open: WeakValueDictionary[str, Received] = WeakValueDictionary()
        self.elsewhere: set[str] = set()  # of them: answered without us, if that is committed
        self.lease_time = lease_time
        self.due = now + lease_time / 3
        self.until = now + MAX_KEPT_SECONDS


class LeaseKeeper:
    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._kept: dict[str, _Kept] = {}  # by lease id
        self._task: asyncio.Task[None] | None = None
        self._extending: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def keep(self, messages: Iterable[Received], lease_time: float) -> None:
        """Extend the messages' leases of `lease_time` seconds (0 = not known) until `drop` was
        called for each.
        """
        now = asyncio.get_running_loop().time()
        for message in messages:
            if not message.lease_id:
                continue
            kept = self._kept.get(message.lease_id)
            if kept is None:
                kept = self._kept[message.lease_id] = _Kept(lease_time or ASSUMED_SECONDS, now)
                self._changed.set()
            kept.open[message.id] = message
            message.__dict__["kept"] = kept
        if self._kept and self._task is None:
            self._task = supervised("penstock leases", self._run)

    def drop(self, messages: Iterable[Received]) -> None:
        for message in messages:
            kept = self._kept.get(message.lease_id)
            if kept is not None:
                kept.open.pop(message.id, None)
                if not kept.open:
                    del self._kept[message.lease_id]

    async def close(self) -> None:
        self._kept.clear()
        tasks = [*self._extending, *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._changed.clear()
            now = clock()
            for lease, kept in list(self._kept.items()):
                if kept.due <= now:
                    kept.due = now + kept.lease_time / 3
                    task = asyncio.create_task(self._extend(lease))
                    self._extending.add(task)
                    task.add_done_callback(self._extending.discard)
            nearest = min((kept.due for kept in self._kept.values()), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(nearest):
                    await self._changed.wait()

    async def _extend(self, lease: str) -> None:
        kept = self._kept.get(lease)
        if kept is None:
            return
        now = asyncio.get_running_loop().time()
        if now >= kept.until or not kept.open:
            del self._kept[lease]
            return
        try:
            done = await self.extend(lease, max(1, round(kept.lease_time)), kept.lease_time / 3)
        except PenstockError as error:
            log.warning("a lease could not be extended, will try again: %s", error)
            return
        if done or self._kept.pop(lease, None) is None:
            return
        if lost := set(kept.open) - kept.elsewhere:
            log.warning("a lease was lost with %d messages unanswered", len(lost))

    async def extend(self, lease: str, seconds: int, limit: float | None = None) -> bool:
        """Extend a lease once; False when it is lost."""
        results = await self._brokers.call(
            operations.EXTEND_LEASE,
            lease,
            body={"seconds": seconds},
            timeout=limit,
            retry_for=limit,
        )
        return all(result.success for result in results)
