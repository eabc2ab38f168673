"""Appends to shared logs: those of all connections and topics that arrive together are one call.

A log has at most one turn in a call at a time, so that its appends keep their order; what comes
meanwhile waits for the log's next turn. A call takes the turns of all logs that wait (`Batcher`,
as for queues) and skips logs that another broker appends to at this moment. A log that was skipped
takes part in the next call; after `MAX_SKIPS` it gets a call of its own that waits for its lock, so
that the others do not wait for the hottest log and the hottest log is not starved.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from penstock.database.batching import Batcher
from penstock.errors import PenstockError
from penstock.log.append_queue import AppendQueue
from penstock.log.batches.format import BATCHES
from penstock.log.commit import MAX_SHARED_BYTES, Appended, Entry
from penstock.log.context import Instruments
from penstock.log.layout import DATA
from penstock.log.producers import AnyProducer, KafkaProducer, OutOfOrder, Producer, ProducerFenced
from penstock.log.segment import Write
from penstock.protocol.ids import uuid7
from penstock.topics.shared.calls import AppendAnswer, AppendCall, SharedCalls

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


@dataclass(slots=True)
class NewBatch:
    """A record batch on its way, and the appends in it with how many records precede each."""

    data: bytes
    records: int
    newest: int  # milliseconds since 1970
    producer: AnyProducer | None
    entries: list[tuple[Entry, int]]
    size: int  # about


@dataclass(slots=True)
class Turn:
    """What one log has for a call."""

    appends: "SharedAppends"
    batches: list[NewBatch]
    twins: list[tuple[Entry, AnyProducer]]  # the same batch again, in the same turn
    size: int
    skips: int = 0
    commit: UUID | None = None  # the call that it was last part of

    @property
    def entries(self) -> list[Entry]:
        own = [entry for batch in self.batches for entry, _ in batch.entries]
        return own + [entry for entry, _ in self.twins]


@dataclass(slots=True)
class TurnOutcome:
    """What a call did for one turn. `statuses` None: everything was appended."""

    offsets: list[int | None]
    statuses: list[str] | None
    counts: list[int]
    end: int | None
    timeline: int

    @property
    def skipped(self) -> bool:
        return self.statuses is not None and self.statuses[0] == "skipped"


class Flusher:
    """Makes the calls. `on_answer(timeline, at)` is called with each answer."""

    def __init__(
        self,
        calls: SharedCalls,
        on_answer: Callable[[AppendAnswer], None],
        observe: Callable[[float], None],
    ) -> None:
        self._calls = calls
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
        answer = await self._calls.append(call)
        self._observe(time.perf_counter() - began)
        self._on_answer(answer)
        outcomes = {}
        for turn, start, end in zip(ordered, call.starts, answer.ends, strict=True):
            part = slice(start, start + len(turn.batches))
            outcomes[id(turn)] = TurnOutcome(
                answer.offsets[part],
                answer.statuses[part] if answer.statuses is not None else None,
                answer.counts[part],
                end,
                answer.timeline,
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


@dataclass(slots=True)
class Published:
    """What an append made visible: batches of this broker with their first offsets, and the end."""

    batches: list[tuple[int, bytes]] = field(default_factory=list)
    end: int = 0
    timeline: int = 0


class SharedAppends(AppendQueue):
    """`on_commit(published)` is called before the appends are answered, `on_gone()` when the log is
    not there any more.
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
        on_commit: Callable[[Published], None],
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
        # Producers with a failed batch, by key, and that batch's sequence as the database has it:
        # the batches behind it must not be taken for the first ones of an unknown producer.
        self._failed: dict[bytes, int] = {}

    def expected(self, producer: AnyProducer | None) -> int | None:
        """Return the sequence that a producer unknown to the database must begin with."""
        return self._failed.get(producer.key) if producer is not None else None

    def commit(self) -> None:
        self._scheduled = False
        if self._turn is None and self._pending:
            self._submit(self._next_turn())

    def _submit(self, turn: Turn) -> None:
        self._turn = turn
        self._flusher.submit(turn).add_done_callback(self._ended)

    def _next_turn(self) -> Turn:
        latest: dict[bytes, AnyProducer] = {}
        turn = Turn(self, [], [], 0)
        taken = 0
        now = self._now()
        for entry in self._pending:
            if turn.size and turn.size + entry.size > TURN_BYTES:
                break
            producer = entry.producer
            if producer is not None:
                before = latest.get(producer.key)
                if before == producer:
                    turn.twins.append((entry, producer))
                    taken += 1
                    continue
                if before is not None and not producer.follows(before):
                    break
                latest[producer.key] = producer
            taken += 1
            turn.size += entry.size
            _add(turn.batches, entry, now)
        del self._pending[:taken]
        self.pending_bytes = sum(entry.size for entry in self._pending)
        for batch in turn.batches:
            _encode(batch, now)
        return turn

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
            if batch.producer is not None:
                _, sequence, _ = numbers_of(batch.producer)
                if batch.producer.sequence < 1 << 63:
                    self._failed.setdefault(batch.producer.key, sequence)
        while len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]
        for entry in turn.entries:
            entry.refuse(error)

    def _succeed(self, turn: Turn, outcome: TurnOutcome) -> None:
        published = Published(end=outcome.end or 0, timeline=outcome.timeline)
        statuses = outcome.statuses or ["appended"] * len(turn.batches)
        results = list(zip(turn.batches, statuses, outcome.offsets, outcome.counts, strict=True))
        for batch, status, first, _ in results:
            if status == "appended":
                assert first is not None
                published.batches.append((first, batch.data))
                self._instruments.records.add(batch.records, self._name)
                self._instruments.bytes.add(len(batch.data), self._name)
        if published.batches:
            self._instruments.commits.add()
            self._on_commit(published)
        answers: dict[AnyProducer, Appended | PenstockError] = {}
        for batch, status, first, count in results:
            answer: Appended | PenstockError
            if status in ("appended", "duplicate"):
                duplicate = status == "duplicate"
                answer = Appended(first or 0, count if duplicate else batch.records, duplicate)
                if duplicate:
                    self._instruments.duplicates.add()
                if batch.producer is not None:
                    self._failed.pop(batch.producer.key, None)
            else:
                answer = self._refusal(status, batch.producer)
            if batch.producer is not None:
                answers[batch.producer] = answer
            for entry, before in batch.entries:
                if isinstance(answer, PenstockError):
                    entry.refuse(answer)
                else:
                    count = answer.count if answer.duplicate else entry.count
                    entry.answer(Appended(answer.first_offset + before, count, answer.duplicate))
        for entry, producer in turn.twins:
            again = answers[producer]
            if isinstance(again, Appended):
                entry.answer(Appended(again.first_offset, again.count, True))
            else:
                entry.refuse(again)

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
        """Take nothing more. What is queued is committed; of a deleted topic it is refused."""
        self.closed = True
        self.deleted = deleted
        if deleted:
            pending, self._pending, self.pending_bytes = self._pending, [], 0
            for entry in pending:
                entry.refuse(self.gone())


def _add(batches: list[NewBatch], entry: Entry, now: int) -> None:
    """Add an append. Consecutive appends of payloads without a producer share a record batch."""
    plain = entry.producer is None and type(entry.content) is list
    if plain and batches:
        last = batches[-1]
        first, _ = last.entries[0]
        room = last.size + entry.size <= MAX_SHARED_BYTES
        if last.producer is None and type(first.content) is list and room:
            last.entries.append((entry, last.records))
            last.records += entry.count
            last.size += entry.size
            return
    batches.append(
        NewBatch(b"", entry.count, now // 1000, entry.producer, [(entry, 0)], entry.size)
    )


def _encode(batch: NewBatch, now: int) -> None:
    """Encode like the format of record batches; the database assigns the offsets."""
    write = Write(0, time=now)
    content = batch.entries[0][0].content
    if len(batch.entries) > 1:
        content = [payload for entry, _ in batch.entries for payload in entry.content]  # type: ignore[misc]
    producer = batch.producer if isinstance(batch.producer, Producer) else None
    BATCHES.add(write, content, producer)
    batch.data = b"".join(write.parts[DATA])
    batch.newest = max(0, write.batches[0].time // 1000)
