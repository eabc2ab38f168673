"""`Client.admin`, `Client.schedules` and `Client.routes`: the operations of an operator."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict, Unpack

from penstock.client.brokers import Brokers
from penstock.client.messages import Address
from penstock.client.queues import iso_time
from penstock.contract import operations
from penstock.contract.consumers import ConsumerHealth
from penstock.contract.dead_letters import DeadLetters
from penstock.contract.groups import Group, GroupPosition, Seek
from penstock.contract.messages import ScheduledMessages
from penstock.contract.queues import Queue, QueueDetails, QueuePartition
from penstock.contract.routes import RoutePushed, RouteStatus
from penstock.contract.schedules import Schedule, ScheduleRun
from penstock.contract.topics import TopicMove
from penstock.errors import Conflict, InvalidRequest
from penstock.protocol.headers import check as check_headers
from penstock.protocol.names import DEFAULT_PARTITION
from penstock.protocol.payload import encode_payload

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


class Schedules:
    """The schedules of the broker."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def list(self) -> list[Schedule]:
        """Return all schedules, sorted by name."""
        return (await self._brokers.call(operations.LIST_SCHEDULES)).schedules

    async def get(self, name: str) -> Schedule:
        """Return a schedule with its next and last runs. Raises `NotFound` if it does not exist."""
        return await self._brokers.call(operations.GET_SCHEDULE, name)

    async def create(
        self,
        name: str,
        *,
        cron: str,
        queue: str | Address,
        payload: Any = None,
        timezone: str = "UTC",
        headers: Mapping[str, str] | None = None,
        catch_up: Literal["none", "one", "all"] = "one",
        paused: bool = False,
    ) -> Schedule:
        """Create a schedule, or replace the one with this name. The payload is pushed to `queue` at
        the times of `cron` in `timezone`. `catch_up` decides what happens to times that passed
        while no broker was running: push nothing, one message, or all of them.
        """
        where = Address.parse(queue)
        if where.group is not None:
            raise InvalidRequest(f"a schedule pushes to a queue, and {queue!s} names a group")
        if headers:
            check_headers(headers)
        body = {
            "cron": cron,
            "timezone": timezone,
            "queue": where.queue,
            "partition": where.partition or DEFAULT_PARTITION,
            "payload": encode_payload(payload),
            "headers": dict(headers) if headers else None,
            "catchUp": catch_up,
            "paused": paused,
        }
        return await self._brokers.call(operations.PUT_SCHEDULE, name, body=body)

    async def pause(self, name: str) -> Schedule:
        """Pause the schedule until `resume`."""
        return await self._brokers.call(operations.CONTROL_SCHEDULE, name, "pause")

    async def resume(self, name: str) -> Schedule:
        """Resume the schedule. Runs that were due while it was paused are skipped."""
        return await self._brokers.call(operations.CONTROL_SCHEDULE, name, "resume")

    async def run(self, name: str) -> ScheduleRun:
        """Push the message now. The next runs do not change."""
        return await self._brokers.call(operations.RUN_SCHEDULE, name)

    async def delete(self, name: str) -> None:
        """Delete the schedule. Messages it has pushed are kept."""
        await self._brokers.call(operations.DELETE_SCHEDULE, name)


class Routes:
    """The export routes of the broker."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def list(self) -> list[RouteStatus]:
        """Return all routes with their status."""
        return (await self._brokers.call(operations.LIST_ROUTES)).routes

    async def get(self, name: str) -> RouteStatus:
        """Return the status of a route. Raises `NotFound` if it does not exist."""
        return await self._brokers.call(operations.GET_ROUTE, name)

    async def create(
        self,
        name: str,
        *,
        destination: Mapping[str, Any],
        source: Mapping[str, Any] | str | None = None,
        batch: Mapping[str, Any] | None = None,
        queue: Mapping[str, Any] | None = None,
    ) -> RouteStatus:
        """Create a route. `destination`, `source`, `batch` and `queue` are those of the
        configuration file; see "Export" in the reference.
        """
        given = {"destination": destination, "source": source, "batch": batch, "queue": queue}
        body = {"name": name} | {part: value for part, value in given.items() if value is not None}
        return await self._brokers.call(operations.CREATE_ROUTE, body=body)

    async def push(self, name: str, records: Sequence[Any]) -> RoutePushed:
        """Add records to the route's send queue. A record is anything that JSON can express."""
        body = {"records": [encode_payload(record) for record in records]}
        return await self._brokers.call(operations.PUSH_TO_ROUTE, name, body=body)

    async def pause(self, name: str) -> RouteStatus:
        """Pause sending."""
        return await self._brokers.call(operations.CONTROL_ROUTE, name, "pause")

    async def resume(self, name: str) -> RouteStatus:
        """Resume sending. It also ends a drain."""
        return await self._brokers.call(operations.CONTROL_ROUTE, name, "resume")

    async def drain(self, name: str) -> RouteStatus:
        """Accept no new records and deliver the queued ones."""
        return await self._brokers.call(operations.CONTROL_ROUTE, name, "drain")

    async def purge(self, name: str) -> int:
        """Drop all queued records. Returns how many."""
        return (await self._brokers.call(operations.PURGE_ROUTE, name)).records

    async def replay(self, name: str) -> int:
        """Put the route's dead letters back into its send queue. Returns how many."""
        return (await self._brokers.call(operations.REPLAY_ROUTE, name)).records

    async def delete(self, name: str, *, force: bool = False) -> None:
        """Stop and delete the route. With `force`, drop undelivered records with it."""
        forced = "true" if force else None
        await self._brokers.call(operations.DELETE_ROUTE, name, force=forced)


def _filter(queue: str | None, **which: Unpack[DeadLetterFilter]) -> dict[str, Any]:
    times = {"from": iso_time(which.get("since")), "to": iso_time(which.get("until"))}
    place = {"queue": queue, "partition": which.get("partition")}
    return {**place, "consumerGroup": which.get("group"), **times}
