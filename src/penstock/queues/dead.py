"""Dead letters: list, put back, purge. A dead letter keeps its own copy of the message, so retention does not lose it.

Putting one back makes exactly that message available again to exactly the group that gave it up. If retention has
deleted the original meanwhile, a copy is appended to the partition, which then all groups see.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.database import Database
from penstock.queues.catalog import Catalog
from penstock.queues.crypto import Keys
from penstock.queues.signals import Signals

MOST_COUNTED = 100_000  # `total` is exact up to here
LOOKED_AT = 1000  # letters, for what they died of
STEP = 500

SOURCE = """
  FROM dead_letters d JOIN queues q ON q.id = d.queue_id AND q.deleted_at IS NULL
  JOIN partitions p ON p.id = d.partition_id
  LEFT JOIN groups g ON g.id = d.group_id
 WHERE ($1::text IS NULL OR q.name = $1) AND ($2::text IS NULL OR g.name = $2) AND ($3::text IS NULL OR p.name = $3)
   AND ($4::timestamptz IS NULL OR d.failed_at >= $4) AND ($5::timestamptz IS NULL OR d.failed_at <= $5)
   AND ($6::bigint IS NULL OR d.id = $6)"""


@dataclass(slots=True)
class Which:
    """Which dead letters are meant; what is None does not restrict."""

    queue: str | None = None
    group: str | None = None
    partition: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    id: int | None = None

    def args(self) -> tuple[Any, ...]:
        return self.queue, self.group, self.partition, self.since, self.until, self.id


class DeadLetters:
    def __init__(self, database: Database, catalog: Catalog, keys: Keys, signals: Signals) -> None:
        self._database, self._catalog, self._keys, self._signals = database, catalog, keys, signals

    async def listing(self, which: Which, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        """The newest failure first, in the contract's shape; payloads are bytes under `data`."""
        await self._catalog.load_installation()
        rows = await self._database.read(
            f"SELECT d.*, q.name AS queue, p.name AS partition, g.name AS group_name {SOURCE} ORDER BY d.id DESC LIMIT $7 OFFSET $8",
            *which.args(),
            limit,
            offset,
        )
        total = await self._database.read(
            f"SELECT count(*) FROM (SELECT 1 {SOURCE} LIMIT {MOST_COUNTED}) x", *which.args()
        )
        return {
            "messages": [self._entry(row) for row in rows],
            "total": total[0][0],
            "pagination": {"limit": limit, "offset": offset, "total": total[0][0]},
        }

    async def errors(self, which: Which, most: int = 10) -> dict[str, Any]:
        """What the newest letters died of, the most frequent first, and in how many partitions; of LOOKED_AT letters."""
        rows = await self._database.read(
            f"""WITH newest AS MATERIALIZED (SELECT d.partition_id, left(d.error, 500) AS error, d.failed_at {SOURCE}
                                             ORDER BY d.id DESC LIMIT {LOOKED_AT})
                SELECT error, count(*) AS n, max(failed_at) AS last,
                       (SELECT count(DISTINCT partition_id) FROM newest) AS partitions
                  FROM newest GROUP BY 1 ORDER BY 2 DESC, 3 DESC LIMIT $7""",
            *which.args(),
            most,
        )
        return {
            "affectedPartitions": rows[0]["partitions"] if rows else 0,
            "topErrors": [{"error": row["error"], "count": row["n"], "lastSeen": row["last"]} for row in rows],
        }

    async def requeue(self, which: Which) -> int:
        """Put dead letters back, as many as match; answers how many."""
        done = 0
        while rows := await self._step(which):
            done += len(rows)
            for queue, group in {(row["queue"], row["group_name"]) for row in rows}:
                self._signals.available(queue, STEP, group)
            if len(rows) < STEP:
                break
        return done

    async def purge(self, which: Which) -> int:
        """Delete dead letters, as many as match; answers how many."""
        done = 0
        while True:
            rows = await self._database.fetch(
                f"DELETE FROM dead_letters WHERE id IN (SELECT d.id {SOURCE} ORDER BY d.id LIMIT {STEP}) RETURNING 1",
                *which.args(),
            )
            done += len(rows)
            if len(rows) < STEP:
                return done

    async def _step(self, which: Which) -> list[Any]:
        async with self._database.connection() as connection, connection.transaction():
            rows = await connection.fetch(
                f"""SELECT d.id, d.partition_id, d.group_id, d.seq, q.name AS queue, g.name AS group_name {SOURCE}
                    ORDER BY d.partition_id, d.group_id, d.seq LIMIT {STEP}""",
                *which.args(),
            )
            keys = sorted({row["partition_id"] for row in rows})
            await connection.execute("SELECT 1 FROM partitions WHERE id = ANY ($1) ORDER BY id FOR NO KEY UPDATE", keys)
            taken = await connection.fetch(
                "DELETE FROM dead_letters WHERE id = ANY ($1) RETURNING *", [row["id"] for row in rows]
            )
            present = {row["id"] for row in taken}
            wanted: dict[tuple[int, int], Any] = {}
            for row in taken:
                wanted.setdefault((row["partition_id"], row["group_id"]), []).append(row)
            for (partition, group), letters in sorted(wanted.items()):
                back = await connection.fetchval(
                    "SELECT queue_unsettle($1, $2, $3)", partition, group, [letter["seq"] for letter in letters]
                )
                lost = [letter for letter in letters if letter["seq"] not in back]
                if lost:
                    await connection.fetch(
                        "SELECT * FROM queue_push(ARRAY[$1::bigint], ARRAY[0], $2, ARRAY[true], $3, $4, $5, $6)",
                        partition,
                        [letter["transaction_id"] for letter in lost],
                        [letter["trace_id"] for letter in lost],
                        [letter["producer"] for letter in lost],
                        [letter["key_id"] for letter in lost],
                        [letter["payload"] for letter in lost],
                    )
            return [row for row in rows if row["id"] in present]

    def _entry(self, row: Any) -> dict[str, Any]:
        payload = row["payload"]
        if row["key_id"] is not None:
            payload = self._keys.open(row["partition_id"], row["key_id"], payload)
        return {
            "dlqId": row["id"],
            "id": self._catalog.message_uuid(row["partition_id"], row["seq"]),
            "transactionId": row["transaction_id"],
            "partitionId": self._catalog.partition_uuid(row["partition_id"]),
            "queue": row["queue"],
            "partition": row["partition"],
            "consumerGroup": row["group_name"],
            "errorMessage": row["error"],
            "retryCount": max(0, row["attempts"] - 1),
            "attempts": row["attempts"],
            "data": payload,
            "producerSub": row["producer"],
            "createdAt": row["created_at"],
            "failedAt": row["failed_at"],
        }
