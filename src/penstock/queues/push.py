"""Push: validate, name, append. Requests that arrive together share one call and one commit.

Repeating a call whose outcome is unknown is safe: transaction ids are fixed before the first
attempt and unique in their partition, so what was stored shows up as a duplicate.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate, chain
from typing import Any, TypeVar, cast
from uuid import UUID

import msgspec

from penstock.database.batching import SLICE, Batcher
from penstock.errors import InvalidRequest, PenstockError, Unavailable
from penstock.metrics import Counter
from penstock.queues.calls import AppendArguments, AppendedRow, Fetch
from penstock.queues.catalog import QueueCatalog, check_name, check_text
from penstock.queues.context import QueueContext
from penstock.queues.crypto import EncryptionKeys, Sealed
from penstock.queues.taking import Deliveries, Served
from penstock.queues.types import Item, ItemOutcome, Status

T = TypeVar("T")
Log = tuple[str, str]  # queue, partition

ENCRYPTED_BYTES = 1 << 12  # that are encrypted in the time of one more item
MAX_LOOKUPS = 4  # how often queues that changed are looked up again
# A message counts once more for each of these bytes: large ones must not add up to a call of a
# gigabyte.
HEAVY_BYTES = 1 << 15
ENOUGH = (
    200  # messages that are worth a second call beside one under way (docs/decisions/queues.md)
)


class Pusher:
    def __init__(
        self,
        context: QueueContext,
        deliveries: Deliveries,
        pushed: Counter,
        delayed: Callable[[list[datetime]], None],
    ) -> None:
        self._context = context
        self._database, self._calls = context.database, context.calls
        self._catalog, self._waiting = context.catalog, context.waiting
        self._deliveries = deliveries
        self._pushed = pushed
        self._delayed = delayed  # messages for these moments were stored
        self.batcher: Batcher[list[Item], list[ItemOutcome]] = Batcher(
            self._append, size=_size, limit=context.settings.merge_max, slots=4, enough=ENOUGH
        )

    def named(self, items: list[Item]) -> list[Item]:
        """The items with their names. Those without an id are copied: they may be used again."""
        items = [item if item.transaction_id else copy(item) for item in items]
        name_items(items, self._catalog.partitions)
        return items

    async def _append(
        self, requests: list[list[Item]], again: bool
    ) -> list[list[ItemOutcome] | PenstockError]:
        """The call for some requests. Only the first attempt takes for waiting pops."""
        items = requests[0] if len(requests) == 1 else list(chain.from_iterable(requests))
        served: Served | None = {} if self._waiting.pops and not again else None
        answers = await self.store(items, self._catalog, again=again, served=served)
        self.announce(answers, served)
        results: list[list[ItemOutcome] | PenstockError] = []
        begin = 0
        for request in requests:
            outcomes = answers[begin : begin + len(request)]
            refused = [one for one in outcomes if not isinstance(one, ItemOutcome)]
            if begin and not refused:
                for index, outcome in enumerate(cast("list[ItemOutcome]", outcomes)):
                    outcome.index = index
            results.append(refused[0] if refused else cast("list[ItemOutcome]", outcomes))
            begin += len(request)
        return results

    async def store(
        self,
        items: list[Item],
        catalog: QueueCatalog,
        *,
        again: bool = False,
        served: Served | None = None,
        fetch: Fetch | None = None,
    ) -> list[ItemOutcome | PenstockError]:
        """Append items, through `fetch` where they are part of a transaction. Look up again what
        turns out to be stale. With `served` the first call also takes for waiting pops, and counts
        them there.
        """
        batch = AppendBatch(
            items, catalog, self._context.keys, again, [None] * len(items), range(len(items))
        )
        for turn in range(MAX_LOOKUPS):
            arguments = await batch.arguments()
            if arguments is None:
                appended = AppendedRow([], None, None)
            elif served is not None and not turn:
                appended = await self._deliveries.append_and_hand_off(arguments, items, served)
            else:
                appended = await self._calls.append(arguments, fetch)
            await batch.fill(appended)
            if not batch.stale:
                return batch.answers
            for index in batch.stale:
                catalog.partitions.pop((items[index].queue, items[index].partition), None)
            catalog.forget()
        for index in batch.stale:
            error = Unavailable(f"queue '{items[index].queue}' keeps changing; try again")
            batch.answers[index] = error
        return batch.answers

    def announce(
        self,
        answers: Sequence[ItemOutcome | PenstockError],
        served: Served | None = None,
    ) -> None:
        """Count what was queued and wake pops that wait for it, but for those of a queue and group
        that were `served`.
        """
        logs: dict[tuple[str, str], int] = {}
        dues: list[datetime] = []
        for answer in answers:
            if not isinstance(answer, ItemOutcome):
                continue
            if answer.status == "queued":
                key = answer.queue, str(answer.partition_id)
                logs[key] = logs.get(key, 0) + 1
            elif answer.status == "scheduled" and isinstance(answer.deliver_at, datetime):
                dues.append(answer.deliver_at)
        queues: dict[str, list[int]] = {}
        for (queue, _), count in logs.items():
            queues.setdefault(queue, []).append(count)
        for queue, counts in queues.items():
            total = sum(counts)
            self._pushed.add(total, queue)
            partitions = total if self._catalog.shares(queue) else len(counts)
            self._waiting.available(queue, partitions, served=served)
        if dues:
            self._delayed(dues)


@dataclass(slots=True)
class AppendBatch:
    """The items of a call, and their answers. It is sent again as long as some are stale."""

    items: list[Item]
    catalog: QueueCatalog
    keys: EncryptionKeys
    again: bool  # an attempt before may have stored them
    answers: list[Any]  # of type ItemOutcome | PenstockError; None: not yet
    stale: Collection[int]  # indexes of items without an answer
    # transaction id -> index, in order, of each log
    logs: dict[Log, dict[str | None, int]] = field(default_factory=dict)
    sent: list[tuple[Log, int]] = field(default_factory=list)  # logs with their numbers, in order
    # indexes of items with the id of an earlier one, and of that one
    repeats: list[tuple[int, int]] = field(default_factory=list)

    async def arguments(self) -> AppendArguments | None:
        """What to send, sorted by log; None: nothing is left to be sent. An item that repeats an
        id waits for the answer of the first one.
        """
        partitions = self.catalog.partitions
        logs: dict[Log, dict[str | None, int]] = {}
        self.logs, self.repeats = logs, []
        for index in self.stale:
            item = self.items[index]
            first = logs.setdefault((item.queue, item.partition), {}).setdefault(
                item.transaction_id, index
            )
            if first != index:
                self.repeats.append((index, first))
        if not logs.keys() <= partitions.keys():
            await self.catalog.ensure(list(logs), unordered_of(self.items))
        self.stale = [
            index for log in logs if log not in partitions for index in logs[log].values()
        ]
        ordered = sorted((partitions[log], log) for log in logs if log in partitions)
        closed: set[str] = set()
        for queue in {queue for queue, _ in logs}:
            info = self.catalog.queues.get(queue) or await self.catalog.queue(queue)
            if info and info.options.encryption_enabled:
                closed.add(queue)
        encrypted = await self._encrypt(ordered, closed) if closed else {}
        ids: list[int] = []
        starts: list[int] = []
        order: list[int] = []
        self.sent = []
        for partition, log in ordered:
            if logs[log]:
                self.sent.append((log, partition))
                ids.append(partition)
                starts.append(len(order))
                order += logs[log].values()
        if not ids:
            return None
        batch = [self.items[index] for index in order]
        stored: Sequence[Item | Sealed] = (
            [encrypted.get(index, self.items[index]) for index in order] if encrypted else batch
        )
        fresh = [item.fresh for item in batch]
        payloads, payload_bounds = joined([one.payload for one in stored])
        headers = _unless_empty([one.headers for one in stored])
        header_bytes, header_bounds = (
            joined([h or b"" for h in headers]) if headers else (None, None)
        )
        due = _unless_empty([item.due for item in batch])
        return AppendArguments(
            ids=ids,
            starts=starts,
            transactions=[item.transaction_id or "" for item in batch],
            checks=[self.again or not one for one in fresh] if True in fresh else [True],
            traces=_unless_empty(
                [trace_of(item.trace_id) if item.trace_id else None for item in batch]
            ),
            producers=_unless_empty([item.producer for item in batch]),
            keys=[one.key_id for one in stored] if encrypted else None,
            payloads=payloads,
            payload_bounds=payload_bounds,
            headers=header_bytes,
            header_bounds=header_bounds,
            due_ats=[one if isinstance(one, datetime) else None for one in due] if due else None,
            delays=[None if isinstance(one, datetime) else one for one in due] if due else None,
        )

    async def _encrypt(self, ordered: list[tuple[int, Log]], queues: set[str]) -> dict[int, Sealed]:
        """The items of these queues, by index. Without a key they are answered."""
        encrypted: dict[int, Sealed] = {}
        work = 0
        for partition, log in ordered:
            if log[0] not in queues:
                continue
            try:
                for index in self.logs[log].values():
                    encrypted[index] = self.keys.seal(partition, self.items[index])
                    work += 1 + len(self.items[index].payload) // ENCRYPTED_BYTES
                    if work > SLICE:
                        work = 0
                        await asyncio.sleep(0)
            except Unavailable as error:
                for index in self.logs[log].values():
                    self.answers[index] = error
                self.logs[log] = {}
        return encrypted

    async def fill(self, appended: AppendedRow) -> None:
        """Take over what `append` returned; what is stale stays without an answer."""
        stale = list(self.stale)
        n = rested = 0
        for log, partition in self.sent:
            indexes = self.logs[log].values()
            if appended.statuses is None:
                partition_id, ids = self.catalog.uuids(
                    partition, appended.seqs[n : n + len(indexes)]
                )
                for index, message_id in zip(indexes, ids, strict=True):
                    item = self.items[index]
                    self.answers[index] = ItemOutcome(
                        index,
                        "queued",
                        message_id,
                        item.transaction_id or "",
                        partition_id,
                        item.trace_id,
                        item.queue,
                    )
            else:
                for place, index in enumerate(indexes, n):
                    if appended.statuses[place] == "stale":
                        stale.append(index)
                    else:
                        self.answers[index] = self._answer(index, place, appended, partition)
            n += len(indexes)
            if n - rested >= SLICE:
                rested = n
                await asyncio.sleep(0)
        for index, first in self.repeats:
            answer = self.answers[first]
            if answer is None:
                stale.append(index)
            elif isinstance(answer, ItemOutcome) and answer.status != "full":
                answer = msgspec.structs.replace(
                    answer,
                    index=index,
                    status="duplicate",
                    partition_id=msgspec.UNSET,
                    trace_id=msgspec.UNSET,
                )
            self.answers[index] = answer
        self.stale = stale

    def _answer(self, index: int, n: int, appended: AppendedRow, partition: int) -> ItemOutcome:
        """The answer of an item in a call that did not just queue everything."""
        item, seq = self.items[index], appended.seqs[n]
        assert appended.statuses is not None
        status = cast(Status, appended.statuses[n])
        if status == "duplicate" and self.again and item.fresh:
            status = "queued"  # nobody else can have made an id that is fresh: it was us
        message_id = None if seq is None else self.catalog.message_uuid(partition, seq)
        due_at = None if appended.due_ats is None else appended.due_ats[n]
        partition_id = self.catalog.partition_uuid(partition)
        return answer_of(item, index, status, message_id, partition_id, due_at)


def answer_of(
    item: Item,
    index: int,
    status: Status,
    message_id: str | None = None,
    partition_id: str = "",
    due_at: datetime | None = None,
) -> ItemOutcome:
    """What became of an item."""
    if status == "queued" and due_at is not None:
        status = "scheduled"
    if status == "duplicate":
        return ItemOutcome(index, status, message_id, item.transaction_id or "", queue=item.queue)
    return ItemOutcome(
        index,
        status,
        message_id,
        item.transaction_id or "",
        partition_id,
        item.trace_id,
        item.queue,
        msgspec.UNSET if due_at is None else due_at,
    )


def name_items(items: list[Item], checked: Collection[Log]) -> None:
    """Check items and give each a transaction id, in place; the first bad one refuses all. The
    names of `checked` partitions are fine.
    """
    nameless: list[Item] = []
    for item in items:
        if (item.queue, item.partition) not in checked:
            check_name("queue", item.queue)
            check_name("partition", item.partition)
        if not item.transaction_id:
            nameless.append(item)
        else:
            check_text("transactionId", item.transaction_id)
        if item.trace_id:
            trace_of(item.trace_id)
    if nameless:
        for item, identifier in zip(nameless, random_ids(len(nameless)), strict=True):
            item.transaction_id, item.fresh = identifier, True


def logs_of(items: Iterable[Item]) -> set[Log]:
    return {(item.queue, item.partition) for item in items}


def unordered_of(items: Iterable[Item]) -> set[str]:
    """The queues that have no order if these items create them."""
    return {item.queue for item in items if item.ordering == "none"}


def _size(items: list[Item]) -> int:
    return sum([1 + len(item.payload) // HEAVY_BYTES for item in items])


def _unless_empty(values: list[T]) -> list[T] | None:
    return values if any(values) else None


def joined(values: list[bytes]) -> tuple[bytes, str]:
    """Values as `append` takes them: their bytes, and where each begins and the last one ends as
    the text of an array.
    """
    bounds = list(accumulate(map(len, values), initial=1))
    return b"".join(values), f"{{{str(bounds)[1:-1]}}}"


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
