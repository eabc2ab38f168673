"""Consumer groups: list, lag, describe, seek, delete, subscription.

The count of a group's lag is stored messages of the queue minus those the group settled, both kept as counters, so it
is exact and costs the same for ten partitions and for a million. The time lag looks at the partitions that have something
for the group, and only at those.
"""

from datetime import datetime
from typing import Any

from penstock.database import Database
from penstock.errors import NotFound
from penstock.queues.catalog import Catalog
from penstock.queues.signals import Signals

STEP = 500

LISTING = """
  SELECT g.id, g.name, q.name AS queue, g.mode, g.start_at, g.created_at, g.discovered < g.discover_to AS discovering,
         coalesce(total.stored, 0) - coalesce(mine.consumed, 0) AS lag, coalesce(mine.done, 0) AS done,
         coalesce(mine.failed, 0) AS failed, coalesce(mine.dead, 0) AS dead, coalesce(mine.dropped, 0) AS dropped,
         backlog.partitions, backlog.oldest, clock_timestamp() AS now,
         (SELECT count(*) FROM (SELECT 1 FROM partitions p WHERE p.queue_id = q.id LIMIT 100000) x) AS members
    FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
    LEFT JOIN LATERAL (SELECT c.pushed - c.removed AS stored FROM queue_counts(q.id) c WHERE c.group_id = 0) total ON true
    LEFT JOIN LATERAL (SELECT c.* FROM queue_counts(q.id) c WHERE c.group_id = g.id) mine ON true
    LEFT JOIN LATERAL (
      SELECT count(*) AS partitions, min(m.created_at) AS oldest
        FROM cursors c CROSS JOIN LATERAL (
          SELECT m.created_at FROM messages m WHERE m.partition_id = c.partition_id AND m.seq > c.position
           ORDER BY m.seq LIMIT 1) m
       WHERE c.group_id = g.id AND c.due_at IS NOT NULL) backlog ON true
   WHERE ($1::text IS NULL OR g.name = $1) AND ($2::text IS NULL OR q.name = $2)
   ORDER BY q.name, g.name"""

PARTITIONS = """
  SELECT g.name AS group, q.name AS queue, p.id, p.name, c.position, c.settled, c.consumed, c.batches, c.consumed_at,
         c.next_expiry > clock_timestamp() AND NOT isempty(c.leased) AS leased, c.lease_id,
         coalesce(head.seq, p.floor) AS head, coalesce(first.seq - 1, p.floor) AS below, first_open.created_at AS oldest,
         clock_timestamp() AS now,
         coalesce((SELECT sum(upper(r) - lower(r)) FROM unnest(c.settled) r), 0)::bigint AS beyond
    FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
    JOIN partitions p ON p.queue_id = q.id
    JOIN LATERAL (SELECT * FROM cursors c WHERE c.partition_id = p.id AND c.group_id = g.id
                   ORDER BY c.version DESC LIMIT 1) c ON true
    LEFT JOIN LATERAL (SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq DESC LIMIT 1) head ON true
    LEFT JOIN LATERAL (SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq LIMIT 1) first ON true
    LEFT JOIN LATERAL (SELECT m.created_at FROM messages m WHERE m.partition_id = p.id AND m.seq > c.position
                        ORDER BY m.seq LIMIT 1) first_open ON true
   WHERE ($1::text IS NULL OR g.name = $1) AND ($2::text IS NULL OR q.name = $2)"""

