"""docs/explanation/benchmarks.md and its pictures, from bench/results.json: ours beside theirs,
misses included.

A picture has a pair of bars per row, ours and theirs, each pair in the scale of the longer one, so
that a ratio is seen at a glance. Pictures are SVG with colours for light and dark pages, and a
background of their own.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images"
LESS_IS_BETTER = ("µs", "ms", "s")
BUSY = 0.1  # a machine that was busier than this before a run was not quiet

WIDTH, LEFT, BAR = 960, 390, 230  # pixels: the picture, where bars begin, the longest bar
ROW, HEAD, FOOT = 46, 56, 34
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2937 }
.title { font-size: 16px; font-weight: 600 } .small { font-size: 11px; fill: #4b5563 }
.page { fill: #ffffff } .ours { fill: #2563eb } .theirs { fill: #9ca3af }
.missed { fill: #b45309; font-weight: 600 } .met { fill: #15803d; font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb } .small { fill: #9ca3af } .page { fill: #0d1117 }
  .ours { fill: #60a5fa } .theirs { fill: #6b7280 } .missed { fill: #fbbf24 } .met { fill: #4ade80 }
}
"""

README = DOCS.parent / "README.md"
BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)
# For the README: what, benchmark, row, peer. A loss follows each gain.
CHOSEN = (
    ("Push to a queue, 1 per request",
     "peers", "queues, push: 1 per request, 16 connections", "pgmq"),
    ("Push to a queue, 100 per request",
     "peers", "queues, push: 100 per request, 8 connections", "pgmq"),
    ("Pop and acknowledge, 100 per request",
     "peers", "queues, pop + ack: 100 per request, 8 connections", "pgmq"),
    ("Pop and acknowledge, 10 per request, the acknowledgement in a request of its own",
     "queues_small", "pop + ack, 10 at a time, 8 connections, two requests", "pgmq"),
    ("Pop and acknowledge, 1 per request, 16 connections",
     "peers", "queues, pop + ack: 1 per request, 16 connections", "pgmq"),
    ("Pop and acknowledge, 1 per request, 1 connection",
     "queues_small", "pop + ack, 1 at a time, 1 connection, one request", "pgmq"),
    ("Append to a topic, fsync before the answer, 256 in flight",
     "peers", "topics, fsync before the answer: 256 in flight", "Redis Streams"),
    ("Append to a topic, fsync before the answer, 64 in flight",
     "peers", "topics, fsync before the answer: 64 in flight", "Redis Streams"),
    ("Append to a topic, no fsync, 256 in flight",
     "peers", "topics, no fsync before the answer: 256 in flight", "Redis Streams"),
    ("Append to a topic, no fsync, 1 in flight",
     "peers", "topics, no fsync before the answer: 1 in flight", "Redis Streams"),
)  # fmt: skip

TITLES = {
    "peers": "Redis, NATS and RabbitMQ",
    "http": "HTTP",
    "queues_small": "Queues, one message at a time",
}
Row = dict[str, Any]


def write(results: dict[str, Any]) -> list[Path]:
    """The page and its pictures; what was written."""
    IMAGES.mkdir(exist_ok=True)
    (DOCS / "explanation").mkdir(exist_ok=True)
    for old in IMAGES.glob("bench-*.svg"):
        old.unlink()
    written = [DOCS / "explanation" / "benchmarks.md"]
    lines = [
        "# Benchmarks",
        "",
        "The latest run of each benchmark. Read the ratios first: rates depend on the machine, ratios",
        "much less. Penstock and its peer take turns in the same run, and the median of the rounds",
        "counts. A target that we did not reach is marked **missed**.",
        "",
        "The load, the broker and the peer share one machine. CPU per message is that of all processes",
        "of a server, without the load.",
        "",
        "Run `make bench` to measure everything, or `make bench B=queues` for one part. The results are",
        "in `bench/results.json`; `make bench ARGS=--markdown` generates this page from them.",
    ]
    for name, result in sorted(results.items(), key=lambda item: (item[0] != "peers", item[0])):
        lines += ["", f"## {TITLES.get(name, name.replace('_', ' ').capitalize())}", ""]
        caption = _caption(name, result)
        for picture in pictures(name, result):
            path = IMAGES / f"bench-{picture.slug}.svg"
            path.write_text(picture.draw(caption.replace("`", "")))
            written.append(path)
            lines += [f"![{picture.title}](../images/{path.name})", ""]
        lines += [*_table(result["figures"]), "", caption]
    written[0].write_text("\n".join(lines) + "\n")
    return written


