"""Where the time of queues over HTTP goes: CPU per message of each process, ours and the plain
table's.

A rate on a busy machine says what was left of it; CPU time per message says what the work costs.
The kernel's `schedstat` counts it, for the broker, for PostgreSQL (all its processes) and for the
load generator in this process.

    make bench B=queues_cost
    .venv/bin/python -m bench.queues_cost --against 633ce5a1

The second form compares the broker of this tree with the one of another commit. Both run on the
libraries installed here and on one PostgreSQL, each in its own database, and take turns. The first
ratio is that of the medians of the CPU of broker and PostgreSQL together, above 1 where this tree
costs more; those of each of them follow. The last is that of the messages per second, below 1 where
this tree is slower. `--only push` restricts it to works whose name contains the word.
"""

import argparse
import os
import statistics
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from bench import queues
from bench.harness import Figure
from bench.queues import BATCHED, PLAINLY, Ground, Rounds, _close, rate
from tests.support.broker import ServeProcess

ROOT = Path(__file__).parent.parent
# Short turns of one and the other: what else the machine does falls on both.
TURN_SECONDS = 0.4
Round = Callable[[], Coroutine[Any, Any, float]]


def figures() -> Iterator[Figure]:
    with ExitStack() as stack:
        ground = Ground(stack)
        rounds = Rounds(ground)
        pairs: list[tuple[str, Round, Round, str]] = [
            (
                "push, 1 per request",
                partial(rounds.push, 64, 1),
                partial(rounds.plain_push, 64, 1),
                PLAINLY,
            ),
            (
                "push, 100 per request",
                partial(rounds.push, 16, 100),
                partial(rounds.plain_push, 16, 100, one_by_one=False),
                BATCHED,
            ),
            (
                "pop + ack, 100",
                partial(rounds.take, 8, 100),
                partial(rounds.plain_take, 8, 100),
                BATCHED,
            ),
        ]
        for name, ours, theirs, against in pairs:
            spent = _cost(ground, ours)
            plain = _cost(ground, theirs)
            yield Figure(
                name=f"queues: CPU per message, {name}",
                value=sum(spent.values()),
                unit="µs",
                against=against,
                against_value=sum(plain.values()),
                ratio=sum(plain.values()) / sum(spent.values()),
                note=", ".join(f"{who} {cost:.1f}" for who, cost in spent.items()),
                detail={"ours": spent, "theirs": plain},
            )
            for who, cost in spent.items():
                yield Figure(
                    f"queues: CPU per message, {name}: {who}", cost, "µs", against_value=plain[who]
                )


def _cost(ground: Ground, once: Round) -> dict[str, float]:
    """Microseconds of CPU per message, for each process; the better of two rounds after a first
    one.
    """
    best: dict[str, float] = {}
    for turn in range(3):
        _, result = _measure(ground, once)
        if turn and (not best or sum(result.values()) < sum(best.values())):
            best = result
    return best


