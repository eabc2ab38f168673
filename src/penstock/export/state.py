"""The books of a send queue: what was accepted and what became of it, in records. Pure bookkeeping,
no disk.

    accepted = delivered + dead-lettered + dropped{reason} + queued

holds by construction: `queued` is the difference. Everything here is changed by journal entries
only, live and at recovery alike, so a restart arrives at the same numbers. An entry may be applied
twice without harm.
"""

from dataclasses import dataclass, field

from penstock.export.journal import REASONS, Entry, Kind
from penstock.export.settled import Settled

_DELIVERED, _DEAD, _REFUSED, _DROPPED = (
    0,
    1,
    2,
    16,
)  # numbers of the counters in a snapshot; a drop's is 16 + reason


@dataclass(slots=True)
class State:
    settled: Settled = field(default_factory=Settled)
    attempts: dict[int, int] = field(default_factory=dict)  # of blocks that are not settled
    next_sequence: int = 1
    numbered: int = 0  # records in blocks that got a sequence number
    refused: int = 0  # records dropped before they got one (part of `dropped`)
    delivered: int = 0
    dead: int = 0
    dropped: list[int] = field(default_factory=lambda: [0] * len(REASONS))
    position: int = -1  # how far the source was read

    @property
    def accepted(self) -> int:
        return self.numbered + self.refused

    @property
    def queued(self) -> int:
        return self.accepted - self.delivered - self.dead - sum(self.dropped)

    def first_unsettled(self) -> int:
        gaps = self.settled.gaps(1, self.next_sequence)
        return gaps[0][0] if gaps else self.next_sequence

    def apply(self, entry: Entry) -> bool:
        """Book the entry; False when it changed nothing because it was booked before."""
        kind = entry.kind
        if kind == Kind.DELIVERED:
            records = entry.a + entry.b
            if not self._settle(entry.sequence, 1, entry.value, records):
                return False
            self.delivered += entry.a
            self.dead += entry.b
        elif kind == Kind.DROPPED:
            if not self._settle(entry.sequence, entry.b, entry.value, entry.a):
                return False
            self.dropped[entry.reason] += entry.a
        elif kind == Kind.ATTEMPT:
            self.attempts[entry.sequence] = entry.a
        elif kind == Kind.REFUSED:
            self.refused += entry.a
            self.dropped[entry.reason] += entry.a
        elif kind == Kind.POSITION:
            self.position = max(self.position, entry.value)
        elif kind == Kind.ACCEPTED:
            self.advance(entry.sequence, entry.value)
        elif kind == Kind.COUNTER:
            self._load_counter(entry.reason, entry.value)
        return True

    def advance(self, next_sequence: int, numbered: int) -> None:
        self.next_sequence = max(self.next_sequence, next_sequence)
        self.numbered = max(self.numbered, numbered)

    def _settle(self, sequence: int, blocks: int, through: int, records: int) -> bool:
        if not self.settled.add(sequence, sequence + blocks, through - records, through):
            return False
        self.advance(sequence + blocks, through)
        if self.attempts:
            for each in (
                range(sequence, sequence + blocks)
                if blocks < len(self.attempts)
                else list(self.attempts)
            ):
                if sequence <= each < sequence + blocks:
                    self.attempts.pop(each, None)
        return True

    def _load_counter(self, number: int, value: int) -> None:
        if number == _DELIVERED:
            self.delivered = value
        elif number == _DEAD:
            self.dead = value
        elif number == _REFUSED:
            self.refused = value
        elif _DROPPED <= number < _DROPPED + len(REASONS):
            self.dropped[number - _DROPPED] = value

    def snapshot(self) -> list[Entry]:
        """Entries that, applied to an empty state by `replay`, give this one."""
        entries = [
            Entry(Kind.COUNTER, _DELIVERED, value=self.delivered),
            Entry(Kind.COUNTER, _DEAD, value=self.dead),
            Entry(Kind.COUNTER, _REFUSED, value=self.refused),
        ]
        entries += [
            Entry(Kind.COUNTER, _DROPPED + reason, value=n)
            for reason, n in enumerate(self.dropped)
            if n
        ]
        for start, end, before, through in self.settled.spans():
            entries.append(Entry(Kind.SPAN_START, sequence=start, value=before))
            entries.append(Entry(Kind.SPAN_END, sequence=end, value=through))
        entries += [
            Entry(Kind.ATTEMPT, sequence=sequence, a=n) for sequence, n in self.attempts.items()
        ]
        if self.position >= 0:
            entries.append(Entry(Kind.POSITION, value=self.position))
        entries.append(Entry(Kind.ACCEPTED, sequence=self.next_sequence, value=self.numbered))
        return entries


def replay(entries: list[Entry | None]) -> tuple[State, int]:
    """The state the entries lead to, and how many were damaged."""
    state, damaged = State(), 0
    open_span: Entry | None = None
    for entry in entries:
        if entry is None:
            damaged += 1
        elif entry.kind == Kind.SPAN_START:
            open_span = entry
        elif entry.kind == Kind.SPAN_END:
            if open_span is not None:
                state.settled.add(open_span.sequence, entry.sequence, open_span.value, entry.value)
                state.advance(entry.sequence, entry.value)
            open_span = None
        else:
            state.apply(entry)
    for sequence in [each for each in state.attempts if each in state.settled]:
        del state.attempts[sequence]
    return state, damaged
