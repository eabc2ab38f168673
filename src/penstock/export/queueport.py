"""The queue engine as a route sees it: pop under a lease, ack what was popped, push under a key."""

from dataclasses import dataclass, field

from penstock.errors import Full
from penstock.queues.engine import Queues
from penstock.queues.types import Ack, Item, Message, PopRequest


@dataclass(slots=True)
class PoppedMessages:
    group: str
    messages: list[Message]
    payloads: list[bytes] = field(default_factory=list)


class QueuesAdapter:
    """`QueuePort` on `Queues`."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    async def pop(self, queue: str, group: str, batch: int, timeout: float) -> PoppedMessages:
        popped = await self._queues.pop(PopRequest(queue=queue, group=group, batch=batch, wait=True, timeout=timeout))
        return PoppedMessages(group, popped.messages, [message.payload for message in popped.messages])

    async def ack(self, popped: PoppedMessages) -> None:
        """A message whose lease ran out meanwhile comes again: it is in the send queue already, so it is sent twice."""
        await self._queues.ack(
            [
                Ack(message.transaction_id, message.partition_id, message.lease_id, group=popped.group)
                for message in popped.messages
            ]
        )

    async def push(self, queue: str, partition: str, payloads: list[bytes], key: str) -> None:
        items = [
            Item(queue, payload, partition, transaction_id=f"{key}-{index}") for index, payload in enumerate(payloads)
        ]
        for pushed in await self._queues.push(items):
            if pushed.status == "full":
                raise Full(f"queue {queue} is full")
