"""Push: many requests, one call, one commit.

Repeating a call whose outcome is unknown is safe: transaction ids are fixed before the first try
and unique in their partition, so what was stored is found again.
"""

import asyncio
import os
from collections import Counter as Count
from collections.abc import Container, Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime
from itertools import accumulate, chain
from typing import Any, TypeVar, cast
from uuid import UUID

import msgspec

from penstock.errors import InvalidRequest, PenstockError, Unavailable
from penstock.metrics import Counter
from penstock.queues.catalog import Catalog, check_name, check_text
from penstock.queues.context import QueueContext
from penstock.queues.crypto import Sealed
from penstock.queues.exchange import Exchanger
from penstock.queues.handover import Claim
from penstock.queues.later import Later
from penstock.queues.merge import SLICE, Fetch, Merger
from penstock.queues.types import Item, Pushed, Status

SQL = """SELECT * FROM queue_push($1, $2, $3, $4, $5, $6, $7, $8, $9::text::int[], $10,
                                  $11::text::int[], $12, $13)"""
Key = tuple[str, str]  # queue, partition
T = TypeVar("T")
LIGHT_BYTES = 1 << 12  # bytes that are sealed in the time of one more item
MAX_LOOKUPS = 4  # how often stale numbers are looked up again
# a message counts once more for each of these bytes: large ones must not add up to a call of a
# gigabyte
HEAVY_BYTES = 1 << 15
LATER = 1 << 60  # queue_push's answer about a message for later; negative: a duplicate of one


