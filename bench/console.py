"""What somebody who watches the Console costs, with 1,000 queues and 100 topics.

A viewer is what the page does: the live stream, and the list of queues every two seconds, in a
process of its own. CPU is that of the broker and of PostgreSQL as the kernel counts it, with 0, 1
and 3 viewers in turn on a broker that is otherwise idle; what a viewer costs is the difference to
none.

The push rate is measured in many short rounds in turn, with and without a viewer, on one queue and
on the same connections; what counts is the median of the ratios of neighbouring rounds. A single
round says nothing: on a shared machine they differ by tens of percent.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx

from bench.harness import Contest, Figure, spread
from bench.queues import PARTITIONS, Ground, _close, produce
from bench.queues_cost import _clocks

QUEUES, TOPICS = 1000, 100
ROUNDS = 3
ROUND_SECONDS = 10.0
PUSH_ROUNDS, PUSH_SECONDS = 21, 1.5
TURNS_PER_ROUND = 100_000  # requests of a connection in a round: fewer
CALM_SECONDS = 1.2  # after a viewer has come or gone
LIST_SECONDS = 2.0  # between two requests of a viewer for the list
TARGET_SHARE = 0.02  # of a core, for one viewer
TARGET_RATIO = 0.98  # of the push rate
VIEWER = f"""
import http.client, sys, threading, time
port = int(sys.argv[1])
def listing():
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while True:
        time.sleep({LIST_SECONDS})
        connection.request("GET", "/api/v1/queues?sort=-waiting&limit=50&recent=true")
        connection.getresponse().read()
threading.Thread(target=listing, daemon=True).start()
live = http.client.HTTPConnection("127.0.0.1", port)
live.request("GET", "/api/v1/live")
answer = live.getresponse()
while answer.read1(1 << 20):
    print("seen", flush=True)
"""


def contests() -> Iterator[Contest]:
    with ExitStack() as stack:
        ground = prepared(stack)
        pushes = Pushes(ground)
        stack.callback(pushes.close)

        def watched() -> float:
            with viewers(ground, 1):
                return pushes.round()

        def alone() -> float:
            return pushes.round()

        yield Contest(
            "console: push, 100 per request, with a viewer",
            "messages/s",
            watched,
            alone,
            "nobody watching",
            at_least=TARGET_RATIO,
            rounds=PUSH_ROUNDS,
            warm_up=2,
        )


class Pushes:
    """Rounds of pushes to one queue, over the same connections."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._queue = ground.fresh()
        self._turn = 0
        ground.runner.run(ground.fill(self._queue, PARTITIONS, PARTITIONS, 1))
        self._callers = ground.runner.run(ground.callers(16))

    def round(self) -> float:
        time.sleep(CALM_SECONDS)
        self._turn += TURNS_PER_ROUND
        pushing = produce(self._ground, self._callers, self._queue, 100, PUSH_SECONDS, self._turn)
        return self._ground.runner.run(pushing)

    def close(self) -> None:
        _close(self._callers)


def figures() -> Iterator[Figure]:
    with ExitStack() as stack:
        ground = prepared(stack)
        shares: dict[int, list[float]] = {0: [], 1: [], 3: []}
        for _ in range(ROUNDS):
            for count, result in shares.items():
                result.append(share(ground, count))
        idle = statistics.median(shares[0])
        yield Figure("console: CPU of an idle broker, nobody watching", idle * 100, "% of a core")
        for count in (1, 3):
            extra = [value - idle for value in shares[count]]
            cost = statistics.median(extra)
            target = TARGET_SHARE if count == 1 else None
            yield Figure(
                name=f"console: CPU that {count} viewer{'s' if count > 1 else ''} cost",
                value=cost * 100,
                unit="% of a core",
                target=f"< {target:.0%}" if target else "",
                met=cost < target if target else None,
                spread=spread(extra),
                note=f"{QUEUES} queues, {TOPICS} topics; broker and PostgreSQL",
                detail={"shares": shares[count], "idle": shares[0]},
            )


def prepared(stack: ExitStack) -> Ground:
    """A broker with many queues, each with a group, and many topics."""
    ground = Ground(stack)
    with httpx.Client(base_url=ground.broker.url, timeout=60) as ask:
        items = [{"queue": f"q-{number}", "payload": number} for number in range(QUEUES)]
        ask.post("/api/v1/push", json={"items": items}).raise_for_status()
        for number in range(QUEUES):
            ask.get(f"/api/v1/pop/queue/q-{number}?consumerGroup=g&autoAck=true")
        for number in range(TOPICS):
            ask.post(f"/topics/t-{number}").raise_for_status()
    time.sleep(2 * LIST_SECONDS)  # what starting left to do
    return ground


def share(ground: Ground, count: int) -> float:
    """Cores that the broker and PostgreSQL use while `count` viewers watch."""
    with viewers(ground, count):
        before, began = _clocks(ground), time.perf_counter()
        time.sleep(ROUND_SECONDS)
        after, seconds = _clocks(ground), time.perf_counter() - began
    used = sum(after[who] - before[who] for who in ("broker", "PostgreSQL"))
    return used / 1e6 / seconds


@contextmanager
def viewers(ground: Ground, count: int) -> Iterator[None]:
    """So many pages open; they have their first answers when the block begins."""
    watching = [
        subprocess.Popen(
            [sys.executable, "-c", VIEWER, str(ground.port)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    try:
        for viewer in watching:
            if viewer.stdout is None or not viewer.stdout.readline():
                raise RuntimeError("a viewer got nothing")
        yield
    finally:
        for viewer in watching:
            viewer.kill()
            viewer.communicate()