def with_figures(text: str, results: dict[str, Any]) -> str:
    """Return a page with each block between `<!-- figures: name -->` and its end made again."""
    return BLOCK.sub(
        lambda match: "\n".join([match[1], *BLOCKS[match[2]](results), "", match[3]]), text
    )


def pages_with_figures() -> list[Path]:
    """Return the pages that have such a block."""
    pages = [README, *sorted((DOCS / "explanation").glob("*.md")), *(DOCS / "how-to").glob("*.md")]
    return [page for page in pages if BLOCK.search(page.read_text())]


def _chosen(results: dict[str, Any]) -> list[str]:
    rows = ["| What | Penstock | Compared with | Ratio | Target |", "|---|---|---|---|---|"]
    for label, name, row, against in CHOSEN:
        (figure,) = [
            one
            for one in results[name]["figures"]
            if one["name"] == row and one.get("against", "").startswith(against)
        ]
        theirs = f"{people(figure['against_value'], figure['unit'])}, {figure['against']}"
        ours = people(figure["value"], figure["unit"])
        rows.append(
            f"| {label} | {ours} | {theirs} | {times(figure['ratio'])} | {verdict(figure)} |"
        )
    return rows


def _queues_cost(results: dict[str, Any]) -> list[str]:
    result = results["queues_cost"]
    rows = ["| Load | CPU per message | of which, in µs | Compared with |", "|---|---|---|---|"]
    for figure in result["figures"]:
        if figure.get("against"):
            theirs = f"{people(figure['against_value'], figure['unit'])}, {figure['against']}"
            label = figure["name"].removeprefix("queues: CPU per message, ")
            ours = people(figure["value"], figure["unit"])
            rows.append(f"| {label} | {ours} | {figure['note']} | {theirs} |")
    return [*rows, "", _caption("queues_cost", result)]


def _sizing(results: dict[str, Any]) -> list[str]:
    result = results["sizing"]
    rows = ["| What | Measured | |", "|---|---|---|"]
    for figure in result["figures"]:
        label = figure["name"].removeprefix("sizing: ")
        measured = people(figure["value"], figure["unit"])
        rows.append(f"| {label} | {measured} | {figure.get('note', '')} |")
    return [*rows, "", _caption("sizing", result)]


BLOCKS = {"chosen": _chosen, "queues-cost": _queues_cost, "sizing": _sizing}


def _caption(name: str, result: Row) -> str:
    machine = result["machine"]
    text = (
        f"`make bench B={name}` on {result['at'][:10]}: {machine['cores']} cores, {machine['system']}, "
        f"Python {machine['python']}"
    )
    busy = result.get("busy")
    if busy is None:
        return text + "."
    state = "quiet" if busy <= BUSY else f"{busy:.0%} busy with other work"
    if result.get("realtime"):
        return f"{text}, at real-time priority (`ARGS=--realtime`); the machine was {state}."
    return f"{text}; the machine was {state}{'' if busy <= BUSY else ', so rates are too low'}."


def _table(figures: list[Row]) -> list[str]:
    with_cpu = any("ours_cpu_us" in figure.get("detail", {}) for figure in figures)
    head = ["what", "ours", "against", "theirs", "ratio"]
    head += [*(["CPU per message, ours / theirs"] if with_cpu else []), "target"]
    rows = [head, ["---"] * len(head)]
    for figure in figures:
        theirs, ratio = figure.get("against_value"), figure.get("ratio")
        row = [
            figure["name"],
            people(figure["value"], figure["unit"]),
            figure.get("against", ""),
            "" if theirs is None else people(theirs, figure["unit"]),
            "" if ratio is None else times(ratio),
        ]
        if with_cpu:
            detail = figure.get("detail", {})
            cost = [detail.get(f"{side}_cpu_us") for side in ("ours", "theirs")]
            row.append(" / ".join(number(each) for each in cost if each is not None))
            row[-1] += " µs" if row[-1] else ""
        rows.append([*row, verdict(figure)])
    return [f"| {' | '.join(row)} |" for row in rows]


