"""Operations on single messages: push a copy, requeue or delete dead letters, edit a dead letter.

They run in the broker because a browser would change large integers and decimals of a payload.
"""

from hashlib import blake2b

import msgspec

from penstock.contract.dead_letters import DeadLetterMessage
from penstock.errors import Conflict, NotFound
from penstock.protocol import headers
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.admin.dead_letters import Which
from penstock.queues.engine import Queues
from penstock.queues.types import Item, ItemOutcome

EDITED = "edited"  # type of the trace with the former payload


class EditedFrom(msgspec.Struct, rename="camel"):
    """The trace of an edited message: its former payload."""

    transaction_id: str
    error: str
    payload: msgspec.Raw


class Mending:
    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    async def copy(self, partition_id: str, transaction_id: str, who: str | None) -> ItemOutcome:
        """Push the same payload and headers to the end of the message's partition."""
        message = await self._queues.messages.detail(partition_id, transaction_id)
        return await self._push(
            Item(
                message.queue,
                message.payload,
                message.partition,
                producer=who,
                headers=headers.encode(message.headers or {}),
            )
        )

    async def letter(self, number: int) -> DeadLetterMessage:
        page = await self._queues.dead.listing(Which(id=number), limit=1)
        if not page.messages:
            raise NotFound("Dead letter not found")
        return page.messages[0]

    async def requeue(self, numbers: list[int]) -> int:
        """Requeue these dead letters. One that cannot be requeued stays a dead letter."""
        count = 0
        for number in numbers:
            try:
                count += await self._queues.dead.requeue(Which(id=number))
            except Conflict:
                continue  # the queue is full or the group was deleted: not counted
        return count

    async def purge(self, numbers: list[int]) -> int:
        return sum([await self._queues.dead.purge(Which(id=number)) for number in numbers])

    async def edit(self, number: int, payload: bytes, who: str | None) -> ItemOutcome:
        """Push a dead letter with another payload, and delete the dead letter.

        A trace of the new message keeps the old payload. The transaction id depends on the letter
        and the new payload, so an edit that is repeated after a failure stores nothing twice.
        """
        letter = await self.letter(number)
        digest = blake2b(payload, digest_size=8).hexdigest()
        pushed = await self._push(
            Item(
                letter.queue,
                payload,
                letter.partition,
                f"{EDITED}:{number}:{digest}",
                producer=who,
                headers=headers.encode(letter.headers or {}),
            )
        )
        before = EditedFrom(letter.transaction_id, letter.error, msgspec.Raw(letter.data or b""))
        await self._queues.traces.add(
            letter.partition_id,
            pushed.transaction_id,
            msgspec.json.encode(before),
            group=letter.group or QUEUE_MODE,
            event_type=EDITED,
            worker=who,
        )
        await self._queues.dead.purge(Which(id=number))
        pushed.partition_id = letter.partition_id  # a duplicate has none
        return pushed

    async def _push(self, item: Item) -> ItemOutcome:
        [pushed] = await self._queues.push([item])
        if pushed.status == "full":
            raise Conflict(f"queue '{item.queue}' is full (maxSize)")
        return pushed
