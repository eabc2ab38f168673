"""Acknowledgements of whole leases that this broker remembers.

What a pop delivered is remembered until it is acknowledged, as long as there is room: which
messages, and the version that their cursor had then. An acknowledgement of exactly these messages
then completes the lease by that version, without reading or sending a transaction id. The memory is
a shortcut and never an authority. A cursor that changed meanwhile for any reason (the lease expired
or was extended, a message was removed, the group was moved) has another version and is not touched;
such acknowledgements, and those of what another broker delivered, are looked up in the database.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from penstock.queues.ack import STATUSES, Prepared
from penstock.queues.catalog import Catalog
from penstock.queues.merge import SLICE
from penstock.queues.types import Ack, Acked

MAX_HELD = 50_000  # messages of leases that are remembered
NO_LEASES = (None,) * 7
# Columns of `queue_exchange`'s answer.
DONE, MORE, ITEMS = 15, 16, 17
ACKED = 17, 18, 19, 2, 20, 21, 22  # as `Prepared.fill` takes them


class Held(msgspec.Struct, gc=False):
    """What was delivered under a lease that is the only one of its cursor."""

    queue: str
    group: str
    group_id: int
    partition: int
    partition_name: str
    partition_id: str
    version: int  # of the cursor
    lease: UUID
    upto: int  # the last message's number
    transactions: list[str]
    times: list[datetime]


class HeldLeases:
    """The leases that are remembered, the oldest first; of limited size."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._messages = 0

    def add(self, lease: str, held: Held) -> None:
        self._messages += len(held.transactions)
        self._held[lease] = held
        while self._messages > MAX_HELD:
            self.forget(next(iter(self._held)))

    def forget(self, lease: str) -> Held | None:
        held = self._held.pop(lease, None)
        if held is not None:
            self._messages -= len(held.transactions)
        return held

    def completed(self, acks: Sequence[Ack], place: int) -> Held | None:
        """The lease whose messages are exactly those that `acks` complete from `place` on."""
        first = acks[place]
        held = self.forget(first.lease_id) if first.lease_id else None
        if held is None:
            return None
        for nth, transaction in enumerate(held.transactions, place):
            if nth >= len(acks):
                return None
            ack = acks[nth]
            if (
                ack.transaction_id != transaction
                or ack.lease_id != first.lease_id
                or ack.partition_id != held.partition_id
                or ack.group != held.group
                or STATUSES.get(ack.status) != "completed"
            ):
                return None
        return held


class Completions:
    """The acknowledgements of a call: whole leases that are remembered, and the others."""

    __slots__ = ("_held", "_others", "acks", "answers", "prepared")

    def __init__(self, acks: list[Ack]) -> None:
        self.acks = acks
        self.answers: list[Any] = [None] * len(acks)
        self._held: list[tuple[int, int, int, Held]] = []  # partition, group, place
        self._others: list[int] = []  # places of those that are looked up
        self.prepared: Prepared | None = None  # the same

    async def split(self, leases: HeldLeases, catalog: Catalog) -> None:
        acks, place, rested = self.acks, 0, 0
        while place < len(acks):
            if place - rested >= SLICE:
                rested = place
                await asyncio.sleep(0)
            held = leases.completed(acks, place)
            if held is None:
                self._others.append(place)
                place += 1
            else:
                self._held.append((held.partition, held.group_id, place, held))
                place += len(held.transactions)
        self._held.sort(key=lambda held: held[:2])
        if self._others:
            self.prepared = await Prepared.of([acks[place] for place in self._others], catalog)

    def leases(self) -> tuple[Any, ...]:
        """The first arguments of the call."""
        if not self._held:
            return NO_LEASES
        all_held = [one[3] for one in self._held]
        starts: list[int] = []
        times: list[datetime] = []
        for held in all_held:
            starts.append(len(times))
            times += held.times
        return (
            [held.partition for held in all_held],
            [held.group_id for held in all_held],
            [held.version for held in all_held],
            [held.lease for held in all_held],
            [held.upto for held in all_held],
            starts,
            times,
        )

    async def fill(self, rows: list[Any]) -> int:
        """Take over the rows about acknowledgements, the first ones; how many these are. Those of
        leases that were not completed have no answer.
        """
        used = 0
        if self._held:
            used = 1
            for number, more in zip(rows[0][DONE] or (), rows[0][MORE] or (), strict=True):
                _, _, first, held = self._held[number - 1]
                queue, name = held.queue, held.partition_name
                for place, transaction in enumerate(held.transactions, first):
                    self.answers[place] = Acked(
                        transaction, True, None, queue, name, True, more=more
                    )
        if self.prepared is not None:
            while used < len(rows) and rows[used][ITEMS] is not None:
                await self.prepared.fill([rows[used][column] for column in ACKED])
                used += 1
            for place, answer in zip(self._others, self.prepared.answers, strict=True):
                self.answers[place] = answer
        return used
