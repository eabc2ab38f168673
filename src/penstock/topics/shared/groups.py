"""Groups on shared topics: offsets and leases in PostgreSQL, so that every broker serves them all.

A commit of a Kafka group carries the epoch of its coordinator (`nodes`). So a broker that was
frozen cannot commit for members that have moved to another one.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from penstock.database import Database
from penstock.errors import Conflict, InvalidOffset, NotFound
from penstock.protocol.ids import uuid7
from penstock.protocol.names import check_name, partition_label
from penstock.topics.shared.log import SharedLog

POSITIONS = """
  SELECT o.group_name, l.topic, l.partition, o.committed, o.note
    FROM shared_offsets o JOIN shared_logs l ON l.id = o.log_id
   WHERE ($1::text IS NULL OR o.group_name = $1) AND ($2::bigint IS NULL OR o.log_id = $2)
   ORDER BY 1, 2, 3"""
LEASES = """
  SELECT lease_id, member, first_offset, end_offset,
         extract(epoch FROM expires_at - clock_timestamp())::float8 AS seconds
    FROM shared_leases
   WHERE group_name = $1 AND log_id = $2
     AND expires_at > clock_timestamp() AND expires_at < 'infinity'
   ORDER BY first_offset"""
RENEW = """
  UPDATE shared_leases SET expires_at = clock_timestamp() + make_interval(secs => $2)
   WHERE lease_id = $1 AND expires_at < 'infinity' AND expires_at > '-infinity'
  RETURNING first_offset, end_offset, group_name, member"""
LEAVE = """
  UPDATE shared_leases SET expires_at = '-infinity'
   WHERE group_name = $1 AND log_id = $2 AND member = $3 AND expires_at < 'infinity'
     AND expires_at > '-infinity'
  RETURNING lease_id"""
DELETE = """
  WITH leases AS (
    DELETE FROM shared_leases WHERE group_name = $1 AND ($2::bigint IS NULL OR log_id = $2))
  DELETE FROM shared_offsets WHERE group_name = $1 AND ($2::bigint IS NULL OR log_id = $2)
  RETURNING log_id"""


class NotCoordinator(Conflict):
    """Another broker has become the coordinator of this group."""


@dataclass(slots=True)
class OffsetRange:
    """A leased range of a topic: offsets from `start` up to, not including, `end`."""

    start: int
    end: int
    lease_id: str
    expires: float  # on the monotonic clock
    group: str
    topic: str
    member: str


class SharedPosition(NamedTuple):
    group: str
    topic: str  # the label of the partition
    committed: int
    note: str


class SharedGroups:
    def __init__(self, database: Database, lease_time: float) -> None:
        self._database = database
        self._lease_time = lease_time

    # Leases

    async def lease(self, group: str, log: SharedLog, member: str, most: int) -> OffsetRange | None:
        """Lease a range of the log to this member. Return None if there is nothing to lease."""
        check_name(group, "group")
        lease = uuid7()
        [row] = await self._database.fetch(
            "SELECT * FROM shared_lease($1, $2, $3, $4, $5, $6)",
            *(group, log.log_id, member, max(1, most), self._lease_time, lease),
        )
        if row["first_offset"] is None:
            return None
        expires = time.monotonic() + self._lease_time
        piece = (row["first_offset"], row["end_offset"])
        return OffsetRange(*piece, lease.hex, expires, group, log.name, member)

    async def complete(self, lease_id: str) -> int:
        """Complete the lease and return the committed offset. Raises Conflict if it was lost."""
        [row] = await self._database.fetch("SELECT shared_complete($1) AS done", _uuid(lease_id))
        if row["done"] is None:
            raise _lost_lease(lease_id)
        done: int = row["done"]
        return done

    async def renew(self, lease_id: str) -> OffsetRange:
        """Extend the lease by a full lease time from now."""
        rows = await self._database.read(RENEW, _uuid(lease_id), self._lease_time)
        if not rows:
            raise _lost_lease(lease_id)
        [row] = rows
        expires = time.monotonic() + self._lease_time
        piece = (row["first_offset"], row["end_offset"])
        return OffsetRange(*piece, lease_id, expires, row["group_name"], "", row["member"])

    async def leave(self, group: str, log: SharedLog, member: str) -> int:
        """Release all leases of a member. Return how many."""
        return len(await self._database.read(LEAVE, group, log.log_id, member))

    async def leases(self, group: str, log: SharedLog) -> list[Any]:
        """Return the rows of the leases that have not expired."""
        return await self._database.browse(LEASES, group, log.log_id)

    # Committed offsets

    async def commit(
        self,
        group: str,
        positions: Sequence[tuple[SharedLog, int, str]],
        coordinator: tuple[int, int] | None = None,
    ) -> set[str]:
        """Commit offsets with a note each. Return the labels of the logs that were committed.

        `coordinator` is the node and epoch on whose behalf members commit.
        """
        check_name(group, "group")
        node, epoch = coordinator or (None, None)
        [row] = await self._database.read(
            "SELECT shared_commit($1, $2, $3, $4, $5, $6) AS done",
            group,
            [log.log_id for log, _, _ in positions],
            [offset for _, offset, _ in positions],
            [note for _, _, note in positions],
            *(node, epoch),
        )
        if row["done"] is None:
            raise NotCoordinator(f"another broker coordinates group {group!r}")
        return {log.name for log, _, _ in positions if log.log_id in row["done"]}

    async def commit_one(self, group: str, log: SharedLog, offset: int) -> None:
        if not await self.commit(group, [(log, offset, "")]):
            await log.refresh()
            raise InvalidOffset(f"offset {offset} is not between 0 and {log.next_offset}")

    async def positions(
        self, group: str | None = None, log: SharedLog | None = None
    ) -> list[SharedPosition]:
        """Return the positions of all groups, of one group, or of the groups on one log."""
        rows = await self._database.browse(POSITIONS, group, log.log_id if log else None)
        return [
            SharedPosition(
                row["group_name"],
                partition_label(row["topic"], row["partition"]),
                row["committed"],
                row["note"],
            )
            for row in rows
        ]

    async def delete(self, group: str, log: SharedLog | None = None) -> None:
        """Delete the group, on all logs or on one."""
        if not await self._database.read(DELETE, group, log.log_id if log else None):
            raise NotFound(f"group {group!r} does not exist")


def _uuid(lease_id: str) -> UUID:
    try:
        return UUID(lease_id)
    except ValueError:
        raise _lost_lease(lease_id) from None


def _lost_lease(lease_id: str) -> Conflict:
    return Conflict(
        f"lease {lease_id} does not exist any more: it has expired, or it was completed"
    )
