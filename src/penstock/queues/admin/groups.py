"""Consumer groups: list, lag, describe, seek, delete, subscription.

Counts are those of `figures`: exact, at the same cost for ten partitions and for a
million. The time lag looks at the partitions that have something for the group, at most 10,000 of
them: it is exact up to that many lagging partitions, and "at least" beyond.

What walks all partitions of a queue because it must (seek and its preview, delete) does so in
steps, each a short call.
"""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

from penstock.contract.groups import Group, GroupDeleted, GroupPosition, Seek
from penstock.contract.noun import of
from penstock.database import Database, struct_of
from penstock.errors import NotFound
from penstock.io.tasks import slices
from penstock.queues.admin.figures import Figures, GroupBacklog, GroupFigures
from penstock.queues.checks import check_text
from penstock.queues.consumers import ConsumerConnections
from penstock.queues.context import QueueContext
from penstock.queues.schema import query

PARTITIONS_PER_STEP = 1000
MAX_LAGGING_PARTITIONS = 10_000  # looked at for a time lag
ROWS_PER_SLICE = 250  # some milliseconds
LATE_SECONDS = 300.0  # messages that wait longer make a group late

LAG = query("group_lag")
LISTING = query("groups")
DESCRIBE = query("group_partitions")
LAGGING = query("lagging_partitions")
PREVIEW = query("seek_preview")


