"""Configure, delete and clear queues; list their partitions."""

from typing import Any

from penstock.contract.queues import Configured, PartitionInfo
from penstock.database import struct_of
from penstock.errors import Conflict, InvalidRequest, NotFound
from penstock.protocol.names import DEFAULT_PARTITION
from penstock.protocol.queue_options import QueueOptions
from penstock.queues.admin.scheduled import DelayedMessages
from penstock.queues.checks import check_name, check_text
from penstock.queues.context import QueueContext
from penstock.queues.options import OPTIONS, columns_of, options_of
from penstock.queues.schema import query
from penstock.queues.types import QueueInfo

ROWS_PER_STEP = 5000

PARTITIONS = query("partitions")
DEFAULTS = QueueOptions()


class QueueAdmin:
    def __init__(self, context: QueueContext, scheduled: DelayedMessages) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._keys, self._waiting = context.keys, context.waiting
        self._scheduled = scheduled

    async def configure(
        self,
        queue: str,
        options: QueueOptions = DEFAULTS,
        namespace: str | None = None,
        task: str | None = None,
    ) -> Configured:
        """Create or change a queue. Options that are not given are reset to their defaults."""
        check_name("queue", queue)
        for kind, text in (("namespace", namespace), ("task", task)):
            check_text(kind, text or "")
        columns = self._columns(options)
        values = {"namespace": namespace or "", "task": task or ""} | columns
        names = list(values)
        sql = f"""INSERT INTO queues AS q (name, {", ".join(names)})
                  VALUES ($1, {", ".join(f"${number}" for number in range(2, len(names) + 2))})
                  ON CONFLICT (name) WHERE deleted_at IS NULL
                  DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in names)}
                  RETURNING id"""
        rows = await self._database.fetch(sql, queue, *values.values())
        await self._reconsider(rows[0]["id"])
        self._waiting.changed()
        await self._catalog.ensure([(queue, DEFAULT_PARTITION)])
        info = await self._catalog.queue(queue)
        # not from the catalog's copy, which may be emptied at any time
        partition = await self._catalog.partition(queue, DEFAULT_PARTITION)
        if info is None or partition is None:
            raise Conflict(f"queue '{queue}' was deleted while it was configured")
        return Configured(
            configured=True,
            queue_id=info.uuid,
            partition_id=self._catalog.partition_uuid(partition),
            queue=info.name,
            namespace=info.namespace,
            task=info.task,
            options=info.options,
        )

    async def change(self, queue: str, options: QueueOptions, only: set[str]) -> QueueOptions:
        """Change the options named in `only` of an existing queue."""
        columns = self._columns(options)
        names = [option.column for option in OPTIONS if option.field in only]
        changes = ", ".join(f"{name} = ${number}" for number, name in enumerate(names, 2))
        rows = await self._database.fetch(
            f"""UPDATE queues SET {changes or "name = name"}
                 WHERE name = $1 AND deleted_at IS NULL RETURNING *""",
            queue,
            *(columns[name] for name in names),
        )
        if not rows:
            raise NotFound(f"queue '{queue}' does not exist")
        await self._reconsider(rows[0]["id"])
        self._waiting.changed()
        return options_of(rows[0])

    def _columns(self, options: QueueOptions) -> dict[str, Any]:
        columns = columns_of(options)
        if columns["encryption_enabled"] and self._keys.current is None:
            raise InvalidRequest(
                "encryptionEnabled needs an encryption key on the broker (queues.encryption_key)"
            )
        return columns

    async def _reconsider(self, queue_id: int) -> None:
        """Let the next pops decide what is due, since delays or ordering may have changed. The
        query compares with now(), because clock_timestamp() cannot use the index."""
        await self._database.read(
            """UPDATE cursors c SET due_at = clock_timestamp(), version = c.version + 1
                 FROM groups g WHERE g.queue_id = $1 AND c.group_id = g.id AND c.due_at > now()""",
            queue_id,
        )

    async def describe(self, queue: str) -> QueueInfo:
        info = await self._catalog.queue(queue)
        if info is None:
            raise NotFound(f"Queue not found: {queue}")
        return info

    async def delete(self, queue: str) -> bool:
        """Delete a queue with its groups; its messages are purged in the background."""
        check_text("queue", queue)

        async def work(connection: Any) -> bool:
            row = await connection.fetchrow(
                """UPDATE queues SET deleted_at = now() WHERE name = $1 AND deleted_at IS NULL
                   RETURNING id""",
                queue,
            )
            if row:
                await connection.execute("DELETE FROM groups WHERE queue_id = $1", row["id"])
            return row is not None

        existed = await self._database.transact(work)
        self._waiting.changed()
        return existed

    async def clear(self, queue: str, partition: str | None = None) -> int:
        """Delete all messages stored now, delayed ones included. Return how many."""
        info = await self.describe(queue)
        if partition is not None:
            number = await self._catalog.partition(queue, partition)
            if number is None:
                raise NotFound(f"Partition not found: {partition} of queue {queue}")
            rows = await self._database.fetch(
                "SELECT queue_remove(ARRAY[$1::bigint], ARRAY[0::int8], ARRAY[$2::int8], false)",
                number,
                1 << 62,
            )
            return int(rows[0][0]) + await self._scheduled.clear(info.id, number)
        deleted, after = await self._scheduled.clear(info.id, None), "0"
        now = (await self._database.read("SELECT clock_timestamp()"))[0][0]
        while True:
            (row,) = await self._database.fetch(
                """SELECT deleted, reached::text, more
                     FROM queue_trim($1, $2, false, $3::text::xid8, $4)""",
                *(info.id, now, after, ROWS_PER_STEP),
            )
            deleted += int(row["deleted"])
            after = row["reached"] or after
            if not row["more"]:
                return deleted

    async def partitions(
        self, queue: str | None = None, limit: int = 100, offset: int = 0, after: str | None = None
    ) -> list[PartitionInfo]:
        """Return partitions in order of creation. `after` is the last one of the previous page."""
        number = self._catalog.partition_id(after) if after else 0
        if number is None:
            raise InvalidRequest("after must be the id of a partition")
        return [
            struct_of(PartitionInfo, row, id=self._catalog.partition_uuid(row["id"]))
            for row in await self._database.browse(PARTITIONS, queue, limit, offset, number)
        ]
