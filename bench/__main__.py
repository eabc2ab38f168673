"""`make bench`: runs the benchmarks, prints a table, writes bench/results.json and
docs/explanation/benchmarks.md.

make bench            all of them
make bench B=http     only bench/http.py
make bench ARGS="--rounds 9"
make bench ARGS=--realtime      before all other work of the machine (needs root); on a shared one
make bench ARGS=--markdown      only the page, from the last runs
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

from rich.console import Console
from rich.table import Table

from bench import page
from bench.harness import Figure, busy_share, figures_of

HERE = Path(__file__).parent
REALTIME = 20  # the priority of processes that go before all other work
SUPPORT = ("__init__", "__main__", "harness", "load", "page", "spark_topic")


def main() -> int:
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in SUPPORT)
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(names)} (default: all)")
    parser.add_argument(
        "--rounds", type=int, help="rounds per contest (default: each contest's own)"
    )
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="make docs/explanation/benchmarks.md from the last runs, run nothing",
    )
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="run load, servers and peers at real-time priority, so that other work on the "
        "machine takes no time from them",
    )
    arguments = parser.parse_args()
    if arguments.realtime:
        try:  # children inherit it
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REALTIME))
        except PermissionError:
            parser.error("--realtime needs root (or CAP_SYS_NICE)")
    if arguments.markdown:
        write_page()
        return 0
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(names)}")

    console = Console()
    with (Path(tempfile.gettempdir()) / "penstock-bench.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two benchmarks at once would measure each other
        results = {}
        for name in arguments.names or names:
            busy = busy_share()
            if busy > page.BUSY and not arguments.realtime:
                console.print(
                    f"[yellow]the machine is {busy:.0%} busy with other work:[/yellow] "
                    "read ratios and CPU per message, not rates"
                )
            results[name] = run(name, arguments.rounds, console)
            save(name, results[name], busy, realtime=arguments.realtime)
    write_page()
    failed = [
        figure.name for figures in results.values() for figure in figures if figure.met is False
    ]
    if failed:
        console.print(f"[red]below target:[/red] {', '.join(failed)}")
    return 1 if failed else 0


def run(name: str, rounds: int | None, console: Console) -> list[Figure]:
    table = Table("what", "ours", "against", "theirs", "ratio", "spread", "target", title=name)
    collected = []
    with console.status(f"{name} ..."):
        for figure in figures_of(importlib.import_module(f"bench.{name}"), rounds):
            collected.append(figure)
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
    return collected


def write_page() -> None:
    results = json.loads((HERE / "results.json").read_text())
    written = page.write(results)
    for path in page.pages_with_figures():
        path.write_text(page.with_figures(path.read_text(), results))
    print(written.relative_to(HERE.parent))


def save(name: str, figures: list[Figure], busy: float, *, realtime: bool) -> None:
    """Replace the rows of what ran, keep the others: a partial run does not lose the rest of the
    table.
    """
    path = HERE / "results.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[name] = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "busy": round(busy, 2),  # by other work, before the run
        "realtime": realtime,
        "machine": {
            "python": platform.python_version(),
            "system": platform.system(),
            "cores": os.cpu_count(),
        },
        "figures": [figure.as_json() for figure in figures],
    }
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
