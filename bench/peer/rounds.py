"""Ours and theirs in turn: rates, and what a message costs the servers in CPU time.

A rate on a busy machine says what was left of it; CPU time per message says what the work costs. It
is read from the kernel's `schedstat`, of all processes of a server; the load is not in it.
"""

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.harness import Figure, spread

ROUNDS = 3


@dataclass(slots=True)
class Round:
    messages: int
    seconds: float
    cpu: float  # seconds, of the server

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def cost(self) -> float:
        """Microseconds of CPU per message."""
        return self.cpu / self.messages * 1e6


Side = Callable[[], Round]


@dataclass(slots=True)
class Match:
    """One row: the same work on both sides."""

    name: str
    ours: Side
    theirs: Side
    against: str
    at_least: float | None = None  # the ratio to reach
    note: str = ""

    def run(self, rounds: int = ROUNDS) -> Figure:
        self.ours()
        self.theirs()  # both are warm now
        ours: list[Round] = []
        theirs: list[Round] = []
        for turn in range(rounds):
            pair = ((self.ours, ours), (self.theirs, theirs))
            for side, results in pair if turn % 2 == 0 else reversed(pair):
                results.append(side())
        ratios = [a.rate / b.rate for a, b in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ratios)
        return Figure(
            name=self.name,
            value=statistics.median(each.rate for each in ours),
            unit="messages/s",
            target=f"≥ {self.at_least:g}x" if self.at_least else "",
            met=ratio >= self.at_least if self.at_least else None,
            against=self.against,
            against_value=statistics.median(each.rate for each in theirs),
            ratio=ratio,
            spread=spread(ratios),
            note=self.note,
            detail={
                "ours": [each.rate for each in ours],
                "theirs": [each.rate for each in theirs],
                "ours_cpu_us": statistics.median(each.cost for each in ours),
                "theirs_cpu_us": statistics.median(each.cost for each in theirs),
            },
        )


def cpu_of(*roots: int) -> float:
    """Seconds of CPU used so far by these processes and all that came from them."""
    children: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        children.setdefault(_parent(pid), []).append(pid)
    total, queue = 0.0, list(roots)
    while queue:
        pid = queue.pop()
        total += _used(pid)
        queue += children.get(pid, ())
    return total


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # it has ended


def _used(pid: int) -> float:
    used = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            used += int((thread / "schedstat").read_text().split()[0])
    except OSError:
        return used / 1e9
    return used / 1e9
