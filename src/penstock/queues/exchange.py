"""Pops and acknowledgements on their way to the database: what arrives together, of whichever kind
and consumer, shares one call and one commit (`queue_exchange`), and each gets its own answer.

A call whose outcome is unknown may have leased messages that nobody has seen. Before it is repeated
those leases are ended, and the same is done for whoever went away while a call was under way.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any
from uuid import UUID

from penstock.errors import Busy, PenstockError, Unavailable
from penstock.protocol.ids import uuid7
from penstock.protocol.message_ids import lease_of, leases_of
from penstock.queues.ack import Acknowledger, check
from penstock.queues.catalog import remember
from penstock.queues.context import QueueContext
from penstock.queues.held_leases import NO_LEASES, Completions, Held, HeldLeases
from penstock.queues.merge import SLICE, Merger, Pending
from penstock.queues.types import Ack, Acked

SQL = "SELECT * FROM queue_exchange(" + ", ".join(f"${n}" for n in range(1, 26)) + ")"
ONE = "SELECT * FROM queue_exchange_one(" + ", ".join(f"${n}" for n in range(1, 13)) + ")"
NO_ACKS, NO_TAKES = (None,) * 7, (None,) * 11
# Columns of the answer.
REQUEST, PARTITION, NAME, SEQS, TRANSACTIONS, TIMES, NOTE, WAIT, DUE, VERSION = (
    0, 1, 2, 3, 4, 6, 11, 12, 13, 14,
)  # fmt: skip
TAKE_WEIGHT = 4  # of an acknowledgement's
MAX_TAKES = 256  # in a call
SLACK = timedelta(seconds=0.25)  # how far back cursors are looked at, beyond the last one seen due
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)  # no cursor was due before
LOOK_BACK = timedelta(seconds=2)  # and how much further before a pop says "empty"
UNUSUAL_SECONDS = 0.1  # for which a group gets no call for one, after one met something unusual
RETRY_SECONDS = 1.0  # between tries to return leases
LINGERING_SECONDS = 5.0  # after which a call cut off in the middle has ended one way or the other
FULL_LOOK_SECONDS = 1.0  # between looks without that shortcut, at least
# and 20 times what the last one took, but at most 10 s
FULL_LOOK_SHARE, MAX_FULL_LOOK_SECONDS = 20, 10.0


@dataclass(slots=True)
class Target:
    """A group of one queue, and the one partition wanted, if any."""

    queue: str
    group: str
    group_id: int
    partition: int | None


@dataclass(slots=True)
class Take:
    """Messages that are wanted under one lease."""

    target: Target
    batch: int
    partitions: int
    holder: int | None
    lease: UUID = field(init=False)
    lease_text: str = field(init=False)

    def __post_init__(self) -> None:
        """Get a lease, another one each time."""
        self.lease = uuid7() if self.holder is None else lease_of(self.holder)
        self.lease_text = str(self.lease)


@dataclass(slots=True)
class Exchange:
    """What one request wants of a call: acknowledge, then take, or one of the two."""

    acks: Sequence[Ack]
    take: Take | None = None


@dataclass(slots=True)
class Exchanged:
    """Its share of the answer. Without rows `note` says why, and `wait` when to look again."""

    take: Take | None
    acked: Sequence[Acked] = ()
    rows: Sequence[Any] = ()
    note: str = ""
    wait: float | None = None


@dataclass(slots=True)
class Scan:
    """How a group's cursors are looked through."""

    floor: datetime | None = None  # those that were due before were looked at already
    full_at: float = 0.0  # when all of them are looked at next
    unusual_until: float = 0.0  # one met something unusual: no call for one before


