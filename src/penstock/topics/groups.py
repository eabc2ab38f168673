"""Consumer groups on topics: their committed offsets, and the leases of their members.

A group has one committed offset per topic: all records below it are done. A member that reads alone
commits offsets itself. Members that share a topic lease ranges of offsets, which never overlap. The
committed offset moves over completed ranges up to the first gap. A range whose lease is neither
completed nor renewed in time is leased next. So every record is processed at least once, in order
within a lease. It is processed twice only if a member was too slow or the broker was restarted:
leases are in memory, on a monotonic clock. Committed offsets are in a journal
(`penstock.topics.offsets_journal`).

If a topic ends before a committed offset, records were lost: the topic reports that, and does not
assign their offsets again (`Topic.expect`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Literal

from penstock.contract.topics import GroupDetails, LeaseDetails, MemberDetails
from penstock.errors import Conflict, Damaged, InvalidOffset, NotFound
from penstock.io.fs import DISK, Fs
from penstock.io.tasks import in_pool
from penstock.log.tier.cache import NotCached
from penstock.metrics import Metrics
from penstock.protocol.ids import uuid7
from penstock.protocol.names import check_name, split_label
from penstock.protocol.partitions import assigned_partitions
from penstock.topics.assigned_groups import AssignedGroups
from penstock.topics.group_history import GroupHistory
from penstock.topics.offsets_journal import CommittedOffset, OffsetsJournal
from penstock.topics.shared.groups import OffsetRange, SharedPosition
from penstock.topics.shared.log import SharedLog
from penstock.topics.store import AnyLog, TopicStore
from penstock.topics.write_claims import WriteClaims

log = logging.getLogger("penstock.topics.groups")


@dataclass(slots=True)
class Cursor:
    """A group on a topic. `leases`, `returned` and `done` never overlap and are below `next`."""

    group: str
    topic: str
    incarnation: str
    committed: int
    next: int  # the first offset that was never leased
    leases: dict[str, OffsetRange] = field(default_factory=dict)
    # Heaps of ranges: to lease again before `next`, and completed beyond `committed`.
    returned: list[tuple[int, int]] = field(default_factory=list)
    done: list[tuple[int, int]] = field(default_factory=list)
    note: str = ""  # text that a Kafka client stored with its commit

    def as_committed(self) -> CommittedOffset:
        return CommittedOffset(self.group, self.topic, self.incarnation, self.committed, self.note)

    def advance(self, floor: int) -> bool:
        """Move the committed offset over completed ranges, at least to `floor`. Return whether it
        moved.
        """
        before = self.committed
        self.committed = max(self.committed, floor)
        while self.done and self.done[0][0] <= self.committed:
            self.committed = max(self.committed, heappop(self.done)[1])
        self.next = max(self.next, self.committed)
        return self.committed != before


class Groups:
    def __init__(
        self,
        directory: Path,
        store: TopicStore,
        *,
        pool: Executor,
        metrics: Metrics,
        fs: Fs = DISK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self.shared = store.shared.groups if store.shared is not None else None
        self._pool = pool
        self._clock = clock
        sync = store.settings.fsync != "never"
        self.history = GroupHistory(directory, pool=pool, fs=fs)
        self.write_claims = WriteClaims(
            directory,
            pool=pool,
            expiry=store.settings.producer_expiry,
            sync=sync,
            fs=fs,
        )
        self._journal = OffsetsJournal(
            directory,
            pool=pool,
            fs=fs,
            sync=sync,
            damage=metrics.counter(
                "penstock_topic_group_damage_total",
                "Damage in the committed offsets of consumer groups at startup, by outcome",
                "outcome",
            ),
        )
        # Groups of Kafka's clients, while they have members.
        self.assigned = AssignedGroups(self.is_leased, metrics, clock)
        self._lease_time = store.settings.lease_time
        self._cursors: dict[tuple[str, str], Cursor] = {}
        self._leases: dict[str, Cursor] = {}
        # A heap; entries of ended or renewed leases are skipped.
        self._expiries: list[tuple[float, str]] = []
        self._expired = metrics.counter(
            "penstock_topic_leases_expired_total", "Leases that expired", "group"
        )
        metrics.gauge(
            "penstock_topic_group_lag",
            "Records that the group has not committed yet",
            "group",
            "topic",
            read=self._lags,
        )
        store.on_delete(self._topic_deleted)

    async def start(self) -> None:
        await in_pool(self._pool, self._journal.load, self.history.groups)
        for committed in self._journal.offsets.values():
            group, topic, incarnation, offset, note = committed
            cursor = Cursor(group, topic, incarnation, offset, next=offset, note=note)
            self._cursors[cursor.group, cursor.topic] = cursor
        await self._check_topics()
        await self._journal.copy()
        await self.write_claims.start()

    async def stop(self) -> None:
        self.assigned.stop()
        await self.history.stop()
        await self._journal.stop()
        await self.write_claims.stop()

    # Committed offsets

    def offsets(self) -> list[CommittedOffset]:
        """Return the committed offsets of all groups."""
        return list(self._journal.offsets.values())

    def committed_offset(self, group: str, topic: str) -> CommittedOffset | None:
        """Return the group's committed offset with its note; None if it has none."""
        cursor = self._find(group, topic)
        return None if cursor is None else cursor.as_committed()

    def committed(self, group: str, topic: str) -> int | None:
        """Return the group's committed offset; None if it has none."""
        cursor = self._find(group, topic)
        return None if cursor is None else cursor.committed

    async def commit(self, group: str, topic: str, offset: int) -> None:
        """Set the group's committed offset durably. Its leases on this topic end."""
        self._check_not_assigned(group)
        topic_log = self._store.require(topic)
        if isinstance(topic_log, SharedLog) and self.shared is not None:
            await self.shared.commit_one(group, topic_log, offset)
            return
        self.set_committed(group, topic, offset)
        await self.flush()

    async def flush(self) -> None:
        """Wait until all committed offsets are durable. Call it after `set_committed`."""
        await self._journal.flush()

    def set_committed(self, group: str, topic: str, offset: int, note: str = "") -> None:
        """Set the group's committed offset; `flush` makes it durable."""
        topic_log = self._store.require(topic)
        check_name(group, "group")
        if not 0 <= offset <= topic_log.next_offset:
            raise InvalidOffset(f"offset {offset} is outside 0 to {topic_log.next_offset}")
        cursor = self._cursor(group, topic_log, offset)
        for lease_id in cursor.leases:
            del self._leases[lease_id]
        cursor.leases, cursor.returned, cursor.done = {}, [], []
        before, cursor.committed = cursor.committed, offset
        cursor.next = offset
        cursor.note = note
        self._count_commit(cursor, topic_log, before)
        self._journal.commit(cursor.as_committed())

    def _check_not_assigned(self, group: str) -> None:
        if self.assigned.has_members(group):
            raise Conflict(
                f"group {group!r} has members of Kafka's protocol, which divide partitions"
            )

    def is_leased(self, group: str) -> bool:
        """Return whether members of the group hold leases."""
        self._expire()
        return any(cursor.group == group for cursor in self._leases.values())

    def lag(self, group: str, topic: str) -> int:
        """Return the number of records from the group's committed offset on; all if it has none."""
        topic_log = self._store.require(topic)
        cursor = self._find(group, topic)
        committed = cursor.committed if cursor is not None else 0
        try:
            return topic_log.records_from(committed)
        except (Damaged, NotCached):  # the index cannot be read now: count offsets instead
            return topic_log.next_offset - max(topic_log.first_offset, committed)

    def _count_commit(self, cursor: Cursor, topic: AnyLog, before: int) -> None:
        if before < cursor.committed and not isinstance(topic, SharedLog):
            lag = self.lag(cursor.group, cursor.topic)
            self.history.committed(topic, cursor.group, before, cursor.committed, lag)

    def names(self, topic: str | None = None) -> list[str]:
        """Return the groups, all or those on one topic."""
        return sorted(
            {cursor.group for cursor in self.positions() if topic in (None, cursor.topic)}
        )

    def details(self, group: str) -> list[GroupDetails]:
        """Return committed offset, lag and leases per topic."""
        cursors = [cursor for cursor in self.positions() if cursor.group == group]
        if not cursors:
            raise NotFound(f"group {group!r} does not exist")
        now = self._clock()
        return [
            GroupDetails(
                group,
                cursor.topic,
                cursor.committed,
                self.lag(group, cursor.topic),
                [
                    LeaseDetails(
                        lease.lease_id, lease.member, lease.start, lease.end, lease.expires - now
                    )
                    for lease in cursor.leases.values()
                ],
                self._members(group, split_label(cursor.topic)[0]),
                cursor.note,
            )
            for cursor in sorted(cursors, key=lambda cursor: cursor.topic)
        ]

    def _members(self, group: str, topic: str) -> list[MemberDetails]:
        assigned = self.assigned.get(group)
        if assigned is None:
            return []
        return [
            MemberDetails(one.id, one.client, one.host, partitions)
            for one in assigned.members.values()
            if (partitions := assigned_partitions(one.assignment).get(topic))
        ]

    async def delete(self, group: str, topic: str | None = None) -> None:
        """Delete the group, completely or on one topic."""
        keys = [key for key in self._cursors if key[0] == group and topic in (None, key[1])]
        topic_log = self._store.get(topic) if topic is not None else None
        if self.shared is not None and (topic is None or isinstance(topic_log, SharedLog)):
            try:
                shared = topic_log if isinstance(topic_log, SharedLog) else None
                await self.shared.delete(group, shared)
            except NotFound:
                if not keys:
                    raise
        elif not keys:
            raise NotFound(f"group {group!r} does not exist")
        for key in keys:
            self._forget(key)
        if keys:
            await self._journal.flush()

    # Groups on local and shared topics together

    async def all_names(self, topic: str | None = None) -> list[str]:
        """Return the groups, all or those on one topic."""
        return sorted({*self.names(topic), *(one.group for one in await self._shared_on(topic))})

    async def all_details(self, group: str) -> list[GroupDetails]:
        """Return committed offset, lag and leases per topic."""
        details = self.details(group) if group in self.names() else []
        for one in await self._shared_on(None, group):
            topic_log = self._store.get(one.topic)
            if not isinstance(topic_log, SharedLog) or self.shared is None:
                continue
            leases = [
                LeaseDetails(
                    row["lease_id"].hex,
                    row["member"],
                    row["first_offset"],
                    row["end_offset"],
                    row["seconds"],
                )
                for row in await self.shared.leases(group, topic_log)
            ]
            lag = topic_log.records_from(one.committed)
            members = self._members(group, topic_log.topic)
            details.append(
                GroupDetails(group, one.topic, one.committed, lag, leases, members, one.note)
            )
        if not details:
            raise NotFound(f"group {group!r} does not exist")
        return details

    async def resume(self, group: str, topic: str) -> tuple[int | None, int]:
        """Return the group's committed offset, None if it has none, and its lag."""
        topic_log = self._store.require(topic)
        if not isinstance(topic_log, SharedLog):
            return self.committed(group, topic), self.lag(group, topic)
        rows = [one for one in await self._shared_on(topic, group) if one.topic == topic]
        committed = rows[0].committed if rows else None
        return committed, topic_log.records_from(committed or 0)

    async def _shared_on(self, topic: str | None, group: str | None = None) -> list[SharedPosition]:
        topic_log = self._store.get(topic) if topic is not None else None
        if self.shared is None or not (topic is None or isinstance(topic_log, SharedLog)):
            return []
        if topic is None and not self._store.has_shared:
            return []
        return await self.shared.positions(
            group, topic_log if isinstance(topic_log, SharedLog) else None
        )

    # Leases

    async def lease_within(
        self, seconds: float, group: str, topic: str, member: str, max_records: int
    ) -> OffsetRange | None:
        """Lease a range; wait up to `seconds` if there is none."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        log = self._store.require(topic)
        while True:
            if isinstance(log, SharedLog) and self.shared is not None:
                self._check_not_assigned(group)
                lease = await self.shared.lease(group, log, member, max_records)
            else:
                lease = self.lease(group, topic, member, max_records)
            left = deadline - loop.time()
            if lease is not None or left <= 0:
                return lease
            await log.wait_for(log.next_offset, min(1.0, left))

    def lease(
        self,
        group: str,
        topic: str,
        member: str,
        max_records: int,
        start: Literal["earliest", "latest"] = "earliest",
    ) -> OffsetRange | None:
        """Lease a range of the topic to this member. Return None if there is none now.

        `start` is where a group without a committed offset begins.
        """
        topic_log = self._store.require(topic)
        check_name(group, "group")
        self._check_not_assigned(group)
        cursor = self._find(group, topic)
        if cursor is None:
            cursor = self._cursor(
                group,
                topic_log,
                topic_log.first_offset if start == "earliest" else topic_log.next_offset,
            )
            self._journal.commit(cursor.as_committed())
        self._expire()
        before = cursor.committed
        if cursor.advance(topic_log.first_offset if before < topic_log.first_offset else 0):
            self._journal.commit(cursor.as_committed())
            if topic_log.lost_at(before) is not None:
                log.warning(
                    "group %s passes offsets %d to %d of %s: lost",
                    group,
                    before,
                    cursor.committed - 1,
                    topic,
                )
        piece = self._piece(cursor, topic_log, max(1, max_records))
        if piece is None:
            return None
        expires = self._clock() + self._lease_time
        leased = OffsetRange(*piece, uuid7().hex, expires, group, topic, member)
        cursor.leases[leased.lease_id] = leased
        self._leases[leased.lease_id] = cursor
        heappush(self._expiries, (expires, leased.lease_id))
        return leased

    def _piece(self, cursor: Cursor, topic: AnyLog, most: int) -> tuple[int, int] | None:
        while cursor.returned:
            start, end = heappop(cursor.returned)
            start = max(start, cursor.committed)
            if start >= end:
                continue  # retention deleted it in the meantime
            stop = min(end, topic.first_from(start) + most)
            if stop < end:
                heappush(cursor.returned, (stop, end))
            return start, stop
        first = topic.first_from(cursor.next)
        if first >= topic.next_offset:
            return None
        start, cursor.next = cursor.next, min(first + most, topic.next_offset)
        return start, cursor.next

    async def complete(self, lease_id: str, topic: str | None = None) -> int:
        """Complete a lease and return the committed offset after it. Raises Conflict if the lease
        was lost. Shared topics need `topic`.
        """
        if topic is not None and self.shared is not None and self._store.is_shared(topic):
            return await self.shared.complete(lease_id)
        cursor, leased = self._end(lease_id)
        heappush(cursor.done, (leased.start, leased.end))
        before = cursor.committed
        if cursor.advance(0):
            if (topic_log := self._store.get(cursor.topic)) is not None:
                self._count_commit(cursor, topic_log, before)
            self._journal.commit(cursor.as_committed())
            await self._journal.flush()
        return cursor.committed

    async def renew_on(self, topic: str, lease_id: str) -> OffsetRange:
        """Renew a lease on a local or a shared topic."""
        if self.shared is not None and self._store.is_shared(topic):
            return await self.shared.renew(lease_id)
        return self.renew(lease_id)

    async def leave_on(self, group: str, topic: str, member: str) -> int:
        """Release a member's leases on a local or a shared topic. Return their number."""
        log = self._store.require(topic)
        if self.shared is not None and isinstance(log, SharedLog):
            return await self.shared.leave(group, log, member)
        return self.leave(group, topic, member)

    def renew(self, lease_id: str) -> OffsetRange:
        """Extend a lease by a full lease time."""
        cursor = self._leases.get(lease_id)
        if cursor is None:
            raise _lost(lease_id)
        leased = cursor.leases[lease_id]
        leased.expires = self._clock() + self._lease_time
        heappush(self._expiries, (leased.expires, lease_id))
        return leased

    def release(self, lease_id: str) -> None:
        """Release a lease unprocessed. Its range is leased next."""
        cursor, leased = self._end(lease_id)
        heappush(cursor.returned, (leased.start, leased.end))
        self.history.retried(cursor.topic, cursor.group, leased.end - leased.start)

    def leave(self, group: str, topic: str, member: str) -> int:
        """Release all leases of this member. Return their number."""
        cursor = self._find(group, topic)
        lease_ids = (
            [lease.lease_id for lease in cursor.leases.values() if lease.member == member]
            if cursor
            else []
        )
        for lease_id in lease_ids:
            self.release(lease_id)
        return len(lease_ids)

    def _end(self, lease_id: str) -> tuple[Cursor, OffsetRange]:
        cursor = self._leases.pop(lease_id, None)
        if cursor is None:
            raise _lost(lease_id)
        return cursor, cursor.leases.pop(lease_id)

    def _expire(self) -> None:
        """Release expired leases. Until this is called, an expired lease may still be completed."""
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            expires, lease_id = heappop(self._expiries)
            cursor = self._leases.get(lease_id)
            if cursor is not None and cursor.leases[lease_id].expires == expires:
                self._expired.add(1, cursor.group)
                self.release(lease_id)

    # Cursors

    def _find(self, group: str, topic: str) -> Cursor | None:
        """Return the cursor, unless it belongs to an earlier topic of the same name."""
        cursor = self._cursors.get((group, topic))
        topic_log = self._store.get(topic)
        if cursor is None or topic_log is None or topic_log.incarnation != cursor.incarnation:
            return None
        return cursor

    def _cursor(self, group: str, topic: AnyLog, offset: int) -> Cursor:
        cursor = self._find(group, topic.name)
        if cursor is None:
            cursor = Cursor(group, topic.name, topic.incarnation, offset, offset)
            self._cursors[group, topic.name] = cursor
        return cursor

    def positions(self) -> list[Cursor]:
        """Return the cursors of all groups on existing topics."""
        return [cursor for key, cursor in self._cursors.items() if self._find(*key) is cursor]

    def _lags(self) -> dict[tuple[str, str], float]:
        return {
            (cursor.group, cursor.topic): self.lag(cursor.group, cursor.topic)
            for cursor in self.positions()
        }

    def _forget(self, key: tuple[str, str]) -> None:
        for lease_id in self._cursors.pop(key).leases:
            del self._leases[lease_id]
        self._journal.delete(*key)

    def _topic_deleted(self, topic: AnyLog) -> None:
        self.write_claims.forget(topic.name)
        for key in [key for key in self._cursors if key[1] == topic.name]:
            self._forget(key)

    async def _check_topics(self) -> None:
        """Check that the topics have all offsets that groups have committed."""
        gone = {
            cursor.topic
            for cursor in self._cursors.values()
            if self._store.get(cursor.topic) is None
        }
        for name in sorted(gone - self._store.unreadable.keys()):
            text = f"groups committed offsets on topic {name}, which does not exist"
            self._journal.report("lost", text)
        for cursor in self._cursors.values():
            topic = self._store.get(cursor.topic)
            if topic is None:
                continue
            if topic.incarnation != cursor.incarnation:
                if not topic.incarnation_lost:
                    continue  # of an earlier topic of that name
                cursor.incarnation = topic.incarnation
                self._journal.correct(cursor.as_committed())
                self._journal.report(
                    "restored",
                    f"topic {topic.name} lost its incarnation: "
                    f"group {cursor.group} keeps its offset {cursor.committed}",
                )
            if not isinstance(topic, SharedLog):
                await topic.expect(cursor.committed, f"group {cursor.group}")


def _lost(lease_id: str) -> Conflict:
    return Conflict(f"lease {lease_id} does not exist: it has expired, or it was completed")
