"""A model of pushes of one message by callers that wait for their answers: what more calls at a
time would do.

A rate on a busy machine says little about how well load, broker and PostgreSQL overlap, and a quiet
machine is rare. So this is a small simulation with the CPU costs that `queues_cost` and a trace of
the broker gave: two cores shared fairly, one load generator, one broker, a server process per call,
one WAL flush at a time that covers every commit waiting for it, and a lock on the partitions' rows
that is held until the flush is over. With 1.0 to 1.5 ms per flush, which is what `pg_stat_io` said
of the machine the figures come from, it gives the rate and the use of cores that were measured
there.

Every caller waits for one answer, so more calls at a time are smaller calls; each has its fixed
cost, and they share the flush.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bench.harness import Figure

CALLERS, PARTITIONS, CORES = 64, 16, 2
SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of CPU; the flush takes time and no CPU."""

    load: float = 20  # per message, as are the next two
    request: float = 24
    response: float = 14
    send: float = 150  # the broker, per call
    receive: float = 120
    call: float = 250  # PostgreSQL, per call
    partition: float = 10
    message: float = 10.5
    flush: float = 1000


@dataclass(frozen=True, slots=True)
class Policy:
    lanes: int = 1  # partitions are divided among them
    at_once: int = 1  # calls per lane
    enough: int = 0  # messages that make a further call worth it


Call = tuple[int, list[int]]  # lane, callers


class Model:
    def __init__(self, costs: Costs, policy: Policy) -> None:
        self.costs, self.policy = costs, policy
        self.now = self.used = 0.0
        self.answered = 0
        self.sizes: list[int] = []
        self._running: dict[object, list[float]] = {}  # thread -> [CPU it still needs]
        self._then: dict[object, Callable[[], None]] = {}
        self._jobs: dict[str, deque[tuple[float, Callable[[], None]]]] = {
            "load": deque(),
            "broker": deque(),
        }
        self._timers: list[tuple[float, int, list[Call]]] = []
        self._ids = itertools.count()
        self._waiting: list[list[int]] = [[] for _ in range(policy.lanes)]
        self._busy = [0] * policy.lanes
        self._locked = [False] * policy.lanes
        self._blocked: list[deque[Call]] = [deque() for _ in range(policy.lanes)]
        self._committing: list[Call] = []
        self._flushing = False

    def run(self, until: float) -> None:
        for caller in range(CALLERS):
            self._send(caller)
        while self.now < until:
            share = min(1.0, CORES / len(self._running)) if self._running else 1.0
            thread = min(self._running, key=lambda t: self._running[t][0], default=None)
            ends = (
                self.now + self._running[thread][0] / share if thread is not None else float("inf")
            )
            flushed = self._timers[0][0] if self._timers else float("inf")
            step = min(ends, flushed) - self.now
            self.now += step
            self.used += step * share * len(self._running)
            for left in self._running.values():
                left[0] -= step * share
            if flushed <= ends:
                self._flushed(heapq.heappop(self._timers)[2])
            else:
                del self._running[thread]
                self._then.pop(thread)()

    def _start(self, thread: object, cost: float, then: Callable[[], None]) -> None:
        self._running[thread], self._then[thread] = [cost], then

    def _queue(
        self, process: str, cost: float, then: Callable[[], None], *, first: bool = False
    ) -> None:
        jobs = self._jobs[process]
        (jobs.appendleft if first else jobs.append)((cost, then))
        self._next(process)

    def _next(self, process: str) -> None:
        if process not in self._running and self._jobs[process]:
            cost, then = self._jobs[process].popleft()

            def done() -> None:
                then()
                self._next(process)

            self._start(process, cost, done)

    def _send(self, caller: int) -> None:
        self._queue(
            "load",
            self.costs.load,
            lambda: self._queue("broker", self.costs.request, lambda: self._put(caller)),
        )

    def _put(self, caller: int) -> None:
        lane = caller % PARTITIONS % self.policy.lanes
        self._waiting[lane].append(caller)
        self._call(lane)

    def _call(self, lane: int, *, first: bool = False) -> None:
        waiting, busy = self._waiting[lane], self._busy[lane]
        if (
            waiting
            and busy < self.policy.at_once
            and (not busy or len(waiting) >= self.policy.enough)
        ):
            self._waiting[lane] = []
            self._busy[lane] += 1
            self.sizes.append(len(waiting))
            self._queue(
                "broker", self.costs.send, lambda: self._arrive((lane, waiting)), first=first
            )

    def _arrive(self, call: Call) -> None:
        if self._locked[call[0]]:
            self._blocked[call[0]].append(call)
        else:
            self._execute(call)

    def _execute(self, call: Call) -> None:
        lane, callers = call
        self._locked[lane] = True
        partitions = len({caller % PARTITIONS for caller in callers})
        cost = (
            self.costs.call + self.costs.partition * partitions + self.costs.message * len(callers)
        )
        self._start(("server", next(self._ids)), cost, lambda: self._commit(call))

    def _commit(self, call: Call) -> None:
        self._committing.append(call)
        self._flush()

    def _flush(self) -> None:
        if not self._flushing and self._committing:
            self._flushing = True
            heapq.heappush(
                self._timers, (self.now + self.costs.flush, next(self._ids), self._committing)
            )
            self._committing = []

    def _flushed(self, calls: list[Call]) -> None:
        self._flushing = False
        for lane, callers in calls:
            self._locked[lane] = False
            if self._blocked[lane]:
                self._execute(self._blocked[lane].popleft())
            self._queue("broker", self.costs.receive, self._answering(lane, callers))
        self._flush()

    def _answering(self, lane: int, callers: list[int]) -> Callable[[], None]:
        def answer() -> None:
            self._busy[lane] -= 1
            self._call(lane, first=True)
            for caller in callers:
                self._queue("broker", self.costs.response, self._answered(caller))

        return answer

    def _answered(self, caller: int) -> Callable[[], None]:
        def notified() -> None:
            self.answered += 1
            self._send(caller)

        return notified


def figures() -> Iterator[Figure]:
    usual = Costs()
    third_less = replace(
        usual, **{name: getattr(usual, name) * 2 / 3 for name in usual.__slots__ if name != "flush"}
    )
    cases = [
        ("one call at a time", usual, Policy()),
        ("two calls that queue for rows", usual, Policy(at_once=2, enough=16)),
        ("two lanes", usual, Policy(lanes=2)),
        ("four lanes", usual, Policy(lanes=4)),
        ("one call, a third less CPU", third_less, Policy()),
    ]
    for flush in (350, 1000, 1500):
        for name, costs, policy in cases:
            model = Model(replace(costs, flush=flush), policy)
            model.run(SECONDS * 1e6)
            yield Figure(
                name=f"queues, modelled: push, 1 per request, flush of {flush / 1000:g} ms, {name}",
                value=model.answered / SECONDS,
                unit="messages/s",
                note=f"{model.used / SECONDS / 1e6:.2f} cores, {sum(model.sizes) / len(model.sizes):.0f} per call, "
                f"{model.used / model.answered:.0f} us of CPU per message",
            )