class Exchanger:
    def __init__(self, context: QueueContext, acknowledger: Acknowledger) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._signals, self._settings = context.signals, context.settings
        self._acknowledger = acknowledger
        self.acked = acknowledger.acked
        self.held = HeldLeases()
        self.merger: Merger[Exchange, Any] = Merger(
            self._run,
            size=_weight,
            limit=max(self._settings.merge_max, MAX_TAKES * TAKE_WEIGHT),
            slots=2,
            orphan=self.orphaned,
        )
        self._auto_acks: Merger[UUID, None] = Merger(self._complete, limit=1000, slots=2)
        self.scans: dict[int, Scan] = {}  # by group; hints, of limited number
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        await self.merger.drain()
        await self._auto_acks.drain()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=0.5)
        for task in tuple(self._tasks):
            task.cancel()

    def ack(self, acks: list[Ack]) -> Pending[Exchange, list[Acked]]:
        """Answer messages, each on its own."""
        for ack in acks:
            check(ack)
        return self.merger.submit(Pending(Exchange(acks))).then(_acked)

    async def complete(self, take: Take) -> None:
        """Acknowledge all that was taken (auto-ack)."""
        self.held.forget(take.lease_text)
        await self._auto_acks.submit(Pending(take.lease))

    async def _complete(self, leases: list[UUID], again: bool) -> list[PenstockError | None]:
        del again  # a lease that has ended stays so
        await self._database.fetch("SELECT * FROM queue_release($1, true)", leases)
        return [None] * len(leases)

    async def _run(self, requests: list[Exchange], again: bool) -> list[Any]:
        takes = [request.take for request in requests if request.take is not None]
        if again:  # it may have been committed, or be about to: what it took was seen by nobody
            lost = [take.lease for take in takes]
            for take in takes:
                take.__post_init__()
            if lost:
                await self._database.fetch("SELECT queue_release($1, false)", lost)
        takes.sort(key=self._order)
        now = time.monotonic()
        since = [self.since(take, now) for take in takes]
        completions = Completions([ack for one in requests for ack in one.acks])
        await completions.split(self.held, self._catalog)
        prepared, leases = completions.prepared, completions.leases()
        sent = self._database.healthy
        try:
            if len(requests) == 1 and prepared is None and self._is_usual(takes, leases, now):
                rows = await self._call_for_one(takes, since, leases, now)
            else:
                others = (prepared and prepared.arguments) or NO_ACKS
                wanted = self.arguments(takes, since) if takes else NO_TAKES
                rows = await self._database.fetch(SQL, *leases, *others, *wanted)
        except Busy:
            raise  # rolled back
        except Unavailable:
            if sent and takes:  # cut off: it may be committed, now or later; nobody has its leases
                self.release_later([take.lease for take in takes])
            raise
        if (cost := FULL_LOOK_SHARE * (time.monotonic() - now)) > FULL_LOOK_SECONDS:
            for take, start in zip(takes, since, strict=True):
                if start is None:
                    self._scan(take).full_at = now + min(cost, MAX_FULL_LOOK_SECONDS)
        begin = await completions.fill(rows) if completions.acks else 0
        late = [place for place, answer in enumerate(completions.answers) if answer is None]
        if late:
            acks = [completions.acks[place] for place in late]
            answers = await self._acknowledger.acknowledge(self._database.fetch, acks)
            for place, answer in zip(late, answers, strict=True):
                completions.answers[place] = answer
        if completions.acks:
            self._acknowledger.announce(completions.acks, completions.answers)
        shares = self.shares(takes, since, rows, begin)
        results: list[Any] = []
        begin = 0
        for request in requests:
            end = begin + len(request.acks)
            share = Exchanged(None) if request.take is None else shares[id(request.take)]
            share.acked = completions.answers[begin:end]
            if late and not share.rows and any(begin <= place < end for place in late):
                share.note = "more"  # what it acknowledged was in its own way: look again
            results.append(share)
            begin = end
        return results

    def _is_usual(self, takes: list[Take], leases: tuple[Any, ...], now: float) -> bool:
        """Whether `queue_exchange_one` will probably do for these leases and takes."""
        if leases is not NO_LEASES and len(leases[0]) > 1:
            return False
        return not takes or (self._is_plain(takes[0]) and now >= self._scan(takes[0]).unusual_until)

    async def _call_for_one(
        self,
        takes: list[Take],
        since: list[datetime | None],
        leases: tuple[Any, ...],
        now: float,
    ) -> list[Any]:
        """The rows of the call, for one usual request."""
        arguments: list[Any] = [None] * 12
        if leases is not NO_LEASES:
            arguments[:5] = [column[0] for column in leases[:5]]
            arguments[5] = leases[6]
        if takes:
            take, [start] = takes[0], since
            back = LONG_AGO if start is None else start - LOOK_BACK
            limit = self._settings.max_batch_bytes
            arguments[6:] = take.target.group_id, take.batch, take.lease, start, back, limit
        [row] = await self._database.fetch(ONE, *arguments)
        rows = [row] if leases is not NO_LEASES else []
        if not takes:
            return rows
        if row[NOTE] is not None:
            return [*rows, row]
        self._scan(takes[0]).unusual_until = now + UNUSUAL_SECONDS
        general = self.arguments(takes, since)
        return rows + await self._database.fetch(SQL, *NO_LEASES, *NO_ACKS, *general)

    def arguments(self, takes: list[Take], since: list[datetime | None]) -> tuple[Any, ...]:
        """The last arguments of the call."""
        plain = 0
        for take in takes:
            if not self._is_plain(take):
                break
            plain += 1
        groups = [take.target.group_id for take in takes]
        ids: list[int] = []
        starts: list[int] = []
        for group, places in groupby(range(plain), key=groups.__getitem__):
            ids.append(group)
            starts.append(next(places))
        usual = plain == len(takes)
        return (
            ids or None,
            starts or None,
            plain,
            groups,
            None if usual else [take.target.partition for take in takes],
            [take.batch for take in takes],
            None if usual else [take.partitions for take in takes],
            [take.lease for take in takes],
            since,
            [start and start - LOOK_BACK for start in since],
            self._settings.max_batch_bytes,
        )

    def shares(
        self, takes: list[Take], since: list[datetime | None], rows: list[Any], begin: int
    ) -> dict[int, Exchanged]:
        """What each take got, by its identity; its rows are together and the last has a note."""
        shares: dict[int, Exchanged] = {}
        for end, row in enumerate(rows[begin:], begin + 1):
            if (note := row[NOTE]) is None:
                continue
            position = row[REQUEST] - 1
            take = takes[position]
            taken = [one for one in rows[begin:end] if one[SEQS] is not None]
            shares[id(take)] = Exchanged(take, (), taken, note, row[WAIT])
            begin = end
            if take.target.partition is None and (due := row[DUE]) is not None:
                floor, start = due - SLACK, since[position]
                self._scan(take).floor = floor if start is None else max(floor, start)
            if row[VERSION] is not None and len(row[SEQS]) <= SLICE:
                target = take.target
                self.held.add(
                    take.lease_text,
                    Held(
                        target.queue,
                        target.group,
                        target.group_id,
                        row[PARTITION],
                        row[NAME],
                        self._catalog.partition_uuid(row[PARTITION]),
                        row[VERSION],
                        take.lease,
                        row[SEQS][-1],
                        row[TRANSACTIONS],
                        row[TIMES],
                    ),
                )
        return shares

    def _is_plain(self, take: Take) -> bool:
        """Whether it may be usual; what consumers share is taken in another way."""
        target = take.target
        return (
            target.partition is None
            and take.partitions == 1
            and not self._catalog.shares(target.queue)
        )

    def _order(self, take: Take) -> tuple[bool, int]:
        return not self._is_plain(take), take.target.group_id

    def _scan(self, take: Take) -> Scan:
        scan = self.scans.get(take.target.group_id)
        if scan is None:
            scan = Scan()
            remember(self.scans, take.target.group_id, scan)
        return scan

    def since(self, take: Take, now: float) -> datetime | None:
        """Cursors that were due long ago and are not any more leave dead index entries: from when
        on to look, so as not to wade through them. None: through all of them, from time to time.
        """
        scan = self._scan(take)
        if now < scan.full_at:
            return scan.floor
        scan.full_at = now + FULL_LOOK_SECONDS
        return None

    def orphaned(self, exchanged: Exchanged) -> None:
        """Nobody is there to receive this: give it back."""
        if exchanged.rows and exchanged.take is not None:
            self._spawn(self._return(exchanged.take))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def release_later(self, leases: list[UUID]) -> None:
        """End the leases of a call that was cut off, once the database is back."""
        self._spawn(self._release_twice(leases))

    async def _release_twice(self, leases: list[UUID]) -> None:
        """Such a call may still be running there: end them again when it surely is not."""
        await self._release(leases)
        await asyncio.sleep(LINGERING_SECONDS)
        await self._release(leases)

    async def _release(self, leases: list[UUID]) -> None:
        while True:
            await self._database.recovered()
            try:
                await self._database.fetch("SELECT queue_release($1, false)", leases)
            except Unavailable:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def release(self, queue: str, group: str, holder: int) -> int:
        """End the leases of a holder whose process died: what it held is free again at once."""
        rows = await self._database.fetch(
            """SELECT queue_release((SELECT coalesce(array_agg(DISTINCT l.lease_id), '{}')
                                       FROM leases l WHERE l.lease_id BETWEEN $1 AND $2), false)""",
            *leases_of(holder),
        )
        if rows:
            self._signals.available(queue, len(rows), group)
        return len(rows)

    async def _return(self, take: Take) -> None:
        self.held.forget(take.lease_text)
        await self._release([take.lease])
        self._signals.available(take.target.queue, 1, take.target.group)


def _acked(exchanged: Exchanged) -> list[Acked]:
    return list(exchanged.acked)


def _weight(exchange: Exchange) -> int:
    return len(exchange.acks) + (0 if exchange.take is None else TAKE_WEIGHT)