# Sequence numbers stand for messages: those deleted from the middle of a partition are counted as well.
PREVIEW = """
  WITH chosen AS (SELECT g.id, g.queue_id FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
                   WHERE g.name = $1 AND q.name = $2)
  SELECT CASE WHEN EXISTS (SELECT 1 FROM chosen) THEN count(*) END AS partitions,
         coalesce(sum(greatest(0, greatest(c.position, below) - greatest(target, below)) + beyond_again), 0) AS again,
         coalesce(sum(greatest(0, least(target, head) - greatest(c.position, below)) - beyond_skipped), 0) AS skipped
    FROM chosen JOIN partitions p ON p.queue_id = chosen.queue_id
    JOIN LATERAL (SELECT * FROM cursors c WHERE c.partition_id = p.id AND c.group_id = chosen.id
                   ORDER BY c.version DESC LIMIT 1) c ON true
    CROSS JOIN LATERAL (
      SELECT coalesce((SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq DESC LIMIT 1), p.floor) AS head,
             coalesce((SELECT m.seq - 1 FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq LIMIT 1), p.floor) AS below,
             queue_seq_at(p.id,
               CASE $3::text WHEN 'end' THEN 'infinity' WHEN 'beginning' THEN '-infinity' ELSE $4::timestamptz END) AS target) place
    CROSS JOIN LATERAL (
      SELECT coalesce(sum(greatest(0, upper(r) - greatest(lower(r), target + 1))), 0) AS beyond_again,
             coalesce(sum(greatest(0, least(upper(r) - 1, target) - lower(r) + 1)), 0) AS beyond_skipped
        FROM unnest(c.settled) r) beyond"""


