"""Append to shared logs. Concurrent appends to all logs share one call to the database.

A log has one turn at a time, so that its appends keep their order. Appends that arrive meanwhile
wait for its next turn. A call has the turns of all waiting logs (`Batcher`, as for queues) without
those that another broker has locked. A skipped log takes part in the next call. After `MAX_SKIPS`
it gets a call of its own, which waits for the lock: so the hottest log delays no other one and is
not starved.
"""

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from penstock.database import Database
from penstock.database.batching import Batcher
from penstock.errors import PenstockError
from penstock.io.fs import Bytes
from penstock.log.append_queue import AppendQueue
from penstock.log.batches.format import BATCHES
from penstock.log.commit import Appended, Entry, LogCommit
from penstock.log.context import Instruments
from penstock.log.layout import DATA
from penstock.log.producers import (
    AnyProducer,
    KafkaProducer,
    OutOfOrder,
    ProducerFenced,
    Producers,
)
from penstock.log.segment import Write
from penstock.protocol.ids import uuid7

log = logging.getLogger("penstock.topics.shared")

# A call of 4 MB takes PostgreSQL five to ten times the CPU of one of 1 MB: its arguments are copied
# several times, into memory that the system allocates for each call.
TURN_BYTES = 1 << 20  # of one log in a call, unless one append is larger
CALL_BYTES = 4 << 20
CALLS = 4  # at a time: each has a connection
MAX_SKIPS = 2
MAX_FAILED = 10_000  # producers of a log whose failed batch is remembered
OUR_FIRST = -(1 << 63)  # how sequence 0 of one of our producers is stored: all 64 bits are used
OUR_EPOCH = -1
KAFKA_SEQUENCES = 1 << 31


class AppendCall(NamedTuple):
    """The arguments of `shared_append`, a field per argument under its name without `p_`."""

    commit: UUID
    again: bool
    wait: bool
    logs: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    times: Sequence[int]
    data: Sequence[Bytes]
    producers: Sequence[bytes | None] | None = None
    epochs: Sequence[int | None] | None = None
    sequences: Sequence[int | None] | None = None
    nexts: Sequence[int | None] | None = None
    expected: Sequence[int | None] | None = None


APPEND = "SELECT * FROM shared_append({})".format(
    ", ".join(f"p_{name} => ${i}" for i, name in enumerate(AppendCall._fields, 1))
)


class NewBatch(NamedTuple):
    """A record batch that has no offsets yet."""

    start: int  # records before it in its turn
    data: memoryview
    records: int
    newest: int  # milliseconds since 1970
    producer: AnyProducer | None


@dataclass(slots=True)
class Turn:
    """The appends of one log in a call."""

    appends: "SharedAppends"
    entries: list[Entry]  # whose `first` is the number of records before it in this turn
    batches: list[NewBatch]
    size: int
    skips: int = 0
    commit: UUID | None = None  # the call that it was last part of


@dataclass(slots=True)
class TurnOutcome:
    """The result of a call for one turn. `statuses` None: everything was appended."""

    offsets: list[int | None]
    statuses: list[str] | None
    counts: list[int]
    end: int | None
    timeline: int

    @property
    def skipped(self) -> bool:
        return self.statuses is not None and self.statuses[0] == "skipped"


class Flusher:
    """Calls `shared_append` for turns of many logs. `on_answer` gets the row of each call."""

    def __init__(
        self,
        database: Database,
        on_answer: Callable[[Any], None],
        observe: Callable[[float], None],
    ) -> None:
        self._database = database
        self._on_answer = on_answer
        self._observe = observe  # gets the seconds of each call
        self._together: Batcher[Turn, TurnOutcome] = Batcher(
            self._append, limit=CALL_BYTES, slots=CALLS
        )
        self._alone: Batcher[Turn, TurnOutcome] = Batcher(
            lambda turns, again: self._append(turns, again, wait=True),
            limit=1,
            slots=CALLS,
            enough=1,
        )

    def submit(self, turn: Turn) -> "asyncio.Future[TurnOutcome]":
        if turn.skips < MAX_SKIPS:
            return self._together.submit(turn, turn.size)
        return self._alone.submit(turn)

    async def drain(self) -> None:
        await self._together.drain()
        await self._alone.drain()

    async def _append(
        self, turns: list[Turn], again: bool, *, wait: bool = False
    ) -> list[TurnOutcome | PenstockError]:
        if not again:
            commit = uuid7()
            for turn in turns:
                turn.commit = commit
        began = time.perf_counter()
        ordered = sorted(turns, key=lambda turn: turn.appends.log_id)
        call = _arguments(ordered, again, wait)
        [answer] = await self._database.fetch(APPEND, *call)
        self._observe(time.perf_counter() - began)
        self._on_answer(answer)
        outcomes = {}
        statuses = answer["statuses"]
        for turn, start, end in zip(ordered, call.starts, answer["ends"], strict=True):
            part = slice(start, start + len(turn.batches))
            outcomes[id(turn)] = TurnOutcome(
                answer["offsets"][part],
                statuses[part] if statuses is not None else None,
                answer["counts"][part],
                end,
                answer["timeline"],
            )
        return [outcomes[id(turn)] for turn in turns]


