"""Answer the Console's queries: partitions of a queue by lag, the history of a message, messages by
payload, dead letters by error, and rates over days.

Each call reads a bounded number of rows, on the connections for browsing.
"""

import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from importlib.resources import files
from typing import Any

import msgspec

from penstock.contract.inspection import (
    ErrorGroup,
    ErrorGroups,
    ErrorsQuery,
    HistoryQuery,
    Hit,
    Hits,
    Lifeline,
    LifelineEvent,
    SearchQuery,
    Series,
)
from penstock.contract.queries import QueuePartitionsQuery
from penstock.contract.queues import QueuePartition, QueuePartitions
from penstock.database.rows import struct_of
from penstock.errors import InvalidRequest, NotFound, PenstockError
from penstock.protocol.latency import Latencies
from penstock.protocol.names import QUEUE_MODE
from penstock.protocol.status import NOT_JSON
from penstock.protocol.times import epoch_millis
from penstock.queues.admin.dead_letters import Which
from penstock.queues.admin.messages import page_start
from penstock.queues.engine import Queues


def sql(name: str) -> str:
    return files("penstock.monitor").joinpath(f"{name}.sql").read_text()


PARTITIONS, LIFELINE, WINDOW = sql("partitions"), sql("lifeline"), sql("window")
BY_TRANSACTION, LETTERS = sql("by_transaction"), sql("dead_letter_groups")
HISTORY = """
SELECT floor(extract(epoch FROM minute) / $3)::bigint AS bucket, sum(pushed)::bigint AS pushed,
       sum(done - dead - dropped)::bigint AS completed, sum(failed)::bigint AS failed,
       sum(dead)::bigint AS "deadLetters"
  FROM history
 WHERE minute >= to_timestamp($1) AND minute < to_timestamp($2)
   AND ($4::text IS NULL
        OR queue_id = (SELECT id FROM queues WHERE name = $4 AND deleted_at IS NULL))
 GROUP BY 1 ORDER BY 1"""
BEGUN = """
SELECT CASE WHEN $1::text IS NULL THEN (SELECT min(minute) FROM history)
            ELSE (SELECT created_at FROM queues WHERE name = $1 AND deleted_at IS NULL) END"""
LATENCIES = """
SELECT latency_buckets, latency_counts FROM history
 WHERE minute >= now() - interval '3 minutes' AND latency_buckets IS NOT NULL LIMIT 10000"""

MIN_RUNNING_SECONDS = 60.0  # age of the current interval from which its rate is shown
MAX_PARTITIONS = 1000  # searched per page
ROWS_PER_STEP = 250
MAX_SEARCHED_PAYLOAD = 1 << 20  # bytes; a larger one is not searched
MAX_PREVIEWED_PAYLOAD = 1 << 16  # bytes; a list would read megabytes for larger ones
PREVIEW = 200  # characters
MAX_ID_PARTITIONS = 10_000  # in which a transaction id is searched for
COUNTED_LETTERS = 20_000
BUCKETS = 30  # of the counts over time
RANGES = {  # seconds, seconds of a point
    "1h": (3600, 60),
    "24h": (86_400, 900),
    "7d": (7 * 86_400, 7200),
}
_PATH_PART = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


