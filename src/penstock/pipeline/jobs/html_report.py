"""Reports for people: tiles, panels over time and tables as one HTML file. It holds plotly.js
itself, so it opens anywhere, without a network.
"""

import importlib.util
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Literal

from penstock.errors import Unavailable

COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777")
GREY = "#94a3b8"
OTHERS = "all others"
MOST = len(COLORS)  # series of a panel; the rest is added up
INK, FAINT, GRID = "#0f172a", "#64748b", "#e2e8f0"


@dataclass
class Series:
    """One line, or one colour of the bars."""

    label: str
    values: list[float | None]  # one per time of the report; None = not known
    color: str


@dataclass
class Panel:
    """A plot over the report's times."""

    title: str
    unit: str
    series: list[Series]
    kind: Literal["line", "bar"] = "line"  # bars are stacked
    empty: str = "nothing in this time"
    log: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing but zeros and gaps to draw."""
        return not any(value for series in self.series for value in series.values)


@dataclass
class Table:
    """A table below the plots."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    empty: str = "nothing in this time"
    text: int = 1  # so many columns at the left are text, the others numbers


@dataclass
class Report:
    """What a page shows."""

    title: str
    since: datetime
    until: datetime
    times: list[datetime]
    panels: list[Panel]
    tiles: list[tuple[str, str]] = field(default_factory=list)  # what, how much
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    step: str = ""  # "per minute"

    @property
    def subtitle(self) -> str:
        """The time it covers, and its step."""
        window = (
            f"{self.since.astimezone(UTC):%Y-%m-%d %H:%M} to "
            f"{self.until.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        )
        return f"{window}, {self.step}" if self.step else window


def write(report: Report, html: str | Path) -> None:
    """Write the report to a file, which is whole or not there."""
    path = Path(html)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(to_html(report))
    beside.replace(path)


def top(series: dict[str, list[float | None]], ranks: list[str]) -> list[Series]:
    """The first of the ranks, the rest added up: nobody can read forty lines. A label has one color
    in all panels.
    """
    shown = [
        Series(label, series[label], color)
        for label, color in zip(ranks, COLORS, strict=False)
        if label in series
    ]
    rest = [series[label] for label in series if label not in ranks[:MOST]]
    if rest:
        shown.append(
            Series(
                OTHERS,
                [sum(value or 0 for value in values) for values in zip(*rest, strict=True)],
                GREY,
            )
        )
    return shown


def to_html(report: Report) -> str:
    """One page with everything in it."""
    from plotly.offline import get_plotlyjs

    tiles = "".join(
        f"<div class=tile><b>{escape(value)}</b><span>{escape(name)}</span></div>"
        for name, value in report.tiles
    )
    panels = "".join(_section(report, panel) for panel in report.panels)
    tables = "".join(_table(table) for table in report.tables)
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    return (
        "<!doctype html><html lang=en><head><meta "
        f"charset=utf-8><title>{escape(report.title)}</title>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body>"
        f"<header><h1>{escape(report.title)}</h1><p>{escape(report.subtitle)}</p></header>"
        f"<div class=tiles>{tiles}</div><main>{panels}</main>{tables}<footer>{notes}"
        f"<p>Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by Penstock.</p></footer>"
        f"<script>{FIT}</script></body></html>"
    )


def _section(report: Report, panel: Panel) -> str:
    import plotly.graph_objects as go

    about = f"<h2>{escape(panel.title)} <small>{escape(panel.unit)}</small></h2>"
    if panel.is_empty:
        return f"<section>{about}<p class=empty>{escape(panel.empty)}</p></section>"
    figure = go.Figure()
    for series in panel.series:
        hover = f"%{{y:,.4~g}} {panel.unit}"
        if panel.kind == "bar":
            figure.add_bar(
                x=report.times,
                y=series.values,
                name=escape(series.label),
                marker_color=series.color,
                hovertemplate=hover,
            )
        else:
            alone = (
                {"mode": "lines+markers", "marker": {"size": 4, "color": series.color}}
                if _sparse(series)
                else {"mode": "lines"}
            )
            figure.add_scatter(
                x=report.times,
                y=series.values,
                name=escape(series.label),
                line={"color": series.color, "width": 2},
                hovertemplate=hover,
                **alone,
            )
    figure.update_layout(
        template="plotly_white",
        height=320,
        margin={"l": 64, "r": 16, "t": 8, "b": 40},
        barmode="stack",
        hovermode="x unified",
        showlegend=True,
        legend={"orientation": "h", "y": -0.18, "x": 0},
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
    )
    figure.update_xaxes(range=[report.since, report.until], gridcolor=GRID)
    figure.update_yaxes(
        title_text=panel.unit,
        gridcolor=GRID,
        rangemode="tozero",
        type="log" if panel.log else "linear",
    )
    if panel.log:
        ticks = _ticks(panel)
        figure.update_yaxes(tickvals=ticks, ticktext=[number(tick) for tick in ticks])
    config = {"displayModeBar": False, "responsive": True}
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, config=config)
    return f"<section>{about}{drawn}</section>"


