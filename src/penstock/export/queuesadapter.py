"""The queues of this broker as a route sees them: pop under a lease, ack what was popped, push
under a key.

A route takes the same doors as every client. Its pushes go through the buffer, behind older events
of their partition that wait there, and onto its disk while the database is down or pushes are in
maintenance. Its pops find nothing while pops are in maintenance.
"""

from penstock.buffer import Buffer
from penstock.errors import Full, NotFound
from penstock.queues.engine import Queues
from penstock.queues.types import Ack, Delivered, Item, PopRequest


class QueuesAdapter:
    """`Queues` and the `Buffer` in front of them, reduced to what a route does with them."""

    closed = False  # as a consumer of the queues it reads: it has no connection that could end

    def __init__(self, queues: Queues, buffer: Buffer) -> None:
        self._queues = queues
        self._buffer = buffer

    async def pop(
        self, queue: str, group: str, batch: int, timeout: float, holder: int
    ) -> list[Delivered]:
        """Lease up to `batch` messages as `holder`; waits up to `timeout` for the first one."""
        request = PopRequest(
            queue=queue,
            group=group,
            batch=batch,
            wait=True,
            timeout=timeout,
            holder=holder,
            consumer=self,
        )
        return (await self._queues.pop(request)).messages

    async def ack(self, messages: list[Delivered], group: str) -> None:
        """Acknowledge messages. One whose lease expired is delivered again, and sent twice."""
        await self._queues.ack(
            [
                Ack(each.transaction_id, each.partition_id, each.lease_id, group=group)
                for each in messages
            ]
        )

    async def renew(self, messages: list[Delivered], seconds: int) -> None:
        """Let the lease live for at least `seconds` from now."""
        for lease in {message.lease_id for message in messages}:
            await self._queues.extend(lease, seconds)

    async def release(self, queue: str, group: str, holder: int) -> int:
        """End the leases of `holder`, and of nobody else; how many there were."""
        return await self._queues.release(queue, group, holder)

    async def lag(self, queue: str, group: str) -> int | None:
        """Return how many messages the group has not acknowledged; None without such a queue or
        group.
        """
        try:
            return await self._queues.groups.lag(queue, group)
        except NotFound:  # nobody has popped or pushed yet
            return None

    async def push(self, items: list[Item]) -> None:
        """Store messages; those whose transaction ids are stored already are not stored again."""
        for pushed in await self._buffer.push(items):
            if pushed.status == "full":
                raise Full(f"queue {items[0].queue} is full")
