"""`make bench`: runs the benchmarks, prints a table, writes bench/results.json.

make bench            all of them
make bench B=http     only bench/http.py
make bench ARGS="--rounds 9"
"""

import argparse
import fcntl
import importlib
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness import Figure, figures_of

HERE = Path(__file__).parent
SUPPORT = ("__init__", "__main__", "harness", "load")


def main() -> int:
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in SUPPORT)
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(names)} (default: all)")
    parser.add_argument(
        "--rounds", type=int, help="rounds per contest (default: each contest's own)"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the results of the last runs, run nothing"
    )
    arguments = parser.parse_args()
    if arguments.markdown:
        print(markdown(json.loads((HERE / "results.json").read_text())))
        return 0
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(names)}")

    console = Console()
    with (Path(tempfile.gettempdir()) / "penstock-bench.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two benchmarks at once would measure each other
        results = {name: run(name, arguments.rounds, console) for name in arguments.names or names}
    save(results)
    failed = [
        figure.name for figures in results.values() for figure in figures if figure.met is False
    ]
    if failed:
        console.print(f"[red]below target:[/red] {', '.join(failed)}")
    return 1 if failed else 0


def run(name: str, rounds: int | None, console: Console) -> list[Figure]:
    table = Table("what", "ours", "against", "theirs", "ratio", "spread", "target", title=name)
    found = []
    with console.status(f"{name} ..."):
        for figure in figures_of(importlib.import_module(f"bench.{name}"), rounds):
            found.append(figure)
            console.print(f"  {figure.name}: {figure.value:,.4g} {figure.unit}", highlight=False)
            mark = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}[figure.met]
            table.add_row(
                figure.name,
                f"{figure.value:,.4g} {figure.unit}",
                figure.against,
                "" if figure.against_value is None else f"{figure.against_value:,.4g}",
                "" if figure.ratio is None else f"{figure.ratio:.2f}x",
                "" if figure.spread is None else f"±{figure.spread / 2:.0%}",
                f"{figure.target} {mark}",
            )
    console.print(table)
    return found


def save(results: dict[str, list[Figure]]) -> None:
    """Replace the rows of what ran, keep the others: a partial run does not lose the rest of the
    table.
    """
    path = HERE / "results.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    machine = {
        "python": platform.python_version(),
        "system": platform.system(),
        "cores": os.cpu_count(),
    }
    for name, figures in results.items():
        kept[name] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": machine,
            "figures": [figure.as_json() for figure in figures],
        }
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "# Benchmarks",
        "",
        "The last runs of `make bench` (rows in `bench/results.json`), on a shared machine with 2 cores that also runs",
        "load and peers. Read the ratios: ours and theirs alternate in one run, and the median of the rounds counts.",
    ]
    for name, found in sorted(results.items()):
        lines += ["", f"## `make bench B={name}` ({found['at'][:10]})", ""]
        lines += [
            "| what | ours | against | theirs | ratio | target |",
            "|---|---|---|---|---|---|",
        ]
        for figure in found["figures"]:
            theirs = figure.get("against_value")
            ratio = figure.get("ratio")
            met = {True: " met", False: " **missed**", None: ""}[figure.get("met")]
            lines.append(
                f"| {figure['name']} | {figure['value']:,.4g} {figure['unit']} | {figure.get('against', '')} "
                f"| {'' if theirs is None else f'{theirs:,.4g}'} | {'' if ratio is None else f'{ratio:.2f}x'} "
                f"| {figure.get('target', '')}{met} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