class Groups:
    def __init__(self, database: Database, catalog: Catalog, signals: Signals) -> None:
        self._database, self._catalog, self._signals = database, catalog, signals

    async def listing(self, group: str | None = None, queue: str | None = None) -> list[dict[str, Any]]:
        """One entry per (group, queue) in the contract's shape, with the exact `totalLag`."""
        rows = await self._database.read(LISTING, group, queue)
        return [_entry(row) for row in rows]

    async def lag(self, queue: str, group: str) -> int:
        """Messages of the queue that the group has not settled."""
        rows = await self._database.read(LISTING, group, queue)
        if not rows:
            raise NotFound(f"queue '{queue}' has no group '{group}'")
        return int(rows[0]["lag"])

    async def lagging(self, min_lag_seconds: float = 3600) -> list[dict[str, Any]]:
        """Partitions whose oldest unconsumed message is older than this, the worst first."""
        await self._catalog.load_installation()
        rows = await self._database.read(
            f"""SELECT * FROM ({PARTITIONS} AND c.due_at IS NOT NULL) x
                 WHERE x.oldest IS NOT NULL AND x.now - x.oldest > make_interval(secs => $3) ORDER BY x.oldest""",
            None,
            None,
            float(min_lag_seconds),
        )
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
        rows = await self._database.read(
            PARTITIONS + " ORDER BY q.name, p.id LIMIT $3 OFFSET $4", group, None, limit, offset
        )
        found: dict[str, Any] = {}
        for row in rows:
            found.setdefault(row["queue"], {"partitions": []})["partitions"].append(
                {
                    "partition": row["name"],
                    "workerId": str(row["lease_id"]) if row["leased"] else None,
                    "lastConsumedAt": row["consumed_at"],
                    "totalConsumed": row["consumed"],
                    "offsetLag": _lag(row),
                    "timeLagSeconds": int((row["now"] - row["oldest"]).total_seconds()) if row["oldest"] else 0,
                    "leaseActive": bool(row["leased"]),
                }
            )
        return found

    async def delete(self, group: str, queue: str | None = None, *, metadata: bool = True) -> dict[str, Any]:
        """Forget a group; without `metadata` its subscription stays and the next pop starts from there again."""
        async with self._database.connection() as connection, connection.transaction():
            rows = await connection.fetch(
                """SELECT g.id, g.queue_id FROM groups g JOIN queues q ON q.id = g.queue_id
                    WHERE g.name = $1 AND ($2::text IS NULL OR q.name = $2) ORDER BY q.id""",
                group,
                queue,
            )
            ids, queues = [row["id"] for row in rows], [row["queue_id"] for row in rows]
            # Nobody creates partitions meanwhile: they would give the group cursors.
            await connection.execute("SELECT 1 FROM queues WHERE id = ANY ($1) ORDER BY id FOR UPDATE", queues)
            await connection.execute("SELECT 1 FROM groups WHERE id = ANY ($1) ORDER BY id FOR UPDATE", ids)
            scope = "partition_id IN (SELECT id FROM partitions WHERE queue_id = ANY ($2)) AND group_id = ANY ($1)"
            deleted = await connection.execute(f"DELETE FROM cursors WHERE {scope}", ids, queues)
            for table in ("leases", "attempts"):
                await connection.execute(f"DELETE FROM {table} WHERE {scope}", ids, queues)
            for table in ("tallies", "tally_log"):
                await connection.execute(
                    f"DELETE FROM {table} WHERE queue_id = ANY ($2) AND group_id = ANY ($1)", ids, queues
                )
            if metadata:
                await connection.execute("DELETE FROM groups WHERE id = ANY ($1)", ids)
            else:
                await connection.execute(
                    """UPDATE groups g SET discovered = 0, discover_to =
                         coalesce((SELECT max(p.id) FROM partitions p WHERE p.queue_id = g.queue_id), 0)
                        WHERE id = ANY ($1)""",
                    ids,
                )
        self._signals.changed()
        found = {
            "success": True,
            "consumerGroup": group,
            "deletedPartitions": int(deleted.split()[-1]),
            "metadataDeleted": metadata and bool(ids),
        }
        return found | ({"queueName": queue} if queue is not None else {})

    async def subscription(self, group: str, moment: datetime) -> dict[str, Any]:
        """Change where the group starts in partitions it has not met yet."""
        rows = await self._database.fetch(
            """UPDATE groups g SET mode = 'timestamp', start_at = $2,
                      discover_to = CASE WHEN g.mode IS NULL
                        THEN coalesce((SELECT max(p.id) FROM partitions p WHERE p.queue_id = g.queue_id), 0) ELSE g.discover_to END
                WHERE g.name = $1 RETURNING 1""",
            group,
            moment,
        )
        return {"success": True, "consumerGroup": group, "newTimestamp": moment, "rowsUpdated": len(rows)}

    async def seek(
        self, group: str, queue: str, *, partition: str | None = None, moment: datetime | None = None, to: str = "end"
    ) -> dict[str, Any]:
        """Move a group to after `moment`, or `to` the "end" or the "beginning". Its leases there are dropped."""
        rows = await self._database.read(
            """SELECT g.id, g.queue_id FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
                WHERE g.name = $1 AND q.name = $2""",
            group,
            queue,
        )
        if not rows:
            raise NotFound(f"queue '{queue}' has no group '{group}'")
        group_id, queue_id = rows[0]
        target = ("time" if moment is not None else to, moment)
        moved, last = 0, None
        if partition is not None:
            number = await self._catalog.partition(queue, partition)
            if number is None:
                raise NotFound("Partition not found")
            moved, last = await self._seek(group_id, [number], target)
        else:
            after = 0
            while True:
                step = await self._database.read(
                    "SELECT id FROM partitions WHERE queue_id = $1 AND id > $2 ORDER BY id LIMIT $3",
                    queue_id,
                    after,
                    STEP,
                )
                if not step:
                    break
                done, last = await self._seek(group_id, [row["id"] for row in step], target)
                moved += done
                after = step[-1]["id"]
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
        """What `seek` would do: how many settled messages come again, how many open ones are skipped."""
        rows = await self._database.read(PREVIEW, group, queue, "time" if moment is not None else to, moment)
        if rows[0]["partitions"] is None:
            raise NotFound(f"queue '{queue}' has no group '{group}'")
        return {
            "success": True,
            "dryRun": True,
            "consumerGroup": group,
            "queueName": queue,
            "seekToEnd": moment is None and to == "end",
            "targetTimestamp": moment,
            "partitionsUpdated": rows[0]["partitions"],
            "redelivered": int(rows[0]["again"]),
            "skipped": int(rows[0]["skipped"]),
        }

    async def _seek(
        self, group_id: int, partitions: list[int], target: tuple[str, datetime | None]
    ) -> tuple[int, int | None]:
        row = (await self._database.fetch("SELECT * FROM queue_seek($1, $2, $3, $4)", group_id, partitions, *target))[0]
        return row["moved"], row["last"]


def _lag(row: Any) -> int:
    return int(max(0, row["head"] - max(row["position"], row["below"]) - row["beyond"]))


def _entry(row: Any) -> dict[str, Any]:
    behind = (row["now"] - row["oldest"]).total_seconds() if row["oldest"] else 0.0
    state = "Dead" if not row["done"] and behind > 300 else "Lagging" if behind > 300 else "Stable"
    return {
        "name": row["name"],
        "topics": [row["queue"]],
        "queueName": row["queue"],
        "members": row["members"],
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
