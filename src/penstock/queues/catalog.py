"""Cache queues, partitions and groups, so that the hot paths send numbers instead of names.

An entry may be stale. The SQL functions notice it (a partition or group was deleted, a queue became
encrypted), and the caller drops the entry and reads it again. A change by any broker is announced
on the notify channel and empties the cache. Each kind has at most `MAX_REMEMBERED` entries, so a
queue of a million partitions needs no more memory. Other partitions are read in batches.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from penstock.database import Database, struct_of
from penstock.errors import Unavailable
from penstock.protocol.message_ids import base_of, partition_of, text_of
from penstock.queues.options import options_of
from penstock.queues.types import Item, QueueInfo

MAX_REMEMBERED = 100_000  # of each kind; beyond it we start over
# a count of more than this many partitions is kept for a second per so many
COUNTED_PER_SECOND = 20_000
K = TypeVar("K")
V = TypeVar("V")
PartitionName = tuple[str, str]  # queue, partition


class Location(NamedTuple):
    """Where a push stores the messages of a partition."""

    partition: int
    encrypted: bool  # its queue asks for encryption


Locations = Mapping[PartitionName, Location]


class QueueCatalog:
    def __init__(self, database: Database) -> None:
        self._database = database
        self.partitions: dict[PartitionName, int] = {}
        # (queue, group, partition or 0) -> group id
        self.groups: dict[tuple[str, str, int], int] = {}
        self.queues: dict[str, QueueInfo] = {}  # as far as they are remembered
        self._generation = 0
        self._prefixes: dict[int, str] = {}
        # queue -> (until when to believe it, its partitions)
        self._counts: dict[int, tuple[float, int]] = {}

    def forget(self) -> None:
        """Empty the cache, because a broker changed something."""
        self._generation += 1
        self.partitions.clear()
        self.groups.clear()
        self.queues.clear()

    def is_unordered(self, queue: str) -> bool:
        """Return whether consumers share its partitions (`ordering: none`); False if the queue is
        not in the cache.
        """
        info = self.queues.get(queue)
        return info is not None and info.options.ordering == "none"

    def encrypted(self, queue: str) -> bool | None:
        """Return whether a queue asks for encryption; None if it is not in the cache."""
        info = self.queues.get(queue)
        return None if info is None else info.options.encryption_enabled

    @property
    def installation(self) -> int:
        """Return the number in all ids of this database. Raise Unavailable until it is known."""
        if self._database.identity is None:
            raise Unavailable("the database is down")
        return self._database.identity

    def partition_uuid(self, partition: int) -> str:
        prefix = self._prefixes.get(partition) or self._prefix(partition)
        return prefix + "000000000000"

    def message_uuid(self, partition: int, seq: int) -> str:
        if seq >> 48:
            return text_of(base_of(self.installation, partition) | seq)
        return f"{self._prefixes.get(partition) or self._prefix(partition)}{seq:012x}"

    def uuids(self, partition: int, seqs: Sequence[int | None]) -> tuple[str, list[str | None]]:
        """Return the ids of a partition and of some of its messages; None for None."""
        prefix = self._prefixes.get(partition) or self._prefix(partition)
        ids = [
            None
            if seq is None
            else f"{prefix}{seq:012x}"
            if seq < 1 << 48
            else self.message_uuid(partition, seq)
            for seq in seqs
        ]
        return prefix + "0" * 12, ids

    def _prefix(self, partition: int) -> str:
        """Compute all but the last twelve digits of the ids of a partition and its messages."""
        prefix = text_of(base_of(self.installation, partition))[:24]
        remember(self._prefixes, partition, prefix)
        return prefix

    def partition_id(self, text: str) -> int | None:
        return partition_of(self.installation, text)

    async def queue(self, name: str) -> QueueInfo | None:
        info = self.queues.get(name)
        if info is None:
            generation = self._generation
            rows = await self._database.read(
                "SELECT * FROM queues WHERE name = $1 AND deleted_at IS NULL", name
            )
            if not rows:
                return None
            info = info_of(rows[0])
            if generation == self._generation:
                self.queues[name] = info
        return info

    async def matching(self, namespace: str | None, task: str | None) -> list[QueueInfo]:
        """Return the queues of a namespace and/or task, the highest priority first."""
        rows = await self._database.read(
            """SELECT * FROM queues
                WHERE deleted_at IS NULL AND ($1::text IS NULL OR namespace = $1)
                  AND ($2::text IS NULL OR task = $2) ORDER BY priority DESC, id""",
            namespace,
            task,
        )
        return [info_of(row) for row in rows]

    async def locate(self, items: Collection[Item]) -> dict[PartitionName, Location]:
        """Return where the items go. Create missing queues and partitions. Leave out those that are
        deleted meanwhile.
        """
        wanted = {(item.queue, item.partition) for item in items}
        if not wanted <= self.partitions.keys():
            await self.ensure(wanted, {item.queue for item in items if item.ordering == "none"})
        numbers = {name: self.partitions.get(name) for name in wanted}
        encrypted: dict[str, bool] = {}
        for queue in {queue for queue, _ in wanted}:
            info = self.queues.get(queue) or await self.queue(queue)
            if info is not None:
                encrypted[queue] = info.options.encryption_enabled
        return {
            name: Location(number, encrypted[name[0]])
            for name, number in numbers.items()
            if number is not None and name[0] in encrypted
        }

    async def ensure(
        self, wanted: Collection[PartitionName], unordered: Iterable[str] = ()
    ) -> None:
        """Have all (queue, partition) pairs in `partitions`, creating what is missing. A new queue
        that is among `unordered` has no order.
        """
        missing = [pair for pair in dict.fromkeys(wanted) if pair not in self.partitions]
        if not missing:
            return
        if len(self.partitions) + len(missing) > MAX_REMEMBERED:
            self.partitions.clear()
            missing = list(dict.fromkeys(wanted))
        rows = await self._database.read(
            "SELECT * FROM queue_ensure($1, $2, $3)",
            [queue for queue, _ in missing],
            [name for _, name in missing],
            list(unordered),
        )
        for row in rows:
            self.partitions[missing[row["ord"] - 1]] = row["partition_id"]

    async def partition(self, queue: str, name: str) -> int | None:
        """Return the number of an existing partition."""
        number = self.partitions.get((queue, name))
        if number is None:
            rows = await self._database.read(
                """SELECT p.id FROM queues q JOIN partitions p ON p.queue_id = q.id
                    WHERE q.name = $1 AND q.deleted_at IS NULL AND p.name = $2""",
                queue,
                name,
            )
            if rows:
                number = rows[0]["id"]
                remember(self.partitions, (queue, name), number)
        return number

    async def partition_counts(self, queues: Iterable[int]) -> dict[int, int]:
        """Return how many partitions each queue has; a large count may be some seconds old."""
        now = time.monotonic()
        wanted = set(queues)
        counts = {
            queue: self._counts[queue][1]
            for queue in wanted
            if self._counts.get(queue, (0.0, 0))[0] > now
        }
        rows = await self._database.browse(
            """SELECT q AS id, (SELECT count(*) FROM partitions p WHERE p.queue_id = q) AS n
                 FROM unnest($1::int[]) q""",
            sorted(wanted - counts.keys()),
        )
        self._counts = {queue: entry for queue, entry in self._counts.items() if entry[0] > now}
        for row in rows:
            counts[row["id"]] = row["n"]
            if row["n"] > COUNTED_PER_SECOND:
                self._counts[row["id"]] = (now + row["n"] / COUNTED_PER_SECOND, row["n"])
        return counts


def remember(copies: dict[K, V], key: K, value: V) -> None:
    """Add to copies of limited number; when they are too many, start over."""
    if len(copies) >= MAX_REMEMBERED:
        copies.clear()
    copies[key] = value


def info_of(row: Any) -> QueueInfo:
    return struct_of(QueueInfo, row, uuid=str(row["uuid"]), options=options_of(row))
