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

QUEUES = """
  WITH counted AS MATERIALIZED (
    SELECT queue_id, group_id, sum(pushed)::bigint AS pushed, sum(removed)::bigint AS removed, sum(consumed)::bigint AS consumed,
           sum(done)::bigint AS done, sum(failed)::bigint AS failed, sum(dead)::bigint AS dead, sum(dropped)::bigint AS dropped
      FROM (SELECT queue_id, group_id, pushed, removed, consumed, done, failed, dead, dropped FROM tallies
            UNION ALL SELECT queue_id, group_id, pushed, removed, consumed, done, failed, dead, dropped FROM tally_log) t
     GROUP BY 1, 2
  ), held AS (
    SELECT l.queue_id, sum((SELECT sum(upper(r) - lower(r)) FROM unnest(l.open) r))::bigint AS open,
           count(*) AS leases FROM leases l WHERE l.expires_at > clock_timestamp() GROUP BY 1
  )
  SELECT q.*, coalesce(total.pushed, 0) - coalesce(total.removed, 0) AS stored, coalesce(total.pushed, 0) AS pushed,
         coalesce(held.open, 0) AS processing, coalesce(held.leases, 0) AS leases,
         coalesce(own.consumed, slowest.consumed, 0) AS consumed, coalesce(slowest.failed, 0) AS failed,
         coalesce(slowest.dead, 0) AS dead, coalesce(slowest.dropped, 0) AS dropped, coalesce(slowest.done, 0) AS done
    FROM queues q
    LEFT JOIN counted total ON total.queue_id = q.id AND total.group_id = 0
    LEFT JOIN held ON held.queue_id = q.id
    LEFT JOIN groups g ON g.queue_id = q.id AND g.name = $1
    LEFT JOIN LATERAL (SELECT coalesce(c.consumed, 0) AS consumed FROM (SELECT 1) one
                         LEFT JOIN counted c ON c.queue_id = q.id AND c.group_id = g.id WHERE g.id IS NOT NULL) own ON true
    LEFT JOIN LATERAL (SELECT min(coalesce(c.consumed, 0)) AS consumed, sum(c.failed)::bigint AS failed, sum(c.dead)::bigint AS dead,
                              sum(c.dropped)::bigint AS dropped, sum(c.done)::bigint AS done
                         FROM groups x LEFT JOIN counted c ON c.group_id = x.id AND c.queue_id = q.id
                        WHERE x.queue_id = q.id) slowest ON true
   WHERE q.deleted_at IS NULL AND ($2::text IS NULL OR q.name = $2)
     AND ($3::text IS NULL OR q.namespace = $3) AND ($4::text IS NULL OR q.task = $4)
   ORDER BY q.created_at DESC, q.id DESC"""


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
            """WITH page AS MATERIALIZED (
                 SELECT p.* FROM partitions p WHERE p.queue_id = (SELECT id FROM queues WHERE name = $1 AND deleted_at IS NULL)
                  ORDER BY p.queue_id, p.id LIMIT $2 OFFSET $3)
               SELECT p.id, p.name, p.created_at, p.holes, first.seq AS first, first.created_at AS oldest, last.seq AS last,
                      last.created_at AS newest, coalesce(view.position, 0) AS position, coalesce(view.consumed, 0) AS consumed,
                      coalesce(view.batches, 0) AS batches, view.consumed_at, coalesce(view.open, 0) AS open,
                      coalesce(view.beyond, 0) AS beyond
                 FROM page p
                 LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq LIMIT 1) first ON true
                 LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq DESC LIMIT 1) last ON true
                 LEFT JOIN LATERAL (
                   SELECT min(c.position) AS position, max(c.consumed) AS consumed, max(c.batches) AS batches, max(c.consumed_at) AS consumed_at,
                          sum((SELECT sum(upper(r) - lower(r)) FROM unnest(c.leased) r))::bigint AS open,
                          min((SELECT coalesce(sum(upper(r) - lower(r)), 0) FROM unnest(c.settled) r))::bigint AS beyond
                     FROM cursors c WHERE c.partition_id = p.id) view ON true
                ORDER BY p.id""",
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
        rates = await self._database.browse(
            """SELECT coalesce(sum(pushed), 0)::float8 / 300 AS pushed, coalesce(sum(done), 0)::float8 / 300 AS done FROM (
                 SELECT pushed, done FROM history WHERE minute > clock_timestamp() - interval '5 minutes'
                 UNION ALL SELECT pushed, done FROM tally_log) x"""
        )
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
            """SELECT to_timestamp(floor(extract(epoch FROM minute) / $3) * $3) AS bucket, sum(pushed)::bigint AS pushed,
                      sum(done)::bigint AS done, sum(failed)::bigint AS failed, sum(dead)::bigint AS dead
                 FROM (SELECT minute, queue_id, pushed, done, failed, dead FROM history WHERE minute BETWEEN $1 AND $2
                       UNION ALL SELECT at, queue_id, pushed, done, failed, dead FROM tally_log WHERE at BETWEEN $1 AND $2) h
                WHERE coalesce($4::text, $5::text, $6::text) IS NULL
                   OR queue_id IN (SELECT id FROM queues WHERE deleted_at IS NULL AND ($4 IS NULL OR name = $4)
                                      AND ($5 IS NULL OR namespace = $5) AND ($6 IS NULL OR task = $6))
                GROUP BY 1 ORDER BY 1""",
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
            """SELECT to_timestamp(floor(extract(epoch FROM r.minute) / $3) * $3) AS bucket, r.reason, q.name, q.namespace, q.task,
                      sum(r.messages)::bigint AS messages, sum(r.steps)::bigint AS steps
                 FROM removals r LEFT JOIN queues q ON q.id = r.queue_id AND q.deleted_at IS NULL
                WHERE r.minute BETWEEN date_trunc('minute', $1::timestamptz) AND $2 AND ($4::text IS NULL OR q.name = $4)
                GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 3, 2""",
            since,
            until,
            bucket.total_seconds(),
            queue,
        )
        return [dict(row) for row in rows]

    async def leases(self) -> dict[str, Any]:
        rows = await self._database.browse(
            """SELECT count(DISTINCT lease_id) AS active, count(*) AS partitions,
                      coalesce(sum((SELECT sum(upper(r) - lower(r)) FROM unnest(taken) r)), 0)::bigint AS taken,
                      coalesce(sum((SELECT sum(upper(r) - lower(r)) FROM unnest(taken - open) r)), 0)::bigint AS acked
                 FROM leases WHERE expires_at > clock_timestamp()"""
        )
        row = rows[0]
        return {
            "active": row["active"],
            "partitionsWithLeases": row["partitions"],
            "totalBatchSize": row["taken"],
            "totalAcked": row["acked"],
        }

    async def postgres(self) -> dict[str, Any]:
        """How the database is: size, sessions, what holds vacuum back, our tables' dead rows."""
        database = await self._database.browse(
            """SELECT current_setting('server_version') AS version, pg_database_size(current_database()) AS size,
                      d.numbackends AS sessions, d.xact_commit AS commits, d.xact_rollback AS rollbacks, d.deadlocks
                 FROM pg_stat_database d WHERE d.datname = current_database()"""
        )
        holder = await self._database.browse(
            """SELECT pid, application_name AS application, state, age(backend_xmin)::bigint AS xmin_age,
                      extract(epoch FROM clock_timestamp() - xact_start)::float8 AS transaction_seconds
                 FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
                ORDER BY age(backend_xmin) DESC LIMIT 1"""
        )
        tables = await self._database.browse(
            """SELECT relname AS table, n_live_tup AS live, n_dead_tup AS dead, last_autovacuum AS "lastAutovacuum",
                      pg_total_relation_size(relid) AS bytes
                 FROM pg_stat_user_tables WHERE schemaname = current_schema() ORDER BY relname"""
        )
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
