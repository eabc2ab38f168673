"""Numbers for people and dashboards, all from counters, the (few) leases and the per-minute
history.
"""

from datetime import datetime, timedelta
from typing import Any

from penstock.database import Database
from penstock.errors import NotFound
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.catalog import Catalog
from penstock.queues.options import options_of
from penstock.queues.schema import query

QUEUES = query("queues")

PARTITIONS = query("queue_partitions")
RATES = query("rates")
HISTORY = query("history")
REMOVALS = query("removals")
LEASES = query("leases")
DATABASE = query("postgres_database")
OLDEST = query("postgres_oldest")
TABLES = query("postgres_tables")


class Status:
    def __init__(self, database: Database, catalog: Catalog) -> None:
        self._database, self._catalog = database, catalog

    async def queues(
        self, namespace: str | None = None, task: str | None = None, queue: str | None = None
    ) -> list[dict[str, Any]]:
        """Every queue with its message counts; pending is what queue mode (else the slowest group)
        has not settled.
        """
        rows = await self._database.browse(QUEUES, QUEUE_MODE, queue, namespace, task)
        partitions = await self._catalog.partition_counts([row["id"] for row in rows])
        return [
            {
                "id": str(row["uuid"]),
                "name": row["name"],
                "namespace": row["namespace"],
                "task": row["task"],
                "createdAt": row["created_at"],
                "partitions": partitions.get(row["id"], 0),
                "messages": counts_of(row),
                "options": options_of(row),
            }
            for row in rows
        ]

    async def queue(self, queue: str, limit: int = 1000, offset: int = 0) -> dict[str, Any]:
        """One queue with its partitions (`limit` of them) and totals."""
        found = await self.queues(queue=queue)
        if not found:
            raise NotFound(f"Queue not found: {queue}")
        await self._catalog.load_installation()
        rows = await self._database.browse(
            PARTITIONS,
            queue,
            limit,
            offset,
        )
        partitions = []
        for row in rows:
            stored = row["last"] - row["first"] + 1 - row["holes"] if row["last"] is not None else 0
            settled = max(0, row["position"] - row["first"] + 1) + row["beyond"] if stored else 0
            processing = row["open"]
            partitions.append(
                {
                    "id": self._catalog.partition_uuid(row["id"]),
                    "name": row["name"],
                    "createdAt": row["created_at"],
                    "stats": {
                        "total": stored,
                        "pending": max(0, stored - settled - processing),
                        "processing": processing,
                        "completed": min(stored, settled),
                        "failed": 0,
                        "deadLetter": 0,
                    },
                    "cursor": {"totalConsumed": row["consumed"], "batchesConsumed": row["batches"]},
                    "lastActivity": max(
                        filter(None, (row["newest"], row["consumed_at"])), default=row["created_at"]
                    ),
                    "oldestMessage": row["oldest"],
                    "newestMessage": row["newest"],
                }
            )
        return found[0] | {
            "partitionCount": found[0]["partitions"],
            "partitions": partitions,
            "totals": found[0]["messages"],
        }

    async def overview(self) -> dict[str, Any]:
        """Sums over all queues."""
        queues = await self.queues()
        messages = {
            name: sum(queue["messages"][name] for queue in queues) for name in counts_names()
        }
        rates = await self._database.browse(RATES)
        return {
            "queues": len(queues),
            "partitions": sum(queue["partitions"] for queue in queues),
            "namespaces": len({queue["namespace"] for queue in queues if queue["namespace"]}),
            "tasks": len({queue["task"] for queue in queues if queue["task"]}),
            "messages": messages,
            "throughput": {
                "ingestedPerSecond": rates[0]["pushed"],
                "processedPerSecond": rates[0]["done"],
            },
        }

    async def history(
        self,
        since: datetime,
        until: datetime,
        bucket: timedelta,
        queue: str | None = None,
        namespace: str | None = None,
        task: str | None = None,
    ) -> list[dict[str, Any]]:
        """Messages pushed, settled, failed and given up per time bucket."""
        rows = await self._database.browse(
            HISTORY,
            since,
            until,
            bucket.total_seconds(),
            queue,
            namespace,
            task,
        )
        return [dict(row) for row in rows]

    async def removals(
        self, since: datetime, until: datetime, bucket: timedelta, queue: str | None = None
    ) -> list[dict[str, Any]]:
        """Messages deleted by upkeep per time bucket, queue and reason; the name is None when the
        queue is gone.
        """
        rows = await self._database.browse(
            REMOVALS,
            since,
            until,
            bucket.total_seconds(),
            queue,
        )
        return [dict(row) for row in rows]

    async def leases(self) -> dict[str, Any]:
        rows = await self._database.browse(LEASES)
        row = rows[0]
        return {
            "active": row["active"],
            "partitionsWithLeases": row["partitions"],
            "totalBatchSize": row["taken"],
            "totalAcked": row["acked"],
        }

    async def postgres(self) -> dict[str, Any]:
        """How the database is: size, sessions, what holds vacuum back, our tables' dead rows."""
        database = await self._database.browse(DATABASE)
        holder = await self._database.browse(OLDEST)
        tables = await self._database.browse(TABLES)
        return {
            "database": dict(database[0]),
            "oldestTransaction": dict(holder[0]) if holder else None,
            "tables": [dict(row) for row in tables],
        }

    async def refresh(self) -> dict[str, Any]:
        """Fold the counters' log now; they are exact without it."""
        rows = await self._database.read("SELECT queue_rollup() AS folded")
        return {"folded": rows[0]["folded"], "skipped": rows[0]["folded"] is None}


def counts_names() -> tuple[str, ...]:
    return ("total", "pending", "processing", "completed", "failed", "deadLetter", "dropped")


def counts_of(row: Any) -> dict[str, int]:
    waiting = max(0, row["stored"] - row["consumed"])
    return {
        "total": row["stored"],
        "pending": max(0, waiting - row["processing"]),
        "processing": row["processing"],
        "completed": row["consumed"],
        "failed": row["failed"],
        "deadLetter": row["dead"],
        "dropped": row["dropped"],
    }
