"""Random histories against a model small enough to be obviously right.

The model knows, per group, what every message has been through: settled, dead, attempts, and which
live lease holds it; its headers; and what waits for its time, which passes by the hour. Each step does the same to both and compares the answers and every figure; at
the end every group drains the queue and nothing may be lost, doubled, out of order or wrongly
counted.
"""

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from penstock.errors import NotFound
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Ack, Delivered, Item, PopRequest, Queues
from penstock.queues.admin.dead_letters import Which
from penstock.queues.deliver import ATTEMPT_HEADER
from tests.queues.support import expire_leases, running
from tests.support.form import SOAK, pick

GROUPS = ["__QUEUE_MODE__", "a", "b"]
PARTITIONS = ["p", "q", "r"]
NUMBERS = itertools.count()
HEADERS = st.sampled_from([None, None, b'{"a":"b"}', b'{"tenant":"\xc3\xa9"}'])


@dataclass
class Lease:
    group: str
    messages: list[Delivered]
    open: set[tuple[str, int]]
    live: bool = True


@dataclass
class Later:
    """A message for later."""

    hour: int  # in which it is due
    partition: str
    transaction_id: str
    headers: bytes | None


@dataclass
class Figures:
    """What cannot be derived from the messages that are there."""

    completed: int = 0
    failed: int = 0
    dropped: int = 0
    skipped: int = 0


@dataclass
class Model:
    competing: bool
    retry_limit: int
    pushed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTITIONS, 0))
    settled: dict[str, set[tuple[str, int]]] = field(
        default_factory=lambda: {group: set() for group in GROUPS}
    )
    dead: dict[str, list[tuple[tuple[str, int], int]]] = field(  # the message, its attempts
        default_factory=lambda: {group: [] for group in GROUPS}
    )
    gone: set[tuple[str, int]] = field(default_factory=set)  # deleted
    figures: dict[str, Figures] = field(
        default_factory=lambda: {group: Figures() for group in GROUPS}
    )
    attempts: dict[tuple[str, str, int], int] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    headers: dict[tuple[str, int], bytes | None] = field(default_factory=dict)
    hour: int = 0
    later: list[Later] = field(default_factory=list)  # in the order of their pushes

    def append(self, partition: str, headers: bytes | None) -> int:
        self.pushed[partition] += 1
        self.headers[partition, self.pushed[partition]] = headers
        return self.pushed[partition]

    def held(self, group: str) -> set[tuple[str, int]]:
        collected: set[tuple[str, int]] = set()
        for lease in self.leases:
            if lease.live and lease.group == group:
                collected |= lease.open
        return collected

    def free(self, group: str, partition: str) -> list[int]:
        held = self.held(group)
        if not self.competing and any(place[0] == partition for place in held):
            return []
        taken = self.settled[group] | held
        return [
            seq for seq in range(1, self.pushed[partition] + 1) if (partition, seq) not in taken
        ]

    def stored(self) -> set[tuple[str, int]]:
        places = {(p, seq) for p, last in self.pushed.items() for seq in range(1, last + 1)}
        return places - self.gone

    def waiting(self, group: str) -> set[tuple[str, int]]:
        return self.stored() - self.settled[group]

    def settle(self, group: str, place: tuple[str, int]) -> None:
        self.settled[group].add(place)
        self.attempts.pop((group, *place), None)

    def complete(self, group: str, place: tuple[str, int]) -> None:
        self.figures[group].completed += 1
        self.settle(group, place)

    def fail(self, group: str, place: tuple[str, int], *, force: bool = False) -> bool:
        self.figures[group].failed += 1
        count = self.attempts.get((group, *place), 0) + 1
        self.attempts[group, *place] = count
        if force or count > self.retry_limit:
            self.dead[group].append((place, count))
            self.settle(group, place)
            return True
        return False

    def end_leases(self, group: str, places: set[tuple[str, int]]) -> None:
        """These are not leased any more, and nobody counts an attempt of them."""
        for lease in self.leases:
            if lease.group == group and lease.live:
                lease.open -= places
                lease.live = bool(lease.open)
        for place in places:
            self.attempts.pop((group, *place), None)


def pushed_headers(message: Delivered) -> bytes | None:
    """The headers as they were pushed: a later attempt adds its number."""
    if message.attempt is msgspec.UNSET or message.headers is None:
        return message.headers
    headers = json.loads(message.headers)
    assert headers.pop(ATTEMPT_HEADER) == str(message.attempt)
    return (
        json.dumps(headers, separators=(",", ":"), ensure_ascii=False).encode() if headers else None
    )


