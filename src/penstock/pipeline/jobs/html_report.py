"""Reports for people: tiles, panels over time and tables as one HTML file of some kilobytes. It
needs nothing but itself, so it opens anywhere, without a network, also on a phone.

A thing (a queue, a group, a percentile) has one colour in all panels. The panels' axis is the part
of the time asked for in which something happened (`fit`). Figures under the pointer are shown by a
few lines of script; everything else is there without it.
"""

import colorsys
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path

from penstock.errors import Unavailable
from penstock.pipeline.jobs.svg_chart import Chart, ChartSeries, Panel

COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777")
GREY = "#94a3b8"
OTHERS = "all others"
MAX_SERIES = 8  # of a panel; the others are added up
HUE_STEP = 0.381966  # of the circle: what follows is far from what was there
INTERVALS = (  # seconds, and what to call them
    *((60, "per minute"), (300, "per 5 minutes"), (900, "per 15 minutes")),
    *((3600, "per hour"), (21600, "per 6 hours"), (86400, "per day")),
)
SHORTEST_AXIS = timedelta(minutes=10)


@dataclass
class ReportTable:
    title: str
    columns: list[str]
    rows: list[list[str]]
    empty: str = "nothing in this time"
    text: int = 1  # the number of text columns at the left; the others are numbers


@dataclass
class HtmlReport:
    title: str
    since: datetime
    until: datetime
    times: list[datetime]
    panels: list[Panel]
    tiles: list[tuple[str, str]] = field(default_factory=list)  # what, how much
    tables: list[ReportTable] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    step: str = ""  # "per minute"
    window: tuple[datetime, datetime] | None = None  # the requested number, if more than is shown

    @property
    def subtitle(self) -> str:
        window = _span(self.since, self.until)
        if self.window is not None and self.window != (self.since, self.until):
            window += f" (of {_span(*self.window)}: before and after, nothing happened)"
        return f"{window}, {self.step}" if self.step else window


def _span(since: datetime, until: datetime) -> str:
    return f"{since.astimezone(UTC):%Y-%m-%d %H:%M} to {until.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def write(report: HtmlReport, html: str | Path) -> None:
    """Write the report to a file, which is whole or not there."""
    path = Path(html)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(to_html(report))
    beside.replace(path)


def top(series: dict[str, list[float | None]], ranks: list[str]) -> list[ChartSeries]:
    """Return the largest series and the sum of the rest, since forty lines are unreadable."""
    shown = [ChartSeries(label, series[label]) for label in ranks[:MAX_SERIES] if label in series]
    rest = [series[label] for label in series if label not in ranks[:MAX_SERIES]]
    if rest:
        sums = [sum(value or 0 for value in values) for values in zip(*rest, strict=True)]
        shown.append(ChartSeries(OTHERS, sums))
    return shown


def colors(panels: Iterable[Panel]) -> dict[str, str]:
    """Assign a colour to each label, the same in all panels."""
    labels = dict.fromkeys(series.label for panel in panels for series in panel.series)
    labels.pop(OTHERS, None)
    return {OTHERS: GREY, **{label: _color(number) for number, label in enumerate(labels)}}


def _color(number: int) -> str:
    if number < len(COLORS):
        return COLORS[number]
    red, green, blue = colorsys.hls_to_rgb(number * HUE_STEP % 1, 0.42, 0.65)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def fit(since: datetime, until: datetime, moments: Iterable[datetime]) -> tuple[datetime, datetime]:
    """Return the part of the period with activity, with a margin; all of it if that is most."""
    inside = [at for at in moments if since <= at <= until]
    if not inside:
        return since, until
    first, last = min(inside), max(inside) + timedelta(minutes=1)
    room = max((last - first) / 20, (SHORTEST_AXIS - (last - first)) / 2)
    first, last = max(since, first - room), min(until, last + room)
    return (first, last) if (last - first) < (until - since) * 0.8 else (since, until)


def to_html(report: HtmlReport) -> str:
    tiles = "".join(
        f"<div class=tile><b>{escape(value)}</b><span>{escape(name)}</span></div>"
        for name, value in report.tiles
    )
    by_label = colors(report.panels)
    panels = "".join(_section(report, panel, by_label) for panel in report.panels)
    tables = "".join(_table(table) for table in report.tables)
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    return (
        "<!doctype html><html lang=en><head><meta "
        f"charset=utf-8><title>{escape(report.title)}</title>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE}</style></head><body>"
        f"<header><h1>{escape(report.title)}</h1><p>{escape(report.subtitle)}</p></header>"
        f"<div class=tiles>{tiles}</div><main>{panels}</main>{tables}<footer>{notes}"
        f"<p>Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by Penstock.</p></footer>"
        f"<script type=application/json id=figures>{_figures(report)}</script>"
        f"<script>{POINTER}</script></body></html>"
    )