class Inspection:
    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._database = queues.database
        self._catalog = queues.catalog

    async def partitions(self, queue: str, asked: QueuePartitionsQuery) -> QueuePartitions:
        rows = await self._database.browse(
            PARTITIONS,
            queue,
            asked.group or QUEUE_MODE,
            asked.filter,
            MAX_PARTITIONS,
            asked.limit,
            asked.offset,
        )
        partitions = [
            struct_of(
                QueuePartition,
                row,
                id=self._catalog.partition_uuid(row["id"]),
                oldest=_age(row["oldest"], row["now"]) if row["waiting"] else None,
                newest=_age(row["newest"], row["now"]),
                lease=str(row["lease_id"]) if row["leased"] else None,
                lease_ends_at=_millis(row["next_expiry"]) if row["leased"] else None,
            )
            for row in rows
        ]
        return QueuePartitions(partitions, rows[0]["total"] if rows else 0)

    async def lifeline(self, partition_id: str, transaction_id: str) -> Lifeline:
        rows = await self._database.browse(
            LIFELINE, self._catalog.partition_id(partition_id), transaction_id
        )
        if not rows:
            raise NotFound("Message not found")
        return Lifeline(
            [
                struct_of(
                    LifelineEvent,
                    row,
                    at=_millis(row["at"]),
                    group="" if row["group_name"] == QUEUE_MODE else row["group_name"],
                    until=_millis(row["until"]),
                )
                for row in rows
            ]
        )

    async def search(self, queue: str, asked: SearchQuery) -> Hits:
        """Search the next `limit` messages, from `cursor` on, for payloads that match `search`; or
        find one by its transaction id.
        """
        if asked.transaction_id:
            return await self.by_transaction(queue, asked.transaction_id)
        matches = matcher(asked.search)
        largest = MAX_SEARCHED_PAYLOAD if asked.search else MAX_PREVIEWED_PAYLOAD
        number = None
        if asked.partition:
            number = await self._catalog.partition(queue, asked.partition) or 0
        after, hits, searched = page_start(asked.cursor), [], 0
        since, until = asked.since, asked.until
        while searched < asked.limit:
            step = min(ROWS_PER_STEP, asked.limit - searched)
            rows = await self._database.browse(
                WINDOW, queue, number, since, until, *after, step, largest
            )
            for row in rows:
                payload = self._payload(row)
                if not asked.search or (payload is not None and matches(payload)):
                    hits.append(self._hit(row, payload))
            searched += len(rows)
            if len(rows) < step:
                return Hits(hits, searched, True, None)
            after = rows[-1]["xid"], rows[-1]["seq"], rows[-1]["partition_id"]
        return Hits(hits, searched, False, ".".join(map(str, after)))

    async def by_transaction(self, queue: str | None, transaction: str) -> Hits:
        """Return messages with this transaction id, in one queue or in all."""
        rows = await self._database.browse(
            BY_TRANSACTION, queue, transaction, MAX_ID_PARTITIONS, MAX_PREVIEWED_PAYLOAD
        )
        return Hits([self._hit(row, self._payload(row)) for row in rows], len(rows), True, None)

    def _payload(self, row: Any) -> bytes | None:
        """Return the payload; None if it is too large, or its key is missing."""
        try:
            return self._queues.keys.payload_of(row) if row["payload"] is not None else None
        except PenstockError:
            return None

    def _hit(self, row: Any, payload: bytes | None) -> Hit:
        return struct_of(
            Hit,
            row,
            partition_id=self._catalog.partition_uuid(row["partition_id"]),
            created_at=epoch_millis(row["created_at"]),
            preview=None if payload is None else preview_of(payload),
        )

    async def errors(self, asked: ErrorsQuery) -> ErrorGroups:
        """Count the errors of the newest `COUNTED_LETTERS` that match, the most frequent first."""
        wanted = asked.queue, asked.consumer_group, asked.filter
        rows = await self._database.browse(LETTERS, *wanted, COUNTED_LETTERS)
        begin = min((row["first"].timestamp() for row in rows), default=0.0)
        width = max(1.0, (time.time() - begin) / BUCKETS)
        groups = []
        for row in rows:
            history = [0] * BUCKETS
            for at in row["times"]:
                history[min(BUCKETS - 1, max(0, int((at - begin) / width)))] += 1
            groups.append(
                struct_of(
                    ErrorGroup,
                    row,
                    group=row["group_name"],
                    first=epoch_millis(row["first"]),
                    last=epoch_millis(row["last"]),
                    oldest=epoch_millis(row["oldest"]),
                    history=history,
                )
            )
        queue, group, error = (one or None for one in wanted)
        total = await self._queues.dead.count(Which(queue=queue, group=group, error=error))
        times = [1000 * (begin + width * number) for number in range(BUCKETS)] if rows else []
        return ErrorGroups(groups, total, times)

    async def history(self, asked: HistoryQuery) -> Series:
        """Return messages per second over hours or days, from the minutes that PostgreSQL has."""
        seconds, step = RANGES[asked.range]
        queue = asked.queue or None
        last = int(time.time() // step)
        first = last - seconds // step
        rows = await self._database.browse(HISTORY, first * step, (last + 1) * step, step, queue)
        counted = {row["bucket"]: row for row in rows}
        begun = await self._database.browse(BEGUN, queue)
        began = begun[0][0].timestamp() if begun[0][0] else time.time()
        running = time.time() - last * step  # seconds of the interval that has not ended
        buckets = range(first, last + (running >= MIN_RUNNING_SECONDS))

        def rate(bucket: int, column: str) -> float | None:
            """Return messages per second; None before there was anything to count."""
            if bucket not in counted:
                return None if (bucket + 1) * step <= began else 0.0
            count = counted[bucket][column]
            return float(count / (running if bucket == last else step))

        return Series(
            [bucket * step * 1000.0 for bucket in buckets],
            {
                name: [rate(bucket, name) for bucket in buckets]
                for name in ("pushed", "completed", "failed", "deadLetters")
            },
        )


async def push_to_ack(queues: Queues) -> Latencies:
    """Return how long messages took from push to ack in the last minutes."""
    latencies = Latencies()
    for row in await queues.database.browse(LATENCIES):
        latencies.add(row["latency_buckets"], row["latency_counts"])
    return latencies


def preview_of(payload: bytes) -> str:
    return payload[: 4 * PREVIEW].decode(errors="replace")[:PREVIEW]


def matcher(wanted: str) -> Callable[[bytes], bool]:
    """Return a function that tests whether a payload matches `total=42`, `items[0].sku=a-7`, or
    contains a text.
    """
    path, equals, value = wanted.partition("=")
    if not equals:
        needle = wanted.lower().encode()
        return lambda payload: needle in payload.lower()
    steps = [
        name or int(index) for name, index in _PATH_PART.findall(path.strip().removeprefix("$"))
    ]
    if not steps:
        raise InvalidRequest("search is text, or a path and a value such as order.id=7")
    value = value.strip().strip('"')

    def matches(payload: bytes) -> bool:
        try:
            node = msgspec.json.decode(payload)
        except NOT_JSON:
            return False
        for step in steps:
            if isinstance(node, dict) and str(step) in node:
                node = node[str(step)]
            elif isinstance(node, list) and isinstance(step, int) and step < len(node):
                node = node[step]
            else:
                return False
        text = node if isinstance(node, str) else msgspec.json.encode(node).decode()
        return text == value

    return matches


def _age(at: datetime | None, now: datetime) -> float | None:
    return None if at is None else max(0.0, (now - at) / timedelta(seconds=1))


def _millis(at: datetime | None) -> float | None:
    return None if at is None else epoch_millis(at)
