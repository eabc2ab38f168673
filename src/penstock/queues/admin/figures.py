"""How many messages are where: THE definition of every figure of queues and groups. API, CLI,
metrics and Console show these and count nothing themselves; docs/reference/queues.md (Counts) has
the same table for people.

All of it is read from counters that the functions keep and from the (few) live leases, in one
statement and as of one moment, and costs the same for ten messages and for a billion. For every
group

    pushed = completed + dead_letters + dropped + waiting + skipped

`skipped` is what the others leave over: messages from before the group began and those it was moved
past by a seek, less those it was given once more (a seek back, a retry by hand).
"""

from datetime import datetime
from typing import Any

import msgspec

from penstock.database import Database, struct_of
from penstock.io.tasks import slices
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.schema import query

FIGURES = query("figures")
ALL_FIGURES = FIGURES.replace("= ANY ($1::int[])", "IS NOT NULL")
MAX_SOUGHT = 1000  # for more queues, reading all is faster
ROWS_PER_SLICE = 500  # some milliseconds
BACKLOG = query("backlog")
OLDEST = query("oldest_messages")
LOOKED_AT_PARTITIONS = 200  # of a group, for how long its oldest message waits


class GroupFigures(msgspec.Struct):
    """A group of a queue; queue mode is one too (`name` is QUEUE_MODE)."""

    id: int
    name: str
    waiting: int  # stored and not finished with: the lag. Those leased are among them
    leased: int  # delivered and not answered, under a lease that has not expired
    completed: int  # acknowledged with success, or delivered with auto-ack; ever
    failed: int  # attempts: answered `failed`, or the lease expired; ever
    dead_letters: int  # that exist now
    dropped: int  # will never be completed and left no dead letter; ever
    skipped: int  # negative: more were given once more than skipped


class QueueFigures(msgspec.Struct):
    """A queue with its groups."""

    id: int
    name: str
    namespace: str
    task: str
    pushed: int  # accepted and stored, ever
    stored: int  # there now
    dead_letters: int  # that exist now, also those of groups that were deleted
    scheduled: int  # for later, not pushed yet as far as the other figures go
    groups: list[GroupFigures]

    @property
    def leading(self) -> GroupFigures | None:
        """The group that speaks for the queue: queue mode, or the one with the largest lag."""
        return max(
            self.groups, key=lambda group: (group.name == QUEUE_MODE, group.waiting), default=None
        )

    def seen_by(self, group: str | None) -> GroupFigures | None:
        """The group of that name, or without a name the leading one."""
        if group is None:
            return self.leading
        return next((one for one in self.groups if one.name == group), None)

    @property
    def waiting(self) -> int:
        """The largest lag of its groups; all that is stored while it has none."""
        return max((group.waiting for group in self.groups), default=self.stored)

    @property
    def leased(self) -> int:
        return sum(group.leased for group in self.groups)

    @property
    def failed(self) -> int:
        return sum(group.failed for group in self.groups)

    @property
    def dropped(self) -> int:
        return sum(group.dropped for group in self.groups)


class GroupBacklog(msgspec.Struct):
    """What waits for a group, by partition and age."""

    partitions: int = 0  # that have something for it, up to as many as were looked at
    oldest: datetime | None = None  # when the oldest of it was pushed
    seconds: float | None = None  # how long ago that is


class Figures:
    """Reads the counters of all queues, or of some."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def queues(self, ids: list[int] | None = None) -> list[QueueFigures]:
        """By name, and so are their groups. There may be many: others get a turn in between."""
        if ids is not None and len(ids) <= MAX_SOUGHT:
            return await self._read(await self._database.browse(FIGURES, ids))
        queues = await self._read(await self._database.browse(ALL_FIGURES))
        wanted = None if ids is None else set(ids)
        return [queue for queue in queues if wanted is None or queue.id in wanted]

    async def _read(self, rows: list[Any]) -> list[QueueFigures]:
        queues: dict[int, QueueFigures] = {}
        async for some in slices(rows, ROWS_PER_SLICE):
            for row in some:
                queue = queues.get(row["id"])
                if queue is None:
                    queue = queues[row["id"]] = struct_of(
                        QueueFigures, row, dead_letters=row["queue_letters"], groups=[]
                    )
                if row["group_id"] is not None:
                    queue.groups.append(_group(row))
        return list(queues.values())

    async def waits(
        self, queues: list[QueueFigures], most: int | None = None
    ) -> tuple[dict[int, float | None], dict[int, float]]:
        """For how many seconds the oldest message waits: by the group that is behind, and by the
        queue that no group reads; of `most` each. Who is not there was not looked at.
        """
        behind = [group.id for queue in queues for group in queue.groups if group.waiting][:most]
        unread = [queue.id for queue in queues if queue.stored and not queue.groups][:most]
        backlogs = await self.backlogs(behind, LOOKED_AT_PARTITIONS)
        rows = await self._database.browse(OLDEST, unread) if unread else []
        return (
            {group: backlog.seconds for group, backlog in backlogs.items()},
            {row["id"]: max(0.0, row["seconds"]) for row in rows},
        )

    async def backlogs(self, groups: list[int], max_partitions: int) -> dict[int, GroupBacklog]:
        """What waits for these groups, looked for in up to so many of their lagging partitions."""
        rows = await self._database.browse(BACKLOG, groups, max_partitions) if groups else []
        return {
            row["group_id"]: GroupBacklog(
                row["partitions"],
                row["oldest"],
                max(0.0, (row["now"] - row["oldest"]).total_seconds()) if row["oldest"] else None,
            )
            for row in rows
        }


def _group(row: Any) -> GroupFigures:
    waiting = row["stored"] - row["consumed"]
    accounted = row["completed"] + row["letters"] + row["dropped"] + waiting
    return struct_of(
        GroupFigures,
        row,
        id=row["group_id"],
        name=row["group_name"],
        waiting=waiting,
        dead_letters=row["letters"],
        skipped=row["pushed"] - accounted,
    )
