"""Consumer groups on topics: how far each group has come, and who of its members works on what.

A group has one committed offset per topic: everything below it is done. A member that reads alone
commits offsets itself. Members that share a topic lease ranges of offsets: each lease is a piece
nobody else has, and the committed offset moves over completed pieces as far as they follow one
another without a gap. A lease that is neither completed nor renewed in time returns to the group
and is the next one handed out. So every record is processed at least once, in order within a lease,
and twice only when a member was too slow or the broker was restarted in between: leases live in
memory, on a monotonic clock; the committed offsets live in a journal.

    <data_directory>/.penstock/groups/offsets.log    text, one line per event, the last one of a group and topic counts
        <8 hexadecimal digits: CRC32C of the rest> <JSON array>\\n
        ["commit", group, topic, incarnation, offset]      ["delete", group, topic]

A line that does not match its checksum is skipped and counted; the group then starts from its
commit before that. The journal is replaced by a snapshot when it has grown to several times what it
says, and after any failed write.

    <data_directory>/.penstock/groups/offsets.copy   a commit for each group and topic as of then; before them
        ["copy", size]                               how large the journal was; it never becomes smaller than that

The copy is written when the broker starts and stops, and whenever the journal has doubled. A
journal that is missing or smaller than its copy says has lost commits: the groups go on from the
copy, which is reported. They read again what they did since; nothing is passed over.

What a group committed was there. When a topic ends before that, its records are lost: the topic
reports it and gives none of their offsets again (`Topic.expect`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Literal

from penstock.errors import Conflict, Damaged, InvalidOffset, NotFound, StorageFailed, StorageFull
from penstock.log.fs import DISK, File, Fs
from penstock.log.journal_lines import line, parse
from penstock.log.pool import in_pool
from penstock.metrics import Metrics
from penstock.protocol.ids import uuid7
from penstock.protocol.names import check_name
from penstock.topics.group_history import Minutes
from penstock.topics.store import TopicStore
from penstock.topics.topic import Topic
from penstock.topics.write_claims import WriteClaims

log = logging.getLogger("penstock.topics.groups")

JOURNAL, COPY = "offsets.log", "offsets.copy"
SNAPSHOT_BYTES = 1 << 20  # a journal smaller than this is never replaced
SNAPSHOT_FACTOR = 8


@dataclass(slots=True)
class Range:
    """A leased piece of a topic: offsets from `start` up to, not including, `end`."""

    start: int
    end: int
    lease_id: str
    expires: float  # on the groups' clock
    group: str
    topic: str
    member: str


@dataclass(slots=True)
class Cursor:
    """One group on one topic. Ranges in `leases`, `returned` and `done` never overlap and lie below
    `next`.
    """

    group: str
    topic: str
    incarnation: str
    committed: int
    next: int  # the first offset never handed out
    leases: dict[str, Range] = field(default_factory=dict)
    returned: list[tuple[int, int]] = field(
        default_factory=list
    )  # a heap: handed out again before `next`
    done: list[tuple[int, int]] = field(
        default_factory=list
    )  # a heap: completed ahead of `committed`

    def advance(self, floor: int) -> bool:
        """Move the committed offset over what is done (or aged out); whether it moved."""
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
        self._directory = directory
        self._store = store
        self._fs = fs
        self._pool = pool
        self._clock = clock
        self.minutes = Minutes(directory, pool=pool, fs=fs)
        self.write_claims = WriteClaims(
            directory,
            pool=pool,
            expiry=store.settings.producer_expiry,
            sync=store.settings.fsync != "never",
            fs=fs,
        )
        self._lease_time = store.settings.lease_time
        self._sync = store.settings.fsync != "never"
        self._cursors: dict[tuple[str, str], Cursor] = {}
        self._leases: dict[str, Cursor] = {}
        self._expiries: list[
            tuple[float, str]
        ] = []  # a heap; entries of ended or renewed leases are skipped
        self._lines: list[bytes] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._writing: asyncio.Task[None] | None = None
        self._journal: File | None = None
        self._start_over = False  # the journal cannot be trusted: write a snapshot
        self._journal_size = 0
        self._copied = 0  # size of the journal as the copy says; 0: there is none
        self.skipped = 0  # damaged lines found at start
        self._expired = metrics.counter(
            "penstock_topic_leases_expired_total", "Leases that ran out", "group"
        )
        self._damage = metrics.counter(
            "penstock_topic_group_damage_total",
            "Faults in the groups' committed offsets found at a start, by outcome",
            "outcome",
        )
        metrics.gauge(
            "penstock_topic_group_lag",
            "Records not yet committed",
            "group",
            "topic",
            read=self._lags,
        )
        store.on_delete(self._topic_deleted)

    async def start(self) -> None:
        await in_pool(self._pool, self._load)
        await self._check_topics()
        await self._copy()
        await self.write_claims.start()

    async def stop(self) -> None:
        await self.minutes.stop()
        while self._writing is not None:
            await asyncio.wait([self._writing])
        await self._copy()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # Committed offsets

    def committed(self, group: str, topic: str) -> int | None:
        """The group's committed offset, None when it has none."""
        cursor = self._find(group, topic)
        return None if cursor is None else cursor.committed

    async def commit(self, group: str, topic: str, offset: int) -> None:
        """Set where the group goes on; leases it holds on this topic are void. Returns when it is
        durable.
        """
        found = self._store.require(topic)
        check_name(group, "group")
        if not 0 <= offset <= found.next_offset:
            raise InvalidOffset(f"offset {offset} lies outside 0 to {found.next_offset}")
        cursor = self._cursor(group, found, offset)
        for lease_id in cursor.leases:
            del self._leases[lease_id]
        cursor.leases, cursor.returned, cursor.done = {}, [], []
        before, cursor.committed = cursor.committed, offset
        cursor.next = offset
        self._settled(cursor, found, before)
        await self._write(_commit_line(cursor))

    def lag(self, group: str, topic: str) -> int:
        """Records between the group's commit and the topic's end; all of them when it has not
        committed.
        """
        found = self._store.require(topic)
        cursor = self._find(group, topic)
        committed = cursor.committed if cursor is not None else 0
        try:
            return found.records_from(committed)
        except Damaged:  # an index that cannot be read: offsets are what is known
            return found.next_offset - max(found.first_offset, committed)

    def _settled(self, cursor: Cursor, topic: Topic, before: int) -> None:
        if before < cursor.committed:
            lag = self.lag(cursor.group, cursor.topic)
            self.minutes.settled(topic, cursor.group, before, cursor.committed, lag)

    def names(self, topic: str | None = None) -> list[str]:
        """The groups, all or those on one topic."""
        return sorted({cursor.group for cursor in self._live() if topic in (None, cursor.topic)})

    def details(self, group: str) -> list[dict[str, Any]]:
        """Per topic: committed offset, lag, and who holds what."""
        found = [cursor for cursor in self._live() if cursor.group == group]
        if not found:
            raise NotFound(f"group {group!r} does not exist")
        now = self._clock()
        return [
            {
                "group": group,
                "topic": cursor.topic,
                "committed": cursor.committed,
                "lag": self.lag(group, cursor.topic),
                "leases": [
                    {
                        "lease": lease.lease_id,
                        "member": lease.member,
                        "start": lease.start,
                        "end": lease.end,
                        "expires_in": lease.expires - now,
                    }
                    for lease in cursor.leases.values()
                ],
            }
            for cursor in sorted(found, key=lambda cursor: cursor.topic)
        ]

    async def delete(self, group: str, topic: str | None = None) -> None:
        """Forget the group, altogether or on one topic."""
        keys = [key for key in self._cursors if key[0] == group and topic in (None, key[1])]
        if not keys:
            raise NotFound(f"group {group!r} does not exist")
        await self._write(b"".join(self._forget(key) for key in keys))

    # Leases

    def lease(
        self,
        group: str,
        topic: str,
        member: str,
        max_records: int,
        start: Literal["earliest", "latest"] = "earliest",
    ) -> Range | None:
        """A piece of the topic for this member alone; None when there is nothing to hand out now.

        `start` is where a group without a committed offset begins.
        """
        found = self._store.require(topic)
        check_name(group, "group")
        cursor = self._find(group, topic)
        if cursor is None:
            cursor = self._cursor(
                group, found, found.first_offset if start == "earliest" else found.next_offset
            )
            self._write_later(_commit_line(cursor))
        self._expire()
        before = cursor.committed
        if cursor.advance(found.first_offset if before < found.first_offset else 0):
            self._write_later(_commit_line(cursor))
            if found.lost_at(before) is not None:
                log.warning(
                    "group %s passes offsets %d to %d of %s: lost",
                    group,
                    before,
                    cursor.committed - 1,
                    topic,
                )
        piece = self._piece(cursor, found, max(1, max_records))
        if piece is None:
            return None
        expires = self._clock() + self._lease_time
        leased = Range(*piece, uuid7().hex, expires, group, topic, member)
        cursor.leases[leased.lease_id] = leased
        self._leases[leased.lease_id] = cursor
        heappush(self._expiries, (expires, leased.lease_id))
        return leased

    def _piece(self, cursor: Cursor, topic: Topic, most: int) -> tuple[int, int] | None:
        while cursor.returned:
            start, end = heappop(cursor.returned)
            start = max(start, cursor.committed)
            if start >= end:
                continue  # it aged out while nobody had it
            if end - start > most:
                heappush(cursor.returned, (start + most, end))
            return start, min(end, start + most)
        start, end = cursor.next, min(cursor.next + most, topic.next_offset)
        if start >= end:
            return None
        cursor.next = end
        return start, end

    async def complete(self, lease_id: str) -> int:
        """The range is processed; the group's committed offset after it. Conflict when the lease
        was lost.
        """
        cursor, leased = self._end(lease_id)
        heappush(cursor.done, (leased.start, leased.end))
        before = cursor.committed
        if cursor.advance(0):
            if (found := self._store.get(cursor.topic)) is not None:
                self._settled(cursor, found, before)
            await self._write(_commit_line(cursor))
        return cursor.committed

    def renew(self, lease_id: str) -> Range:
        """Another full lease time for a member that is still at work."""
        cursor = self._leases.get(lease_id)
        if cursor is None:
            raise _lost(lease_id)
        leased = cursor.leases[lease_id]
        leased.expires = self._clock() + self._lease_time
        heappush(self._expiries, (leased.expires, lease_id))
        return leased

    def release(self, lease_id: str) -> None:
        """Give the range back unprocessed: it is the next one handed out."""
        cursor, leased = self._end(lease_id)
        heappush(cursor.returned, (leased.start, leased.end))
        self.minutes.retried(cursor.topic, cursor.group, leased.end - leased.start)

    def leave(self, group: str, topic: str, member: str) -> int:
        """Give back all that this member holds; how many ranges that were."""
        cursor = self._find(group, topic)
        held = (
            [lease.lease_id for lease in cursor.leases.values() if lease.member == member]
            if cursor
            else []
        )
        for lease_id in held:
            self.release(lease_id)
        return len(held)

    def _end(self, lease_id: str) -> tuple[Cursor, Range]:
        cursor = self._leases.pop(lease_id, None)
        if cursor is None:
            raise _lost(lease_id)
        return cursor, cursor.leases.pop(lease_id)

    def _expire(self) -> None:
        """Take back what ran out. A lease that nobody else asked for since may still be completed."""
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            expires, lease_id = heappop(self._expiries)
            cursor = self._leases.get(lease_id)
            if cursor is not None and cursor.leases[lease_id].expires == expires:
                self._expired.add(1, cursor.group)
                self.release(lease_id)

    # Cursors

    def _find(self, group: str, topic: str) -> Cursor | None:
        """The cursor, unless it belongs to an earlier topic of the same name."""
        cursor = self._cursors.get((group, topic))
        found = self._store.get(topic)
        return (
            cursor
            if cursor is not None and found is not None and found.incarnation == cursor.incarnation
            else None
        )

    def _cursor(self, group: str, topic: Topic, offset: int) -> Cursor:
        cursor = self._find(group, topic.name)
        if cursor is None:
            cursor = Cursor(group, topic.name, topic.incarnation, offset, offset)
            self._cursors[group, topic.name] = cursor
        return cursor

    def _live(self) -> list[Cursor]:
        return [cursor for key, cursor in self._cursors.items() if self._find(*key) is cursor]

    def _lags(self) -> dict[tuple[str, str], float]:
        return {
            (cursor.group, cursor.topic): self.lag(cursor.group, cursor.topic)
            for cursor in self._live()
        }

    def _forget(self, key: tuple[str, str]) -> bytes:
        cursor = self._cursors.pop(key)
        for lease_id in cursor.leases:
            del self._leases[lease_id]
        return line(["delete", *key])

    def _topic_deleted(self, topic: Topic) -> None:
        self.write_claims.forget(topic.name)
        for key in [key for key in self._cursors if key[1] == topic.name]:
            self._write_later(self._forget(key))

    # The journal

    def _load(self) -> None:
        self._fs.make_dir(self._directory)
        journal, copy = self._read(JOURNAL), self._read(COPY)
        head, _, snapshot = (copy or b"").partition(b"\n")
        noted = parse(head)
        if isinstance(noted, list) and len(noted) == 2 and noted[0] == "copy":
            self._copied = int(noted[1])
        elif copy is not None:
            self._report("damaged", f"{COPY} is damaged and is written anew")
        self._journal_size = len(journal or b"")
        if self._journal_size < self._copied:
            self._replay(snapshot)
            what = (
                f"has {len(journal)} bytes, {self._copied} were written"
                if journal is not None
                else "is missing"
            )
            text = f"{JOURNAL} {what}: {len(self._cursors)} cursors of groups go on from {COPY} and may read records again"
            self._report("restored", text)
            self._start_over = True
        elif journal is None and copy is None and (groups := self.minutes.groups()):
            text = f"{JOURNAL} is missing: the committed offsets of {', '.join(groups)} are lost, they start over"
            self._report("lost", text)
        self._replay(journal or b"")
        if journal and not journal.endswith(b"\n"):
            self.skipped += 1
        if self.skipped:
            self._start_over = True
            text = f"{JOURNAL}: {self.skipped} damaged lines were skipped; groups go on from earlier commits"
            self._report("damaged", text)

    def _read(self, name: str) -> bytes | None:
        try:
            return self._fs.read(self._directory / name)
        except FileNotFoundError:
            return None

    def _report(self, outcome: str, text: str) -> None:
        log.warning("group offsets: %s: %s", outcome, text)
        self._damage.add(1, outcome)

    def _replay(self, data: bytes) -> None:
        for text in data.split(b"\n")[:-1]:
            event = _parse(text)
            if event is None:
                self.skipped += 1
                continue
            kind, group, topic, *rest = event
            if kind == "delete":
                self._cursors.pop((group, topic), None)
            else:
                incarnation, offset = rest
                self._cursors[group, topic] = Cursor(group, topic, incarnation, offset, offset)

    async def _check_topics(self) -> None:
        """What the groups know of their topics against what the topics hold."""
        gone = {
            cursor.topic
            for cursor in self._cursors.values()
            if self._store.get(cursor.topic) is None
        }
        for name in sorted(gone - self._store.unreadable.keys()):
            self._report("lost", f"groups committed offsets on topic {name}, which does not exist")
        for cursor in self._cursors.values():
            topic = self._store.get(cursor.topic)
            if topic is None:
                continue
            if topic.incarnation != cursor.incarnation:
                if not topic.incarnation_lost:
                    continue  # of an earlier topic of that name
                cursor.incarnation = topic.incarnation
                self._start_over = True
                text = f"topic {topic.name} lost its incarnation: group {cursor.group} keeps its offset {cursor.committed}"
                self._report("restored", text)
            await topic.expect(cursor.committed, f"group {cursor.group}")

    async def _copy(self) -> None:
        """Write the copy, unless it says what there is; after damage, the journal as well."""
        if self._start_over and self._cursors:
            self._write_later(b"")
            while self._writing is not None:
                await asyncio.wait([self._writing])
        elif self._journal_size != self._copied:
            await in_pool(self._pool, self._write_copy, self._snapshot(), self._journal_size)

    def _write_copy(self, snapshot: bytes, size: int) -> None:
        try:
            self._fs.replace(
                self._directory / COPY, line(["copy", size]) + snapshot, sync=self._sync
            )
            self._copied = size
        except (StorageFull, StorageFailed) as error:
            log.warning("the copy of the group offsets could not be written: %s", error)

    async def _write(self, lines: bytes) -> None:
        """Return when these lines are durable; whatever is waiting shares one write and one fsync."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._write_later(lines)
        await future

    def _write_later(self, lines: bytes) -> None:
        self._lines.append(lines)
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            while self._lines:
                lines, self._lines = self._lines, []
                waiting, self._waiting = self._waiting, []
                over = self._must_start_over()
                copy = over or self._journal_size >= 2 * self._copied
                snapshot = self._snapshot() if copy else b""
                try:
                    await in_pool(self._pool, self._write_lines, b"".join(lines), snapshot, over)
                except (StorageFull, StorageFailed) as error:
                    self._start_over = True
                    log.error("group offsets could not be written: %s", error)
                    for future in waiting:
                        if not future.done():
                            future.set_exception(type(error)(str(error)))
                else:
                    self._start_over = self._start_over and not over
                    for future in waiting:
                        if not future.done():
                            future.set_result(None)
        finally:
            self._writing = None

    def _must_start_over(self) -> bool:
        if self._start_over or self._journal is None:
            return self._start_over
        return self._journal.size > max(SNAPSHOT_BYTES, SNAPSHOT_FACTOR * 128 * len(self._cursors))

    def _snapshot(self) -> bytes:
        return b"".join(_commit_line(cursor) for cursor in self._cursors.values())

    def _write_lines(self, lines: bytes, snapshot: bytes, start_over: bool) -> None:
        """Append the lines; with `start_over` the snapshot, which has them, becomes the journal
        instead.
        """
        path = self._directory / JOURNAL
        if start_over:
            self._write_copy(snapshot, min(len(snapshot), self._journal_size or len(snapshot)))
            self._fs.replace(path, snapshot, sync=self._sync)
            if self._journal is not None:
                self._journal.close()
                self._journal = None
            self._journal_size = len(snapshot)
            return
        if self._journal is None:
            fresh = not self._fs.exists(path)
            self._journal = self._fs.open(path, create=True)
            if fresh and self._sync:
                self._fs.sync_dir(self._directory)
        self._journal.append([lines])
        if self._sync:
            self._journal.sync()
        self._journal_size = self._journal.size
        if snapshot:
            self._write_copy(snapshot, self._journal_size)


def _commit_line(cursor: Cursor) -> bytes:
    return line(["commit", cursor.group, cursor.topic, cursor.incarnation, cursor.committed])


def _parse(text: bytes) -> list[Any] | None:
    event = parse(text)
    known = (
        isinstance(event, list) and event and len(event) == {"commit": 5, "delete": 3}.get(event[0])
    )
    return event if known else None


def _lost(lease_id: str) -> Conflict:
    return Conflict(
        f"lease {lease_id} is no longer held: it ran out and was taken back, or was completed"
    )