def _arguments(turns: list[Turn], again: bool, wait: bool) -> AppendCall:
    starts, total = [], 0
    for turn in turns:
        starts.append(total)
        total += len(turn.batches)
    batches = [(turn, batch) for turn in turns for batch in turn.batches]
    commit = turns[0].commit
    assert commit is not None
    call = AppendCall(
        commit,
        again,
        wait,
        [turn.appends.log_id for turn in turns],
        starts,
        [batch.records for _, batch in batches],
        [batch.newest for _, batch in batches],
        [batch.data for _, batch in batches],
    )
    if all(batch.producer is None for _, batch in batches):
        return call
    producers = [batch.producer for _, batch in batches]
    numbers = [numbers_of(one) if one is not None else (None, None, None) for one in producers]
    return call._replace(
        producers=[one.key if one is not None else None for one in producers],
        epochs=[epoch for epoch, _, _ in numbers],
        sequences=[sequence for _, sequence, _ in numbers],
        nexts=[following for _, _, following in numbers],
        expected=[turn.appends.expected(batch.producer) for turn, batch in batches],
    )


def numbers_of(producer: AnyProducer) -> tuple[int, int, int]:
    """Return epoch, sequence and following sequence as the database stores them."""
    if isinstance(producer, KafkaProducer):
        following = (producer.sequence + producer.records) % KAFKA_SEQUENCES
        return producer.epoch, producer.sequence, following
    sequence = OUR_FIRST + producer.sequence
    return OUR_EPOCH, sequence, min(sequence + 1, (1 << 63) - 1)


