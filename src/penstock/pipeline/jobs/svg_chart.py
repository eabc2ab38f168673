"""A chart over time as SVG text: lines, or stacked bars, with axes. No library, some kilobytes.

It is drawn in units of its view box and scaled to the width it is given by the page; on phones the
page makes the letters larger. Lines that coincide stay visible: the one above is dashed, and lets
the one below be seen in between.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from html import escape
from typing import Literal

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 8, 16, 32
DASH = 10  # units of a dashed line that are drawn
Y_TICKS, X_TICKS = 5, 6
TIME_STEPS = [
    *(timedelta(minutes=n) for n in (1, 2, 5, 10, 15, 30)),
    *(timedelta(hours=n) for n in (1, 2, 3, 6, 12)),
    *(timedelta(days=n) for n in (1, 2, 7, 14, 30, 90, 365)),
]


@dataclass
class Line:
    """The values of one thing; None where they are not known."""

    values: Sequence[float | None]
    color: str


@dataclass
class Chart:
    """What is drawn: a value of each line at each time."""

    times: Sequence[datetime]
    lines: Sequence[Line]
    kind: Literal["line", "bar"] = "line"  # bars are stacked
    log: bool = False
    label: str = ""  # for those who cannot see it
    step: timedelta = field(default=timedelta(minutes=1))  # from one time to the next

    def svg(self) -> str:
        marks = "".join(self._bars() if self.kind == "bar" else self._lines())
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.label)}">'
            f"{self._y_axis()}{self._x_axis()}{marks}</svg>"
        )

    @property
    def _slot(self) -> float:
        """The width of one time."""
        return (WIDTH - LEFT - RIGHT) / max(1, len(self.times))

    def _x(self, index: float) -> float:
        """The middle of a time."""
        return LEFT + self._slot * (index + 0.5)

    def _top(self) -> float:
        """The largest value that has to fit."""
        if self.kind == "bar":
            sums = (sum(line.values[i] or 0 for line in self.lines) for i in range(len(self.times)))
            return max(sums, default=0) or 1
        return max((value for line in self.lines for value in line.values if value), default=1)

    def y_ticks(self) -> list[float]:
        """Round numbers from the bottom of the axis to its top."""
        top = self._top()
        if self.log:
            low = min((value for line in self.lines for value in line.values if value), default=1)
            steps = [digit * 10.0**power for power in range(-4, 13) for digit in (1, 2, 5)]
            first = max((step for step in steps if step <= low), default=steps[0])
            last = min((step for step in steps if step >= top), default=steps[-1])
            ticks = [step for step in steps if first <= step <= last]
            if len(ticks) == 1:
                return [first, first * 10]
            return ticks if len(ticks) <= 2 * Y_TICKS else [*ticks[::3], ticks[-1]]
        rough = top / (Y_TICKS - 1)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
        return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]

    def _y(self, value: float, ticks: list[float]) -> float:
        low, high = ticks[0], ticks[-1]
        share = math.log(max(value, low) / low) / math.log(high / low) if self.log else value / high
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def _y_axis(self) -> str:
        ticks = self.y_ticks()
        return "".join(
            f'<path class=grid d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short_number(tick)}</text>'
            for tick in ticks
            for y in [self._y(tick, ticks)]
        )

    def _x_axis(self) -> str:
        return "".join(
            f'<text x="{self._x(index):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{text}</text>'
            for index, text in self.x_ticks()
        )

    def x_ticks(self) -> list[tuple[int, str]]:
        """Times at round steps, by their index, and what to write there."""
        if not self.times:
            return []
        length = self.times[-1] - self.times[0] + self.step
        step = next((one for one in TIME_STEPS if length / one <= X_TICKS), TIME_STEPS[-1])
        step = max(step, self.step)
        form = "%H:%M" if step < timedelta(days=1) else "%b %d"
        ticks = [
            (index, at)
            for index, at in enumerate(self.times)
            if int(at.timestamp()) % int(step.total_seconds()) == 0
        ]
        return [(index, f"{at:{form}}") for index, at in ticks or [(0, self.times[0])]]

    def _lines(self) -> Iterator[str]:
        ticks = self.y_ticks()
        points = [
            # many lines meet at zero, and none is missed there
            [None if not value else round(self._y(value, ticks)) for value in line.values]
            for line in self.lines
        ]
        for number, line in enumerate(self.lines):
            below = sum(_coincide(points[number], other) for other in points[:number])
            dashes = f' stroke-dasharray="{DASH} {DASH * below}"' if below else ""
            path, alone = "", []
            for index, value in enumerate(line.values):
                if value is None:
                    continue
                x, y = self._x(index), self._y(value, ticks)
                joined = index > 0 and line.values[index - 1] is not None
                path += f"{'L' if joined else 'M'}{x:.1f} {y:.1f}"
                if not joined and (index + 1 >= len(self.times) or line.values[index + 1] is None):
                    alone.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>')
            yield (
                f'<g stroke="{line.color}" fill="{line.color}"><path fill="none" '
                f'stroke-width="2" stroke-linejoin="round"{dashes} d="{path}"/>{"".join(alone)}</g>'
            )

    def _bars(self) -> Iterator[str]:
        ticks = self.y_ticks()
        below = [0.0] * len(self.times)
        width = max(0.5, self._slot * 0.9)
        for line in self.lines:
            path = ""
            for index, value in enumerate(line.values):
                if value:
                    bottom, top = (self._y(y, ticks) for y in (below[index], below[index] + value))
                    x = self._x(index) - width / 2
                    path += f"M{x:.1f} {bottom:.1f}V{top:.1f}h{width:.1f}V{bottom:.1f}z"
                    below[index] += value
            yield f'<path fill="{line.color}" d="{path}"/>'


def _coincide(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Whether two lines lie on each other somewhere: at two times in a row, or at all there are."""
    same = [a is not None and a == b for a, b in zip(one, other, strict=True)]
    return any(a and b for a, b in itertools.pairwise(same)) or (len(same) < 3 and any(same))


def short_number(value: float) -> str:
    """For axes: 1.5k, 2M, 0.25."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:.4g}"
