"""Push: validate, assign transaction ids, append. Concurrent requests share a call and a commit.

Repeating a call whose outcome is unknown is safe: transaction ids are fixed before the first
attempt and unique in their partition, so a message that was stored is answered as a duplicate.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate, chain
from typing import Any, cast
from uuid import UUID

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.database.batching import SLICE, Batcher
from penstock.errors import InvalidRequest, PenstockError, Unavailable
from penstock.metrics import Counter
from penstock.queues.calls import AppendArguments, AppendedRow, array_text, joined
from penstock.queues.catalog import Locations, PartitionName, QueueCatalog
from penstock.queues.checks import check_name, check_text
from penstock.queues.context import QueueContext
from penstock.queues.crypto import Encrypted, EncryptionKeys
from penstock.queues.exchanges import Exchanges, Served
from penstock.queues.types import Item, ItemOutcome, Status

ENCRYPTED_BYTES = 1 << 12  # encrypting these takes as long as one more item
MAX_LOOKUPS = 4  # attempts to look up queues that changed
NOTHING = AppendedRow([], None, None)  # of a call without items
ENOUGH = 200  # messages that justify a second call beside a running one (docs/decisions/queues.md)


class Pusher:
    """Pushes of this broker: `append` is the call of its batcher."""

    def __init__(
        self,
        context: QueueContext,
        exchanges: Exchanges,
        pushed: Counter,
        delayed: Callable[[list[datetime]], None],
    ) -> None:
        self._calls, self._keys = context.calls, context.keys
        self._catalog, self._waiting = context.catalog, context.waiting
        self._exchanges = exchanges
        self._pushed = pushed
        self._delayed = delayed  # called with the due times of stored delayed messages
        self.batcher: Batcher[list[Item], list[ItemOutcome]] = Batcher(
            self.append, limit=context.settings.merge_max, slots=4, enough=ENOUGH
        )

    async def append(
        self, requests: list[list[Item]], again: bool
    ) -> list[list[ItemOutcome] | PenstockError]:
        """Append the items of several requests. Look up queues that changed, and send their items
        again. Only the first call takes for waiting pops.
        """
        items = list(chain.from_iterable(requests))
        batch = AppendBatch(items, self._catalog, self._keys, again)
        served: Served = {}  # by the first call
        for attempt in range(MAX_LOOKUPS):
            arguments = await batch.arguments(await self._catalog.locate(items))
            if arguments is None:
                appended = NOTHING
            elif again or attempt or not self._waiting.pops:
                appended = await self._calls.append(arguments)
            else:
                appended, served = await self._exchanges.append_and_hand_off(arguments, items)
            await batch.fill(appended)
            if all(batch.answers):
                break
            self._catalog.forget()
        answers = [
            answer or Unavailable(f"queue '{item.queue}' keeps changing; try again")
            for item, answer in zip(items, batch.answers, strict=True)
        ]
        self.count_and_wake(answers, served)
        results: list[list[ItemOutcome] | PenstockError] = []
        begin = 0
        for request in requests:
            end = begin + len(request)
            outcomes: list[ItemOutcome] = []
            for index, outcome in enumerate(answers[begin:end]):
                if isinstance(outcome, PenstockError):
                    results.append(outcome)
                    break
                outcome.index = index
                outcomes.append(outcome)
            else:
                results.append(outcomes)
            begin = end
        return results

    def count_and_wake(
        self,
        answers: Sequence[ItemOutcome | PenstockError],
        served: Served | None = None,
    ) -> None:
        """Count queued messages, and wake as many pops as their partitions can serve, less those
        that the push took for (`served`).
        """
        queued: dict[str, list[Any]] = {}  # partition ids of the messages, by queue
        dues: list[datetime] = []
        for answer in answers:
            if not isinstance(answer, ItemOutcome):
                continue
            if answer.status == "queued":
                queued.setdefault(answer.queue, []).append(answer.partition_id)
            elif answer.status == "scheduled" and isinstance(answer.deliver_at, datetime):
                dues.append(answer.deliver_at)
        for queue, partitions in queued.items():
            self._pushed.add(len(partitions), queue)
            unordered = self._catalog.is_unordered(queue)
            self._waiting.wake(
                queue, len(partitions if unordered else set(partitions)), served=served
            )
        if dues:
            self._delayed(dues)


@dataclass(slots=True)
class AppendBatch:
    """The items of a call and their answers. Items without an answer are sent again."""

    items: list[Item]
    catalog: QueueCatalog
    keys: EncryptionKeys
    again: bool = False  # an earlier attempt may have stored them
    answers: list[ItemOutcome | PenstockError | None] = field(init=False)  # None: no answer yet
    # The order sent: partitions, each with the indexes of its items
    sent: list[tuple[int, list[int]]] = field(default_factory=list)
    # (item, earlier item with the same id): the earlier one is answered first
    repeats: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answers = [None] * len(self.items)

    async def arguments(self, locations: Locations) -> AppendArguments | None:
        """Return the arguments for the items that have a location and no answer yet, sorted by
        partition; None: there is nothing to send.
        """
        items = self.items
        wanted: dict[PartitionName, dict[str | None, int]] = {}  # the index of each transaction id
        self.repeats = []
        for index, item in enumerate(items):
            if self.answers[index] is not None:
                continue
            ids = wanted.setdefault((item.queue, item.partition), {})
            first = ids.setdefault(item.transaction_id, index)
            if first != index:
                self.repeats.append((index, first))
        self.sent = sorted(
            (locations[name].partition, list(ids.values()))
            for name, ids in wanted.items()
            if name in locations
        )
        secret = {location.partition for location in locations.values() if location.encrypted}
        encrypted = await self._encrypt(secret) if secret else {}
        order = [index for _, indexes in self.sent for index in indexes]
        if not order:
            return None
        batch = [items[index] for index in order]
        stored = [encrypted.get(index) or items[index] for index in order] if encrypted else batch
        traces = [trace_of(item.trace_id) if item.trace_id else None for item in batch]
        producers = [item.producer for item in batch]
        payloads, payload_bounds = joined([one.payload for one in stored])
        headers, header_bounds = None, None
        if any(one.headers for one in stored):
            headers, header_bounds = joined([one.headers or b"" for one in stored])
        due = [item.due for item in batch]
        later = any(due)
        return AppendArguments(
            ids=[partition for partition, _ in self.sent],
            starts=list(accumulate([len(some) for _, some in self.sent[:-1]], initial=0)),
            transactions=array_text([item.transaction_id or "" for item in batch]),
            checked=self.again or not all(item.fresh for item in batch),
            traces=traces if any(traces) else None,
            producers=producers if any(producers) else None,
            keys=[one.key_id for one in stored] if encrypted else None,
            payloads=payloads,
            payload_bounds=payload_bounds,
            headers=headers,
            header_bounds=header_bounds,
            due_ats=[one if isinstance(one, datetime) else None for one in due] if later else None,
            delays=[None if isinstance(one, datetime) else one for one in due] if later else None,
        )

    async def _encrypt(self, partitions: set[int]) -> dict[int, Encrypted]:
        """Encrypt the items of these partitions. Return the results by index. Without a key, answer
        the items with an error instead of sending them.
        """
        encrypted: dict[int, Encrypted] = {}
        work = 0
        for partition, indexes in self.sent:
            if partition not in partitions:
                continue
            try:
                for index in indexes:
                    encrypted[index] = self.keys.encrypt(partition, self.items[index])
                    work += 1 + len(self.items[index].payload) // ENCRYPTED_BYTES
                    if work > SLICE:
                        work = 0
                        await asyncio.sleep(0)
            except Unavailable as error:
                for index in indexes:
                    self.answers[index] = error
                indexes.clear()
        self.sent = [one for one in self.sent if one[1]]
        return encrypted

    async def fill(self, appended: AppendedRow) -> None:
        """Fill in answers from the row of `append`. Stale items stay without an answer."""
        begin = rested = 0
        for partition, indexes in self.sent:
            end = begin + len(indexes)
            partition_id, ids = self.catalog.uuids(partition, appended.seqs[begin:end])
            queued, now = ["queued"] * len(ids), [None] * len(ids)
            statuses = appended.statuses[begin:end] if appended.statuses else queued
            dues = appended.due_ats[begin:end] if appended.due_ats else now
            for index, message_id, status, due_at in zip(indexes, ids, statuses, dues, strict=True):
                item = self.items[index]
                deliver_at = UNSET if due_at is None else due_at
                if status == "stale":
                    continue
                if status == "duplicate" and self.again and item.fresh:
                    # we generated this id, so an earlier attempt stored it
                    status = "queued" if due_at is None else "scheduled"
                if status == "duplicate":
                    answer = _duplicate(item, index, message_id, deliver_at)
                else:
                    answer = ItemOutcome(
                        index,
                        cast(Status, status),
                        message_id,
                        item.transaction_id or "",
                        partition_id,
                        item.trace_id,
                        item.queue,
                        deliver_at,
                    )
                self.answers[index] = answer
            begin = end
            if begin - rested >= SLICE:
                rested = begin
                await asyncio.sleep(0)
        for index, earlier in self.repeats:
            first = self.answers[earlier]
            if isinstance(first, ItemOutcome):
                if first.status == "full":
                    first = replace(first, index=index)
                else:
                    first = _duplicate(self.items[index], index, first.message_id, first.deliver_at)
            if first is not None:
                self.answers[index] = first


def _duplicate(
    item: Item, index: int, message_id: str | None, deliver_at: datetime | UnsetType
) -> ItemOutcome:
    """Return the outcome of an item whose transaction id is stored already."""
    return ItemOutcome(
        index,
        "duplicate",
        message_id,
        item.transaction_id or "",
        queue=item.queue,
        deliver_at=deliver_at,
    )


def with_ids(items: list[Item], checked: Collection[PartitionName] = ()) -> list[Item]:
    """Check items, and return them with transaction ids. Those without one are copied."""
    items = [item if item.transaction_id else copy(item) for item in items]
    name_items(items, checked)
    return items


def name_items(items: list[Item], checked: Collection[PartitionName]) -> None:
    """Check items and assign transaction ids in place. Raise at the first invalid item. The names
    of `checked` partitions are known to be valid.
    """
    named: list[str] = []
    nameless: list[Item] = []
    for item in items:
        if (item.queue, item.partition) not in checked:
            check_name("queue", item.queue)
            check_name("partition", item.partition)
        if item.transaction_id:
            named.append(item.transaction_id)
        else:
            nameless.append(item)
        if item.trace_id:
            trace_of(item.trace_id)
    if named:
        check_text("transactionId", "".join(named))
    if nameless:
        for item, identifier in zip(nameless, random_ids(len(nameless)), strict=True):
            item.transaction_id, item.fresh = identifier, True


def random_ids(count: int) -> list[str]:
    """Return transaction ids (UUIDs of version 4). One system call gets the random bytes of all,
    because the call is the slow part.
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