def number(value: float) -> str:
    """As people write it: three digits that count, thousands apart."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    if value >= 1e6:
        return f"{number(value / 1e6)} million"
    text = f"{round(value, 2 - math.floor(math.log10(abs(value)))):,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def times(ratio: float) -> str:
    """Write a ratio so that it does not look like a target that it misses: 2.46x is not 2.5x."""
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2f}x"


def verdict(figure: Row) -> str:
    """Return the target and whether the recorded ratio, not the rounded one, met it."""
    met = {True: " met", False: " **missed**", None: ""}[figure.get("met")]
    return f"{figure.get('target') or ''}{met}"


def people(value: float, unit: str) -> str:
    if unit == "bytes/s":
        size, name = (1e9, "GB/s") if value >= 1e9 else (1e6, "MB/s")
        return f"{number(value / size)} {name}"
    if unit == "messages/s":
        return f"{number(value)}/s"
    return f"{number(value)} {unit}"


@dataclass(slots=True)
class Picture:
    title: str
    slug: str
    rows: list[Row]

    def draw(self, caption: str) -> str:
        height = HEAD + ROW * len(self.rows) + FOOT
        size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        title = f'role="img" aria-label="{escape(self.title)}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {title}>',
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
            _text(20, 28, self.title, "title"),
            f'<rect class="ours" x="{LEFT}" y="38" width="10" height="10"/>',
            _text(LEFT + 16, 47, "Penstock", "small"),
            f'<rect class="theirs" x="{LEFT + 90}" y="38" width="10" height="10"/>',
            _text(LEFT + 106, 47, "peer", "small"),
        ]
        if any(row["unit"] in LESS_IS_BETTER for row in self.rows):
            parts.append(_text(LEFT + 190, 47, "shorter is better", "small"))
        for place, row in enumerate(self.rows):
            parts += self._row(row, HEAD + 8 + ROW * place)
        parts += [_text(20, height - 14, caption, "small"), "</svg>"]
        return "\n".join(parts) + "\n"

    def _row(self, row: Row, top: int) -> list[str]:
        ours, theirs, unit = row["value"], row["against_value"], row["unit"]
        longest = max(ours, theirs) or 1.0
        label = row["name"].partition(": ")[2] if ": " in row["name"] else row["name"]
        mark = {True: "met", False: "missed", None: ""}[row.get("met")]
        ratio = times(row["ratio"]) + (f", {row['target']} {mark}" if mark else "")
        return [
            _text(20, top + 12, _short(label), ""),
            _text(20, top + 28, _short(row["against"]), "small"),
            _bar(top, BAR * ours / longest, "ours"),
            _bar(top + 17, BAR * theirs / longest, "theirs"),
            _text(LEFT + BAR * ours / longest + 6, top + 12, people(ours, unit), "small"),
            _text(LEFT + BAR * theirs / longest + 6, top + 29, people(theirs, unit), "small"),
            _text(WIDTH - 20, top + 20, ratio, mark, anchor="end"),
        ]


def pictures(name: str, result: Row) -> list[Picture]:
    """The rows that have a peer; those of `peers` by the part of their name before the colon."""
    groups: dict[str, list[Row]] = {}
    for row in result["figures"]:
        if row.get("ratio") is not None and row.get("against_value") and row.get("against"):
            part = row["name"].partition(": ")[0] if name == "peers" else ""
            groups.setdefault(part, []).append(row)
    return [
        Picture(
            (part or name.replace("_", " ")).capitalize(),
            re.sub(r"[^a-z0-9]+", "-", f"{name} {part}".lower()).strip("-"),
            rows,
        )
        for part, rows in groups.items()
    ]


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _bar(y: float, width: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{LEFT}" y="{y:.0f}" width="{width:.1f}" height="14"/>'


def _short(text: str, most: int = 50) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"
