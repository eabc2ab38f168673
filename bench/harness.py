"""What every benchmark shares: alternating rounds, medians with spread, and one table at the end.

Machines are shared and noisy, so no absolute figure stands alone: a `Contest` runs ours and theirs
in turn, several rounds, and reports the median of the rounds' ratios. A bench module defines
`contests() -> Iterable[Contest]` or `figures() -> Iterable[Figure]` (for latencies and sizes that
have a limit but no peer); contests may have figures of the same set-up between them.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Figure:
    """One row of the table. `target` reads as text and `met` is None when there is nothing to
    reach.
    """

    name: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None
    against: str = ""
    against_value: float | None = None
    ratio: float | None = None
    spread: float | None = None  # (max - min) / median over the rounds, of the ratio or the value
    note: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, "", {})}


@dataclass(slots=True)
class Contest:
    """Ours against theirs: each callable does one round and returns a rate (higher is better)."""

    name: str
    unit: str
    ours: Callable[[], float]
    theirs: Callable[[], float]
    against: str
    at_least: float | None = None  # the ratio to reach
    rounds: int = 5
    warm_up: int = 1
    note: str = ""

    def run(self, rounds: int | None = None) -> Figure:
        for _ in range(self.warm_up):
            self.ours()
            self.theirs()
        ours: list[float] = []
        theirs: list[float] = []
        for turn in range(rounds or self.rounds):
            for side, rates in ((self.ours, ours), (self.theirs, theirs))[
                :: 1 if turn % 2 == 0 else -1
            ]:
                rates.append(side())
                if not rates[-1] > 0:
                    raise RuntimeError(f"{self.name}: a round measured nothing")
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ratios)
        return Figure(
            name=self.name,
            value=statistics.median(ours),
            unit=self.unit,
            target=f"≥ {self.at_least:g}x" if self.at_least else "",
            met=ratio >= self.at_least if self.at_least else None,
            against=self.against,
            against_value=statistics.median(theirs),
            ratio=ratio,
            spread=spread(ratios),
            note=self.note,
            detail={"ours": ours, "theirs": theirs},
        )


def spread(values: list[float]) -> float:
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def percentile(values: list[float], share: float) -> float:
    """The value that `share` (0..1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def busy_share(seconds: float = 1.0) -> float:
    """How much of the machine other work uses: 0 is quiet, 1 is all cores."""
    before = _idle()
    time.sleep(seconds)
    idle = (_idle() - before) / seconds / (os.cpu_count() or 1)
    return min(1.0, max(0.0, 1.0 - idle))


def _idle() -> float:
    """Seconds that all cores have been idle or waiting for the disk."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def figures_of(module: Any, rounds: int | None) -> Iterator[Figure]:
    for one in getattr(module, "contests", tuple)():
        yield one.run(rounds) if isinstance(one, Contest) else one
    yield from getattr(module, "figures", tuple)()
