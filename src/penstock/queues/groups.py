"""Consumer groups: list, lag, describe, seek, delete, subscription.

The count of a group's lag is stored messages of the queue minus those the group settled, both kept
as counters, so it is exact and costs the same for ten partitions and for a million. The time lag
looks at the partitions that have something for the group, at most 10,000 of them: it is exact up
to that many lagging partitions, and "at least" beyond.

What walks all partitions of a queue because it must (seek and its preview, delete) does so in
steps, each a short call.
"""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

from penstock.database import Database
from penstock.errors import NotFound
from penstock.queues.catalog import Catalog, check_text
from penstock.queues.schema import query
from penstock.queues.signals import Signals

STEP = 1000  # partitions per call

LAG = query("group_lag")
LISTING = query("groups")
DESCRIBE = query("group_partitions")
LAGGING = query("lagging_partitions")
PREVIEW = query("seek_preview")


class Groups:
    def __init__(self, database: Database, catalog: Catalog, signals: Signals) -> None:
        self._database, self._catalog, self._signals = database, catalog, signals

    async def listing(
        self, group: str | None = None, queue: str | None = None
    ) -> list[dict[str, Any]]:
        """One entry per (group, queue) in the contract's shape, with the exact `totalLag`."""
        rows = await self._database.browse(LISTING, group, queue)
        members = await self._catalog.partition_counts([row["queue_id"] for row in rows])
        return [_entry(row, members[row["queue_id"]]) for row in rows]

    async def lag(self, queue: str, group: str) -> int:
        """Messages of the queue that the group has not settled."""
        rows = await self._database.browse(LAG, group, queue)
        if not rows:
            raise NotFound(f"queue '{queue}' has no group '{group}'")
        return int(rows[0]["lag"])

    async def lagging(
        self, min_lag_seconds: float = 3600, limit: int = 1000
    ) -> list[dict[str, Any]]:
        """Partitions whose oldest unconsumed message is older than this, the worst first."""
        await self._catalog.load_installation()
        rows = await self._database.browse(LAGGING, float(min_lag_seconds), limit)
        found = []
        for row in rows:
            seconds = (row["now"] - row["oldest"]).total_seconds()
            found.append(
                {
                    "consumer_group": row["group"],
                    "queue_name": row["queue"],
                    "partition_name": row["name"],
                    "partition_id": self._catalog.partition_uuid(row["id"]),
                    "worker_id": str(row["lease_id"]) if row["leased"] else None,
                    "offset_lag": _lag(row),
                    "time_lag_seconds": int(seconds),
                    "lag_hours": round(seconds / 3600, 2),
                    "oldest_unconsumed_at": row["oldest"],
                    "last_consumed_at": row["consumed_at"],
                }
            )
        return found

    async def describe(self, group: str, limit: int = 10_000, offset: int = 0) -> dict[str, Any]:
        """Per queue, its partitions as the group sees them."""
        rows = await self._database.browse(DESCRIBE, group, limit, offset)
        found: dict[str, Any] = {}
        for row in rows:
            found.setdefault(row["queue"], {"partitions": []})["partitions"].append(
                {
                    "partition": row["name"],
                    "workerId": str(row["lease_id"]) if row["leased"] else None,
                    "lastConsumedAt": row["consumed_at"],
                    "totalConsumed": row["consumed"],
                    "offsetLag": _lag(row),
                    "timeLagSeconds": int((row["now"] - row["oldest"]).total_seconds())
                    if row["oldest"]
                    else 0,
                    "leaseActive": bool(row["leased"]),
                }
            )
        return found

    async def delete(
        self, group: str, queue: str | None = None, *, metadata: bool = True
    ) -> dict[str, Any]:
        """Forget a group; without `metadata` its subscription stays and the next pop starts from
        there again.

        It is gone with the first call; what it left in a million partitions is removed in steps
        (`Upkeep.purge` goes on with them should we not get to the end)."""
        check_text("consumerGroup", group)
        check_text("queue", queue or "")
        rows = await self._database.fetch(
            "SELECT queue_drop_groups($1, $2, $3)", group, queue, not metadata
        )
        self._signals.changed()
        deleted, ids = 0, rows[0][0]
        for number in ids:
            more = True
            while more:
                row = (
                    await self._database.fetch("SELECT * FROM queue_forget($1, $2)", number, STEP)
                )[0]
                deleted, more = deleted + row["removed"], row["more"]
        found = {
            "success": True,
            "consumerGroup": group,
            "deletedPartitions": deleted,
            "metadataDeleted": metadata and bool(ids),
        }
        return found | ({"queueName": queue} if queue is not None else {})

    async def subscription(self, group: str, moment: datetime) -> dict[str, Any]:
        """Change where the group starts in partitions it has not met yet."""
        check_text("consumerGroup", group)
        rows = await self._database.fetch("SELECT queue_resubscribe($1, $2)", group, moment)
        return {
            "success": True,
            "consumerGroup": group,
            "newTimestamp": moment,
            "rowsUpdated": rows[0][0],
        }

    async def seek(
        self,
        group: str,
        queue: str,
        *,
        partition: str | None = None,
        moment: datetime | None = None,
        to: str = "end",
    ) -> dict[str, Any]:
        """Move a group to after `moment`, or `to` the "end" or the "beginning". Its leases there
        are dropped.
        """
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
        self._signals.available(queue, 1000, group)
        return {
            "success": True,
            "consumerGroup": group,
            "queueName": queue,
            "partitionName": partition,
            "seekToEnd": moment is None and to == "end",
            "targetTimestamp": moment,
            "partitionsUpdated": moved,
            "cursorMovedTo": last,
        }

    async def preview(
        self, group: str, queue: str, *, moment: datetime | None = None, to: str = "end"
    ) -> dict[str, Any]:
        """What `seek` would do: how many settled messages come again, how many open ones are
        skipped.
        """
        group_id, queue_id = await self._find(group, queue)
        partitions = again = skipped = 0
        async for numbers in self._walk(queue_id):
            row = (
                await self._database.browse(
                    PREVIEW, group_id, numbers, "time" if moment is not None else to, moment
                )
            )[0]
            partitions += row["partitions"]
            again += int(row["again"])
            skipped += int(row["skipped"])
        return {
            "success": True,
            "dryRun": True,
            "consumerGroup": group,
            "queueName": queue,
            "seekToEnd": moment is None and to == "end",
            "targetTimestamp": moment,
            "partitionsUpdated": partitions,
            "redelivered": again,
            "skipped": skipped,
        }

    async def _find(self, group: str, queue: str) -> tuple[int, int]:
        """The numbers of a group and its queue."""
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
        """The partitions of a queue, in steps."""
        after = 0
        while step := await self._database.read(
            """SELECT id FROM partitions WHERE queue_id = $1 AND id > $2
                ORDER BY queue_id, id LIMIT $3""",
            queue_id,
            after,
            STEP,
        ):
            numbers = [row["id"] for row in step]
            yield numbers
            after = numbers[-1]

    async def _seek(
        self, group_id: int, partitions: list[int], target: tuple[str, datetime | None]
    ) -> tuple[int, int | None]:
        row = (
            await self._database.fetch(
                "SELECT * FROM queue_seek($1, $2, $3, $4)", group_id, partitions, *target
            )
        )[0]
        return row["moved"], row["last"]


def _lag(row: Any) -> int:
    return int(max(0, row["head"] - max(row["position"], row["below"]) - row["beyond"]))


def _entry(row: Any, members: int) -> dict[str, Any]:
    behind = (row["now"] - row["oldest"]).total_seconds() if row["oldest"] else 0.0
    # Messages that no partition has for the group: it is behind and does not see it (`Upkeep.heal`
    # mends that).
    blind = (
        row["lag"] > 0
        and not row["partitions"]
        and row["mode"] is not None
        and not row["discovering"]
    )
    late = behind > 300 or blind
    state = "Dead" if late and not row["done"] else "Lagging" if late else "Stable"
    return {
        "name": row["name"],
        "topics": [row["queue"]],
        "queueName": row["queue"],
        "members": members,
        "partitionsWithLag": row["partitions"],
        "totalLag": int(row["lag"]),
        "maxTimeLag": int(behind),
        "state": state,
        "subscriptionMode": row["mode"],
        "subscriptionTimestamp": row["start_at"],
        "subscriptionCreatedAt": row["created_at"],
        "consumed": row["done"],
        "failed": row["failed"],
        "deadLetters": row["dead"],
        "dropped": row["dropped"],
        "discovering": row["discovering"],
    }
