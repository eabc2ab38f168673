"""`Client.admin`: the operations of an operator."""

import asyncio
from datetime import datetime
from typing import Any, TypedDict, Unpack

from penstock.client.brokers import Brokers
from penstock.client.queues import iso_time
from penstock.contract import operations
from penstock.contract.consumers import ConsumerHealth
from penstock.contract.dead_letters import DeadLetters
from penstock.contract.groups import Group, GroupPosition, Seek
from penstock.contract.messages import ScheduledMessages
from penstock.contract.queues import Queue, QueueDetails, QueuePartition
from penstock.contract.topics import TopicMove
from penstock.errors import Conflict

QUEUES_PER_PAGE = 10_000
GROUPS_PER_PAGE = 1000
MOVE_SECONDS = 0.2  # between two requests for the state of a move


class DeadLetterFilter(TypedDict, total=False):
    """Which dead letters, of a queue or of all."""

    group: str | None  # those of this consumer group
    partition: str | None  # those of this partition
    since: datetime | None  # those that failed at this time or later
    until: datetime | None  # those that failed before this time


class AdminClient:
    """Queues, groups, consumers, dead letters and delayed messages of the broker, for operators."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def queues(self) -> list[Queue]:
        """Return all queues with their counts and rates, by name."""
        queues: list[Queue] = []
        while True:
            page = await self._brokers.call(
                operations.LIST_QUEUES,
                limit=QUEUES_PER_PAGE,
                offset=len(queues),
                recent="true" if queues else None,
            )
            queues += page.queues
            if not page.queues or len(queues) >= page.total:
                return queues

    async def describe(self, queue: str) -> QueueDetails:
        """Return the options, consumer groups and counts of a queue."""
        return await self._brokers.call(operations.GET_QUEUE, queue)

    async def partitions(
        self, queue: str, *, group: str = "", limit: int = 50, offset: int = 0
    ) -> list[QueuePartition]:
        """Return partitions of a queue as a consumer group sees them, largest lag first."""
        answer = await self._brokers.call(
            operations.LIST_QUEUE_PARTITIONS, queue, group=group, limit=limit, offset=offset
        )
        return answer.partitions

    async def delete_queue(self, queue: str) -> bool:
        """Delete a queue with all its messages. Returns False if it did not exist."""
        return (await self._brokers.call(operations.DELETE_QUEUE, queue)).existed

    async def clear(self, queue: str, partition: str | None = None) -> int:
        """Delete all messages of a queue, or of one partition, and keep the queue. Returns how many
        were deleted.
        """
        answer = await self._brokers.call(operations.CLEAR_QUEUE, queue, partition=partition)
        return answer.deleted

    async def move_topic(self, topic: str) -> None:
        """Turn a local topic into a shared one, and return when it is. Offsets and groups are kept.
        Raises `Conflict` if that is not possible.
        """
        move: TopicMove | None = await self._brokers.call(operations.MOVE_TOPIC, topic)
        while move is not None and move.state != "shared":
            if move.state == "failed":
                raise Conflict(f"topic {topic!r} was not moved: {move.problem}")
            await asyncio.sleep(MOVE_SECONDS)
            move = (await self._brokers.call(operations.GET_TOPIC, topic)).move

    async def groups(self) -> list[Group]:
        """Return the consumer groups of all queues with their lag."""
        groups: list[Group] = []
        while True:
            last = (groups[-1].queue, groups[-1].name) if groups else ("", "")
            page = await self._brokers.call(
                operations.LIST_GROUPS,
                limit=GROUPS_PER_PAGE,
                afterQueue=last[0],
                afterGroup=last[1],
            )
            # A broker of release 0.2.0 has no pages: it always returns all groups.
            if not page or (page[-1].queue, page[-1].name) == last:
                return groups
            groups += page

    async def group(self, group: str) -> list[GroupPosition]:
        """Return the position of a consumer group in each partition."""
        queues = await self._brokers.call(operations.DESCRIBE_GROUP, group)
        return [position for queue in queues.values() for position in queue.partitions]

    async def consumers(
        self, queue: str | None = None, *, group: str | None = None
    ) -> list[ConsumerHealth]:
        """Return the running consumers of all clients: messages in flight, counts, last error."""
        answer = await self._brokers.call(operations.LIST_CONSUMERS, queue=queue, group=group)
        return answer.consumers

    async def seek(
        self, queue: str, group: str, to: datetime | str, *, dry_run: bool = False
    ) -> Seek:
        """Move a consumer group to a time, to "end" or to "beginning". With `dry_run`, nothing is
        moved and the result says how many messages would be redelivered or skipped.
        """
        body: dict[str, Any] = {"dryRun": True} if dry_run else {}
        if to == "end":
            body["toEnd"] = True
        elif to == "beginning":
            body["toBeginning"] = True
        else:
            body["timestamp"] = iso_time(to)
        return await self._brokers.call(operations.SEEK, group, queue, body=body)

    async def delete_group(self, group: str, queue: str | None = None) -> int:
        """Delete a consumer group and its cursors, on one queue or on all. Returns the number of
        partitions it had a cursor in.
        """
        where = (group, queue) if queue else (group,)
        return (await self._brokers.call(operations.DELETE_GROUP, *where)).partitions

    async def dead_letters(
        self,
        queue: str | None = None,
        *,
        limit: int = 100,
        before: int | None = None,
        **which: Unpack[DeadLetterFilter],
    ) -> DeadLetters:
        """Return a page of dead letters, newest first. For the next page, pass the `number` of the
        last one as `before`.
        """
        query = _filter(queue, **which)
        return await self._brokers.call(
            operations.LIST_DEAD_LETTERS, **query, limit=limit, before=before
        )

    async def requeue(
        self, queue: str | None = None, *, id: int | None = None, **which: Unpack[DeadLetterFilter]
    ) -> int:
        """Deliver dead letters again, to the groups they failed in: all that match, or the one with
        the `number` given as `id`. Returns how many.
        """
        query = _filter(queue, **which)
        answer = await self._brokers.call(operations.REQUEUE_DEAD_LETTERS, **query, id=id)
        return answer.requeued

    async def purge(
        self, queue: str | None = None, *, id: int | None = None, **which: Unpack[DeadLetterFilter]
    ) -> int:
        """Delete the dead letters that match. Returns how many."""
        query = _filter(queue, **which)
        answer = await self._brokers.call(operations.PURGE_DEAD_LETTERS, **query, id=id)
        return answer.deleted

    async def scheduled(
        self,
        queue: str | None = None,
        *,
        partition: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> ScheduledMessages:
        """Return a page of delayed messages, next due first."""
        where: dict[str, Any] = {"queue": queue, "partition": partition}
        return await self._brokers.call(
            operations.LIST_SCHEDULED, **where, limit=limit, cursor=cursor
        )


def _filter(queue: str | None, **which: Unpack[DeadLetterFilter]) -> dict[str, Any]:
    times = {"from": iso_time(which.get("since")), "to": iso_time(which.get("until"))}
    place = {"queue": queue, "partition": which.get("partition")}
    return {**place, "consumerGroup": which.get("group"), **times}
