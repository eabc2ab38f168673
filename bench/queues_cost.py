"""Where the time of queues over HTTP goes: CPU per message of each process, ours and the plain
table's.

A rate on a busy machine says what was left of it; CPU time per message says what the work costs.
The kernel's `schedstat` counts it, for the broker, for PostgreSQL (all its processes) and for the
load generator in this process.
"""

import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench import queues
from bench.harness import Figure
from bench.queues import BATCHED, PLAINLY, Ground, Rounds

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
        reads: list[tuple[float, dict[str, float]]] = []
        setattr(queues, "meter", partial(_read, ground, reads))  # noqa: B010 - a function of the module
        rate = ground.runner.run(once())
        (began, before), (ended, after) = reads
        result = {who: (after[who] - before[who]) / (rate * (ended - began)) for who in after}
        if turn and (not best or sum(result.values()) < sum(best.values())):
            best = result
    return best


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
