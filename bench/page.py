"""docs/explanation/benchmarks.md, from bench/results.json: ours beside theirs, misses included."""

import math
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
BUSY = 0.1  # a machine that was busier than this before a run was not quiet

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


def write(results: dict[str, Any]) -> Path:
    """Write the page and return its path."""
    (DOCS / "explanation").mkdir(exist_ok=True)
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
        lines += [*_table(result["figures"]), "", _caption(name, result)]
    written = DOCS / "explanation" / "benchmarks.md"
    written.write_text("\n".join(lines) + "\n")
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