def _ticks(panel: Panel) -> list[float]:
    """1, 2, 5, 10, ... around the values: what plotly chooses for logarithms is hard to read."""
    values = [value for series in panel.series for value in series.values if value]
    low, high = min(values) / 2.5, max(values) * 2.5
    steps = [digit * 10.0**power for power in range(-4, 10) for digit in (1, 2, 5)]
    return [step for step in steps if low <= step <= high]


def _sparse(series: Series) -> bool:
    """A value between gaps has no line to show it."""
    return any(value is None for value in series.values) or len(series.values) < 3


def _table(table: Table) -> str:
    head = "".join(
        f"<th{'' if place >= table.text else ' class=text'}>{escape(name)}"
        for place, name in enumerate(table.columns)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{'' if place >= table.text else ' class=text'}>{escape(cell)}"
            for place, cell in enumerate(row)
        )
        for row in table.rows
    )
    body = f"<table><thead><tr>{head}</thead><tbody>{rows}</tbody></table>"
    shown = body if table.rows else f"<p class=empty>{escape(table.empty)}</p>"
    return f"<section class=wide><h2>{escape(table.title)}</h2>{shown}</section>"


def number(value: float | None) -> str:
    """1,234 as 1,234; 12,345,678 as 12.3 M; 0.0123 as 0.0123."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= limit:
            return f"{value / ({' G': 1e9, ' M': 1e6, ' k': 1e3}[unit]):.3g}{unit}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def size(count: float | None) -> str:
    """Bytes for people: 1.5 KiB."""
    if count is None:
        return "–"
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds for people: 196 ms, 3 h."""
    if seconds is None:
        return "–"
    for limit, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= limit:
            return f"{seconds / limit:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


def short(text: str, most: int) -> str:
    """The text, cut off at so many characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def bins(since: datetime, until: datetime, most: int = 180) -> tuple[int, str]:
    """The shortest step in seconds that makes at most so many, and what to call it."""
    length = (until - since).total_seconds()
    steps = {
        60: "per minute",
        300: "per 5 minutes",
        900: "per 15 minutes",
        3600: "per hour",
        21600: "per 6 hours",
    }
    for step, name in steps.items():
        if length / step <= most:
            return step, name
    return 86400, "per day"


def times_of(since: datetime, until: datetime, step: int) -> list[datetime]:
    """When each step begins, from the one that holds `since` up to `until`."""
    first, last = int(since.timestamp()) // step * step, until.timestamp()
    return [
        datetime.fromtimestamp(at, UTC) for at in range(first, int(last) + (last % 1 > 0), step)
    ]


def check_target(html: str | Path | None) -> None:
    """Before the long work: may the file be written, is the library there?"""
    if html is None:
        return
    if not Path(html).parent.is_dir():
        raise Unavailable(f"{html} cannot be written: there is no directory {Path(html).parent}")
    if importlib.util.find_spec("plotly") is None:
        raise Unavailable("reports need plotly: pip install 'penstock[pipeline]'")


# The first plots are drawn before the page knows how many go side by side.
FIT = """addEventListener("load",()=>{
for(const plot of document.querySelectorAll(".js-plotly-plot"))
Plotly.Plots.resize(plot)})"""

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#0f172a;background:#f8fafc;
margin:0 auto;max-width:1400px;padding:24px}
header h1{margin:0;font-size:26px}header p{margin:2px 0 18px;color:#64748b}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin-bottom:16px}
.tile{background:#fff;border:1px solid #e2e8f0;border-radius:10px;padding:10px 18px;min-width:110px}
.tile b{display:block;font-size:22px}.tile span{color:#64748b;font-size:13px}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(520px,1fr));gap:16px}
section{background:#fff;border:1px solid #e2e8f0;border-radius:10px;padding:12px 16px;min-width:0}
section.wide{margin-top:16px;overflow-x:auto}
h2{font-size:16px;margin:0 0 4px}h2 small{color:#64748b;font-weight:400}
.empty{color:#64748b;text-align:center;padding:70px 0;margin:0}.wide .empty{padding:20px}
table{border-collapse:collapse;width:100%;font-size:14px}th,td{padding:5px 10px;text-align:right;
border-bottom:1px solid #e2e8f0;vertical-align:top;font-variant-numeric:tabular-nums}
th{color:#64748b;font-weight:500}
.text{text-align:left;overflow-wrap:anywhere}footer{color:#64748b;font-size:13px;margin-top:16px}
footer p{margin:2px 0}
@media(max-width:640px){main{grid-template-columns:1fr}}
"""
