"""What the broker knows of pipelines: they run elsewhere (on Spark), report here, and hear here
that they should stop.

A pipeline reports every few seconds. One that is silent for `LOST_AFTER_SECONDS` seconds without
having said that it ended is shown as `lost`. Reports live in memory; when a pipeline's state
changes all of them are written to one small file, so that a restarted broker still tells what
finished, what failed and why. With its report go a pipeline's last runs, and its last minutes: the
rows of each and how far behind it was, as it reported.
"""

import json
import logging
import time
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from penstock.errors import NotFound, PenstockError
from penstock.io.fs import DISK, Fs
from penstock.metrics import Metrics

log = logging.getLogger("penstock.pipeline_registry")

LOST_AFTER_SECONDS = 15.0
ENDED = ("finished", "failed")
MAX_PIPELINES = 1000
MAX_RUNS = 20  # of a pipeline that are remembered
MAX_MINUTES = 15  # of a pipeline that are remembered
GAUGES = {
    "lag": "Records or messages of the source that the pipeline has not processed yet",
    "lag_seconds": "Age of the oldest record or message that the pipeline has not processed yet",
    "target_lag_seconds": "Target that lag_seconds should stay below",
    "rows_per_second": "Rows per second of the last batch",
    "batch_seconds": "Duration of the last batch",
    "rows": "Rows that the pipeline has read since it started",
    "batch": "Number of the last batch",
    "state_rows": "Rows in the state of the stream: of aggregates, joins and deduplication",
    "state_bytes": "Memory of the state of the stream",
    "report_age_seconds": "Time since the last report of the pipeline",
}
RUN_FIELDS = ("state", "started_at", "rows", "batch", "error", "host")


class Pipelines:
    """The latest report of every pipeline. Lives on the event loop."""

    def __init__(
        self,
        directory: Path,
        metrics: Metrics | None = None,
        *,
        fs: Fs = DISK,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = directory / "pipelines.json"
        self._fs, self._clock = fs, clock
        self._reports: dict[str, dict[str, Any]] = {}
        self._stops: set[str] = set()
        if metrics is not None:
            self._measure(metrics)

    def _measure(self, metrics: Metrics) -> None:
        metrics.gauge(
            "penstock_pipeline_state",
            "1 for the current state of the pipeline",
            "pipeline",
            "state",
            read=lambda: {(one["name"], str(one["state"])): 1 for one in self.all()},
        )
        computed: dict[str, Callable[[dict[str, Any]], float | None]] = {
            "target_lag_seconds": lambda one: one.get("target_seconds"),
            "batch_seconds": lambda one: one.get("batch_ms", 0) / 1000,
            "report_age_seconds": lambda one: self._clock() - one["reported_at"],
        }
        for name in GAUGES:
            read = partial(self._values, computed.get(name) or methodcaller("get", name))
            metrics.gauge(f"penstock_pipeline_{name}", GAUGES[name], "pipeline", read=read)

    def _values(self, value: Callable[[dict[str, Any]], float | None]) -> dict[tuple[str], float]:
        """Of those that run: what has ended has no lag and no rate."""
        running = [one for one in self.all() if one["state"] not in ENDED]
        figures = ((one["name"], value(one)) for one in running)
        return {(name,): float(figure) for name, figure in figures if figure is not None}

    async def start(self) -> None:
        """Read what was reported before the broker's last stop."""
        try:
            reports = json.loads(self._fs.read(self._path))
        except FileNotFoundError:
            return
        except ValueError:
            log.warning(
                "%s is damaged: what pipelines reported before is forgotten", self._path.name
            )
            return
        self._reports = {str(name): dict(report) for name, report in reports.items()}

    async def stop(self) -> None:
        self._save()

    def put(self, name: str, report: dict[str, Any]) -> bool:
        """Take a report; whether the pipeline should stop."""
        before = self._reports.get(name, {})
        if name not in self._reports and len(self._reports) >= MAX_PIPELINES:
            del self._reports[min(self._reports, key=lambda one: self._reports[one]["reported_at"])]
        now = self._clock()
        runs = _runs(before.get("runs", []), report, now)
        facts = {"name": name, "reported_at": now, "runs": runs}
        self._reports[name] = {**report, **facts, "minutes": _minutes(before, report, now)}
        state = report.get("state")
        if state == "starting" or state in ENDED:
            self._stops.discard(name)
        if state != before.get("state") and state in ("starting", *ENDED):
            log.info("pipeline %s on %s: %s%s", name, report.get("host"), state, _because(report))
            self._save()
        return name in self._stops

    def all(self) -> list[dict[str, Any]]:
        return [self.get(name) for name in sorted(self._reports)]

    def get(self, name: str) -> dict[str, Any]:
        """One pipeline's latest report; NotFound when it never reported here."""
        report = self._reports.get(name)
        if report is None:
            raise NotFound(f"no pipeline {name!r} has reported here")
        silent = self._clock() - report["reported_at"]
        lost = report.get("state") not in ENDED and silent > LOST_AFTER_SECONDS
        state = "lost" if lost else report.get("state")
        stopping = name in self._stops
        return {"runs": [], "minutes": [], **report, "state": state, "stopping": stopping}

    def ask_to_stop(self, name: str) -> dict[str, Any]:
        """It hears of it with its next report."""
        self.get(name)
        self._stops.add(name)
        return self.get(name)

    def forget(self, name: str) -> None:
        self.get(name)
        del self._reports[name]
        self._stops.discard(name)
        self._save()

    def _save(self) -> None:
        try:
            self._fs.make_dir(self._path.parent)
            self._fs.replace(self._path, json.dumps(self._reports).encode(), sync=False)
        except PenstockError as error:
            # reports come again; the pipelines themselves do not depend on this
            log.warning("what pipelines reported could not be saved: %s", error)


def _runs(before: list[dict[str, Any]], report: dict[str, Any], now: float) -> list[dict[str, Any]]:
    """The last runs, the newest first, with what this report says of the one it is about."""
    run = {field: report.get(field) for field in RUN_FIELDS} | {"reported_at": now}
    same = bool(before) and before[0].get("started_at") == run["started_at"]
    return [run, *(before[1:] if same else before)][:MAX_RUNS]


def _minutes(before: dict[str, Any], report: dict[str, Any], now: float) -> list[dict[str, Any]]:
    """Rows and lag of the last minutes with a report. `rows` of reports are of the run so far."""
    same_run = before.get("started_at") == report.get("started_at")
    rows = max(0, report.get("rows", 0) - (before.get("rows", 0) if same_run else 0))
    minutes: list[dict[str, Any]] = list(before.get("minutes", []))
    this = now // 60 * 60
    if minutes and minutes[-1]["at"] == this:
        rows += minutes.pop()["rows"]
    return [*minutes, {"at": this, "rows": rows, "lag": report.get("lag")}][-MAX_MINUTES:]


def _because(report: dict[str, Any]) -> str:
    return f" ({report['error']})" if report.get("error") else ""
