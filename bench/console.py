"""What somebody who watches the Console costs, with 1,000 queues and 100 topics.

A viewer is what the page does: the live stream, and the list of queues every two seconds. CPU is
that of the broker and of PostgreSQL as the kernel counts it, with 0, 1 and 3 viewers in turn on a
broker that is otherwise idle; what a viewer costs is the difference to none. The push rate is
measured in turn with and without a viewer.
"""

import http.client
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx

from bench.harness import Contest, Figure, spread
from bench.queues import Ground, Rounds
from bench.queues_cost import _clocks

QUEUES, TOPICS = 1000, 100
ROUNDS = 3
ROUND_SECONDS = 10.0
LIST_SECONDS = 2.0  # between two requests of a viewer for the list
TARGET_SHARE = 0.02  # of a core, for one viewer
TARGET_RATIO = 0.98  # of the push rate


def contests() -> Iterator[Contest]:
    with ExitStack() as stack:
        ground = prepared(stack)
        rounds = Rounds(ground)
        push = partial(rounds.push, 16, 100)

        def watched() -> float:
            with viewers(ground, 1):
                return ground.runner.run(push())

        yield Contest(
            "console: push, 100 per request, with a viewer",
            "messages/s",
            watched,
            lambda: ground.runner.run(push()),
            "nobody watching",
            at_least=TARGET_RATIO,
        )


def figures() -> Iterator[Figure]:
    with ExitStack() as stack:
        ground = prepared(stack)
        shares: dict[int, list[float]] = {0: [], 1: [], 3: []}
        for _ in range(ROUNDS):
            for count, found in shares.items():
                found.append(share(ground, count))
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
    ended = threading.Event()
    watching = [threading.Event() for _ in range(count)]

    def live(first: threading.Event) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", ground.port)
        connection.request("GET", "/api/v1/live")
        answer = connection.getresponse()
        while not ended.is_set() and answer.read1(1 << 20):
            first.set()
        connection.close()

    def listing() -> None:
        with httpx.Client(base_url=ground.broker.url) as ask:
            while not ended.wait(LIST_SECONDS):
                ask.get("/api/v1/queues?sort=-waiting&limit=50").raise_for_status()

    threads = [threading.Thread(target=live, args=(first,)) for first in watching]
    threads += [threading.Thread(target=listing) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        for first in watching:
            if not first.wait(30):
                raise RuntimeError("a viewer got nothing")
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