class QueueMachine(RuleBasedStateMachine):
    url = ""

    @initialize(competing=st.booleans(), retry_limit=st.integers(0, 2))
    def begin(self, competing: bool, retry_limit: int) -> None:
        self.runner = asyncio.Runner()
        self.expired: list[tuple[str, tuple[str, int]]] = []
        self.queue = f"q{next(NUMBERS)}"  # a queue of its own on a database that all examples share
        self.model = Model(competing, retry_limit)
        self.start()
        options = QueueOptions(
            ordering="none" if competing else "partition", retry_limit=retry_limit, retry_delay=0
        )
        self.run(self.queues.admin.configure(self.queue, options))

    def start(self) -> None:
        self.block = running(self.url, poll_interval=60)
        self.queues: Queues = self.run(self.block.__aenter__())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def call(self, verb: Any, *args: Any) -> Any:
        """For verbs that begin at once and therefore need the loop: push, ack."""

        async def called() -> Any:
            return await verb(*args)

        return self.runner.run(called())

    @rule()
    def forget_leases(self) -> None:
        """The next acknowledgements are looked up, as are those of what another broker delivered."""
        memory = self.queues._exchanges.memory
        memory.__init__()  # type: ignore[misc]

    @rule(
        given=st.lists(
            st.tuples(st.sampled_from(PARTITIONS), HEADERS, st.sampled_from([0, 0, 1, 2])),
            min_size=1,
            max_size=8,
        )
    )
    def push(self, given: list[tuple[str, bytes | None, int]]) -> None:
        """Now, or hours later."""
        items = [
            Item(self.queue, b"{}", partition, headers=headers, due=hours * 3600.0 or None)
            for partition, headers, hours in given
        ]
        answers = self.call(self.queues.push, items)
        for (partition, headers, hours), answer in zip(given, answers, strict=True):
            if hours:
                assert (answer.status, answer.message_id) == ("scheduled", None)
                later = Later(self.model.hour + hours, partition, answer.transaction_id, headers)
                self.model.later.append(later)
            else:
                assert answer.status == "queued"
                assert seq_of(answer.message_id) == self.model.append(partition, headers)

    @rule()
    def an_hour_passes(self) -> None:
        self.run(
            self.queues.database.fetch(
                """UPDATE scheduled_messages SET due_at = due_at - interval '1 hour'
                    WHERE queue_id = (SELECT id FROM queues WHERE name = $1)""",
                self.queue,
            )
        )
        self.queues.waiting.on_delayed(0.0)
        self.run(self.queues.delayed.deliver())
        self.model.hour += 1
        due = [one for one in self.model.later if one.hour <= self.model.hour]
        self.model.later = [one for one in self.model.later if one.hour > self.model.hour]
        for one in due:  # all of this hour, so in the order of their pushes
            self.model.append(one.partition, one.headers)

    @rule(which=st.integers(0, 99), again=st.booleans())
    def what_waits_is_pushed_again_or_cancelled(self, which: int, again: bool) -> None:
        if not self.model.later:
            return
        one = self.model.later[which % len(self.model.later)]
        if again:
            item = Item(self.queue, b"{}", one.partition, one.transaction_id)
            (answer,) = self.call(self.queues.push, [item])
            assert (answer.status, answer.message_id) == ("duplicate", None)
        else:
            names = self.queue, one.partition, one.transaction_id
            self.run(self.queues.scheduled.cancel(*names))
            self.model.later.remove(one)

    @rule(
        group=st.sampled_from(GROUPS),
        batch=st.integers(1, 6),
        spans=st.integers(1, 3),
        auto=st.booleans(),
    )
    def pop(self, group: str, batch: int, spans: int, auto: bool) -> None:
        popped = self.call(
            self.queues.pop,
            PopRequest(queue=self.queue, group=group, batch=batch, partitions=spans, auto_ack=auto),
        )
        self.check_taken(group, popped.messages, batch, spans)
        if auto:
            for message in popped.messages:
                self.model.complete(group, (message.partition, message.seq))
        elif popped.messages:
            places = {(message.partition, message.seq) for message in popped.messages}
            self.model.leases.append(Lease(group, popped.messages, places))

    @rule(
        group=st.sampled_from(GROUPS),
        partition=st.sampled_from(PARTITIONS),
        batch=st.integers(1, 4),
    )
    def pop_one_partition(self, group: str, partition: str, batch: int) -> None:
        free = self.model.free(group, partition)
        popped = self.call(
            self.queues.pop,
            PopRequest(queue=self.queue, partition=partition, group=group, batch=batch),
        )
        assert [message.seq for message in popped.messages] == free[:batch]
        if popped.messages:
            places = {(message.partition, message.seq) for message in popped.messages}
            self.model.leases.append(Lease(group, popped.messages, places))

    def check_taken(self, group: str, messages: list[Delivered], batch: int, spans: int) -> None:
        free = {partition: self.model.free(group, partition) for partition in PARTITIONS}
        taken: dict[str, list[int]] = {}
        for message in messages:
            taken.setdefault(message.partition, []).append(message.seq)
            assert pushed_headers(message) == self.model.headers[message.partition, message.seq]
        assert len(messages) <= batch
        assert len(taken) <= spans
        for partition, seqs in taken.items():
            assert seqs == free[partition][: len(seqs)], (partition, seqs, free)
        available = sum(1 for seqs in free.values() if seqs)
        if len(messages) < batch:  # it stopped early: only because nothing was left within its span
            assert len(taken) == min(spans, available), (taken, free)
            assert all(seqs == free[partition] for partition, seqs in taken.items()), (taken, free)

    # What is drawn must not depend on what a pop returned: which partition it takes is the broker's
    # free choice, and an example has to draw the same when it is run again. So numbers are drawn,
    # and taken modulo what is there.
    @rule(
        which=st.integers(0, 99),
        places=st.lists(st.integers(0, 59), min_size=1, max_size=6),
        whole=st.booleans(),
        uniform=st.sampled_from([None, "completed", "failed"]),
        mixed=st.lists(
            st.sampled_from(["completed", "failed", "retry", "dlq"]), min_size=6, max_size=6
        ),
    )
    def acknowledge(
        self, which: int, places: list[int], whole: bool, uniform: str | None, mixed: list[str]
    ) -> None:
        if not self.model.leases:
            return
        lease = self.model.leases[which % len(self.model.leases)]
        chosen = list(dict.fromkeys(place % len(lease.messages) for place in places))
        messages = lease.messages if whole else [lease.messages[place] for place in chosen]
        statuses = [uniform or mixed[place % len(mixed)] for place in range(len(messages))]
        acked = self.call(
            self.queues.ack,
            [
                Ack(m.transaction_id, m.partition_id, m.lease_id, status, "why", m.group)
                for m, status in zip(messages, statuses, strict=True)
            ],
        )
        before = set(self.model.settled[lease.group])
        held = self.model.held(lease.group)
        living = (
            {partition for partition, _ in lease.open} if lease.live else set()
        )  # one row of it per partition
        for message, status, answer in zip(messages, statuses, acked, strict=True):
            place = (message.partition, message.seq)
            alive = message.partition in living
            if place in self.model.gone:
                assert not answer.success, (place, status, answer)
                continue
            if place in before:
                dead = any(place == one for one, _ in self.model.dead[lease.group])
                allowed = status == "completed" or alive or dead
                assert answer.success == allowed, (place, status, answer)
                continue
            if not alive:
                assert not answer.success, (place, status, answer)
                continue
            if place not in lease.open:  # answered before (failed or retry) under this lease
                if status == "completed":
                    assert answer.success == (place not in held), (place, answer)
                    if answer.success:
                        self.model.complete(lease.group, place)
                else:
                    assert answer.success
                continue
            assert answer.success, (place, status, answer)
            lease.open.discard(place)
            died = False
            if status == "completed":
                self.model.complete(lease.group, place)
            elif status == "dlq":
                died = self.model.fail(lease.group, place, force=True)
            elif status == "failed":
                died = self.model.fail(lease.group, place)
            assert answer.dlq == died
        if not lease.open:
            lease.live = False

    @rule()
    def leases_expire(self) -> None:
        self.run(expire_leases(self.queues))
        for lease in self.model.leases:
            if lease.live:
                lease.live = False
                for place in lease.open:
                    self.expired.append((lease.group, place))
        # The attempt is counted when a pop meets the expired lease: let every group look
        # everywhere.
        for group in GROUPS:
            for partition in PARTITIONS:
                if any(g == group and p[0] == partition for g, p in self.expired):
                    self.settle_expired(group, partition)

    def settle_expired(self, group: str, partition: str) -> None:
        mine = sorted(place for g, place in self.expired if g == group and place[0] == partition)
        self.expired = [(g, p) for g, p in self.expired if not (g == group and p[0] == partition)]
        for place in mine:
            self.model.fail(group, place)
        popped = self.call(
            self.queues.pop, PopRequest(queue=self.queue, partition=partition, group=group, batch=1)
        )
        assert [message.seq for message in popped.messages] == self.model.free(group, partition)[:1]
        if popped.messages:
            self.call(
                self.queues.ack,
                [
                    Ack(m.transaction_id, m.partition_id, m.lease_id, "retry", None, group)
                    for m in popped.messages
                ],
            )

    @rule(group=st.sampled_from(GROUPS))
    def dead_letters_go_back(self, group: str) -> None:
        count = self.run(self.queues.dead.requeue(Which(queue=self.queue, group=group)))
        assert count == len(self.model.dead[group])
        back = {place for place, _ in self.model.dead[group]} & self.model.settled[group]
        self.model.settled[group] -= back
        self.model.figures[group].skipped += count - len(back)
        self.model.dead[group].clear()

    @rule(group=st.sampled_from(GROUPS))
    def dead_letters_are_purged(self, group: str) -> None:
        count = self.run(self.queues.dead.purge(Which(queue=self.queue, group=group)))
        assert count == len(self.model.dead[group])
        self.model.figures[group].dropped += count
        self.model.dead[group].clear()

    @rule(group=st.sampled_from(GROUPS), to=st.sampled_from(["beginning", "end"]))
    def a_group_is_moved(self, group: str, to: str) -> None:
        try:
            self.run(self.queues.groups.seek(group, self.queue, to=to))
        except NotFound:  # it has never popped
            return
        stored, settled = self.model.stored(), self.model.settled[group]
        self.model.end_leases(group, stored)
        if to == "end":
            self.model.figures[group].skipped += len(stored - settled)
            settled |= stored
        else:
            self.model.figures[group].skipped -= len(stored & settled)
            settled -= stored

    @rule()
    def the_queue_is_cleared(self) -> None:
        if any(self.model.dead.values()):  # putting one back would store a copy
            return
        stored = self.model.stored()
        cleared = self.run(self.queues.admin.clear(self.queue))
        assert cleared == len(stored) + len(self.model.later)
        self.model.later.clear()
        known = {entry.name for entry in self.run(self.queues.groups.listing(queue=self.queue))}
        for group in GROUPS:
            unanswered = len(stored - self.model.settled[group])
            if group in known:
                self.model.figures[group].dropped += unanswered
            else:
                self.model.figures[group].skipped += unanswered
            self.model.end_leases(group, stored)
            self.model.settled[group] |= stored
        self.model.gone |= stored

    @rule()
    def the_broker_restarts(self) -> None:
        self.run(self.block.__aexit__(None, None, None))
        self.start()

    @rule()
    def counters_are_folded(self) -> None:
        self.run(self.queues.upkeep.roll_up())

    @invariant()
    def every_figure_is_exact(self) -> None:
        if not hasattr(self, "queues"):
            return
        model = self.model
        status = self.run(self.queues.status.queue(self.queue))
        pushed = sum(model.pushed.values())
        assert (status.figures.pushed, status.figures.stored) == (pushed, len(model.stored()))
        assert status.counts.scheduled == len(model.later)
        for one in status.figures.groups:
            expected = model.figures[one.name]
            assert one.waiting == len(model.waiting(one.name)), one
            assert one.leased == len(model.held(one.name)), one
            assert one.dead_letters == len(model.dead[one.name]), one
            assert (one.completed, one.failed) == (expected.completed, expected.failed), one
            assert (one.dropped, one.skipped) == (expected.dropped, expected.skipped), one
            ends = one.completed + one.dead_letters + one.dropped + one.waiting + one.skipped
            assert ends == pushed, one
        partitions = [p.counts for p in self.run(self.queues.status.partitions(status))]
        for name in ("stored", "waiting", "leased", "completed", "dead_letters"):
            assert sum(getattr(p, name) for p in partitions) == getattr(status.counts, name), name
        page = self.run(self.queues.dead.listing(Which(queue=self.queue), limit=1000))
        assert page.total == status.counts.dead_letters
        assert sorted(
            (d.group, d.partition, seq_of(d.message_id), d.attempts) for d in page.messages
        ) == sorted(
            (group, *place, count)
            for group, letters in model.dead.items()
            for place, count in letters
        )

    def teardown(self) -> None:
        if not hasattr(self, "queues"):
            return
        try:
            self.leases_expire()
            while self.model.later:
                self.an_hour_passes()
            for group in GROUPS:
                left = {(p, seq) for p in PARTITIONS for seq in self.model.free(group, p)}
                got: list[tuple[str, int]] = []
                while messages := self.call(
                    self.queues.pop,
                    PopRequest(
                        queue=self.queue, group=group, batch=100, partitions=10, auto_ack=True
                    ),
                ).messages:
                    got += [(message.partition, message.seq) for message in messages]
                    for message in messages:
                        place = message.partition, message.seq
                        assert pushed_headers(message) == self.model.headers[place]
                assert sorted(got) == sorted(left), group
        finally:
            self.run(self.block.__aexit__(None, None, None))
            self.runner.close()


def seq_of(text: str | None) -> int:
    return int((text or "").replace("-", ""), 16) & (1 << 50) - 1


@pytest.mark.timeout(7200 if SOAK else 600)
def test_any_history_agrees_with_the_model(database_url: str) -> None:
    machine = type("Machine", (QueueMachine,), {"url": database_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=pick(short=3, usual=10, soak=400),
            stateful_step_count=60 if SOAK else 25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
