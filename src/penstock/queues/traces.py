"""Traces: what consumers note about messages, found by message or by name."""

from typing import Any

from penstock.database import Database
from penstock.errors import NotFound
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.catalog import Catalog, check_name, check_text
from penstock.queues.crypto import Keys

MOST_BYTES = (
    16 << 20
)  # payloads in one page; those beyond are null, as are those of deleted messages


class Traces:
    def __init__(self, database: Database, catalog: Catalog, keys: Keys) -> None:
        self._database, self._catalog, self._keys = database, catalog, keys

    async def add(
        self,
        partition_id: str,
        transaction_id: str,
        data: bytes,
        *,
        group: str = QUEUE_MODE,
        event_type: str = "info",
        names: list[str] | None = None,
        worker: str | None = None,
    ) -> str:
        """Note something about a message; answers the trace's id."""
        for text in (group, event_type):
            check_text("trace", text)
        for name in names or ():
            check_name("trace name", name)
        await self._catalog.load_installation()
        rows = await self._database.fetch(
            """WITH message AS (
                 SELECT m.queue_id, m.partition_id, m.seq FROM messages m WHERE m.partition_id = $1 AND m.transaction_id = $2
                    AND hashtextextended(m.transaction_id, 0) = hashtextextended($2, 0)
               ), trace AS (
                 INSERT INTO traces (queue_id, partition_id, seq, group_name, event_type, worker, data)
                 SELECT queue_id, partition_id, seq, $3, $4, $5, $6 FROM message RETURNING id, at
               ), named AS (
                 INSERT INTO trace_names (name, at, trace_id) SELECT DISTINCT n, t.at, t.id FROM trace t, unnest($7::text[]) n
               )
               SELECT id FROM trace""",
            self._catalog.partition_id(partition_id),
            transaction_id,
            group,
            event_type,
            worker,
            data,
            names or [],
        )
        if not rows:
            raise NotFound("Message not found")
        return str(rows[0]["id"])

    async def of_message(self, partition_id: str, transaction_id: str) -> list[dict[str, Any]]:
        """The oldest first."""
        await self._catalog.load_installation()
        rows = await self._database.browse(
            """SELECT t.*, (SELECT array_agg(n.name ORDER BY n.name) FROM trace_names n WHERE n.trace_id = t.id) AS names
                 FROM traces t JOIN messages m ON m.partition_id = t.partition_id AND m.seq = t.seq
                WHERE m.partition_id = $1 AND m.transaction_id = $2
                  AND hashtextextended(m.transaction_id, 0) = hashtextextended($2, 0) ORDER BY t.at""",
            self._catalog.partition_id(partition_id),
            transaction_id,
        )
        return [_entry(row) for row in rows]

    async def by_name(self, name: str, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        await self._catalog.load_installation()
        rows = await self._database.browse(
            """WITH page AS MATERIALIZED (
                 SELECT n.at AS named_at, t.*, q.name AS queue, p.name AS partition
                   FROM trace_names n JOIN traces t ON t.id = n.trace_id
                   JOIN partitions p ON p.id = t.partition_id JOIN queues q ON q.id = t.queue_id AND q.deleted_at IS NULL
                  WHERE n.name = $1 ORDER BY n.at LIMIT $2 OFFSET $3)
               SELECT page.*, (SELECT array_agg(x.name ORDER BY x.name) FROM trace_names x WHERE x.trace_id = page.id) AS names,
                      m.transaction_id, m.key_id,
                      CASE WHEN sum(octet_length(m.payload)) OVER (ORDER BY page.named_at, page.id) <= $4 THEN m.payload END AS payload
                 FROM page LEFT JOIN messages m ON m.partition_id = page.partition_id AND m.seq = page.seq
                ORDER BY page.named_at, page.id""",
            name,
            limit,
            offset,
            MOST_BYTES,
        )
        total = await self._database.browse(
            "SELECT count(*) FROM trace_names WHERE name = $1", name
        )
        found = []
        for row in rows:
            payload = row["payload"]
            if payload is not None and row["key_id"] is not None:
                payload = self._keys.open(row["partition_id"], row["key_id"], payload)
            found.append(
                _entry(row)
                | {
                    "transaction_id": row["transaction_id"],
                    "partition_id": self._catalog.partition_uuid(row["partition_id"]),
                    "queue_name": row["queue"],
                    "partition_name": row["partition"],
                    "message_payload": payload,
                }
            )
        return {
            "traces": found,
            "total": total[0][0],
            "pagination": {"limit": limit, "offset": offset},
        }

    async def names(self, limit: int = 50, offset: int = 0) -> dict[str, Any]:
        rows = await self._database.browse(
            """SELECT n.name AS trace_name, count(*) AS trace_count, count(DISTINCT (t.partition_id, t.seq)) AS message_count,
                      max(n.at) AS last_seen, count(*) OVER () AS total
                 FROM trace_names n JOIN traces t ON t.id = n.trace_id GROUP BY n.name
                ORDER BY max(n.at) DESC LIMIT $1 OFFSET $2""",
            limit,
            offset,
        )
        keys = ("trace_name", "trace_count", "message_count", "last_seen")
        return {
            "trace_names": [{key: row[key] for key in keys} for row in rows],
            "total": rows[0]["total"] if rows else 0,
            "pagination": {"limit": limit, "offset": offset},
        }


def _entry(row: Any) -> dict[str, Any]:
    return {
        "id": str(row["id"]),
        "event_type": row["event_type"],
        "data": row["data"],
        "consumer_group": row["group_name"],
        "worker_id": row["worker"],
        "created_at": row["at"],
        "trace_names": row["names"] or [],
    }
