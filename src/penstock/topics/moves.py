"""Turn local topics into shared ones. Offsets, groups and idempotent producers are kept.

    copying  records are copied to the database while the topic is appended to as before
    closing  appends are refused with an error that clients retry, and the rest is copied
    shared   one statement made the copy visible to all brokers, and the local topic is deleted

A file in `.penstock/moves` has the state of each move. A broker that was killed continues its moves
when it starts. A topic that was closing then refuses appends from the start on: other brokers may
append to the copy already. A statement of the killed broker may still be running in the database,
so every statement names the offset that it continues from, and is repeated if that has changed.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import msgspec

from penstock.contract.topics import TopicMove
from penstock.database import Database
from penstock.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    PenstockError,
    StorageError,
    Unavailable,
)
from penstock.io.fs import DISK
from penstock.io.tasks import RETRY_SECONDS, cancelled, supervised
from penstock.log.layout import ProducerEntry
from penstock.log.producers import parse_producer
from penstock.protocol.kafka_batch import batches_in
from penstock.protocol.names import partition_label, split_label
from penstock.topics.groups import Groups
from penstock.topics.shared.appends import numbers_of
from penstock.topics.shared.log import SharedLog
from penstock.topics.store import TopicStore
from penstock.topics.topic import Topic

log = logging.getLogger("penstock.topics.shared")

COPYING, CLOSING, SHARED, FAILED = "copying", "closing", "shared", "failed"
SUFFIX = ".move"
COPY_BYTES = 1 << 20  # of one statement
ROW_BYTES = 1 << 16  # of one row, unless one batch is larger

BEGIN = """
  INSERT INTO shared_logs (topic, partition, incarnation, next_offset, timeline, changed_at, moving)
  SELECT $1, p.partition, p.incarnation, p.start, shared_timeline(), clock_timestamp(), true
    FROM unnest($2::int[], $3::uuid[], $4::bigint[]) p (partition, incarnation, start)
   WHERE NOT EXISTS (SELECT 1 FROM shared_logs WHERE topic = $1 AND incarnation <> ALL ($3))
      ON CONFLICT (topic, partition) DO NOTHING"""
ROWS = """SELECT id, partition, incarnation, next_offset, newest, moving FROM shared_logs
           WHERE topic = $1 ORDER BY partition"""
COPY = """
  WITH log AS (
    UPDATE shared_logs SET next_offset = $3, newest = $4, timeline = shared_timeline(),
                           changed_at = clock_timestamp()
     WHERE id = $1 AND moving AND next_offset = $2 RETURNING id, timeline
  ), stored AS (
    INSERT INTO shared_batches (log_id, base_offset, last_offset, records, newest, timeline,
                                appended_at, size, data)
    SELECT l.id, b.base, b.last, b.records, b.newest, l.timeline, clock_timestamp(), length(b.data),
           b.data
      FROM log l CROSS JOIN unnest($5::bigint[], $6::bigint[], $7::int[], $8::bigint[], $9::bytea[])
                            b (base, last, records, newest, data))
  SELECT id FROM log"""
# All partitions, or none if one has other offsets.
SHARE = """
  WITH wanted AS (
    SELECT l.id, l.next_offset = e.stop AS whole
      FROM unnest($2::int[], $3::bigint[]) e (partition, stop)
      JOIN shared_logs l ON l.topic = $1 AND l.partition = e.partition AND l.moving
  ), log AS (
    UPDATE shared_logs l SET moving = false, policy = $4, limits = $5
      FROM wanted w WHERE l.id = w.id AND (SELECT bool_and(whole) FROM wanted)
    RETURNING l.id, l.partition
  ), offsets AS (
    INSERT INTO shared_offsets (group_name, log_id, committed, handed_out, note, changed_at)
    SELECT g."group", l.id, g.committed, g.committed, g.note, clock_timestamp()
      FROM jsonb_to_recordset($6::jsonb)
           g (partition int, "group" text, committed bigint, note text)
      JOIN log l USING (partition) ON CONFLICT DO NOTHING
  ), producers AS (
    INSERT INTO shared_producers (log_id, producer, epoch, expected, sequences, offsets, counts,
                                  seen_at)
    SELECT l.id, decode(p.producer, 'hex'), p.epoch, p.expected, shared_last(p.sequences),
           shared_last(p.offsets), shared_last(p.counts), clock_timestamp()
      FROM jsonb_to_recordset($7::jsonb)
           p (partition int, producer text, epoch int, expected bigint, sequences bigint[],
              offsets bigint[], counts int[])
      JOIN log l USING (partition) ON CONFLICT DO NOTHING)
  SELECT id FROM log"""
GIVE_UP = """
  WITH gone AS (DELETE FROM shared_logs WHERE topic = $1 AND moving RETURNING id)
  INSERT INTO shared_removals (log_id, due_at) SELECT id, clock_timestamp() FROM gone"""


class LocalPosition(NamedTuple):
    partition: int
    group: str
    committed: int
    note: str


class TopicMoves:
    """The moves of this broker, at most one per topic."""

    def __init__(
        self, directory: Path, topics: TopicStore, groups: Groups, database: Database
    ) -> None:
        self._directory = directory
        self._topics = topics
        self._groups = groups
        self._database = database
        self._moves: dict[str, TopicMove] = {}
        # What the database has, or had when this broker started, of the groups on closing topics.
        self._sent: dict[str, set[LocalPosition]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Continue the moves that a stop or a kill interrupted."""
        for path in sorted(self._directory.glob("*" + SUFFIX)):
            name = path.name.removesuffix(SUFFIX)
            state = COPYING if path.read_text() == COPYING else CLOSING
            self._moves[name] = TopicMove(name, state)
            if state == CLOSING:
                self._sent[name] = self._positions(name)
                self._close(name)
            self._run(name)

    async def stop(self) -> None:
        for task in list(self._tasks.values()):
            await cancelled(task)

    def status(self, name: str) -> TopicMove | None:
        """Return how far the move of a topic is; None: it is not being moved."""
        move = self._moves.get(name)
        if move is None or self._topics.is_shared(name):
            return None
        return msgspec.structs.replace(move, total=self._total(name))

    async def begin(self, name: str) -> TopicMove:
        """Move a topic in the background, or leave it to the move that is under way."""
        if self._topics.is_shared(name):
            return TopicMove(name, SHARED)
        topic = self._topics.local(name)
        if topic.topic != name:
            raise InvalidRequest("all partitions of a topic are moved together")
        if topic.archived_offset is not None:
            raise Conflict(f"topic {name!r} is archived by a pipeline, which reads its segments")
        if name not in self._tasks:
            await self._begin(name)
        if name not in self._tasks:  # nor has another request begun meanwhile
            self._moves[name] = TopicMove(name, COPYING)
            self._write(name, COPYING)
            self._run(name)
        return self.status(name) or TopicMove(name, SHARED)

    def _run(self, name: str) -> None:
        task = supervised(f"move of topic {name}", lambda: self._move(name))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _move(self, name: str) -> None:
        move = self._moves[name]
        while True:
            await self._database.recovered()
            try:
                await self._step(move)
                return
            except (Unavailable, StorageError, asyncpg.PostgresError) as error:
                move.problem = str(error)
                log.warning("topic %s: the move is tried again: %s", name, error)
            except PenstockError as error:
                move.problem = str(error)
                log.error("topic %s is not moved: %s", name, error)
                if move.state == COPYING:
                    move.state = FAILED
            await asyncio.sleep(RETRY_SECONDS)

    async def _step(self, move: TopicMove) -> None:
        """Do all that is left of a move."""
        name = move.topic
        if move.state == COPYING and not self._logs(name):
            raise NotFound(f"topic {name!r} was deleted")
        if move.state == FAILED:
            await self._database.read(GIVE_UP, name)
            self._remove(name)
            return
        if move.state == COPYING:
            await self._copy(move)
            await self._topics.wait_for_creation(name)  # a partition added later is refused
            self._write(name, CLOSING)
            move.state = CLOSING
        self._close(name)
        for topic in self._logs(name):
            await topic.appends.drain()
        if self._logs(name) and await self._copy(move):
            await self._share(name)
        await self._finish(name)
        self._remove(name)
        del self._moves[name]
        log.info("topic %s is shared now", name)

    def _logs(self, name: str) -> list[Topic]:
        """Return the partitions of a local topic; none: it was deleted."""
        labels = [partition_label(name, n) for n in range(self._topics.partitions(name))]
        return [one for one in map(self._topics.get, labels) if isinstance(one, Topic)]

    def _total(self, name: str) -> int:
        return sum(one.next_offset - one.first_offset for one in self._logs(name))

    def _close(self, name: str) -> None:
        for topic in self._logs(name):
            topic.appends.moving = True
            topic.appends.close()

    # Copying

    async def _begin(self, name: str) -> list[Any]:
        """Return the rows of the copy, created if needed. They are not visible to any broker."""
        logs = self._logs(name)
        await self._database.read(
            BEGIN,
            name,
            [one.partition for one in logs],
            [UUID(one.incarnation) for one in logs],
            [one.first_offset for one in logs],
        )
        rows = await self._database.read(ROWS, name)
        if [row["incarnation"].hex for row in rows] != [one.incarnation for one in logs]:
            raise Conflict(f"there is a shared topic {name!r} with other records")
        return rows

    async def _copy(self, move: TopicMove) -> bool:
        """Copy the remaining records. Return False if the copy is visible already."""
        rows = await self._begin(move.topic)
        if not all(row["moving"] for row in rows):
            return False
        logs = self._logs(move.topic)
        for topic, row in zip(logs, rows, strict=True):
            at, newest = row["next_offset"], row["newest"]
            while at < topic.next_offset:
                before = sum(one.next_offset - one.first_offset for one in logs[: topic.partition])
                move.copied = before + max(0, at - topic.first_offset)
                at, newest = await self._copy_some(topic, row["id"], at, newest)
            move.problem = None
        move.copied = self._total(move.topic)
        return True

    async def _copy_some(self, topic: Topic, log_id: int, at: int, newest: int) -> tuple[int, int]:
        """Copy batches from offset `at` on. Return the offset after them, the newest timestamp."""
        start = max(at, topic.first_offset)  # retention continues
        fetched = await topic.read_through(lambda: topic.batches(start, COPY_BYTES))
        rows: list[tuple[int, int, int, int, bytes]] = []
        for position, head in batches_in(fetched.data):
            newest = max(newest, head.max_timestamp)
            data = fetched.data[position : position + head.size]
            end = head.next_offset - 1
            if rows and len(rows[-1][4]) + len(data) <= ROW_BYTES:
                base, _, records, _, before = rows.pop()
                rows.append((base, end, records + head.records, newest, before + data))
            else:
                rows.append((head.base_offset, end, head.records, newest, data))
        columns = list(map(list, zip(*rows, strict=True))) or [[]] * 5
        if not await self._database.fetch(COPY, log_id, at, fetched.next_offset, newest, *columns):
            raise Unavailable("the copy was changed by an earlier statement of this broker")
        return fetched.next_offset, newest

    # Changing over

    async def _share(self, name: str) -> None:
        logs = self._logs(name)
        positions = self._positions(name)
        producers = [_producer(log, *entry) for log in logs for entry in log.producer_entries()]
        shared = await self._database.fetch(
            SHARE,
            name,
            [one.partition for one in logs],
            [one.next_offset for one in logs],
            logs[0].policy,
            msgspec.json.encode(msgspec.structs.replace(logs[0].limits, start=0)).decode(),
            msgspec.json.encode([one._asdict() for one in positions]).decode(),
            msgspec.json.encode(producers).decode(),
        )
        if not shared:
            raise Unavailable("the copy was changed by an earlier statement of this broker")
        self._sent[name] = positions

    def _positions(self, name: str) -> set[LocalPosition]:
        """Return where the groups on a local topic are."""
        return {
            LocalPosition(split_label(one.topic)[1], one.group, one.committed, one.note)
            for one in self._groups.positions()
            if split_label(one.topic)[0] == name
        }

    async def _finish(self, name: str) -> None:
        """Let the shared topic take the place of the local one."""
        shared = self._topics.shared
        assert shared is not None
        await shared.announce_topic(name)
        sent = self._sent.pop(name, set())
        while changed := self._positions(name) - sent:  # committed here in the meantime
            sent |= changed
            for partition, group, committed, note in changed:
                copy = shared.get(partition_label(name, partition))
                if isinstance(copy, SharedLog):
                    await shared.groups.commit(group, [(copy, committed, note)])
        await self._topics.delete_local(name)

    # State on disk

    def _write(self, name: str, state: str) -> None:
        DISK.make_dir(self._directory)
        DISK.replace(self._directory / (name + SUFFIX), state.encode())

    def _remove(self, name: str) -> None:
        DISK.remove(self._directory / (name + SUFFIX))


def _producer(topic: Topic, key: bytes, entry: ProducerEntry) -> dict[str, Any]:
    """Return what the database keeps of an idempotent producer."""
    stored = entry.id or key
    last = parse_producer(stored, entry.last, entry.batches.get(entry.last, (0, 1))[1])
    epoch, _, expected = numbers_of(last)
    return {
        "partition": topic.partition,
        "producer": last.key.hex(),
        "epoch": epoch,
        "expected": expected,
        "sequences": [
            numbers_of(parse_producer(stored, sequence, count))[1]
            for sequence, (_, count) in entry.batches.items()
        ],
        "offsets": [first for first, _ in entry.batches.values()],
        "counts": [count for _, count in entry.batches.values()],
    }