class QueueGroups:
    def __init__(
        self, context: QueueContext, figures: Figures, consumers: ConsumerConnections
    ) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._waiting = context.waiting
        self._figures, self._consumers = figures, consumers

    async def listing(
        self,
        group: str | None = None,
        queue: str | None = None,
        limit: int | None = None,
        after: tuple[str, str] = ("", ""),
    ) -> list[Group]:
        """Return one entry per queue and group, by name, after a queue and group; without a limit
        all of them.
        """
        rows = await self._database.browse(LISTING, group, queue, limit, *after)
        if not rows:
            return []
        queues = await self._figures.queues(sorted({row["queue_id"] for row in rows}))
        figures = {one.id: one for queue in queues for one in queue.groups}
        members = await self._consumers.members()
        behind = [row["id"] for row in rows if row["id"] in figures and figures[row["id"]].waiting]
        backlogs = await self._figures.backlogs(behind, MAX_LAGGING_PARTITIONS)
        return [
            _status(
                row,
                figures[row["id"]],
                backlogs.get(row["id"], GroupBacklog()),
                members.get((row["queue"], row["name"]), 0),
            )
            async for some in slices(rows, ROWS_PER_SLICE)
            for row in some
            if row["id"] in figures  # else it was deleted meanwhile
        ]

    async def lag(self, queue: str, group: str) -> int:
        """Return the number of messages that the group has not finished."""
        rows = await self._database.browse(LAG, group, queue)
        if not rows:
            raise NotFound(f"queue '{queue}' has no group '{group}'")
        return int(rows[0]["lag"])

    async def lagging(
        self, min_lag_seconds: float = 3600, limit: int = 1000
    ) -> list[GroupPosition]:
        """Return partitions whose oldest unconsumed message is older than this, the worst first."""
        rows = await self._database.browse(LAGGING, float(min_lag_seconds), limit)
        return [self._partition(row) for row in rows]

    async def describe(
        self, group: str, limit: int = 10_000, offset: int = 0
    ) -> list[GroupPosition]:
        """Return the group's partitions in all queues, by queue."""
        rows = await self._database.browse(DESCRIBE, group, limit, offset)
        return [self._partition(row) for row in rows]

    def _partition(self, row: Any) -> GroupPosition:
        partition = self._catalog.partition_uuid(row["partition_id"])
        lease = row["lease_id"] and str(row["lease_id"])
        return struct_of(
            GroupPosition, row, waiting=row["lag"], partition_id=partition, lease_id=lease
        )

    async def delete(
        self, group: str, queue: str | None = None, *, metadata: bool = True
    ) -> GroupDeleted:
        """Forget a group; without `metadata` its subscription stays and the next pop starts from
        there again.

        It is gone with the first call; what it left in a million partitions is removed in steps
        (`Upkeep.purge` continues if this process ends before)."""
        check_text("consumerGroup", group)
        check_text("queue", queue or "")
        rows = await self._database.fetch(
            "SELECT queue_drop_groups($1, $2, $3)", group, queue, not metadata
        )
        self._waiting.changed()
        deleted, ids = 0, rows[0][0]
        for number in ids:
            async for removed in forgotten(self._database, number):
                deleted += removed
        return GroupDeleted(group, queue, deleted, metadata and bool(ids))

    async def subscription(self, group: str, moment: datetime) -> int:
        """Change where the group starts in partitions it has not met yet; in how many queues."""
        check_text("consumerGroup", group)
        rows = await self._database.fetch("SELECT queue_resubscribe($1, $2)", group, moment)
        return int(rows[0][0])

    async def seek(
        self,
        group: str,
        queue: str,
        *,
        partition: str | None = None,
        moment: datetime | None = None,
        to: str = "end",
    ) -> Seek:
        """Move a group to after `moment` or `to` an end. Its leases there are dropped."""
        group_id, queue_id = await self._find(group, queue)
        target = ("time" if moment is not None else to, moment)
        moved, last = 0, None
        if partition is not None:
            number = await self._catalog.partition(queue, partition)
            if number is None:
                raise NotFound(f"Partition not found: {partition} of queue {queue}")
            moved, last = await self._seek(group_id, [number], target)
        else:
            async for numbers in self._walk(queue_id):
                done, last = await self._seek(group_id, numbers, target)
                moved += done
        self._waiting.wake(queue, 1000, group)
        return Seek(
            group=group,
            queue=queue,
            partition=partition,
            to=None if moment is not None else to,
            at=moment,
            partitions=moved,
            position=last,
        )

    async def preview(
        self, group: str, queue: str, *, moment: datetime | None = None, to: str = "end"
    ) -> Seek:
        """Count what a seek would do, and move nothing."""
        group_id, queue_id = await self._find(group, queue)
        partitions = again = skipped = 0
        async for numbers in self._walk(queue_id):
            target = "time" if moment is not None else to
            (row,) = await self._database.browse(PREVIEW, group_id, numbers, target, moment)
            partitions += row["partitions"]
            again += int(row["again"])
            skipped += int(row["skipped"])
        return Seek(
            group=group,
            queue=queue,
            to=None if moment is not None else to,
            at=moment,
            partitions=partitions,
            dry_run=True,
            redelivered=again,
            skipped=skipped,
        )

    async def _find(self, group: str, queue: str) -> tuple[int, int]:
        rows = await self._database.read(
            """SELECT g.id, g.queue_id FROM groups g JOIN queues q ON q.id = g.queue_id
                WHERE q.deleted_at IS NULL AND g.name = $1 AND q.name = $2""",
            group,
            queue,
        )
        if not rows:
            raise NotFound(f"queue '{queue}' has no group '{group}'")
        return rows[0]["id"], rows[0]["queue_id"]

    async def _walk(self, queue_id: int) -> AsyncIterator[list[int]]:
        after = 0
        while step := await self._database.read(
            """SELECT id FROM partitions WHERE queue_id = $1 AND id > $2
                ORDER BY queue_id, id LIMIT $3""",
            *(queue_id, after, PARTITIONS_PER_STEP),
        ):
            numbers = [row["id"] for row in step]
            yield numbers
            after = numbers[-1]

    async def _seek(
        self, group_id: int, partitions: list[int], target: tuple[str, datetime | None]
    ) -> tuple[int, int | None]:
        (row,) = await self._database.fetch(
            "SELECT * FROM queue_seek($1, $2, $3, $4)", group_id, partitions, *target
        )
        return row["moved"], row["last"]


def _status(row: Any, figures: GroupFigures, backlog: GroupBacklog, members: int) -> Group:
    # Messages wait and none of its cursors is due: a fault, which `QueueUpkeep.heal` repairs.
    stuck = (
        figures.waiting > 0
        and not backlog.partitions
        and row["mode"] is not None
        and not row["discovering"]
    )
    state = state_of(members, late=(backlog.seconds or 0.0) > LATE_SECONDS or stuck)
    return of(
        Group,
        figures,
        queue=row["queue"],
        lag_seconds=int(backlog.seconds or 0),
        lagging_partitions=backlog.partitions,
        members=members,
        state=state,
        mode=row["mode"],
        start_at=row["start_at"],
        created_at=row["created_at"],
        discovering=row["discovering"],
    )


def state_of(members: int, *, late: bool) -> str:
    """Return Empty without consumers, Lagging after a wait of LATE_SECONDS, or else Stable."""
    return "Empty" if not members else "Lagging" if late else "Stable"


async def forgotten(database: Database, group: int) -> AsyncIterator[int]:
    """Remove what a deleted group left in partitions, in steps; how many each removed."""
    more = True
    while more:
        (row,) = await database.fetch(
            "SELECT * FROM queue_forget($1, $2)", group, PARTITIONS_PER_STEP
        )
        more = row["more"]
        yield row["removed"]
