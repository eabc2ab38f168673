"""Push: many requests, one call, one commit.

Repeating a call whose outcome is unknown is safe: transaction ids are fixed before the first try and unique in their
partition, so what was stored is found again.
"""

import os
from collections import Counter as Count
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from uuid import UUID

from penstock.database import Database
from penstock.errors import InvalidRequest, PenstockError, Unavailable
from penstock.metrics import Counter
from penstock.queues.catalog import Catalog, check_name, check_text
from penstock.queues.crypto import Keys
from penstock.queues.merge import Merger
from penstock.queues.signals import Signals
from penstock.queues.types import Item, Pushed

SQL = "SELECT queue_push($1, $2, $3, $4, $5, $6, $7, $8, $9)"
Fetch = Callable[..., Awaitable[list[Any]]]
ROUNDS = 4  # how often stale numbers are looked up again


class Entry:
    """An item on its way: checked, with a transaction id and the parsed trace id."""

    __slots__ = ("checked", "item", "partition", "trace", "transaction_id")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.checked = bool(item.transaction_id) and not item.fresh
        self.transaction_id = item.transaction_id or random_id()
        self.trace = _trace(item.trace_id) if item.trace_id else None
        self.partition = 0


class Pusher:
    def __init__(
        self, database: Database, catalog: Catalog, keys: Keys, signals: Signals, pushed: Counter, merge_max: int
    ) -> None:
        self._database, self._catalog, self._keys, self._signals = database, catalog, keys, signals
        self._pushed = pushed
        self.merger: Merger[list[Entry], list[Pushed]] = Merger(
            self._run, size=len, limit=merge_max, slots=4, enough=200
        )

    async def push(self, items: list[Item]) -> list[Pushed]:
        if not items:
            return []
        return await self.merger.submit(entries_of(items))

    async def _run(self, requests: list[list[Entry]], again: bool) -> list[list[Pushed] | PenstockError]:
        answers: dict[int, Pushed] = {}
        refused: dict[int, PenstockError] = {}
        entries = [entry for request in requests for entry in request]
        await self.store(self._database.fetch, entries, answers, refused, again)
        self.announce(answers.values())
        results: list[list[Pushed] | PenstockError] = []
        for request in requests:
            failed = next((refused[id(entry)] for entry in request if id(entry) in refused), None)
            results.append(failed or [answers[id(entry)] for entry in request])
        return results

    async def store(
        self,
        fetch: Fetch,
        entries: list[Entry],
        answers: dict[int, Pushed],
        refused: dict[int, PenstockError],
        again: bool = False,
    ) -> None:
        """Append through `fetch` (of the pool or a transaction); fills `answers` and `refused`, by id() of entry."""
        catalog = self._catalog
        left = entries
        for _ in range(ROUNDS):
            left = await self._store_known(fetch, left, answers, refused, again)
            if not left:
                return
            for entry in left:
                catalog.partitions.pop((entry.item.queue, entry.item.partition), None)
            catalog.forget()
        for entry in left:
            refused[id(entry)] = Unavailable(f"queue '{entry.item.queue}' keeps changing; try again")

    async def _store_known(
        self,
        fetch: Fetch,
        entries: list[Entry],
        answers: dict[int, Pushed],
        refused: dict[int, PenstockError],
        again: bool,
    ) -> list[Entry]:
        catalog = self._catalog
        pairs = {(entry.item.queue, entry.item.partition) for entry in entries}
        if not pairs <= catalog.partitions.keys():
            await catalog.ensure(list(pairs))
        encrypted = {queue for queue in {queue for queue, _ in pairs} if await self._encrypted(queue)}
        first: dict[tuple[int, str], Entry] = {}
        twins: list[tuple[Entry, Entry]] = []
        stale: list[Entry] = []
        for entry in entries:
            item = entry.item
            partition = catalog.partitions.get((item.queue, item.partition))
            if partition is None:
                stale.append(entry)
                continue
            entry.partition = partition
            winner = first.setdefault((partition, entry.transaction_id), entry)
            if winner is not entry:
                twins.append((entry, winner))
        unique = sorted(first.values(), key=_by_partition)
        keys: list[str | None] = [None] * len(unique)
        payloads = [entry.item.payload for entry in unique]
        if encrypted:
            sealed = []
            for index, entry in enumerate(unique):
                if entry.item.queue in encrypted:
                    try:
                        keys[index], payloads[index] = self._keys.seal(entry.partition, payloads[index])
                    except Unavailable as error:
                        refused[id(entry)] = error
                        continue
                sealed.append(index)
            if len(sealed) < len(unique):
                unique = [unique[i] for i in sealed]
                keys = [keys[i] for i in sealed]
                payloads = [payloads[i] for i in sealed]
        if unique:
            partitions = [entry.partition for entry in unique]
            ids: list[int] = []
            starts: list[int] = []
            for place, partition in enumerate(partitions):
                if not ids or partition != ids[-1]:
                    ids.append(partition)
                    starts.append(place)
            rows = await fetch(
                SQL,
                ids,
                starts,
                partitions,
                [entry.transaction_id for entry in unique],
                [again or entry.checked for entry in unique],
                [entry.trace for entry in unique],
                [entry.item.producer for entry in unique],
                keys,
                payloads,
            )
            for entry, number in zip(unique, rows[0][0], strict=True):
                if number is None:
                    stale.append(entry)
                else:
                    own = again and not entry.checked  # nobody else can have made this id
                    answers[id(entry)] = self._answer(entry, number if number >= 0 or not own else -number)
        for entry, winner in twins:
            if id(winner) in answers:
                answer = answers[id(winner)]
                if answer.message_id is None:
                    answers[id(entry)] = answer
                else:
                    number = -(int(answer.message_id.replace("-", ""), 16) & ((1 << 50) - 1))
                    answers[id(entry)] = self._answer(entry, number)
            elif id(winner) in refused:
                refused[id(entry)] = refused[id(winner)]
            else:
                stale.append(entry)
        return stale

    def _answer(self, entry: Entry, number: int) -> Pushed:
        catalog, item = self._catalog, entry.item
        return Pushed(
            status="queued" if number > 0 else "duplicate" if number else "full",
            queue=item.queue,
            partition=item.partition,
            transaction_id=entry.transaction_id,
            message_id=catalog.message_uuid(entry.partition, abs(number)) if number else None,
            partition_id=catalog.partition_uuid(entry.partition),
            trace_id=item.trace_id,
        )

    def announce(self, answers: Iterable[Pushed]) -> None:
        """Count what was queued and wake whoever waits for it."""
        messages: Count[str] = Count()
        partitions: dict[str, set[str]] = {}
        for answer in answers:
            if answer.status == "queued":
                messages[answer.queue] += 1
                partitions.setdefault(answer.queue, set()).add(answer.partition)
        for queue, count in messages.items():
            self._pushed.add(count, queue)
            self._signals.available(queue, len(partitions[queue]))

    async def _encrypted(self, queue: str) -> bool:
        info = await self._catalog.queue(queue)
        return info is not None and bool(info.options["encryptionEnabled"])


def entries_of(items: list[Item]) -> list[Entry]:
    """Check the items; the first bad one refuses the request."""
    seen: set[str] = set()
    for item in items:
        for kind, name in (("queue", item.queue), ("partition", item.partition)):
            if name not in seen:
                check_name(kind, name)
                seen.add(name)
        if item.transaction_id:
            check_text("transactionId", item.transaction_id)
    return [Entry(item) for item in items]


def _by_partition(entry: Entry) -> int:
    return entry.partition


def random_id() -> str:
    """A transaction id for a message whose producer gave none (UUID version 4)."""
    digits = os.urandom(16).hex()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def _trace(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise InvalidRequest(f"traceId '{text[:64]}' is not a UUID") from None