class SharedAppends(AppendQueue):
    """`on_commit(batches, end, timeline)` is called before the appends are answered, with first
    offset and bytes of each batch. `on_gone()` is called when the log does not exist any more.
    """

    def __init__(
        self,
        name: str,
        log_id: int,
        flusher: Flusher,
        *,
        max_record: int,
        now: Callable[[], int],
        instruments: Instruments,
        on_commit: Callable[[Sequence[tuple[int, memoryview]], int, int], None],
        on_gone: Callable[[], None],
    ) -> None:
        super().__init__(name, BATCHES, max_record)
        self.log_id = log_id
        self._flusher = flusher
        self._now = now  # microseconds since 1970, by the database's clock
        self._instruments = instruments
        self._on_commit = on_commit
        self._on_gone = on_gone
        self._turn: Turn | None = None  # under way
        # Producers with failed batches, by key: the first sequence of these batches, and the
        # sequence that follows them. Both are numbers as the database stores them.
        self._failed: dict[bytes, tuple[int, int]] = {}

    def expected(self, producer: AnyProducer | None) -> int | None:
        """Return the sequence that the database must expect if it does not know the producer's
        newest batch, or None. After failed batches, the next batch must not be taken for the first
        one of an unknown producer. A producer that continues with another sequence has used another
        broker since.
        """
        if producer is None or producer.key not in self._failed:
            return None
        failed = self._failed[producer.key]
        _, sequence, _ = numbers_of(producer)
        return failed[0] if sequence in failed else None

    def commit(self) -> None:
        self._scheduled = False
        if self._turn is None and self._pending:
            self._submit(self._next_turn())

    def _submit(self, turn: Turn) -> None:
        self._turn = turn
        self._flusher.submit(turn).add_done_callback(self._ended)

    def _next_turn(self) -> Turn:
        latest: dict[bytes, AnyProducer] = {}
        count = size = 0
        for entry in self._pending:
            if count and size + entry.size > TURN_BYTES:
                break
            producer = entry.producer
            if producer is not None:
                before = latest.get(producer.key)
                if before not in (None, producer) and not producer.follows(before):
                    break
                latest[producer.key] = producer
            count += 1
            size += entry.size
        entries = self._pending[:count]
        del self._pending[:count]
        self.pending_bytes -= size
        return Turn(self, entries, _encode(entries, self._now()), size)

    def _ended(self, future: "asyncio.Future[TurnOutcome]") -> None:
        turn, self._turn = self._turn, None
        assert turn is not None
        error = future.exception()
        if error is not None:
            assert isinstance(error, PenstockError)  # the batcher makes it one
            self._fail(turn, error)
        elif future.result().skipped and not self.deleted:
            turn.skips += 1
            self._submit(turn)
            return
        else:
            self._succeed(turn, future.result())
        self.commit()

    def _fail(self, turn: Turn, error: PenstockError) -> None:
        self._instruments.failures.add(1, type(error).__name__)
        for batch in turn.batches:
            if batch.producer is not None and batch.producer.sequence < 1 << 63:
                _, sequence, following = numbers_of(batch.producer)
                first, end = self._failed.get(batch.producer.key, (sequence, sequence))
                first = first if sequence == end else sequence
                self._failed[batch.producer.key] = first, following
        while len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]
        for entry in turn.entries:
            entry.refuse(error)

    def _succeed(self, turn: Turn, outcome: TurnOutcome) -> None:
        statuses = outcome.statuses or ["appended"] * len(turn.batches)
        appended: list[tuple[int, memoryview]] = []
        answers: list[Appended | PenstockError] = []  # one for each batch
        for batch, status, first, count in zip(
            turn.batches, statuses, outcome.offsets, outcome.counts, strict=True
        ):
            answer: Appended | PenstockError
            if status == "appended":
                assert first is not None
                appended.append((first, batch.data))
                self._instruments.records.add(batch.records, self._name)
                self._instruments.bytes.add(len(batch.data), self._name)
            if status in ("appended", "duplicate"):
                duplicate = status == "duplicate"
                answer = Appended(first or 0, count if duplicate else batch.records, duplicate)
                if duplicate:
                    self._instruments.duplicates.add()
                if batch.producer is not None:
                    self._failed.pop(batch.producer.key, None)
            else:
                answer = self._refusal(status, batch.producer)
            answers.append(answer)
        if appended:
            self._instruments.commits.add()
            self._on_commit(appended, outcome.end or 0, outcome.timeline)
        for entry in turn.entries:
            original = entry.first_copy or entry
            i = bisect_right(turn.batches, original.first, key=attrgetter("start")) - 1
            answer = answers[i]
            if isinstance(answer, PenstockError):
                entry.refuse(answer)
                continue
            first = answer.first_offset + original.first - turn.batches[i].start
            count = answer.count if answer.duplicate else entry.count
            entry.answer(Appended(first, count, answer.duplicate or original is not entry))

    def _refusal(self, status: str, producer: AnyProducer | None) -> PenstockError:
        if status == "gone" or producer is None:
            self._on_gone()
            return self.gone()
        if status == "fenced":
            return ProducerFenced("a newer epoch of this producer has appended")
        if status == "early":
            return OutOfOrder(f"batch {producer.sequence} of this producer comes too early")
        return OutOfOrder(f"batch {producer.sequence} of this producer is too old to be recognised")

    # Ending

    @property
    def busy(self) -> bool:
        return bool(self._pending or self._turn)

    def close(self, *, deleted: bool = False) -> None:
        """Refuse new appends. Queued ones are committed; those of a deleted topic are refused."""
        self.closed = True
        self.deleted = deleted
        if deleted:
            pending, self._pending, self.pending_bytes = self._pending, [], 0
            for entry in pending:
                entry.refuse(self.gone())


def _encode(entries: list[Entry], now: int) -> list[NewBatch]:
    """Encode appends as a local log does. Only the database knows what producers have appended."""
    commit = LogCommit(BATCHES, entries, Write(0, time=now), Producers({}, 0))
    producers = {entry.first: entry.producer for entry in entries}
    data = memoryview(b"".join(commit.write.parts[DATA]))
    batches, at = [], 0
    for start, _, records, size, newest in commit.write.batches:
        part = data[at : at + size]
        batches.append(NewBatch(start, part, records, newest // 1000, producers[start]))
        at += size
    return batches
