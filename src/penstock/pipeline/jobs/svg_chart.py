"""A chart over time as SVG text: lines, or stacked bars, with axes. No library, some kilobytes.

It is drawn in units of its view box and scaled to the width it is given by the page; on phones the
page makes the letters larger. Lines that coincide stay visible: the one above is dashed, and lets
the one below be seen in between.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
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
class ChartSeries:
    """One line, or one colour of the bars."""

    label: str
    values: list[float | None]  # one per time of the report; None = not known


@dataclass
class Panel:
    """A plot over a report's times."""

    title: str
    unit: str
    series: list[ChartSeries]
    kind: Literal["line", "bar"] = "line"  # bars are stacked
    empty: str = "nothing in this time"
    log: bool = False

    @property
    def is_empty(self) -> bool:
        """Return whether there are only zeros and gaps."""
        return not any(value for series in self.series for value in series.values)


@dataclass
class Chart:
    panel: Panel
    times: Sequence[datetime]
    colors: Mapping[str, str]  # by label

    def svg(self) -> str:
        marks = "".join(self._bars() if self.panel.kind == "bar" else self._lines())
        label = escape(f"{self.panel.title}, {self.panel.unit}")
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
            f"{self._y_axis()}{self._x_axis()}{marks}</svg>"
        )

    @property
    def _slot(self) -> float:
        """Return the width of one time step."""
        return (WIDTH - LEFT - RIGHT) / max(1, len(self.times))

    def _x(self, index: float) -> float:
        """Return the middle of a time step."""
        return LEFT + self._slot * (index + 0.5)

    @cached_property
    def _y_ticks(self) -> list[float]:
        """Return round numbers from the bottom to the top of the axis."""
        values = [series.values for series in self.panel.series]
        positive = [value for one in values for value in one if value]
        top = max(positive, default=1)
        if self.panel.kind == "bar":
            sums = (sum(value or 0 for value in stack) for stack in zip(*values, strict=True))
            top = max(sums, default=0) or 1
        if self.panel.log:
            low = min(positive, default=1)
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

    def _y(self, value: float) -> float:
        low, high = self._y_ticks[0], self._y_ticks[-1]
        share = value / high
        if self.panel.log:
            share = math.log(max(value, low) / low) / math.log(high / low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def _y_axis(self) -> str:
        return "".join(
            f'<path class=grid d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>'
            for tick, y in zip(self._y_ticks, map(self._y, self._y_ticks), strict=True)
        )

    def _x_axis(self) -> str:
        """Return times at round steps."""
        between = self.times[1] - self.times[0] if len(self.times) > 1 else timedelta(minutes=1)
        length = self.times[-1] - self.times[0] + between
        step = next((one for one in TIME_STEPS if length / one <= X_TICKS), TIME_STEPS[-1])
        step = max(step, between)
        form = "%H:%M" if step < timedelta(days=1) else "%b %d"
        ticks = [
            (index, at)
            for index, at in enumerate(self.times)
            if int(at.timestamp()) % int(step.total_seconds()) == 0
        ]
        return "".join(
            f'<text x="{self._x(index):.1f}" y="{HEIGHT - 8}" text-anchor="middle">'
            f"{at:{form}}</text>"
            for index, at in ticks or [(0, self.times[0])]
        )

    def _lines(self) -> Iterator[str]:
        points = [
            # lines often meet at zero, where they need no marker
            [None if not value else round(self._y(value)) for value in series.values]
            for series in self.panel.series
        ]
        for number, series in enumerate(self.panel.series):
            below = sum(_coincide(points[number], other) for other in points[:number])
            dashes = f' stroke-dasharray="{DASH} {DASH * below}"' if below else ""
            path, alone, values = "", "", [None, *series.values, None]
            for index, value in enumerate(series.values):
                if value is None:
                    continue
                x, y = self._x(index), self._y(value)
                before, after = values[index], values[index + 2]
                path += f"{'M' if before is None else 'L'}{x:.1f} {y:.1f}"
                if before is None and after is None:
                    alone += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>'
            color = self.colors[series.label]
            yield (
                f'<g stroke="{color}" fill="{color}"><path fill="none" '
                f'stroke-width="2" stroke-linejoin="round"{dashes} d="{path}"/>{alone}</g>'
            )

    def _bars(self) -> Iterator[str]:
        below = [0.0] * len(self.times)
        width = max(0.5, self._slot * 0.9)
        for series in self.panel.series:
            path = ""
            for index, value in enumerate(series.values):
                if value:
                    bottom, top = self._y(below[index]), self._y(below[index] + value)
                    x = self._x(index) - width / 2
                    path += f"M{x:.1f} {bottom:.1f}V{top:.1f}h{width:.1f}V{bottom:.1f}z"
                    below[index] += value
            yield f'<path fill="{self.colors[series.label]}" d="{path}"/>'


def _coincide(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Return whether two lines coincide at two times in a row, or at all times."""
    same = [a is not None and a == b for a, b in zip(one, other, strict=True)]
    return any(a and b for a, b in itertools.pairwise(same)) or (len(same) < 3 and any(same))


def number(value: float | None) -> str:
    """Format a number for people: 1,234 as is, 12,345,678 as 12.3 M."""
    if value is None:
        return "–"
    for limit, one, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / one:.3g} {unit}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
