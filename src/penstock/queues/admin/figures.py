"""Count the messages of queues and groups.

This module defines every count that API, CLI, metrics and Console show. docs/reference/queues.md
(Counts) documents them. One statement reads them from counters and live leases, as of one moment.
Its cost does not depend on the number of messages. For every group

    pushed = completed + dead_letters + dropped + waiting + skipped

`skipped` is the remainder: messages from before the group began or that a seek skipped, less those
that were redelivered after a seek back or a retry by hand.
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
SORTED = " ORDER BY q.name, g.name"
MATCHING = (
    "SELECT count(*) FROM queues WHERE deleted_at IS NULL AND strpos(lower(name), lower($1)) > 0"
)
BY_NAME = query("queues_by_name")
# A page of the queues whose names contain $1. `by_figure` puts the count that sorts them before the
# name. $2 at most so many, $3 after so many.
BY_FIGURE = f"""
  SELECT id FROM ({ALL_FIGURES}) f WHERE strpos(lower(name), lower($1)) > 0
   GROUP BY id, name, namespace, task ORDER BY name LIMIT $2 OFFSET $3"""
ORDERS = {  # of BY_FIGURE: properties of `QueueFigures`, over the rows of a queue
    "namespace": "namespace",
    "task": "task",
    "waiting": "max(stored - consumed)",
    "leased": "sum(leased)",
    "stored": "max(stored)",
    "pushed": "max(pushed)",
    "groups": "count(group_id)",
    "dead_letters": "max(queue_letters)",
}
MAX_SOUGHT = 1000  # for more queues, reading all of them is faster
ROWS_PER_SLICE = 500  # some milliseconds
BACKLOG = query("backlog")
OLDEST = query("oldest_messages")
LOOKED_AT_PARTITIONS = 200  # per group, to find its oldest message


class GroupFigures(msgspec.Struct):
    """The counts of a group. Queue mode is a group whose `name` is QUEUE_MODE."""

    id: int
    name: str
    waiting: int  # stored and not finished, leased ones included: the lag
    leased: int  # delivered under a lease that has not expired
    completed: int  # acknowledged with success, or delivered with auto-ack; ever
    failed: int  # attempts: answered `failed`, or the lease expired; ever
    dead_letters: int  # now
    dropped: int  # never completed and not a dead letter; ever
    skipped: int  # negative: more were redelivered than skipped


class QueueFigures(msgspec.Struct):
    """The counts of a queue and its groups."""

    id: int
    name: str
    namespace: str
    task: str
    pushed: int  # accepted and stored, ever
    stored: int  # now
    dead_letters: int  # now, also of deleted groups
    scheduled: int  # delayed; `pushed` does not count them yet
    groups: list[GroupFigures]

    @property
    def leading(self) -> GroupFigures | None:
        """Return the group that represents the queue: queue mode, or the largest lag."""
        return max(
            self.groups, key=lambda group: (group.name == QUEUE_MODE, group.waiting), default=None
        )

    def seen_by(self, group: str | None) -> GroupFigures | None:
        """Return the group of that name, or the leading one without a name."""
        if group is None:
            return self.leading
        return next((one for one in self.groups if one.name == group), None)

    @property
    def waiting(self) -> int:
        """Return the largest lag of the groups, or `stored` without groups."""
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
    """The partitions of a group that have waiting messages, and the oldest message."""

    partitions: int = 0  # with waiting messages, among those that were read
    oldest: datetime | None = None  # when the oldest message was pushed
    seconds: float | None = None  # since then


class Figures:
    """Reads the counters of all queues, or of some."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def queues(self, ids: list[int] | None = None) -> list[QueueFigures]:
        """Return queues and their groups by name. Other tasks run in between."""
        if ids is not None and len(ids) <= MAX_SOUGHT:
            return await self._read(await self._database.browse(FIGURES + SORTED, ids))
        queues = await self._read(await self._database.browse(ALL_FIGURES + SORTED))
        wanted = None if ids is None else set(ids)
        return [queue for queue in queues if wanted is None or queue.id in wanted]

    async def count(self, words: str) -> int:
        """Count the queues whose names contain `words`."""
        return int((await self._database.browse(MATCHING, words))[0][0])

    async def by_name(
        self, words: str, limit: int, offset: int, after: str | None = None, *, descending: bool
    ) -> list[tuple[int, str]]:
        """Return a page of the queues whose names contain `words`: their ids and names. `after` is
        the name that ends the page before.
        """
        sql = BY_NAME
        if descending:
            sql = sql.replace("q.name > ", "q.name < ").replace("BY q.name", "BY q.name DESC")
        rows = await self._database.browse(sql, words, after, limit, offset)
        return [(row["id"], row["name"]) for row in rows]

    async def by_figure(
        self, figure: str, words: str, limit: int, offset: int, *, descending: bool
    ) -> list[int]:
        """Return the ids of a page of queues, sorted by one of `ORDERS` in the database."""
        order = ORDERS[figure] + (" DESC" if descending else "")
        sql = BY_FIGURE.replace("BY name", f"BY {order}, name")
        return [row["id"] for row in await self._database.browse(sql, words, limit, offset)]

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
        """Return the age of the oldest waiting message in seconds: by group id, and by queue id for
        queues without groups. Reads at most `most` of each.
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
        """Return the backlog of these groups, from up to `max_partitions` partitions each."""
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