def compare(reference: str, rounds: int, only: str) -> None:
    """Print the CPU per message of this tree and of another commit."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-cost-")))
        archive = subprocess.run(
            ["git", "archive", reference, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        ).stdout
        with tarfile.open(fileobj=BytesIO(archive)) as sources:
            sources.extractall(directory, filter="data")
        ground = Ground(stack)
        other = ServeProcess(
            directory / "data",
            database_url=ground.runner.run(ground.database("other")),
            env={"PYTHONPATH": str(directory / "src"), "PYTHONSAFEPATH": "1"},
        )
        other.ports.pop("kafka")  # a broker of an older commit may not know it
        brokers = {"here": ground.broker, reference: stack.enter_context(other)}
        load = Rounds(ground)
        works: dict[str, Round] = {
            "push of 1, 1 connection": partial(load.push, 1, 1, TURN_SECONDS),
            "push of 1, 64 connections": partial(load.push, 64, 1, TURN_SECONDS),
            "push of 100, 16 connections": partial(load.push, 16, 100, TURN_SECONDS),
            "pop + ack 1, 1 connection": partial(_take, ground, 1, 1, 500),
            "pop + ack 1, 16 connections": partial(_take, ground, 16, 1, 2000),
            "pop + ack 1, 64 connections": partial(_take, ground, 64, 1, 2000),
            "pop + ack 10, 8 connections": partial(_take, ground, 8, 10, 10_000),
            "pop + ack 100, 8 connections": partial(_take, ground, 8, 100, 40_000),
        }
        for name, once in works.items():
            if only not in name:
                continue
            spent: dict[str, list[dict[str, float]]] = {side: [] for side in brokers}
            speeds: dict[str, list[float]] = {side: [] for side in brokers}
            for turn in range(rounds + 1):
                for side in sorted(brokers, reverse=bool(turn % 2)):
                    ground.broker = brokers[side]
                    ground.port = int(ground.broker.url.rpartition(":")[2])
                    speed, costs = _measure(ground, once)
                    if turn:  # the first round fills caches
                        spent[side].append(costs | {"both": costs["broker"] + costs["PostgreSQL"]})
                        speeds[side].append(speed)
            fast, before = (statistics.median(speeds[side]) for side in ("here", reference))
            here, there = spent["here"], spent[reference]
            each = " ".join(
                f"{a['both'] / b['both']:.2f}" for a, b in zip(here, there, strict=True)
            )
            parts = ", ".join(
                f"{part} {_median(here, part):.1f} and {_median(there, part):.1f} µs, "
                f"ratio {_median(here, part) / _median(there, part):.2f}"
                for part in ("both", "broker", "PostgreSQL")
            )
            print(
                f"{name:28} {parts} (rounds: {each}); {fast:,.0f} and {before:,.0f} messages/s, "
                f"ratio {fast / before:.2f}",
                flush=True,
            )


def _median(costs: list[dict[str, float]], part: str) -> float:
    return statistics.median(one[part] for one in costs)


async def _take(ground: Ground, connections: int, batch: int, count: int) -> float:
    """Pop and acknowledge, from more partitions than consumers; messages per second."""
    queue = ground.fresh()
    await ground.fill(queue, count, 200, max(10, batch))
    callers = await ground.callers(connections)
    try:
        return await rate([partial(ground.take, caller, queue, batch) for caller in callers])
    finally:
        _close(callers)


def _measure(ground: Ground, once: Round) -> tuple[float, dict[str, float]]:
    """Messages per second in one round, and microseconds of CPU per message of each process."""
    reads: list[tuple[float, dict[str, float]]] = []
    setattr(queues, "meter", partial(_read, ground, reads))  # noqa: B010 - a function of the module
    speed = ground.runner.run(once())
    (began, before), (ended, after) = reads
    return speed, {who: (after[who] - before[who]) / (speed * (ended - began)) for who in after}


def _read(ground: Ground, reads: list[tuple[float, dict[str, float]]]) -> None:
    reads.append((time.perf_counter(), _clocks(ground)))


def _clocks(ground: Ground) -> dict[str, float]:
    """Microseconds of CPU used so far."""
    assert ground.broker.process is not None
    server = ground.postgres.pid()
    assert server is not None
    children = [
        pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == server
    ]
    return {
        "broker": _used(ground.broker.process.pid),
        "PostgreSQL": sum(map(_used, children)) + _used_by_ended(server),
        "load": _used(os.getpid()),
    }


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # it ended meanwhile


def _used_by_ended(pid: int) -> float:
    """Microseconds of CPU of its children that have ended: else a sum over those that live falls."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK") * 1e6


def _used(pid: int) -> float:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1000
    except OSError:
        return 0.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.queues_cost", description=__doc__)
    parser.add_argument("--against", required=True, help="the other commit (a git reference)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each side (default: 15)")
    parser.add_argument("--only", default="", help="a part of the names of works to compare")
    arguments = parser.parse_args()
    compare(arguments.against, arguments.rounds, arguments.only)