def _figures(report: HtmlReport) -> str:
    """Return the values shown at the pointer, by panel, safe inside a script element."""
    figures = {
        "times": [f"{at.astimezone(UTC):%b %d %H:%M}" for at in report.times],
        "panels": [
            [
                {"label": series.label, "values": [_rounded(value) for value in series.values]}
                for series in (() if panel.is_empty else panel.series)
            ]
            for panel in report.panels
        ],
    }
    return json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _section(report: HtmlReport, panel: Panel, by_label: dict[str, str]) -> str:
    about = f"<h2>{escape(panel.title)} <small>{escape(panel.unit)}</small></h2>"
    if panel.is_empty:
        return f"<section>{about}<p class=empty>{escape(panel.empty)}</p></section>"
    chart = Chart(panel, report.times, by_label)
    legend = "".join(
        f"<li><i style='background:{by_label[series.label]}'></i>{escape(series.label)}"
        for series in panel.series
    )
    number = report.panels.index(panel)
    return (
        f"<section data-panel={number}>{about}<div class=plot>{chart.svg()}"
        f"<output></output></div><ul>{legend}</ul></section>"
    )


def _table(table: ReportTable) -> str:
    def cells(tag: str, texts: list[str]) -> str:
        return "".join(
            f"<{tag}{'' if place >= table.text else ' class=text'}>{escape(text)}"
            for place, text in enumerate(texts)
        )

    head = cells("th", table.columns)
    rows = "".join(f"<tr>{cells('td', row)}" for row in table.rows)
    body = f"<table><thead><tr>{head}</thead><tbody>{rows}</tbody></table>"
    shown = body if table.rows else f"<p class=empty>{escape(table.empty)}</p>"
    return f"<section class=wide><h2>{escape(table.title)}</h2>{shown}</section>"


def size(count: float | None) -> str:
    """Format bytes: 1.5 KiB."""
    if count is None:
        return "–"
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float | None) -> str:
    """Format seconds: 196 ms, 3 h."""
    if seconds is None:
        return "–"
    for limit, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= limit:
            return f"{seconds / limit:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


def short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def bins(since: datetime, until: datetime, most: int = 180) -> tuple[int, str]:
    """Return the shortest step that makes at most this many intervals, and its name."""
    length = (until - since).total_seconds()
    return next((one for one in INTERVALS if length / one[0] <= most), INTERVALS[-1])


def times_of(since: datetime, until: datetime, step: int) -> list[datetime]:
    """Return when each step begins, from the one that contains `since` up to `until`."""
    first, last = int(since.timestamp()) // step * step, until.timestamp()
    return [
        datetime.fromtimestamp(at, UTC) for at in range(first, int(last) + (last % 1 > 0), step)
    ]


def check_target(html: str | Path | None) -> None:
    """Check that the file can be written, before the long computation."""
    if html is not None and not Path(html).parent.is_dir():
        raise Unavailable(f"{html} cannot be written: {Path(html).parent} is not a directory")


POINTER = """
const {times, panels} = JSON.parse(document.getElementById("figures").textContent);
for (const section of document.querySelectorAll("section[data-panel]")) {
  const series = panels[section.dataset.panel], svg = section.querySelector("svg");
  const output = section.querySelector("output");
  const show = (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * 640;
    const at = Math.floor((x - 56) / 576 * times.length);
    if (at < 0 || at >= times.length) return hide();
    const rows = series.filter((one) => one.values[at] != null)
      .map((one) => one.label + ": " + one.values[at].toLocaleString("en"));
    output.textContent = [times[at], ...rows].join("\\n");
    output.style.display = "block";
    output.style[x < 320 ? "right" : "left"] = "0";
    output.style[x < 320 ? "left" : "right"] = "auto";
  };
  const hide = () => { output.style.display = "none"; };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}"""

STYLE = """
:root{--ink:#0f172a;--faint:#64748b;--line:#e2e8f0;--page:#f8fafc;--card:#fff;
color-scheme:light dark}
@media(prefers-color-scheme:dark){
:root{--ink:#e2e8f0;--faint:#94a3b8;--line:#334155;--page:#0f172a;--card:#1e293b}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);
margin:0 auto;max-width:1400px;padding:24px}
header h1{margin:0;font-size:26px}header p{margin:2px 0 18px;color:var(--faint)}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin-bottom:16px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 18px;
min-width:110px}
.tile b{display:block;font-size:22px}.tile span{color:var(--faint);font-size:13px}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(520px,100%),1fr));gap:16px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px;
min-width:0}
section.wide{margin-top:16px;overflow-x:auto}
h2{font-size:16px;margin:0 0 4px}h2 small{color:var(--faint);font-weight:400}
.plot{position:relative}svg{display:block;width:100%}
svg text{font-size:11px;fill:var(--faint)}.grid{stroke:var(--line);fill:none}
output{display:none;position:absolute;top:0;white-space:pre;pointer-events:none;font-size:12px;
background:var(--card);border:1px solid var(--line);border-radius:6px;padding:4px 8px;
max-width:60%;overflow:hidden;text-overflow:ellipsis}
ul{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:6px 0 0;padding:0;font-size:13px}
li{overflow-wrap:anywhere}li i{display:inline-block;width:10px;height:10px;border-radius:2px;
margin-right:6px}
.empty{color:var(--faint);text-align:center;padding:70px 0;margin:0}.wide .empty{padding:20px}
table{border-collapse:collapse;width:100%;font-size:14px}th,td{padding:5px 10px;text-align:right;
border-bottom:1px solid var(--line);vertical-align:top;font-variant-numeric:tabular-nums}
th{color:var(--faint);font-weight:500}
.text{text-align:left;overflow-wrap:anywhere}footer{color:var(--faint);font-size:13px;
margin-top:16px}
footer p{margin:2px 0}
@media(max-width:640px){body{padding:12px}svg text{font-size:20px}section{padding:10px}
.wide .text{min-width:9em}}
"""
