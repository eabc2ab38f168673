"""Traces: what consumers note about messages, found by message or by name."""

from typing import Any

from penstock.database import Database
from penstock.errors import NotFound
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.catalog import Catalog, check_name, check_text
from penstock.queues.crypto import Keys
from penstock.queues.schema import query

MOST_BYTES = (
    16 << 20
)  # payloads in one page; those beyond are null, as are those of deleted messages

ADD = query("trace_add")
OF_MESSAGE = query("message_traces")
BY_NAME = query("traces_by_name")
NAMES = query("trace_names")


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
            ADD,
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
            OF_MESSAGE,
            self._catalog.partition_id(partition_id),
            transaction_id,
        )
        return [_entry(row) for row in rows]

    async def by_name(self, name: str, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        await self._catalog.load_installation()
        rows = await self._database.browse(
            BY_NAME,
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
            NAMES,
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