class Pusher:
    def __init__(
        self, context: QueueContext, exchanger: Exchanger, later: Later, pushed: Counter
    ) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._keys, self._signals = context.keys, context.signals
        self._later = later
        self._pushed = pushed
        self._exchanger = exchanger
        self.merger: Merger[list[Item], list[Pushed]] = Merger(
            self._run, size=_weight, limit=context.settings.merge_max, slots=4, enough=200
        )

    def with_catalog(self, catalog: Catalog) -> "Pusher":
        """The same on another catalog, for `store`."""
        other = copy(self)
        other._catalog = catalog
        return other

    async def _run(
        self, requests: list[list[Item]], again: bool
    ) -> list[list[Pushed] | PenstockError]:
        items = requests[0] if len(requests) == 1 else list(chain.from_iterable(requests))
        if again or not self._signals.waiters:
            answers = await self.store(self._database.fetch, items, again)
            self.announce(answers)
        else:
            claim = Claim(self._database, self._exchanger, self._signals, items)
            try:
                answers = await self.store(claim.fetch, items)
                self.announce(answers, claim.served)
            finally:
                claim.close()
        results: list[list[Pushed] | PenstockError] = []
        begin = 0
        for request in requests:
            end = begin + len(request)
            results.append(_whole(answers[begin:end]))
            begin = end
        return results

    async def store(
        self, fetch: Fetch, items: list[Item], again: bool = False
    ) -> list[Pushed | PenstockError]:
        """Append named items through `fetch` (of the pool or a transaction)."""
        answers: list[Any] = [None] * len(items)
        remaining: Iterable[int] = range(len(items))
        for _ in range(MAX_LOOKUPS):
            remaining = await self._store_once(fetch, items, remaining, answers, again)
            if not remaining:
                return answers
            for place in remaining:
                self._catalog.partitions.pop((items[place].queue, items[place].partition), None)
            self._catalog.forget()
        for place in remaining:
            answers[place] = Unavailable(f"queue '{items[place].queue}' keeps changing; try again")
        return answers

    async def _store_once(
        self,
        fetch: Fetch,
        items: list[Item],
        places: Iterable[int],
        answers: list[Any],
        again: bool,
    ) -> list[int]:
        """Store the items at these places and fill in their answers; the places of those whose
        partition is not what we took it for any more.
        """
        logs: dict[Key, dict[str, int]] = {}  # partition -> transaction id -> place
        twins: list[tuple[int, int]] = []
        for nth, place in enumerate(places, 1):
            if not nth % SLICE:
                await asyncio.sleep(0)
            item = items[place]
            key = item.queue, item.partition
            log = logs.get(key)
            if log is None:
                log = logs[key] = {}
            first = log.setdefault(item.transaction_id or "", place)
            if first != place:
                twins.append((place, first))
        partitions = self._catalog.partitions
        if not logs.keys() <= partitions.keys():
            await self._catalog.ensure(list(logs))
        infos = [await self._catalog.queue(queue) for queue in {queue for queue, _ in logs}]
        encrypted = {info.name for info in infos if info and info.options.encryption_enabled}
        stale = [place for key in logs if key not in partitions for place in logs[key].values()]
        ordered = sorted((partitions[key], key) for key in logs if key in partitions)
        sealed: dict[int, Sealed] = {}
        weight = 0
        for partition, key in [one for one in ordered if one[1][0] in encrypted]:
            try:
                for place in logs[key].values():
                    sealed[place] = self._keys.seal(partition, items[place])
                    weight += 1 + len(items[place].payload) // LIGHT_BYTES
                    if weight > SLICE:
                        weight = 0
                        await asyncio.sleep(0)
            except Unavailable as error:
                for place in logs[key].values():
                    answers[place] = error
                ordered.remove((partition, key))
        order: list[int] = []
        starts: list[int] = []
        for _, key in ordered:
            starts.append(len(order))
            order += logs[key].values()
        if order:
            batch = [items[place] for place in order]
            stored: Sequence[Item | Sealed] = (
                [sealed.get(place, items[place]) for place in order] if sealed else batch
            )
            fresh = [item.fresh for item in batch]
            headers = _unless_empty([one.headers for one in stored])
            later = _unless_empty([item.due for item in batch])
            ((heads, numbers, dues),) = await fetch(
                SQL,
                [partition for partition, _ in ordered],
                starts,
                [item.transaction_id for item in batch],
                [again or not one for one in fresh] if True in fresh else [True],
                _unless_empty(
                    [trace_of(item.trace_id) if item.trace_id else None for item in batch]
                ),
                _unless_empty([item.producer for item in batch]),
                [one.key_id for one in stored] if sealed else None,
                *joined([one.payload for one in stored]),
                *(joined([one or b"" for one in headers]) if headers else (None, None)),
                later and [due if isinstance(due, datetime) else None for due in later],
                later and [None if isinstance(due, datetime) else due for due in later],
            )
            for nth, (partition, key) in enumerate(ordered):
                partition_id = self._catalog.partition_uuid(partition)
                uuid = self._catalog.message_uuids(partition)
                queue, name = key
                for n, place in enumerate(logs[key].values(), starts[nth]):
                    if not (n + 1) % SLICE:
                        await asyncio.sleep(0)
                    item = items[place]
                    number = numbers[n] if heads is None else heads[nth] + n
                    if number is None:
                        stale.append(place)
                        continue
                    due = None
                    status: Status
                    if number > 0:
                        status = "queued"
                    elif number == 0:
                        status = "full"
                    else:  # repeated: nobody else can have made an id that is fresh, it was us
                        status = "queued" if again and item.fresh else "duplicate"
                        number = -number
                    if number == LATER:
                        number, due = 0, dues[n]
                        status = "scheduled" if status == "queued" else status
                    answers[place] = Pushed(
                        status,
                        queue,
                        name,
                        item.transaction_id or "",
                        uuid(number) if number else None,
                        partition_id,
                        item.trace_id,
                        due,
                    )
        for place, first in twins:
            answer = answers[first]
            if answer is None:
                stale.append(place)
            elif isinstance(answer, Pushed) and answer.status != "full":
                answer = msgspec.structs.replace(
                    answer, status="duplicate", trace_id=items[place].trace_id
                )
            answers[place] = answer
        return stale

    def announce(
        self,
        answers: Sequence[Pushed | PenstockError],
        served: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        """Count what was queued and wake whoever waits for it, or for its time, but for pops of a
        queue and group that were `served`.
        """
        logs = Count(
            (a.queue, a.partition)
            for a in answers
            if isinstance(a, Pushed) and a.status == "queued"
        )
        queues: dict[str, list[int]] = {}
        for (queue, _), count in logs.items():
            queues.setdefault(queue, []).append(count)
        for queue, counts in queues.items():
            self._pushed.add(sum(counts), queue)
            self._signals.available(
                queue,
                sum(counts) if self._catalog.shares(queue) else len(counts),
                served=served,
            )
        if logs.total() < len(answers):
            dues = [
                a.deliver_at
                for a in answers
                if isinstance(a, Pushed) and a.status == "scheduled" and a.deliver_at
            ]
            if dues:
                self._later.scheduled(dues)

    def named(self, items: list[Item]) -> list[Item]:
        """The items, checked and each with a transaction id; the first bad one refuses all."""
        check(items, self._catalog.partitions)
        for item in items:
            if not item.transaction_id:
                return named([item if item.transaction_id else copy(item) for item in items])
        return items


def check(items: list[Item], checked: Container[Key] = ()) -> None:
    """Raise for the first item that cannot be stored; names of `checked` partitions are fine."""
    for item in items:
        if (item.queue, item.partition) not in checked:
            check_name("queue", item.queue)
            check_name("partition", item.partition)
        if item.transaction_id:
            check_text("transactionId", item.transaction_id)
        if item.trace_id:
            trace_of(item.trace_id)


def _whole(answers: list[Pushed | PenstockError]) -> list[Pushed] | PenstockError:
    """What one request gets: an answer per item, or the first refusal."""
    for answer in answers:
        if type(answer) is not Pushed:
            assert isinstance(answer, PenstockError)
            return answer
    return cast(list[Pushed], answers)


def _weight(items: list[Item]) -> int:
    return sum([1 + len(item.payload) // HEAVY_BYTES for item in items])


def _unless_empty(values: list[T]) -> list[T] | None:
    return values if any(values) else None


def joined(values: list[bytes]) -> tuple[bytes, str]:
    """Values as queue_push takes them: their bytes, and where each begins and the last one ends as
    the text of an array. The driver encodes these two several times faster than an array of values.
    """
    bounds = list(accumulate(map(len, values), initial=1))
    return b"".join(values), f"{{{str(bounds)[1:-1]}}}"


def named(items: list[Item]) -> list[Item]:
    """The same items, those without a transaction id under one made for them."""
    nameless = [item for item in items if not item.transaction_id]
    if nameless:
        for item, identifier in zip(nameless, random_ids(len(nameless)), strict=True):
            item.transaction_id, item.fresh = identifier, True
    return items


def random_ids(count: int) -> list[str]:
    """Transaction ids (UUIDs of version 4) for messages whose producers gave none. Many at once:
    asking the system for random bytes is what takes the time.
    """
    digits = os.urandom(16 * count).hex()
    return [
        f"{digits[i : i + 8]}-{digits[i + 8 : i + 12]}-4{digits[i + 13 : i + 16]}"
        f"-a{digits[i + 17 : i + 20]}-{digits[i + 20 : i + 32]}"
        for i in range(0, 32 * count, 32)
    ]


def trace_of(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise InvalidRequest(f"traceId '{text[:64]}' is not a UUID") from None
