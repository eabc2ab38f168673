"""`Client.admin`: what an operator asks of a broker."""

from datetime import datetime
from typing import Any, TypedDict, Unpack

from penstock.client.brokers import Brokers
from penstock.client.queues import iso_time
from penstock.client.results import (
    ConsumerHealth,
    DeadLetters,
    GroupPartition,
    QueueDescription,
    QueueSummary,
    ScheduledMessages,
    Seek,
)
from penstock.protocol.answers import Body, GroupSummary

GROUPS, DEAD_LETTERS, SCHEDULED = "/api/v1/consumer-groups", "/api/v1/dlq", "/api/v1/scheduled"
QUEUES_PER_PAGE = 1000


class _Queues(Body):
    queues: list[QueueSummary]
    next: str | None = None  # the cursor of the page behind


class _Consumers(Body):
    consumers: list[ConsumerHealth]


class _Partitions(Body):
    partitions: list[GroupPartition]


class _Deleted(Body):
    deleted: int = 0
    deleted_partitions: int = 0
    requeued: int = 0


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

    async def queues(self) -> list[QueueSummary]:
        """Return all queues with their message counts, the newest first."""
        queues: list[QueueSummary] = []
        query: dict[str, Any] = {"limit": QUEUES_PER_PAGE}
        while True:
            target = "/api/v1/resources/queues"
            page = await self._brokers.json(_Queues, "GET", target, **query)
            queues += page.queues
            if page.next is None:
                return queues
            query["cursor"] = page.next

    async def describe(self, queue: str) -> QueueDescription:
        """Return the options, partitions and message counts of a queue."""
        return await self._brokers.json(QueueDescription, "GET", "/api/v1/status/queues", queue)

    async def delete_queue(self, queue: str) -> bool:
        """Delete a queue with all its messages. Returns False if it did not exist."""
        target = "/api/v1/resources/queues"
        answer = await self._brokers.json(dict[str, Any], "DELETE", target, queue)
        return bool(answer["existed"])

    async def clear(self, queue: str, partition: str | None = None) -> int:
        """Delete all messages of a queue, or of one partition, and keep the queue. Returns how many
        were deleted.
        """
        answer = await self._brokers.json(
            _Deleted, "DELETE", "/api/v1/queues", queue, "clear", partition=partition
        )
        return answer.deleted

    async def groups(self) -> list[GroupSummary]:
        """Return the consumer groups of all queues with their lag."""
        return await self._brokers.json(list[GroupSummary], "GET", GROUPS)

    async def group(self, group: str) -> list[GroupPartition]:
        """Return the lag of a consumer group in each partition."""
        answer = await self._brokers.json(dict[str, _Partitions], "GET", GROUPS, group)
        for queue, about in answer.items():
            for partition in about.partitions:
                partition.queue = queue
        return [partition for about in answer.values() for partition in about.partitions]

    async def consumers(
        self, queue: str | None = None, *, group: str | None = None
    ) -> list[ConsumerHealth]:
        """Return the running consumers of all clients: messages in flight, counts, last error."""
        answer = await self._brokers.json(
            _Consumers, "GET", "/api/v1/consumers", queue=queue, group=group
        )
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
        return await self._brokers.json(
            Seek, "POST", GROUPS, group, "queues", queue, "seek", body=body, again=True
        )

    async def delete_group(self, group: str, queue: str | None = None) -> int:
        """Delete a consumer group and its cursors, on one queue or on all. Returns the number of
        partitions it had a cursor in.
        """
        of = ("queues", queue) if queue else ()
        answer = await self._brokers.json(_Deleted, "DELETE", GROUPS, group, *of)
        return answer.deleted_partitions

    async def dead_letters(
        self,
        queue: str | None = None,
        *,
        limit: int = 100,
        before: int | None = None,
        **which: Unpack[DeadLetterFilter],
    ) -> DeadLetters:
        """Return a page of dead letters, newest first. For the next page, pass the `dlq_id` of the
        last one as `before`.
        """
        query = _filter(queue, **which)
        return await self._brokers.json(
            DeadLetters, "GET", DEAD_LETTERS, **query, limit=limit, before=before
        )

    async def requeue(
        self, queue: str | None = None, *, id: int | None = None, **which: Unpack[DeadLetterFilter]
    ) -> int:
        """Deliver dead letters again, to the groups they failed in: all that match, or the one with
        the `dlq_id` given as `id`. Returns how many.
        """
        query = _filter(queue, **which)
        answer = await self._brokers.json(_Deleted, "POST", DEAD_LETTERS, "requeue", **query, id=id)
        return answer.requeued

    async def purge(
        self, queue: str | None = None, *, id: int | None = None, **which: Unpack[DeadLetterFilter]
    ) -> int:
        """Delete the dead letters that match. Returns how many."""
        query = _filter(queue, **which)
        answer = await self._brokers.json(_Deleted, "DELETE", DEAD_LETTERS, **query, id=id)
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
        return await self._brokers.json(
            ScheduledMessages, "GET", SCHEDULED, **where, limit=limit, cursor=cursor
        )


def _filter(
    queue: str | None,
    *,
    group: str | None = None,
    partition: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> dict[str, Any]:
    times = {"from": iso_time(since), "to": iso_time(until)}
    return {"queue": queue, "consumerGroup": group, "partition": partition, **times}
